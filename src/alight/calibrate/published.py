"""The published methods (METHODS, sections 1 and 2), each solved for the budget.

EERO, two exits and rates of a fixed shape plan the share of each exit and meet it by thresholds. The others have one
level for all exits, the highest that the budget allows: a score, an accuracy, or a number of exits that agree; where
levels are coarse, the policies of two neighbours are mixed, so that the budget is used.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from typing import Any, Literal

import numpy as np

from alight.budgeting.bounds import Plan, largest
from alight.budgeting.rates import (
    Floats,
    Prior,
    budget_multiplier,
    exponential_weights,
    gaussian_rates,
    geometric_rates,
    two_exit_rates,
)
from alight.calibrate.problem import AnyCosts, AnySlack, Budget, Problem, Settings
from alight.errors import BadInput, BudgetTooSmall
from alight.outputs import HeadOutputs
from alight.policies.policy import ExitAt, Patience, Policy, Streak, Threshold


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
    >>> replay(two_exits(costs, "50%", labelled), test).accuracy(test.labels)
    0.3964
    """
    problem = Problem.of("two_exits", costs, budget, labelled, unlabelled, closes_exits=True)
    last = len(problem.network) - 1
    early = early if early is None else index(early)
    if early is not None and not 0 <= early < last:
        raise BadInput(f"early exit {early} of a network with exits 0 to {last}: choose one before the last")
    if not last:  # a network with one exit is the full network
        return problem.survivor_policy(lambda _: np.ones(1))

    def pair(early: int) -> Threshold:
        opened, settings = (early, last), Settings(early=early)
        plan = partial(two_exit_rates, problem.network.cumulative(opened))
        return problem.survivor_policy(plan, slack=slack, delta=delta, open_exits=opened, settings=settings)

    candidates, alone = range(last) if early is None else [early], problem.network.alone
    policies = [pair(each) for each in candidates if alone[each] <= problem.budget]
    if not policies:
        raise BudgetTooSmall(problem.budget, float(alone[candidates[0]]), problem.network.unit)
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
    """Rates that grow or fall by one factor from exit to exit (MSDNet, Huang et al. 2018), met by survivor thresholds.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> replay(geometric(costs, "50%", labelled), test).accuracy(test.labels)
    0.4169
    """
    problem = Problem.of("geometric", costs, budget, labelled, unlabelled)
    return problem.survivor_policy(partial(geometric_rates, problem.costs), slack=slack, delta=delta)


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
    """Rates of a bell shape around one exit (Predictive Exit, Li et al. 2022), met by survivor thresholds.

    The paper also predicts the exit before the first head, which recorded outputs do not allow.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> replay(gaussian(costs, "50%", labelled), test).accuracy(test.labels)
    0.3719
    """
    problem = Problem.of("gaussian", costs, budget, labelled, unlabelled)
    plan = partial(gaussian_rates, problem.costs, width=width, axis=axis)
    return problem.survivor_policy(plan, slack=slack, delta=delta)


def best_single_exit(
    costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None
) -> ExitAt:
    """Let every sample leave at the most accurate exit that the budget allows.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> replay(best_single_exit(costs, "50%", labelled), test).accuracy(test.labels)
    0.2429
    """
    problem = Problem.of("best_single_exit", costs, budget, labelled, unlabelled, closes_exits=True)
    risks = np.where(problem.network.alone <= problem.budget, labelled.risks(), np.inf)
    return ExitAt(**problem.terms(open_exits=[int(np.argmin(risks))], exit_rates=np.ones(1)))


def _exponential(problem: Problem, temperature: float, prior: Prior, spend_all: bool) -> tuple[Plan, Settings]:
    """Return exponential weights as a function of the budget, and the settings to record."""
    if not isinstance(spend_all, bool | np.bool_):
        raise BadInput(f"spend_all {spend_all!r} must be True or False")
    risks, costs = problem.labelled.risks(), problem.costs
    options: dict[str, Any] = {"temperature": temperature, "prior": prior, "spend_all": spend_all}
    multiplier = budget_multiplier(risks, costs, problem.budget, **options)
    settings: Settings = {
        "temperature": temperature,
        "multiplier": multiplier if np.isfinite(multiplier) else "infinite",
        "prior": prior if isinstance(prior, str) else "given",
        "spend_all": str(spend_all).lower(),
    }
    return partial(exponential_weights, risks, costs, **options), settings


def global_threshold(
    costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None
) -> Threshold:
    """Use one threshold for all exits, the highest that the budget allows (Shallow-Deep Networks, Kaya et al. 2019).

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> replay(global_threshold(costs, "50%", labelled), test).accuracy(test.labels)
    0.4089
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
    >>> replay(performance_control(costs, "50%", labelled), test).accuracy(test.labels)
    0.3874
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
        settings: Settings = {"accuracy": accuracy if accuracy <= 1 else "out of reach"}
        thresholds = tuple(_first_reaching(*each, accuracy) for each in maps)
        return Threshold(thresholds=thresholds, **problem.terms(settings=settings))

    asked = [0.0, *np.unique(np.concatenate([[2.0], *(accuracies for _, accuracies in maps)]))]  # 2: never reached
    highest = highest_affordable(problem, asked, at)
    return problem.mixture(*(at(accuracy) for accuracy in asked[highest : highest + 2]))


def patience(costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None) -> Policy:
    """Use the longest patience that the budget allows (PABEE, Zhou et al. 2020), mixed with the next longer one.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> replay(patience(costs, "50%", labelled), test).accuracy(test.labels)
    0.3401
    """
    problem = Problem.of("patience", costs, budget, labelled, unlabelled)

    def at(length: float) -> Patience:
        return Patience(int(length), **problem.terms(settings={"patience": length}))

    lengths = range(len(problem.network))
    longest = highest_affordable(problem, lengths, at)
    return problem.mixture(*(at(length) for length in lengths[longest : longest + 2]))


def pcee(costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None) -> Streak:
    """Leave after confident exits in a row, at the highest affordable threshold; the labelled data choose how many.

    The score of PCEE-BERT (Zhang et al. 2022) is the negative entropy; any table's score is taken.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> replay(pcee(costs, "50%", labelled), test).accuracy(test.labels)
    0.4089
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


def _first_reaching(scores: Floats, accuracies: Floats, accuracy: float) -> float:
    """Return the threshold above which the isotonic map reaches an accuracy, midway to the score below."""
    index = int(np.searchsorted(accuracies, accuracy))
    if index in (0, len(scores)):
        return np.inf if index else -np.inf
    return float(scores[index - 1] + (scores[index] - scores[index - 1]) / 2)
