"""Methods that plan exit rates and meet them by thresholds: EERO, two exits, fixed shapes, and one exit for all."""

from operator import index
from typing import Literal

import numpy as np

from alight.budgeting.bounds import Plan
from alight.budgeting.rates import (
    Prior,
    budget_multiplier,
    exponential_weights,
    gaussian_rates,
    geometric_rates,
    two_exit_rates,
)
from alight.calibrate.problem import AnyCosts, AnySlack, Budget, Floats, Problem, Settings
from alight.errors import BadInput, BudgetTooSmall
from alight.outputs import HeadOutputs
from alight.policies.policy import ExitAt, Policy, Threshold


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
    """Plan exit rates by exponential weights, met by thresholds on the samples still waiting at each exit.

    `slack="exact"` keeps the budget with probability 1 - delta over the calibration data, exactly so when `unlabelled`
    samples set the thresholds; `spend_all` spends the budget even where a cheaper plan has less risk.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> decisions = replay(eero(costs, "50%", labelled), test)
    >>> f"{decisions.accuracy(test.labels):.1%} accuracy at {decisions.mean_cost / costs.full:.1%} of the cost"
    '43.1% accuracy at 49.3% of the cost'
    """
    problem = Problem.of("eero", costs, budget, labelled, unlabelled)
    plan, settings = _exponential(problem, temperature, prior, spend_all)
    return problem.survivor_policy(plan, slack=slack, delta=delta, settings=settings)


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
    """Plan exit rates by exponential weights, met by thresholds on all samples at each exit: the paper (C = eps).

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> decisions = replay(eero_marginal(costs, "50%", labelled), test)
    >>> f"{decisions.accuracy(test.labels):.1%} accuracy at {decisions.mean_cost / costs.full:.1%} of the cost"
    '29.2% accuracy at 35.5% of the cost'
    """
    problem = Problem.of("eero_marginal", costs, budget, labelled, unlabelled)
    plan, settings = _exponential(problem, temperature, prior, spend_all)
    return problem.marginal_policy(plan, slack=slack, delta=delta, settings=settings)


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
    """Open one early exit and the last (Prop. C.1); `early=None` takes the best on the labelled data.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> decisions = replay(two_exits(costs, "50%", labelled), test)
    >>> f"{decisions.accuracy(test.labels):.1%} accuracy at {decisions.mean_cost / costs.full:.1%} of the cost"
    '39.6% accuracy at 49.9% of the cost'
    """
    problem = Problem.of("two_exits", costs, budget, labelled, unlabelled, closes_exits=True)
    last = len(problem.network) - 1
    early = early if early is None else index(early)
    if early is not None and not 0 <= early < last:
        raise BadInput(f"early exit {early} of a network with exits 0 to {last}: choose one before the last")
    candidates = [early] if early is not None else list(range(last))
    policies = [_pair(problem, each, slack, delta) for each in candidates if _affordable(problem, each)]
    if not candidates:  # a network with one exit is the full network
        return problem.survivor_policy(lambda _: np.ones(1))
    if not policies:
        raise BudgetTooSmall(
            problem.budget, float(problem.network.cumulative([candidates[0]])[0]), problem.network.unit
        )
    return max(policies, key=problem.accuracy)


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
    >>> f"{decisions.accuracy(test.labels):.1%} accuracy at {decisions.mean_cost / costs.full:.1%} of the cost"
    '41.7% accuracy at 49.7% of the cost'
    """
    problem = Problem.of("geometric", costs, budget, labelled, unlabelled)
    return problem.survivor_policy(lambda budget: geometric_rates(problem.costs, budget), slack=slack, delta=delta)


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
    >>> f"{decisions.accuracy(test.labels):.1%} accuracy at {decisions.mean_cost / costs.full:.1%} of the cost"
    '37.2% accuracy at 49.8% of the cost'
    """
    problem = Problem.of("gaussian", costs, budget, labelled, unlabelled)
    return problem.survivor_policy(
        lambda budget: gaussian_rates(problem.costs, budget, width=width, axis=axis), slack=slack, delta=delta
    )


def best_single_exit(
    costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None
) -> ExitAt:
    """Let every sample leave at the most accurate exit that the budget allows.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> decisions = replay(best_single_exit(costs, "50%", labelled), test)
    >>> f"{decisions.accuracy(test.labels):.1%} accuracy at {decisions.mean_cost / costs.full:.1%} of the cost"
    '24.3% accuracy at 38.1% of the cost'
    """
    problem = Problem.of("best_single_exit", costs, budget, labelled, unlabelled, closes_exits=True)
    alone = np.array([problem.network.cumulative([index])[0] for index in range(len(problem.network))])
    risks = np.where(alone <= problem.budget, labelled.risks(), np.inf)
    return ExitAt(**problem.terms(open_exits=[int(np.argmin(risks))], exit_rates=np.ones(1)))


def _exponential(problem: Problem, temperature: float, prior: Prior, spend_all: bool) -> tuple[Plan, Settings]:
    """Return exponential weights as a function of the budget, and the settings to record."""
    if not isinstance(spend_all, bool | np.bool_):
        raise BadInput(f"spend_all {spend_all!r} must be True or False")
    risks, costs = problem.labelled.risks(), problem.costs

    def plan(budget: float) -> Floats:
        return exponential_weights(risks, costs, budget, temperature=temperature, prior=prior, spend_all=spend_all)

    multiplier = budget_multiplier(
        risks, costs, problem.budget, temperature=temperature, prior=prior, spend_all=spend_all
    )
    settings: Settings = {
        "temperature": temperature,
        "multiplier": multiplier if np.isfinite(multiplier) else "infinite",
        "prior": prior if isinstance(prior, str) else "given",
        "spend_all": str(spend_all).lower(),
    }
    return plan, settings


def _affordable(problem: Problem, early: int) -> bool:
    return bool(problem.network.cumulative([early])[0] <= problem.budget)


def _pair(problem: Problem, early: int, slack: AnySlack, delta: float) -> Threshold:
    opened = (early, len(problem.network) - 1)
    costs = problem.network.cumulative(opened)
    return problem.survivor_policy(
        lambda budget: two_exit_rates(costs, budget),
        slack=slack,
        delta=delta,
        open_exits=opened,
        settings={"early": early},
    )
