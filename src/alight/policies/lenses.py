"""Maps from what the heads say to what a policy decides on: a lens changes scores, answers, or both.

Lens
├── Gain       scores by what going on is expected to bring
├── Recall     answers with the most reliable exit so far
└── Ensemble   answers with all exits so far, their probabilities multiplied

A lens takes one step per exit, as a policy does, and remembers what it needs. `visit` applies the lens of a policy in
the walk, `Lens.apply` maps a recorded table by the same steps, so a policy calibrated with a lens runs with it too.
`alight.calibrate` fits lenses; what was fitted is kept as plain numbers.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from alight.errors import BadInput
from alight.outputs import HeadOutputs
from alight.scores import library_of, margin, probabilities

Array = Any  # a NumPy array or a torch tensor
Memory = tuple[Any, ...]
Mapped = tuple[Array, Array, Memory]  # answers, scores, and what to remember of the samples
Floats = tuple[float, ...]

IMPOSSIBLE = -30.0  # log-probabilities below are raised to it: a probability of 1e-13, and never 0 * infinity
DIGITS = 12  # of a score that took an exponential, in whose last bits libraries differ: equal scores stay equal


@dataclass(frozen=True, kw_only=True)
class Lens(ABC):
    """What every lens has: its exits, the recorded columns that it reads, the score that it gives, and `step`."""

    score: ClassVar[str]  # name of the score that it gives; higher is leave, as everywhere
    exits: tuple[int, ...] = ()  # those that it was fitted for, all of which must be open; () is any

    def __post_init__(self) -> None:
        if any(after <= before for before, after in pairwise((-1, *self.exits))):
            raise BadInput(f"a lens for exits {self.exits}: give increasing indices, from 0")
        self._check()

    def _check(self) -> None:  # noqa: B027  # a lens with nothing to check is a lens
        """Check that the numbers fit together; lenses add their own checks."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[str, ...]:
        """Names of the columns that it reads: scores of the table, or "log_probabilities"."""

    @abstractmethod
    def step(self, exit_index: int, predictions: Array, columns: tuple[Array, ...], memory: Memory) -> Mapped:
        """Return answers and scores of the samples waiting at an exit, and what to remember of them, first ()."""

    def apply(self, outputs: HeadOutputs) -> HeadOutputs:
        """Return the table that the lens makes of a recorded one: answers and scores of every exit, had no sample left.

        Exits that it was not fitted for stay unchanged: no policy with this lens opens them.
        """
        exits = self.exits or tuple(range(outputs.num_exits))
        if exits[-1] >= outputs.num_exits:
            raise BadInput(f"a lens for exits {exits} and a table of {outputs.num_exits}: fit it on such a table")
        memory: Memory = ()
        answers, scores = outputs.predictions.copy(), outputs.scores.copy()
        for exit_index in exits:
            columns = tuple(outputs.column(name)[:, exit_index] for name in self.inputs)
            seen = self.step(exit_index, outputs.predictions[:, exit_index], columns, memory)
            answers[:, exit_index], scores[:, exit_index], memory = seen
        return replace(
            outputs, scores=scores, predictions=answers, score=self.score, features={}, log_probabilities=None
        )

    def check(self, open_exits: Sequence[int]) -> None:
        """Raise `BadInput` unless the lens was fitted for just these open exits: it remembers what each has said."""
        if self.exits and tuple(open_exits) != self.exits:
            raise BadInput(
                f"the lens was fitted for exits {self.exits} and the policy opens {tuple(open_exits)}:"
                " fit it for these, as calibrate.with_lens does"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the lens as JSON values."""
        return {"lens": type(self).__name__} | asdict(self)


@dataclass(frozen=True, kw_only=True)
class Gain(Lens):
    """Scores by what going on is expected to bring; answers stay.

    The gain of going on is the probability that a wrong answer becomes right, less that of a right one becoming wrong;
    the score is its negative. At each exit it is a linear function of what has been said so far: every column
    now, before, at best and on average, bent at knots; and which earlier exits agree. Sums and products alone, so
    arrays and tensors agree to the last bit.
    """

    score: ClassVar[str] = "negative_gain"
    columns: tuple[str, ...]
    knots: tuple[tuple[Floats, ...], ...]  # per exit and column, where the function may bend
    weights: tuple[Floats, ...]  # per exit, the constant first

    def _check(self) -> None:
        for name, values in {"knots": self.knots, "weights": self.weights}.items():
            if not len(values) == len(self.exits) > 0:
                raise BadInput(f"{name} for {len(values)} exits of a lens over {self.exits}: give one entry per exit")
        for open_index, (knots, weights) in enumerate(zip(self.knots, self.weights, strict=True)):
            first = open_index == 0
            expected = 1 + sum(1 + len(each) if first else 4 + 2 * len(each) for each in knots) + (0 if first else 4)
            if len(knots) != len(self.columns) or len(weights) != expected:
                raise BadInput(
                    f"exit {self.exits[open_index]} has {len(weights)} weights, and knots for {len(knots)} columns:"
                    f" {len(self.columns)} columns bent there take {expected} weights"
                )

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.columns

    def step(self, exit_index: int, predictions: Array, columns: tuple[Array, ...], memory: Memory) -> Mapped:
        open_index = self.exits.index(exit_index)
        described = clues(self.knots[open_index], predictions, columns, memory)
        constant, *weights = self.weights[open_index]
        gain = 0.0 * columns[0] + constant
        for weight, clue in zip(weights, described, strict=True):
            gain = gain + weight * clue
        return predictions, -gain, (*memory, (predictions, *columns))


def clues(
    knots: Sequence[Floats], predictions: Array, columns: Sequence[Array], memory: Sequence[tuple[Array, ...]]
) -> list[Array]:
    """Describe what the exits have said so far as numbers: one array per clue, in a fixed order.

    >>> clues([(0.5,)], np.array([3]), [np.array([0.75])], [])
    [array([0.75]), array([0.25])]
    """
    maximum = library_of(columns[0]).maximum
    found: list[Array] = []
    for index, (bends, now) in enumerate(zip(knots, columns, strict=True)):
        before = [said[1 + index] for said in memory]
        best = now
        for each in before:
            best = maximum(best, each)
        found += [now, before[-1], best, sum(before) * (1.0 / len(before))] if before else [now]
        found += [(value - bend) * (value > bend) for value in ((now, best) if before else (now,)) for bend in bends]
    if memory:
        same = [(said[0] == predictions) * (0.0 * columns[0] + 1.0) for said in memory]  # 1 where they agree
        agreeing = sum(same) * (1.0 / len(same))
        surest = same[0] * memory[0][1]
        for each, said in zip(same, memory, strict=True):
            surest = maximum(surest, each * said[1])
        found += [same[-1], agreeing, agreeing * columns[0], surest]
    return found


@dataclass(frozen=True, kw_only=True)
class Recall(Lens):
    """Answers with the most reliable exit so far; its reliability, the probability that it is right, is the score.

    At each exit what was answered before loses the exit's handicap: that another exit has spoken since, and perhaps
    disagrees, makes it less reliable than its own score says.

    >>> lens = Recall(exits=(0, 1), levels=((0.0, 1.0), (0.0, 1.0)), reliabilities=((0.0, 0.8), (0.5, 0.6)))
    >>> lens.apply(HeadOutputs(scores=[[0.75, 0.5]], predictions=[[3, 4]])).predictions
    array([[3, 3]])
    """

    score: ClassVar[str] = "reliability"
    column: str = "margin"
    levels: tuple[Floats, ...]  # per exit, scores in increasing order
    reliabilities: tuple[Floats, ...]  # per exit, of those scores; straight lines between, level beyond
    handicaps: Floats = ()  # per exit, what earlier answers lose there; by default nothing

    def __post_init__(self) -> None:
        if not self.handicaps:
            object.__setattr__(self, "handicaps", (0.0,) * len(self.exits))
        super().__post_init__()

    def _check(self) -> None:
        if not len(self.levels) == len(self.reliabilities) == len(self.handicaps) == len(self.exits) > 0:
            raise BadInput(
                f"{len(self.levels)} rows of levels, {len(self.reliabilities)} of reliabilities and"
                f" {len(self.handicaps)} handicaps of a lens over {self.exits}: give one per exit"
            )
        if not all(handicap >= 0 for handicap in self.handicaps):
            raise BadInput(f"handicaps {self.handicaps} of earlier answers must be at least 0")
        for exit_index, levels, reliabilities in zip(self.exits, self.levels, self.reliabilities, strict=True):
            rising = all(low < high for low, high in pairwise(levels)) and list(reliabilities) == sorted(reliabilities)
            if not 0 < len(levels) == len(reliabilities) or not rising:
                raise BadInput(f"exit {exit_index}'s levels and reliabilities do not rise side by side: fit them again")

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.column,)

    def step(self, exit_index: int, predictions: Array, columns: tuple[Array, ...], memory: Memory) -> Mapped:
        open_index = self.exits.index(exit_index)
        reliability = _along(columns[0], self.levels[open_index], self.reliabilities[open_index])
        if memory:
            answers, best = memory
            best = best - self.handicaps[open_index]
            library = library_of(reliability)
            predictions = library.where(reliability >= best, predictions, answers)  # of equals the later
            reliability = library.maximum(reliability, best)
        return predictions, reliability, (predictions, reliability)


def _along(values: Array, levels: Floats, heights: Floats) -> Array:
    """Return the height of each value on the line through these points: a sum of rising parts, which never falls."""
    clip = library_of(values).clip
    height = 0.0 * values + heights[0]
    for (low, high), (lower, higher) in zip(pairwise(levels), pairwise(heights), strict=True):
        height = height + (higher - lower) * (clip(values - low, 0.0, high - low) / (high - low))
    return height


@dataclass(frozen=True, kw_only=True)
class Ensemble(Lens):
    """Answers with all exits so far: a weighted geometric mean of their probabilities (as in Zero-Time-Waste).

    At each exit the mean so far counts `kept` times and the exit itself `fresh` times, in log-probabilities. The score
    is the margin of what results.
    """

    score: ClassVar[str] = "ensemble_margin"
    kept: Floats  # per exit, what the mean so far counts; 0 at the first
    fresh: Floats  # per exit, what the exit itself counts

    def _check(self) -> None:
        if not len(self.kept) == len(self.fresh) == len(self.exits) > 0:
            raise BadInput(
                f"{len(self.kept)} and {len(self.fresh)} weights of an ensemble over exits {self.exits}: give one each"
            )
        if self.kept[0] != 0 or not all(weight >= 0 for weight in (*self.kept, *self.fresh)):
            raise BadInput(
                f"weights {self.kept} and {self.fresh} of an ensemble must be at least 0, and the first kept one 0"
            )

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("log_probabilities",)

    def step(self, exit_index: int, predictions: Array, columns: tuple[Array, ...], memory: Memory) -> Mapped:
        open_index = self.exits.index(exit_index)
        logs = self.fresh[open_index] * possible(columns[0])  # (samples, classes)
        if memory:
            logs = self.kept[open_index] * memory[0] + logs
        return logs.argmax(-1), margin(probabilities(logs)).round(decimals=DIGITS), (logs,)


def possible(logs: Array) -> Array:
    """Return log-probabilities in float64, none below that of the practically impossible."""
    library = library_of(logs)
    return library.clip(logs.astype(np.float64) if library is np else logs.double(), IMPOSSIBLE, None)


LENSES: dict[str, type[Lens]] = {lens.__name__: lens for lens in (Gain, Recall, Ensemble)}


def lens_from_dict(content: Mapping[str, Any]) -> Lens:
    """Return the lens that `to_dict` wrote."""
    values = dict(content)
    kind = LENSES[values.pop("lens")]
    return kind(**{name: _tuples(value) for name, value in values.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
