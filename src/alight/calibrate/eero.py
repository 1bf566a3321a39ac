"""EERO: exponential weights turned into thresholds; with survivors, as the paper has it, and for two exits."""

from operator import index

import numpy as np

from alight.budgeting.bounds import Plan
from alight.budgeting.rates import Prior, budget_multiplier, exponential_weights, two_exit_rates
from alight.calibrate.problem import (
    AnyCosts,
    AnySlack,
    AnyTable,
    Budget,
    Floats,
    PlannedTask,
    Settings,
    Task,
)
from alight.errors import BadInput, BudgetTooSmall
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy, Threshold


def eero(
    costs: AnyCosts,
    budget: Budget,
    labelled: AnyTable,
    unlabelled: AnyTable | None = None,
    *,
    temperature: float = 0.04,
    prior: Prior = "inverse_cost",
    spend_all: bool = False,
    slack: AnySlack = None,
    delta: float = 0.05,
) -> Threshold:
    """Exponential weights, met by thresholds on the samples still waiting at each exit.

    `slack="exact"` keeps the budget with probability 1 - delta over the calibration data, exactly so when `unlabelled`
    samples set the thresholds; `spend_all` spends the budget even where a cheaper plan has less risk. Tables may be
    `PartitionedOutputs`, of any size: the policy is the same.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> decisions = replay(eero(costs, "50%", labelled), test)
    >>> f"{decisions.accuracy(test.labels):.1%} right for {decisions.mean_cost / costs.full:.1%} of the cost"
    '43.1% right for 49.3% of the cost'
    """
    task = PlannedTask.of("eero", costs, budget, labelled, unlabelled)
    plan, settings = _exponential(task, temperature, prior, spend_all)
    return task.survivor_policy(plan, slack=slack, delta=delta, settings=settings)


def eero_marginal(
    costs: AnyCosts,
    budget: Budget,
    labelled: AnyTable,
    unlabelled: AnyTable | None = None,
    *,
    temperature: float = 0.04,
    prior: Prior = "inverse_cost",
    spend_all: bool = False,
    slack: AnySlack = "paper",
    delta: float = 0.05,
) -> Threshold:
    """Exponential weights, met by thresholds on all samples at each exit: the paper to the letter (C = eps).

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> decisions = replay(eero_marginal(costs, "50%", labelled), test)
    >>> f"{decisions.accuracy(test.labels):.1%} right for {decisions.mean_cost / costs.full:.1%} of the cost"
    '29.2% right for 35.5% of the cost'
    """
    task = PlannedTask.of("eero_marginal", costs, budget, labelled, unlabelled)
    plan, settings = _exponential(task, temperature, prior, spend_all)
    return task.marginal_policy(plan, slack=slack, delta=delta, settings=settings)


def two_exits(
    costs: AnyCosts,
    budget: Budget,
    labelled: HeadOutputs,
    unlabelled: HeadOutputs | None = None,
    *,
    early: int | None = None,
    slack: AnySlack = None,
    delta: float = 0.05,
) -> Policy:
    """One early exit and the last, the others closed (Prop. C.1); `early=None` takes the best on the labelled data.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> decisions = replay(two_exits(costs, "50%", labelled), test)
    >>> f"{decisions.accuracy(test.labels):.1%} right for {decisions.mean_cost / costs.full:.1%} of the cost"
    '39.6% right for 49.9% of the cost'
    """
    task = Task.of("two_exits", costs, budget, labelled, unlabelled, closes_exits=True)
    last = len(task.network) - 1
    early = early if early is None else index(early)
    if early is not None and not 0 <= early < last:
        raise BadInput(f"early exit {early} of a network with exits 0 to {last}: choose one before the last")
    candidates = [early] if early is not None else list(range(last))
    policies = [_pair(task, each, slack, delta) for each in candidates if _affordable(task, each)]
    if not candidates:  # a network with one exit is the plain network
        return task.survivor_policy(lambda _: np.ones(1))
    if not policies:
        raise BudgetTooSmall(task.budget, float(task.network.cumulative([candidates[0]])[0]), task.network.unit)
    return max(policies, key=task.accuracy)


def _exponential(task: PlannedTask, temperature: float, prior: Prior, spend_all: bool) -> tuple[Plan, Settings]:
    """Exponential weights as a function of the budget, and what to write down of them."""
    if not isinstance(spend_all, bool | np.bool_):
        raise BadInput(f"spend_all {spend_all!r} must be True or False")
    risks, costs = task.labelled.risks(), task.costs

    def plan(budget: float) -> Floats:
        return exponential_weights(risks, costs, budget, temperature=temperature, prior=prior, spend_all=spend_all)

    multiplier = budget_multiplier(risks, costs, task.budget, temperature=temperature, prior=prior, spend_all=spend_all)
    settings: Settings = {
        "temperature": temperature,
        "multiplier": multiplier if np.isfinite(multiplier) else "infinite",
        "prior": prior if isinstance(prior, str) else "given",
        "spend_all": str(spend_all).lower(),
    }
    return plan, settings


def _affordable(task: Task, early: int) -> bool:
    return bool(task.network.cumulative([early])[0] <= task.budget)


def _pair(task: Task, early: int, slack: AnySlack, delta: float) -> Threshold:
    opened = (early, len(task.network) - 1)
    costs = task.network.cumulative(opened)
    return task.survivor_policy(
        lambda budget: two_exit_rates(costs, budget),
        slack=slack,
        delta=delta,
        open_exits=opened,
        settings={"early": early},
    )
