"""EERO: exponential weights turned into thresholds; with survivors, as the paper has it, and for two exits."""

import numpy as np

from alight.budgeting.bounds import Plan
from alight.budgeting.rates import Prior, budget_multiplier, exponential_weights, two_exit_rates
from alight.calibrate.task import AnyCosts, AnySlack, Budget, Floats, Settings, Task
from alight.errors import BadInput, BudgetTooSmall
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy, Threshold


def eero(
    costs: AnyCosts,
    budget: Budget,
    labelled: HeadOutputs,
    unlabelled: HeadOutputs | None = None,
    *,
    temperature: float = 0.04,
    prior: Prior = "inverse_cost",
    spend_all: bool = False,
    slack: AnySlack = None,
    delta: float = 0.05,
) -> Threshold:
    """Exponential weights, met by thresholds on the samples still waiting at each exit.

    `slack="exact"` keeps the budget with probability 1 - delta over the calibration data; `spend_all` spends the
    budget even where a cheaper plan has less risk.
    """
    task = Task.of("eero", costs, budget, labelled, unlabelled)
    plan, settings = _exponential(task, temperature, prior, spend_all)
    return task.survivor_policy(plan, slack=slack, delta=delta, settings=settings)


def eero_marginal(
    costs: AnyCosts,
    budget: Budget,
    labelled: HeadOutputs,
    unlabelled: HeadOutputs | None = None,
    *,
    temperature: float = 0.04,
    prior: Prior = "inverse_cost",
    spend_all: bool = False,
    slack: AnySlack = "paper",
    delta: float = 0.05,
) -> Threshold:
    """Exponential weights, met by thresholds on all samples at each exit: the paper to the letter (C = eps)."""
    task = Task.of("eero_marginal", costs, budget, labelled, unlabelled)
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
    """One early exit and the last, the others closed (Prop. C.1); `early=None` takes the best on the labelled data."""
    task = Task.of("two_exits", costs, budget, labelled, unlabelled, closes_exits=True)
    last = len(task.network) - 1
    if early is not None and not 0 <= early < max(last, 1):
        raise BadInput(f"early exit {early} of a network with exits 0 to {last}: choose one before the last")
    candidates = [early] if early is not None else list(range(last))
    policies = [_pair(task, index, slack, delta) for index in candidates if _affordable(task, index)]
    if not candidates:  # a network with one exit is the plain network
        return task.survivor_policy(lambda _: np.ones(1))
    if not policies:
        raise BudgetTooSmall(task.budget, float(task.network.cumulative([candidates[0]])[0]), task.network.unit)
    return max(policies, key=task.accuracy)


def _exponential(task: Task, temperature: float, prior: Prior, spend_all: bool) -> tuple[Plan, Settings]:
    """Exponential weights as a function of the budget, and what to write down of them."""
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
