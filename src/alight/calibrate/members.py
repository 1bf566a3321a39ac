"""Which networks of a cascade to call, and in which order."""

import copy
from collections.abc import Iterator
from itertools import combinations, permutations

import numpy as np

from alight.budgeting.rates import Floats, exponential_weights, geometric_rates
from alight.calibrate.crossval import Ranked, halves
from alight.calibrate.problem import AnyCosts, Budget, costs_in
from alight.costs import as_costs
from alight.errors import BadInput, BudgetTooSmall
from alight.outputs import HeadOutputs

ORDERED = 3  # networks of which all orders are tried; more are called from cheap to expensive
TEMPERATURES = (0.04, 0.3, 1.0)  # of the plans that are tried
TOLERATED = 0.25  # standard errors of an accuracy, within which few networks, called from cheap to expensive, are taken
ROUNDS = 2  # of halves of the table, each tried with the plans of the other
MOST = 10_000  # samples that are looked at: a standard error of at most half a point


def choose_members(costs: AnyCosts, budget: Budget, outputs: HeadOutputs) -> tuple[int, ...]:
    """Return the networks of a cascade that answer best within the budget, in the order in which to call them.

    All subsets are tried from cheap to expensive, and of up to three networks all orders: six candidates in a second or
    two. Each half of the table judges plans of exit rates that the other half made. `Cascade.take` makes the cascade of
    the choice, `Cascade.take_outputs` its table, and `Costs.at_exits` its costs; calibrate these for the same amount,
    `costs.budget("30%")`, since percentages refer to the most expensive network that is left. Without labels, answers
    are right that the last network gives.

    >>> scores, labels = [[0.9, 0.1, 0.5]] * 8, [0, 1] * 4
    >>> table = HeadOutputs(scores, [[label, 1 - label, label] for label in labels], labels)
    >>> from alight import Costs
    >>> choose_members(Costs([0, 0, 0], [1, 2, 9]), 12.0, table)
    (0,)
    """
    network = as_costs(costs)
    if len({*network.members}) < len(network):
        raise BadInput("networks with exits of their own stay in one place: calibrate, which closes exits")
    amount, means = network.budget(budget), costs_in(outputs, network).alone
    if amount < means.min():
        raise BudgetTooSmall(amount, float(means.min()), network.unit, full=network.full)
    drawn = np.random.default_rng(0).permutation(len(outputs))[:MOST]
    table = outputs.take(np.sort(drawn))
    parts = [(table.take(one), Ranked(table.take(other))) for one, other in halves(len(table), ROUNDS)]
    found = {order: _accuracy(order, means, amount, parts) for order in _orders(means) if means[order[0]] <= amount}
    best = max(found.values())
    tolerated = best - TOLERATED * float(np.sqrt(best * (1 - best) / len(table)))
    usual = [(means[list(order)][1:] < means[list(order)][:-1]).any() for order in found]  # expensive before cheap
    return min(zip(usual, map(len, found), found, strict=True), key=lambda each: (found[each[2]] < tolerated, *each))[2]


def _orders(means: Floats) -> Iterator[tuple[int, ...]]:
    cheap_first = np.argsort(means, kind="stable").tolist()
    for size in range(1, len(means) + 1):
        for chosen in combinations(cheap_first, size):
            yield from permutations(chosen) if size <= ORDERED else [chosen]


def _accuracy(order: tuple[int, ...], means: Floats, amount: float, parts: list[tuple[HeadOutputs, Ranked]]) -> float:
    """Return the accuracy of the best plan that one half of a table makes on the other, on average."""
    chosen, found = [*order], []
    costs = np.cumsum(means[chosen])
    for fitted, judged in parts:
        risks = fitted.risks()[chosen]
        plans = [exponential_weights(risks, costs, amount, temperature=each, spend_all=True) for each in TEMPERATURES]
        ranked = copy.copy(judged)
        ranked.order, ranked.correct = [judged.order[index] for index in chosen], judged.correct[chosen]
        found.append([ranked.accuracy(rates) for rates in (*plans, geometric_rates(costs, amount))])
    return float(np.mean(found, axis=0).max())
