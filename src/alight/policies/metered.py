"""Metered: real costs are counted, and no call is made that the budget might not pay for.

For calls whose costs differ and are known only afterwards, such as those of language models: at most so much is spent,
whatever the requests are, if no call costs more than the most that it can cost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from alight.display import quantity
from alight.errors import BadInput
from alight.policies.limits import surest
from alight.policies.policy import Array, BatchState, Memory, Policy, Step

ROUNDING = 1e-12  # of what is allowed, so that no way of adding up exceeds it


@dataclass(frozen=True)
class Spending(BatchState):
    """What a metered policy remembers of its stream, or of the batch."""

    admitted: int = 0
    spent: float = 0.0


@dataclass(frozen=True)
class Metered(Policy):
    """Leave as the policy says, and earlier where the most that the next call can cost might not be paid for.

    For every number t of samples admitted, whatever they are: spent <= t * budget + overdraft. A batch is one step, and
    the bound holds after each of its calls. The first call of a sample is always made: it costs at most the budget. The
    surest samples leave first. With `per_batch` every batch is counted alone.

    >>> import numpy as np
    >>> from alight.policies.policy import Threshold
    >>> inner = Threshold(thresholds=(0.9,), costs=(1.0, 3.0), budget=2.0)
    >>> policy = meter(inner, max_costs=[1.5, 4.0], per_batch=True)
    >>> memory = policy.charged(0, np.array([1.0, 1.0, 1.2]), ())
    >>> leaving, _ = policy.step(0, np.arange(3), np.zeros(3), np.array([0.1, 0.3, 0.2]), memory)
    >>> leaving  # 6 are allowed and 3.2 are spent: no call that can cost 4
    array([ True,  True,  True])
    """

    is_batch_dependent: ClassVar[bool] = True
    reads_costs: ClassVar[bool] = True

    policy: Policy
    max_costs: tuple[float, ...]  # of one call of each open member
    overdraft: float  # how far the spend may exceed the budget of the samples so far
    per_batch: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "policy", replace(self.policy, salt=self.salt))

    def _check(self) -> None:
        super()._check()
        if self.budget is None:
            raise BadInput("a meter needs a budget: calibrate the policy for one")
        caps = self.max_costs
        if (
            len(caps) != len(self.costs)
            or not all(0 < cap < math.inf for cap in caps)
            or not 0 <= self.overdraft < math.inf
        ):
            raise BadInput(f"max_costs {caps} for {len(self.costs)} open exits: give one positive number each")
        if caps[0] > self.budget:
            first = self.exit_names[self.open_exits[0]]
            raise BadInput(
                f"one call of {first} can cost {quantity(caps[0], self.unit)}, more than the budget of"
                f" {quantity(self.budget, self.unit)} per request, so that no bound can be kept: raise the"
                f" budget, or limit the tokens of {first}"
            )

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*super().inputs, "costs")

    def allowed(self, admitted: int) -> float:
        """Return what may have been spent once so many samples have been admitted."""
        assert self.budget is not None  # checked at the border
        return (admitted * self.budget + self.overdraft) * (1 - ROUNDING)

    def charged(self, open_index: int, costs: Array, memory: Memory) -> Memory:
        fresh = not memory or (self.per_batch and open_index == 0)
        state, *inner = (Spending(), ()) if fresh else memory
        count = len(costs) if open_index == 0 else 0
        state = Spending(state.admitted + count, state.spent + float(costs.sum()))
        return (state, *(inner if open_index else [()]))

    def step(self, open_index: int, samples: Array, predictions: Array, scores: Array, memory: Memory) -> Step:
        state, inner = memory
        leaving, inner = self.policy.step(open_index, samples, predictions, scores, inner)
        left = self.allowed(state.admitted) - state.spent
        affordable = max(0, math.floor(left / self.max_costs[open_index + 1]))
        staying = ~leaving
        if (excess := int(staying.sum()) - affordable) > 0:
            leaving = leaving.copy()
            leaving[staying] = surest(scores[staying], samples[staying], excess, self.salt)
        return leaving, (state, inner)

    def rule(self) -> list[list[str]]:
        return [*self.policy.rule(), ["call at most", *(quantity(cap, self.unit) for cap in self.max_costs)]]

    def summary(self) -> str:
        return f"{self.policy.summary()}; earlier where the budget might not pay for the next call"


def meter(policy: Policy, max_costs: Sequence[float], *, per_batch: bool = False) -> Metered:
    """Return the policy under a meter of real costs; `max_costs` are the most that a call of each open member can cost.

    A stream may exceed its budget by what the calls of one request can cost, a batch by nothing.
    """
    terms: dict[str, Any] = policy.terms() | {"max_costs": tuple(max_costs)}
    return Metered(policy=policy, overdraft=0.0 if per_batch else float(sum(max_costs)), per_batch=per_batch, **terms)
