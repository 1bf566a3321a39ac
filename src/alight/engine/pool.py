"""Samples that wait for a segment until a full batch is together.

Those who leave a batch leave holes in its tensors. Samples that wait are moved into them, or the other way round,
whichever moves fewer: never more than leave, and nothing of a batch that nobody leaves. In the end, when no batch will
be full any more, those who are left close up.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from alight.engine.rows import empty, gathered, move
from alight.networks.multi_exit import Carried
from alight.policies.route import Recalled, joined, kept

Integers = npt.NDArray[np.int64]


class Group(NamedTuple):
    """Samples that go on together: who they are, what is remembered of them, and their tensors."""

    samples: Integers
    recalled: Recalled
    carried: Carried
    own: bool = False  # may the tensors be written to?


@dataclass
class Filling:
    """A batch with holes: who sits in which rows, what is remembered of them, the tensors, and the free rows."""

    samples: Integers
    recalled: Recalled
    rows: Integers
    carried: Carried
    room: Integers

    def __len__(self) -> int:
        return len(self.samples)

    def seat(self, samples: Integers, recalled: Recalled, carried: Carried, rows: Integers) -> None:
        """Move samples that sit in these rows of other tensors into free ones."""
        slots, self.room = self.room[: len(rows)], self.room[len(rows) :]
        move(carried, rows, self.carried, slots)
        self.samples = np.concatenate([self.samples, samples])
        self.recalled = joined([self.recalled, recalled])
        self.rows = np.concatenate([self.rows, slots])

    def give(self, other: "Filling", count: int) -> None:
        """Move so many of those here into free rows of another batch."""
        first, last = slice(len(self) - count), slice(len(self) - count, None)
        other.seat(self.samples[last], kept(self.recalled, last), self.carried, self.rows[last])
        self.room = np.concatenate([self.room, self.rows[last]])
        self.samples, self.recalled, self.rows = self.samples[first], kept(self.recalled, first), self.rows[first]

    def close_up(self) -> None:
        """Move those behind into the holes before them, so that everyone sits in the first rows."""
        behind = self.rows >= len(self)
        if behind.any():
            holes = self.room < len(self)
            move(self.carried, self.rows[behind], self.carried, self.room[holes])
            self.rows, self.room = self.rows.copy(), self.room.copy()
            self.rows[behind], self.room[holes] = self.room[holes], self.rows[behind]
            self.room.sort()

    def group(self) -> Group:
        """All who are here, in the order of their rows."""
        self.close_up()
        order = np.argsort(self.rows)
        # Under new names: what was noted about the tensors by those who made them holds no more.
        carried = tuple(each[: len(self)] for each in self.carried)
        return Group(self.samples[order], kept(self.recalled, order), carried, own=True)


class Pool:
    """Samples that wait for a segment, gathered into batches of one size; None keeps groups apart.

    At most one batch is being filled for each shape of tensors, so memory is bounded.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.filling: dict[Any, Filling] = {}

    def add(self, group: Group, staying: Integers | None) -> Iterable[Group]:
        """Take in those of a group that stay, None is everyone, and give the batches that are full now."""
        if staying is None and self.size in (None, len(group.samples)):
            return (group,)
        staying = np.arange(len(group.samples)) if staying is None else staying
        if self.size is None:
            carried = gathered(group.carried, staying)
            return (Group(group.samples[staying], kept(group.recalled, staying), carried, own=True),)
        shape, full = tuple(each.shape[1:] for each in group.carried), []
        while len(staying):
            waiting = self.filling.pop(shape, None)
            if group.own and len(group.samples) == self.size and _fewer_wait(waiting, len(staying), self.size):
                filling, staying = _holed(group, staying), staying[:0]
                if waiting is not None:
                    waiting.give(filling, min(len(waiting), len(filling.room)))
            else:
                filling, waiting = waiting or _empty(self.size, group), None
                some, staying = staying[: len(filling.room)], staying[len(filling.room) :]
                filling.seat(group.samples[some], kept(group.recalled, some), group.carried, some)
            if not len(filling.room):
                full.append(filling.group())
            for left in (filling if len(filling.room) else None, waiting):
                if left is not None and len(left):
                    self.filling[shape] = left
        return full

    def close_up(self) -> None:
        """Let those who wait sit together, so that nobody has to move when they are a rest."""
        for filling in self.filling.values():
            filling.close_up()

    def rest(self) -> Group | None:
        """Those of an unfilled batch, or None."""
        return self.filling.popitem()[1].group() if self.filling else None


def _fewer_wait(waiting: Filling | None, staying: int, size: int) -> bool:
    """Whether moving those who wait into the holes of a batch moves fewer than the other way round, or as few."""
    return waiting is None or min(size - staying, len(waiting)) <= min(len(waiting.room), staying)


def _empty(size: int, like: Group) -> Filling:
    """A batch of nobody, with room for so many."""
    nobody = np.arange(0)
    carried = tuple(empty(size, each) for each in like.carried)
    return Filling(nobody, kept(like.recalled, nobody), nobody, carried, np.arange(size))


def _holed(group: Group, staying: Integers) -> Filling:
    """A batch of those who stay, in the memory that they are in."""
    free = np.ones(len(group.samples), dtype=bool)
    free[staying] = False
    return Filling(group.samples[staying], kept(group.recalled, staying), staying, group.carried, np.flatnonzero(free))
