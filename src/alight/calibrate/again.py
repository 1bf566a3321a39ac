"""Calibrate on another table as a policy was calibrated: the same method, budget, exits and guarantee."""

import inspect
from dataclasses import replace
from functools import partial
from typing import Any

from alight.calibrate.combinations import COMBINE, combined
from alight.calibrate.cost_guarantees import CONTRACTS
from alight.calibrate.crossval import of_network
from alight.calibrate.problem import Method
from alight.calibrate.risk_guarantees import RISKS, certified_risk
from alight.costs import Amount, Costs
from alight.errors import BadInput
from alight.outputs import HeadOutputs
from alight.policies.policy import Certificate, ExitAt, Policy

GIVEN = ("slack", "spend_all")  # settings of a policy that were given to its method; others were chosen by it
SWITCH = {"true": True, "false": False}


def recalibrate(policy: Policy, costs: Costs, labelled: HeadOutputs, budget: Amount | None = None) -> Policy:
    """Return a policy for another recording of the open exits of a network, fitted as this one was.

    For a network whose scores have moved, as one of lower precision. `costs` and `labelled` have an entry for each open
    exit of the policy and for no other; where costs have changed, the budget changes as that of the last open exit,
    unless one is given. Ties are drawn by a new salt.

    >>> from alight import calibrate, recordings
    >>> labelled, test, costs = recordings.load()
    >>> policy = calibrate.certified_mean(calibrate.eero)(costs, "50%", labelled)
    >>> again = recalibrate(policy, costs, test)
    >>> again.certificate.contract, again.open_exits == policy.open_exits, again.thresholds == policy.thresholds
    ('mean', True, False)
    """
    if isinstance(policy, ExitAt):
        return replace(policy, fingerprint=labelled.fingerprint, costs=tuple(costs.cumulative().tolist()))
    times = float(costs.cumulative()[-1]) / policy.costs[-1]  # as expensive as before
    if budget is None and policy.budget is not None:
        budget = Amount(times * policy.budget)
    method = _certified(_method(policy), policy.certificate)
    full = costs.full if policy.full_cost is None else times * policy.full_cost
    return of_network(method(costs, budget, labelled), policy.open_exits, policy.num_exits, full, policy.exits)


def _method(policy: Policy) -> Method:
    from alight.calibrate import METHODS  # which names all methods, so after them

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
    if contract == "stream":
        return CONTRACTS[contract](method, alarm_rate=numbers["alarm_rate"], horizon=numbers["horizon"])
    return CONTRACTS[contract](method, **(delta if contract == "probability" else {}))
