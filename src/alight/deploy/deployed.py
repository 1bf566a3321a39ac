"""An exported network and its policy, ready to answer: the walk of a `Predictor`, on arrays."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from alight.data.batches import as_inputs, batches, fitted, in_batches, length_of
from alight.data.preprocess import first_unusable
from alight.deploy.told import told, told_of_one, unusable
from alight.errors import BadInput, Mismatch
from alight.export.manifest import Manifest
from alight.outputs import Decisions
from alight.policies.policy import BatchState, Memory, Policy
from alight.policies.route import route, visit

Integers = npt.NDArray[np.int64]
Carried = tuple[np.ndarray, ...]
Run = Callable[[Any, Any], tuple[np.ndarray, Any]]
# A stage: of what is carried, and of which of its rows (None is all), the logits and what is carried on.


class Deployed:
    """A network that was exported and a policy: `deployed(images)` decides a batch, `deployed.run(batches)` many.

    Inputs are arrays as the network takes them, bytes or pictures of images, which are normalised as the manifest says,
    or arrays by name for text. A sample is known by its index, in the order of coming unless `samples` says otherwise:
    ties and mixtures are decided by it. `alight.deploy.load` makes one from a folder; here a stage is a function.

    >>> from alight.data.spec import TensorSpec
    >>> from alight.export.manifest import Stage
    >>> from alight.policies.policy import ExitAt
    >>> numbers = TensorSpec("numbers", (None, 4), "float32")
    >>> manifest = Manifest("onnx", "", ("end",), (numbers,), (), (Stage("stage_0.onnx", "", 0, ()),), "")
    >>> deployed = Deployed([lambda carried, rows: (carried[0][:, :3], ())], ExitAt(costs=(1.0,)), manifest)
    >>> deployed(np.eye(4)).predictions
    array([0, 1, 2, 0])
    """

    def __init__(
        self,
        stages: Sequence[Run],
        policy: Policy,
        manifest: Manifest,
        *,
        batch_size: int = 256,
        probabilities: bool = False,
        allow_mismatch: bool = False,
    ) -> None:
        if batch_size < 1:
            raise BadInput(f"batch size {batch_size}: give 1 or more")
        self.manifest, self.batch_size, self.probabilities = manifest, batch_size, probabilities
        self._stages, self._allow_mismatch, self._spec = list(stages), allow_mismatch, manifest.input_spec
        self._take(policy)

    def _take(self, policy: Policy) -> None:
        _check(policy, self.manifest, self.probabilities, self._allow_mismatch)
        self._policy, self._admitted = policy, 0  # samples of a stream whose policy remembers it
        self._memory: Memory = ()
        self._exits, self._costs = np.array(policy.open_exits), np.array(policy.costs)
        last = len(policy.open_exits) - 1
        # the last exit takes everyone, unread, unless a lens reads it
        self._columns = [policy.inputs if place < last or policy.lens else () for place in range(last + 1)]

    def __repr__(self) -> str:
        policy = self.policy.method or type(self.policy).__name__
        return f"Deployed({policy}, {len(self._stages)} stages, {self.manifest.format})"

    @property
    def policy(self) -> Policy:
        """The policy that decides."""
        return self._policy

    def with_policy(self, policy: Policy) -> "Deployed":
        """The same stages under another policy that opens the same exits."""
        other = copy.copy(self)
        other._take(policy)
        return other

    @property
    def memory(self) -> Memory:
        """What the policy remembers of the batches so far, such as the pace of a stream; may be set."""
        return self._memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self._memory = memory
        self._admitted = getattr(memory[0], "admitted", 0) if memory else 0

    def __call__(self, inputs: Any, samples: npt.ArrayLike | None = None) -> Decisions:
        """What is decided about these inputs, as the network takes them, in their order."""
        carried = self._admit(inputs)
        size, total = self.batch_size, len(carried[0])
        if total == 1 and self.policy.lens is None and not self.policy.is_batch_dependent:
            return self._alone(carried, 0 if samples is None else int(_indices(samples)[0]))
        parts = (tuple(each[start : start + size] for each in carried) for start in range(0, total, size))
        return self._decided(parts, samples)

    def run(self, loader: Any, *, samples: npt.ArrayLike | None = None, progress: bool = True) -> Decisions:
        """What is decided about all batches, in their order; arrays and lists of samples do for batches, too."""
        loader = in_batches(loader, self._spec, self.batch_size)
        shown = tqdm(loader, desc="predict", unit="batch", total=length_of(loader), disable=not progress)
        found = batches(shown, self._spec, "the prediction")
        return self._decided((fitted(batch.inputs, self._spec) for batch in found), samples)

    def logits(self, inputs: Any) -> list[np.ndarray]:
        """Logits of every exit that was exported, earliest first, as if nobody left: what a recording is made of."""
        state: Any = self._admit(inputs)
        self._check_inputs(np.arange(len(state[0])), state)
        found = []
        for open_index in range(len(self._stages)):
            logits, state = self._run(open_index, state, None)
            found.append(logits)
        return found

    def _admit(self, inputs: Any) -> Carried:
        return fitted(as_inputs(inputs, self._spec), self._spec)

    def _decided(self, given: Iterable[Carried], samples: npt.ArrayLike | None) -> Decisions:
        indices = None if samples is None else _indices(samples)
        found = [self._walked(*numbered) for numbered in self._numbered(given, indices)]
        if not found:
            raise BadInput("there was no batch: give at least one sample")
        predictions, open_indices, *chances = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return self._table(predictions, open_indices, chances[0] if chances else None)

    def _numbered(self, given: Iterable[Carried], indices: Integers | None) -> Iterator[tuple[Integers, Carried]]:
        start, before = 0, self._admitted
        for carried in given:
            stop = start + len(carried[0])
            chosen = np.arange(before + start, before + stop) if indices is None else indices[start:stop]
            if len(chosen) < stop - start:
                raise BadInput(f"{len(chosen) + start} indices for {stop} samples or more: give one for each")
            yield chosen, carried
            start = stop
            self._admitted = before + stop if self.policy.is_batch_dependent else 0

    def _walked(self, samples: Integers, carried: Carried) -> tuple[np.ndarray, ...]:
        """Classes, positions among the open exits, and chances where they are wanted, of one batch in its order."""
        self._check_inputs(samples, carried)
        rows = np.arange(len(samples))  # of those who are still waiting
        open_indices, chances = np.empty_like(rows), np.empty(len(rows))
        state: Any = carried

        def read(exit_index: int, staying: Any) -> tuple[Any, tuple[Any, ...]]:
            nonlocal rows, state
            chosen = None if isinstance(staying, slice) or staying.all() else staying.nonzero()[0]
            rows = rows if chosen is None else rows[chosen]
            open_index = self.policy.open_exits.index(exit_index)
            logits, state = self._run(open_index, state, chosen)
            if len(wrong := unusable(logits)):
                raise self._useless(open_index, samples[rows[wrong]])
            head = told(logits, self._columns[open_index], self.probabilities)
            open_indices[rows] = open_index  # of those who leave here it is the last
            if head.chances is not None:
                chances[rows] = head.chances
            return head.predictions, head.columns or (head.predictions,)

        came, answers = self._route(samples, read)
        places = np.argsort(samples, kind="stable")
        predictions = np.empty_like(answers)
        predictions[places[np.searchsorted(samples, came, sorter=places)]] = answers
        return (predictions, open_indices, chances) if self.probabilities else (predictions, open_indices)

    def _route(self, samples: Integers, read: Any) -> tuple[Integers, Integers]:
        """Everyone's index and class in the order of leaving; what the policy remembers is kept."""
        left: list[Integers] = []
        answers: list[Integers] = []
        walk = route(self.policy, samples, read, self._memory)
        while True:
            try:
                _, leaving, predictions = next(walk)
            except StopIteration as end:
                self._memory = tuple(part for part in end.value if isinstance(part, BatchState))
                return np.concatenate(left), np.concatenate(answers)
            left.append(leaving)
            answers.append(predictions)

    def _alone(self, carried: Carried, sample: int) -> Decisions:
        """What is decided about one sample, walked in numbers, since arrays of one cost more than they do."""
        self._check_inputs((sample,), carried)
        state: Any = carried
        recalled: Any = ((), ())
        for open_index, columns in enumerate(self._columns):
            logits, state = self._run(open_index, state, None)
            head = told_of_one(logits, columns, self.probabilities)
            if head is None:
                raise self._useless(open_index, np.array([sample]))
            chance, read = head.chances, head.columns or (0.0,)
            leaving, prediction, recalled = visit(self.policy, open_index, sample, head.predictions, read, recalled)
            if leaving:
                break
        chances = None if chance is None else np.array([chance])
        return self._table(np.array([prediction]), np.array([open_index]), chances)

    def _run(self, open_index: int, state: Any, rows: Any) -> tuple[np.ndarray, Any]:
        try:
            return self._stages[open_index](state, rows)
        except BadInput:
            raise
        except Exception as error:
            error.add_note(f"This happened to {len(state[0])} samples between exits, in stage {open_index}.")
            raise

    def _table(self, predictions: np.ndarray, open_indices: Integers, chances: np.ndarray | None) -> Decisions:
        exits, spent = self._exits[open_indices], self._costs[open_indices]
        return Decisions.unchecked(predictions, exits, spent, self.policy.num_exits, chances)

    def _check_inputs(self, samples: Integers | Sequence[int], carried: Carried) -> None:
        if (row := first_unusable(carried)) is not None:
            raise BadInput(
                f"the input of index {samples[row]} holds NaN, infinity or a negative token: look for it there, since a"
                " network may answer it all the same"
            )

    def _useless(self, open_index: int, wrong: Integers) -> BadInput:
        return BadInput(
            f"the network gives no usable logits for {len(wrong)} samples, the first of index {wrong[0]}, at exit"
            f" {self.policy.open_exits[open_index]}: look for overflow, or for numbers out of range in these inputs"
        )


def _indices(samples: npt.ArrayLike) -> Integers:
    indices = np.asarray(samples)
    whole = indices.ndim == 1 and indices.dtype.kind in "iu"
    if not whole or (len(indices) > 1 and len(np.unique(indices)) != len(indices)):
        raise BadInput(f"samples of shape {indices.shape}: give one whole number per sample, each once")
    return indices.astype(np.int64)


def _check(policy: Policy, manifest: Manifest, probabilities: bool, allow_mismatch: bool) -> None:
    if (policy.open_exits, policy.num_exits) != (manifest.open_exits, len(manifest.exits)):
        raise Mismatch(
            f"the policy opens exits {policy.open_exits} of {policy.num_exits}, and exits {manifest.open_exits} of"
            f" {len(manifest.exits)} were exported: export the network with this policy"
        )
    if policy.fingerprint not in ("", manifest.fingerprint) and not allow_mismatch:
        raise Mismatch(
            f"the policy was calibrated on outputs of the network {policy.fingerprint} and this is"
            f" {manifest.fingerprint}: export that network, or allow_mismatch=True"
        )
    if probabilities and policy.lens:
        raise BadInput(
            f"through a lens ({type(policy.lens).__name__}) an answer need not be its exit's own, so it has no single"
            " probability: leave probabilities out"
        )
