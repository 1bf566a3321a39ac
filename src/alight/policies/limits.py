"""Rules that limit how far samples go: a number of each batch per exit (Quota), or a last exit per sample (Capped)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from alight.budgeting.rates import quota_counts
from alight.budgeting.thresholds import hash32
from alight.errors import BadInput
from alight.policies.policy import Array, BatchState, Memory, Policy, Step


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

    def step(self, open_index: int, samples: Array, predictions: Array, scores: Array, memory: Memory) -> Step:
        if not open_index:  # each batch has its own
            assert self.budget is not None  # checked at the border
            counts = quota_counts(np.array(self.exit_rates), np.array(self.costs), self.budget, len(samples))
            memory = (Leaving(tuple(counts.tolist())),)
        return surest(scores, samples, memory[0].counts[open_index], self.salt), memory

    def summary(self) -> str:
        return "the surest of each batch leave, as many at each exit as the batch can afford"


@dataclass(frozen=True)
class Capped(Policy):
    """Leave as the policy says, and at the latest where the sample's own limit stands."""

    policy: Policy
    limits: Mapping[int, int] = field(hash=False)  # by sample: the position of the last open exit that it may take

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "policy", replace(self.policy, salt=self.salt))
        object.__setattr__(self, "is_batch_dependent", self.policy.is_batch_dependent)

    def _check(self) -> None:
        super()._check()
        if any(not 0 <= limit < len(self.costs) for limit in self.limits.values()):
            raise BadInput(f"limits {sorted(set(self.limits.values()))}: give positions among {len(self.costs)} exits")

    def step(self, open_index: int, samples: Array, predictions: Array, scores: Array, memory: Memory) -> Step:
        leaving, memory = self.policy.step(open_index, samples, predictions, scores, memory)
        if not isinstance(samples, np.ndarray):  # one sample, in numbers
            return leaving or self._ends(samples, open_index), memory
        forced = np.array([self._ends(sample, open_index) for sample in samples.tolist()]) & ~leaving
        if count := int(forced.sum()):
            leaving, memory = leaving | forced, self.policy.sent_out(open_index, count, memory)
        return leaving, memory

    def _ends(self, sample: int, open_index: int) -> bool:
        return self.limits.get(sample, len(self.costs)) <= open_index

    def sent_out(self, open_index: int, count: int, memory: Memory) -> Memory:
        return self.policy.sent_out(open_index, count, memory)

    def summary(self) -> str:
        return f"{self.policy.summary()}; {len(self.limits)} samples no later than at an exit of their own"


def capped(policy: Policy, limits: Mapping[int, int]) -> Policy:
    """Return the policy for a batch in which these samples leave at their limit at the latest.

    >>> from alight.policies.policy import Threshold
    >>> policy = capped(Threshold(thresholds=(0.9, 0.9), costs=(1.0, 2.0, 3.0)), {7: 0})
    >>> policy.step(0, np.array([6, 7]), np.zeros(2), np.array([0.1, 0.2]), ())[0]
    array([False,  True])
    """
    return Capped(policy=policy, limits=dict(limits), **policy.terms())


def surest(scores: Array, samples: Array, count: int, salt: int) -> Array:
    """Return where the `count` highest scores stand; equal ones in an order drawn by the samples' numbers."""
    hashes = hash32(samples, salt)
    if isinstance(scores, np.ndarray):
        order = np.lexsort((hashes, -scores))
    else:
        order = hashes.argsort(stable=True)
        order = order[(-scores[order]).argsort(stable=True)]
    chosen = scores != scores  # none
    chosen[order[:count]] = True
    return chosen
