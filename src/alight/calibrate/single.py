"""The plain answer: everyone leaves at one exit."""

import numpy as np

from alight.calibrate.problem import AnyCosts, Budget, Task
from alight.outputs import HeadOutputs
from alight.policies.policy import ExitAt


def best_single_exit(
    costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None
) -> ExitAt:
    """Everyone leaves at the most accurate exit that the budget allows.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> decisions = replay(best_single_exit(costs, "50%", labelled), test)
    >>> f"{decisions.accuracy(test.labels):.1%} right for {decisions.mean_cost / costs.full:.1%} of the cost"
    '24.3% right for 38.1% of the cost'
    """
    task = Task.of("best_single_exit", costs, budget, labelled, unlabelled, closes_exits=True)
    alone = np.array([task.network.cumulative([index])[0] for index in range(len(task.network))])
    risks = np.where(alone <= task.budget, labelled.risks(), np.inf)
    return ExitAt(**task.terms(open_exits=[int(np.argmin(risks))], exit_rates=np.ones(1)))
