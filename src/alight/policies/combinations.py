"""Maps from the outputs of all exits so far to one answer and one score, on which a policy decides.

Combination
├── Vote            the class with the most votes of the exits so far, weighted by their scores
├── Gain            the exit's own answer, scored by what going on is expected to bring
├── GeometricMean   the class that is likeliest by a weighted mean of log-probabilities (Zero-Time-Waste)
└── Temperature     the exit's own answer, scored by its probability at a fitted temperature

A combination takes one step per exit, as a policy does, and remembers what it needs. `visit` applies the combination of
a policy in the walk, `Combination.apply` maps a recorded table by the same steps, so a policy calibrated with one runs
with it, too. `alight.calibrate` fits combinations; what was fitted is kept as plain numbers. Steps are sums, products
and comparisons in float64, and powers that are rounded: arrays and tensors agree to the last bit.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from itertools import islice, pairwise
from typing import Any, ClassVar

import numpy as np

from alight.errors import BadInput
from alight.outputs import TOP, HeadOutputs
from alight.scores import library_of

Array = Any  # a NumPy array or a torch tensor
Memory = tuple[Any, ...]
Mapped = tuple[Array, Array, Memory]  # answers, scores, and what to remember of the samples
Floats = tuple[float, ...]

DIGITS = 12  # of a score that took an exponential, in whose last bits libraries differ
IMPOSSIBLE = -30.0  # log-probabilities below are raised to it: a probability of 1e-13, and never 0 * infinity


@dataclass(frozen=True, kw_only=True)
class Combination(ABC):
    """What every combination has: exits, the recorded columns that it reads, the score that it gives, and `step`."""

    score: ClassVar[str]  # name of the score that it gives; higher is leave, as everywhere
    keeps_answers: ClassVar[bool] = False  # is every answer that of the exit itself?
    exits: tuple[int, ...]  # those that it was fitted for, all of which must be open
    top: int = 0  # likeliest classes of each exit that it reads

    def __post_init__(self) -> None:
        if not self.exits or any(after <= before for before, after in pairwise((-1, *self.exits))):
            raise BadInput(f"a combination of exits {self.exits}: give increasing indices, from 0")
        self._check()
        if not all(map(math.isfinite, _numbers(tuple(getattr(self, each.name) for each in fields(self))))):
            raise BadInput(f"a {type(self).__name__} holds numbers that are NaN or infinite: fit it again")

    @abstractmethod
    def _check(self) -> None:
        """Check that the numbers fit together."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the columns that it reads: the likeliest classes, or scores of the table."""
        return TOP

    @abstractmethod
    def step(self, exit_index: int, predictions: Array, columns: tuple[Array, ...], memory: Memory) -> Mapped:
        """Return answers and scores of the samples waiting at an exit, and what to remember of them, first ()."""

    def combined(self, exit_index: int, predictions: Array, columns: tuple[Array, ...], memory: Memory) -> Mapped:
        """Return what `step` does, also for one sample in numbers, of which it makes arrays of one."""
        if not isinstance(predictions, int):
            return self.step(exit_index, predictions, columns, memory)
        arrays = tuple([np.array([each]) for each in columns])
        answers, scores, memory = self.step(exit_index, np.array([predictions]), arrays, memory)
        return answers.item(), scores.item(), memory

    def apply(self, outputs: HeadOutputs) -> HeadOutputs:
        """Return the table of combined answers and scores at every exit, had no sample left before it.

        Exits that it was not fitted for stay unchanged: no policy with this combination opens them.
        """
        if self.exits[-1] >= outputs.num_exits:
            raise BadInput(
                f"a combination of exits {self.exits} and a table of {outputs.num_exits}: fit it on such a table"
            )
        memory: Memory = ()
        answers, scores = outputs.predictions.copy(), outputs.scores.copy()
        quality = None if outputs.quality is None else outputs.quality.copy()
        for exit_index in self.exits:
            columns = tuple(outputs.column(name)[:, exit_index] for name in self.inputs)
            seen = self.step(exit_index, outputs.predictions[:, exit_index], columns, memory)
            answers[:, exit_index], scores[:, exit_index], memory = seen
            if quality is not None:
                quality[:, exit_index] = outputs.quality_of(answers[:, exit_index], np.full(len(outputs), exit_index))
        table = replace(outputs, predictions=answers, quality=quality, features={}, top=None)
        return replace(table, scores=scores, score=self.score)

    def check(self, open_exits: Sequence[int]) -> None:
        """Raise `BadInput` unless it was fitted for just these open exits: it remembers the outputs of each."""
        if tuple(open_exits) != self.exits:
            raise BadInput(
                f"the combination was fitted for exits {self.exits} and the policy opens {tuple(open_exits)}:"
                " fit it for these, as calibrate.combined does"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the combination as JSON values."""
        return {"kind": type(self).__name__} | asdict(self)


@dataclass(frozen=True, kw_only=True)
class Vote(Combination):
    """Answers with the class that has the most votes; the score is its lead, on the scale of log-odds.

    At exit l, exit j <= l votes for its class with `constants[l][j] + slopes[l][j] * score`. The lead is over the class
    with the next most votes, or over `others[l]`, which stands for all classes that no exit has named. Of equals the
    latest exit's class wins.

    >>> vote = Vote(exits=(0, 1), constants=((0.0,), (0.0, 0.5)), slopes=((2.0,), (2.0, 2.0)), others=(0.0, 0.0))
    >>> combined = vote.apply(HeadOutputs(scores=[[0.75, 0.25]], predictions=[[3, 4]]))
    >>> combined.predictions, combined.scores
    (array([[3, 3]]), array([[1.5, 0.5]]))
    """

    score: ClassVar[str] = "lead"
    column: str = "margin"
    constants: tuple[Floats, ...]  # per exit, one per exit so far
    slopes: tuple[Floats, ...]  # likewise
    others: Floats  # per exit

    def _check(self) -> None:
        expected = [*range(1, len(self.exits) + 1)]
        for name, rows in {"constants": self.constants, "slopes": self.slopes}.items():
            if [len(row) for row in rows] != expected:
                raise BadInput(f"{name} of a vote of {len(expected)} exits: give one number for each exit so far")
            if not all(number >= 0 for row in rows for number in row):
                raise BadInput(f"{name} {rows} of a vote must be at least 0")
        if len(self.others) != len(expected):
            raise BadInput(f"{len(self.others)} votes for other classes of {len(expected)} exits: give one per exit")

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.column,)

    def numbers(self, open_index: int) -> Floats:
        """Return the step as numbers, for a kernel: constants and slopes, the latest exit's first, and all others."""
        return (*self.constants[open_index][::-1], *self.slopes[open_index][::-1], self.others[open_index])

    def step(self, exit_index: int, predictions: Array, columns: tuple[Array, ...], memory: Memory) -> Mapped:
        library = library_of(predictions)
        classes, scores = predictions[:, None], columns[0][:, None]  # (samples, exits so far), the latest first
        if memory:
            classes, scores = (library.concatenate(pair, 1) for pair in ((classes, memory[0]), (scores, memory[1])))
        open_index = self.exits.index(exit_index)
        votes = 0.0 * scores
        numbers = zip(reversed(self.constants[open_index]), reversed(self.slopes[open_index]), strict=True)
        for place, (constant, slope) in enumerate(numbers):
            voter = classes[:, place : place + 1], scores[:, place : place + 1]
            votes = votes + (constant + slope * voter[1]) * (classes == voter[0])
        answers, most = chosen(classes, votes)
        other = 0.0 * votes + self.others[open_index]
        rivals = library.where(classes == answers, other, library.maximum(votes, other))
        return answers[:, 0], most[:, 0] - library.amax(rivals, -1), (classes, scores)


@dataclass(frozen=True, kw_only=True)
class Gain(Combination):
    """Answers as each exit does; the score is what going on is expected to bring, negated.

    At each exit it is a linear function of all outputs so far: every column now, before, at best and on average, bent
    at knots; which earlier exits agree; and the predicted class.
    """

    score: ClassVar[str] = "negative_gain"
    keeps_answers: ClassVar[bool] = True
    columns: tuple[str, ...]
    knots: tuple[tuple[Floats, ...], ...]  # per exit and column, where the function may bend
    weights: tuple[Floats, ...]  # per exit, the constant first
    class_gains: tuple[Floats, ...] = ()  # per exit and predicted class, added; nothing for classes beyond

    def __post_init__(self) -> None:
        if not self.class_gains:
            object.__setattr__(self, "class_gains", ((),) * len(self.exits))
        super().__post_init__()

    def _check(self) -> None:
        parts = {"knots": self.knots, "weights": self.weights, "class gains": self.class_gains}
        for name, values in parts.items():
            if not len(values) == len(self.exits) > 0:
                raise BadInput(f"{name} for {len(values)} exits of a gain over {self.exits}: give one entry per exit")
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

    @property
    def most_knots(self) -> int:
        """The most knots that a column has at an exit."""
        return max(len(each) for knots in self.knots for each in knots)

    def numbers(self, open_index: int) -> Floats:
        """Return the step as numbers, for a kernel that takes equally many weights and knots at every exit.

        They are the classes that have a gain, what each earlier exit counts in a mean, the constant, for each column
        its four weights, its knots, and the weights of what is above them now and at best, then the four weights of
        agreement, and the gains of classes.
        """
        constant, *weights = self.weights[open_index]
        left, most, gains = iter(weights), self.most_knots, self.class_gains[open_index]
        made = [len(gains), 1.0 / max(open_index, 1), constant]
        for knots in self.knots[open_index]:
            counts = (4, len(knots), len(knots)) if open_index else (1, len(knots), 0)
            linear, now, best = ([*islice(left, count)] for count in counts)
            made += [*_padded(linear, 4), *_padded(knots, most, math.inf), *_padded(now, most), *_padded(best, most)]
        return (*made, *_padded([*left], 4), *gains, 0.0)

    def step(self, exit_index: int, predictions: Array, columns: tuple[Array, ...], memory: Memory) -> Mapped:
        open_index = self.exits.index(exit_index)
        described = clues(self.knots[open_index], predictions, columns, memory)
        constant, *weights = self.weights[open_index]
        gain = 0.0 * columns[0] + constant
        for weight, clue in zip(weights, described, strict=True):
            gain = gain + weight * clue
        if self.class_gains[open_index]:
            gain = gain + _of_class(predictions, self.class_gains[open_index], gain)
        return predictions, -gain, (*memory, (predictions, *columns))


def _padded(values: Sequence[float], size: int, filler: float = 0.0) -> list[float]:
    return [*values, *[filler] * (size - len(values))]


def _of_class(predictions: Array, values: Floats, like: Array) -> Array:
    """Return the value of each predicted class, 0 beyond the last, where and as precise as `like` is."""
    table = _table((*values, 0.0), library_of(like), like.dtype, like.device)
    return table[library_of(like).clip(predictions, 0, len(values))]


@lru_cache(maxsize=64)
def _table(values: Floats, library: Any, dtype: Any, device: Any) -> Array:
    """Return numbers as an array of a library, made once: a copy to a device waits for it."""
    return library.asarray(values, dtype=dtype, device=device)


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
class GeometricMean(Combination):
    """Answers with the class that is likeliest by a weighted geometric mean of the probabilities of all exits so far.

    At each exit the mean so far counts `kept` times and the exit itself `fresh` times, in log-probabilities; a class
    that is not among the likeliest of an exit counts as the last of them. The score is the gap to the next class.

    >>> table = HeadOutputs.from_logits(np.log([[[0.5, 0.4, 0.1], [0.1, 0.5, 0.4]]]), top=2)
    >>> GeometricMean(exits=(0, 1), kept=(0.0, 1.0), fresh=(1.0, 1.0), top=2).apply(table).predictions
    array([[0, 1]])
    """

    score: ClassVar[str] = "gap"
    kept: Floats  # per exit, what the mean so far counts; 0 at the first
    fresh: Floats  # per exit, what the exit itself counts

    def _check(self) -> None:
        if not len(self.kept) == len(self.fresh) == len(self.exits) or self.top < 1:
            raise BadInput(
                f"{len(self.kept)} and {len(self.fresh)} weights of the mean of exits {self.exits}, {self.top} classes"
                " each: give two weights per exit and at least one class"
            )
        if self.kept[0] != 0 or not all(weight >= 0 for weight in (*self.kept, *self.fresh)):
            raise BadInput(
                f"weights {self.kept} and {self.fresh} of a mean must be at least 0, and the first kept one 0"
            )

    def numbers(self, open_index: int) -> Floats:
        """Return the step as numbers, for a kernel: what the mean so far and the exit itself count."""
        return self.kept[open_index], self.fresh[open_index]

    def step(self, exit_index: int, predictions: Array, columns: tuple[Array, ...], memory: Memory) -> Mapped:
        open_index = self.exits.index(exit_index)
        classes, mean, outside, own, lowest = candidates(columns[0], columns[1], memory)
        values = self.kept[open_index] * mean + self.fresh[open_index] * own
        outside = self.kept[open_index] * outside + self.fresh[open_index] * lowest
        answers, likeliest = chosen(classes, values)
        library = library_of(values)
        rivals = library.where(classes == answers, outside, values)
        return answers[:, 0], likeliest[:, 0] - library.amax(rivals, -1), (classes, values, outside)


@dataclass(frozen=True, kw_only=True)
class Temperature(Combination):
    """Answers as each exit does; the score is the probability of its class at the exit's temperature (Guo et al. 2017).

    Probabilities to the power of 1 / temperature are normalised again; classes that are not among the likeliest share
    what is left of the probability evenly.

    >>> table = HeadOutputs.from_logits(np.log([[[0.8, 0.1, 0.1]]]))
    >>> Temperature(exits=(0,), temperatures=(2.0,), classes=3, top=3).apply(table).scores.round(3)
    array([[0.586]])
    """

    score: ClassVar[str] = "max_probability"
    keeps_answers: ClassVar[bool] = True
    temperatures: Floats  # per exit
    classes: int  # of the network

    def _check(self) -> None:
        positive = all(temperature > 0 for temperature in self.temperatures)
        if len(self.temperatures) != len(self.exits) or not positive or not 0 < self.top <= self.classes:
            raise BadInput(
                f"temperatures {self.temperatures} of exits {self.exits}, {self.top} of {self.classes} classes: give"
                " one positive number per exit, and no more classes than there are"
            )

    def step(self, exit_index: int, predictions: Array, columns: tuple[Array, ...], memory: Memory) -> Mapped:
        power = 1.0 / self.temperatures[self.exits.index(exit_index)]
        likely, rest = shares_of(columns[1], self.classes)
        warmed = likely**power
        total = warmed.sum(-1) + (self.classes - likely.shape[1]) * rest**power
        return predictions, library_of(total).round(warmed[:, 0] / total, decimals=DIGITS), ()


def shares_of(logs: Array, classes: int) -> tuple[Array, Array]:
    """Return the probabilities of the likeliest classes in float64, and that of each other class, if all are alike."""
    library = library_of(logs)
    likely = library.exp(logs.astype(np.float64) if library is np else logs.double())
    others = max(classes - likely.shape[1], 1)
    return likely, library.clip(1.0 - likely.sum(-1), 0.0, 1.0) / others


def candidates(classes: Array, logs: Array, memory: Memory) -> tuple[Array, ...]:
    """Return all classes among the likeliest so far, and their log-probabilities before and at this exit.

    Both come with the log-probability of all classes that are not among the likeliest, (samples, 1). This exit's
    classes come first; a class may come again, with the same numbers.

    >>> first, logs = np.array([[3, 4]]), np.array([[-0.5, -1.0]])
    >>> before = first, np.array([[-0.25, -3.0]]), np.array([[-3.0]])
    >>> candidates(np.array([[4, 7]]), logs, before)
    (array([[4, 7, 3, 4]]), array([[-3.  , -3.  , -0.25, -3.  ]]), array([[-3.]]), array([[-0.5, -1. , -1. , -0.5]]), array([[-1.]]))
    """  # noqa: E501
    library = library_of(logs)
    indices = classes.astype(np.int64) if library is np else classes.long()
    own = library.clip(logs.astype(np.float64) if library is np else logs.double(), IMPOSSIBLE, None)
    lowest = own[:, -1:]
    if not memory:
        return indices, 0.0 * own, 0.0 * lowest, own, lowest
    earlier, mean, outside = memory
    now, before = 0.0 * mean + lowest, 0.0 * own + outside  # classes of either among those of the other
    for place in range(indices.shape[1]):
        same = earlier == indices[:, place : place + 1]
        now = library.where(same, own[:, place : place + 1], now)
        before[:, place] = library.amax(library.where(same, mean, outside), -1)  # no mean is below that of others
    both = (indices, earlier), (before, mean), (own, now)
    everything, means, owns = (library.concatenate(pair, 1) for pair in both)
    return everything, means, outside, owns, lowest


def chosen(classes: Array, values: Array) -> tuple[Array, Array]:
    """Return the class with the largest value, of equals the first, and that value, both (samples, 1)."""
    best = values.argmax(-1)[:, None]
    take = np.take_along_axis if library_of(values) is np else library_of(values).take_along_dim
    return take(classes, best, 1), take(values, best, 1)


COMBINATIONS: dict[str, type[Combination]] = {kind.__name__: kind for kind in (Vote, Gain, GeometricMean, Temperature)}


def combination_from_dict(content: Mapping[str, Any]) -> Combination:
    """Return the combination that `to_dict` wrote."""
    values = dict(content)
    kind = COMBINATIONS[values.pop("kind")]
    return kind(**{name: _tuples(value) for name, value in values.items()})


def _numbers(value: Any) -> Iterator[float]:
    """Yield all numbers of nested tuples."""
    if isinstance(value, tuple):
        for each in value:
            yield from _numbers(each)
    elif not isinstance(value, str):
        yield value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
