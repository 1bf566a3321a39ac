"""Calibrate on another table as a policy was calibrated: the same method, budget, exits and guarantee."""

import inspect
from dataclasses import replace
from functools import partial
from typing import Any

from alight.calibrate.combinations import COMBINE, combined
from alight.calibrate.cost_guarantees import CONTRACTS
from alight.calibrate.problem import Method
from alight.calibrate.risk_guarantees import RISKS, certified_risk
from alight.costs import Amount, Costs
from alight.display import percent
from alight.errors import BadInput
from alight.outputs import HeadOutputs
from alight.policies.policy import Certificate, ExitAt, Policy

GIVEN = ("slack", "spend_all")  # settings of a policy that were given to its method; others were chosen by it
SWITCH = {"true": True, "false": False}


def recalibrate(policy: Policy, costs: Costs, labelled: HeadOutputs, budget: Amount | None = None) -> Policy:
    """Return a policy for another recording of the open exits of a network, fitted as this one was.

    For a network whose scores have moved, as one of lower precision. `costs` and `labelled` have an entry for each open
    exit of the policy and for no other; where costs have changed, the budget changes as that of the last open exit,
    unless one is given. A guarantee is issued anew, or refused: none is carried over. Ties are drawn by a new salt.

    >>> from alight import calibrate, recordings
    >>> labelled, test, costs = recordings.load()
    >>> policy = calibrate.certified_mean(calibrate.eero)(costs, "50%", labelled)
    >>> again = recalibrate(policy, costs, test)
    >>> again.certificate.contract, again.open_exits == policy.open_exits, again.thresholds == policy.thresholds
    ('mean', True, False)
    """
    _check_reference(policy)
    times = float(costs.cumulative()[-1]) / policy.costs[-1]  # as expensive as before
    full = costs.full if policy.full_cost is None else times * policy.full_cost
    if budget is None and policy.budget is not None:
        share = policy.budget / policy.costs[-1]  # 1 exactly, where they are equal
        budget = Amount(share * float(costs.cumulative()[-1]))
    if policy.certificate is None and isinstance(policy, ExitAt):  # nothing is fitted
        own: dict[str, Any] = {"costs": tuple(costs.cumulative().tolist()), "budget": budget, "full_cost": full}
        return replace(policy, fingerprint=labelled.fingerprint, sample_shape=labelled.sample_shape, **own)
    if policy.certificate is not None and policy.certificate.contract in RISKS:
        budget = None  # the cheapest policy of this risk was wanted, whatever it costs
    made = _certified(_method(policy), policy.certificate)(costs, budget, labelled)
    made = replace(made, method=policy.method) if isinstance(policy, ExitAt) else made
    made = replace(made, certificate=_with_percentage_of(full, costs.full, made))
    return made.renumbered(policy.open_exits, num_exits=policy.num_exits, exits=policy.exits, full_cost=full)


def _with_percentage_of(full: float, part: float, policy: Policy) -> Certificate | None:
    """Return the certificate with the budget in percent of the full network, not of the part up to the last exit."""
    if policy.certificate is None or policy.budget is None:
        return policy.certificate
    old, new = (f"({percent(policy.budget / each)})" for each in (part, full))
    return replace(policy.certificate, guarantee=policy.certificate.guarantee.replace(old, new))


def _check_reference(policy: Policy) -> None:
    """Raise if a guarantee compares with the last exit of the network, and the policy closes it."""
    compared = policy.certificate is not None and policy.certificate.contract.endswith(("excess_error", "disagreement"))
    if compared and policy.open_exits[-1] + 1 < policy.num_exits:
        raise BadInput(
            f"the policy's guarantee compares with {policy.exit_names[-1]}, which it closes, so that a recording of its"
            f" {len(policy.open_exits)} open exits cannot show it: calibrate a policy that keeps the last exit open, or"
            " guarantee the error"
        )


def _method(policy: Policy) -> Method:
    from alight.calibrate import METHODS  # which names all methods, so after them

    if isinstance(policy, ExitAt):  # of the one exit that is open there is one policy
        return METHODS["best_single_exit"]
    name, _, combine = policy.method.partition(", ")
    if name not in METHODS or combine not in ("", *COMBINE):
        raise BadInput(
            f"the policy was fitted by {policy.method or 'hand'}, which is not a method that can be repeated: calibrate"
            " one by `alight calibrate`, or give a budget or a largest loss of accuracy instead of a policy"
        )
    method = METHODS[name]
    known = {*GIVEN} & {*inspect.signature(method).parameters} & {*policy.settings}
    options: dict[str, Any] = {key: policy.settings[key] for key in known}
    options = {key: SWITCH.get(value, value) for key, value in options.items()}
    method = partial(method, **options) if options else method
    return combined(method, combine) if combine else method


def _certified(method: Method, certificate: Certificate | None) -> Method:
    """Return the method with the guarantee of a certificate."""
    if certificate is None:
        return method
    contract, _, risk = certificate.contract.partition(", ")
    numbers: dict[str, Any] = {name.replace(" ", "_"): value for name, value in certificate.numbers.items()}
    delta = {"delta": numbers["delta"]} if "delta" in numbers else {}
    if risk or contract in RISKS:
        terms = {"risk": risk or contract, "alpha": numbers["alpha"], "cost": contract if risk else None, **delta}
        return certified_risk(method, **terms)
    if contract not in CONTRACTS:
        raise BadInput(f"the policy's guarantee, {certificate.contract!r}, cannot be issued again: calibrate another")
    given = {"probability": ("delta",), "stream": ("alarm_rate", "horizon")}.get(contract, ())
    return CONTRACTS[contract](method, **{name: numbers[name] for name in given if name in numbers})
