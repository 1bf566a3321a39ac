"""What every method is given, checked once: costs, a budget, and tables of outputs."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from alight.budgeting.bounds import Plan, exact_plan, exact_ranks
from alight.budgeting.rates import Floats, tilted_rates
from alight.budgeting.thresholds import Slack, hash01, marginal_ranks, survivor_thresholds, thresholds_at_ranks
from alight.costs import Costs, as_costs
from alight.display import shape_text
from alight.errors import BadInput, BudgetTooSmall, Mismatch
from alight.outputs import HeadOutputs
from alight.policies.policy import MIXING, Mixture, Policy, Threshold
from alight.policies.route import replay

AnyCosts = Costs | npt.ArrayLike
Budget = float | str
AnySlack = Slack | Literal["exact"]
Settings = dict[str, float | str]
HALVINGS = 10  # of the range of planned costs, until a plan spends what it says though calls differ in cost
Method = Callable[..., Policy]  # (costs, budget, labelled, unlabelled=None, *, ...): a policy for the budget


@dataclass(frozen=True)
class Problem:
    """One calibration: the budget in the costs' unit, and the tables.

    >>> from alight import recordings
    >>> labelled, test, costs = recordings.load()
    >>> problem = Problem.of("by hand", costs, "50%", labelled, None)
    >>> rates = np.full(8, 1 / 8)
    >>> problem.spends(problem.survivor_policy(lambda budget: rates)) > problem.budget
    True
    """

    network: Costs
    budget: float
    labelled: HeadOutputs  # gives risks and accuracies
    scored: HeadOutputs  # gives thresholds: the unlabelled table, or the labelled one where there is no other
    method: str
    full_cost: float  # of the full network, which percentages refer to

    @classmethod
    def of(
        cls,
        method: str,
        costs: AnyCosts,
        budget: Budget,
        labelled: HeadOutputs,
        unlabelled: HeadOutputs | None,
        *,
        closes_exits: bool = False,
    ) -> Self:
        """Return the problem, once its parts fit together; a method that closes exits may do without the first."""
        network = as_costs(costs)
        if labelled is unlabelled:
            warnings.warn(
                "the same table was given as labelled and unlabelled: thresholds are then set on the samples that chose"
                " the rates; split it, or leave unlabelled out",
                stacklevel=3,
            )
        check_tables(network, labelled, unlabelled)
        scored = labelled if unlabelled is None else unlabelled
        if scored.score != labelled.score:
            raise Mismatch(
                f"the labelled table's score is {labelled.score!r} and the unlabelled one's {scored.score!r}:"
                " record both with one score"
            )
        if scored.fingerprint != labelled.fingerprint:
            raise Mismatch(
                f"the labelled table is of the network {labelled.fingerprint or 'unknown'} and the unlabelled one of"
                f" {scored.fingerprint or 'unknown'}: record both with one network"
            )
        amount, full = network.budget(budget), network.full
        network = costs_in(scored, network)
        cheapest = float(network.alone.min() if closes_exits else network.cumulative()[0])
        if amount < cheapest:
            raise BudgetTooSmall(amount, cheapest, network.unit, full=full)
        return cls(network, amount, labelled, scored, method, full)

    @property
    def costs(self) -> Floats:
        """Cumulative costs with every exit open."""
        return self.network.cumulative()

    def spends(self, policy: Policy) -> float:
        """Return the mean cost of the policy on the table that sets thresholds."""
        return replay(policy, self.scored).mean_cost

    def accuracy(self, policy: Policy) -> float:
        """Return the accuracy on the labelled table; without labels, the agreement with the last exit."""
        return replay(policy, self.labelled).accuracy(self.labelled.truth())

    def terms(
        self,
        open_exits: Sequence[int] | None = None,
        settings: Settings | None = None,
        exit_rates: Floats | None = None,
    ) -> dict[str, Any]:
        """Return what a policy for this problem carries beside its rule."""
        opened = tuple(range(len(self.network))) if open_exits is None else tuple(open_exits)
        return {
            "costs": self.network.cumulative(opened),
            "open_exits": opened,
            "num_exits": len(self.network),
            "unit": self.network.unit,
            "budget": self.budget,
            "score": self.scored.score,
            "fingerprint": self.labelled.fingerprint,
            "exits": self.labelled.exits or self.scored.exits,
            "sample_shape": self.scored.sample_shape,
            "full_cost": self.full_cost,
            "method": self.method,
            "settings": dict(settings or {}) | ({"truth": "the last exit"} if self.labelled.labels is None else {}),
            "exit_rates": () if exit_rates is None else exit_rates,
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
        """Return the policy that meets planned rates by thresholds on the samples still waiting at each exit."""
        costs = self.network.cumulative(open_exits)
        if slack == "exact":
            self._check_law()
            rates, padding = exact_plan(plan, costs, self.budget, len(self.scored), delta), None
        else:
            rates, padding = plan(self.budget), slack
        scores = self.scored.scores if open_exits is None else self.scored.scores[:, list(open_exits)]
        named = {**(settings or {}), **_named(slack, delta)}

        def meeting(rates: Floats) -> Threshold:
            terms = self.terms(open_exits, named, rates)
            return Threshold(**survivor_thresholds(scores, rates, padding).fields(), **terms)

        return self._spending_as_planned(meeting, rates, costs)

    def marginal_policy(
        self, plan: Plan, *, slack: AnySlack = "paper", delta: float = 0.05, settings: Settings | None = None
    ) -> Threshold:
        """Return the policy that meets planned rates by thresholds on all samples at each exit (the paper)."""
        rates, samples = plan(self.budget), len(self.scored)
        named = {**(settings or {}), **_named(slack, delta), "thresholds": "marginal"}
        if slack == "exact":
            self._check_law()

        def meeting(rates: Floats) -> Threshold:
            ranks = exact_ranks(rates, samples, delta) if slack == "exact" else marginal_ranks(rates, samples, slack)
            thresholds = thresholds_at_ranks(self.scored.scores, ranks)
            return Threshold(**thresholds.fields(), **self.terms(None, named, rates))

        return self._spending_as_planned(meeting, rates, self.costs, at_most=float(rates @ self.costs))

    def _spending_as_planned(
        self, meeting: Callable[[Floats], Threshold], rates: Floats, costs: Floats, at_most: float = np.inf
    ) -> Threshold:
        """Return the policy that meets planned rates; where calls differ in cost, the one that spends what they plan.

        Hard requests often cost more, so that rates times mean costs is not what is spent. The rates are then tilted
        until the spend on the scored table is as planned; they are no more the policy's, whose cost they do not give.
        `at_most` is what the tilted rates may plan, for rules that leave some of their plan unused on purpose.
        """
        if self.scored.costs is None:
            return meeting(rates)
        planned, reached = float(rates @ costs), costs[rates > 0]
        low, high = float(reached[0]), min(float(reached[-1]), at_most)
        policy = meeting(tilted_rates(rates, costs, low))  # all leave at one exit, within the plan
        for _ in range(HALVINGS):
            middle = low + (high - low) / 2
            tried = meeting(tilted_rates(rates, costs, middle))
            if self.spends(tried) <= planned:
                low, policy = middle, tried
            else:
                high = middle
        return replace(policy, exit_rates=())

    def _check_law(self) -> None:
        if self.scored.costs is not None:
            raise BadInput(
                "slack 'exact' knows the law of exit shares, not that of costs which differ from request to request:"
                " certify the method with certified_mean or certified_probability and max_costs"
            )

    def mixture(self, cheaper: Policy, costlier: Policy | None = None) -> Policy:
        """Return the mixture with the largest share of the costlier policy that keeps the budget on the scored table.

        Without a costlier one it is the cheaper one alone.
        """
        if costlier is None:
            return cheaper
        low, high = (replay(policy, self.scored).spent for policy in (cheaper, costlier))
        hashes = hash01(np.arange(len(high)), purpose=MIXING)
        order = np.argsort(hashes)
        exceeds = low.sum() + np.cumsum((high - low)[order]) > self.budget * len(high)
        share = float(hashes[order[np.argmax(exceeds)]]) if exceeds.any() else 1.0  # below the first that is too much
        settings = dict(cheaper.settings) | {"share of next": share}
        return Mixture(costlier, cheaper, share, **self.terms(settings=settings))


def costs_in(table: HeadOutputs, network: Costs) -> Costs:
    """Return the mean costs of the calls in a table that has them, else the network's.

    >>> table = HeadOutputs([[0.1, 0.2]] * 2, [[0, 1]] * 2, costs=[[1.0, 4.0], [2.0, 6.0]])
    >>> costs_in(table, Costs([0, 0], [1, 4], unit="USD")).cumulative()
    array([1.5, 6.5])
    """
    if table.costs is None:
        return network
    if network.stages.any():
        raise Mismatch(
            "the table has a cost for every sample and exit, and the costs have stages that exits share: give the costs"
            " that read_log returns, or Costs(stages=[0, ...], heads=[...]) with the mean cost of each member"
        )
    return Costs(np.zeros(table.num_exits), table.costs.mean(axis=0), network.unit)


def check_uncertified(policy: Policy, wrapper: str) -> None:
    """Raise if a wrapper that chooses on all labelled samples was given a method that is certified on some of them."""
    if policy.certificate is not None and policy.certificate.contract != "batch":  # which assumes nothing
        raise BadInput(
            f"{wrapper} chooses on the samples that certified {policy.method}, so that the guarantee would be false:"
            f" certify last, as in certified_mean({wrapper}(method))"
        )


def check_tables(network: Costs, labelled: HeadOutputs, unlabelled: HeadOutputs | None) -> None:
    """Check that the tables have as many exits as there are costs, are not too small, and alike in having costs."""
    if unlabelled is not None and (unlabelled.costs is None) != (labelled.costs is None):
        raise Mismatch("one table has a cost for every sample and the other has not: give both or neither with costs")
    for name, table in {"labelled": labelled, "unlabelled": unlabelled}.items():
        if table is not None and table.num_exits != len(network):
            raise Mismatch(
                f"the {name} table has {table.num_exits} exits, but there are {len(network)} costs: give one each"
            )
        if table is not None and len(table) < 2:
            raise BadInput(f"the {name} table has {len(table)} sample: record at least 2, better 1,000, to calibrate")
    scored = labelled if unlabelled is None else unlabelled
    sizes = {"the costs were measured with": network.sample_shape, "the labelled table is of": labelled.sample_shape}
    for what, size in sizes.items():
        if size and scored.sample_shape and size != scored.sample_shape:
            raise Mismatch(
                f"{what} samples of {shape_text(size)}, and thresholds are set on samples of"
                f" {shape_text(scored.sample_shape)}: record at one size, and measure costs with an example of it,"
                " measure_costs(model, example), or attach heads with one"
            )


def _named(slack: AnySlack, delta: float) -> Settings:
    return {} if slack is None else {"slack": slack, "delta": delta} if slack == "exact" else {"slack": slack}
