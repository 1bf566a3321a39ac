"""Optimal stopping: leave where being right now is worth more than going on, at one price for cost."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from alight.budgeting.rates import Floats, Integers
from alight.calibrate.crossval import Ranked, ranked_halves, shared_by_budgets
from alight.calibrate.problem import AnyCosts, Budget, Problem
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy, Threshold

ROUNDS = 4  # pairs of halves whose plans are averaged
PRICES = 32  # tried, where the plans of neighbours differ most in cost
PASSES = 3  # backward inductions at one price, each on the samples that wait under the one before
LOWEST_PRICE = 1e-4  # accuracy per cost of the last exit: next to nothing


class _PricedPlan(NamedTuple):
    """The exit rates of one price, the mean over several halves, their cost and accuracy."""

    price: float
    rates: Floats  # (exits,)
    cost: float
    accuracy: float  # on all labelled data


def optimal_stopping(
    costs: AnyCosts,
    budget: Budget,
    labelled: HeadOutputs,
    unlabelled: HeadOutputs | None = None,
    *,
    rounds: int = ROUNDS,
    prices: int = PRICES,
) -> Policy:
    """Leave where the probability of being right beats the value of going on, at the price that spends the budget.

        maximise    P(right at the exit taken) - price * cost of the exit taken

    From the last exit back, the advantage of leaving (right here, less what going on would bring) is made isotonic in
    the score, so that samples above one threshold leave. This is done on several halves of the labelled data and the
    exit rates are averaged: one half's thresholds follow its noise, the average less. A budget between two neighbouring
    prices mixes their rates; but where accuracy over cost is not concave, beyond sampling error, the policies of the
    two prices at the ends of the gap are mixed, sample by sample.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> replay(optimal_stopping(costs, "50%", labelled), test).accuracy(test.labels)
    0.4361
    """
    problem = Problem.of("optimal_stopping", costs, budget, labelled, unlabelled)

    def at(plan: _PricedPlan) -> Threshold:
        return problem.survivor_policy(lambda _: plan.rates, settings={"price": plan.price})

    plans = _plans(labelled, tuple(problem.costs.tolist()), rounds, prices)
    exact, hull = _spending(problem, plans), _concave(plans)
    below = [plan for plan in hull if plan.cost <= problem.budget]
    if len(below) == len(hull):  # no more budget is of use
        return at(hull[-1])
    cheaper, costlier = below[-1], hull[len(below)]
    bridge = cheaper.accuracy + _slope(cheaper, costlier) * (exact.cost - cheaper.cost)
    error = 0.5 / np.sqrt(len(labelled))  # the largest standard error of an accuracy
    return problem.mixture(at(cheaper), at(costlier)) if bridge - exact.accuracy > error else at(exact)


def rates_at_price(ranked: Ranked, costs: Floats, price: float) -> Floats:
    """Return the shares that leave at each exit when cost has this price: backward induction on the waiting samples.

    The isotonic fit of advantages in the order of the scores is below 0 before, and above 0 after, the minimum of
    their running sum: no fit is needed to find its sign.
    """
    worth = ranked.correct - price * costs[:, None]  # (exits, samples)
    last = len(costs) - 1
    waiting = np.ones(worth.shape, dtype=bool)
    leaving = np.ones(worth.shape, dtype=bool)
    for _ in range(PASSES):
        going_on = worth[last]
        for exit_index in reversed(range(last)):
            advantage, here = worth[exit_index] - going_on, waiting[exit_index]
            if here.any():  # samples that left before do not count, unless all did
                advantage = np.where(here, advantage, 0.0)
            leaving[exit_index] = _upper(advantage, ranked.order[exit_index])
            going_on = np.where(leaving[exit_index], worth[exit_index], going_on)
        waiting[1:] = np.logical_and.accumulate(~leaving[:last], axis=0)
    return (waiting & leaving).mean(axis=1)


def _upper(advantage: Floats, order: Integers) -> npt.NDArray[np.bool_]:
    """Return which samples leave: from the one on where the sum of all advantages above is largest."""
    below = np.concatenate([[0.0], np.cumsum(advantage[order])])
    leaving = np.ones(len(order), dtype=bool)
    leaving[order[: int(np.argmin(below))]] = False
    return leaving


@shared_by_budgets
def _plans(labelled: HeadOutputs, costs: tuple[float, ...], rounds: int, prices: int) -> list[_PricedPlan]:
    """Return plans from the highest price, at which all samples leave at once, to the lowest, cheapest plan first."""
    absolute = np.array(costs)
    everyone, relative = Ranked(labelled), absolute / absolute[-1]
    parts = [half.ranked for half in ranked_halves(labelled, rounds)]

    def of(price: float, rates: Floats) -> _PricedPlan:
        return _PricedPlan(price, rates, float(rates @ absolute), everyone.accuracy(rates))

    def at(price: float) -> _PricedPlan:
        return of(price, np.mean([rates_at_price(part, relative, price) for part in parts], axis=0))

    if len(costs) == 1:
        return [of(LOWEST_PRICE, np.ones(1))]
    plans = [of(highest_price(relative), np.eye(len(costs))[0]), at(LOWEST_PRICE)]
    while len(plans) < prices:
        widest = int(np.argmax([after.cost - before.cost for before, after in pairwise(plans)]))
        plans.insert(widest + 1, at(float(np.sqrt(plans[widest].price) * np.sqrt(plans[widest + 1].price))))
    return plans


def _spending(problem: Problem, plans: list[_PricedPlan]) -> _PricedPlan:
    """Return the most expensive plan within the budget, its rates mixed with those of the next, to spend it all."""
    index = max(index for index, plan in enumerate(plans) if plan.cost <= problem.budget)
    if index == len(plans) - 1:
        return plans[index]
    cheaper, costlier = plans[index], plans[index + 1]
    share = (problem.budget - cheaper.cost) / (costlier.cost - cheaper.cost)
    rates = cut_to(cheaper.rates + share * (costlier.rates - cheaper.rates), problem.costs, problem.budget)
    return _PricedPlan(cheaper.price, rates, float(rates @ problem.costs), Ranked(problem.labelled).accuracy(rates))


def highest_price(costs: Floats) -> float:
    """Return a price at which no gain in accuracy is worth a step; costs are relative to the last."""
    return 2 / float(np.diff(costs).min())


def cut_to(rates: Floats, costs: Floats, budget: float) -> Floats:
    """Return rates that cost at most the budget: where it is too much by a rounding, a few samples leave at once."""
    first, share = np.eye(len(rates))[0], 1e-15
    within = rates
    while within @ costs > budget:
        within, share = rates + share * (first - rates), min(2 * share, 1.0)
    return within


def _concave(plans: list[_PricedPlan]) -> list[_PricedPlan]:
    """Return the plans on the concave hull of accuracy over cost, from the cheapest to the most accurate."""
    hull: list[_PricedPlan] = []
    for plan in sorted(plans, key=lambda plan: (plan.cost, -plan.accuracy)):
        if hull and plan.accuracy <= hull[-1].accuracy:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], plan):
            hull.pop()
        hull.append(plan)
    return hull


def _slope(cheaper: _PricedPlan, costlier: _PricedPlan) -> float:
    return (costlier.accuracy - cheaper.accuracy) / (costlier.cost - cheaper.cost)
