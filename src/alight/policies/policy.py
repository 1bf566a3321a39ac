"""The rules by which a sample leaves. A policy is frozen; what it remembers of samples is passed through `step`.

Policy
├── Threshold   the score has reached the exit's threshold
├── Streak      the score has reached one threshold at several exits in a row (PCEE)
├── Patience    the prediction has stayed the same for several exits (PABEE)
├── ExitAt      every sample leaves at one exit
├── Lottery     planned shares leave at each exit, drawn at random
├── Capped      as another policy says, but some no later than at an exit of their own (limits.py)
└── Mixture     a share of the samples follows one policy, the rest another
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from alight.budgeting.thresholds import hashed_below
from alight.display import html_table
from alight.errors import BadInput, Mismatch
from alight.files import PathLike, write_json
from alight.outputs import HeadOutputs
from alight.policies.lenses import Lens

Array = Any  # a NumPy array, a torch tensor, or one sample's number: steps use operators that mean the same for all
Memory = tuple[Any, ...]  # arrays with one entry per sample still waiting, or such tuples again
Step = tuple[Array, Memory]  # which samples leave, and what to remember of all of them


class BatchState:
    """What a policy remembers of the whole batch or stream: handed on whole, not sample by sample."""


@dataclass(frozen=True)
class Certificate:
    """What is guaranteed about a policy, under which assumption, with which numbers."""

    contract: str  # "mean", "probability", "batch", "stream", or the risk that is bounded
    guarantee: str
    assumption: str
    numbers: Mapping[str, float | str] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.guarantee} {self.assumption}".strip()


LOTTERY_SALT = 100  # plus the exit's position: every exit draws anew
MIXTURE_SALT = 1  # so that the samples of a mixture's share and the ties that leave are independent


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """What every policy carries: the exits it opens, what they cost, and what it was calibrated for.

    >>> from alight import calibrate, recordings
    >>> labelled, test, costs = recordings.load()
    >>> policy = calibrate.best_single_exit(costs, "50%", labelled)
    >>> print(policy)
    best_single_exit: every sample leaves at exit 2, on the margin
    budget 5.554e+08 FLOPs per sample, of which 76.2% is planned to be spent
    exit      cost     rate
       2  4.23e+08  100.00%
    """

    costs: tuple[float, ...]  # cumulative, of the open exits
    open_exits: tuple[int, ...] = ()  # by default as many as there are costs
    num_exits: int = 0  # of the network; by default up to the last open one
    unit: str = ""
    budget: float | None = None  # average cost per sample, in the unit
    score: str = "margin"
    method: str = ""
    exit_rates: tuple[float, ...] = ()  # planned shares of the open exits, where the method plans them
    settings: Mapping[str, float | str] = field(default_factory=dict, hash=False)  # what the method chose or was given
    lens: Lens | None = (
        None  # maps what the heads say before the policy decides; without one answers are their exit's own
    )
    certificate: Certificate | None = None  # what is guaranteed about it
    fingerprint: str = ""  # of the network on whose outputs it was calibrated, where it is known

    is_batch_dependent: ClassVar[bool] = False  # whether samples that share a batch decide about each other

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, _as_python(getattr(self, each.name)))
        if not self.costs:
            raise BadInput("a policy with no costs opens no exit: give the cumulative cost of each open exit")
        if not self.open_exits:
            object.__setattr__(self, "open_exits", tuple(range(len(self.costs))))
        object.__setattr__(self, "num_exits", self.num_exits or self.open_exits[-1] + 1)
        self._check()

    def _check(self) -> None:
        """Check that the parts fit together; rules add their own checks."""
        order = [-1, *self.open_exits, self.num_exits]
        exits, names = f"open exits {self.open_exits}", (self.score, self.unit, self.method, self.fingerprint)
        if set(map(type, order)) != {int}:
            raise BadInput(f"{exits} of {self.num_exits}: give whole numbers")
        if not all(map(_is_number, self.costs)):
            raise BadInput(f"costs {self.costs} must be finite numbers")
        if order != sorted(set(order)):
            raise BadInput(f"{exits} of {self.num_exits}: give increasing indices, from 0")
        if len(self.costs) != len(self.open_exits) or [0, *self.costs] != sorted({0, *self.costs}):
            raise BadInput(f"costs {self.costs} for {exits}: give one each, positive, increasing")
        if not all(isinstance(name, str) for name in names):
            raise BadInput("score {!r}, unit {!r}, method {!r} and fingerprint {!r} must be texts".format(*names))
        if self.budget is not None and not _is_number(self.budget, above=0):
            raise BadInput(f"budget {self.budget!r} must be a positive number")
        if not all(map(_is_share, self.exit_rates)):
            raise BadInput(f"exit rates {self.exit_rates} must lie in [0, 1]")
        if abs(sum(self.exit_rates or [1]) - 1) > 1e-6:
            raise BadInput(f"exit rates {self.exit_rates} must add up to 1")
        if len(self.exit_rates) not in (0, len(self.open_exits)):
            raise BadInput(f"exit rates {self.exit_rates} for {exits}: give one each")
        if self.lens:
            self.lens.check(self.open_exits)

    @abstractmethod
    def step(self, open_index: int, samples: Array, predictions: Array, scores: Array, memory: Memory) -> Step:
        """Return which samples leave at the open exit of this position, and what to remember of all of them.

        `samples` are stable indices; `memory` is empty at the first exit. Never called at the last open exit,
        which takes every sample.
        """

    def sent_out(self, open_index: int, count: int, memory: Memory) -> Memory:
        """Return what to remember once this many samples that it kept have been made to leave here as well."""
        return memory

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the columns that a walk reads at each exit: the score, or what the lens needs."""
        return self.lens.inputs if self.lens else (self.score,)

    @property
    def takes_single_samples(self) -> bool:
        """Whether `visit` and `step` also take the numbers of one sample instead of arrays."""
        return self.lens is None and not self.is_batch_dependent

    def view(self, outputs: HeadOutputs) -> HeadOutputs:
        """Return a recorded table as the policy decides on it: mapped by its lens, if it has one."""
        return self.lens.apply(outputs) if self.lens else outputs

    @property
    def planned_cost(self) -> float | None:
        """Mean cost that the planned rates would spend; None where the method plans none."""
        return float(np.dot(self.exit_rates, self.costs)) if self.exit_rates else None

    def check(self, outputs: HeadOutputs) -> None:
        """Raise `Mismatch` unless the policy was made for such a table."""
        differs = ""
        if outputs.num_exits != self.num_exits:
            differs = f"for {self.num_exits} exits and the table has {outputs.num_exits}"
        elif self.fingerprint and outputs.fingerprint and self.fingerprint != outputs.fingerprint:
            differs = f"for the network {self.fingerprint} and the table is of {outputs.fingerprint}"
        if differs:
            raise Mismatch(f"the policy is {differs}: calibrate on outputs of this network")
        if self.lens:
            for name in self.inputs:
                outputs.column(name)
        elif outputs.score != self.score:
            raise Mismatch(
                f"the policy was calibrated on {self.score!r} and the table's score is {outputs.score!r}:"
                f" use with_score({self.score!r}) or calibrate again"
            )

    def terms(self) -> dict[str, Any]:
        """Return what the policy carries beside its rule, by field."""
        return {each.name: getattr(self, each.name) for each in fields(Policy)}

    def rule(self) -> list[list[str]]:
        """Return the rule's own numbers as columns of text: a name, then one entry per open exit."""
        return []

    def summary(self) -> str:
        """Return the rule in a few words."""
        return type(self).__name__

    def __str__(self) -> str:
        return "\n".join([*self._lines(), *aligned(self._columns())])

    def _repr_html_(self) -> str:
        title, *notes = self._lines()
        return html_table(title, self._columns(), notes)

    def _lines(self) -> list[str]:
        """Return lines about the whole policy: its rule, budget, settings and guarantee."""
        lines = [f"{self.method or 'policy'}: {self.summary()}, on the {self.score}"]
        if self.budget is not None:
            planned = self.planned_cost
            spent = "" if planned is None else f", of which {planned / self.budget:.1%} is planned to be spent"
            lines.append(f"budget {self.budget:.4g}{self.unit and ' ' + self.unit} per sample{spent}")
        if self.settings:
            texts = {name: value if isinstance(value, str) else f"{value:.4g}" for name, value in self.settings.items()}
            lines.append(", ".join(map(" ".join, texts.items())))
        if self.certificate:
            lines.append(str(self.certificate))
        return lines

    def _columns(self) -> list[list[str]]:
        """Return columns of text about every open exit."""
        columns = [["exit", *map(str, self.open_exits)], ["cost", *(f"{cost:.4g}" for cost in self.costs)]]
        if self.exit_rates:
            columns.append(["rate", *(f"{rate:.2%}" for rate in self.exit_rates)])
        return [*columns, *self.rule()]

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as JSON values; infinite thresholds are "never" and "always"."""
        return {"rule": type(self).__name__} | {each.name: _to_json(getattr(self, each.name)) for each in fields(self)}

    def save(self, path: PathLike) -> None:
        """Write the policy to a JSON file, whole or not at all."""
        write_json(path, "Policy", self.to_dict())


@dataclass(frozen=True)
class Threshold(Policy):
    """Leave once the score has reached the exit's threshold.

    >>> policy = Threshold(thresholds=(0.9,), costs=(1.0, 3.0), budget=2.0, method="by hand")
    >>> print(policy)
    by hand: leave at the first score that reaches its threshold, on the margin
    budget 2 per sample
    exit  cost  threshold
       0     1        0.9
       1     3   everyone
    """

    thresholds: tuple[float, ...]  # of every open exit but the last
    tie_shares: tuple[float, ...] = ()  # of the samples that equal the threshold, how many leave; by default all

    def __post_init__(self) -> None:
        if not len(self.tie_shares):
            object.__setattr__(self, "tie_shares", (1.0,) * len(self.thresholds))
        super().__post_init__()

    def _check(self) -> None:
        super()._check()
        if not len(self.thresholds) == len(self.tie_shares) == len(self.costs) - 1:
            raise BadInput(
                f"{len(self.thresholds)} thresholds and {len(self.tie_shares)} tie shares for {len(self.costs)}"
                " open exits: give one less than exits, since the last takes everyone"
            )
        if any(math.isnan(value) for value in self.thresholds):
            raise BadInput(f"thresholds {self.thresholds} hold NaN: give numbers")
        if not all(map(_is_share, self.tie_shares)):
            raise BadInput(f"tie shares {self.tie_shares} must lie in [0, 1]")

    def step(self, open_index: int, samples: Array, predictions: Array, scores: Array, memory: Memory) -> Step:
        return reaches(scores, samples, self.thresholds[open_index], self.tie_shares[open_index]), memory

    def rule(self) -> list[list[str]]:
        columns = [["threshold", *(_threshold(value) for value in self.thresholds), "everyone"]]
        if any(share < 1 for share in self.tie_shares):
            columns.append(["tie share", *(f"{share:.1%}" for share in self.tie_shares), ""])
        return columns

    def summary(self) -> str:
        return "leave at the first score that reaches its threshold"


@dataclass(frozen=True)
class Streak(Policy):
    """Leave once the score has reached one threshold at `patience` exits in a row."""

    threshold: float
    patience: int

    def _check(self) -> None:
        super()._check()
        if math.isnan(self.threshold) or type(self.patience) is not int or self.patience < 1:
            raise BadInput(f"threshold {self.threshold} and patience {self.patience}: give a number, and 1 or more")

    def step(self, open_index: int, samples: Array, predictions: Array, scores: Array, memory: Memory) -> Step:
        confident = scores >= self.threshold
        (streak,) = memory or (0 * predictions,)
        streak = (streak + 1) * confident
        return streak >= self.patience, (streak,)

    def summary(self) -> str:
        if self.threshold == math.inf:
            return "no sample leaves early"
        reach = f"reach {_threshold(self.threshold)}" if self.threshold > -math.inf else "have been seen"
        return f"leave when {f'{self.patience} scores in a row' if self.patience > 1 else 'a score has'} {reach}"


@dataclass(frozen=True)
class Patience(Policy):
    """Leave once the prediction has stayed the same for `patience` exits after the first."""

    patience: int

    def _check(self) -> None:
        super()._check()
        if type(self.patience) is not int or self.patience < 0:
            raise BadInput(f"patience {self.patience!r} must be a whole number, 0 or more")

    def step(self, open_index: int, samples: Array, predictions: Array, scores: Array, memory: Memory) -> Step:
        previous, agreements = memory or (predictions, 0 * predictions - 1)
        agreements = (agreements + 1) * (predictions == previous)
        return agreements >= self.patience, (predictions, agreements)

    def summary(self) -> str:
        return (
            f"leave when {self.patience + 1} exits in a row agree" if self.patience else "every sample leaves at once"
        )


@dataclass(frozen=True)
class ExitAt(Policy):
    """Every sample leaves at one exit; no other head is evaluated."""

    def _check(self) -> None:
        super()._check()
        if len(self.open_exits) != 1:
            raise BadInput(f"ExitAt opens {len(self.open_exits)} exits, {self.open_exits}: open one")

    def step(self, open_index: int, samples: Array, predictions: Array, scores: Array, memory: Memory) -> Step:
        return samples == samples, memory

    def summary(self) -> str:
        return f"every sample leaves at exit {self.open_exits[0]}"


@dataclass(frozen=True)
class Lottery(Policy):
    """Leave at random, whatever the scores, at the planned rates: the theorem's randomised mixture.

    >>> policy = Lottery(costs=(1.0, 3.0), exit_rates=(0.25, 0.75))
    >>> policy.step(0, np.arange(1000), None, None, ())[0].mean()
    np.float64(0.243)
    """

    def _check(self) -> None:
        super()._check()
        if not self.exit_rates:
            raise BadInput("a lottery without exit rates: give one for each open exit")

    def step(self, open_index: int, samples: Array, predictions: Array, scores: Array, memory: Memory) -> Step:
        waiting = sum(self.exit_rates[open_index:])
        share = min(1.0, self.exit_rates[open_index] / waiting) if waiting > 0 else 1.0
        return hashed_below(samples, share, LOTTERY_SALT + open_index), memory

    def summary(self) -> str:
        return "leave at random"


@dataclass(frozen=True)
class Mixture(Policy):
    """A share of the samples, chosen by the hash of their index, follows `first`; the rest follows `second`."""

    first: Policy
    second: Policy
    share: float  # of the first

    def _check(self) -> None:
        super()._check()
        for part in (self.first, self.second):
            if (part.open_exits, part.costs) != (self.open_exits, self.costs) or part.score != self.score:
                raise BadInput(
                    f"a mixture over exits {self.open_exits} has a part over {part.open_exits}:"
                    " mix policies with the same open exits, costs and score"
                )
        if not 0 <= self.share <= 1:
            raise BadInput(f"share {self.share:g} of a mixture must lie in [0, 1]")

    def step(self, open_index: int, samples: Array, predictions: Array, scores: Array, memory: Memory) -> Step:
        memories = memory or ((), ())
        chosen = hashed_below(samples, self.share, MIXTURE_SALT)
        leave_first, first = self.first.step(open_index, samples, predictions, scores, memories[0])
        leave_second, second = self.second.step(open_index, samples, predictions, scores, memories[1])
        return (chosen & leave_first) | ((chosen ^ True) & leave_second), (first, second)

    def rule(self) -> list[list[str]]:
        parts = {"first": self.first.rule(), "second": self.second.rule()}
        return [[f"{name} {column[0]}", *column[1:]] for name, columns in parts.items() for column in columns]

    def summary(self) -> str:
        first, second = self.first.summary(), self.second.summary()
        return f"first, {self.share:.1%} of samples: {first}; second, the others: {second}"


def reaches(scores: Array, samples: Array, threshold: float, tie_share: float) -> Array:
    """Return where a score is above the threshold, or equals it and the sample is in the share of ties that leaves."""
    if tie_share >= 1:
        return scores >= threshold
    return (scores > threshold) | ((scores == threshold) & hashed_below(samples, tie_share))


def aligned(columns: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of a table whose columns, each headed by its name, are aligned to the right."""
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _threshold(value: float) -> str:
    return {math.inf: "never", -math.inf: "always"}.get(value, f"{value:.6g}")


def _as_python(value: Any) -> Any:
    """Return the value without NumPy: scalars as Python numbers, arrays and lists as tuples, mappings as dicts."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(_as_python(each) for each in value)
    if isinstance(value, Mapping):
        return {name: _as_python(each) for name, each in value.items()}
    return value


def _is_number(value: Any, above: float = -math.inf) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and above < value < math.inf


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _to_json(value: Any) -> Any:
    if isinstance(value, Policy | Lens):
        return value.to_dict()
    if isinstance(value, Certificate):
        return asdict(value)
    if isinstance(value, tuple):
        return [_to_json(each) for each in value]
    if isinstance(value, Mapping):
        return {name: _to_json(each) for name, each in value.items()}
    if isinstance(value, float) and math.isinf(value):
        return _threshold(value)
    return value
