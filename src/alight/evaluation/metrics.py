"""How good decisions are, with intervals, which classes lose by leaving early, and the best that is possible."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from alight.costs import Costs, as_costs
from alight.errors import BadInput, BudgetTooSmall, Mismatch
from alight.outputs import Decisions, HeadOutputs

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class Interval(NamedTuple):
    """Where a figure lies when the test samples are drawn again."""

    low: float
    high: float


class Bootstrap(NamedTuple):
    """Intervals of accuracy and mean cost."""

    accuracy: Interval
    mean_cost: Interval


class Classes(NamedTuple):
    """One row per class: what it loses by leaving early."""

    classes: Integers  # (classes,)
    samples: Integers  # (classes,)
    accuracy: Floats  # (classes,), of the decisions
    full_accuracy: Floats  # (classes,), of the last exit
    mean_cost: Floats  # (classes,)
    exit_shares: Floats  # (classes, exits)

    @property
    def gain(self) -> Floats:
        """Accuracy won (or, negative, lost) by leaving early."""
        return self.accuracy - self.full_accuracy


def bootstrap(
    decisions: Decisions,
    labels: npt.ArrayLike,
    rng: np.random.Generator,
    *,
    confidence: float = 0.95,
    draws: int = 1000,
) -> Bootstrap:
    """Return percentile intervals over test samples drawn again with replacement.

    A sample matters only by its cost and whether it is right, so the draws are of how many samples of each such
    kind there are: one multinomial instead of a table of samples.
    """
    if not 0 < confidence < 1:
        raise BadInput(f"confidence {confidence:g} must lie inside (0, 1): 0.95 is usual")
    if draws < 1:
        raise BadInput(f"{draws} draws give no interval: 1,000 are usual")
    labels = np.asarray(labels)
    if labels.shape != decisions.predictions.shape:
        raise BadInput(f"labels have shape {labels.shape} for {len(decisions)} decisions: give one each")
    right = decisions.predictions == labels
    kinds, counts = np.unique(np.stack([right, decisions.spent]), axis=1, return_counts=True)
    drawn = rng.multinomial(len(decisions), counts / counts.sum(), size=draws) / len(decisions)  # (draws, kinds)
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    low, high = np.quantile(drawn @ kinds.T, tails, axis=0)
    return Bootstrap(Interval(float(low[0]), float(high[0])), Interval(float(low[1]), float(high[1])))


def per_class(decisions: Decisions, outputs: HeadOutputs) -> Classes:
    """Return accuracy, cost and exits of each class, beside the last exit's accuracy on it.

    >>> outputs = HeadOutputs(scores=[[1, 1], [1, 1]], predictions=[[0, 0], [0, 1]], labels=[0, 1])
    >>> decisions = Decisions(predictions=[0, 0], exits=[0, 0], spent=[1, 1], num_exits=2)
    >>> per_class(decisions, outputs).gain
    array([ 0., -1.])
    """
    labels = outputs.known_labels("accuracy per class")
    if len(decisions) != len(outputs):
        raise Mismatch(
            f"{len(decisions)} decisions about a table of {len(outputs)} samples: give the table they are about"
        )
    classes, members, samples = np.unique(labels, return_inverse=True, return_counts=True)

    def mean(values: npt.ArrayLike) -> Floats:
        return np.bincount(members, weights=np.asarray(values, dtype=np.float64)) / samples

    return Classes(
        classes=classes,
        samples=samples,
        accuracy=mean(decisions.predictions == labels),
        full_accuracy=mean(outputs.predictions[:, -1] == labels),
        mean_cost=mean(decisions.spent),
        exit_shares=np.stack([mean(decisions.exits == index) for index in range(decisions.num_exits)], axis=1),
    )


def oracle(costs: Costs | npt.ArrayLike, outputs: HeadOutputs) -> Decisions:
    """Let each sample leave at its cheapest correct exit; where none is correct, at the cheapest exit."""
    network = as_costs(costs)
    outputs.known_labels("the oracle")
    if outputs.num_exits != len(network):
        raise Mismatch(f"the table has {outputs.num_exits} exits, but there are {len(network)} costs: give one each")
    first = np.argmax(outputs.correct(), axis=1)  # 0 where no exit is correct
    return _decided(network.cumulative(), outputs, first)


def oracle_within(costs: Costs | npt.ArrayLike, budget: float | str, outputs: HeadOutputs) -> Decisions:
    """Return the oracle under a budget: samples go on to their cheapest correct exit, the cheapest to help first.

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
