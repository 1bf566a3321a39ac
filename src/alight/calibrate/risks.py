"""Promises on accuracy: the cheapest policy whose risk can be promised, or one whose cost and risk both can."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from alight.budgeting.betting import smallest_sample
from alight.calibrate.contracts import EXCHANGEABLE, P_VALUES, allowed_by, certified, certify_cost
from alight.calibrate.problem import Budget
from alight.costs import Costs
from alight.errors import BadInput, LabelsNeeded
from alight.outputs import HeadOutputs
from alight.policies.policy import ExitAt, Policy
from alight.policies.route import replay

Fit = Callable[[Budget, HeadOutputs], Policy]  # the method, ready to be fitted for any budget on any table

BUDGETS = 41  # members of a family of cheaper and cheaper policies
_NAMES = {
    "error": "error",
    "excess_error": "error above the last exit's",
    "disagreement": "disagreement with the last exit",
}


def certify_risk(
    fit: Fit,
    network: Costs,
    budget: Budget | None,
    labelled: HeadOutputs,
    contract: str | None,
    delta: float,
    risk: str,
    alpha: float | None,
    bound: str,
    seed: int,
) -> Policy:
    """The cheapest policy whose risk can be promised; or the one of a budget, if its cost and risk both can."""
    if risk not in ("error", "excess_error", "disagreement"):
        raise BadInput(f"there is no risk {risk!r}: choose error, excess_error or disagreement")
    if alpha is None or not 0 < alpha < 1:
        raise BadInput(f"alpha {alpha} must lie inside (0, 1): 0.01 allows one point")
    if risk != "disagreement" and labelled.labels is None:
        raise LabelsNeeded(f"a promise on {risk}")
    rng = np.random.default_rng(seed)
    if budget is None:
        if contract is not None:
            raise BadInput(f"the contract {contract!r} on cost needs a budget: give one, or leave the contract out")
        fitting, testing = labelled.split(0.5, rng)
        return _cheapest(fit, network, fitting, testing, delta, risk, alpha, bound)
    fitting, rest = labelled.split(1 / 3, rng)
    certifying, testing = rest.split(0.5, rng)
    share = delta / 2 if contract == "probability" else delta
    if contract in ("batch", "stream"):
        raise BadInput(f"a promise on {risk} goes with contract 'mean' or 'probability', not {contract!r}")
    policy = certify_cost(fit(budget, fitting), fitting, certifying, contract or "mean", share, bound)
    p_value, observed = _risk_test(policy, testing, risk, alpha, share, bound)
    if p_value > share:
        raise BadInput(_too_much(risk, alpha, observed, len(testing), share, bound, f"at {allowed_by(policy)}"))
    on_risk = (
        f"with probability {1 - share:.4g} its {_NAMES[risk]} is at most {alpha:g} ({len(testing):,} further samples)"
    )
    assert policy.certificate is not None
    numbers = dict(policy.certificate.numbers) | {"alpha": alpha, risk: observed, "test samples": len(testing)}
    certificate = replace(
        policy.certificate,
        contract=f"{policy.certificate.contract}, {risk}",
        promise=f"{policy.certificate.promise} And {on_risk}.",
        assumption=policy.certificate.assumption or EXCHANGEABLE,
        numbers=numbers,
    )
    return replace(policy, certificate=certificate)


def _cheapest(
    fit: Fit,
    network: Costs,
    fitting: HeadOutputs,
    testing: HeadOutputs,
    delta: float,
    risk: str,
    alpha: float,
    bound: str,
) -> Policy:
    """The cheapest policy of a fixed sequence, from the full network down, up to the first that fails the test."""
    full = ExitAt(
        costs=(network.full,),
        open_exits=(len(network) - 1,),
        num_exits=len(network),
        unit=network.unit,
        score=fitting.score,
        method="full network",
    )
    p_value, observed = _risk_test(full, testing, risk, alpha, delta, bound)
    if p_value > delta:
        raise BadInput(_too_much(risk, alpha, observed, len(testing), delta, bound, "of the full network"))
    accepted: list[tuple[float, Policy, float]] = [(network.full, full, observed)]  # mean cost, policy, risk
    for amount in np.linspace(network.cumulative()[-1], network.cumulative()[0], BUDGETS):
        policy = fit(float(amount), fitting)
        p_value, observed = _risk_test(policy, testing, risk, alpha, delta, bound)
        if p_value > delta:
            break
        accepted.append((replay(policy, testing).mean_cost, policy, observed))
    spent, chosen, observed = min(accepted, key=lambda each: each[0])  # the promise holds for all of them at once
    numbers: dict[str, float | str] = {
        "alpha": alpha,
        "delta": delta,
        risk: observed,
        "samples": len(testing),
        "mean cost": spent,
        "bound": bound,
    }
    promise = (
        f"With probability {1 - delta:.4g} over the calibration data, its {_NAMES[risk]} on new samples is at most"
        f" {alpha:g} ({observed:.4g} observed); it spent {spent / network.full:.1%} of the plain network."
    )
    how = (
        f"Fixed-sequence testing from the full network down with the {bound.replace('_', '-')} bound on"
        f" {len(testing):,} samples. {EXCHANGEABLE}"
    )
    return certified(chosen, risk, promise, how, numbers)


def _risk_test(
    policy: Policy, testing: HeadOutputs, risk: str, alpha: float, delta: float, bound: str
) -> tuple[float, float]:
    """P-value of the claim that the risk is above alpha, and the risk observed."""
    decided, last = replay(policy, testing).predictions, testing.predictions[:, -1]
    if risk == "disagreement":
        losses, limit = (decided != last).astype(np.float64), alpha
    else:
        wrong = (decided != testing.labels).astype(np.float64)
        losses, limit = wrong, alpha
        if risk == "excess_error":  # paired differences in [-1, 1], moved to [0, 1]
            losses, limit = (wrong - (last != testing.labels) + 1) / 2, (alpha + 1) / 2
    observed = float(losses.mean()) if risk != "excess_error" else float(2 * losses.mean() - 1)
    return P_VALUES[bound](losses, limit, delta), observed


def _too_much(risk: str, alpha: float, observed: float, samples: int, delta: float, bound: str, where: str) -> str:
    paired = risk == "excess_error"
    needed = smallest_sample(
        (1 + alpha) / 2 if paired else alpha, delta, best=0.5 if paired else 0.0, test=P_VALUES[bound]
    )
    if samples < needed:
        return (
            f"{samples:,} test samples cannot certify {_NAMES[risk]} <= {alpha:g} with delta {delta:g}:"
            f" at least {needed:,} are needed even without a single loss, so record more"
        )
    return (
        f"the {_NAMES[risk]} {where} is {observed:.4g} on {samples:,} samples, too near or above alpha {alpha:g} to be"
        f" certified with delta {delta:g}: raise alpha above {observed:.4g}, the budget or the number of samples"
    )
