"""Predictions under a budget: real exits inside a batch, decided by the policy, one answer for every sample."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from alight.data.batches import Batch, as_inputs, as_tensor, batches, in_batches, length_of
from alight.engine.graphs import quickened
from alight.engine.prefetch import ahead
from alight.engine.prepare import as_dtype, device_of, placed, prepared, threads
from alight.engine.segments import segments
from alight.engine.walk import Answers, Engine
from alight.errors import BadInput, Mismatch
from alight.networks.multi_exit import Carried, MultiExitModel
from alight.networks.store import fingerprint
from alight.outputs import Decisions
from alight.policies.policy import Memory, Policy

Integers = npt.NDArray[np.int64]


class Predictor:
    """A network and a policy, ready to answer.

    `predictor(images)` decides a batch, `predictor.run(loader)` a whole data set, and `predictor.stream(loader)` gives
    answers as they are ready. Images may be tensors, NumPy arrays or a list of pictures, and a data set or an array
    does for a loader: pictures and bytes are normalised as the network says. A sample is known by its index, in the
    order of coming unless `samples` says otherwise: ties and mixtures are decided by it.

    Switches for speed, all of which `tune_speed` tries: `dtype`, `channels_last`, `compile` (each part of the network),
    `graphs` (batches on a GPU are replayed as CUDA graphs), `rebatch` and `num_threads`.

    >>> from torch import nn
    >>> from alight.policies.policy import Threshold
    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> len(Predictor(model, Threshold(thresholds=(0.5,), costs=(1.0, 3.0)))(torch.zeros(5, 4)))
    5
    """

    def __init__(
        self,
        model: MultiExitModel,
        policy: Policy,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        channels_last: bool = False,
        compile: bool = False,  # noqa: A002  # torch's own word for it
        graphs: bool = False,
        batch_size: int = 256,
        rebatch: bool = True,
        probabilities: bool = False,
        num_threads: int | None = None,
        allow_mismatch: bool = False,
    ) -> None:
        _check(model, policy, batch_size, probabilities)
        self.batch_size, self.rebatch = batch_size, rebatch
        self._num_threads = num_threads
        self._spec = model.input_spec
        self._device, self._dtype, self._channels_last = device_of(model, device), as_dtype(dtype), channels_last
        ready = prepared(model, device=device, dtype=dtype, channels_last=channels_last)
        if not allow_mismatch:
            _check_fingerprint(policy, ready)
        parts = segments(ready, policy, with_chance=probabilities)
        runs = quickened(parts, self._device, compiling=compile, graphs=graphs, size=batch_size)
        self.engine = Engine(parts, policy, runs)
        self._admitted = 0  # samples of a stream whose policy remembers it

    def __repr__(self) -> str:
        kind = str(self._dtype or "").removeprefix("torch.")
        return f"Predictor({self.policy.method or type(self.policy).__name__}, {self._device}{kind and ', ' + kind})"

    @property
    def policy(self) -> Policy:
        """The policy that decides."""
        return self.engine.policy

    def with_policy(self, policy: Policy) -> "Predictor":
        """The same network, compiled code and all, under another policy that opens the same exits on such scores."""
        now = self.policy
        if (policy.open_exits, policy.inputs, policy.num_exits) != (now.open_exits, now.inputs, now.num_exits):
            raise Mismatch(
                f"the predictor opens exits {now.open_exits} and reads {', '.join(now.inputs)}, the policy"
                f" {policy.open_exits} and {', '.join(policy.inputs)}: make a new predictor for it"
            )
        if policy.fingerprint not in ("", now.fingerprint):
            raise Mismatch(f"the policy is for the network {policy.fingerprint}, this is {now.fingerprint}")
        other = copy.copy(self)
        other.engine = Engine(self.engine.segments, policy, self.engine.runs)
        other._admitted = 0
        return other

    @property
    def memory(self) -> Memory:
        """What the policy remembers of the batches so far, such as the pace of a stream; may be set."""
        return self.engine.memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self.engine.memory = memory
        self._admitted = getattr(memory[0], "admitted", 0) if memory else 0

    def __call__(self, inputs: Any, samples: npt.ArrayLike | None = None) -> Decisions:
        """What is decided about these inputs, as the network takes them, in their order."""
        carried = self.admit(inputs)
        size, total = self.batch_size, len(carried[0])
        if total == 1 and self.engine.walks_alone:
            return self._alone(carried, 0 if samples is None else _index(samples))
        parts = zip(*(torch.split(each, size) for each in carried), strict=True)
        return self._decided(parts, samples, joins=total > size)  # one batch has no other to wait for

    def run(self, loader: Any, *, samples: npt.ArrayLike | None = None, progress: bool = True) -> Decisions:
        """What is decided about everything that a loader gives, in its order, whatever the size of the data set."""
        loader = in_batches(loader, self._spec, self.batch_size)
        shown: dict[str, Any] = {
            "desc": "predict",
            "unit": "batch",
            "total": length_of(loader),
            "disable": not progress,
        }
        return self._decided(self._loaded(tqdm(batches(loader, self._spec, "the prediction"), **shown)), samples)

    def stream(self, loader: Any) -> Iterator[Answers]:
        """Answers as soon as they are ready: indices in the order of coming, classes, and exits as positions."""
        loader = in_batches(loader, self._spec, self.batch_size)
        yield from self._answers(self._loaded(batches(loader, self._spec, "the stream")), None)

    def place(self, carried: Carried, count: int) -> Carried:
        """So many inputs where the network runs, as it takes them: these again and again."""
        rows = torch.arange(count) % len(carried[0])
        return placed(tuple(each[rows] for each in carried), self._device, self._dtype, self._channels_last)

    def admit(self, inputs: Any) -> Carried:
        """The inputs as the network takes them, of one number of samples."""
        return tuple(map(as_tensor, as_inputs(inputs, self._spec)))

    def _loaded(self, loader: Iterable[Batch]) -> Iterator[Carried]:
        """A loader's batches, fetched ahead, in memory from which a GPU can copy while it works."""
        on_gpu = self._device.type == "cuda"

        def pinned() -> Iterator[Carried]:
            for batch in loader:
                carried = tuple(map(as_tensor, batch.inputs))
                yield tuple(each.pin_memory() if on_gpu and not each.is_cuda else each for each in carried)

        return ahead(pinned())

    def _alone(self, carried: Carried, sample: int) -> Decisions:
        """What is decided about one sample on its own, as quickly as may be."""
        entered = torch.is_inference_mode_enabled()  # by who gives many samples one by one
        try:
            with nullcontext() if entered else torch.inference_mode(), threads(self._num_threads):
                given = placed(carried, self._device, self._dtype, self._channels_last)
                prediction, open_index, chance = self.engine.alone(sample, given)
        except BaseException as error:
            _keep(error, [])
            raise
        policy, chances = self.policy, None if chance is None else np.array([chance])
        exits, spent = np.array([policy.open_exits[open_index]]), np.array([policy.costs[open_index]])
        return Decisions.unchecked(np.array([prediction]), exits, spent, policy.num_exits, chances)

    def _answers(
        self, given: Iterator[Carried], samples: Integers | None, joins: bool = True, hurry: bool = True
    ) -> Iterator[Answers]:
        def numbered() -> Iterator[tuple[Integers, Carried]]:
            start, before = 0, self._admitted
            for carried in given:
                stop = start + len(carried[0])
                indices = np.arange(before + start, before + stop) if samples is None else samples[start:stop]
                if len(indices) < stop - start:
                    raise BadInput(f"{len(indices) + start} indices for {stop} samples or more: give one for each")
                yield indices, placed(carried, self._device, self._dtype, self._channels_last)
                start = stop
                self._admitted = before + stop if self.policy.is_batch_dependent else 0

        with torch.inference_mode(), threads(self._num_threads):
            mixed = joins and self.rebatch and not self.policy.is_batch_dependent  # not those that decide as a whole
            yield from self.engine.flow(numbered(), self.batch_size if mixed else None, hurry=hurry)

    def _decided(self, given: Iterator[Carried], samples: npt.ArrayLike | None, *, joins: bool = True) -> Decisions:
        """All answers in the order of coming; when something goes wrong, the error keeps those that are finished."""
        indices = None if samples is None else _indices(samples)
        found: list[Answers] = []
        try:
            for answers in self._answers(given, indices, joins, hurry=False):
                found.append(answers)  # what is finished is kept when the next fails
        except BaseException as error:
            _keep(error, found)
            raise
        came = np.concatenate([each.samples for each in found])
        if indices is None:
            order = np.empty_like(came)
            order[came - came.min()] = np.arange(len(came))
        else:
            order = np.argsort(came, kind="stable")
            order = order[np.searchsorted(came, indices[: len(came)], sorter=order)]
        return self._table(found, order)

    def _table(self, found: list[Answers], order: Integers) -> Decisions:
        open_indices = np.concatenate([each.open_indices for each in found])[order]
        chances = [each.probabilities for each in found if each.probabilities is not None]
        return Decisions.unchecked(
            predictions=np.concatenate([each.predictions for each in found])[order],
            exits=np.asarray(self.policy.open_exits)[open_indices],
            spent=np.asarray(self.policy.costs)[open_indices],
            num_exits=self.policy.num_exits,
            probabilities=np.concatenate(chances)[order] if chances else None,
        )


def _keep(error: BaseException, found: list[Answers]) -> None:
    """Let an error hold what was finished before it."""
    error.finished = found  # type: ignore[attr-defined]
    answered = sum(len(each.samples) for each in found)
    error.add_note(f"{answered} samples were answered before: `finished` of this error has their answers.")


def _indices(samples: npt.ArrayLike) -> Integers:
    indices = np.asarray(samples)
    whole = indices.ndim == 1 and indices.dtype.kind in "iu"
    if not whole or (len(indices) > 1 and len(np.unique(indices)) != len(indices)):
        raise BadInput(f"samples of shape {indices.shape}: give one whole number per sample, each once")
    return indices.astype(np.int64)


def _index(samples: npt.ArrayLike) -> int:
    """The index of one sample alone; a list of one number is looked at without NumPy, which it would feel."""
    if isinstance(samples, list) and len(samples) == 1 and type(samples[0]) is int:
        return samples[0]
    return int(_indices(samples)[0])


def _check(model: MultiExitModel, policy: Policy, batch_size: int, probabilities: bool) -> None:
    if policy.num_exits != model.num_exits:
        raise Mismatch(
            f"the policy is for {policy.num_exits} exits and the network has {model.num_exits}:"
            " calibrate on outputs of this network"
        )
    if batch_size < 1:
        raise BadInput(f"batch size {batch_size}: give 1 or more")
    if probabilities and policy.lens:
        raise BadInput(
            f"through a lens ({type(policy.lens).__name__}) an answer need not be its exit's own, so it has no single"
            " probability: leave probabilities out"
        )


def _check_fingerprint(policy: Policy, model: MultiExitModel) -> None:
    own = fingerprint(model) if policy.fingerprint else ""
    if own != policy.fingerprint:
        raise Mismatch(
            f"the policy was calibrated on outputs of the network {policy.fingerprint} and this is {own}: weights,"
            " exits, dtype or preprocessing differ; record and calibrate again, or allow_mismatch=True"
        )
