"""One level for all exits, the highest that the budget allows: a score, an accuracy, or a number of exits that agree.

Where levels are coarse, the policies of two neighbours are mixed, so that the budget is used.
"""

from collections.abc import Callable, Sequence

import numpy as np

from alight.budgeting.bounds import largest
from alight.budgeting.thresholds import hash01
from alight.calibrate.problem import AnyCosts, Budget, Floats, Problem
from alight.outputs import HeadOutputs
from alight.policies.policy import MIXTURE_SALT, Mixture, Patience, Policy, Streak, Threshold
from alight.policies.route import replay


def global_threshold(
    costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None
) -> Threshold:
    """Use one threshold for all exits, the highest that the budget allows.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> decisions = replay(global_threshold(costs, "50%", labelled), test)
    >>> f"{decisions.accuracy(test.labels):.1%} accuracy at {decisions.mean_cost / costs.full:.1%} of the cost"
    '40.9% accuracy at 49.8% of the cost'
    """
    problem = Problem.of("global_threshold", costs, budget, labelled, unlabelled)
    early = problem.scored.scores[:, :-1]
    if not early.size:  # a network with one exit is the full network
        return Threshold(thresholds=(), **problem.terms())

    def at(level: float) -> Threshold:
        return Threshold(thresholds=(level,) * early.shape[1], **problem.terms())

    levels = levels_between(early)
    return at(float(levels[highest_affordable(problem, levels, at)]))


def performance_control(
    costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None
) -> Policy:
    """Ask one accuracy of every exit: leave where an isotonic map of the score reaches it (Mofakhami et al. 2024).

    The map has steps, so the highest affordable accuracy is mixed with the next one to use the budget.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> decisions = replay(performance_control(costs, "50%", labelled), test)
    >>> f"{decisions.accuracy(test.labels):.1%} accuracy at {decisions.mean_cost / costs.full:.1%} of the cost"
    '38.7% accuracy at 49.8% of the cost'
    """
    from scipy.optimize import isotonic_regression  # slow to import

    problem = Problem.of("performance_control", costs, budget, labelled, unlabelled)
    correct, scores = labelled.correct(), labelled.scores
    maps = []  # per exit but the last: distinct scores in order, and the accuracy each stands for
    for exit_index in range(len(problem.network) - 1):
        distinct, groups, counts = np.unique(scores[:, exit_index], return_inverse=True, return_counts=True)
        hits = np.bincount(groups, weights=correct[:, exit_index])
        maps.append((distinct, isotonic_regression(hits / counts, weights=counts).x))

    def at(accuracy: float) -> Threshold:
        levels = tuple(_first_reaching(*each, accuracy) for each in maps)
        return Threshold(
            thresholds=levels, **problem.terms(settings={"accuracy": accuracy if accuracy <= 1 else "out of reach"})
        )

    asked = [0.0, *np.unique(np.concatenate([[2.0], *(accuracies for _, accuracies in maps)]))]  # 2: never reached
    index = highest_affordable(problem, asked, at)
    return at(asked[index]) if index == len(asked) - 1 else mixed(problem, at(asked[index]), at(asked[index + 1]))


def patience(costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None) -> Policy:
    """Use the longest patience that the budget allows, mixed with the next longer one so that the budget is used.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> decisions = replay(patience(costs, "50%", labelled), test)
    >>> f"{decisions.accuracy(test.labels):.1%} accuracy at {decisions.mean_cost / costs.full:.1%} of the cost"
    '34.0% accuracy at 50.0% of the cost'
    """
    problem = Problem.of("patience", costs, budget, labelled, unlabelled)

    def at(length: float) -> Patience:
        return Patience(int(length), **problem.terms(settings={"patience": length}))

    length = highest_affordable(problem, range(len(problem.network)), at)
    return at(length) if length == len(problem.network) - 1 else mixed(problem, at(length), at(length + 1))


def pcee(costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None) -> Streak:
    """Leave after confident exits in a row, at the highest affordable threshold; the labelled data choose how many.

    The published score is the negative entropy; any table's score is taken.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> decisions = replay(pcee(costs, "50%", labelled), test)
    >>> f"{decisions.accuracy(test.labels):.1%} accuracy at {decisions.mean_cost / costs.full:.1%} of the cost"
    '40.9% accuracy at 49.8% of the cost'
    """
    problem = Problem.of("pcee", costs, budget, labelled, unlabelled)
    levels = levels_between(problem.scored.scores)

    def of(length: int) -> Streak:
        def at(level: float) -> Streak:
            return Streak(level, length, **problem.terms())

        return at(float(levels[highest_affordable(problem, levels, at)]))

    lengths = [length for length in range(1, len(problem.network) + 1) if problem.costs[length - 1] <= problem.budget]
    return max((of(length) for length in lengths), key=problem.accuracy)


def levels_between(values: Floats) -> Floats:
    """Return a level below, between and above all distinct values: each separates other samples.

    Midway between neighbours, so that rounding in a faster dtype rarely crosses it.

    >>> levels_between(np.array([1.0, 2.0]))
    array([-inf,  1.5,  inf])
    """
    distinct = np.unique(values)
    return np.concatenate([[-np.inf], distinct[:-1] + np.diff(distinct) / 2, [np.inf]])


def highest_affordable(problem: Problem, levels: Sequence[float] | Floats, at: Callable[[float], Policy]) -> int:
    """Return the index of the highest level that keeps the budget on the scored table; higher ones never cost less."""
    return largest(0, len(levels) - 1, lambda index: problem.spends(at(float(levels[index]))) <= problem.budget)


def mixed(problem: Problem, cheaper: Policy, costlier: Policy) -> Mixture:
    """Return the mixture with the largest share of the costlier policy that keeps the budget on the scored table."""
    low, high = (replay(policy, problem.scored).spent for policy in (cheaper, costlier))
    hashes = hash01(np.arange(len(high)), MIXTURE_SALT)
    order = np.argsort(hashes)
    exceeds = low.sum() + np.cumsum((high - low)[order]) > problem.budget * len(high)
    share = float(hashes[order[np.argmax(exceeds)]]) if exceeds.any() else 1.0  # below the first that is too much
    settings = dict(cheaper.settings) | {"share of next": share}
    return Mixture(costlier, cheaper, share, **problem.terms(settings=settings))


def _first_reaching(scores: Floats, accuracies: Floats, accuracy: float) -> float:
    """Return the threshold above which the isotonic map reaches an accuracy, midway to the score below."""
    index = int(np.searchsorted(accuracies, accuracy))
    if index in (0, len(scores)):
        return np.inf if index else -np.inf
    return float(scores[index - 1] + (scores[index] - scores[index - 1]) / 2)
