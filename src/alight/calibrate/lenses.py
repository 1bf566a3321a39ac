"""Fit lenses: a learned gain score, the most reliable exit so far, and ensembles of exits.

`with_lens` calibrates any method with a lens. One part of the labelled table fits the lens, the other and the
unlabelled table calibrate: no threshold is set on a score that its sample helped to fit, so what holds for the method
on fresh tables holds with the lens. With `folds` every labelled sample does both (cross-fitting).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from alight.budgeting.rates import Floats
from alight.calibrate.crossval import folds as folds_of
from alight.calibrate.crossval import on_exits
from alight.calibrate.problem import AnyCosts, Budget, Method, Settings, check_tables
from alight.costs import Costs, as_costs
from alight.errors import AlightError, BadInput, Mismatch
from alight.outputs import HeadOutputs
from alight.policies.lenses import Ensemble, Gain, Lens, Recall, clues, possible
from alight.policies.policy import Memory, Policy

Fit = Callable[[HeadOutputs, Policy | None], Lens]

LEAST_OF_A_KIND = 10  # samples that going on mends, and that it does not, for a logistic regression
LEAST_SAMPLES = 20  # to fit a lens to, and to calibrate on
BENDS = (0.1, 0.3, 0.5, 0.7, 0.9)  # quantiles of a score where the gain may bend
PENALTIES = np.logspace(0, 4, 5)  # of ridge regression; leave-one-out chooses
TILT = 1e-6  # by which reliability rises even where isotonic regression is level, so that scores keep their order
SMALLEST_BLOCK = 10  # samples below which a level of reliability is joined to its neighbour
HANDICAPS = (1.0, 0.5, 0.3, 0.2, 0.15, 0.1, 0.05, 0.0)  # of earlier answers, to choose from; 1 never recalls


def with_lens(method: Method, fit: Fit, *, share: float = 0.5, folds: int | None = None, seed: int = 0) -> Method:
    """Return the method, calibrated on what a lens makes of the tables; its policies carry the lens.

    This share of the labelled samples fits the lens, the rest calibrates. With `folds`, all samples fit the lens, and
    thresholds are set on each fold as mapped by a lens fitted to the others: more data for both, but the lens that is
    kept differs a little, so a budget is kept only nearly. Where the method closes exits, the lens is fitted for those
    left open.

    >>> from alight import calibrate, recordings
    >>> labelled, test, costs = recordings.load("resnet18_cifar100_joint")
    >>> with_lens(calibrate.eero, fit_recall)(costs, "50%", labelled).method
    'eero through recall'
    """

    def calibrated(
        costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None, **options: object
    ) -> Policy:
        network = as_costs(costs)
        amount = network.budget(budget)
        _check_parts(len(labelled), share, folds)
        check_tables(network, labelled, unlabelled)
        at_open_exits = _with_open_exits(partial(method, **options), fit, share, folds, seed)
        policy = at_open_exits(network, amount, labelled, unlabelled)
        while policy.lens is None:  # the method closes exits: fewer each time
            policy = on_exits(at_open_exits, policy.open_exits)(network, amount, labelled, unlabelled)
        chosen: Settings = {"share": share, "seed": seed} if folds is None else {"folds": folds}
        name = f"{policy.method} through {type(policy.lens).__name__.lower()}"
        return replace(policy, method=name, settings={**policy.settings, **chosen})

    return calibrated


def _check_parts(samples: int, share: float, folds: int | None) -> None:
    fitting = round(share * samples) if 0 < share < 1 else 0
    if min(fitting, samples - fitting) < LEAST_SAMPLES:
        raise BadInput(
            f"{share:g} of {samples} labelled samples to fit a lens: both parts need at least {LEAST_SAMPLES},"
            " so record more or choose another share"
        )
    if folds is not None and not 2 <= folds <= samples // 2:
        raise BadInput(f"{folds} folds of {samples} samples: give from 2 to half as many as samples")


def _with_open_exits(method: Method, fit: Fit, share: float, folds: int | None, seed: int) -> Method:
    """Return the method with a lens for all exits of a network; without one where it closes some, to say which."""

    def calibrated(costs: Costs, budget: float, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None) -> Policy:
        fitting, setting = labelled, labelled
        if folds is None:
            fitting, setting = labelled.split(share, np.random.default_rng(seed))
        without = method(costs, budget, fitting)
        if len(without.open_exits) < len(costs):
            return without
        lens = fit(fitting, without)
        mapped = lens.apply(setting)
        if folds is not None:
            mapped = _cross_fitted(mapped, labelled, folds, lambda table: fit(table, method(costs, budget, table)))
        policy = method(costs, budget, mapped, None if unlabelled is None else lens.apply(unlabelled))
        return replace(policy, lens=lens) if len(policy.open_exits) == len(costs) else policy

    return calibrated


def _cross_fitted(
    mapped: HeadOutputs, labelled: HeadOutputs, count: int, fit: Callable[[HeadOutputs], Lens]
) -> HeadOutputs:
    """Return the mapped table with each fold mapped by a lens that was fitted to the others."""
    scores, predictions = mapped.scores.copy(), mapped.predictions.copy()
    for fold in folds_of(len(labelled), count):
        rest = labelled.take(np.setdiff1d(np.arange(len(labelled)), fold))
        other = fit(rest).apply(labelled.take(fold))
        scores[fold], predictions[fold] = other.scores, other.predictions
    return replace(mapped, scores=scores, predictions=predictions)


def fit_gain(labelled: HeadOutputs, policy: Policy | None = None, *, model: str = "ridge") -> Gain:
    """Learn what going on brings: right where the sample would leave next, minus right now, by ridge regression.

    `model="logistic"` learns by logistic regression instead whether going on mends a wrong answer. Where a sample
    would leave if it went on is up to the policy; without one, it is the last exit. Without labels right means: as the
    last exit says. Reads the score and all features of the table. Needs scikit-learn (`pip install alight[learn]`).

    >>> from alight import recordings
    >>> fit_gain(recordings.load().labelled).inputs
    ('margin',)
    """
    try:
        from sklearn.linear_model import LogisticRegression, RidgeCV
        from sklearn.model_selection import GridSearchCV
    except ImportError as error:
        raise AlightError("a learned gain score needs scikit-learn: pip install 'alight[learn]'") from error

    if model not in ("ridge", "logistic"):
        raise BadInput(f"there is no model {model!r} of the gain: choose ridge or logistic")
    names = (labelled.score, *labelled.features)
    right = labelled.correct().astype(np.float64)
    gains = right[np.arange(len(labelled))[:, None], _going_on(labelled, policy)] - right  # (samples, exits)
    knots, weights = [], []
    memory: Memory = ()
    for exit_index in range(labelled.num_exits):
        columns = tuple(labelled.column(name)[:, exit_index] for name in names)
        bends = tuple(tuple(np.unique(np.quantile(column, BENDS)).tolist()) for column in columns)
        if exit_index == labelled.num_exits - 1:
            bends = ((),) * len(names)  # nothing comes after it
        described = np.stack(clues(bends, labelled.predictions[:, exit_index], columns, memory), axis=1)
        centre, scale = described.mean(axis=0), described.std(axis=0)
        scale = np.where(scale > 0, scale, np.inf)  # what never changes says nothing
        inputs, mended = (described - centre) / scale, gains[:, exit_index] > 0
        if model == "ridge":
            fitted = RidgeCV(PENALTIES).fit(inputs, gains[:, exit_index])
            intercept, coefficients = float(fitted.intercept_), fitted.coef_
        elif min(mended.sum(), (~mended).sum()) < LEAST_OF_A_KIND:
            intercept, coefficients = float(mended.mean()), np.zeros(inputs.shape[1])
        else:
            searched = GridSearchCV(LogisticRegression(), {"C": 1 / PENALTIES}, scoring="neg_log_loss", cv=3)
            fitted = searched.fit(inputs, mended).best_estimator_
            intercept, coefficients = float(fitted.intercept_[0]), fitted.coef_[0]
        slopes = coefficients / scale
        knots.append(bends)
        weights.append((float(intercept - slopes @ centre), *slopes.tolist()))
        memory = (*memory, (labelled.predictions[:, exit_index], *columns))
    return Gain(exits=tuple(range(labelled.num_exits)), columns=names, knots=tuple(knots), weights=tuple(weights))


def _going_on(labelled: HeadOutputs, policy: Policy | None) -> npt.NDArray[np.int64]:
    """Return the exit at which each sample would leave if it did not leave at this one, (samples, exits)."""
    last, rows = labelled.num_exits - 1, np.arange(len(labelled))
    would_leave = np.full(labelled.predictions.shape, last)  # the exit itself where the sample would leave, or the last
    memory: Memory = ()
    for open_index in range(last if policy else 0):
        assert policy is not None  # the range says so
        said = labelled.predictions[:, open_index], labelled.scores[:, open_index]
        leaving, memory = policy.step(open_index, rows, *said, memory)
        would_leave[leaving, open_index] = open_index
    soonest = np.minimum.accumulate(would_leave[:, ::-1], axis=1)[:, ::-1]  # from this exit on
    return np.concatenate([soonest[:, 1:], np.full((len(labelled), 1), last)], axis=1)


def fit_recall(labelled: HeadOutputs, policy: Policy | None = None, *, handicap: float | None = None) -> Recall:
    """Learn how reliable each score of each exit is, by isotonic regression; without labels: as the last exit says.

    `handicap` is what an earlier answer must be more reliable by to be recalled; None chooses it exit by exit, by how
    many answers are then right.

    >>> from alight import recordings
    >>> fit_recall(recordings.load().labelled).inputs
    ('margin',)
    """
    right = labelled.correct()
    exits = tuple(range(labelled.num_exits))
    lines = [_reliability(labelled.scores[:, index], right[:, index]) for index in exits]
    levels, reliabilities = zip(*lines, strict=True)
    handicaps = (0.0, *(handicap or 0.0 for _ in exits[1:]))
    lens = Recall(exits=exits, column=labelled.score, levels=levels, reliabilities=reliabilities, handicaps=handicaps)
    return lens if handicap is not None else _handicapped(lens, labelled)


def _handicapped(lens: Recall, labelled: HeadOutputs) -> Recall:
    """Return the lens with the handicaps that leave most answers right; of equals the highest, which recalls least."""
    truth = labelled.truth()
    memory: Memory = ()
    for exit_index in lens.exits:
        said = labelled.predictions[:, exit_index], (labelled.scores[:, exit_index],)
        tried = [
            replace(lens, handicaps=(*lens.handicaps[:exit_index], each, *lens.handicaps[exit_index + 1 :]))
            for each in (HANDICAPS if exit_index else (0.0,))
        ]
        lens = max(tried, key=lambda one: (one.step(exit_index, *said, memory)[0] == truth).mean())
        memory = lens.step(exit_index, *said, memory)[2]
    return lens


def _reliability(scores: Floats, right: npt.NDArray[np.bool_]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the points of a rising line from scores to the probability of being right."""
    from scipy.optimize import isotonic_regression  # slow to import

    order = np.argsort(scores, kind="stable")
    fitted = isotonic_regression(right[order].astype(np.float64))
    bounds = fitted.blocks  # of the blocks of samples whose reliability is level
    while len(bounds) > 2 and (small := np.diff(bounds) < SMALLEST_BLOCK).any():
        index = int(np.argmax(small))
        bounds = np.delete(bounds, index if index else 1)
    sizes = np.diff(bounds)
    centres = np.add.reduceat(scores[order], bounds[:-1]) / sizes
    heights = np.add.reduceat(right[order].astype(np.float64), bounds[:-1]) / sizes
    levels = np.concatenate([[scores[order[0]]], centres, [scores[order[-1]]]])
    heights = np.maximum.accumulate(np.concatenate([heights[:1], heights, heights[-1:]]))
    levels, first = np.unique(levels, return_index=True)
    heights = heights[first]
    span = levels[-1] - levels[0]
    tilted = heights + TILT * (levels - levels[0]) / span if span > 0 else heights
    return tuple(levels.tolist()), tuple(tilted.tolist())


def fit_ensemble(labelled: HeadOutputs, policy: Policy | None = None) -> Ensemble:
    """Fit two weights per exit, for the mean so far and for the exit itself, that make the labels likeliest.

    Exit by exit a convex problem of two numbers, neither below 0.

    >>> rng = np.random.default_rng(0)
    >>> labels = rng.integers(3, size=200)
    >>> logits = rng.normal(size=(200, 2, 3)) + 2 * np.eye(3)[labels][:, None]
    >>> table = HeadOutputs.from_logits(logits, labels, keep_log_probabilities=True)
    >>> type(fit_ensemble(table)).__name__
    'Ensemble'
    """
    from scipy.optimize import minimize  # slow to import

    labels = labelled.known_labels("an ensemble of exits")
    if labelled.log_probabilities is None:
        missing = "the table has no log_probabilities, which an ensemble multiplies"
        raise Mismatch(f"{missing}: record it with keep_log_probabilities=True")
    rows = np.arange(len(labelled))
    kept, fresh = [], []
    mean: Floats | None = None
    for exit_index in range(labelled.num_exits):
        own = possible(labelled.log_probabilities[:, exit_index])
        logs = np.stack([own] if mean is None else [mean, own])  # (weights, samples, classes)
        label_logs = logs[:, rows, labels]  # (weights, samples)

        def surprise(weights: Floats, logs: Floats = logs, label_logs: Floats = label_logs) -> tuple[float, Floats]:
            """Return the mean negative log-likelihood of the labels, and its slope."""
            joint = np.tensordot(weights, logs, axes=1)
            joint = joint - joint.max(axis=1, keepdims=True)
            exponentials = np.exp(joint)
            totals = exponentials.sum(axis=1, keepdims=True)
            expected = (logs * (exponentials / totals)).sum(axis=2)  # (weights, samples)
            value = np.log(totals[:, 0]).mean() - joint[rows, labels].mean()
            return float(value), (expected - label_logs).mean(axis=1)

        start = np.full(len(logs), 1.0 / len(logs))
        found = minimize(surprise, start, jac=True, method="L-BFGS-B", bounds=[(0.0, None)] * len(logs)).x
        mean = np.tensordot(found, logs, axes=1)
        kept.append(float(found[0]) if exit_index else 0.0)
        fresh.append(float(found[-1]))
    return Ensemble(exits=tuple(range(labelled.num_exits)), kept=tuple(kept), fresh=tuple(fresh))
