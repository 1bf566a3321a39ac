"""Whole samples: how many of a batch leave at each exit, so that the batch keeps its budget whatever comes."""

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from alight.budgeting.rates import Floats, tilted_rates, two_exit_rates
from alight.errors import BudgetTooSmall

Integers = npt.NDArray[np.int64]
LEFT = 0.005  # of what is planned: where whole moves leave more, exchanges are tried


def quota_counts(exit_rates: Floats, costs: Floats, budget: float, total: int) -> Integers:
    """Return how many of `total` samples leave at each exit: nearest to the rates, at most `total * budget`.

    Largest remainder first; then samples move to cheaper exits while the batch costs too much, and to more
    expensive ones while it costs less than planned; where that leaves much, two samples move at a time. Exits of rate 0
    get no sample, but for the first when nothing else is affordable.

    >>> quota_counts(np.array([0.5, 0.3, 0.2]), np.array([1.0, 2.0, 4.0]), 1.9, 7)
    array([3, 3, 1])
    """
    if budget < costs[0]:
        raise BudgetTooSmall(budget, float(costs[0]))
    exit_rates = _affordable(exit_rates / exit_rates.sum(), costs, budget)
    allowed = total * budget
    counts = np.floor(total * exit_rates + 1e-9).astype(np.int64)
    remainders = np.where(exit_rates > 0, total * exit_rates - counts, -1.0)
    counts[np.argsort(-remainders, kind="stable")[: total - counts.sum()]] += 1
    spent = math.fsum(counts * costs)
    while not _within(counts, costs, total, budget) and (counts[1:] > 0).any():
        source, target = _cheapening(counts, costs, exit_rates, spent - allowed)
        counts[source], counts[target] = counts[source] - 1, counts[target] + 1
        spent = math.fsum(counts * costs)
    planned = min(allowed, total * float(exit_rates @ costs)) * (1 - 1e-12)  # filling up leaves room for rounding
    while (move := _upward_move(counts, costs, exit_rates, planned - spent)) is not None:
        counts = counts + move
        spent = math.fsum(counts * costs)
    while (
        planned - spent > LEFT * planned
        and (move := _finest_exchange(counts, costs, exit_rates, planned - spent)) is not None
    ):
        counts = counts + move
        spent = math.fsum(counts * costs)
    return counts


def _affordable(exit_rates: Floats, costs: Floats, budget: float) -> Floats:
    """Return the rates, tilted to the budget; the first exit helps where no planned one is cheap enough."""
    if exit_rates @ costs <= budget:
        return exit_rates
    first = int(np.flatnonzero(exit_rates)[0])
    if costs[first] <= budget:
        return tilted_rates(exit_rates, costs, budget)
    rates = np.zeros(len(costs))
    rates[[0, first]] = two_exit_rates(costs[[0, first]], budget)
    return rates


def _within(counts: Integers, costs: Floats, total: int, budget: float) -> bool:
    """Return whether a batch keeps its budget, decided exactly where floats are too near."""
    excess = math.fsum(counts * costs) / (total * budget) - 1
    if abs(excess) > 1e-12:
        return excess < 0
    exact = sum(int(count) * Fraction(float(cost)) for count, cost in zip(counts, costs, strict=True))
    return exact <= total * Fraction(float(budget))


def _cheapening(counts: Integers, costs: Floats, exit_rates: Floats, excess: float) -> tuple[int, int]:
    """Return the move of one sample to a cheaper planned exit, or the first, that saves just enough, or most."""
    targets = {0, *np.flatnonzero(exit_rates > 0).tolist()}
    moves = [(costs[i] - costs[j], i, j) for i in np.flatnonzero(counts) for j in targets if j < i]
    sufficient = [move for move in moves if move[0] >= excess]
    _, source, target = min(sufficient) if sufficient else max(moves)
    return int(source), int(target)


def _upward_move(counts: Integers, costs: Floats, exit_rates: Floats, slack: float) -> Integers | None:
    """Return the change of counts when a sample moves to a more expensive exit and uses most of what is left."""
    affordable = [move for move in _moves(counts, costs, exit_rates) if move[0] <= slack]
    return max(affordable, key=lambda move: move[:3])[3] if affordable else None


def _finest_exchange(counts: Integers, costs: Floats, exit_rates: Floats, slack: float) -> Integers | None:
    """Return the change of counts when one sample moves up and another down, using most of what is left."""
    best: tuple[float, Integers | None] = (slack / 1000, None)
    for more, _, _, up in _moves(counts, costs, exit_rates):
        for less, _, _, down in _moves(counts + up, costs, exit_rates, cheaper=True):
            if best[0] < more - less <= slack:
                best = (more - less, up + down)
    return best[1]


def _moves(
    counts: Integers, costs: Floats, exit_rates: Floats, *, cheaper: bool = False
) -> list[tuple[float, int, int, Integers]]:
    """Return moves of one sample to a costlier or cheaper planned exit: cost, source, target, change of counts."""
    moves = []
    for source in np.flatnonzero(counts):
        for target in np.flatnonzero(exit_rates > 0):
            if (target < source) if cheaper else (target > source):
                change = np.zeros(len(counts), dtype=np.int64)
                change[source], change[target] = -1, 1
                moves.append((abs(float(costs[target] - costs[source])), int(source), int(target), change))
    return moves
