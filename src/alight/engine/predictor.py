"""Predictions under a budget: real exits inside a batch, decided by the policy, one answer for every sample."""

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from alight.data.batches import MANY, Batch, as_inputs, batches, in_batches, length_of, prefetch, warn_of_pixels
from alight.data.preprocess import as_array
from alight.display import shape_text
from alight.engine.backends import Backend, Integers, Reads, State
from alight.engine.backends.cascade import Cascade
from alight.engine.backends.exported import exported_backend
from alight.engine.manifest import Manifest, verified
from alight.engine.settings import TORCH, RunSettings
from alight.engine.walk import Answers, Flow, one_answer, single, usable
from alight.errors import AlightError, BadFile, BadInput, Mismatch
from alight.files import CASCADE, CONFIG, MANIFEST, POLICY, PathLike
from alight.outputs import Decisions
from alight.policies import load_policy
from alight.policies.policy import Memory, Policy

BATCH_SIZE = 256

Numbered = tuple[Integers, State]  # sample numbers, and inputs as they came


class Predictor:
    """A network and a policy, ready to answer.

    `predictor(images)` decides a batch, `predictor.run(loader)` a whole data set, and `predictor.stream(loader)` yields
    answers when they are ready. A batch is tensors, arrays, pictures, texts or a DataFrame; a data set is these, with
    labels or without, a data set of torch or Hugging Face, a loader, or the path of files: pictures and bytes are
    normalised as the network says, floats are what it takes. Samples are numbered 0, 1, 2, ... over all
    calls, also of `with_policy` copies and from several threads, unless `samples` gives their numbers: ties and
    mixtures are decided by them, so that it does not matter how samples are divided into calls.

    The network is a `MultiExitModel`, which PyTorch runs as `settings` say, or any `Backend`; `Predictor.load` makes
    one from an exported folder, which needs no PyTorch.

    Args:
        network: A `MultiExitModel`, which PyTorch runs, a `cascade`, or any backend.
        policy: Decides where samples leave.
        settings: Device, dtype, threads, ...; None: as the network is.
        batch_size: Of what is not a loader.
        rebatch: Fill batches of later stages with survivors of several batches.
        probabilities: Answer with the probability of the chosen class, too.
        allow_mismatch: Take the policy of another network.

    >>> import torch
    >>> from torch import nn
    >>> from alight import MultiExitModel, Threshold
    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> len(Predictor(model, Threshold(thresholds=(0.5,), costs=(1.0, 3.0)))(torch.zeros(5, 4)))
    5
    """

    def __init__(
        self,
        network: Any,
        policy: Policy,
        *,
        settings: RunSettings | None = None,
        batch_size: int = BATCH_SIZE,
        rebatch: bool = True,
        probabilities: bool = False,
        allow_mismatch: bool = False,
    ) -> None:
        if batch_size < 1:
            raise BadInput(f"batch size {batch_size}: give 1 or more")
        if isinstance(network, Policy):
            raise BadInput("the arguments are in another order: write Predictor(network, policy)")
        if not isinstance(policy, Policy):
            raise BadInput(f"a {type(policy).__name__} is not a policy: give one that a method or load_policy returns")
        self.batch_size, self.rebatch, self.probabilities = batch_size, rebatch, probabilities
        self._allow_mismatch, self._numbering = allow_mismatch, Numbering()
        self._other_sizes: set[Any] = set()  # that were warned of, each once
        if isinstance(network, Cascade):
            network = network.backend(policy.open_exits, settings, batch_size)
        elif not hasattr(network, "with_reads"):
            if settings is not None and settings.runtime not in (None, TORCH):
                raise BadInput(f"{settings.runtime} runs exported networks: export it, and load the folder")
            from alight.engine.backends.torch import TorchBackend  # PyTorch is imported where it runs

            network = TorchBackend(network, policy.open_exits, settings, batch_size)
        elif settings is not None:
            raise BadInput("the backend has its own settings: give them where it is made")
        self._take(network, policy)

    @classmethod
    def load(
        cls,
        folder: PathLike,
        policy: Policy | None = None,
        *,
        settings: RunSettings | None = None,
        batch_size: int = BATCH_SIZE,
        rebatch: bool = True,
        probabilities: bool = False,
        allow_mismatch: bool = False,
        allow_compiled: bool = False,
    ) -> "Predictor":
        """Return the predictor of a folder that `alight export` or `fit` wrote, under its own policy or another one.

        ONNX stages run without PyTorch, by ONNX Runtime or OpenVINO (`RunSettings(runtime=..., providers=...)`). Every
        file is compared with the manifest's SHA-256, and what the stages compute with what they did when they were
        exported. Stages that torch compiled ahead of time hold machine code: `allow_compiled=True` says that you trust
        who compiled them. Of `settings` only `threads`, `runtime` and `providers` apply then. PyTorch runs a saved
        model: `fit` writes its policy beside it, for another give one.
        """
        folder, settings = Path(folder), settings or RunSettings()
        options: dict[str, Any] = {"batch_size": batch_size, "rebatch": rebatch, "probabilities": probabilities}
        options["allow_mismatch"] = allow_mismatch
        if not (folder / MANIFEST).is_file() and any((folder / name).is_file() for name in (CASCADE, CONFIG)):
            if policy is None and not (folder / POLICY).is_file():
                remedy = "give one: Predictor.load(folder, policy)"
                raise BadFile(folder, "it is a saved model without a policy", remedy)
            policy = load_policy(folder / POLICY) if policy is None else policy
            return Predictor(load_network(folder), policy, settings=settings, **options)
        manifest = Manifest.load(folder)
        if policy is None:
            verified(folder, POLICY, manifest.policy_checksum)
            policy = load_policy(folder / POLICY)
        terms: dict[str, Any] = {"allow_mismatch": allow_mismatch, "allow_compiled": allow_compiled}
        backend = exported_backend(folder, manifest, settings, batch_size=batch_size, **terms)
        return Predictor(backend, policy, **options)

    def _take(self, backend: Backend, policy: Policy) -> None:
        """Use the policy, if it is one for these stages."""
        check_exits(policy, len(backend.exits))
        if policy.reads_costs:
            raise BadInput(
                "the policy counts what every call really costs, and the stages of a network cost the same for every"
                " sample: give it to alight.Router, or calibrate a contract without max_costs"
            )
        if policy.open_exits != backend.open_exits:
            raise Mismatch(
                f"the policy opens exits {policy.open_exits} and these stages end at exits {backend.open_exits}: make a"
                " new predictor for it, or export the network with this policy"
            )
        if policy.fingerprint and not self._allow_mismatch:
            check_fingerprint(policy, backend.fingerprint)
        if self.probabilities and not policy.keeps_answers:
            raise BadInput(
                "the policy combines the answers of exits, so that an answer need not be its exit's own and has no"
                " single probability: leave probabilities out"
            )
        reads = map(policy.reads, range(len(policy.open_exits)))
        self.backend = backend.with_reads([Reads(scores, self.probabilities, top) for scores, top in reads])
        if hasattr(self.backend, "expect"):
            self.backend.expect(policy.leaving_scores())
        self.policy = policy
        self._exit_names = tuple(backend.exits)
        self._one_by_one = self.backend.supports_single_sample and policy.takes_single_samples
        self._deciding: Any = getattr(self.backend, "deciding", None)  # where the device may decide
        self._memory: Memory = ()
        self._has_seen_inputs = False

    def __repr__(self) -> str:
        policy = self.policy.method or type(self.policy).__name__
        return f"Predictor({policy}, {len(self.policy.open_exits)} stages, {self.backend.name})"

    if not TYPE_CHECKING:  # or every misspelt name would pass for an attribute

        def __getattr__(self, name: str) -> Any:
            where = ": `alight report FOLDER` draws what `fit` wrote there" if name in ("report", "summary") else ""
            raise AttributeError(f"a {type(self).__name__} has no {name!r}{where}")

    def with_policy(self, policy: Policy) -> "Predictor":
        """Return the same network, compiled code and all, under another policy that opens the same exits.

        Under an equal policy it continues from what this one remembers, as of a stream; under another it begins anew.
        """
        other = copy.copy(self)
        other._take(self.backend, policy)
        if policy == self.policy:
            other._memory = self._memory
        return other

    @property
    def memory(self) -> Memory:
        """What the policy remembers of the batches so far, such as the pace of a stream; may be set.

        Samples that a restored stream has admitted are not numbered again.
        """
        return self._memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self._memory = memory
        self._numbering.skip_to(getattr(memory[0], "admitted", 0) if memory else 0)

    @property
    def _rebatches(self) -> bool:
        return self.rebatch and not self.policy.is_batch_dependent

    @property
    def decided_by(self) -> str:
        """Who decides about samples, the host or the device that runs the network, and why."""
        return str(self._deciding or "the host decides")

    @property
    def next_number(self) -> int:
        """The number of the next sample that comes without one."""
        return self._numbering.next

    def __call__(self, inputs: Any, samples: npt.ArrayLike | None = None) -> Decisions:
        """Return the decisions about these inputs, in their order."""
        arrays = as_inputs(inputs, self.backend.inputs)
        if not self._has_seen_inputs:
            self._has_seen_inputs = True
            warn_of_pixels(arrays, self.backend.inputs)
        size, total = self.batch_size, arrays[0].shape[0]  # faster than len of a tensor
        if total == 1 and (self._one_by_one or self._deciding):
            sample = self._numbering.take(1) if samples is None else _number(samples)
            if (found := self._single(arrays, sample)) is not None:
                prediction, stage, top = found
                exits, spent = np.array([self.policy.open_exits[stage]]), np.array([self.policy.costs[stage]])
                classes, names, unit = np.array([prediction]), self._exit_names, self.policy.unit
                probabilities = None if top is None else np.array([top])
                return Decisions.unchecked(classes, exits, spent, names, unit, probabilities=probabilities)
            samples = [sample]
        joins = total > size  # one batch has no other to wait for
        step = size * self._deciding.window if self._deciding and joins and self._rebatches else size
        parts = (tuple(each[start : start + step] for each in arrays) for start in range(0, total, step))
        return self._decided(parts, samples, joins=joins)

    def run(self, loader: Any, *, samples: npt.ArrayLike | None = None, progress: bool = True) -> Decisions:
        """Return the decisions about everything that a loader gives, in its order, whatever its size."""
        loader = in_batches(loader, self.backend.inputs, self.batch_size)
        count = length_of(loader)
        loaded = batches(loader, self.backend.inputs, "the prediction")
        labels: list[Any] = []
        shown = tqdm(loaded, "predict", total=count, unit="batch", disable=not progress)
        return self._decided(prefetch(self._pinned(shown, labels)), samples, joins=count != 1, labels=labels)

    def stream(self, loader: Any) -> Iterator[Answers]:
        """Yield answers as soon as they are ready: sample numbers, classes and open-exit indices."""
        loader = in_batches(loader, self.backend.inputs, self.batch_size)
        yield from self._answers(prefetch(self._pinned(batches(loader, self.backend.inputs, "the stream"), [])), None)

    def answers(self, inputs: Any, samples: npt.ArrayLike | None = None) -> Iterator[Answers]:
        """Yield the answers about one batch as its samples leave, before later stages run for the others."""
        arrays = as_inputs(inputs, self.backend.inputs)
        if arrays[0].shape[0] == 1 and (self._one_by_one or self._deciding):
            sample = self._numbering.take(1) if samples is None else _number(samples)
            if (found := self._single(arrays, sample)) is not None:
                yield one_answer(sample, *found)
                return
            samples = [sample]
        numbers = None if samples is None else _numbers(samples)
        yield from self._answers([arrays], numbers, joins=False)

    def place(self, inputs: Any, count: int) -> State:
        """Return `count` inputs where the stages run: the given ones, repeated."""
        state = self.backend.admit(as_inputs(inputs, self.backend.inputs))
        return self.backend.take(state, np.arange(count) % len(state[0]))

    def _pinned(self, loaded: Iterable[Batch], labels: list[Any]) -> Iterator[State]:
        """Yield inputs in memory from which a device copies while it works; `labels` gets those of each batch."""
        for batch in loaded:
            labels.append(batch.labels)
            yield self.backend.pin(batch.inputs)

    def _single(self, inputs: State, sample: int) -> tuple[int, int, float | None] | None:
        """Return class, open-exit index and probability of a single sample, as quickly as possible.

        None where it is decided like a batch.
        """
        if (size := self.policy.sample_shape) and inputs[0].shape[1:] != size:
            self._warn_of_size(inputs[0].shape[1:])
        try:
            with self.backend.running():
                if self._deciding is not None:
                    return self._single_on_device(inputs, sample)
                return single(self.backend, self.policy, sample, self.backend.admit(inputs))
        except BaseException as error:
            _keep(error, [], sample)
            raise

    def _single_on_device(self, inputs: State, sample: int) -> tuple[int, int, float | None] | None:
        """Return class, open-exit index and probability of one sample; None where the device does not decide."""
        found: tuple[int, int, float | None] | None = self._deciding.one_sample(self.policy, sample, inputs)
        if found is None:
            host = partial(self._by_host, size=None, low_latency=True)
            answers = self._deciding.one_batch(self.policy, (np.array([sample]), inputs), host)
            if answers is None:
                return None
            top = None if answers.probabilities is None else float(answers.probabilities[0])
            found = int(answers.predictions[0]), int(answers.open_indices[0]), top
        if found[1] < 0:
            [*usable(self.policy, [one_answer(sample, *found)])]  # raises
        return found

    def _answers(
        self, inputs: Iterable[State], samples: Integers | None, joins: bool = True, low_latency: bool = True
    ) -> Iterator[Answers]:
        size = self.batch_size if joins and self._rebatches else None
        numbered, host = self._numbered(inputs, samples), partial(self._by_host, size=size, low_latency=low_latency)
        if self._deciding is None:
            found = host(numbered)
        else:
            found = usable(self.policy, self._deciding.answers(self.policy, numbered, size, host))
        while True:
            with self.backend.running():  # not while the caller does something else
                answers = next(found, None)
            if answers is None:
                return
            yield answers

    def _by_host(self, batches: Iterable[Numbered], *, size: int | None, low_latency: bool) -> Iterator[Answers]:
        """Yield the answers of numbered inputs as the host decides, and keep what the policy remembers of them."""
        batches = _in_single_batches(batches, size) if self._deciding and size else batches
        admitted = ((numbers, self.backend.admit(arrays)) for numbers, arrays in batches)
        flow = Flow(self.backend, self.policy, admitted, size, memory=self._memory, low_latency=low_latency)
        for answers in flow.answers():
            self._memory = flow.memory
            yield answers

    def _numbered(self, inputs: Iterable[State], samples: Integers | None) -> Iterator[Numbered]:
        """Yield sample numbers and inputs of every batch."""
        start = 0
        for arrays in inputs:
            if (size := self.policy.sample_shape) and arrays[0].shape[1:] != size:
                self._warn_of_size(arrays[0].shape[1:])
            stop = start + len(arrays[0])
            if samples is None:
                numbers = self._numbering.take(stop - start) + np.arange(stop - start)
            elif len(numbers := samples[start:stop]) < stop - start:
                raise BadInput(f"{len(numbers) + start} sample numbers for {stop} samples or more: give one for each")
            yield numbers, arrays
            start = stop

    def _warn_of_size(self, shape: Sequence[int]) -> None:
        """Warn once that samples have another size than those on which the policy was calibrated."""
        met = (shape, self.policy.sample_shape)
        if met in self._other_sizes or len(self._other_sizes) == MANY:
            return
        self._other_sizes.add(met)
        warnings.warn(
            f"samples of {shape_text(shape)}, and the policy was calibrated on samples of"
            f" {shape_text(self.policy.sample_shape)}: costs, budget and guarantees are of that size; measure costs,"
            " record and calibrate at the size that is to be predicted",
            stacklevel=3,
        )

    def _decided(
        self, inputs: Iterable[State], samples: npt.ArrayLike | None, *, joins: bool, labels: Sequence[Any] = ()
    ) -> Decisions:
        """Return all answers in the order of coming; when something fails, the error keeps those that are finished."""
        numbers = None if samples is None else _numbers(samples)
        found: list[Answers] = []
        first = self._numbering.next if numbers is None else None
        try:
            for answers in self._answers(inputs, numbers, joins, low_latency=False):
                found.append(answers)  # what is finished is kept when the next fails
        except BaseException as error:
            _keep(error, found, first)
            raise
        *columns, of_class = zip(*found, strict=True)
        came, predictions, open_indices = map(np.concatenate, columns)
        if numbers is not None and len(numbers) > len(came):
            raise BadInput(f"{len(numbers)} sample numbers for {len(came)} samples: give one for each")
        order, first_came = np.zeros(len(came), np.int64), int(came.min())
        if int(came.max()) - first_came + 1 == len(came):  # without gaps: quicker than sorting
            order[came - first_came] = np.arange(len(came))
        else:
            order = np.argsort(came, kind="stable")
        if (came[order[1:]] == came[order[:-1]]).any():
            raise AlightError("a sample was answered twice: report what network and policy it was")
        if numbers is not None:
            order = order[np.searchsorted(came, numbers[: len(came)], sorter=order)]
        return Decisions.unchecked(
            predictions=predictions[order],
            exits=np.asarray(self.policy.open_exits)[open_indices[order]],
            spent=np.asarray(self.policy.costs)[open_indices[order]],
            exit_names=self._exit_names,
            unit=self.policy.unit,
            probabilities=None if of_class[0] is None else np.concatenate(of_class)[order],
            labels=known_labels(labels, len(came), self.backend.inputs.num_classes),
        )


def load_network(folder: PathLike) -> Any:
    """Return the network of a folder: a cascade, whose networks need not be of torch, or a `MultiExitModel`."""
    if (Path(folder) / CASCADE).is_file():
        return Cascade.load(folder)
    from alight.networks.store import load_model  # PyTorch is imported where it runs

    model = load_model(folder)
    if model.is_untrained("heads"):
        warnings.warn(
            f"the heads in {folder} are not trained, so early answers are guesses: `alight fit {folder} TRAIN"
            f" VALIDATION` or `alight train {folder} DATA` trains them",
            stacklevel=2,
        )
    return model


class Numbering:
    """Numbers for samples that come without one: 0, 1, 2, ... once each, over all calls and threads.

    >>> numbering = Numbering()
    >>> numbering.take(2), numbering.take(3), numbering.take(1)
    (0, 2, 5)
    """

    def __init__(self) -> None:
        self.next, self._lock = 0, Lock()

    def take(self, count: int) -> int:
        """Return the first of so many numbers that follow each other; no one else gets them."""
        with self._lock:
            first, self.next = self.next, self.next + count
        return first

    def skip_to(self, number: int) -> None:
        """Let the next number be at least this one."""
        with self._lock:
            self.next = max(self.next, number)


def known_labels(labels: Sequence[Any], count: int, num_classes: int | None) -> Integers | None:
    """Return the labels of all batches; None where some have none, or shares or classes that the network lacks.

    A label of -1 is none, where all are: some data sets have it in their test part.
    """
    if not labels or any(each is None for each in labels):
        return None
    joined: Integers = np.concatenate([as_array(each) for each in labels])
    if joined.ndim == 2:
        if not ((joined == 0) | (joined == 1)).all():
            return None
        joined = joined.argmax(1)
    low, high = int(joined.min()), int(joined.max())
    if high >= (num_classes or math.inf) or low < 0 <= high:
        classes = f", and the network has {num_classes} classes, 0 to {num_classes - 1}" if num_classes else ""
        warnings.warn(
            f"labels run from {low} to {high}{classes}: the labels are left out, and no accuracy is computed; number"
            " the classes as the network does, from 0",
            stacklevel=4,
        )
        return None
    return joined if len(joined) == count and low >= 0 else None


def check_exits(policy: Policy, exits: int) -> None:
    """Check that the policy is for a network with so many exits."""
    if policy.num_exits != exits:
        raise Mismatch(
            f"the policy is for {policy.num_exits} exits and the network has {exits}: calibrate on outputs of this"
            " network"
        )


def check_fingerprint(policy: Policy, own: str) -> None:
    """Check that the policy was calibrated on outputs of the network with this fingerprint, if it says on which."""
    if policy.fingerprint not in ("", own):
        raise Mismatch(
            f"the policy was calibrated on outputs of the network {policy.fingerprint} and this is {own}: weights,"
            " exits, dtype or preprocessing differ; record and calibrate again, or allow_mismatch=True"
            " (--allow-mismatch)"
        )


def _keep(error: BaseException, found: list[Answers], first: int | None) -> None:
    """Let an error hold what was finished before it, and say from which number on this call's samples count."""
    error.finished = found  # type: ignore[attr-defined]
    answered = sum(len(each.samples) for each in found)
    since = f" This call's samples are numbered from {first}." if first else ""
    error.add_note(f"{answered} samples were answered before: `finished` of this error has their answers.{since}")


def _numbers(samples: npt.ArrayLike) -> Integers:
    numbers = np.asarray(samples)
    whole = numbers.ndim == 1 and numbers.dtype.kind in "iu"
    rising = whole and bool((numbers[1:] > numbers[:-1]).all())  # which is quicker to see than that all differ
    if not whole or (not rising and len(np.unique(numbers)) != len(numbers)):
        raise BadInput(f"samples of shape {numbers.shape}: give one whole number per sample, each once")
    return numbers.astype(np.int64)


def _in_single_batches(batches: Iterable[Numbered], size: int) -> Iterator[Numbered]:
    """Yield numbered inputs that came for several batches at once, at most so many samples at a time."""
    for numbers, arrays in batches:
        for start in range(0, len(numbers), size):
            yield numbers[start : start + size], tuple(each[start : start + size] for each in arrays)


def _number(samples: npt.ArrayLike) -> int:
    """Return the number of a single sample; a list of one number is read without NumPy, which would take longer."""
    if isinstance(samples, list) and len(samples) == 1 and type(samples[0]) is int:
        return samples[0]
    if len(numbers := _numbers(samples)) != 1:
        raise BadInput(f"{len(numbers)} sample numbers for 1 sample: give one")
    return int(numbers[0])
