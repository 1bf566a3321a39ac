"""Optimal stopping: leave where being right now is worth more than going on, at one price for cost."""

import numpy as np
import numpy.typing as npt

from alight.calibrate.ranked import Ranked, halves
from alight.calibrate.task import AnyCosts, Budget, Floats, Task
from alight.outputs import HeadOutputs
from alight.policies.policy import Threshold

ROUNDS = 4  # pairs of halves whose plans are averaged
PASSES = 3  # backward inductions at one price, each on those who wait under the one before
HALVINGS = 16  # of the price's logarithm: to a thousandth
CHEAPEST_PRICE = 1e-4  # points of accuracy per cost of the last exit: next to nothing


def optimal_stopping(
    costs: AnyCosts,
    budget: Budget,
    labelled: HeadOutputs,
    unlabelled: HeadOutputs | None = None,
    *,
    rounds: int = ROUNDS,
) -> Threshold:
    """Leave where the chance to be right beats the value of going on, at the price that spends the budget.

        maximise    P(right at the exit taken) - price * cost of the exit taken

    From the last exit back, the advantage of leaving (right here, less what going on would bring) is made
    isotonic in the score, so that those who leave are those above one threshold. A price has one plan; where
    the budget lies between two plans, their exit rates are mixed. This is done on several halves of the
    labelled data and the rates are averaged: one half's thresholds follow its noise, the average much less.
    """
    task = Task.of("optimal_stopping", costs, budget, labelled, unlabelled)
    plans = [_rates_within(task, labelled.take(half)) for half, _ in halves(len(labelled), rounds)]
    rates, prices = np.mean([plan for plan, _ in plans], axis=0), [price for _, price in plans]
    rates = _within(rates, task)
    return task.survivor_policy(lambda _: rates, settings={"price": float(np.mean(prices)), "halves": len(plans)})


def rates_at_price(ranked: Ranked, costs: Floats, price: float) -> Floats:
    """Shares that leave at each exit when cost has this price: backward induction on those who wait.

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
            if here.any():  # those who left before do not count; where all did, everyone does
                advantage = np.where(here, advantage, 0.0)
            leaving[exit_index] = _upper(advantage, ranked.order[exit_index])
            going_on = np.where(leaving[exit_index], worth[exit_index], going_on)
        waiting[1:] = np.logical_and.accumulate(~leaving[:last], axis=0)
    return (waiting & leaving).mean(axis=1)


def _upper(advantage: Floats, order: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Who leaves: from the sample on where the sum of all advantages above is largest."""
    below = np.concatenate([[0.0], np.cumsum(advantage[order])])
    leaving = np.ones(len(order), dtype=bool)
    leaving[order[: int(np.argmin(below))]] = False
    return leaving


def _rates_within(task: Task, half: HeadOutputs) -> tuple[Floats, float]:
    """The plan of the lowest price that keeps the budget, mixed with the next dearer plan, and that price."""
    ranked, costs, budget = Ranked(half), task.costs / task.costs[-1], task.budget / task.costs[-1]
    dear_price, dear = CHEAPEST_PRICE, rates_at_price(ranked, costs, CHEAPEST_PRICE)
    if dear @ costs <= budget:
        return dear, dear_price
    cheap_price = 2 / float(np.diff(costs).min())  # no gain in accuracy is worth a step: everyone leaves at once
    cheap = rates_at_price(ranked, costs, cheap_price)
    for _ in range(HALVINGS):
        price = float(np.sqrt(dear_price) * np.sqrt(cheap_price))
        rates = rates_at_price(ranked, costs, price)
        if rates @ costs <= budget:
            cheap_price, cheap = price, rates
        else:
            dear_price, dear = price, rates
    share = (budget - cheap @ costs) / ((dear - cheap) @ costs)
    return cheap + share * (dear - cheap), cheap_price


def _within(rates: Floats, task: Task) -> Floats:
    """The rates, a rounding cheaper where they cost a rounding too much."""
    first = np.eye(len(rates))[0]
    excess = 0.0
    while (mixed := rates + excess * (first - rates)) @ task.costs > task.budget:
        excess = 2 * excess or 1e-16
    return mixed
