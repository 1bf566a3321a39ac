"""Samples flow through segments, leave where the policy says, and wait in pools until a full batch is together.

Tensors stay on their device; what a head says comes to the host as one small array per segment and batch, where the
same NumPy lines decide that replay a recording. While one such array is on its way, the next batch is running.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from alight.engine.pool import Group
from alight.engine.rows import own_memory
from alight.engine.schedule import Schedule
from alight.engine.segments import Segment, Told, apart, told_of_one
from alight.errors import BadInput
from alight.networks.multi_exit import Carried
from alight.policies.policy import BatchState, Memory, Policy
from alight.policies.route import joined, visit

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LATE = 32  # batches whose answers are fetched together, where nothing waits for them
LATE_BYTES = 2**25  # of their logits at most, and one batch more
IN_FLIGHT = 2  # batches whose answers are awaited while others run: enough to keep a GPU from idling


class Answers(NamedTuple):
    """What some samples got: their indices, classes, positions among the open exits, and chances of the class."""

    samples: Integers
    predictions: Integers
    open_indices: Integers
    probabilities: Floats | None


class Awaited(NamedTuple):
    """A group that has run through a segment, and what was told of it once it has arrived."""

    open_index: int
    group: Group
    told: Any  # a tensor as the segment makes it, then side by side; in the end, or at once on the host, apart
    arrived: Any = None  # a CUDA event, or None on the host


class Engine:
    """The walk of many batches at once through the segments of a network."""

    def __init__(
        self, segments: Sequence[Segment], policy: Policy, runs: Sequence[Callable[..., Any]] | None = None
    ) -> None:
        self.segments, self.policy = list(segments), policy
        self.runs = runs  # the segments, compiled
        self.memory: Memory = ()  # of batches before, where the policy keeps one
        self._on_host = all(each.device.type == "cpu" for segment in segments for each in segment.parameters())
        self._in_flight = 0 if self._on_host else IN_FLIGHT

    def flow(
        self, batches: Iterable[tuple[Integers, Carried]], batch_size: int | None, *, hurry: bool = True
    ) -> Iterator[Answers]:
        """Answers as they are ready, of batches of samples and tensors.

        With a batch size those who stay wait for others until a batch of that size is together: the deepest full batch
        first, what is left in the end from the first exit on. Without one, every batch is walked to its end. Without
        `hurry` the answers of the last exit, on which nothing depends, are fetched from a GPU for many batches at once.
        """
        fresh = (Group(samples, (self.memory, ()), carried) for samples, carried in batches)
        schedule = Schedule(fresh, batch_size, len(self.segments))
        singly = self.walks_alone and batch_size in (None, 1)
        awaited: deque[Awaited] = deque()
        late: list[Awaited] = []
        last = (
            len(self.segments) if hurry or self._on_host or self.policy.is_batch_dependent else len(self.segments) - 1
        )
        try:
            while True:
                if (chosen := schedule.next([each.open_index for each in awaited])) is not None:
                    if singly and chosen[0] == 0 and len(chosen[1].samples) == 1:
                        yield _answer(chosen[1].samples, *self.alone(int(chosen[1].samples[0]), chosen[1].carried))
                        continue
                    if chosen[0] == last:
                        late.append(self._run(*chosen))
                    else:
                        awaited.append(self._sent(self._run(*chosen)))
                elif not awaited:
                    yield from self._fetched(late)
                    return
                if late and (len(late) == LATE or len(late) * late[-1].told.nbytes > LATE_BYTES):
                    yield from self._fetched(late)
                    late.clear()
                if chosen is None and not self._on_host:
                    schedule.close_up()  # the GPU does it while the host decides
                if awaited and (chosen is None or len(awaited) > self._in_flight):
                    chosen = None  # lets go of its tensors
                    if (answers := self._settled(awaited.popleft(), schedule)) is not None:
                        yield answers
        except GeneratorExit:
            raise
        except BaseException:
            yield from self._rescued(late)
            raise

    @property
    def walks_alone(self) -> bool:
        """Whether one sample on its own is walked in numbers: on the host, by a rule that looks at it alone."""
        return self._on_host and self.runs is None and self.policy.lens is None and not self.policy.is_batch_dependent

    def alone(self, sample: int, carried: Carried) -> tuple[int, int, float | None]:
        """One sample's class, position and chance: walked in numbers, since arrays of one cost more than they do."""
        recalled: Any = ((), ())
        for open_index, segment in enumerate(self.segments):
            try:
                carried, logits = segment.logits(*carried)
            except Exception as error:
                _note(error, open_index, 1)
                raise
            told = told_of_one(logits, segment.columns, segment.with_chance)
            if not math.isfinite(told.largest):
                self._refuse(open_index, np.array([sample]))
            columns = told.columns or (told.largest,)
            leaving, prediction, recalled = visit(self.policy, open_index, sample, told.predictions, columns, recalled)
            if leaving:
                break
        return prediction, open_index, told.chances

    def _run(self, open_index: int, group: Group) -> Awaited:
        """A group that is on its way through a segment, and what will be told of it."""
        segment, given = self.segments[open_index], group.carried
        plain = segment.on_host if self._on_host else segment.forward  # quicker than a call, which looks for hooks
        run: Callable[..., Any] = self.runs[open_index] if self.runs else plain
        try:
            carried, told = run(*given)
        except Exception as error:
            _note(error, open_index, len(group.samples))
            raise
        own = own_memory(carried, () if group.own else given) if carried else False
        return Awaited(open_index, Group(group.samples, group.recalled, carried, own), told)

    def _sent(self, awaited: Awaited) -> Awaited:
        """What is told, on its way from the GPU to the host."""
        if isinstance(awaited.told, Told):
            return awaited
        told = self.segments[awaited.open_index].told_of(awaited.told)
        if self._on_host:
            return awaited._replace(told=told)
        there = torch.empty(told.shape, dtype=told.dtype, pin_memory=True).copy_(told, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return awaited._replace(told=there, arrived=arrived)

    def _fetched(self, late: Sequence[Awaited]) -> Iterator[Answers]:
        """The answers of batches that have run to the end, which come to the host together."""
        if late:
            told = self.segments[late[0].open_index].told_of(torch.cat([each.told for each in late])).cpu()
            groups = [each.group for each in late]
            if math.isfinite(told[:, 1].sum().item()):  # else those before the one that is refused are answered first
                samples = np.concatenate([group.samples for group in groups])
                groups = [Group(samples, joined([group.recalled for group in groups]), ())]
            for group, part in zip(groups, torch.split(told, [len(group.samples) for group in groups]), strict=True):
                if (answers := self._settled(Awaited(late[0].open_index, group, part))) is not None:
                    yield answers

    def _rescued(self, late: Sequence[Awaited]) -> list[Answers]:
        """What has run to the end before something went wrong; nothing, if that cannot be had any more."""
        try:
            return [*self._fetched(late)]
        except Exception:  # of a device that is lost, or of unusable logits: the first error is the one to tell
            return []

    def _settled(self, awaited: Awaited, schedule: Schedule | None = None) -> Answers | None:
        """The answers of those who leave, None if nobody does; the others go on as scheduled."""
        open_index, group, told, arrived = awaited
        if arrived is not None:
            arrived.synchronize()  # the only wait for this segment and batch
        if isinstance(told, Tensor):
            segment = self.segments[open_index]
            told = apart(told.numpy(), segment.columns, segment.with_chance)
        if not math.isfinite(told.largest.sum()):  # quick, and nearly never
            self._refuse(open_index, group.samples[~np.isfinite(told.largest)])
        leaving, predictions, recalled = visit(
            self.policy, open_index, group.samples, told.predictions, told.columns or (told.largest,), group.recalled
        )
        gone = leaving.nonzero()[0]
        if schedule is not None and len(gone) < len(leaving):
            staying = (~leaving).nonzero()[0] if len(gone) else None  # None is everyone
            schedule.add(open_index + 1, group._replace(recalled=recalled), staying)
        else:
            self.memory = tuple(part for part in recalled[0] if isinstance(part, BatchState))
        if not len(gone):
            return None
        chances = None if told.chances is None else told.chances[gone]
        return Answers(group.samples[gone], predictions[gone], np.full(len(gone), open_index), chances)

    def _refuse(self, open_index: int, wrong: Integers) -> None:
        if len(wrong):  # large numbers may add up to infinity
            raise BadInput(
                f"the network gives no usable logits for {len(wrong)} samples, the first of index {wrong[0]}, at exit"
                f" {self.policy.open_exits[open_index]}: look for NaN or infinity in these inputs, or for overflow"
            )


def _answer(samples: Integers, prediction: int, open_index: int, chance: float | None) -> Answers:
    """The answers of one sample."""
    return Answers(
        samples, np.array([prediction]), np.array([open_index]), None if chance is None else np.array([chance])
    )


def _note(error: Exception, open_index: int, count: int) -> None:
    error.add_note(f"This happened to {count} samples between exits, in segment {open_index}.")
