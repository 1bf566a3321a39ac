"""Quota: a fixed number of each batch leaves at each exit, the surest first."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from alight.budgeting.quotas import quota_counts
from alight.budgeting.thresholds import hash32
from alight.errors import BadInput
from alight.policies.policy import Array, BatchState, Memory, Policy


@dataclass(frozen=True)
class Leaving(BatchState):
    """How many of this batch leave at each exit."""

    counts: tuple[int, ...]


@dataclass(frozen=True)
class Quota(Policy):
    """Leave by rank inside the batch, so many at each exit that the batch never costs more than its budget.

    >>> policy = Quota(costs=(1.0, 3.0), exit_rates=(0.5, 0.5), budget=2.0)
    >>> policy.step(0, np.arange(4), np.zeros(4), np.array([0.1, 0.9, 0.3, 0.8]), ())[0]
    array([False,  True, False,  True])
    """

    is_batch_dependent: ClassVar[bool] = True

    def _check(self) -> None:
        super()._check()
        if not self.exit_rates or self.budget is None:
            raise BadInput("a quota needs exit rates and a budget: make it with certified_batch(method)")

    def step(
        self, open_index: int, samples: Array, predictions: Array, scores: Array, memory: Memory
    ) -> tuple[Array, Memory]:
        (leaving,) = memory if open_index else (Leaving(self._counts(len(samples))),)  # each batch has its own
        return surest(scores, samples, leaving.counts[open_index]), (leaving,)

    def _counts(self, total: int) -> tuple[int, ...]:
        assert self.budget is not None  # checked at the border
        counts = quota_counts(np.array(self.exit_rates), np.array(self.costs), self.budget, total)
        return tuple(counts.tolist())

    def summary(self) -> str:
        return "the surest of each batch leave, as many at each exit as the batch can afford"


def surest(scores: Array, samples: Array, count: int) -> Array:
    """Where the `count` highest scores stand; equal ones are ordered by the samples' hash."""
    hashes = hash32(samples)
    if isinstance(scores, np.ndarray):
        order = np.lexsort((hashes, -scores))
    else:
        order = hashes.argsort(stable=True)
        order = order[(-scores[order]).argsort(stable=True)]
    chosen = scores != scores  # none
    chosen[order[:count]] = True
    return chosen
