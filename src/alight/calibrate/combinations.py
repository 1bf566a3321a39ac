"""Combinations of the exits' answers, fitted to labelled outputs, and methods calibrated on combined answers.

`combined` calibrates any method with a combination. All labelled samples fit it, and without an unlabelled table they
set the thresholds, too: combinations have so few numbers, and are held so close to 0, that fresh samples score alike
from some hundred labels on. A guarantee (`certified_mean` and others) is issued on samples that fitted nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from alight.budgeting.rates import Floats, Integers
from alight.calibrate.crossval import folds, on_exits, shared_by_budgets
from alight.calibrate.problem import AnyCosts, Budget, Method, check_tables, check_uncertified
from alight.costs import Costs, as_costs
from alight.errors import BadInput, Mismatch
from alight.outputs import HeadOutputs
from alight.policies.combinations import (
    IMPOSSIBLE,
    Combination,
    GeometricMean,
    Temperature,
    Vote,
    candidates,
    shares_of,
)
from alight.policies.policy import Memory, Policy

Fit = Callable[[HeadOutputs], Combination]

LEAST_SAMPLES = 40  # to fit a combination to
MOST_FITTED = {"vote": 5000, "geometric_mean": 1000}  # samples: more change nothing but the time
MOST_STEPS, FLAT = 50, 1e-6  # of the fit of a geometric mean, and the slope at which it ends
RIDGE = 1.0  # penalty on half the squared weights of a vote, against the log-likelihood of all samples


def combined(method: Method, combine: str | Fit = "vote") -> Method:
    """Return the method, calibrated on combined answers of the exits; its policies carry the combination.

    `combine` is one of `COMBINE` ("vote", "agreement", "geometric_mean", "temperature"), or a function that fits a
    combination to a labelled table. Where the method closes exits, the combination is fitted for those left open.

    >>> from alight import calibrate, recordings
    >>> labelled, test, costs = recordings.load("resnet18_cifar100_joint")
    >>> combined(calibrate.eero, "vote")(costs, "50%", labelled).method
    'eero, vote'
    """
    fit = COMBINE.get(combine) if isinstance(combine, str) else combine
    if fit is None:
        raise BadInput(f"there is no combination {combine!r}: choose one of {', '.join(COMBINE)}")

    def calibrated(
        costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None, **options: object
    ) -> Policy:
        network = as_costs(costs)
        amount = network.budget(budget)
        if len(labelled) < LEAST_SAMPLES:
            raise BadInput(f"{len(labelled)} labelled samples to fit a combination: record at least {LEAST_SAMPLES}")
        check_tables(network, labelled, unlabelled)
        if has_several_truths(labelled):
            raise BadInput(
                "several different answers to one sample are right in this table, as in a log without answers:"
                " combining compares answers, so give them (read_log(..., answer=...)), or calibrate without it"
            )
        at_open_exits = _with_all_exits(partial(method, **options), fit)
        policy = at_open_exits(network, amount, labelled, unlabelled)
        while policy.combination is None:  # the method closes exits: fewer each time
            policy = on_exits(at_open_exits, policy.open_exits)(network, amount, labelled, unlabelled)
        name = combine if isinstance(combine, str) else type(policy.combination).__name__
        return replace(policy, method=f"{policy.method}, {name}")

    return calibrated


def has_several_truths(labelled: HeadOutputs) -> bool:
    """Return whether answers that differ are graded alike as the best of a sample, as in a log without answers."""
    if labelled.quality is None:
        return False
    best = labelled.quality == labelled.quality.max(axis=1, keepdims=True)
    return bool((best & (labelled.quality > 0) & (labelled.predictions != labelled.truth()[:, None])).any())


def _with_all_exits(method: Method, fit: Fit) -> Method:
    """Return the method with a combination of all exits; without it where some are closed, to say which."""

    def calibrated(costs: Costs, budget: float, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None) -> Policy:
        combination = fit(labelled)
        tables = [None if table is None else _applied(table, combination) for table in (labelled, unlabelled)]
        policy = method(costs, budget, *tables)
        check_uncertified(policy, "combined")
        if policy.combination is not None:
            raise BadInput(
                f"{policy.method} scores by all exits so far itself and cannot be combined once more: choose eero or"
                " another method that decides on the score of one exit"
            )
        return replace(policy, combination=combination) if len(policy.open_exits) == len(costs) else policy

    return calibrated


@shared_by_budgets
def _applied(table: HeadOutputs, combination: Combination) -> HeadOutputs:
    return combination.apply(table)


def fit_vote(labelled: HeadOutputs) -> Vote:
    """Fit votes by multinomial logistic regression: the label is one of the classes that exits named, or another.

    Exit by exit a convex problem: constants and slopes at least 0 with a ridge penalty, and a free number for other
    classes. Without labels the truth is the last exit's answer. 5,000 samples of 18 exits take about half a second.

    >>> from alight import recordings
    >>> labelled, test, costs = recordings.load("resnet18_cifar100_joint")
    >>> (test.risks()[-1] - fit_vote(labelled).apply(test).risks()[-1]).round(3)
    np.float64(0.005)
    """
    from scipy.optimize import minimize  # slow to import

    labelled = _some(labelled, MOST_FITTED["vote"])
    truth = labelled.truth()
    scores, predictions = np.ascontiguousarray(labelled.scores.T), np.ascontiguousarray(labelled.predictions.T)
    named, counts = _named_classes(predictions)
    constants: list[tuple[float, ...]] = []  # per exit
    slopes: list[tuple[float, ...]] = []
    others: list[float] = []
    weights = np.zeros(1)  # constants, slopes and the number for other classes
    for exit_index in range(labelled.num_exits):
        so_far = slice(0, exit_index + 1)
        likelihood = _Likelihood(scores[so_far], predictions[so_far] == truth, named[so_far], counts[exit_index])
        old = np.split(weights[:-1], 2)
        start = np.concatenate([old[0], [1.0], old[1], [1.0], weights[-1:]])
        bounds = [(0.0, None)] * (len(start) - 1) + [(None, None)]
        # TNC takes as long as L-BFGS-B, whose tiny matrices SciPy's threaded LAPACK slows ten times on a busy machine
        weights = minimize(likelihood, start, jac=True, method="TNC", bounds=bounds, options={"ftol": 1e-7}).x
        for rows, part in zip((constants, slopes), np.split(weights[:-1], 2), strict=True):
            rows.append(tuple(part.tolist()))
        others.append(float(weights[-1]))
    return Vote(
        exits=tuple(range(labelled.num_exits)),
        column=labelled.score,
        constants=tuple(constants),
        slopes=tuple(slopes),
        others=tuple(others),
    )


def fit_agreement(outputs: HeadOutputs) -> Vote:
    """Return votes in which each exit keeps its own answer, and is surest where the exits before it agree.

    The score of an exit is its own, and one more for each earlier exit that gives the same answer. Nothing is fitted,
    so it needs no labels: Agreement-Based Cascading (Kolawole et al. 2024), where own scores decide between equal
    numbers of votes.

    >>> table = HeadOutputs(scores=[[0.5, 0.2], [0.5, 0.2]], predictions=[[3, 3], [3, 4]])
    >>> combined = fit_agreement(table).apply(table)
    >>> combined.predictions[:, 1], combined.scores[:, 1].round(1)
    (array([3, 4]), array([3.2, 1.2]))
    """
    if outputs.scores.min() < 0 or outputs.scores.max() > 1:
        raise BadInput(
            f"agreement adds scores from 0 to 1 to votes, and {outputs.score!r} runs from {outputs.scores.min():g} to"
            f" {outputs.scores.max():g}: record the margin or max_probability, or choose 'vote'"
        )
    exits = tuple(range(outputs.num_exits))
    constants = tuple((1.0,) * index + (index + 1.0,) for index in exits)  # an exit outvotes all before it
    slopes = tuple((0.0,) * index + (1.0,) for index in exits)
    return Vote(exits=exits, column=outputs.score, constants=constants, slopes=slopes, others=(0.0,) * len(exits))


def _some(labelled: HeadOutputs, most: int) -> HeadOutputs:
    """Return so many of the samples at most, drawn by the hash of their rows."""
    return labelled.take(folds(len(labelled), -(-len(labelled) // most))[0])


def _named_classes(predictions: Integers) -> tuple[Integers, Integers]:
    """Number each sample's classes in the order of the exits that name them first.

    Return the number of each exit's class, and how many classes have been named up to each exit, both (exits, samples).
    """
    named, counts = np.zeros_like(predictions), np.ones_like(predictions)
    for exit_index in range(1, len(predictions)):
        same = predictions[:exit_index] == predictions[exit_index]
        number = np.where(
            same.any(axis=0), np.take_along_axis(named, same.argmax(axis=0)[None], 0)[0], counts[exit_index - 1]
        )
        named[exit_index], counts[exit_index] = number, np.maximum(counts[exit_index - 1], number + 1)
    return named, counts


class _Likelihood:
    """Mean negative log-likelihood of the truth under a vote at one exit, with its ridge penalty; and its slope.

    The votes for a sample's classes lie side by side, those of all samples in one array.
    """

    def __init__(self, scores: Floats, right: npt.NDArray[np.bool_], named: Integers, counts: Integers) -> None:
        self.scores, self.size = scores, len(counts)  # scores: (exits, samples)
        self.starts = np.concatenate([[0], np.cumsum(counts)[:-1]])  # of each sample's classes
        self.owners = np.repeat(np.arange(self.size), counts)
        self.places = named + self.starts  # of each exit's class
        of_truth = [right.mean(axis=1), (right * scores).mean(axis=1), [(~right.any(axis=0)).mean()]]
        self.of_truth = np.concatenate(of_truth)  # what each weight adds to the votes for the truth, on average

    def __call__(self, weights: Floats) -> tuple[float, Floats]:
        (constants, slopes), other = np.split(weights[:-1], 2), weights[-1]
        cast = constants[:, None] + slopes[:, None] * self.scores  # (exits, samples)
        votes = np.bincount(self.places.ravel(), cast.ravel())
        most = np.maximum(np.maximum.reduceat(votes, self.starts), other)
        likely = np.exp(votes - most[self.owners])
        unnamed = np.exp(other - most)
        totals = np.add.reduceat(likely, self.starts) + unnamed
        expected = (likely / totals[self.owners])[self.places]  # probability of each exit's class
        slope = [
            expected.mean(axis=1),
            np.einsum("es,es->e", expected, self.scores) / self.size,
            [(unnamed / totals).mean()],
        ]
        penalty = RIDGE / self.size * np.append(weights[:-1], 0.0)
        value = (np.log(totals) + most).mean() + weights @ (0.5 * penalty - self.of_truth)
        return float(value), np.concatenate(slope) - self.of_truth + penalty


def fit_geometric_mean(labelled: HeadOutputs) -> GeometricMean:
    """Fit two weights per exit, for the mean so far and for the exit itself, that make the truth likeliest.

    Exit by exit a convex problem of two numbers, neither below 0; Zero-Time-Waste (Wolczyk et al. 2021) has a weight
    for each earlier exit and class, and cascade connections. Without labels the truth is the last exit's answer.

    >>> rng = np.random.default_rng(0)
    >>> labels = rng.integers(3, size=200)
    >>> logits = rng.normal(size=(200, 2, 3)) + 2 * np.eye(3)[labels][:, None]
    >>> fit_geometric_mean(HeadOutputs.from_logits(logits, labels)).top
    3
    """
    labelled = _some(labelled, MOST_FITTED["geometric_mean"])
    if labelled.top_classes is None or labelled.top_log_probabilities is None:
        raise Mismatch("the table has no log-probabilities, which a geometric mean needs: record it again")
    truth = labelled.truth()[:, None]
    kept, fresh = [], []
    memory: Memory = ()
    for exit_index in range(labelled.num_exits):
        columns = labelled.top_classes[:, exit_index], labelled.top_log_probabilities[:, exit_index]
        classes, mean, outside, own, lowest = candidates(*columns, memory)
        size = len(classes)
        logs = np.stack([np.hstack([mean, outside]), np.hstack([own, lowest])])  # (weights, samples, classes)
        right = np.hstack([classes == truth, np.ones_like(truth, dtype=bool)]).argmax(axis=1)
        label_logs = logs[:, np.arange(size), right]  # (weights, samples)
        again = np.hstack([_repeated(classes), np.zeros_like(truth, dtype=bool)])

        found = _least_surprise(logs, label_logs, again, free=np.array([bool(memory), True]))
        kept.append(float(found[0]))
        fresh.append(float(found[1]))
        memory = (classes, *(found[0] * before + found[1] * now for before, now in ((mean, own), (outside, lowest))))
    exits, top = tuple(range(labelled.num_exits)), labelled.top_classes.shape[2]
    return GeometricMean(exits=exits, kept=tuple(kept), fresh=tuple(fresh), top=top)


def _least_surprise(
    logs: Floats, label_logs: Floats, again: npt.NDArray[np.bool_], free: npt.NDArray[np.bool_]
) -> Floats:
    """Return the weights, not below 0, under which the truth is most likely: Newton's method, as the problem is convex.

    `logs` are (weights, samples, classes), `label_logs` those of the truth, `again` classes that are left out; weights
    that are not free are 0.
    """

    def surprise(weights: Floats) -> tuple[float, Floats, Floats]:
        """Return the mean negative log-likelihood of the truth, its slope and its curvature."""
        joint = np.where(again, -np.inf, weights[0] * logs[0] + weights[1] * logs[1])
        largest = joint.max(axis=1, keepdims=True)
        shares = np.exp(joint - largest)
        totals = shares.sum(axis=1, keepdims=True)
        shares /= totals
        expected = (logs * shares).sum(axis=2)  # (weights, samples)
        value = (np.log(totals) + largest).mean() - (weights[:, None] * label_logs).sum(axis=0).mean()
        mixed = (logs[0] * logs[1] * shares).sum(axis=1)
        squares = (logs**2 * shares).sum(axis=2)
        moments = np.stack([np.stack([squares[0], mixed]), np.stack([mixed, squares[1]])])
        curvature = (moments - expected[:, None] * expected[None]).mean(axis=2)
        return float(value), (expected - label_logs).mean(axis=1), curvature

    weights = np.where(free, 0.5, 0.0)
    value, slope, curvature = surprise(weights)
    for _ in range(MOST_STEPS):
        moving = free & ((weights > 0) | (slope < 0))
        if not moving.any() or np.abs(slope[moving]).max() < FLAT:
            break
        step = np.zeros(2)
        step[moving] = np.linalg.solve(curvature[np.ix_(moving, moving)] + FLAT * np.eye(moving.sum()), slope[moving])
        for length in 0.5 ** np.arange(30):
            tried = np.maximum(weights - length * step, 0.0)
            lower, *shape = surprise(tried)
            if lower < value:
                break
        else:
            break  # as low as rounding lets it be
        weights, value, (slope, curvature) = tried, lower, shape
    return weights


def _repeated(classes: Integers) -> npt.NDArray[np.bool_]:
    """Return where a class of a row has come before."""
    order = np.argsort(classes, axis=1, kind="stable")
    ordered = np.take_along_axis(classes, order, axis=1)
    again = np.zeros(classes.shape, dtype=bool)
    np.put_along_axis(again, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    return again


def fit_temperature(labelled: HeadOutputs) -> Temperature:
    """Fit one temperature per exit by the likelihood of the truth (Guo et al. 2017).

    Without labels the truth is the last exit's answer. Classes that are not recorded share what is left.

    >>> rng = np.random.default_rng(0)
    >>> labels = rng.integers(3, size=500)
    >>> logits = rng.normal(size=(500, 1, 3)) + 2 * np.eye(3)[labels][:, None]
    >>> fit_temperature(HeadOutputs.from_logits(4 * logits, labels)).temperatures[0] > 1.5  # it was too sure
    True
    """
    from scipy.optimize import minimize_scalar  # slow to import

    if labelled.top_classes is None or labelled.top_log_probabilities is None:
        raise Mismatch("the table has no log-probabilities, which a temperature needs: record it again")
    truth, temperatures = labelled.truth(), []
    classes = int(max(labelled.top_classes.max(), truth.max())) + 1
    for exit_index in range(labelled.num_exits):
        likely, rest = shares_of(labelled.top_log_probabilities[:, exit_index], classes)
        named = labelled.top_classes[:, exit_index] == truth[:, None]
        chosen = np.where(named.any(axis=1), (likely * named).sum(axis=1), rest)

        def surprise(level: float, likely: Floats = likely, rest: Floats = rest, chosen: Floats = chosen) -> float:
            """Return the mean negative log-likelihood of the truth at this logarithm of a temperature."""
            power = np.exp(-level)
            total = (likely**power).sum(axis=1) + (classes - likely.shape[1]) * rest**power
            return float((np.log(total) - power * np.log(np.maximum(chosen, np.exp(IMPOSSIBLE)))).mean())

        temperatures.append(float(np.exp(minimize_scalar(surprise, bounds=(-3, 3), method="bounded").x)))
    top = labelled.top_classes.shape[2]
    return Temperature(
        exits=tuple(range(labelled.num_exits)), temperatures=tuple(temperatures), classes=classes, top=top
    )


COMBINE: dict[str, Fit] = {
    "vote": shared_by_budgets(fit_vote),
    "agreement": fit_agreement,
    "geometric_mean": shared_by_budgets(fit_geometric_mean),
    "temperature": shared_by_budgets(fit_temperature),
}
