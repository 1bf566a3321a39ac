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
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np

from alight.budgeting.thresholds import SALTS, hash_limit, hash_terms, hashed_below, tie_range
from alight.costs import Costs
from alight.display import accuracy_text, aligned, exit_names, html_table, layer_label, percent, quantity, shape_text
from alight.errors import BadInput, Mismatch
from alight.files import PathLike, write_json
from alight.outputs import TOP, HeadOutputs
from alight.policies.combinations import Combination

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


TIES, MIXING, LOTTERY = 0, 1, 100  # purposes of random draws, independent of each other; a lottery draws at every exit


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """What every policy carries: the exits it opens, what they cost, and what it was calibrated for.

    >>> from alight import calibrate, recordings
    >>> labelled, test, costs = recordings.load()
    >>> policy = calibrate.best_single_exit(costs, "50%", labelled)
    >>> print(policy)
    best_single_exit: every sample leaves at exit 3, on the margin
    budget 555 MFLOPs per sample (50 % of the full network), planned 423 MFLOPs (38.1 %)
    exit          cost  of full   leave
    exit 3  423 MFLOPs   38.1 %  100.0 %
    """

    costs: tuple[float, ...]  # cumulative, of the open exits
    open_exits: tuple[int, ...] = ()  # by default as many as there are costs
    num_exits: int = 0  # of the network; by default up to the last open one
    unit: str = ""  # of the costs
    budget: float | None = None  # average cost per sample, in the unit
    score: str = "margin"  # that it reads
    method: str = ""  # that fitted it
    exit_rates: tuple[float, ...] = ()  # planned shares of the open exits, where the method plans them
    settings: Mapping[str, float | str] = field(default_factory=dict, hash=False)  # what the method chose or was given
    combination: Combination | None = None  # of the exits' answers, before the policy decides; else each has its own
    certificate: Certificate | None = None  # what is guaranteed about it
    exits: tuple[str, ...] = ()  # names of all exits of the network, where they are known
    full_cost: float | None = None  # of the full network per sample, where it is known
    fingerprint: str = ""  # of the network on whose outputs it was calibrated, where it is known
    sample_shape: tuple[int, ...] = ()  # of the images on which it was calibrated, where all had the same
    salt: int = 0  # with a sample's number it decides ties and mixtures; certificates average over it

    is_batch_dependent: ClassVar[bool] = False  # whether samples that share a batch decide about each other
    reads_costs: ClassVar[bool] = False  # whether what every call cost is its last input, and goes to `charged`

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
        if type(self.salt) is not int or not 0 <= self.salt < SALTS:
            raise BadInput(f"salt {self.salt!r} must be a whole number from 0 to {SALTS - 1}")
        self._check_network()
        if self.exit_rates:
            self._check_rates()
        if self.combination:
            self.combination.check(self.open_exits)

    def _check_network(self) -> None:
        if self.full_cost is not None and not _is_number(self.full_cost, above=0):
            raise BadInput(f"full_cost {self.full_cost!r} must be a positive number")
        if self.exits and (len(self.exits) != self.num_exits or {*map(type, self.exits)} != {str}):
            raise BadInput(f"exits {self.exits} of {self.num_exits}: give the name of each, or none")
        if self.sample_shape and ({*map(type, self.sample_shape)} != {int} or min(self.sample_shape) < 1):
            raise BadInput(f"sample shape {self.sample_shape}: give whole numbers above 0, or none")

    def _check_rates(self) -> None:
        rates = f"exit rates {self.exit_rates}"
        if not all(_is_number(rate) and 0 <= rate <= 1 for rate in self.exit_rates):
            raise BadInput(f"{rates} must lie in [0, 1]")
        if abs(sum(self.exit_rates) - 1) > 1e-6:
            raise BadInput(f"{rates} must add up to 1")
        if len(self.exit_rates) != len(self.open_exits):
            raise BadInput(f"{rates} for open exits {self.open_exits}: give one each")

    @abstractmethod
    def step(self, open_index: int, samples: Array, predictions: Array, scores: Array, memory: Memory) -> Step:
        """Return which samples leave at the open exit of this position, and what to remember of all of them.

        `samples` are their numbers, each given once; `memory` is empty at the first exit. Never called at the last open
        exit, which takes every sample.
        """

    def sent_out(self, open_index: int, count: int, memory: Memory) -> Memory:
        """Return what to remember once this many samples that it kept have been made to leave here as well."""
        return memory

    def charged(self, open_index: int, costs: Array, memory: Memory) -> Memory:
        """Return what to remember once the calls of an open exit have cost this, of a policy that reads costs."""
        return memory

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the columns that a walk reads at each exit: the score, or what the combination needs."""
        return self.combination.inputs if self.combination else (self.score,)

    @property
    def combines(self) -> bool:
        """Whether the answers of exits are combined before it decides."""
        return self.combination is not None

    def reads(self, open_index: int) -> tuple[tuple[str, ...], int]:
        """Return the scores that are computed at an open exit, and for how many likeliest classes of it.

        The last takes all samples unread, unless answers are combined there too.
        """
        if self.combination is None:
            return (() if open_index == len(self.costs) - 1 else self.inputs), 0
        return tuple(name for name in self.inputs if name not in TOP), self.combination.top

    def leaving_scores(self) -> tuple[float, ...]:
        """Return the score from which a sample leaves, of every open exit but the last; none, if that alone is not it.

        Engines only take it to guess how far a sample will run.
        """
        return ()

    def usable_score(self, scores: Sequence[float]) -> float | None:
        """Return the last of the scores of one sample so far to decide on, as low as can be where it is NaN.

        None where it cannot be decided on: answers are combined of all exits or none.
        """
        if self.combination and any(map(math.isnan, scores)):
            return None
        return -math.inf if math.isnan(scores[-1]) else scores[-1]

    @property
    def keeps_answers(self) -> bool:
        """Whether every answer is that of the exit where the sample leaves, and so has its probability."""
        return self.combination is None or self.combination.keeps_answers

    @property
    def takes_single_samples(self) -> bool:
        """Whether `step` also takes the numbers of one sample instead of arrays."""
        return not self.is_batch_dependent

    def view(self, outputs: HeadOutputs) -> HeadOutputs:
        """Return a recorded table as the policy decides on it: combined, if it combines."""
        return self.combination.apply(outputs) if self.combination else outputs

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
        elif self.exits and outputs.exits and self.exits != outputs.exits:
            differs = f"for exits {', '.join(self.exits)} and the table has {', '.join(outputs.exits)}"
        elif self.sample_shape and outputs.sample_shape and self.sample_shape != outputs.sample_shape:
            own, other = map(shape_text, (self.sample_shape, outputs.sample_shape))
            differs = f"for samples of {own}, and the table is of {other}, which cost something else"
        if differs:
            raise Mismatch(f"the policy is {differs}: calibrate on outputs of this network")
        if self.combination:
            for name in self.inputs:
                outputs.column(name)
        elif outputs.score != self.score:
            raise Mismatch(
                f"the policy was calibrated on {self.score!r} and the table's score is {outputs.score!r}:"
                f" use with_score({self.score!r}) or calibrate again"
            )

    @property
    def exit_names(self) -> tuple[str, ...]:
        """Names of all exits of the network: "exit 1", "exit 2", ... where they are not known."""
        return exit_names(self.exits, self.num_exits)

    def amount(self, cost: float) -> str:
        """Return a cost per sample with its unit, and in percent of the full network where that is known.

        >>> Threshold(thresholds=(0.9,), costs=(1e6, 3e6), unit="FLOPs", full_cost=2.5e6).amount(1e6)
        '1 MFLOPs (40 %)'
        """
        share = "" if self.full_cost is None else f" ({percent(cost / self.full_cost)})"
        return f"{quantity(cost, self.unit)}{share}"

    def in_own_unit(self, budget: float | str) -> float:
        """Return a budget as a number in the unit of the costs; percentages are of the full network.

        >>> Threshold(thresholds=(0.9,), costs=(1.0, 5.0), full_cost=4.0).in_own_unit("50%")
        2.0
        """
        return Costs.from_cumulative(self.costs, self.unit, self.full_cost).budget(budget)

    def renumbered(self, numbers: Sequence[int] | Mapping[int, int], **changed: Any) -> "Policy":
        """Return the policy for a network in which its exits have these numbers, also in its combination and parts."""
        opened = tuple(numbers[index] for index in self.open_exits)
        own: dict[str, Any] = {"open_exits": opened, **changed}
        if self.combination:
            own["combination"] = replace(self.combination, exits=opened)
        for each in fields(self):
            if isinstance(part := getattr(self, each.name), Policy):
                own[each.name] = part.renumbered(numbers, **changed)
        return replace(self, **own)

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
            share = "" if self.full_cost is None else f" ({percent(self.budget / self.full_cost)} of the full network)"
            planned = "" if self.planned_cost is None else f", planned {self.amount(self.planned_cost)}"
            lines.append(f"budget {quantity(self.budget, self.unit)} per sample{share}{planned}")
        if self.settings:
            texts = {name: value if isinstance(value, str) else f"{value:.4g}" for name, value in self.settings.items()}
            lines.append(", ".join(map(" ".join, texts.items())))
        if self.certificate:
            lines.append(str(self.certificate))
        return lines

    def _columns(self) -> list[list[str]]:
        """Return columns of text about every open exit."""
        names = exit_names(self.exits, self.num_exits)
        columns = [["exit", *(layer_label(names[index]) for index in self.open_exits)]]
        columns.append(["cost", *(quantity(cost, self.unit) for cost in self.costs)])
        if self.full_cost is not None:
            columns.append(["of full", *(percent(cost / self.full_cost) for cost in self.costs)])
        if self.exit_rates:
            columns.append(["leave", *map(accuracy_text, self.exit_rates)])
        return [*columns, *self.rule()]

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as JSON values; infinite thresholds are "never" and "always"."""
        return {"rule": type(self).__name__} | {each.name: _to_json(getattr(self, each.name)) for each in fields(self)}

    def save(self, path: PathLike) -> None:
        """Write the policy to a JSON file, whole or not at all."""
        write_json(path, "Policy", self.to_dict())


@dataclass(frozen=True)
class Threshold(Policy):
    """Leave once the score has reached the exit's threshold; one that differs only by rounding is tied with it.

    >>> policy = Threshold(thresholds=(0.9,), costs=(1.0, 3.0), budget=2.0, method="by hand")
    >>> print(policy)
    by hand: leave at the first score that reaches its threshold, on the margin
    budget 2 per sample
    exit    cost  threshold
    exit 1     1        0.9
    exit 2     3   everyone
    """

    thresholds: tuple[float, ...]  # of every open exit but the last
    tie_shares: tuple[float, ...] = ()  # of the samples tied with the threshold, how many leave; by default all

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
        if not all(_is_number(share) and 0 <= share <= 1 for share in self.tie_shares):
            raise BadInput(f"tie shares {self.tie_shares} must lie in [0, 1]")

    def step(self, open_index: int, samples: Array, predictions: Array, scores: Array, memory: Memory) -> Step:
        return reaches(scores, samples, self.thresholds[open_index], self.tie_shares[open_index], self.salt), memory

    def leaving_scores(self) -> tuple[float, ...]:
        return () if self.combination else self.thresholds

    def numbers(self, open_index: int) -> tuple[tuple[float, float], list[int]]:
        """Return the step as numbers, for a kernel: the range of ties; terms and limit of the hash; if it is alone."""
        ties = hash_limit(self.tie_shares[open_index])
        return tie_range(self.thresholds[open_index]), [*hash_terms(self.salt, TIES), ties, False]

    def rule(self) -> list[list[str]]:
        columns = [["threshold", *(_threshold(value) for value in self.thresholds), "everyone"]]
        if any(share < 1 for share in self.tie_shares):
            columns.append(["of ties", *map(accuracy_text, self.tie_shares), ""])
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
        confident = scores >= tie_range(self.threshold)[0]
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
        return f"every sample leaves at {layer_label(self.exit_names[self.open_exits[0]])}"


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
        return hashed_below(samples, self._share_leaving(open_index), self.salt, LOTTERY + open_index), memory

    def numbers(self, open_index: int) -> tuple[tuple[float, float], list[int]]:
        """Return the step as numbers, for a kernel, as those of a threshold are."""
        limit = hash_limit(self._share_leaving(open_index))
        return (math.inf, math.inf), [*hash_terms(self.salt, LOTTERY + open_index), limit, True]

    def _share_leaving(self, open_index: int) -> float:
        waiting = sum(self.exit_rates[open_index:])
        return min(1.0, self.exit_rates[open_index] / waiting) if waiting > 0 else 1.0

    def summary(self) -> str:
        return "leave at random"


@dataclass(frozen=True)
class Mixture(Policy):
    """A share of the samples, drawn by their numbers, follows `first`; the rest follows `second`.

    Both parts have the salt of the mixture.
    """

    first: Policy
    second: Policy
    share: float  # of the first

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "first", replace(self.first, salt=self.salt))
        object.__setattr__(self, "second", replace(self.second, salt=self.salt))

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
        chosen = hashed_below(samples, self.share, self.salt, MIXING)
        leave_first, first = self.first.step(open_index, samples, predictions, scores, memories[0])
        leave_second, second = self.second.step(open_index, samples, predictions, scores, memories[1])
        return (chosen & leave_first) | ((chosen ^ True) & leave_second), (first, second)

    def rule(self) -> list[list[str]]:
        parts = {"first": self.first.rule(), "second": self.second.rule()}
        return [[f"{name} {column[0]}", *column[1:]] for name, columns in parts.items() for column in columns]

    def summary(self) -> str:
        first, second = self.first.summary(), self.second.summary()
        return f"first, {accuracy_text(self.share)} of samples: {first}; second, the others: {second}"


def reaches(scores: Array, samples: Array, threshold: float, tie_share: float, salt: int) -> Array:
    """Return where a score is above the threshold, or tied with it and the sample in the share of ties that leaves."""
    lowest, highest = tie_range(threshold)
    if tie_share >= 1:
        return scores >= lowest
    return (scores > highest) | ((scores >= lowest) & hashed_below(samples, tie_share, salt, TIES))


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


def _to_json(value: Any) -> Any:
    if isinstance(value, Policy | Combination):
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
