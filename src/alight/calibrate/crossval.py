"""Labelled tables in parts, each held out once, and sorted once, so that plans of exit rates are tried out fast."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial, wraps
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from alight.budgeting.rates import Floats, Integers
from alight.budgeting.thresholds import hash01, passing_counts
from alight.calibrate.problem import AnyCosts, Budget, Method, check_uncertified
from alight.costs import Costs, as_costs
from alight.errors import BudgetTooSmall
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy
from alight.policies.route import replay

Function = TypeVar("Function", bound=Callable[..., Any])  # of a table and more that can be hashed

FOLDS = 5  # of the labelled data, each held out once
REMEMBERED = 8  # results of a function: of a table and its folds, combined and not
MOST_KEPT = 10_000  # samples of a table whose results are remembered: some MB


@dataclass(frozen=True)
class _ByContent:
    """A table that equals others of the same content."""

    digest: bytes
    table: HeadOutputs = field(compare=False)


def shared_by_budgets(function: Function) -> Function:
    """Return the function of a table, which remembers its last results: what does not depend on a budget is done once.

    >>> from alight import recordings
    >>> ranked = shared_by_budgets(Ranked)
    >>> ranked(recordings.load().labelled) is ranked(recordings.load().labelled)
    True
    """

    @lru_cache(maxsize=REMEMBERED)
    def kept(of: _ByContent, *further: Any) -> Any:
        return function(of.table, *further)

    @wraps(function)
    def remembered(table: HeadOutputs, *further: Any) -> Any:
        if len(table) > MOST_KEPT:
            return function(table, *further)
        return kept(_ByContent(table.digest(), table), *further)

    return cast(Function, remembered)


class Ranked:
    """A table whose samples are ordered at every exit, least sure first; equal scores as survivor thresholds do."""

    def __init__(self, outputs: HeadOutputs):
        hashes = hash01(np.arange(len(outputs)))
        self.order = [np.lexsort((-hashes, column)) for column in outputs.scores.T]  # per exit, (samples,)
        self.correct = np.ascontiguousarray(outputs.correct().T)  # (exits, samples)
        self.risks = outputs.risks()  # (exits,)
        self._total: Any = (
            np.count_nonzero if self.correct.dtype == bool else np.sum
        )  # the first is several times faster

    def __len__(self) -> int:
        return self.correct.shape[1]

    def accuracy(self, exit_rates: Floats) -> float:
        """Return the accuracy that `replay` gives when survivor thresholds on this very table meet these rates."""
        waiting, right = np.ones(len(self), dtype=bool), 0.0
        for exit_index, count in enumerate(passing_counts(exit_rates, len(self)).tolist()):
            if exit_rates[exit_index] <= 0 and count:  # nobody leaves
                continue
            order = self.order[exit_index]
            leaving = order.compress(waiting.take(order))[max(count - 1, 0) :]
            right += float(self._total(self.correct[exit_index].take(leaving)))
            waiting[leaving] = False
            if count <= 1:  # nobody passes
                return right / len(self)
        return (right + float(self._total(self.correct[-1] * waiting))) / len(self)

    def reached(self, exit_rates: Floats) -> npt.NDArray[np.bool_]:
        """Return which samples, had they not left before, leave at each exit but the last, (exits - 1, samples)."""
        last = len(self.order) - 1
        waiting, reached = np.ones(len(self), dtype=bool), np.zeros((last, len(self)), dtype=bool)
        for exit_index, count in enumerate(passing_counts(exit_rates, len(self)).tolist()[:last]):
            order = self.order[exit_index]
            places = np.flatnonzero(waiting.take(order))[max(count - 1, 0) :]
            if len(places) and not (exit_rates[exit_index] <= 0 and count):
                reached[exit_index, order[places[0] :]] = True
                waiting &= ~reached[exit_index]
        return reached


def folds(num_samples: int, count: int, purpose: int = 0) -> list[Integers]:
    """Deal samples into folds of nearly equal size by the hash of their index: nothing random, no order.

    >>> [fold.tolist() for fold in folds(5, 2)]
    [[1, 3, 4], [0, 2]]
    """
    order = np.argsort(hash01(np.arange(num_samples), purpose=purpose))
    return [np.sort(fold) for fold in np.array_split(order, count)]


def halves(num_samples: int, rounds: int) -> list[tuple[Integers, Integers]]:
    """Return pairs of halves of the samples, each pair both ways round; all samples twice where there are few."""
    if num_samples < 4:  # halves of one sample say nothing
        return [(np.arange(num_samples), np.arange(num_samples))]
    pairs = [folds(num_samples, 2, purpose) for purpose in range(rounds)]
    return [pair for one, other in pairs for pair in ((one, other), (other, one))]


class Halves(NamedTuple):
    """One half of a table, and both halves ranked."""

    table: HeadOutputs
    ranked: Ranked
    other: Ranked


@shared_by_budgets
def ranked_halves(table: HeadOutputs, rounds: int) -> list[Halves]:
    """Return the pairs of halves of `halves`."""
    pairs = [(table.take(half), table.take(other)) for half, other in halves(len(table), rounds)]
    return [Halves(half, Ranked(half), Ranked(other)) for half, other in pairs]


def on_exits(method: Method, open_exits: Sequence[int]) -> Method:
    """Return the method for a network with these exits alone; its policies are for the whole network.

    A percentage is still a share of the whole network, and without labels the truth is still its last exit.

    >>> from alight import calibrate, recordings
    >>> labelled, test, costs = recordings.load()
    >>> on_exits(calibrate.eero, (3, 5, 7))(costs, "80%", labelled).open_exits
    (3, 5, 7)
    """

    def calibrated(
        costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None, **options: object
    ) -> Policy:
        network = as_costs(costs)
        judged = labelled if labelled.labels is not None else replace(labelled, labels=labelled.predictions[:, -1])
        tables = [None if table is None else table.at_exits(open_exits) for table in (judged, unlabelled)]
        policy = method(network.at_exits(open_exits), network.budget(budget), *tables, **options)
        names = labelled.exits or (unlabelled.exits if unlabelled else ())
        return policy.renumbered(open_exits, num_exits=len(network), exits=names, full_cost=network.full)

    return calibrated


def pruned(method: Method) -> Method:
    """Return the method with only those exits open that are worth their heads.

    Exits are closed one at a time, heads no longer paid, while the accuracy does not fall on held-out labelled data.

    >>> from alight import calibrate, recordings
    >>> labelled, test, costs = recordings.load()
    >>> pruned(calibrate.geometric)(costs, "50%", labelled).settings["pruned"]
    'exit 4'
    """

    def calibrated(
        costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None, **options: object
    ) -> Policy:
        kept = kept_exits(partial(method, **options), costs, budget, labelled)
        policy = on_exits(method, kept)(costs, budget, labelled, unlabelled, **options)
        check_uncertified(policy, "pruned")
        closed = [name for index, name in enumerate(labelled.exit_names) if index not in kept]
        return replace(policy, settings={**policy.settings, "pruned": ", ".join(closed) or "none"})

    return calibrated


def kept_exits(method: Method, costs: AnyCosts, budget: Budget, labelled: HeadOutputs) -> tuple[int, ...]:
    """Return the exits left open when they are closed one at a time while the routed accuracy does not fall.

    Accuracy is counted on held-out folds, as by `held_out`. Each time the exit goes whose closing is best.
    """
    network = as_costs(costs)
    amount = network.budget(budget)

    def accuracy(opened: tuple[int, ...]) -> float:
        try:
            return float(held_out(on_exits(method, opened), network, amount, labelled, FOLDS)[0].mean())
        except BudgetTooSmall:  # where every call has its own cost, the first exit may be too expensive in a fold
            return -math.inf

    opened = affordable_exits(network, amount)
    best = accuracy(opened)
    while len(opened) > 1:
        fewer = [tuple(index for index in opened if index != closed) for closed in opened]
        accuracies = {each: accuracy(each) for each in fewer if network.cumulative(each)[0] <= amount}
        if not accuracies or max(accuracies.values()) < max(best, 0.0):
            break
        opened = max(accuracies, key=lambda each: accuracies[each])
        best = accuracies[opened]
    return opened


def affordable_exits(network: Costs, budget: float) -> tuple[int, ...]:
    """Return all exits from the first on that is affordable when no exit before it is open."""
    affordable = network.alone <= budget
    if not affordable.any():
        raise BudgetTooSmall(budget, float(network.alone.min()), network.unit, full=network.full)
    return tuple(range(int(np.argmax(affordable)), len(network)))


def held_out(
    method: Method, costs: AnyCosts, budget: Budget, labelled: HeadOutputs, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each labelled sample is answered correctly, and its cost, by a policy that never saw its label.

    Each fold's thresholds are set on its own scores, without labels, so that every method keeps the budget on it.
    Fewer than 4 samples are too few to hold any out.
    """
    right, spent = np.empty(len(labelled)), np.empty(len(labelled))
    truth = labelled.truth()
    for rest, part in held_out_parts(len(labelled), count):
        fold = labelled.take(part)
        decisions = replay(method(costs, budget, labelled.take(rest), fold.unlabelled()), fold)
        right[part], spent[part] = decisions.correct(truth[part]), decisions.spent
    return right, spent


@shared_by_budgets
def held_out_tables(labelled: HeadOutputs, count: int) -> list[tuple[HeadOutputs, HeadOutputs]]:
    """Return, for each fold, the table of the other samples and of those held out."""
    return [(labelled.take(rest), labelled.take(part)) for rest, part in held_out_parts(len(labelled), count)]


def held_out_parts(num_samples: int, count: int) -> list[tuple[Integers, Integers]]:
    """Return, for each fold, the other samples and those held out; all samples twice where there are fewer than 4."""
    count = min(count, num_samples // 2)
    every = np.arange(num_samples)
    return [(np.setdiff1d(every, part), part) for part in folds(num_samples, count)] if count > 1 else [(every, every)]
