"""What every method is given, checked once: costs, a budget, and tables of outputs."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from alight.budgeting.bounds import Plan, exact_plan, exact_ranks
from alight.budgeting.selection import block_thresholds_at_ranks, block_thresholds_for_counts
from alight.budgeting.thresholds import (
    Slack,
    Thresholds,
    marginal_ranks,
    passing_counts,
    thresholds_at_ranks,
    thresholds_for_counts,
)
from alight.costs import Costs, as_costs
from alight.errors import BadInput, BudgetTooSmall, Mismatch
from alight.outputs import HeadOutputs
from alight.partitioned import PartitionedOutputs
from alight.policies.policy import Policy, Threshold
from alight.policies.route import replay

Floats = npt.NDArray[np.float64]
AnyCosts = Costs | npt.ArrayLike
Budget = float | str
AnySlack = Slack | Literal["exact"]
AnyTable = HeadOutputs | PartitionedOutputs
Settings = dict[str, float | str]
Method = Callable[..., Policy]  # (costs, budget, labelled, unlabelled=None, *, ...): a policy for the budget


@dataclass(frozen=True)
class PlannedTask:
    """One calibration by planned exit rates: the budget in the costs' unit, and tables, which memory need not hold."""

    network: Costs
    budget: float
    labelled: AnyTable  # gives risks and accuracies
    scored: AnyTable  # gives thresholds: the unlabelled table, or the labelled one where there is no other
    method: str

    @classmethod
    def of(
        cls,
        method: str,
        costs: AnyCosts,
        budget: Budget,
        labelled: AnyTable,
        unlabelled: AnyTable | None,
        *,
        closes_exits: bool = False,
    ) -> Self:
        """The task, once its parts are known to fit together; a method that closes exits may do without the first."""
        network = as_costs(costs)
        if labelled is unlabelled:
            warnings.warn(
                "the same table was given as labelled and unlabelled: thresholds are then set on the samples that chose"
                " the rates; split it, or leave unlabelled out",
                stacklevel=3,
            )
        check_exits(network, labelled, unlabelled)
        for name, table in {"labelled": labelled, "unlabelled": unlabelled}.items():
            if table is not None and len(table) < 2:
                raise BadInput(
                    f"the {name} table has {len(table)} sample: record at least 2, better 1,000, to calibrate"
                )
        if unlabelled is not None and unlabelled.score != labelled.score:
            raise Mismatch(
                f"the labelled table's score is {labelled.score!r} and the unlabelled one's {unlabelled.score!r}:"
                " record both with one score"
            )
        if unlabelled is not None and unlabelled.fingerprint != labelled.fingerprint:
            raise Mismatch(
                f"the labelled table is of the network {labelled.fingerprint or 'unknown'} and the unlabelled one of"
                f" {unlabelled.fingerprint or 'unknown'}: record both with one network"
            )
        amount = network.budget(budget)
        firsts = range(len(network)) if closes_exits else [0]
        cheapest = min(float(network.cumulative([first])[0]) for first in firsts)
        if amount < cheapest:
            raise BudgetTooSmall(amount, cheapest, network.unit)
        return cls(network, amount, labelled, labelled if unlabelled is None else unlabelled, method)

    @property
    def costs(self) -> Floats:
        """Cumulative costs with every exit open."""
        return self.network.cumulative()

    def terms(
        self,
        open_exits: Sequence[int] | None = None,
        settings: Settings | None = None,
        exit_rates: Floats | None = None,
    ) -> dict[str, Any]:
        """What a policy of this task carries beside its rule."""
        opened = tuple(range(len(self.network))) if open_exits is None else tuple(open_exits)
        return {
            "costs": tuple(self.network.cumulative(opened).tolist()),
            "open_exits": opened,
            "num_exits": len(self.network),
            "unit": self.network.unit,
            "budget": self.budget,
            "score": self.scored.score,
            "fingerprint": self.labelled.fingerprint,
            "method": self.method,
            "settings": dict(settings or {}) | ({} if self.labelled.is_labelled else {"truth": "the last exit"}),
            "exit_rates": () if exit_rates is None else tuple(exit_rates.tolist()),
        }

    def survivor_policy(
        self,
        plan: Plan,
        *,
        slack: AnySlack = None,
        delta: float = 0.05,
        open_exits: Sequence[int] | None = None,
        settings: Settings | None = None,
    ) -> Threshold:
        """The planned rates, met by thresholds on those still waiting at each exit."""
        costs = self.network.cumulative(open_exits)
        if slack == "exact":
            rates, padding = exact_plan(plan, costs, self.budget, len(self.scored), delta), None
        else:
            rates, padding = plan(self.budget), slack
        thresholds = self._for_counts(passing_counts(rates, len(self.scored), padding), open_exits)
        return self._threshold(thresholds, rates, open_exits, _with_slack(settings, slack, delta))

    def marginal_policy(
        self,
        plan: Plan,
        *,
        slack: AnySlack = "paper",
        delta: float = 0.05,
        settings: Settings | None = None,
    ) -> Threshold:
        """The planned rates, met by thresholds on all samples at each exit (the paper)."""
        rates, samples = plan(self.budget), len(self.scored)
        ranks = exact_ranks(rates, samples, delta) if slack == "exact" else marginal_ranks(rates, samples, slack)
        return self._threshold(
            self._at_ranks(ranks), rates, None, _with_slack(settings, slack, delta) | {"thresholds": "marginal"}
        )

    def _for_counts(self, counts: npt.NDArray[np.int64], open_exits: Sequence[int] | None) -> Thresholds:
        if isinstance(self.scored, PartitionedOutputs):
            return block_thresholds_for_counts(self.scored.scores, len(self.scored), counts)
        scores = self.scored.scores if open_exits is None else self.scored.scores[:, list(open_exits)]
        return thresholds_for_counts(scores, counts)

    def _at_ranks(self, ranks: npt.NDArray[np.int64]) -> Thresholds:
        if isinstance(self.scored, PartitionedOutputs):
            return block_thresholds_at_ranks(self.scored.scores, len(self.scored), ranks)
        return thresholds_at_ranks(self.scored.scores, ranks)

    def _threshold(
        self,
        thresholds: Thresholds,
        rates: Floats,
        open_exits: Sequence[int] | None,
        settings: Settings,
    ) -> Threshold:
        return Threshold(
            thresholds=tuple(thresholds.values.tolist()),
            tie_shares=tuple(thresholds.tie_shares.tolist()),
            **self.terms(open_exits, settings, rates),
        )


@dataclass(frozen=True)
class Task(PlannedTask):
    """One calibration whose tables are in memory, so that policies can be tried on them."""

    labelled: HeadOutputs
    scored: HeadOutputs

    def __post_init__(self) -> None:
        in_memory(self.method, self.labelled)
        in_memory(self.method, self.scored)

    def spends(self, policy: Policy) -> float:
        """Mean cost of the policy on the table that sets thresholds."""
        return replay(policy, self.scored).mean_cost

    def accuracy(self, policy: Policy) -> float:
        """Accuracy of the policy on the labelled table; without labels, its agreement with the last exit."""
        return replay(policy, self.labelled).accuracy(self.labelled.truth())


def check_exits(network: Costs, labelled: AnyTable, unlabelled: AnyTable | None) -> None:
    """Check that the tables have as many exits as there are costs."""
    for name, table in {"labelled": labelled, "unlabelled": unlabelled}.items():
        if table is not None and table.num_exits != len(network):
            raise Mismatch(
                f"the {name} table has {table.num_exits} exits, but there are {len(network)} costs: give one each"
            )


def in_memory(purpose: str, table: AnyTable) -> HeadOutputs:
    """The table, or an error that says what needs it in memory."""
    if isinstance(table, PartitionedOutputs):
        raise BadInput(
            f"{purpose} needs the whole table in memory, and was given {len(table.paths)} partitions of {len(table):,}"
            " samples: give what its load() returns, or calibrate with eero without prune"
        )
    return table


def _with_slack(settings: Settings | None, slack: AnySlack, delta: float) -> Settings:
    named: Settings = dict(settings or {})
    if slack is not None:
        named["slack"] = slack
    if slack == "exact":
        named["delta"] = delta
    return named
