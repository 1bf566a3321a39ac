"""Rates of a fixed shape, moved until they spend the budget: geometric (MSDNet) and Gaussian (Predictive Exit)."""

from typing import Literal

from alight.budgeting.rates import gaussian_rates, geometric_rates
from alight.calibrate.problem import AnyCosts, AnySlack, Budget, Task
from alight.outputs import HeadOutputs
from alight.policies.policy import Threshold


def geometric(
    costs: AnyCosts,
    budget: Budget,
    labelled: HeadOutputs,
    unlabelled: HeadOutputs | None = None,
    *,
    slack: AnySlack = None,
    delta: float = 0.05,
) -> Threshold:
    """Rates that grow or fall by one factor from exit to exit, met by survivor thresholds.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> decisions = replay(geometric(costs, "50%", labelled), test)
    >>> f"{decisions.accuracy(test.labels):.1%} right for {decisions.mean_cost / costs.full:.1%} of the cost"
    '41.7% right for 49.7% of the cost'
    """
    task = Task.of("geometric", costs, budget, labelled, unlabelled)
    return task.survivor_policy(lambda budget: geometric_rates(task.costs, budget), slack=slack, delta=delta)


def gaussian(
    costs: AnyCosts,
    budget: Budget,
    labelled: HeadOutputs,
    unlabelled: HeadOutputs | None = None,
    *,
    width: float | None = None,
    axis: Literal["index", "cost"] = "index",
    slack: AnySlack = None,
    delta: float = 0.05,
) -> Threshold:
    """Rates of a bell shape around one exit, met by survivor thresholds.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> decisions = replay(gaussian(costs, "50%", labelled), test)
    >>> f"{decisions.accuracy(test.labels):.1%} right for {decisions.mean_cost / costs.full:.1%} of the cost"
    '37.2% right for 49.8% of the cost'
    """
    task = Task.of("gaussian", costs, budget, labelled, unlabelled)
    return task.survivor_policy(
        lambda budget: gaussian_rates(task.costs, budget, width=width, axis=axis), slack=slack, delta=delta
    )
