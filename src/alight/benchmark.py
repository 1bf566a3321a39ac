"""A benchmark of exit policies: every method on every recording, over budgets and resplits, at equal spent budget.

>>> from alight import calibrate, recordings
>>> methods = {name: calibrate.METHODS[name] for name in ("eero", "geometric")}
>>> compared = benchmark(methods, {"ResNet-18": recordings.load()}, shares=(0.4, 0.6), resplits=2)
>>> print(*(str(place) for place in leaderboard(compared)), sep="\\n")
eero: 43.01% on average, 0.00 points below the best
geometric: 41.65% on average, 1.36 points below the best

A recording is pooled and split anew for every resplit but the first, which is the recording's own. A method is given
the calibration part alone. Its accuracy at a spent budget lies between its two neighbouring policies, as a mixture of
them would; one that never spends as much keeps its last accuracy, and below its cheapest policy it is mixed with the
cheapest exit alone. A method that needs what a recording does not hold, such as log-probabilities, has no row there.

Methods are compared with one of them, the reference, on the same samples: see `PairedDifference`.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from alight.costs import Costs
from alight.errors import BadInput, Mismatch
from alight.evaluation import Point
from alight.files import PathLike, write_rows
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy
from alight.policies.route import replay
from alight.recordings import Recording

Floats = npt.NDArray[np.float64]

SHARES = tuple(percent / 100 for percent in range(10, 100, 10))  # of the full network's cost
RESPLITS = 20
ALL = "all"  # recordings


@dataclass(frozen=True)
class BenchmarkResult:
    """One method on one recording at one budget, over all resplits; the interval holds 95 % of them."""

    recording: str
    method: str
    budget: float  # allowed, and compared at, as a share of the full network's cost
    accuracy: float  # at equal spent budget
    low: float
    high: float
    deviation: float  # of the accuracy between resplits of the same samples; fresh test samples vary more
    allowed_accuracy: float  # at equal allowed budget
    spent: float  # as a share of what was allowed
    seconds: float  # of one calibration, on one core: other work on the machine does not count
    difference: float  # of the accuracy to that of the reference
    difference_error: float  # its standard error, as in `PairedDifference`
    reference: str
    resplits: int


@dataclass(frozen=True)
class PairedDifference:
    """How far a method is above the reference on one recording or on all, at equal spent budgets, mean over budgets.

    Both answer the same samples. The standard error counts samples (a sample's difference is its mean over the
    resplits that test on it) and resplits, whose calibrations differ; that of all recordings is for these recordings.
    """

    recording: str  # or ALL
    method: str
    reference: str
    difference: float
    error: float  # standard error
    resplits: int

    def __str__(self) -> str:
        gain = f"{100 * self.difference:+.2f} points (standard error {100 * self.error:.2f})"
        return f"{self.method}, {self.recording}: {gain} against {self.reference}"


class Comparison(NamedTuple):
    """What a benchmark found."""

    results: list[BenchmarkResult]
    differences: list[PairedDifference]


@dataclass(frozen=True)
class Place:
    """A method on the leaderboard."""

    method: str
    accuracy: float  # mean over recordings and budgets
    regret: float  # how much below the best method of each recording and budget, on average
    worst_regret: float  # on the recording where it is largest, mean over budgets
    spent: float  # of what was allowed
    deviation: float
    seconds: float
    difference: float  # to the reference, on average over the recordings
    difference_error: float
    recordings: int  # that it has rows for

    def __str__(self) -> str:
        return f"{self.method}: {self.accuracy:.2%} on average, {100 * self.regret:.2f} points below the best"


def benchmark(
    methods: Mapping[str, Callable[..., Policy]],
    recordings: Mapping[str, Recording],
    *,
    shares: Sequence[float] = SHARES,
    resplits: int = RESPLITS,
    seed: int = 0,
    jobs: int = 1,
    reference: str | None = None,
    progress: bool = False,
) -> Comparison:
    """Return how every method does on every recording at every budget that its cheapest exit allows.

    `reference` is the method that others are compared with, by default `auto` if it is there, else the first. `jobs`
    are processes; with more than one, methods must be functions of modules.
    """
    from tqdm import tqdm

    reference = reference or ("auto" if "auto" in methods else next(iter(methods), ""))

    if not methods or not recordings or resplits < 1 or not all(share > 0 for share in shares):
        raise BadInput(
            f"{len(methods)} methods, {len(recordings)} recordings, {resplits} resplits, budgets {tuple(shares)}: give"
            " at least one of each, budgets above 0"
        )
    if reference not in methods:
        raise BadInput(f"the reference {reference!r} is not among the methods: choose one of {', '.join(methods)}")
    tasks = [(name, number) for name in recordings for number in range(resplits)]
    work = partial(_on_resplit, methods, recordings, tuple(shares), seed)
    results, differences = [], []
    with _pool(jobs) as pool:
        found = iter(tqdm(pool.map(work, tasks), "benchmark", len(tasks), unit="resplit", disable=not progress))
        for name, recording in recordings.items():
            own = [next(found) for _ in range(resplits)]
            affordable = _affordable(recording.costs, shares).tolist()
            further, difference = _summarised(name, [*methods], reference, affordable, own)
            results += further
            differences += difference
    return Comparison(results, differences + _on_all(differences))


def _pool(jobs: int) -> Executor:
    """Return workers: processes that know what this one has loaded where the system can fork, or one thread."""
    if jobs == 1:
        return ThreadPoolExecutor(1)
    kinds = multiprocessing.get_all_start_methods()
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("fork" if "fork" in kinds else None))


class _Resplit(NamedTuple):
    """What all methods did on one resplit; NaN for a method that needs what the recording does not hold."""

    figures: Floats  # (methods, budgets, 4): accuracy at equal spent and allowed budget, spent, seconds
    right: npt.NDArray[np.float32]  # (methods, budgets, test samples): probability of being right, at equal spent
    rows: npt.NDArray[np.int64]  # of the test samples in the pool


def _on_resplit(
    methods: Mapping[str, Callable[..., Policy]],
    recordings: Mapping[str, Recording],
    shares: Sequence[float],
    seed: int,
    task: tuple[str, int],
) -> _Resplit:
    """Return what every method did on one resplit."""
    name, number = task
    labelled, test, costs = resplit(recordings[name], number, seed)
    budgets = _affordable(costs, shares)
    figures = np.full((len(methods), len(budgets), 4), np.nan)
    right = np.full((len(methods), len(budgets), len(test)), np.nan, dtype=np.float32)
    for place, method in enumerate(methods.values()):
        with suppress(Mismatch):
            figures[place], right[place] = _calibrated(method, labelled, test, costs, budgets)
    return _Resplit(figures, right, _order(recordings[name], number, seed)[len(labelled) :])


def _calibrated(
    method: Callable[..., Policy], labelled: HeadOutputs, test: HeadOutputs, costs: Costs, budgets: Floats
) -> tuple[Floats, Floats]:
    """Return the (budgets, 4) figures of a method, and the (budgets, samples) probabilities of being right."""
    labels, full = test.known_labels("a benchmark"), costs.full
    spent, right = [float(costs.cumulative([0])[0]) / full], [test.correct()[:, 0]]  # of the cheapest exit alone
    seconds = []
    for share in budgets:
        start = time.process_time()
        policy = method(costs, share * full, labelled)
        seconds.append(time.process_time() - start)
        decisions = replay(policy, test)
        spent.append(decisions.mean_cost / full)
        right.append(decisions.predictions == labels)
    mixed = _mixtures(np.array(spent), budgets) @ np.array(right, dtype=np.float64)
    allowed = np.mean(right[1:], axis=1)
    return np.stack([mixed.mean(axis=1), allowed, np.array(spent[1:]) / budgets, seconds], axis=1), mixed


def _mixtures(spent: Floats, budgets: Floats) -> Floats:
    """Return (budgets, policies): the shares of policies that spend each budget, of the two that spend next to it.

    Beyond the most expensive policy that one is taken alone, below the cheapest the cheapest.

    >>> _mixtures(np.array([1.0, 3.0, 2.0]), np.array([1.5, 9.0]))
    array([[0.5, 0. , 0.5],
           [0. , 1. , 0. ]])
    """
    order = np.argsort(spent, kind="stable")
    weights = np.zeros((len(budgets), len(spent)))
    for row, each in zip(np.eye(len(spent)), order, strict=True):
        weights[:, each] = np.interp(budgets, spent[order], row)
    return weights


def resplit(recording: Recording, number: int, seed: int = 0) -> Recording:
    """Return the recording's own split for 0, otherwise its samples split anew into parts of the same sizes."""
    labelled, test, costs = recording
    if number == 0:
        return recording
    pool, order = HeadOutputs.joined([labelled, test]), _order(recording, number, seed)
    return Recording(pool.take(order[: len(labelled)]), pool.take(order[len(labelled) :]), costs)


def _order(recording: Recording, number: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the order of the pooled samples in a resplit: first those to calibrate on."""
    size = len(recording.labelled) + len(recording.test)
    return np.arange(size) if number == 0 else np.random.default_rng([seed, number]).permutation(size)


def _affordable(costs: Costs, shares: Iterable[float]) -> Floats:
    """Return the budgets that the first exit allows."""
    return np.array([share for share in shares if share * costs.full >= costs.cumulative()[0]])


def _summarised(
    recording: str, methods: Sequence[str], reference: str, shares: Sequence[float], own: Sequence[_Resplit]
) -> tuple[list[BenchmarkResult], list[PairedDifference]]:
    """Return what the methods did on one recording, from all its resplits."""
    figures = np.stack([each.figures for each in own])  # (resplits, methods, budgets, 4)
    base = methods.index(reference)
    results, differences = [], []
    for place, method in enumerate(methods):
        if np.isnan(figures[:, place]).any():
            continue
        gains = [each.right[place] - each.right[base] for each in own]  # (budgets, test samples) each
        rows = [each.rows for each in own]
        for index, share in enumerate(shares):
            gain = paired([each[index] for each in gains], rows)
            results.append(_result(recording, method, share, figures[:, place, index], (*gain, reference)))
        difference, error = paired([each.mean(axis=0) for each in gains], rows)
        differences.append(PairedDifference(recording, method, reference, difference, error, len(own)))
    return results, differences


def paired(gains: Sequence[npt.NDArray[np.floating]], rows: Sequence[npt.NDArray[np.int64]]) -> tuple[float, float]:
    """Return the mean of paired differences over resplits, and its standard error over samples and resplits.

    `gains` are those of the test samples of each resplit, `rows` which of the pooled samples these are.

    >>> paired([np.array([1.0, 0.0, 0.5]), np.array([0.0, 1.0, 0.5])], [np.array([0, 1, 2]), np.array([1, 3, 4])])
    (0.5, 0.18708286933869708)
    """
    size = max(int(each.max()) for each in rows) + 1
    every, place = np.concatenate(gains).astype(np.float64), np.concatenate(rows)
    counts = np.bincount(place, minlength=size)
    of_sample = (np.bincount(place, every, size) / np.maximum(counts, 1))[counts > 0]
    of_resplit = np.array([each.mean(dtype=np.float64) for each in gains])
    resplits = float(of_resplit.var(ddof=1)) / len(of_resplit) if len(of_resplit) > 1 else 0.0
    samples = float(of_sample.var(ddof=1)) / len(of_sample) if len(of_sample) > 1 else 0.0
    return float(of_resplit.mean()), float(np.sqrt(samples + resplits))


def _on_all(differences: Sequence[PairedDifference]) -> list[PairedDifference]:
    """Return the mean difference of every method over the recordings that it has rows for."""
    found = []
    for method in dict.fromkeys(each.method for each in differences):
        own = [each for each in differences if each.method == method]
        error = float(np.sqrt(sum(each.error**2 for each in own))) / len(own)
        mean = float(np.mean([each.difference for each in own]))
        found.append(PairedDifference(ALL, method, own[0].reference, mean, error, own[0].resplits))
    return found


def _result(
    recording: str, method: str, share: float, figures: Floats, gain: tuple[float, float, str]
) -> BenchmarkResult:
    """Return what one method did at one budget, from the figures of all resplits."""
    accuracy, allowed, spent, seconds = figures.T
    low, high = np.quantile(accuracy, [0.025, 0.975]).tolist()
    deviation = float(accuracy.std(ddof=1)) if len(accuracy) > 1 else float("nan")
    difference, error, reference = gain
    return BenchmarkResult(
        recording=recording,
        method=method,
        budget=float(share),
        accuracy=float(accuracy.mean()),
        low=low,
        high=high,
        deviation=deviation,
        allowed_accuracy=float(allowed.mean()),
        spent=float(spent.mean()),
        seconds=float(seconds.mean()),
        difference=difference,
        difference_error=error,
        reference=reference,
        resplits=len(accuracy),
    )


def leaderboard(compared: Comparison) -> list[Place]:
    """Return the methods, the one nearest to the best of every recording and budget first.

    Every recording counts alike, however many budgets it allows. The figures of a method that has no rows for some
    recordings are those of the others.
    """
    results = compared.results
    overall = {each.method: each for each in compared.differences if each.recording == ALL}
    names = list(dict.fromkeys(each.recording for each in results))
    best: dict[tuple[str, float], float] = {}
    for each in results:
        key = each.recording, each.budget
        best[key] = max(best.get(key, 0.0), each.accuracy)

    def place(method: str) -> Place:
        own = [[each for each in results if (each.recording, each.method) == (name, method)] for name in names]

        def means(figure: Callable[[BenchmarkResult], float]) -> list[float]:
            return [float(np.mean([figure(each) for each in rows])) for rows in own if rows]

        regrets = means(lambda each: best[each.recording, each.budget] - each.accuracy)
        return Place(
            method=method,
            accuracy=float(np.mean(means(lambda each: each.accuracy))),
            regret=float(np.mean(regrets)),
            worst_regret=max(regrets),
            spent=float(np.mean(means(lambda each: each.spent))),
            deviation=float(np.mean(means(lambda each: each.deviation))),
            seconds=float(np.mean(means(lambda each: each.seconds))),
            difference=overall[method].difference,
            difference_error=overall[method].error,
            recordings=len(regrets),
        )

    return sorted(
        (place(method) for method in dict.fromkeys(each.method for each in results)), key=lambda each: each.regret
    )


def write_results(
    results: Sequence[BenchmarkResult] | Sequence[PairedDifference] | Sequence[Place], path: PathLike, **made: str
) -> None:
    """Write results, differences or a leaderboard as CSV, one row each; `made` says where and when in more columns."""
    rows = [{each.name: getattr(row, each.name) for each in fields(row)} | made for row in results]
    write_rows(path, rows, digits=5)


def as_points(results: Sequence[BenchmarkResult], recordings: Mapping[str, Recording]) -> dict[str, list[Point]]:
    """Return the results of every recording as the points of a report, at equal spent budget."""
    found: dict[str, list[Point]] = {}
    for each in results:
        costs = recordings[each.recording].costs
        spent = each.budget * costs.full
        point = Point(
            each.method, spent, each.accuracy, spent, each.low, each.high, full_cost=costs.full, unit=costs.unit
        )
        found.setdefault(each.recording, []).append(point)
    return found
