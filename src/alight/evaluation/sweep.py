"""Methods side by side: every method at every budget on the same recorded outputs."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from alight.costs import Costs, as_costs
from alight.errors import BadFile, BadInput, BudgetTooSmall, Mismatch
from alight.evaluation.metrics import bootstrap, oracle_within
from alight.files import PathLike, write_text
from alight.outputs import Decisions, HeadOutputs
from alight.policies.paced import Paced
from alight.policies.policy import ExitAt, Policy, Threshold
from alight.policies.route import replay

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


Calibration = Callable[..., Policy]


def sweep(
    methods: Mapping[str, Calibration],
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
        points += [measured(ORACLE, amount, oracle_within(network, amount, test)) for amount in amounts]
        for index in range(len(network)):
            cost = float(network.cumulative([index])[0])
            alone = ExitAt(costs=(cost,), open_exits=(index,), num_exits=len(network), score=test.score)
            points.append(measured(SINGLE_EXIT, cost, replay(alone, test)))
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


def _measured(
    network: Costs, labels: npt.NDArray[np.int64], seed: int, method: str, budget: float, decisions: Decisions
) -> Point:
    """Return what was measured on the test table, with bootstrap intervals."""
    intervals = bootstrap(decisions, labels, np.random.default_rng(seed))
    return Point(
        method=method,
        budget=budget,
        accuracy=decisions.accuracy(labels),
        mean_cost=decisions.mean_cost,
        accuracy_low=intervals.accuracy.low,
        accuracy_high=intervals.accuracy.high,
        mean_cost_low=intervals.mean_cost.low,
        mean_cost_high=intervals.mean_cost.high,
        full_cost=network.full,
        unit=network.unit,
        exit_shares=tuple(decisions.exit_shares.tolist()),
    )


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
        rows = list(csv.DictReader(io.StringIO(text), strict=True))
        points = [_point(row) for row in rows]
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        reason = f"it lacks the column {error}" if isinstance(error, KeyError) else str(error)
        raise BadFile(path, f"it is not a table of points ({reason})", remedy) from error
    if not points:
        raise BadFile(path, "it has no rows", remedy)
    if not text.endswith("\n"):
        raise BadFile(path, "it is cut short", remedy)
    for row, point in enumerate(points, start=2):
        shares = (*point.exit_rates, *point.exit_shares)
        lengths = {len(own) for own in (point.exit_rates, point.exit_shares, point.thresholds) if own}
        finite = np.isfinite([point.budget, point.accuracy, point.mean_cost, *shares]).all()
        if not finite or np.isnan(point.thresholds).any() or len(lengths) > 1:
            raise BadFile(path, f"line {row} is not a point (not finite, or cut short)", remedy)
    return points


def _described(policy: Policy) -> dict[str, Any]:
    """Return how a point describes its policy, exit by exit of the network."""
    thresholds: tuple[float, ...] = ()
    if isinstance(policy, Threshold | Paced):
        thresholds = _spread(policy, (*policy.thresholds, -math.inf), closed=math.inf)
    return {
        "exit_rates": _spread(policy, policy.exit_rates, closed=0.0) if policy.exit_rates else (),
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
