"""Rules that limit how far samples go: so many of each batch per exit, a last exit per sample, or what calls cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from alight.budgeting.rates import quota_counts
from alight.budgeting.thresholds import hash32
from alight.display import quantity
from alight.errors import BadInput
from alight.policies.policy import Array, BatchState, Memory, Policy, Step

ROUNDING = 1e-12  # of what is allowed, so that no way of adding up exceeds it


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


@dataclass(frozen=True)
class Spending(BatchState):
    """What a metered policy remembers of its stream, or of the batch."""

    admitted: int = 0
    spent: float = 0.0


@dataclass(frozen=True)
class Metered(Policy):
    """Leave as the policy says, and earlier where the most that the next call can cost might not be paid for.

    For calls whose costs differ and are known only afterwards, such as those of language models.

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
    try:
        most = tuple(map(float, max_costs))
    except (TypeError, ValueError) as error:
        raise BadInput(f"max_costs {max_costs!r}: give a number for every open exit, [0.002, 0.03]") from error
    terms: dict[str, Any] = policy.terms() | {"max_costs": most}
    return Metered(policy=policy, overdraft=0.0 if per_batch else sum(most), per_batch=per_batch, **terms)
