"""Capped: as another policy says, but some samples no later than at an exit of their own."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from alight.errors import BadInput
from alight.policies.policy import Array, Memory, Policy


@dataclass(frozen=True)
class Capped(Policy):
    """Leave as the policy says, and at the latest where the sample's own limit stands."""

    policy: Policy
    limits: Mapping[int, int] = field(hash=False)  # by sample: the position of the last open exit that it may take

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "is_batch_dependent", self.policy.is_batch_dependent)

    def _check(self) -> None:
        super()._check()
        if any(not 0 <= limit < len(self.costs) for limit in self.limits.values()):
            raise BadInput(f"limits {sorted(set(self.limits.values()))}: give positions among {len(self.costs)} exits")

    def step(
        self, open_index: int, samples: Array, predictions: Array, scores: Array, memory: Memory
    ) -> tuple[Array, Memory]:
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
    """The policy for a batch in which these samples leave at their limit at the latest.

    >>> from alight.policies.policy import Threshold
    >>> policy = capped(Threshold(thresholds=(0.9, 0.9), costs=(1.0, 2.0, 3.0)), {7: 0})
    >>> policy.step(0, np.array([6, 7]), np.zeros(2), np.array([0.1, 0.2]), ())[0]
    array([False,  True])
    """
    return Capped(policy=policy, limits=dict(limits), **policy.terms())
