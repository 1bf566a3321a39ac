"""Which batch runs next, and how survivors are put together into full batches.

Samples that leave a batch leave free rows in its arrays. Waiting samples are moved into them, or the other way round,
whichever moves fewer: never more than leave, and nothing of a batch that nobody leaves. In the end, when no batch will
be full any more, the waiting samples are compacted into partial batches.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from alight.engine.backends import Backend, Integers, State
from alight.policies.route import Recalled, joined, kept


class Group(NamedTuple):
    """Samples that run together: their numbers, what the policy remembers of them, and their state."""

    samples: Integers
    recalled: Recalled
    state: State
    own: bool = False  # may the state be written to?


@dataclass
class Filling:
    """A batch with free rows: which sample is in which row, what is remembered of it, the state, and the free rows."""

    backend: Backend
    samples: Integers
    recalled: Recalled
    rows: Integers
    state: State
    free_rows: Integers

    def __len__(self) -> int:
        return len(self.samples)

    def insert(self, samples: Integers, recalled: Recalled, state: State, rows: Integers) -> None:
        """Move samples from these rows of another state into free rows."""
        slots, self.free_rows = self.free_rows[: len(rows)], self.free_rows[len(rows) :]
        self.backend.move(state, rows, self.state, slots)
        self.samples = np.concatenate([self.samples, samples])
        self.recalled = joined([self.recalled, recalled])
        self.rows = np.concatenate([self.rows, slots])

    def give(self, other: "Filling", count: int) -> None:
        """Move the last `count` samples into free rows of another batch."""
        first, last = slice(len(self) - count), slice(len(self) - count, None)
        other.insert(self.samples[last], kept(self.recalled, last), self.state, self.rows[last])
        self.free_rows = np.concatenate([self.free_rows, self.rows[last]])
        self.samples, self.recalled, self.rows = self.samples[first], kept(self.recalled, first), self.rows[first]

    def compact(self) -> None:
        """Move samples into the free rows before them, so that all are in the first rows."""
        behind = self.rows >= len(self)
        if behind.any():
            holes = self.free_rows < len(self)
            self.backend.move(self.state, self.rows[behind], self.state, self.free_rows[holes])
            self.rows, self.free_rows = self.rows.copy(), self.free_rows.copy()
            self.rows[behind], self.free_rows[holes] = self.free_rows[holes], self.rows[behind]
            self.free_rows.sort()

    def group(self) -> Group:
        """Return all samples, in the order of their rows."""
        self.compact()
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
        if staying is None and self.size in (None, len(group.samples)):
            return [group]
        staying = np.arange(len(group.samples)) if staying is None else staying
        if self.size is None:
            state = self.backend.take(group.state, staying)
            return [Group(group.samples[staying], kept(group.recalled, staying), state, own=True)]
        shape = tuple(each.shape[1:] for each in group.state)
        can_stay = group.own and len(group.samples) == self.size
        full: list[Group] = []
        while len(staying):
            if can_stay and self._fewer_wait(shape, len(staying)):
                return full + self._fill_group(shape, group, staying)
            staying = self._fill_waiting(shape, group, staying, full)
        return full

    def compact(self) -> None:
        """Compact waiting samples, so that a partial batch needs no copy."""
        for filling in self.filling.values():
            filling.compact()

    def rest(self) -> Group | None:
        """Return the samples of an unfilled batch, or None."""
        return self.filling.popitem()[1].group() if self.filling else None

    def _fewer_wait(self, shape: Any, staying: int) -> bool:
        """Return whether moving waiting samples into the group's free rows moves at most as many as the other way."""
        waiting = self.filling.get(shape)
        if waiting is None:
            return True
        return min((self.size or 0) - staying, len(waiting)) <= min(len(waiting.free_rows), staying)

    def _fill_group(self, shape: Any, group: Group, staying: Integers) -> list[Group]:
        """Move waiting samples into the free rows of the group."""
        free = np.ones(len(group.samples), dtype=bool)
        free[staying] = False
        samples, recalled = group.samples[staying], kept(group.recalled, staying)
        filling = Filling(self.backend, samples, recalled, staying, group.state, np.flatnonzero(free))
        waiting = self.filling.pop(shape, None)
        if waiting is not None:
            waiting.give(filling, min(len(waiting), len(filling.free_rows)))
        full = [] if len(filling.free_rows) else [filling.group()]
        self._keep(shape, filling if len(filling.free_rows) else waiting)
        return full

    def _fill_waiting(self, shape: Any, group: Group, staying: Integers, full: list[Group]) -> Integers:
        """Move survivors of the group into free rows of the waiting batch, and return those that found none."""
        filling = self.filling.pop(shape, None) or self._empty(group)
        some, others = staying[: len(filling.free_rows)], staying[len(filling.free_rows) :]
        filling.insert(group.samples[some], kept(group.recalled, some), group.state, some)
        if len(filling.free_rows):
            self._keep(shape, filling)
        else:
            full.append(filling.group())
        return others

    def _keep(self, shape: Any, filling: Filling | None) -> None:
        if filling is not None and len(filling):
            self.filling[shape] = filling

    def _empty(self, like: Group) -> Filling:
        size, nobody = self.size or 0, np.arange(0)
        state = self.backend.allocate(size, like.state)
        return Filling(self.backend, nobody, kept(like.recalled, nobody), nobody, state, np.arange(size))


class Schedule:
    """Batches of samples on their way through so many stages.

    While samples come in, the deepest full batch runs first, so that few wait. Then the first one that no sample can
    join any more, full or not: so partial batches run beside full ones, not one after the other at the very end.
    """

    def __init__(self, fresh: Iterable[Group], batch_size: int | None, stages: int, backend: Backend) -> None:
        self.fresh, self.batch_size = iter(fresh), batch_size
        self.pools = [Pool(batch_size, backend) for _ in range(stages)]  # the first stays empty
        self.full: list[tuple[int, int, Group]] = []  # a heap: minus the stage that it waits for, its number, the batch
        self.ends = False  # whether no more samples come
        self.filled = 0  # full batches so far: of those that wait for one stage the oldest runs first

    def add(self, stage: int, group: Group, staying: Integers | None) -> None:
        """Take in the survivors of a group for a stage; None is all of them."""
        for full in self.pools[stage].add(group, staying):
            self.filled += 1
            heappush(self.full, (-stage, self.filled, full))

    def next(self, running: Sequence[int]) -> tuple[int, Group] | None:
        """Return the stage and the batch to run next; None if there is none before a running one is done."""
        if not self.ends:
            if self.full:
                stage, _, group = heappop(self.full)
                return -stage, group
            if self.batch_size is None and running:  # every batch is walked to its end before the next
                return None
            if (batch := next(self.fresh, None)) is not None:
                return 0, batch
            self.ends = True
        return self._left(min(running, default=len(self.pools)))

    def compact(self) -> None:
        """Compact the samples that wait between exits, while there is nothing else to do."""
        for pool in self.pools:
            pool.compact()

    def _left(self, complete: int) -> tuple[int, Group] | None:
        """Return the first batch that is left; no sample will join the pools up to `complete` any more."""
        for stage, pool in enumerate(self.pools):
            waiting = [each for each in self.full if each[0] == -stage]
            if waiting:
                self.full.remove(first := min(waiting))
                return stage, first[2]
            if stage <= complete and (rest := pool.rest()) is not None:
                return stage, rest
        return None
