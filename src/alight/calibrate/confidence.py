"""One level of confidence for all exits: of the score itself, or of the accuracy that the score stands for."""

import numpy as np

from alight.calibrate.affordable import highest_affordable, levels_between, mixed
from alight.calibrate.problem import AnyCosts, Budget, Floats, Task
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy, Threshold


def global_threshold(
    costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None
) -> Threshold:
    """One threshold for all exits, the highest that the budget allows.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> decisions = replay(global_threshold(costs, "50%", labelled), test)
    >>> f"{decisions.accuracy(test.labels):.1%} right for {decisions.mean_cost / costs.full:.1%} of the cost"
    '40.9% right for 49.8% of the cost'
    """
    task = Task.of("global_threshold", costs, budget, labelled, unlabelled)
    early = task.scored.scores[:, :-1]
    if not early.size:  # a network with one exit is the plain network
        return Threshold(thresholds=(), **task.terms())

    def at(level: float) -> Threshold:
        return Threshold(thresholds=(level,) * early.shape[1], **task.terms())

    levels = levels_between(early)
    return at(float(levels[highest_affordable(task, levels, at)]))


def performance_control(
    costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None
) -> Policy:
    """One accuracy asked of every exit: leave where an isotonic map of the score reaches it (Mofakhami et al. 2024).

    The map has steps, so the highest affordable accuracy is mixed with the next one to use the budget.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> decisions = replay(performance_control(costs, "50%", labelled), test)
    >>> f"{decisions.accuracy(test.labels):.1%} right for {decisions.mean_cost / costs.full:.1%} of the cost"
    '38.7% right for 49.8% of the cost'
    """
    from scipy.optimize import isotonic_regression  # slow to import

    task = Task.of("performance_control", costs, budget, labelled, unlabelled)
    correct, scores = labelled.correct(), labelled.scores
    maps = []  # per exit but the last: distinct scores in order, and the accuracy each stands for
    for exit_index in range(len(task.network) - 1):
        distinct, groups, counts = np.unique(scores[:, exit_index], return_inverse=True, return_counts=True)
        hits = np.bincount(groups, weights=correct[:, exit_index])
        maps.append((distinct, isotonic_regression(hits / counts, weights=counts).x))

    def at(accuracy: float) -> Threshold:
        levels = tuple(_first_reaching(*each, accuracy) for each in maps)
        return Threshold(
            thresholds=levels, **task.terms(settings={"accuracy": accuracy if accuracy <= 1 else "out of reach"})
        )

    asked = [0.0, *np.unique(np.concatenate([[2.0], *(accuracies for _, accuracies in maps)]))]  # 2: never reached
    index = highest_affordable(task, asked, at)
    return at(asked[index]) if index == len(asked) - 1 else mixed(task, at(asked[index]), at(asked[index + 1]))


def _first_reaching(scores: Floats, accuracies: Floats, accuracy: float) -> float:
    """The threshold above which the isotonic map reaches an accuracy, midway to the score below."""
    index = int(np.searchsorted(accuracies, accuracy))
    if index in (0, len(scores)):
        return np.inf if index else -np.inf
    return float(scores[index - 1] + (scores[index] - scores[index - 1]) / 2)
