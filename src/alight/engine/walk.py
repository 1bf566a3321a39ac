"""Samples flow through stages, leave where the policy says, and wait in pools until a full batch is there.

The state stays where the backend has it; head values come to the host as one small array per stage and batch, where
the same NumPy code decides that replays a recording. While one such array is on its way, the next batch is running.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from alight.engine.backends import Backend, DeviceValues, Integers, State
from alight.engine.head_values import HeadValues
from alight.engine.scheduler import Group, Schedule
from alight.errors import BadInput
from alight.policies.policy import BatchState, Memory, Policy
from alight.policies.route import joined, visit

LATE = 32  # batches whose last values are fetched together, where nothing waits for them
LATE_BYTES = 2**25  # of their values at most, and one batch more


class Answers(NamedTuple):
    """The answers of some samples: numbers, classes, indices among the open exits, probabilities of the classes."""

    samples: Integers
    predictions: Integers
    open_indices: Integers
    probabilities: npt.NDArray[np.float64] | None


class Launched(NamedTuple):
    """A group that a stage has run, and its head values, perhaps still on their way."""

    stage: int
    group: Group
    values: HeadValues | DeviceValues


class Walk:
    """The walk of many batches through the stages of a backend, under one policy."""

    def __init__(self, backend: Backend, policy: Policy) -> None:
        self.backend, self.policy = backend, policy
        self.memory: Memory = ()  # what the policy remembers of earlier batches

    @property
    def supports_single_sample(self) -> bool:
        """Whether one sample on its own is walked in numbers."""
        return self.backend.supports_single_sample and self.policy.takes_single_samples

    def flow(
        self, batches: Iterable[tuple[Integers, State]], batch_size: int | None, *, low_latency: bool = True
    ) -> Iterator[Answers]:
        """Yield answers when they are ready, of batches of sample numbers and admitted inputs.

        With a batch size survivors wait until a batch of that size is full: the deepest full batch first, what is left
        in the end from the first exit on. Without one, every batch is walked to its end. Without `low_latency` the
        values of the last exit, on which nothing depends, are fetched from a device for many batches at once.
        """
        flow = _Flow(self, batches, batch_size, low_latency)
        try:
            yield from flow.answers()
        except GeneratorExit:
            raise
        except BaseException:
            yield from flow.rescued()
            raise

    def single(self, sample: int, state: State) -> tuple[int, int, float | None]:
        """Return class, open-exit index and probability of one sample, walked in numbers: arrays of one cost more."""
        self.check_inputs((sample,), state)
        recalled: Any = ((), ())
        for stage in range(len(self.policy.open_exits)):
            try:
                values, state = self.backend.run_one(stage, state)
            except Exception as error:
                _note(error, stage, 1)
                raise
            if not math.isfinite(values.largest):
                self._refuse(stage, np.array([sample]))
            columns = values.columns or (values.largest,)
            leaving, prediction, recalled = visit(self.policy, stage, sample, values.predictions, columns, recalled)
            if leaving:
                break
        return prediction, stage, values.probabilities

    def launch(self, stage: int, group: Group) -> Launched:
        """Run one stage for a group."""
        try:
            values, state = self.backend.run(stage, group.state)
        except Exception as error:
            _note(error, stage, len(group.samples))
            raise
        own = bool(state) and self.backend.owns(state, () if group.own else group.state)
        return Launched(stage, Group(group.samples, group.recalled, state, own), values)

    def settle(self, launched: Launched, schedule: Schedule | None = None) -> Answers | None:
        """Return the answers of the samples that leave, None if none does; survivors go to the schedule."""
        stage, group, values = launched
        if not isinstance(values, HeadValues):
            values = values.get()  # the only wait for this stage and batch
        if not math.isfinite(values.largest.sum()):  # quick, and nearly never
            self._refuse(stage, group.samples[~np.isfinite(values.largest)])
        columns = values.columns or (values.largest,)
        leaving, predictions, recalled = visit(
            self.policy, stage, group.samples, values.predictions, columns, group.recalled
        )
        gone = leaving.nonzero()[0]
        if schedule is not None and len(gone) < len(leaving):
            staying = (~leaving).nonzero()[0] if len(gone) else None  # None is all
            schedule.add(stage + 1, group._replace(recalled=recalled), staying)
        else:
            self.memory = tuple(part for part in recalled[0] if isinstance(part, BatchState))
        if not len(gone):
            return None
        top = None if values.probabilities is None else values.probabilities[gone]
        return Answers(group.samples[gone], predictions[gone], np.full(len(gone), stage), top)

    def check_inputs(self, samples: Integers | Sequence[int], state: State) -> None:
        """Check that no input is unusable where the backend would answer it all the same."""
        if (row := self.backend.first_unusable(state)) is not None:
            raise BadInput(
                f"the input of sample {samples[row]} holds NaN, infinity or a negative token: look for it there, since"
                " a network may answer it all the same"
            )

    def _refuse(self, stage: int, unusable: Integers) -> None:
        if len(unusable):  # large numbers may add up to infinity
            raise BadInput(
                f"the network gives unusable logits for {len(unusable)} samples, the first is sample {unusable[0]}, at"
                f" exit {self.policy.open_exits[stage]}: look for NaN or infinity in these inputs, or for overflow"
            )


class _Flow:
    """One run of a walk: the schedule, the batches whose values are awaited, and those fetched late."""

    def __init__(
        self, walk: Walk, batches: Iterable[tuple[Integers, State]], batch_size: int | None, low_latency: bool
    ) -> None:
        self.walk, self.backend = walk, walk.backend
        stages = len(walk.policy.open_exits)
        fresh = (Group(samples, (walk.memory, ()), state) for samples, state in batches)
        self.schedule = Schedule(fresh, batch_size, stages, walk.backend)
        self.one_by_one = walk.supports_single_sample and batch_size in (None, 1)
        late = not low_latency and self.backend.in_flight and not walk.policy.is_batch_dependent
        self.late_stage = stages - 1 if late else None
        self.awaited: deque[Launched] = deque()
        self.late: list[Launched] = []

    def answers(self) -> Iterator[Answers]:
        """Yield the answers of all samples."""
        while True:
            step = self.schedule.next([each.stage for each in self.awaited])
            if step is None and not self.awaited:
                break
            if self._is_single(step):
                yield self._single(step[1])  # type: ignore[index]
                continue
            if step is not None:
                self._launch(*step)
            elif self.backend.in_flight:
                self.schedule.compact()  # the device does it while the host decides
            if self._late_is_full():
                yield from self._fetch_late()
            if self.awaited and (step is None or len(self.awaited) > self.backend.in_flight):
                step = None  # lets go of its state
                if (answers := self.walk.settle(self.awaited.popleft(), self.schedule)) is not None:
                    yield answers
        yield from self._fetch_late()

    def rescued(self) -> list[Answers]:
        """Return what has run to the end before an error; nothing, if that is lost."""
        try:
            return [*self._fetch_late()]
        except Exception:  # of a device that is lost, or of unusable logits: the first error is the one to show
            return []

    def _is_single(self, step: tuple[int, Group] | None) -> bool:
        return step is not None and self.one_by_one and step[0] == 0 and len(step[1].samples) == 1

    def _single(self, group: Group) -> Answers:
        prediction, stage, top = self.walk.single(int(group.samples[0]), group.state)
        top_array = None if top is None else np.array([top])
        return Answers(group.samples, np.array([prediction]), np.array([stage]), top_array)

    def _launch(self, stage: int, group: Group) -> None:
        if stage == 0:
            self.walk.check_inputs(group.samples, group.state)
        launched = self.walk.launch(stage, group)
        if stage == self.late_stage:
            self.late.append(launched)
            return
        if not isinstance(launched.values, HeadValues):
            launched.values.send()
        self.awaited.append(launched)

    def _late_is_full(self) -> bool:
        return bool(self.late) and (
            len(self.late) == LATE or len(self.late) * self.late[-1].values.nbytes > LATE_BYTES  # type: ignore[union-attr]
        )

    def _fetch_late(self) -> Iterator[Answers]:
        """Yield the answers of batches that have run to the end, whose values come to the host together."""
        late, self.late = self.late, []
        if not late:
            return
        values = self.backend.gather([each.values for each in late])  # type: ignore[misc]
        groups = [each.group for each in late]
        if math.isfinite(values.largest.sum()):  # else the samples before the refused one are answered first
            samples = np.concatenate([group.samples for group in groups])
            groups = [Group(samples, joined([group.recalled for group in groups]), ())]
        start = 0
        for group in groups:
            stop = start + len(group.samples)
            part = _rows(values, slice(start, stop))
            if (answers := self.walk.settle(Launched(late[0].stage, group, part))) is not None:
                yield answers
            start = stop


def _rows(values: HeadValues, rows: slice) -> HeadValues:
    top = None if values.probabilities is None else values.probabilities[rows]
    columns = tuple(column[rows] for column in values.columns)
    return HeadValues(values.predictions[rows], values.largest[rows], columns, top)


def _note(error: Exception, stage: int, count: int) -> None:
    error.add_note(f"This happened to {count} samples, in stage {stage} of those between open exits.")
