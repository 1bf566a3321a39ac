"""Patience: leave when several exits in a row agree (PABEE), or are all confident (PCEE)."""

from alight.calibrate.affordable import highest_affordable, levels_between, mixed
from alight.calibrate.problem import AnyCosts, Budget, Task
from alight.outputs import HeadOutputs
from alight.policies.policy import Patience, Policy, Streak


def patience(costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None) -> Policy:
    """The longest patience that the budget allows, mixed with the next longer one so that the budget is used.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> decisions = replay(patience(costs, "50%", labelled), test)
    >>> f"{decisions.accuracy(test.labels):.1%} right for {decisions.mean_cost / costs.full:.1%} of the cost"
    '34.0% right for 50.0% of the cost'
    """
    task = Task.of("patience", costs, budget, labelled, unlabelled)

    def at(length: float) -> Patience:
        return Patience(int(length), **task.terms(settings={"patience": length}))

    length = highest_affordable(task, range(len(task.network)), at)
    return at(length) if length == len(task.network) - 1 else mixed(task, at(length), at(length + 1))


def pcee(costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None) -> Streak:
    """Confident exits in a row, at the highest threshold that the budget allows; how many, by the labelled data.

    The published score is the negative entropy; any table's score is taken.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> decisions = replay(pcee(costs, "50%", labelled), test)
    >>> f"{decisions.accuracy(test.labels):.1%} right for {decisions.mean_cost / costs.full:.1%} of the cost"
    '40.9% right for 49.8% of the cost'
    """
    task = Task.of("pcee", costs, budget, labelled, unlabelled)
    levels = levels_between(task.scored.scores)

    def of(length: int) -> Streak:
        def at(level: float) -> Streak:
            return Streak(level, length, **task.terms())

        return at(float(levels[highest_affordable(task, levels, at)]))

    lengths = [length for length in range(1, len(task.network) + 1) if task.costs[length - 1] <= task.budget]
    return max((of(length) for length in lengths), key=task.accuracy)
