"""Samples flow through stages, leave where the policy says, and wait until a full batch is there.

The state stays where the backend has it; head values come to the host as one small array per stage and batch, where
the same NumPy code decides that replays a recording. While one such array is on its way, the next batch is running.

Samples that leave a batch leave free rows in its arrays. Waiting samples are moved into them, or the other way round,
whichever moves fewer: never more than leave, and nothing of a batch that nobody leaves. In the end, when no batch will
be full any more, the waiting samples are compacted into partial batches.
"""

import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from alight.engine.backends import Backend, DeviceValues, HeadValues, Integers, State
from alight.errors import BadInput
from alight.policies.policy import BatchState, Memory, Policy
from alight.policies.route import Recalled, joined, kept, visit

LATE = 32  # batches whose last values are fetched together, where nothing waits for them
LATE_BYTES = 2**25  # of their values at most, and one batch more


class Answers(NamedTuple):
    """The answers of some samples: numbers, classes, indices among the open exits, probabilities of the classes."""

    samples: Integers
    predictions: Integers
    open_indices: Integers
    probabilities: npt.NDArray[np.float64] | None


class Group(NamedTuple):
    """Samples that run together: their numbers, what the policy remembers of them, and their state."""

    samples: Integers
    recalled: Recalled
    state: State
    own: bool = False  # may the state be written to?


class Launched(NamedTuple):
    """A group that a stage has run, and its head values, perhaps still on their way."""

    stage: int
    group: Group
    values: HeadValues | DeviceValues


def single(backend: Backend, policy: Policy, sample: int, state: State) -> tuple[int, int, float | None]:
    """Return class, open-exit index and probability of one sample, walked in numbers: arrays of one cost more."""
    if backend.first_unusable(state) is not None:
        _refuse_input(sample)
    recalled: Any = ((), ())
    for stage in range(len(policy.open_exits)):
        try:
            values, state = backend.run_one(stage, state)
        except Exception as error:
            _note(error, stage, 1)
            raise
        if not math.isfinite(values.largest):
            _refuse(policy, stage, np.array([sample]))
        columns = values.columns or (values.largest,)
        leaving, prediction, recalled = visit(policy, stage, sample, values.predictions, columns, recalled)
        if leaving:
            break
    return prediction, stage, values.probabilities


def one_answer(sample: int, prediction: int, stage: int, top: float | None) -> Answers:
    """Return the answer of one sample as arrays."""
    probabilities = None if top is None else np.array([top])
    return Answers(np.array([sample]), np.array([prediction]), np.array([stage]), probabilities)


class Flow:
    """One run of many batches, of sample numbers and admitted inputs, through the stages of a backend.

    With a batch size survivors wait until a batch of that size is full. While samples come in, the deepest full batch
    runs first, so that few wait. Then the first one that no sample can join any more, full or not: so partial batches
    run beside full ones, not one after the other at the very end. Without a batch size every batch is walked to its
    end. Without `low_latency` the values of the last exit, on which nothing depends, are fetched from a device for many
    batches at once.
    """

    def __init__(
        self,
        backend: Backend,
        policy: Policy,
        batches: Iterable[tuple[Integers, State]],
        batch_size: int | None,
        *,
        memory: Memory = (),
        low_latency: bool = True,
    ) -> None:
        self.backend, self.policy, self.batch_size = backend, policy, batch_size
        self.memory = memory  # what the policy remembers of earlier batches
        self.fresh = (Group(samples, (self.memory, ()), state) for samples, state in batches)
        self.ends = False  # whether no more samples come
        stages = len(policy.open_exits)
        self.pools = [Pool(batch_size, backend) for _ in range(stages)]  # the first stays empty
        self.full: list[deque[Group]] = [deque() for _ in range(stages)]  # by the stage that they wait for
        alone = backend.supports_single_sample and policy.takes_single_samples
        self.one_by_one = alone and batch_size in (None, 1)
        late = not low_latency and backend.in_flight and not policy.is_batch_dependent
        self.late_stage = stages - 1 if late else None
        self.late: list[Launched] = []
        self.awaited: deque[Launched] = deque()

    def answers(self) -> Iterator[Answers]:
        """Yield answers when they are ready; before an error is raised, those that have run to the end."""
        try:
            yield from self._walk()
        except GeneratorExit:
            raise
        except BaseException:
            rescued: list[Answers] = []
            with suppress(Exception):  # of a device that is lost, or of unusable logits: the first error is raised
                rescued = [*self._fetch_late()]
            yield from rescued
            raise

    def _walk(self) -> Iterator[Answers]:
        while (step := self._next()) is not None or self.awaited:
            if step is not None and step[0] == 0 and self.one_by_one and len(step[1].samples) == 1:
                sample = int(step[1].samples[0])
                yield one_answer(sample, *single(self.backend, self.policy, sample, step[1].state))
                continue
            if step is not None:
                self._launch(*step)
            elif self.backend.in_flight:
                for pool in self.pools:
                    pool.compact()  # the device does it while the host decides
            yield from self._fetch_late(once_many=True)
            if self.awaited and (step is None or len(self.awaited) > self.backend.in_flight):
                step = None  # lets go of its state
                if (answers := self._settle(self.awaited.popleft())) is not None:
                    yield answers
        yield from self._fetch_late()

    def _next(self) -> tuple[int, Group] | None:
        """Return the stage and the batch to run next; None if there is none before an awaited one is settled."""
        stages = range(len(self.pools))
        if not self.ends:
            for stage in reversed(stages):
                if self.full[stage]:
                    return stage, self.full[stage].popleft()
            if self.batch_size is None and self.awaited:  # every batch is walked to its end before the next
                return None
            if (batch := next(self.fresh, None)) is not None:
                return 0, batch
            self.ends = True
        complete = min((each.stage for each in self.awaited), default=len(stages))  # no sample will join up to it
        for stage in stages:
            if self.full[stage]:
                return stage, self.full[stage].popleft()
            if stage <= complete and (rest := self.pools[stage].rest()) is not None:
                return stage, rest
        return None

    def _launch(self, stage: int, group: Group) -> None:
        """Run one stage for a group."""
        if stage == 0 and (row := self.backend.first_unusable(group.state)) is not None:
            _refuse_input(group.samples[row])
        try:
            values, state = self.backend.run(stage, group.state)
        except Exception as error:
            _note(error, stage, len(group.samples))
            raise
        rebatches = self.batch_size is not None and bool(state)
        own = rebatches and self.backend.owns(state, () if group.own else group.state)
        launched = Launched(stage, Group(group.samples, group.recalled, state, own), values)
        if stage == self.late_stage:
            self.late.append(launched)
            return
        if not isinstance(values, HeadValues):
            values.send()
        self.awaited.append(launched)

    def _settle(self, launched: Launched) -> Answers | None:
        """Return the answers of the samples that leave, None if none does; survivors wait for the next stage."""
        stage, group, values = launched
        if not isinstance(values, HeadValues):
            values = values.get()  # the only wait for this stage and batch
        if not math.isfinite(values.largest.sum()):  # quick, and nearly never
            _refuse(self.policy, stage, group.samples[~np.isfinite(values.largest)])
        columns = values.columns or (values.largest,)
        leaving, predictions, recalled = visit(
            self.policy, stage, group.samples, values.predictions, columns, group.recalled
        )
        gone = leaving.nonzero()[0]
        if len(gone) < len(leaving):
            staying = (~leaving).nonzero()[0] if len(gone) else None  # None is all
            self.full[stage + 1].extend(self.pools[stage + 1].add(group._replace(recalled=recalled), staying))
        else:
            self.memory = tuple(part for part in recalled[0] if isinstance(part, BatchState))
        if not len(gone):
            return None
        top = None if values.probabilities is None else values.probabilities[gone]
        return Answers(group.samples[gone], predictions[gone], np.full(len(gone), stage), top)

    def _fetch_late(self, *, once_many: bool = False) -> Iterator[Answers]:
        """Yield the answers of batches that have run to the end, whose values come to the host together."""
        late: Any = self.late
        if not late or (once_many and len(late) < LATE and len(late) * late[-1].values.nbytes <= LATE_BYTES):
            return
        self.late = []
        first, *others = (each.values for each in late)
        values = first.gather(others)
        if math.isfinite(values.largest.sum()):
            samples = np.concatenate([each.group.samples for each in late])
            recalled = joined([each.group.recalled for each in late])
            late = [Launched(late[0].stage, Group(samples, recalled, ()), values)]
        for launched in late:  # one by one if some are unusable, so that the samples before those are answered
            if not isinstance(launched.values, HeadValues):
                launched.values.send()
            if (answers := self._settle(launched)) is not None:
                yield answers


def usable(policy: Policy, decided: Iterable[Answers]) -> Iterator[Answers]:
    """Yield answers that a device decided; raise once logits were unusable, whose open exit is -1 minus its index."""
    for answers in decided:
        unusable = answers.open_indices < 0
        if not unusable.any():
            yield answers
            continue
        fine = ~unusable
        top = None if answers.probabilities is None else answers.probabilities[fine]
        yield Answers(answers.samples[fine], answers.predictions[fine], answers.open_indices[fine], top)
        stage = -1 - int(answers.open_indices[unusable].max())
        if isinstance(decided, Generator):
            decided.close()  # what decides is free, even if someone keeps the error
        _refuse(policy, stage, np.sort(answers.samples[answers.open_indices == -1 - stage]))


@dataclass
class Filling:
    """A batch with free rows: which sample is in which row, what is remembered of it, the state, and the free rows."""

    samples: Integers
    recalled: Recalled
    rows: Integers
    state: State
    free_rows: Integers

    def __len__(self) -> int:
        return len(self.samples)

    def give(self, other: "Filling", backend: Backend) -> None:
        """Move as many of the last samples as fit into free rows of another batch."""
        count = min(len(self), len(other.free_rows))
        first, last = slice(len(self) - count), slice(len(self) - count, None)
        slots, other.free_rows = other.free_rows[:count], other.free_rows[count:]
        backend.move(self.state, self.rows[last], other.state, slots)
        other.samples = np.concatenate([other.samples, self.samples[last]])
        other.recalled = joined([other.recalled, kept(self.recalled, last)])
        other.rows = np.concatenate([other.rows, slots])
        self.free_rows = np.concatenate([self.free_rows, self.rows[last]])
        self.samples, self.recalled, self.rows = self.samples[first], kept(self.recalled, first), self.rows[first]

    def compact(self, backend: Backend) -> None:
        """Move samples into the free rows before them, so that all are in the first rows."""
        behind = self.rows >= len(self)
        if behind.any():
            holes = self.free_rows < len(self)
            backend.move(self.state, self.rows[behind], self.state, self.free_rows[holes])
            self.rows, self.free_rows = self.rows.copy(), self.free_rows.copy()
            self.rows[behind], self.free_rows[holes] = self.free_rows[holes], self.rows[behind]
            self.free_rows.sort()

    def group(self, backend: Backend) -> Group:
        """Return all samples, in the order of their rows."""
        self.compact(backend)
        order = np.argsort(self.rows)
        # New views: what a stage noted about its tensors (a mask that was looked at) no longer holds.
        state = tuple(each[: len(self)] for each in self.state)
        return Group(self.samples[order], kept(self.recalled, order), state, own=True)


class Pool:
    """Samples that wait for a stage, gathered into batches of one size; None keeps groups apart.

    At most one batch is being filled for each shape of state, so memory is bounded.
    """

    def __init__(self, size: int | None, backend: Backend) -> None:
        self.size, self.backend = size, backend
        self.filling: dict[Any, Filling] = {}

    def add(self, group: Group, staying: Integers | None) -> list[Group]:
        """Take in the survivors of a group, None is all of them, and return the batches that are full now."""
        size, rows = self.size, np.arange(len(group.samples))
        if staying is None and size in (None, len(rows)):
            return [group]
        staying = rows if staying is None else staying
        samples, recalled = group.samples[staying], kept(group.recalled, staying)
        if size is None:
            return [Group(samples, recalled, self.backend.take(group.state, staying), own=True)]
        coming = Filling(samples, recalled, staying, group.state, np.delete(rows, staying))
        shape, full = tuple(each.shape[1:] for each in group.state), []
        while len(coming):
            waiting = self.filling.pop(shape, None)
            target, source = self._direction(coming, waiting, own=group.own and len(rows) == size)
            if source is not None:
                source.give(target, self.backend)
            if len(target.free_rows):  # so all samples are in it
                self.filling[shape] = target
                break
            full.append(target.group(self.backend))
            if target is coming:
                if waiting:
                    self.filling[shape] = waiting
                break
        return full

    def _direction(self, coming: Filling, waiting: Filling | None, own: bool) -> tuple[Filling, Filling | None]:
        """Return the batch that is filled and the one whose samples are moved into it, whichever moves fewer."""
        if own and waiting is None:
            return coming, None
        if waiting is None:
            size, nobody = self.size or 0, np.arange(0)
            state = self.backend.allocate(size, coming.state)
            waiting = Filling(nobody, kept(coming.recalled, nobody), nobody, state, np.arange(size))
        forth = min(len(coming.free_rows), len(waiting))
        back = min(len(waiting.free_rows), len(coming))
        return (coming, waiting) if own and forth <= back else (waiting, coming)

    def compact(self) -> None:
        """Compact waiting samples, so that a partial batch needs no copy."""
        for filling in self.filling.values():
            filling.compact(self.backend)

    def rest(self) -> Group | None:
        """Return the samples of an unfilled batch, or None."""
        return self.filling.popitem()[1].group(self.backend) if self.filling else None


def _refuse_input(sample: int) -> NoReturn:
    raise BadInput(
        f"the input of sample {sample} holds NaN, infinity or a negative token: look for it there, since a network may"
        " answer it all the same"
    )


def _refuse(policy: Policy, stage: int, unusable: Integers) -> None:
    if len(unusable):  # large numbers may add up to infinity
        raise BadInput(
            f"the network gives unusable logits for {len(unusable)} samples, the first is sample {unusable[0]}, at exit"
            f" {policy.open_exits[stage]}: look for NaN or infinity in these inputs, or for overflow"
        )


def _note(error: Exception, stage: int, count: int) -> None:
    error.add_note(f"This happened to {count} samples, in stage {stage} of those between open exits.")
