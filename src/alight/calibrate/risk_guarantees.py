"""Guarantees on accuracy: the cheapest policy whose risk can be certified, or one whose cost and risk both can.

The risk, an error, an excess error or a disagreement, is at most alpha with probability 1 - delta over the data.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from alight.budgeting.bounds import check_delta, largest, smallest_sample
from alight.calibrate.cost_guarantees import (
    P_VALUES,
    Bound,
    CostContract,
    Numbers,
    allowed_by,
    capped,
    certified,
    certify_cost,
    check_bound,
    doubted,
    doubts_about_copies,
    drawn_salts,
    same_distribution,
)
from alight.calibrate.problem import AnyCosts, Budget, Method
from alight.costs import Costs, as_costs
from alight.display import percent
from alight.errors import BadInput, BudgetTooSmall, LabelsNeeded
from alight.outputs import HeadOutputs
from alight.policies.policy import Certificate, ExitAt, Policy
from alight.policies.route import replay

Risk = Literal["error", "excess_error", "disagreement"]
Fit = Callable[[Budget, HeadOutputs], Policy]  # the method with its costs and options

LOSSES = 1000  # steps of a bound on lost accuracy
BUDGETS = 41  # members of a family of cheaper and cheaper policies
RISKS = {
    "error": "error",
    "excess_error": "error above the last exit's",
    "disagreement": "disagreement with the last exit",
}


def certified_risk(
    method: Method,
    *,
    risk: Risk,
    alpha: float,
    delta: float = 0.05,
    cost: Literal["probability"] | None = None,
    bound: Bound = "betting",
    seed: int | None = None,
    max_costs: npt.ArrayLike | None = None,
) -> Method:
    """Return the method with a guarantee: with probability 1 - delta over the data, the risk is at most alpha.

    `risk` is "error", "excess_error" over the last exit, or "disagreement" with it, which needs no labels. With
    `budget=None` the policy is the cheapest that can be certified. With a budget, its cost is certified as well, with
    probability: cost and risk share delta evenly. A guarantee on average would be false there: it would be given only
    when the risk passes its test, which expensive calibrations do more often.

    delta counts all calibrations, also those for which no policy can be certified and an error is raised: among the
    certificates that are issued, a larger share may fail. `max_costs` as in `certified_probability`, with a budget.

    >>> from alight import calibrate, recordings
    >>> labelled, test, costs = recordings.load()
    >>> policy = certified_risk(calibrate.eero, risk="excess_error", alpha=0.05)(costs, None, labelled)
    >>> replay(policy, test).mean_cost < costs.full
    True
    """
    check_delta(delta)
    check_bound(bound)
    if risk not in RISKS:
        raise BadInput(f"there is no risk {risk!r}: choose error, excess_error or disagreement")
    if alpha is None or not 0 < alpha < 1:
        raise BadInput(f"alpha {alpha} must lie inside (0, 1): 0.01 allows one point")
    if cost not in (None, "probability"):
        raise BadInput(
            f"a guarantee on {risk} goes with one on cost of 'probability', not {cost!r}: leave cost out; it is issued"
            f" only when the {risk} passes its test, which expensive calibrations do more often, so that a mean cost"
            " does not hold beside it"
        )

    def calibrated(
        costs: AnyCosts,
        budget: Budget | None,
        labelled: HeadOutputs,
        unlabelled: HeadOutputs | None = None,
        **options: object,
    ) -> Policy:
        if unlabelled is not None:
            raise BadInput("a guarantee on accuracy is tested on the labelled table alone: leave unlabelled out")
        if risk != "disagreement" and labelled.labels is None:
            raise LabelsNeeded(f"a guarantee on {risk}")
        if budget is None and cost is not None:
            raise BadInput(f"the guarantee {cost!r} on cost needs a budget: give one, or leave cost out")
        network, rng = as_costs(costs), np.random.default_rng(seed or 0)
        calibrating, deployed, testing_salt = drawn_salts(seed, labelled)

        def fit(amount: Budget, table: HeadOutputs) -> Policy:
            return replace(method(network, amount, table, **options), salt=calibrating)

        if budget is None:
            whole = _RiskTest(risk, alpha, delta, bound)
            policy = _cheapest(fit, network, *labelled.split(0.5, rng), whole)
            return doubted(replace(policy, salt=deployed), doubts_about_copies(labelled))
        fitting, rest = labelled.split(1 / 3, rng)
        certifying, testing = rest.split(0.5, rng)
        contract, test = (
            CostContract("probability", delta / 2, bound, max_costs),
            _RiskTest(risk, alpha, delta / 2, bound),
        )
        policy = certify_cost(fit(budget, fitting), network, fitting, certifying, contract)
        policy = replace(policy, salt=testing_salt)  # else its ties were drawn like those that set its thresholds
        policy = _with_risk(policy, network, testing, test)
        return doubted(replace(policy, salt=deployed), doubts_about_copies(labelled))

    return calibrated


@dataclass(frozen=True)
class _RiskTest:
    """The claim that a risk is at most alpha, tested at level delta."""

    risk: Risk
    alpha: float
    delta: float
    bound: Bound

    def sentence(self, observed: float) -> str:
        """Return what is guaranteed when this risk was observed."""
        claim = f"{RISKS[self.risk]} <= {percent(self.alpha, 10)} ({percent(observed)} observed)"
        return f"Guaranteed with {percent(1 - self.delta, 10)} confidence: {claim}."

    def observe(self, policy: Policy, testing: HeadOutputs, where: str | None = None) -> tuple[bool, float]:
        """Return whether the claim is certified on this table, and the risk observed.

        `where` names the policy in the error that is raised if it is not.
        """
        decisions, last = replay(policy, testing), testing.predictions[:, -1]
        if self.risk == "disagreement":
            losses = (decisions.predictions != last).astype(np.float64)
        else:
            losses = 1.0 - decisions.correct()
        limit, best = self.alpha, 0.0
        observed = float(losses.mean())
        if self.risk == "excess_error":  # paired differences in [-1, 1], moved to [0, 1]
            losses = (losses - (1.0 - testing.correct()[:, -1]) + 1) / 2
            limit, best = (1 + self.alpha) / 2, 0.5
            observed = float(2 * losses.mean() - 1)
        test = P_VALUES[self.bound]
        certified = test(losses, limit, self.delta) <= self.delta
        if not certified and where is not None:
            needed = smallest_sample(limit, self.delta, best=best, test=test)
            raise BadInput(self._refusal(observed, len(testing), needed, where))
        return certified, observed

    def _refusal(self, observed: float, samples: int, needed: int, where: str) -> str:
        if samples < needed:
            return (
                f"{samples:,} test samples cannot certify {RISKS[self.risk]} <= {percent(self.alpha, 10)} with delta"
                f" {self.delta:g}: at least {needed:,} are needed even without a single loss, so record more"
            )
        return (
            f"the {RISKS[self.risk]} {where} is {percent(observed)} on {samples:,} samples, too near or above alpha"
            f" ({percent(self.alpha, 10)}) to be certified with delta {self.delta:g}: raise alpha above {observed:.4g},"
            " the budget or the number of samples"
        )


def loses_at_most(loss: float, before: np.ndarray, after: np.ndarray, delta: float) -> bool:
    """Return whether it is certain, up to delta, that no more accuracy is lost between two answers to every sample.

    The betting test of matched pairs: each answer is correct or not, and their differences are moved to [0, 1].
    """
    differences = (before.astype(np.float64) - after + 1) / 2
    return P_VALUES["betting"](differences, (1 + loss) / 2, delta) <= delta


def largest_loss(before: np.ndarray, after: np.ndarray, delta: float = 0.05) -> float:
    """Return how much accuracy is lost at most, up to delta, between two answers to every sample, each correct or not.

    >>> largest_loss(np.ones(1000), np.arange(1000) > 1)
    0.004
    """
    steps = largest(0, LOSSES, lambda step: loses_at_most(1 - step / LOSSES, before, after, delta))
    return (LOSSES - steps) / LOSSES


def smallest_sample_for_loss(loss: float, delta: float) -> int | None:
    """Return how many samples `loses_at_most` needs if all answers are equally good; None where none suffice."""
    return smallest_sample((1 + loss) / 2, delta, best=0.5) if loss > 0 else None


def _with_risk(policy: Policy, network: Costs, testing: HeadOutputs, test: _RiskTest) -> Policy:
    """Return the policy, certified for its cost, with a guarantee on its risk as well."""
    _, observed = test.observe(policy, testing, where=f"at a mean cost <= {allowed_by(policy, network)}")
    assert policy.certificate is not None
    cost, both = policy.certificate, f"Both together: {percent(1 - 2 * test.delta, 10)} confidence."
    numbers: Numbers = {
        **cost.numbers,
        "alpha": test.alpha,
        "delta": 2 * test.delta,  # of both together
        test.risk: observed,
        "test samples": len(testing),
    }
    guarantee = f"{cost.guarantee} {test.sentence(observed)} {both}"
    assumption = same_distribution(len(testing), has_delta=True)
    if "most per sample" in cost.numbers:
        assumption += " " + capped(float(cost.numbers["most per sample"]), policy.unit)
    return certified(policy, Certificate(f"{cost.contract}, {test.risk}", guarantee, assumption, numbers))


def _cheapest(fit: Fit, network: Costs, fitting: HeadOutputs, testing: HeadOutputs, test: _RiskTest) -> Policy:
    """Return the cheapest policy of a fixed sequence, from the full network down, up to the first that fails."""
    terms: dict[str, Any] = {"num_exits": len(network), "unit": network.unit, "score": fitting.score}
    terms |= {"exits": fitting.exits, "full_cost": network.full, "fingerprint": fitting.fingerprint}
    terms["sample_shape"] = fitting.sample_shape
    full = ExitAt(costs=(network.full,), open_exits=(len(network) - 1,), method="full network", **terms)
    _, observed = test.observe(full, testing, where="of the full network")
    accepted: list[tuple[float, Policy, float]] = [(network.full, full, observed)]  # mean cost, policy, risk
    for amount in np.linspace(network.cumulative()[-1], network.cumulative()[0], BUDGETS):
        try:
            policy = fit(float(amount), fitting)
        except BudgetTooSmall:  # the calls of these samples cost a little more than on average
            break
        is_certified, observed = test.observe(policy, testing)
        if not is_certified:
            break
        accepted.append((replay(policy, testing).mean_cost, policy, observed))
    spent, chosen, observed = min(accepted, key=lambda each: each[0])  # the guarantee holds for all of them at once
    numbers: Numbers = {
        "alpha": test.alpha,
        "delta": test.delta,
        test.risk: observed,
        "samples": len(testing),
        "mean cost": spent,
        "bound": test.bound,
        "basis": f"fixed-sequence testing from the full network down, {test.bound.replace('_', '-')} bound",
    }
    sentence = f"{test.sentence(observed)} Mean cost in the test: {percent(spent / network.full)} of the full network."
    assumption = same_distribution(len(testing), has_delta=True)
    return certified(chosen, Certificate(test.risk, sentence, assumption, numbers))
