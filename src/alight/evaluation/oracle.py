"""The best that any policy could do, knowing the labels."""

import numpy as np
import numpy.typing as npt

from alight.costs import Costs, as_costs
from alight.errors import BudgetTooSmall, Mismatch
from alight.evaluation.metrics import Floats
from alight.outputs import Decisions, HeadOutputs


def oracle(costs: Costs | npt.ArrayLike, outputs: HeadOutputs) -> Decisions:
    """Each sample leaves at its cheapest correct exit; where none is correct, at the cheapest exit."""
    network = as_costs(costs)
    outputs.known_labels("the oracle")
    if outputs.num_exits != len(network):
        raise Mismatch(f"the table has {outputs.num_exits} exits, but there are {len(network)} costs: give one each")
    first = np.argmax(outputs.correct(), axis=1)  # 0 where no exit is correct
    return _decided(network.cumulative(), outputs, first)


def oracle_within(costs: Costs | npt.ArrayLike, budget: float | str, outputs: HeadOutputs) -> Decisions:
    """The oracle under a budget: samples go on to their cheapest correct exit, the cheapest to help first.

    Every such step gains one correct answer, so the best gain per cost is the smallest extra cost, and releasing
    them in that order is optimal.
    """
    network = as_costs(costs)
    cumulative, amount = network.cumulative(), network.budget(budget)
    if amount < cumulative[0]:
        raise BudgetTooSmall(amount, float(cumulative[0]), network.unit)
    free = oracle(costs, outputs)
    extra = free.spent - cumulative[0]
    order = np.argsort(extra, kind="stable")
    affordable = np.cumsum(extra[order]) <= (amount - cumulative[0]) * len(outputs)
    released = np.zeros(len(outputs), dtype=bool)
    released[order[affordable]] = True
    return _decided(cumulative, outputs, np.where(released, free.exits, 0))


def _decided(cumulative: Floats, outputs: HeadOutputs, exits: np.ndarray) -> Decisions:
    rows = np.arange(len(outputs))
    return Decisions(outputs.predictions[rows, exits], exits, cumulative[exits], num_exits=outputs.num_exits)
