"""Contracts: what is promised about a policy's cost, or about its accuracy, with finite samples.

    mean           E[cost of a new sample] <= budget: the Dirichlet mean, or conformal risk control
    probability    with probability 1 - delta over the data, E[cost] <= budget: the Dirichlet quantile, or betting
    batch          every batch costs at most its size times the budget: a Quota, by ranks inside the batch
    stream         t samples cost at most t * budget and one sample more, at every t: a Paced policy

The method is fitted once, on one part of the data, and certified on the other. Methods that plan exit rates and meet
them with survivor thresholds are certified by the exact law of the exit shares; others by a family that moves all
thresholds of the fitted policy together, so that costs are nested.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from alight.calibrate.contracts import P_VALUES, as_paced, as_quota, certify_cost
from alight.calibrate.problem import AnyCosts, Budget
from alight.calibrate.risks import certify_risk
from alight.costs import as_costs
from alight.errors import BadInput
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy

Contract = Literal["mean", "probability", "batch", "stream"]
Risk = Literal["error", "excess_error", "disagreement"]
Bound = Literal["betting", "hoeffding_bentkus"]


def certify(
    method: Callable[..., Policy],
    costs: AnyCosts,
    budget: Budget | None,
    labelled: HeadOutputs,
    unlabelled: HeadOutputs | None = None,
    *,
    contract: Contract | None = None,
    delta: float = 0.05,
    risk: Risk | None = None,
    alpha: float | None = None,
    bound: Bound = "betting",
    alarm_rate: float = 0.01,
    horizon: int = 100_000,
    seed: int = 0,
    **own: Any,
) -> Policy:
    """A policy of the method with a promise, written in its `certificate`.

    Without `unlabelled`, the labelled table is split in two by `seed`: one part fits, the other certifies. With `risk`
    the promise is on accuracy, `alpha` at most: "error", "excess_error" over the last exit, or "disagreement" with it
    (no labels needed); then `budget=None` asks for the cheapest policy that can be certified. `own` goes to the method.

    >>> from alight import calibrate, recordings
    >>> labelled, test, costs = recordings.load()
    >>> print(certify(calibrate.eero, costs, "50%", labelled, contract="probability", delta=0.05).certificate.promise)
    With probability 0.95 over the calibration data, new samples cost at most the budget of 5.554e+08 FLOPs on average.
    """
    if not 0 < delta < 1:
        raise BadInput(f"delta {delta:g} must lie inside (0, 1): 0.05 promises with 95 % confidence")
    if bound not in P_VALUES:
        raise BadInput(f"there is no bound {bound!r}: choose one of {', '.join(P_VALUES)}")
    if contract not in (None, "mean", "probability", "batch", "stream"):
        raise BadInput(f"there is no contract {contract!r}: choose mean, probability, batch or stream")
    if labelled is unlabelled:
        raise BadInput(
            "the same table was given as labelled and unlabelled: what is fitted on it cannot be certified on it"
        )
    if risk is not None:
        if unlabelled is not None:
            raise BadInput("a promise on accuracy is tested on the labelled table alone: leave unlabelled out")
        network = as_costs(costs)

        def fit(amount: Budget, table: HeadOutputs) -> Policy:
            return method(network, amount, table, **own)

        return certify_risk(fit, network, budget, labelled, contract, delta, risk, alpha, bound, seed)
    if budget is None:
        raise BadInput("a contract on cost needs a budget: give one, or a risk and alpha for the cheapest policy")
    if contract == "batch":
        return as_quota(method(costs, budget, labelled, unlabelled, **own))
    rng = np.random.default_rng(seed)
    if unlabelled is None:
        fitting, certifying = labelled.split(0.5, rng)
    else:  # betting goes through the samples in order, and recordings are often sorted
        fitting, certifying = labelled, unlabelled.take(rng.permutation(len(unlabelled)))
    policy = method(costs, budget, fitting, **own)
    policy.check(certifying)
    if contract == "stream":
        return as_paced(policy, fitting, certifying, alarm_rate, horizon, seed)
    return certify_cost(policy, fitting, certifying, contract or "mean", delta, bound)
