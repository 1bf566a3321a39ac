"""Contracts: what is promised about a policy's cost, or about its accuracy, with finite samples.

    mean           E[cost of a new sample] <= budget: the Dirichlet mean, or conformal risk control
    probability    with probability 1 - delta over the data, E[cost] <= budget: the Dirichlet quantile, or betting
    batch          every batch costs at most its size times the budget: a Quota, by ranks inside the batch
    stream         t samples cost at most t * budget and one sample more, at every t: a Paced policy

The method is fitted once, on one part of the data, and certified on the other. Methods that plan exit rates and meet
them with survivor thresholds are certified by the exact law of the exit shares; others by a family that moves all
thresholds of the fitted policy together, so that costs are nested.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, Literal, TypeGuard

import numpy as np

from alight.budgeting.betting import betting_p_value, hoeffding_bentkus_p_value, smallest_sample
from alight.budgeting.bounds import cost_quantile, exact_plan, expected_cost, overspend_probability, share_law
from alight.budgeting.rates import tilted_rates
from alight.budgeting.thresholds import passing_counts, survivor_thresholds
from alight.calibrate.task import AnyCosts, Budget, Floats
from alight.costs import Costs, as_costs
from alight.errors import BadInput, LabelsNeeded
from alight.outputs import HeadOutputs
from alight.policies.paced import Paced
from alight.policies.policy import Certificate, ExitAt, Mixture, Patience, Policy, Streak, Threshold
from alight.policies.quota import Quota
from alight.policies.route import replay

Contract = Literal["mean", "probability", "batch", "stream"]
Risk = Literal["error", "excess_error", "disagreement"]
Bound = Literal["betting", "hoeffding_bentkus"]

LEVELS = 401  # members of a family of lowered policies: each moves thresholds by half a percent of the samples
BUDGETS = 41  # members of a family of cheaper and cheaper policies
WINDOW = 400  # scores that a paced policy remembers of each exit
EXCHANGEABLE = "New samples are assumed to be like the calibration's (exchangeable)."


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
    """
    if not 0 < delta < 1:
        raise BadInput(f"delta {delta:g} must lie inside (0, 1): 0.05 promises with 95 % confidence")
    if bound not in _P_VALUES:
        raise BadInput(f"there is no bound {bound!r}: choose one of {', '.join(_P_VALUES)}")
    if contract not in (None, "mean", "probability", "batch", "stream"):
        raise BadInput(f"there is no contract {contract!r}: choose mean, probability, batch or stream")
    if risk is not None:
        fit = _Fit(method, as_costs(costs), own)
        return _certify_risk(fit, budget, labelled, contract, delta, risk, alpha, bound, seed)
    if budget is None:
        raise BadInput("a contract on cost needs a budget: give one, or a risk and alpha for the cheapest policy")
    if contract == "batch":
        return _batch(method(costs, budget, labelled, unlabelled, **own))
    fitting, certifying = (
        labelled.split(0.5, np.random.default_rng(seed)) if unlabelled is None else (labelled, unlabelled)
    )
    policy = method(costs, budget, fitting, **own)
    if contract == "stream":
        return _stream(policy, certifying, alarm_rate, horizon, seed)
    return _certify_cost(policy, fitting, certifying, contract or "mean", delta, bound)


class _Fit:
    """The method, ready to be fitted for any budget."""

    def __init__(self, method: Callable[..., Policy], network: Costs, own: Mapping[str, Any]):
        self.method, self.network, self.own = method, network, own

    def __call__(self, budget: Budget, table: HeadOutputs) -> Policy:
        return self.method(self.network, budget, table, **self.own)


def _certify_cost(
    policy: Policy, fitting: HeadOutputs, certifying: HeadOutputs, contract: str, delta: float, bound: str
) -> Policy:
    """The policy, made cheaper or dearer until its cost can be promised."""
    budget = _budget(policy)
    if policy.costs[-1] <= budget or isinstance(policy, ExitAt):
        promise = f"No sample costs more than {policy.costs[-1]:.4g}, so {_allowed(policy)} is kept whatever comes."
        return _certified(policy, contract, promise, "", {"budget": budget})
    if _plans_rates(policy):
        return _by_law(policy, certifying, contract, delta)
    return _by_family(policy, fitting, certifying, contract, delta, bound)


def _by_law(policy: Threshold, certifying: HeadOutputs, contract: str, delta: float) -> Policy:
    """Rates met by survivor thresholds on the certifying table, whose exit shares follow a Dirichlet law."""
    costs, budget, samples = np.array(policy.costs), _budget(policy), len(certifying)
    rates = np.array(policy.exit_rates)
    if contract == "probability":
        rates = _safe_rates(rates, costs, budget, samples, delta)
    law = share_law(passing_counts(rates, samples), samples)
    numbers: dict[str, float | str] = {
        "budget": budget,
        "samples": samples,
        "expected cost": expected_cost(costs, law),
        "overspend probability": overspend_probability(costs, law, budget),
        "law": "Dirichlet(" + ", ".join(map(str, law.tolist())) + ")",
    }
    if law[0] == samples + 1:
        return _first_exit_only(policy, contract, delta, numbers, _smallest_for_law(policy, contract, delta))
    thresholds = survivor_thresholds(_through(policy, certifying).scores[:, list(policy.open_exits)], rates)
    moved = replace(
        policy,
        thresholds=tuple(thresholds.values.tolist()),
        tie_shares=tuple(thresholds.tie_shares.tolist()),
        exit_rates=tuple(rates.tolist()),
    )
    if contract == "mean":
        promise = f"A new sample costs at most {_allowed(policy)} on average, over calibration data and sample."
    else:
        numbers["delta"] = delta
        promise = (
            f"With probability {1 - delta:.4g} over the calibration data, new samples cost at most"
            f" {_allowed(policy)} on average."
        )
    how = (
        f"Exact law of the exit shares, {samples:,} samples; ties are broken by a hash, taken as random. {EXCHANGEABLE}"
    )
    return _certified(moved, contract, promise, how, numbers)


def _by_family(
    policy: Policy, fitting: HeadOutputs, certifying: HeadOutputs, contract: str, delta: float, bound: str
) -> Policy:
    """The dearest member of a nested family of policies that can be certified."""
    costs, budget, samples = np.array(policy.costs), _budget(policy), len(certifying)
    reference = _through(policy, fitting).scores
    levels = np.linspace(1, -1, LEVELS)  # from everyone leaving at once to nobody, chosen before certifying

    def spent(level: float) -> Floats:
        return replay(lowered(policy, level, reference), certifying).spent

    span, low = costs[-1] - costs[0], costs[0]
    if contract == "mean":
        accepted = _last(LEVELS, lambda index: (spent(levels[index]).sum() + costs[-1]) / (samples + 1) <= budget)
        numbers: dict[str, float | str] = {"budget": budget, "samples": samples}
        promise = f"A new sample costs at most {_allowed(policy)} on average, over calibration data and sample."
        how = f"Conformal risk control on {samples:,} samples. {EXCHANGEABLE}"
        smallest = math.ceil((costs[-1] - budget) / max(budget - costs[0], 1e-300))
    else:
        allowed = float((budget - low) / span)
        test = _P_VALUES[bound]
        accepted = -1
        while accepted + 1 < LEVELS and test((spent(levels[accepted + 1]) - low) / span, allowed, delta) <= delta:
            accepted += 1  # a fixed sequence: each is tested at delta, up to the first that fails
        numbers = {"budget": budget, "samples": samples, "delta": delta, "bound": bound}
        promise = (
            f"With probability {1 - delta:.4g} over the calibration data, new samples cost at most"
            f" {_allowed(policy)} on average."
        )
        how = f"Fixed-sequence testing with the {bound.replace('_', '-')} bound on {samples:,} samples. {EXCHANGEABLE}"
        smallest = smallest_sample(allowed, delta) if allowed > 0 else 0
    if accepted < 0 or levels[accepted] == 1:
        return _first_exit_only(policy, contract, delta, numbers, smallest)
    member = lowered(policy, float(levels[accepted]), reference)
    numbers |= {"level": float(levels[accepted]), "mean cost": float(spent(levels[accepted]).mean())}
    return _certified(member, contract, promise, how, numbers)


def lowered(policy: Policy, level: float, scores: Floats) -> Policy:
    """The policy with all its thresholds moved together: 1 lets everyone leave at once, 0 is the policy, -1 nobody.

    A threshold moves along the scores of its exit in a table: a level of 0.1 takes a tenth off the share of samples
    below it. Costs are nested: no sample leaves later at a higher level.
    """
    if level == 0 or isinstance(policy, ExitAt):
        return policy
    if isinstance(policy, Threshold):
        columns = [scores[:, exit_index] for exit_index in policy.open_exits]
        moved = [_moved(value, column, level) for value, column in zip(policy.thresholds, columns, strict=False)]
        ties = [
            share if value == old else 1.0
            for share, value, old in zip(policy.tie_shares, moved, policy.thresholds, strict=True)
        ]
        return replace(policy, thresholds=tuple(moved), tie_shares=tuple(ties), exit_rates=())
    if isinstance(policy, Streak):
        pooled = scores[:, list(policy.open_exits)].ravel()
        return replace(policy, threshold=_moved(policy.threshold, pooled, level))
    if isinstance(policy, Patience):
        return _patience(policy, _towards(policy.patience, level, len(policy.costs)))
    if isinstance(policy, Mixture):
        first, second = policy.first, policy.second
        if isinstance(first, Patience) and isinstance(second, Patience):
            length = policy.share * first.patience + (1 - policy.share) * second.patience
            return _patience(first, _towards(length, level, len(policy.costs)))
        return replace(policy, first=lowered(first, level, scores), second=lowered(second, level, scores))
    raise BadInput(f"a {type(policy).__name__} has no thresholds to lower: certify another method")


def _towards(value: float, level: float, most: float) -> float:
    return value * (1 - level) if level > 0 else value - level * (most - value)


def _moved(threshold: float, column: Floats, level: float) -> float:
    """The threshold below which that much less, or more, of the column lies."""
    below = _towards(float((column < threshold).mean()), level, 1.0)
    rank = math.floor(below * len(column) + 1e-9)
    if level >= 1 or rank <= 0:
        return -math.inf
    return math.inf if rank >= len(column) else float(np.partition(column, rank)[rank])


def _patience(policy: Patience, length: float) -> Policy:
    """Patience of any length: a mixture of the two whole ones beside it."""
    whole, part = math.floor(length), length - math.floor(length)
    longer, shorter = replace(policy, patience=whole + 1), replace(policy, patience=whole)
    carried = _carried(policy) | {"settings": {"patience": whole, "share of next": part}}
    return Mixture(longer, shorter, part, **carried)


def _batch(policy: Policy) -> Policy:
    """The rates of the policy, met by rank inside each batch."""
    if isinstance(policy, ExitAt):
        promise = f"No sample costs more than {policy.costs[-1]:.4g}, so {_allowed(policy)} is kept whatever comes."
        return _certified(policy, "batch", promise, "", {"budget": _budget(policy)})
    if not policy.exit_rates:
        raise BadInput(
            f"the contract 'batch' needs planned exit rates and {policy.method} plans none: use eero, geometric,"
            " gaussian, two_exits or search"
        )
    promise = f"Every batch costs at most its size times {_allowed(policy)}, whatever it holds."
    how = "By ranks inside the batch: no assumption on the data."
    return _certified(Quota(**_carried(policy)), "batch", promise, how, {"budget": _budget(policy)})


def _stream(policy: Policy, certifying: HeadOutputs, alarm_rate: float, horizon: int, seed: int) -> Policy:
    """The shares of the policy, kept along a stream."""
    table, costs, samples = _through(policy, certifying), np.array(policy.costs), len(certifying)
    if len(costs) == 1:
        return _batch(policy)
    rates = np.array(policy.exit_rates or replay(policy, certifying).exit_shares[list(policy.open_exits)])
    scores = table.scores[:, list(policy.open_exits)]
    thresholds = survivor_thresholds(scores, rates)
    law = share_law(passing_counts(rates, samples), samples)
    paced = Paced(
        thresholds=tuple(thresholds.values.tolist()),
        tie_shares=tuple(thresholds.tie_shares.tolist()),
        recent=_windows(scores, thresholds.values, np.random.default_rng(seed)),
        expected=max(cost_quantile(costs, law, 1 - alarm_rate / 2), float(costs[0] + 1e-3 * (costs[-1] - costs[0]))),
        alarm_rate=alarm_rate,
        horizon=horizon,
        **_carried(policy) | {"exit_rates": tuple(rates.tolist())},
    )
    promise = (
        f"At every moment, t samples have cost at most t times {_allowed(policy)} plus {costs[-1]:.4g}, whatever they"
        f" are; within {horizon:,} samples like the calibration's, the alarm is raised with probability at most"
        f" {alarm_rate:g}."
    )
    how = f"By counting: no assumption on the data but for the alarm, set on {samples:,} exchangeable samples."
    numbers: dict[str, float | str] = {
        "budget": _budget(policy),
        "ahead at most": float(costs[-1]),
        "alarm rate": alarm_rate,
        "horizon": horizon,
        "samples": samples,
        "expected cost": paced.expected,
    }
    return _certified(paced, "stream", promise, how, numbers)


def _windows(scores: Floats, thresholds: Floats, rng: np.random.Generator) -> tuple[tuple[float, ...], ...]:
    """Scores of the samples waiting at each exit but the last, at most WINDOW of them, in random order."""
    windows, waiting = [], scores
    for exit_index, threshold in enumerate(thresholds):
        column = (waiting if len(waiting) else scores)[:, exit_index]
        windows.append(tuple(rng.permutation(column)[:WINDOW].tolist()))
        waiting = waiting[waiting[:, exit_index] < threshold]
    return tuple(windows)


def _certify_risk(
    fit: _Fit,
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
        fitting, testing = labelled.split(0.5, rng)
        return _cheapest(fit, fitting, testing, delta, risk, alpha, bound)
    fitting, rest = labelled.split(1 / 3, rng)
    certifying, testing = rest.split(0.5, rng)
    share = delta / 2 if contract == "probability" else delta
    if contract in ("batch", "stream"):
        raise BadInput(f"a promise on {risk} goes with contract 'mean' or 'probability', not {contract!r}")
    policy = _certify_cost(fit(budget, fitting), fitting, certifying, contract or "mean", share, bound)
    p_value, observed = _risk_test(policy, testing, risk, alpha, share, bound)
    if p_value > share:
        raise BadInput(_too_much(risk, alpha, observed, len(testing), share, f"at {_allowed(policy)}"))
    on_risk = (
        f"with probability {1 - share:.4g} its {_NAMES[risk]} is at most {alpha:g} ({len(testing):,} further samples)"
    )
    assert policy.certificate is not None
    numbers = dict(policy.certificate.numbers) | {"alpha": alpha, risk: observed, "test samples": len(testing)}
    certificate = replace(
        policy.certificate,
        contract=f"{policy.certificate.contract}, {risk}",
        promise=f"{policy.certificate.promise} And {on_risk}.",
        numbers=numbers,
    )
    return replace(policy, certificate=certificate)


def _cheapest(
    fit: _Fit, fitting: HeadOutputs, testing: HeadOutputs, delta: float, risk: str, alpha: float, bound: str
) -> Policy:
    """The last policy of a fixed sequence, from the full network to cheaper ones, that passes the test."""
    network, full = fit.network, len(fit.network) - 1
    accepted: Policy = ExitAt(
        costs=(network.plain,),
        open_exits=(full,),
        num_exits=len(network),
        unit=network.unit,
        score=fitting.score,
        method="full network",
    )
    p_value, observed = _risk_test(accepted, testing, risk, alpha, delta, bound)
    if p_value > delta:
        raise BadInput(_too_much(risk, alpha, observed, len(testing), delta, "of the full network"))
    cheapest, dearest = float(network.cumulative()[0]), float(network.cumulative()[-1])
    for amount in np.linspace(dearest, cheapest, BUDGETS):
        policy = fit(float(amount), fitting)
        p_value, risk_now = _risk_test(policy, testing, risk, alpha, delta, bound)
        if p_value > delta:
            break
        if policy.costs != accepted.costs or replay(policy, testing).mean_cost <= replay(accepted, testing).mean_cost:
            accepted, observed = policy, risk_now
    spent = replay(accepted, testing).mean_cost
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
        f" {alpha:g} ({observed:.4g} observed); it spent {spent / network.plain:.1%} of the plain network."
    )
    how = (
        f"Fixed-sequence testing from the full network down with the {bound.replace('_', '-')} bound on"
        f" {len(testing):,} samples. {EXCHANGEABLE}"
    )
    return _certified(accepted, risk, promise, how, numbers)


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
    return _P_VALUES[bound](losses, limit, delta), observed


def _too_much(risk: str, alpha: float, observed: float, samples: int, delta: float, where: str) -> str:
    needed = smallest_sample(alpha if risk != "excess_error" else (1 + alpha) / 2, delta)
    if samples < needed:
        return (
            f"{samples:,} test samples cannot certify {_NAMES[risk]} <= {alpha:g} with delta {delta:g}:"
            f" at least {needed:,} are needed even without a single loss, so record more"
        )
    return (
        f"the {_NAMES[risk]} {where} is {observed:.4g} on {samples:,} samples, too near or above alpha {alpha:g} to be"
        f" certified with delta {delta:g}: raise alpha above {observed:.4g}, the budget or the number of samples"
    )


def _first_exit_only(
    policy: Policy, contract: str, delta: float, numbers: dict[str, float | str], smallest: int
) -> Policy:
    """Everyone at the first exit: all that so few samples can certify."""
    carried = _carried(policy) | {"open_exits": policy.open_exits[:1], "costs": policy.costs[:1], "exit_rates": (1.0,)}
    promise = (
        f"Everyone leaves at exit {policy.open_exits[0]}, which {_allowed(policy)} always allows: nothing dearer can be"
        f" certified with {numbers['samples']:,} samples and delta {delta:g}; {smallest:,} samples or more would do."
    )
    return _certified(ExitAt(**carried), contract, promise, "", numbers | {"smallest sample": smallest})


def _smallest_for_law(policy: Policy, contract: str, delta: float) -> int:
    """The smallest number of samples with which some sample may pass the first exit."""
    rates, costs, budget = np.array(policy.exit_rates), np.array(policy.costs), _budget(policy)

    def enough(samples: int) -> bool:
        safe = _safe_rates(rates, costs, budget, samples, delta) if contract == "probability" else rates
        return bool(share_law(passing_counts(safe, samples), samples)[0] <= samples)

    high = 2
    while not enough(high):
        high *= 2
        if high > 10**9:
            return high
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _safe_rates(rates: Floats, costs: Floats, budget: float, samples: int, delta: float) -> Floats:
    """The rates, tilted towards cheap exits until overspending has probability delta."""
    return np.array(_safe_plan(tuple(rates.tolist()), tuple(costs.tolist()), budget, samples, delta))


@lru_cache(maxsize=64)  # a tenth of a second, and often asked again for the same plan
def _safe_plan(
    planned_rates: tuple[float, ...], cumulative: tuple[float, ...], budget: float, samples: int, delta: float
) -> tuple[float, ...]:
    rates, costs = np.array(planned_rates), np.array(cumulative)
    cheapest, planned = float(costs[rates > 0][0]), float(rates @ costs)

    def plan(amount: float) -> Floats:
        return rates if amount >= planned else tilted_rates(rates, costs, max(amount, cheapest))

    return tuple(exact_plan(plan, costs, budget, samples, delta).tolist())


def _plans_rates(policy: Policy) -> TypeGuard[Threshold]:
    """Whether the policy meets planned rates by survivor thresholds, so that the exact law holds."""
    return isinstance(policy, Threshold) and bool(policy.exit_rates) and policy.settings.get("thresholds") != "marginal"


def _through(policy: Policy, table: HeadOutputs) -> HeadOutputs:
    return policy.lens.through(table) if policy.lens else table


def _carried(policy: Policy) -> dict[str, Any]:
    """What a policy carries beside its rule."""
    return {each.name: getattr(policy, each.name) for each in fields(Policy)}


def _budget(policy: Policy) -> float:
    if policy.budget is None:
        raise BadInput(
            f"the method {policy.method or 'given'} made a policy without a budget: a contract on cost needs one"
        )
    return policy.budget


def _allowed(policy: Policy) -> str:
    return f"the budget of {_budget(policy):.4g}{policy.unit and ' ' + policy.unit}"


def _certified(policy: Policy, contract: str, promise: str, assumption: str, numbers: dict[str, float | str]) -> Policy:
    if policy.unit in ("ms", "J"):
        assumption = f"{assumption} The promise is about the measured costs, not about the clock or the meter.".strip()
    return replace(policy, certificate=Certificate(contract, promise, assumption, numbers))


def _last(count: int, holds: Callable[[int], bool]) -> int:
    """The last index for which it holds, -1 for none; once it fails it fails for all after."""
    low, high = -1, count - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


_NAMES = {
    "error": "error",
    "excess_error": "error above the last exit's",
    "disagreement": "disagreement with the last exit",
}
_P_VALUES: dict[str, Callable[[Floats, float, float], float]] = {
    "betting": betting_p_value,
    "hoeffding_bentkus": lambda values, bound, _: hoeffding_bentkus_p_value(values, bound),
}
