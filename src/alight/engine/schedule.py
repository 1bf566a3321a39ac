"""Which batch runs next: fresh ones, full ones that wait between exits, and in the end what is left."""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from alight.engine.pool import Group, Pool

Integers = npt.NDArray[np.int64]


class Schedule:
    """Batches of samples on their way through so many segments.

    While samples come in, the deepest full batch runs first, so that few wait. Then the first one that nobody can join
    any more, full or not: so rests run beside full batches, and not one after the other when all else is done.
    """

    def __init__(self, fresh: Iterable[Group], batch_size: int | None, segments: int) -> None:
        self.fresh, self.batch_size = iter(fresh), batch_size
        self.pools = [Pool(batch_size) for _ in range(segments)]  # the first stays empty
        self.full: list[tuple[int, int, Group]] = []  # a heap: minus the place that it waits at, its number, the batch
        self.ends = False  # whether no more samples come
        self.made = 0  # full batches so far: of those at one place the first made runs first

    def add(self, open_index: int, group: Group, staying: Integers | None) -> None:
        """Take in those of a group that go on to a segment; None is everyone."""
        for full in self.pools[open_index].add(group, staying):
            self.made += 1
            heappush(self.full, (-open_index, self.made, full))

    def next(self, running: Sequence[int]) -> tuple[int, Group] | None:
        """The place and the batch to run next, None if there is none before one of those that are running is done."""
        if not self.ends:
            if self.full:
                place, _, group = heappop(self.full)
                return -place, group
            if self.batch_size is None and running:  # batches are walked to their end, one by one
                return None
            if (batch := next(self.fresh, None)) is not None:
                return 0, batch
            self.ends = True
        return self._left(min(running, default=len(self.pools)))

    def close_up(self) -> None:
        """Let those who wait between exits sit together, while there is nothing else to do."""
        for pool in self.pools:
            pool.close_up()

    def _left(self, complete: int) -> tuple[int, Group] | None:
        """The first of what is left; no one will join the pools up to `complete` any more."""
        for open_index, pool in enumerate(self.pools):
            waiting = [each for each in self.full if each[0] == -open_index]
            if waiting:
                self.full.remove(first := min(waiting))
                return open_index, first[2]
            if open_index <= complete and (rest := pool.rest()) is not None:
                return open_index, rest
        return None
