"""Was it good? Accuracy and cost with intervals, the oracle, and methods side by side on the same recorded outputs.

>>> from alight import calibrate, recordings
>>> labelled, test, costs = recordings.load()
>>> points = sweep({"eero": calibrate.eero}, costs, ["40%", "60%"], labelled=labelled, test=test)
>>> sorted({point.method for point in points})
['eero', 'oracle', 'single_exit']
"""

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from alight.costs import Costs, as_costs
from alight.errors import BadFile, BadInput, BudgetTooSmall, Mismatch
from alight.files import PathLike, write_text
from alight.outputs import Decisions, HeadOutputs
from alight.policies.paced import Paced
from alight.policies.policy import ExitAt, Policy, Threshold
from alight.policies.route import replay

__all__ = [
    "ORACLE",
    "SINGLE_EXIT",
    "Bootstrap",
    "Classes",
    "Interval",
    "MethodComparison",
    "Point",
    "at_equal_spend",
    "bootstrap",
    "oracle",
    "oracle_within",
    "per_class",
    "read_points",
    "sweep",
    "write_points",
]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

ORACLE, SINGLE_EXIT = "oracle", "single_exit"  # references beside the methods


@dataclass(frozen=True)
class Point:
    """One method at one budget, on test data.

    >>> print(Point("eero", budget=4.0, accuracy=0.8, mean_cost=3.0))
    eero: 80.00% at 75% of the budget
    """

    method: str
    budget: float  # allowed per sample
    accuracy: float
    mean_cost: float  # spent per sample
    accuracy_low: float = float("nan")
    accuracy_high: float = float("nan")
    mean_cost_low: float = float("nan")
    mean_cost_high: float = float("nan")
    full_cost: float = float("nan")  # of the full network
    unit: str = ""
    exit_rates: tuple[float, ...] = ()  # planned, per exit of the network
    exit_shares: tuple[float, ...] = ()  # observed
    exit_costs: tuple[float, ...] = ()  # of leaving there, with the heads of all open exits on the way; inf: closed
    thresholds: tuple[float, ...] = ()  # per exit of the network: inf where nobody leaves, -inf where everyone does
    rule: str = ""  # by which samples leave, in a few words
    guarantee: str = ""  # what is certified about the policy, in a sentence

    def __str__(self) -> str:
        return f"{self.method}: {self.accuracy:.2%} at {self.mean_cost / self.budget:.0%} of the budget"


@dataclass(frozen=True)
class MethodComparison:
    """A method at a given spent budget, between its two neighbouring points."""

    method: str
    spent: float
    accuracy: float
    accuracy_low: float
    accuracy_high: float


def sweep(
    methods: Mapping[str, Callable[..., Policy]],
    costs: Costs | npt.ArrayLike,
    budgets: Iterable[float | str],
    *,
    labelled: HeadOutputs,
    test: HeadOutputs,
    unlabelled: HeadOutputs | None = None,
    references: bool = True,
    seed: int = 0,
    progress: bool = False,
) -> list[Point]:
    """Calibrate every method for every budget and replay it on the test table, with bootstrap intervals.

    `references` adds the oracle at every budget and each exit alone.

    >>> from alight import calibrate, recordings
    >>> labelled, test, costs = recordings.load()
    >>> points = sweep({"eero": calibrate.eero}, costs, ["50%"], labelled=labelled, test=test, references=False)
    >>> print(points[0])
    eero: 43.14% at 99% of the budget
    """
    from tqdm import tqdm

    network = as_costs(costs)
    labels = test.known_labels("a sweep's test table")
    _check_tables(network, labelled, unlabelled, test)
    amounts = [network.budget(budget) for budget in budgets]
    cheapest = min(float(network.cumulative([index])[0]) for index in range(len(network)))
    if amounts and min(amounts) < cheapest:
        raise BudgetTooSmall(min(amounts), cheapest, network.unit)
    measured = partial(_measured, network, labels, seed)
    points = []
    for method, amount in tqdm(list(product(methods, amounts)), desc="sweep", unit="policy", disable=not progress):
        policy = methods[method](network, amount, labelled, unlabelled)
        points.append(replace(measured(method, amount, replay(policy, test)), **_described(policy)))
    if references:
        paid = tuple(network.cumulative().tolist())
        best = [(amount, oracle_within(network, amount, test)) for amount in amounts]
        points += [replace(measured(ORACLE, *each), exit_costs=paid) for each in best]
        for index in range(len(network)):
            cost = float(network.cumulative([index])[0])
            alone = ExitAt(costs=(cost,), open_exits=(index,), num_exits=len(network), score=test.score)
            paid = _spread(alone, alone.costs, closed=math.inf)
            points.append(replace(measured(SINGLE_EXIT, cost, replay(alone, test)), exit_costs=paid))
    return points


def _check_tables(network: Costs, labelled: HeadOutputs, unlabelled: HeadOutputs | None, test: HeadOutputs) -> None:
    for name, table in {"labelled": labelled, "unlabelled": unlabelled}.items():
        if table is test:
            raise BadInput(f"the {name} table is also the test table: split it, so that the test is on fresh samples")
    if test.num_exits != len(network):
        raise Mismatch(
            f"the test table has {test.num_exits} exits and there are {len(network)} costs: give one per exit"
        )
    if test.score != labelled.score:
        raise Mismatch(
            f"the labelled table's score is {labelled.score!r}, the test table's {test.score!r}: record both with one"
        )


def _measured(network: Costs, labels: Integers, seed: int, method: str, budget: float, decisions: Decisions) -> Point:
    """Return what was measured on the test table, with bootstrap intervals."""
    accuracy, cost = bootstrap(decisions, labels, np.random.default_rng(seed))
    point = Point(method, budget, decisions.accuracy(labels), decisions.mean_cost, *accuracy, *cost)
    shares = tuple(decisions.exit_shares.tolist())
    return replace(point, full_cost=network.full, unit=network.unit, exit_shares=shares)


def at_equal_spend(points: Sequence[Point], spends: Iterable[float]) -> list[MethodComparison]:
    """Return every method's accuracy at the same spent budgets, not the same allowed ones.

    Between two points of a method lies the mixture of their policies, so accuracy is interpolated along the spent
    budget; where a method never spends so much or so little there is no row.

    >>> points = [Point("eero", 2.0, accuracy=0.6, mean_cost=1.9), Point("eero", 4.0, accuracy=0.8, mean_cost=3.9)]
    >>> [round(row.accuracy, 2) for row in at_equal_spend(points, [2.9, 5.0])]
    [0.7]
    """
    rows = []
    spends = [float(spend) for spend in spends]
    for method in dict.fromkeys(point.method for point in points if point.method != SINGLE_EXIT):
        own = sorted((point for point in points if point.method == method), key=lambda point: point.mean_cost)
        spent = [point.mean_cost for point in own]
        for target in spends:
            if spent[0] <= target <= spent[-1]:
                figures = (
                    float(np.interp(target, spent, [getattr(point, name) for point in own]))
                    for name in ("accuracy", "accuracy_low", "accuracy_high")
                )
                rows.append(MethodComparison(method, target, *figures))
    return rows


def write_points(points: Sequence[Point], path: PathLike) -> Path:
    """Write a CSV file with one row per point, whole or not at all, and return its path.

    >>> import tempfile
    >>> path = write_points([Point("eero", 4.0, accuracy=0.8, mean_cost=3.0)], Path(tempfile.mkdtemp()) / "points.csv")
    >>> print(*read_points(path))
    eero: 80.00% at 75% of the budget
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [each.name for each in fields(Point)]
    writer.writerow(names)
    writer.writerows([_cell(getattr(point, name)) for name in names] for point in points)
    return write_text(path, text.getvalue())


def read_points(path: PathLike) -> list[Point]:
    """Read the points of a CSV file that `write_points` wrote; columns that `Point` has a default for may be missing.

    >>> import tempfile
    >>> path = write_points([Point("eero", 4.0, accuracy=0.8, mean_cost=3.0)], Path(tempfile.mkdtemp()) / "points.csv")
    >>> read_points(path)[0].accuracy
    0.8
    """
    remedy = "give a CSV that `alight sweep` wrote"
    try:
        text = Path(path).read_text(encoding="utf-8")
        points = [_point(row) for row in csv.DictReader(io.StringIO(text), strict=True)]
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        reason = f"it lacks the column {error}" if isinstance(error, KeyError) else str(error)
        raise BadFile(path, f"it is not a table of points ({reason})", remedy) from error
    if not points:
        raise BadFile(path, "it has no rows", remedy)
    if not text.endswith("\n"):
        raise BadFile(path, "it is cut short", remedy)
    for row, point in enumerate(points, start=2):
        shares = (*point.exit_rates, *point.exit_shares)
        per_exit = (point.exit_rates, point.exit_shares, point.exit_costs, point.thresholds)
        finite = np.isfinite([point.budget, point.accuracy, point.mean_cost, *shares]).all()
        known = not np.isnan([*point.exit_costs, *point.thresholds]).any()
        if not finite or not known or len({len(own) for own in per_exit if own}) > 1:
            raise BadFile(path, f"line {row} is not a point (not finite, or cut short)", remedy)
    return points


def _described(policy: Policy) -> dict[str, Any]:
    """Return how a point describes its policy, exit by exit of the network."""
    thresholds: tuple[float, ...] = ()
    if isinstance(policy, Threshold | Paced):
        thresholds = _spread(policy, (*policy.thresholds, -math.inf), closed=math.inf)
    return {
        "exit_rates": _spread(policy, policy.exit_rates, closed=0.0) if policy.exit_rates else (),
        "exit_costs": _spread(policy, policy.costs, closed=math.inf),
        "thresholds": thresholds,
        "rule": f"{policy.summary()}, on the {policy.score}",
        "guarantee": str(policy.certificate or ""),
    }


def _spread(policy: Policy, values: Sequence[float], closed: float) -> tuple[float, ...]:
    """Return one value for each exit of the network, from one for each open exit."""
    by_exit = dict(zip(policy.open_exits, values, strict=True))
    return tuple(by_exit.get(index, closed) for index in range(policy.num_exits))


def _point(row: Mapping[str, str]) -> Point:
    known = [each for each in fields(Point) if each.name in row or each.default is MISSING]
    return Point(**{each.name: _value(each.type, row[each.name]) for each in known})  # type: ignore[arg-type]


def _cell(value: float | str | tuple[float, ...]) -> str:
    return " ".join(map(repr, value)) if isinstance(value, tuple) else str(value)


def _value(kind: object, cell: str) -> float | str | tuple[float, ...]:
    if cell is None:
        raise ValueError("a row is cut short")
    if kind is str:
        return cell
    return float(cell) if kind is float else tuple(map(float, cell.split()))


# Intervals, classes and the oracle


class Interval(NamedTuple):
    """Where a figure lies when the test samples are drawn again."""

    low: float
    high: float


class Bootstrap(NamedTuple):
    """Intervals of accuracy and mean cost."""

    accuracy: Interval
    mean_cost: Interval


class Classes(NamedTuple):
    """One row per class: what it loses by leaving early."""

    classes: Integers  # (classes,)
    samples: Integers  # (classes,)
    accuracy: Floats  # (classes,), of the decisions
    full_accuracy: Floats  # (classes,), of the last exit
    mean_cost: Floats  # (classes,)
    exit_shares: Floats  # (classes, exits)

    @property
    def gain(self) -> Floats:
        """Accuracy won (or, negative, lost) by leaving early."""
        return self.accuracy - self.full_accuracy


def bootstrap(
    decisions: Decisions,
    labels: npt.ArrayLike,
    rng: np.random.Generator,
    *,
    confidence: float = 0.95,
    draws: int = 1000,
) -> Bootstrap:
    """Return percentile intervals over test samples drawn again with replacement.

    A sample matters only by its cost and whether it is right, so the draws are of how many samples of each such
    kind there are: one multinomial instead of a table of samples.
    """
    if not 0 < confidence < 1:
        raise BadInput(f"confidence {confidence:g} must lie inside (0, 1): 0.95 is usual")
    if draws < 1:
        raise BadInput(f"{draws} draws give no interval: 1,000 are usual")
    labels = np.asarray(labels)
    if labels.shape != decisions.predictions.shape:
        raise BadInput(f"labels have shape {labels.shape} for {len(decisions)} decisions: give one each")
    right = decisions.predictions == labels
    kinds, counts = np.unique(np.stack([right, decisions.spent]), axis=1, return_counts=True)
    drawn = rng.multinomial(len(decisions), counts / counts.sum(), size=draws) / len(decisions)  # (draws, kinds)
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    low, high = np.quantile(drawn @ kinds.T, tails, axis=0).tolist()
    return Bootstrap(*map(Interval, low, high))


def per_class(decisions: Decisions, outputs: HeadOutputs) -> Classes:
    """Return accuracy, cost and exits of each class, beside the last exit's accuracy on it.

    >>> outputs = HeadOutputs(scores=[[1, 1], [1, 1]], predictions=[[0, 0], [0, 1]], labels=[0, 1])
    >>> decisions = Decisions(predictions=[0, 0], exits=[0, 0], spent=[1, 1], num_exits=2)
    >>> per_class(decisions, outputs).gain
    array([ 0., -1.])
    """
    labels = outputs.known_labels("accuracy per class")
    if len(decisions) != len(outputs):
        raise Mismatch(
            f"{len(decisions)} decisions about a table of {len(outputs)} samples: give the table they are about"
        )
    classes, members, samples = np.unique(labels, return_inverse=True, return_counts=True)

    def mean(values: npt.ArrayLike) -> Floats:
        return np.bincount(members, weights=np.asarray(values, dtype=np.float64)) / samples

    return Classes(
        classes=classes,
        samples=samples,
        accuracy=mean(decisions.predictions == labels),
        full_accuracy=mean(outputs.predictions[:, -1] == labels),
        mean_cost=mean(decisions.spent),
        exit_shares=np.stack([mean(decisions.exits == index) for index in range(decisions.num_exits)], axis=1),
    )


def oracle(costs: Costs | npt.ArrayLike, outputs: HeadOutputs) -> Decisions:
    """Let each sample leave at its cheapest correct exit; where none is correct, at the cheapest exit."""
    network = as_costs(costs)
    outputs.known_labels("the oracle")
    if outputs.num_exits != len(network):
        raise Mismatch(f"the table has {outputs.num_exits} exits, but there are {len(network)} costs: give one each")
    first = np.argmax(outputs.correct(), axis=1)  # 0 where no exit is correct
    return _decided(network.cumulative(), outputs, first)


def oracle_within(costs: Costs | npt.ArrayLike, budget: float | str, outputs: HeadOutputs) -> Decisions:
    """Return the oracle under a budget: samples go on to their cheapest correct exit, the cheapest to help first.

    Every such step gains one correct answer, so the best gain per cost is the smallest extra cost, and releasing
    them in that order is optimal.
    """
    network = as_costs(costs)
    cumulative, amount = network.cumulative(), network.budget(budget)
    if amount < cumulative[0]:
        raise BudgetTooSmall(amount, float(cumulative[0]), network.unit)
    free = oracle(costs, outputs)
    extra = free.spent - cumulative[0]
    order = np.argsort(extra, kind="stable")
    affordable = np.cumsum(extra[order]) <= (amount - cumulative[0]) * len(outputs)
    released = np.zeros(len(outputs), dtype=bool)
    released[order[affordable]] = True
    return _decided(cumulative, outputs, np.where(released, free.exits, 0))


def _decided(cumulative: Floats, outputs: HeadOutputs, exits: np.ndarray) -> Decisions:
    rows = np.arange(len(outputs))
    return Decisions(outputs.predictions[rows, exits], exits, cumulative[exits], num_exits=outputs.num_exits)
