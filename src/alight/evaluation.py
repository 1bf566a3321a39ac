"""Was it good? Accuracy and cost with intervals, the oracle, and methods side by side on the same recorded outputs.

>>> from alight import calibrate, recordings
>>> labelled, test, costs = recordings.load()
>>> points = sweep({"eero": calibrate.eero}, costs, ["40%", "60%"], labelled=labelled, test=test)
>>> sorted({point.method for point in points})
['eero', 'oracle', 'single_exit']
"""

import csv
import io
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from alight.costs import Costs, as_costs
from alight.display import accuracy_text, aligned, percent, quantity
from alight.errors import BadFile, BadInput, BudgetTooSmall, Mismatch, ShiftWarning
from alight.files import PathLike, write_csv
from alight.outputs import SAME, Decisions, HeadOutputs
from alight.policies.paced import Paced
from alight.policies.policy import ExitAt, Policy, Threshold
from alight.policies.route import replay
from alight.policies.shift import diagnose_shift

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

ORACLE, SINGLE_EXIT = "oracle", "single_exit"  # references beside the methods
BINS = 15  # of confidence, as usual
DRAWN = 10_000_000  # counts of kinds of samples that a bootstrap draws at once
CONFIDENCE = 0.95  # of intervals


@dataclass(frozen=True)
class Point:
    """One method at one budget, on test data.

    >>> print(Point("eero", budget=4.0, accuracy=0.8, mean_cost=3.0, full_cost=10.0, unit="ms"))
    eero: accuracy 80.0 %, mean cost 3 ms (30 % of the full network) of 4 ms (40 %) allowed
    """

    method: str  # its name
    budget: float  # allowed per sample
    accuracy: float  # on the test data
    mean_cost: float  # spent per sample
    accuracy_low: float = float("nan")  # of a 95 % interval
    accuracy_high: float = float("nan")  # of a 95 % interval
    mean_cost_low: float = float("nan")  # of a 95 % interval
    mean_cost_high: float = float("nan")  # of a 95 % interval
    full_cost: float = float("nan")  # of the full network
    unit: str = ""  # of the costs
    exit_rates: tuple[float, ...] = ()  # planned, per exit of the network
    exit_shares: tuple[float, ...] = ()  # observed
    exit_costs: tuple[float, ...] = ()  # of leaving there, with the heads of all open exits on the way; inf: closed
    thresholds: tuple[float, ...] = ()  # per exit of the network: inf where nobody leaves, -inf where everyone does
    rule: str = ""  # by which samples leave, in a few words
    guarantee: str = ""  # what is certified about the policy, in a sentence
    worst_class: str = ""  # the one that loses the most accuracy against the last exit
    worst_class_loss: float = float("nan")  # of accuracy
    worst_class_cost: float = float("nan")  # spent per sample of it
    calibration_error: float = float("nan")  # of an exit alone, where its probabilities were recorded
    exits: tuple[str, ...] = ()  # names of all exits of the network, where they are known

    @property
    def is_over_budget(self) -> bool:
        """Whether it spent more than the budget, by more than the test samples leave open."""
        return self.mean_cost > self.budget and not self.mean_cost_low <= self.budget

    def __str__(self) -> str:
        known = math.isfinite(self.full_cost)
        spent = f" ({percent(self.mean_cost / self.full_cost)} of the full network)" if known else ""
        allowed = f" ({percent(self.budget / self.full_cost)})" if known else ""
        return (
            f"{self.method}: accuracy {accuracy_text(self.accuracy)}, mean cost"
            f" {quantity(self.mean_cost, self.unit)}{spent} of {quantity(self.budget, self.unit)}{allowed} allowed"
        )


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

    Where the test samples do not look like those of the calibration (`diagnose_shift`), a `ShiftWarning` is issued, and
    stands beside every guarantee.

    Args:
        methods: Functions `(costs, budget, labelled, unlabelled) -> Policy`, by the name to show.
        costs: Of every exit.
        budgets: Each as a number in the unit of the costs, a percentage or a quantity.
        labelled: Calibrates.
        test: Labelled samples to replay the policies on.
        unlabelled: Further calibration samples, which set thresholds.
        references: Add the oracle at every budget and each exit alone.
        seed: Of the bootstrap.
        progress: Show a bar.

    >>> from alight import calibrate, recordings
    >>> labelled, test, costs = recordings.load()
    >>> points = sweep({"eero": calibrate.eero}, costs, ["50%"], labelled=labelled, test=test, references=False)
    >>> print(points[0])
    eero: accuracy 43.1 %, mean cost 547 MFLOPs (49.3 % of the full network) of 555 MFLOPs (50 %) allowed
    """
    from tqdm import tqdm

    network = as_costs(costs)
    test.known_labels("a sweep's test table")
    _check_tables(network, labelled, unlabelled, test)
    amounts = [network.budget(budget) for budget in budgets]
    if amounts and min(amounts) < network.alone.min():
        raise BudgetTooSmall(min(amounts), float(network.alone.min()), network.unit, full=network.full)
    measured = partial(_measured, network, test, seed)
    points, policies = [], []
    for method, amount in tqdm(list(product(methods, amounts)), desc="sweep", unit="policy", disable=not progress):
        policies.append(methods[method](network, amount, labelled, unlabelled))
        points.append(replace(evaluate_policy(policies[-1], network, test, seed=seed), method=method, budget=amount))
    shift = diagnose_shift(labelled if unlabelled is None else unlabelled, test, policies)
    if shift.is_significant:
        doubt = f"Doubtful: the calibration and the test samples differ at {shift}."
        warnings.warn(f"{doubt} Draw both from one shuffled set of samples.", ShiftWarning, stacklevel=2)
        points = [replace(each, guarantee=each.guarantee and f"{each.guarantee} {doubt}") for each in points]
    if references:
        paid = tuple(network.cumulative().tolist())
        best = [(amount, oracle_within(network, amount, test)) for amount in amounts]
        points += [replace(measured(ORACLE, *each), exit_costs=paid) for each in best]
        errors = [math.nan] * len(network) if _confidences(test) is None else calibration_errors(test).tolist()
        for index, error in enumerate(errors):
            cost = float(network.alone[index])
            alone = ExitAt(costs=(cost,), open_exits=(index,), num_exits=len(network), score=test.score)
            paid = _spread(alone, alone.costs, closed=math.inf)
            point = measured(SINGLE_EXIT, cost, replay(alone, test))
            points.append(replace(point, exit_costs=paid, calibration_error=error))
    return points


def evaluate_policy(policy: Policy, costs: Costs | npt.ArrayLike, test: HeadOutputs, *, seed: int = 0) -> Point:
    """Return the point of one policy on a labelled table, with bootstrap intervals, as `sweep` gives it.

    A policy without a budget counts as allowed what it spends.

    >>> from alight import calibrate, recordings
    >>> labelled, test, costs = recordings.load()
    >>> print(evaluate_policy(calibrate.eero(costs, "50%", labelled), costs, test))
    eero: accuracy 43.1 %, mean cost 547 MFLOPs (49.3 % of the full network) of 555 MFLOPs (50 %) allowed
    """
    test.known_labels("a policy's test table")
    decisions = replay(policy, test)
    budget = decisions.mean_cost if policy.budget is None else policy.budget
    point = _measured(as_costs(costs), test, seed, policy.method, budget, decisions)
    return replace(point, **_described(policy))


def _check_tables(network: Costs, labelled: HeadOutputs, unlabelled: HeadOutputs | None, test: HeadOutputs) -> None:
    for name, table in {"labelled": labelled, "unlabelled": unlabelled}.items():
        if table is not None and (shared := table.shared_samples(test)) > SAME:
            what = (
                "is also the test table" if shared == 1 else f"shares {percent(shared)} of samples with the test table"
            )
            raise BadInput(f"the {name} table {what}: split it, so that the test is on fresh samples")
    if test.num_exits != len(network):
        raise Mismatch(
            f"the test table has {test.num_exits} exits and there are {len(network)} costs: give one per exit"
        )
    if test.score != labelled.score:
        raise Mismatch(
            f"the labelled table's score is {labelled.score!r}, the test table's {test.score!r}: record both with one"
        )


def _measured(network: Costs, test: HeadOutputs, seed: int, method: str, budget: float, decisions: Decisions) -> Point:
    """Return what was measured on the test table, with bootstrap intervals."""
    accuracy, cost = bootstrap(decisions, test.truth(), np.random.default_rng(seed))
    point = Point(method, budget, decisions.accuracy(test.truth()), decisions.mean_cost, *accuracy, *cost)
    point = replace(
        point,
        full_cost=network.full,
        unit=network.unit,
        exits=test.exits,
        exit_shares=tuple(decisions.exit_shares.tolist()),
    )
    if test.quality is not None:  # answers of any kind have no classes
        return point
    classes = per_class(decisions, test)
    worst = int(np.argmin(classes.gain))
    return replace(
        point,
        worst_class=str(classes.classes[worst]),
        worst_class_loss=float(-classes.gain[worst]),
        worst_class_cost=float(classes.mean_cost[worst]),
    )


def comparison_table(points: Sequence[Point], most: int = 8) -> list[str]:
    """Return lines of a table of accuracies in percent, methods by budgets, at most so many, and the full network.

    The best accuracy at each budget is marked with a star, among methods that kept it; a method that spent more than
    the budget, by more than the test samples leave open, is marked with an exclamation mark.

    >>> of = {"full_cost": 10.0, "unit": "ms"}
    >>> points = [Point("eero", 4.0, 0.8, 3.9, **of), Point("geometric", 4.0, 0.82, 4.4, **of)]
    >>> for line in comparison_table([*points, Point(SINGLE_EXIT, 10.0, 0.9, 10.0, **of)]):
    ...     print(line)
    accuracy (%)   40 %  100 %
    eero          80.0*
    geometric     82.0!
    full network         90.0
    """
    alone = next((point for point in reversed(points) if point.method == SINGLE_EXIT), None)  # at the last exit
    compared = [point for point in points if point.method not in (ORACLE, SINGLE_EXIT)]
    budgets = sorted({point.budget for point in compared})
    shown = {budgets[index] for index in np.linspace(0, len(budgets) - 1, most).round().astype(int)}
    methods = [*dict.fromkeys(point.method for point in compared)]
    if alone is None:
        return aligned([["accuracy (%)", *methods], *(_column(compared, methods, each) for each in sorted(shown))])
    columns = [["accuracy (%)", *methods, "full network"]]
    for budget in sorted({*shown, alone.budget}):
        full = _marked(alone, math.nan) if budget == alone.budget else ""
        columns.append([*_column(compared, methods, budget), full])
    return aligned(columns)


def _column(points: Sequence[Point], methods: Sequence[str], budget: float) -> list[str]:
    """Return a budget, and the accuracy of every method at it."""
    by_method = {point.method: point for point in points if point.budget == budget}
    kept = [point.accuracy for point in by_method.values() if not point.is_over_budget]
    share = budget / points[0].full_cost
    title = percent(share) if math.isfinite(share) else quantity(budget, points[0].unit)
    return [title, *(_marked(by_method.get(method), max(kept, default=math.nan)) for method in methods)]


def _marked(point: Point | None, best: float) -> str:
    if point is None:
        return ""
    mark = "!" if point.is_over_budget else "*" if point.accuracy == best else " "
    return f"{100 * point.accuracy:.1f}{mark}"


def at_equal_spend(points: Sequence[Point], spends: Iterable[float]) -> list[MethodComparison]:
    """Return every method's accuracy at the same spent budgets, not the same allowed ones.

    Between two points of a method lies the mixture of their policies, so accuracy is interpolated along the spent
    budget; where a method never spends so much or so little there is no row.

    Args:
        points: What `sweep` gives.
        spends: Costs per sample, in the unit of the points.

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


def area_under_curve(points: Sequence[Point]) -> dict[str, float]:
    """Return each method's mean accuracy over spent budgets, from the cheapest exit alone to the full network alone.

    Mixtures of its policies, and of those two, reach the upper envelope of its points, and where more cost no longer
    helps less is spent; the area below is divided by the width. The points must hold the exits alone, as `sweep` gives
    them with its references. The envelope is chosen on the test samples, so it lies a little high: compare methods at
    the same budgets, and take differences below one over the root of the test samples for noise.

    >>> alone = [Point("single_exit", cost, accuracy, cost) for cost, accuracy in ((1.0, 0.5), (3.0, 0.9))]
    >>> areas = area_under_curve([Point("eero", 2.0, accuracy=0.8, mean_cost=2.0), *alone])
    >>> {method: round(area, 3) for method, area in areas.items()}
    {'eero': 0.75, 'single_exit': 0.7}
    """
    alone = sorted((point for point in points if point.method == SINGLE_EXIT), key=lambda point: point.mean_cost)
    if not alone:
        raise BadInput("there are no exits alone among these points: sweep with references=True")
    first, last = alone[0], alone[-1]
    if first.mean_cost == last.mean_cost:
        raise BadInput("the cheapest exit is the full network: there are no budgets between them")
    areas = {}
    for method in dict.fromkeys(point.method for point in points):
        own = [point for point in points if point.method == method]
        spent, accuracy = _upper_envelope([(each.mean_cost, each.accuracy) for each in (*own, first, last)])
        kinks = np.unique(np.clip(spent, first.mean_cost, last.mean_cost))
        heights = np.interp(kinks, spent, accuracy)
        trapezoids = np.diff(kinks) @ (heights[1:] + heights[:-1]) / 2
        areas[method] = float(trapezoids / (last.mean_cost - first.mean_cost))
    return areas


def _upper_envelope(places: Sequence[tuple[float, float]]) -> tuple[Floats, Floats]:
    """Return the corners of the smallest concave curve that never falls above these places, from left to right."""
    kept: list[tuple[float, float]] = []
    for x, y in sorted(places):
        while kept and (kept[-1][0] == x or (len(kept) > 1 and _lies_below(kept[-1], kept[-2], (x, y)))):
            kept.pop()
        kept.append((x, y))
    spent, accuracy = np.array(kept).T
    return spent, np.maximum.accumulate(accuracy)


def _lies_below(place: tuple[float, float], left: tuple[float, float], right: tuple[float, float]) -> bool:
    across = (right[1] - left[1]) * (place[0] - left[0])
    return (place[1] - left[1]) * (right[0] - left[0]) <= across


def write_points(points: Sequence[Point], path: PathLike) -> Path:
    """Write a CSV file with one row per point, whole or not at all, and return its path.

    Args:
        points: What `sweep` gives.
        path: The file to write.

    >>> import tempfile
    >>> path = write_points([Point("eero", 4.0, accuracy=0.8, mean_cost=3.0)], Path(tempfile.mkdtemp()) / "points.csv")
    >>> print(*read_points(path))
    eero: accuracy 80.0 %, mean cost 3 of 4 allowed
    """
    names = [each.name for each in fields(Point)]
    return write_csv(path, names, ([_cell(getattr(point, name)) for name in names] for point in points))


def read_points(path: PathLike) -> list[Point]:
    """Read the points of a CSV file that `write_points` wrote; columns that `Point` has a default for may be missing.

    Args:
        path: A CSV file.

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
        per_exit = (point.exit_rates, point.exit_shares, point.exit_costs, point.thresholds, point.exits)
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


def _cell(value: float | str | tuple[Any, ...]) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return json.dumps(value) if value and isinstance(value[0], str) else " ".join(map(repr, value))


def _value(kind: object, cell: str) -> float | str | tuple[Any, ...]:
    if cell is None:
        raise ValueError("a row is cut short")
    if kind is str:
        return cell
    if kind == tuple[str, ...]:
        return tuple(json.loads(cell)) if cell else ()
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


def bootstrap(decisions: Decisions, labels: npt.ArrayLike, rng: np.random.Generator, *, draws: int = 1000) -> Bootstrap:
    """Return 95 % percentile intervals over test samples drawn again with replacement.

    A sample matters only by its cost and whether it is right, so the draws are of how many samples of each such
    kind there are: one multinomial instead of a table of samples.
    """
    if draws < 1:
        raise BadInput(f"{draws} draws give no interval: 1,000 are usual")
    labels = np.asarray(labels)
    if labels.shape != decisions.predictions.shape:
        raise BadInput(f"labels have shape {labels.shape} for {len(decisions)} decisions: give one each")
    right = decisions.correct(labels)
    kinds, counts = np.unique(np.stack([right, decisions.spent]), axis=1, return_counts=True)
    means = np.empty((draws, len(kinds)))
    size = max(1, DRAWN // kinds.shape[1])  # where every call has its own cost, there is a kind for every sample
    for start in range(0, draws, size):
        part = means[start : start + size]
        drawn = rng.multinomial(len(decisions), counts / counts.sum(), size=len(part)) / len(decisions)
        part[:] = drawn @ kinds.T
    tails = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    low, high = np.quantile(means, tails, axis=0).tolist()
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
        accuracy=mean(decisions.correct(labels)),
        full_accuracy=mean(outputs.correct()[:, -1]),
        mean_cost=mean(decisions.spent),
        exit_shares=np.stack([mean(decisions.exits == index) for index in range(decisions.num_exits)], axis=1),
    )


def calibration_errors(outputs: HeadOutputs) -> Floats:
    """Return the expected calibration error of each exit, (exits,): how far its probabilities are from its accuracy.

    Samples are put into 15 bins of equal width by the probability of the predicted class; the distance between mean
    probability and accuracy of a bin is weighted by its samples. The table must hold those probabilities, as the score
    or a feature "max_probability" or as log-probabilities: a margin is not a probability.

    >>> outputs = HeadOutputs([[0.9], [0.9]], [[0], [1]], labels=[0, 0], score="max_probability")
    >>> calibration_errors(outputs)
    array([0.4])
    """
    outputs.known_labels("a calibration error")
    confidences = _confidences(outputs)
    if confidences is None:
        raise BadInput(
            f"this table has the {outputs.score} and no probabilities of the predicted class: record it with"
            " features=['max_probability'] or its log-probabilities"
        )
    places = np.minimum((confidences * BINS).astype(np.int64), BINS - 1)
    gaps = confidences - outputs.correct()
    return np.array(
        [np.abs(np.bincount(*each)).sum() for each in zip(places.T, gaps.T, strict=True)], dtype=np.float64
    ) / len(outputs)


def _confidences(outputs: HeadOutputs) -> Floats | None:
    """Return the probabilities of the predicted classes, (samples, exits), where the table has them."""
    if "max_probability" in (outputs.score, *outputs.features):
        return np.clip(outputs.column("max_probability"), 0.0, 1.0)
    if outputs.top_log_probabilities is None:
        return None
    return np.exp(outputs.top_log_probabilities[..., 0].astype(np.float64))


def oracle(costs: Costs | npt.ArrayLike, outputs: HeadOutputs) -> Decisions:
    """Let each sample leave at its cheapest correct exit; where none is correct, at the cheapest exit."""
    network = as_costs(costs)
    outputs.known_labels("the oracle")
    if outputs.num_exits != len(network):
        raise Mismatch(f"the table has {outputs.num_exits} exits, but there are {len(network)} costs: give one each")
    first = np.argmax(outputs.correct(), axis=1)  # 0 where no exit is correct
    return _decided(network, outputs, first)


def oracle_within(costs: Costs | npt.ArrayLike, budget: float | str, outputs: HeadOutputs) -> Decisions:
    """Return the oracle under a budget: samples go on to their cheapest correct exit, the cheapest to help first.

    Every such step gains one correct answer, so the best gain per cost is the smallest extra cost, and releasing
    them in that order is optimal. Where answers are graded, samples go on to their best one, by gain per cost.
    """
    network = as_costs(costs)
    amount, at_once = network.budget(budget), _decided(network, outputs, np.zeros(len(outputs), dtype=np.int64))
    if amount < at_once.mean_cost:
        raise BudgetTooSmall(amount, at_once.mean_cost, network.unit, full=network.full)
    free = oracle(costs, outputs)
    extra = free.spent - at_once.spent
    gains = 1.0 if outputs.quality is None else np.maximum(free.correct() - at_once.correct(), 1e-12)
    order = np.argsort(extra / gains, kind="stable")
    affordable = np.cumsum(extra[order]) <= (amount - at_once.mean_cost) * len(outputs)
    released = np.zeros(len(outputs), dtype=bool)
    released[order[affordable]] = True
    return _decided(network, outputs, np.where(released, free.exits, 0))


def _decided(network: Costs, outputs: HeadOutputs, exits: np.ndarray) -> Decisions:
    """Return the decisions by which each sample leaves at this exit."""
    rows, paid = np.arange(len(outputs)), outputs.costs_by(range(outputs.num_exits))
    return Decisions(
        outputs.predictions[rows, exits],
        exits,
        network.cumulative()[exits] if paid is None else paid[rows, exits],
        quality=None if outputs.quality is None else outputs.quality[rows, exits],
        num_exits=outputs.num_exits,
        labels=outputs.labels,
        unit=network.unit,
        exit_names=outputs.exits,
    )
