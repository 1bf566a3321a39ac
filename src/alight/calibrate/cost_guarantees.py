"""Guarantees on cost: a method becomes one whose policies are certified from finite samples (METHODS, section 4).

    certified_mean           E[cost of a new sample] <= budget: the Dirichlet mean, or conformal risk control
    certified_probability    with probability 1 - delta over the data, E[cost] <= budget: Dirichlet quantile, or betting
    certified_batch          every batch costs at most its size times the budget: a Quota, by ranks inside the batch
    certified_stream         t samples cost at most t * budget and one sample more, at every t: a Paced policy

The method is fitted once, on one part of the data, and certified on the other: `unlabelled`, or without it half of
`labelled`. Methods that plan exit rates and meet them with survivor thresholds are certified by the exact law of the
exit shares; others by a family that moves all thresholds of the fitted policy together, so that costs are nested.

Ties and mixtures are decided by random numbers, which a salt and a sample's number give. Calibration has one salt and
the policy another, so that new samples draw as independently as those of the calibration did. A `seed` makes the salts
a hash of itself and of the table, so that a calibration can be repeated and others draw anew: with salts that were the
same for all tables, equal scores would be cut above or below the plan in every calibration. It also fixes the split.
Without a seed the salts are random and the split is always the same.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from alight.budgeting.bounds import (
    betting_p_value,
    check_delta,
    exact_plan,
    expected_cost,
    hoeffding_bentkus_p_value,
    largest,
    overspend_probability,
    share_law,
    smallest,
    smallest_sample,
)
from alight.budgeting.rates import Floats, tilted_rates
from alight.budgeting.thresholds import SALTS, passing_counts, survivor_thresholds, tie_range
from alight.calibrate.problem import AnyCosts, Budget, Method, check_tables
from alight.costs import Amount, Costs, as_costs
from alight.display import layer_label, percent, quantity
from alight.errors import BadInput, ShiftWarning
from alight.outputs import SAME, HeadOutputs
from alight.policies.limits import Quota, meter
from alight.policies.paced import Paced
from alight.policies.policy import Certificate, ExitAt, Mixture, Patience, Policy, Streak, Threshold
from alight.policies.route import replay
from alight.policies.shift import Shift, diagnose_shift

Bound = Literal["betting", "hoeffding_bentkus"]
Numbers = dict[str, float | str]
Certify = Callable[[Policy, Costs, HeadOutputs, HeadOutputs], Policy]  # the tables are of fitting and of certifying

LEVELS = 401  # members of a family of lowered policies: each moves thresholds by half a percent of the samples
COPIED = 0.1  # share of samples that repeat others, above which a guarantee is doubted
ROUNDING = 1e-9  # of prices times tokens, by which a call may seem to cost more than the most
RARELY = 10**6  # a plan by which one sample in more than so many passes the first exit is meant to let none pass
WINDOW = 400  # scores that a paced policy remembers of each exit
P_VALUES: dict[str, Callable[[Floats, float, float], float]] = {
    "betting": betting_p_value,
    "hoeffding_bentkus": lambda values, bound, _: hoeffding_bentkus_p_value(values, bound),
}


def certified_mean(method: Method, *, seed: int | None = None, max_costs: npt.ArrayLike | None = None) -> Method:
    """Return the method with a guarantee: a new sample costs at most the budget on average.

    The average is over calibration data, sample and salt; a `seed` makes it repeatable. For tables
    in which every call has its own cost, `max_costs` is the most that a call of each member can cost.

    >>> from alight import calibrate, recordings
    >>> labelled, test, costs = recordings.load()
    >>> certified_mean(calibrate.eero)(costs, "50%", labelled).certificate.contract
    'mean'
    """
    contract = CostContract("mean", max_costs=max_costs)
    return _certified(method, seed, partial(certify_cost, contract=contract), contract)


def certified_probability(
    method: Method,
    *,
    delta: float = 0.05,
    bound: Bound = "betting",
    seed: int | None = None,
    max_costs: npt.ArrayLike | None = None,
) -> Method:
    """Return the method with a guarantee: with probability 1 - delta over the data, the mean cost is within the budget.

    `bound` tests policies that plan no exit rates. `seed` makes it repeatable. For tables in
    which every call has its own cost, `max_costs` is the most that a call of each member can cost.

    >>> from alight import calibrate, recordings
    >>> labelled, test, costs = recordings.load()
    >>> policy = certified_probability(calibrate.eero, delta=0.05)(costs, "50%", labelled)
    >>> print(policy.certificate)
    Guaranteed with 95 % confidence: mean cost <= 555 MFLOPs (50 %).
    Assumes new samples come from the same distribution as the 2,500 calibration samples.
    Confidence counts all calibrations, whether a guarantee could be issued or not.
    """
    check_delta(delta)
    check_bound(bound)
    contract = CostContract("probability", delta, bound, max_costs)
    return _certified(method, seed, partial(certify_cost, contract=contract), contract)


def certified_batch(method: Method, *, max_costs: npt.ArrayLike | None = None) -> Method:
    """Return the method with a guarantee: every batch costs at most its size times the budget, whatever it holds.

    Exits get the shares that the method plans, or those that its policy has on the data that set its thresholds. For
    tables in which every call has its own cost, `max_costs` is the most that a call of each member can cost: the policy
    is then a `Metered` one.

    >>> from alight import calibrate, recordings
    >>> labelled, test, costs = recordings.load()
    >>> type(certified_batch(calibrate.eero)(costs, "50%", labelled)).__name__
    'Quota'
    """

    def calibrated(
        costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None, **options: object
    ) -> Policy:
        _check_given(budget, labelled, unlabelled)
        policy, network = method(costs, budget, labelled, unlabelled, **options), as_costs(costs)
        if labelled.costs is not None:
            return metered(policy, network, labelled, max_costs, "batch")
        if policy.costs[-1] <= budget_of(policy):
            return _always_kept(policy, network, "batch")
        rates = policy.exit_rates or _shares(policy, labelled if unlabelled is None else unlabelled)
        guarantee = f"Guaranteed for every batch: mean cost <= {allowed_by(policy, network)}."
        numbers: Numbers = {"budget": budget_of(policy), "basis": "ranks inside the batch"}
        certificate = Certificate("batch", guarantee, "No assumption on the data.", numbers)
        return certified(Quota(**policy.terms() | {"exit_rates": rates}), certificate)

    return calibrated


def certified_stream(
    method: Method,
    *,
    alarm_rate: float = 0.01,
    horizon: int = 100_000,
    seed: int | None = None,
    max_costs: npt.ArrayLike | None = None,
) -> Method:
    """Return the method with a guarantee: at every moment, t samples have cost at most t times the budget and one more.

    An alarm is raised when samples become more expensive, and with probability `alarm_rate` at most within `horizon`
    samples like the calibration's. `seed` makes it repeatable. For tables in which every call
    has its own cost, `max_costs` is the most that a call of each member can cost: the policy is then a `Metered` one,
    which has no alarm.

    >>> from alight import calibrate, recordings
    >>> labelled, test, costs = recordings.load()
    >>> type(certified_stream(calibrate.eero)(costs, "50%", labelled)).__name__
    'Paced'
    """
    options: dict[str, Any] = {"alarm_rate": alarm_rate, "horizon": horizon, "seed": seed or 0, "max_costs": max_costs}
    return _certified(method, seed, partial(_as_paced, **options))


CONTRACTS: dict[str, Callable[..., Method]] = {
    "mean": certified_mean,
    "probability": certified_probability,
    "batch": certified_batch,
    "stream": certified_stream,
}


def _certified(method: Method, seed: int | None, certify: Certify, contract: "CostContract | None" = None) -> Method:
    """Return the method, fitted on one part of the data and certified on the other."""
    if seed is not None and seed < 0:
        raise BadInput(f"seed {seed} must be a whole number >= 0, or None for a random salt")

    def calibrated(
        costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None, **options: object
    ) -> Policy:
        check_tables(as_costs(costs), labelled, unlabelled)
        _check_given(budget, labelled, unlabelled)
        rng = np.random.default_rng(seed or 0)
        if unlabelled is None:
            fitting, certifying = labelled.split(0.5, rng)
        else:  # betting goes through the samples in order, and recordings are often sorted
            fitting, certifying = labelled, unlabelled.take(rng.permutation(len(unlabelled)))
        calibrating, deployed, _ = drawn_salts(seed, certifying)
        aim: Budget = budget
        if contract is not None and fitting.costs is not None:
            aim = spend_to_aim_at(as_costs(costs), budget, fitting, len(certifying), contract)
        policy = replace(method(costs, aim, fitting, **options), salt=calibrating)
        if aim is not budget:
            policy = replace(policy, budget=as_costs(costs).budget(budget))
        policy.check(certifying)
        made = replace(certify(policy, as_costs(costs), fitting, certifying), salt=deployed)
        made = doubted(made, doubts_about_copies(labelled if unlabelled is None else unlabelled))
        return made if unlabelled is None else doubted(made, _doubts(diagnose_shift(labelled, unlabelled, [policy])))

    return calibrated


def drawn_salts(seed: int | None, table: HeadOutputs) -> tuple[int, int, int]:
    """Return salts for calibration, policy and test: from the seed and the table or, without a seed, at random."""
    known = None if seed is None else [seed, *table.digest()]
    calibrating, deployed, testing = np.random.default_rng(known).integers(SALTS, size=3).tolist()
    return calibrating, deployed, testing


def _doubts(shift: Shift) -> str:
    """Return why two tables are not of one distribution, "" where they may be."""
    differ = f"the labelled and the unlabelled samples differ at {shift}"
    return f"{differ}. Calibrate with samples drawn like those to come" if shift.is_significant else ""


def doubts_about_copies(table: HeadOutputs) -> str:
    """Return how many samples of a table are copies of others, "" where next to none are."""
    if (copied := table.copied_samples()) <= COPIED:
        return ""
    repeat = f"{percent(copied)} of the {len(table):,} samples repeat others exactly"
    return f"{repeat}, and a guarantee takes each for a draw of its own. Leave copies out"


def doubted(policy: Policy, doubts: str) -> Policy:
    """Return the policy, with a warning in its certificate if there are doubts about what the certificate assumes."""
    assert policy.certificate is not None
    if not doubts or not {"samples", "test samples"} & policy.certificate.numbers.keys():  # nothing is estimated
        return policy
    warnings.warn(f"Doubtful: {doubts}.", ShiftWarning, stacklevel=3)
    assumption = f"{policy.certificate.assumption} Doubtful: {doubts}."
    return replace(policy, certificate=replace(policy.certificate, assumption=assumption))


def _check_given(budget: Budget | None, labelled: HeadOutputs, unlabelled: HeadOutputs | None) -> None:
    if unlabelled is not None and (shared := labelled.shared_samples(unlabelled)) > SAME:
        raise BadInput(
            f"{percent(shared)} of the samples are in the labelled and in the unlabelled table: what is fitted on them"
            " cannot be certified on them; leave unlabelled out, or give other samples"
        )
    if budget is None:
        raise BadInput("a guarantee on cost needs a budget: give one, or certified_risk for the cheapest policy")


def check_bound(bound: str) -> None:
    """Check that there is such a bound."""
    if bound not in P_VALUES:
        raise BadInput(f"there is no bound {bound!r}: choose one of {', '.join(P_VALUES)}")


@dataclass(frozen=True)
class CostContract:
    """A guarantee on the mean cost: "mean", or "probability" with delta and the bound that tests it."""

    name: Literal["mean", "probability"]
    delta: float = 0.05
    bound: Bound = "betting"
    max_costs: npt.ArrayLike | None = None  # of a call of each member, where every call has its own cost

    def certificate(self, allowed: str, samples: int, numbers: Numbers) -> Certificate:
        """Return what is guaranteed when so much is allowed, by so many samples."""
        has_delta = self.name == "probability"
        how = "on average over calibration data and new samples"
        how = f"with {percent(1 - self.delta, 10)} confidence" if has_delta else how
        assumption = same_distribution(samples, has_delta=has_delta)
        return Certificate(self.name, f"Guaranteed {how}: mean cost <= {allowed}.", assumption, numbers)


def certify_cost(
    policy: Policy, network: Costs, fitting: HeadOutputs, certifying: HeadOutputs, contract: CostContract
) -> Policy:
    """Return the policy, made cheaper or more expensive until its cost can be guaranteed."""
    if certifying.costs is not None:
        return certify_random_costs(policy, network, fitting, certifying, contract)
    if policy.costs[-1] <= budget_of(policy):
        return _always_kept(policy, network, contract.name)
    if isinstance(policy, Threshold) and policy.exit_rates and policy.settings.get("thresholds") != "marginal":
        return _by_law(policy, network, certifying, contract)
    return _by_family(policy, network, fitting, certifying, contract)


def _as_paced(
    policy: Policy,
    network: Costs,
    fitting: HeadOutputs,
    certifying: HeadOutputs,
    alarm_rate: float,
    horizon: int,
    seed: int,
    max_costs: npt.ArrayLike | None,
) -> Policy:
    """Return the shares of the policy, kept along a stream."""
    if certifying.costs is not None:
        return metered(policy, network, certifying, max_costs, "stream")
    if policy.costs[-1] <= budget_of(policy):
        return _always_kept(policy, network, "stream")
    table, costs, samples = policy.view(certifying), np.array(policy.costs), len(certifying)
    rates = np.array(policy.exit_rates or _shares(policy, fitting))
    scores = table.scores[:, list(policy.open_exits)]
    thresholds = survivor_thresholds(scores, rates, salt=policy.salt)
    law = share_law(passing_counts(rates, samples), samples)
    recent = _windows(scores, thresholds.values, np.random.default_rng(seed))
    terms = policy.terms() | thresholds.fields() | {"exit_rates": rates, "law": law}
    paced = Paced(recent=recent, alarm_rate=alarm_rate, horizon=horizon, **terms)
    guarantee = (
        f"Guaranteed at every moment: t samples cost <= t x {allowed_by(policy, network)} +"
        f" {quantity(costs[-1], policy.unit)}. False alarm within {horizon:,} samples: probability <= {alarm_rate:g}."
    )
    assumption = (
        "No assumption on the data, except for the alarm: that samples come from the same distribution as the"
        f" {samples:,} calibration samples."
    )
    numbers: Numbers = {
        "budget": budget_of(policy),
        "ahead at most": float(costs[-1]),
        "alarm rate": alarm_rate,
        "horizon": horizon,
        "samples": samples,
        "expected cost": expected_cost(costs, law),
        "basis": "counting of what was spent",
    }
    return certified(paced, Certificate("stream", guarantee, assumption, numbers))


def _shares(policy: Policy, outputs: HeadOutputs) -> tuple[float, ...]:
    """Return the shares of samples that leave at each open exit of a policy on a table."""
    return tuple(replay(policy, outputs).exit_shares[list(policy.open_exits)].tolist())


def _always_kept(policy: Policy, network: Costs, contract: str) -> Policy:
    """Return the policy, whose most expensive exit the budget allows: nothing has to be estimated."""
    guarantee = (
        f"Guaranteed for every sample: cost <= {quantity(policy.costs[-1], policy.unit)}, within the budget of"
        f" {allowed_by(policy, network)}."
    )
    return certified(policy, Certificate(contract, guarantee, "", {"budget": budget_of(policy)}))


def _by_law(policy: Threshold, network: Costs, certifying: HeadOutputs, contract: CostContract) -> Policy:
    """Return the policy with survivor thresholds of the certifying table, whose exit shares follow a Dirichlet law."""
    costs, budget, samples = np.array(policy.costs), budget_of(policy), len(certifying)
    rates = np.array(policy.exit_rates)
    if rates @ costs > budget:
        rates = tilted_rates(rates, costs, budget)
    if contract.name == "probability":
        rates = _safe_rates(tuple(rates), policy.costs, budget, samples, contract.delta)
    law = share_law(passing_counts(rates, samples), samples)
    numbers: Numbers = {
        "budget": budget,
        "samples": samples,
        "expected cost": expected_cost(costs, law),
        "overspend probability": overspend_probability(costs, law, budget),
        "law": "Dirichlet(" + ", ".join(map(str, law.tolist())) + ")",
    }
    if law[0] == samples + 1:
        return _first_exit_only(policy, certifying, contract, numbers, _smallest_for_law(policy, contract))
    thresholds = survivor_thresholds(
        policy.view(certifying).scores[:, list(policy.open_exits)], rates, salt=policy.salt
    )
    moved = replace(policy, **thresholds.fields(), exit_rates=tuple(rates))
    if contract.name == "probability":
        numbers["delta"] = contract.delta
    numbers["basis"] = "exact law of the exit shares; equal scores are ordered at random"
    return certified(moved, contract.certificate(allowed_by(policy, network), samples, numbers))


def _by_family(
    policy: Policy, network: Costs, fitting: HeadOutputs, certifying: HeadOutputs, contract: CostContract
) -> Policy:
    """Return the most expensive member of a nested family of policies that can be certified."""
    costs, budget, samples = np.array(policy.costs), budget_of(policy), len(certifying)
    reference = policy.view(fitting).scores
    levels = np.linspace(1, -1, LEVELS)  # from all samples leaving at once to none, chosen before certifying

    def spent(level: float) -> Floats:
        return replay(lowered(policy, level, reference), certifying).spent

    span, low, delta = costs[-1] - costs[0], costs[0], contract.delta
    numbers: Numbers = {"budget": budget, "samples": samples}
    if contract.name == "mean":
        accepted = largest(
            -1, LEVELS - 1, lambda index: (spent(levels[index]).sum() + costs[-1]) / (samples + 1) <= budget
        )
        basis = "conformal risk control"
        smallest = math.ceil((costs[-1] - budget) / (budget - costs[0])) if budget > costs[0] else 0
    else:
        allowed = float((budget - low) / span)
        test = P_VALUES[contract.bound]
        accepted = -1
        while accepted + 1 < LEVELS and test((spent(levels[accepted + 1]) - low) / span, allowed, delta) <= delta:
            accepted += 1  # a fixed sequence: each is tested at delta, up to the first that fails
        numbers |= {"delta": delta, "bound": contract.bound}
        basis = f"fixed-sequence testing, {contract.bound.replace('_', '-')} bound"
        smallest = smallest_sample(allowed, delta, test=test) if allowed > 0 else 0
    if accepted < 0 or levels[accepted] == 1:
        return _first_exit_only(policy, certifying, contract, numbers, smallest)
    member = lowered(policy, float(levels[accepted]), reference)
    numbers |= {"level": float(levels[accepted]), "mean cost": float(spent(levels[accepted]).mean())}
    draws = isinstance(policy, Mixture | Patience) or any(share < 1 for share in getattr(policy, "tie_shares", ()))
    numbers["basis"] = basis + ("; mixtures and ties are decided at random" if draws else "")
    return certified(member, contract.certificate(allowed_by(policy, network), samples, numbers))


def _first_exit_only(
    policy: Policy, certifying: HeadOutputs, contract: CostContract, numbers: Numbers, smallest: int
) -> Policy:
    """Return the policy that sends every sample out at the first exit: chosen so, or all that can be certified."""
    first: dict[str, Any] = {"open_exits": policy.open_exits[:1], "costs": policy.costs[:1], "exit_rates": (1.0,)}
    first |= {"combination": None, "score": certifying.score}  # alone, it answers for itself
    place = layer_label(policy.exit_names[policy.open_exits[0]])
    if budget_of(policy) > policy.costs[0] and not len(certifying) < smallest <= RARELY:
        chosen = replay(policy, certifying).spent.max() <= policy.costs[0]
        smallest, why = 0, "the method chose so" if chosen else "no more can be certified within the budget"
    else:
        level = f" with {percent(1 - contract.delta)} confidence" if contract.name == "probability" else ""
        needed = f"at least {smallest:,} are needed" if smallest else "no number of them suffices"
        why = f"to certify more{level}, {needed}, and there are {len(certifying):,} calibration samples"
    cost = quantity(policy.costs[0], policy.unit)
    guarantee = f"Guaranteed for every sample: cost <= {cost}, since all leave after {place}: {why}."
    certificate = Certificate(contract.name, guarantee, "", numbers | {"smallest sample": smallest})
    return certified(ExitAt(**policy.terms() | first), certificate)


def _smallest_for_law(policy: Policy, contract: CostContract) -> int:
    """Return the smallest number of samples with which some sample may pass the first exit."""
    if budget_of(policy) <= policy.costs[0]:
        return 0

    def suffices(samples: int) -> bool:
        rates = np.array(policy.exit_rates)
        if contract.name == "probability":
            rates = _safe_rates(policy.exit_rates, policy.costs, budget_of(policy), samples, contract.delta)
        return bool(share_law(passing_counts(rates, samples), samples)[0] <= samples)

    return smallest(2, 10**9, suffices) or 0


@lru_cache(maxsize=64)  # a tenth of a second, and often asked again for the same plan
def _safe_rates(
    exit_rates: tuple[float, ...], cumulative: tuple[float, ...], budget: float, samples: int, delta: float
) -> Floats:
    """Return the rates, tilted towards cheap exits until overspending has probability delta."""
    rates, costs = np.array(exit_rates), np.array(cumulative)
    cheapest, planned = float(costs[rates > 0][0]), float(rates @ costs)

    def plan(amount: float) -> Floats:
        return rates if amount >= planned else tilted_rates(rates, costs, max(amount, cheapest))

    return exact_plan(plan, costs, budget, samples, delta)


def _windows(scores: Floats, thresholds: Floats, rng: np.random.Generator) -> tuple[tuple[float, ...], ...]:
    """Return scores of the samples waiting at each exit but the last, at most WINDOW of them, in random order."""
    windows, waiting = [], scores
    for exit_index, threshold in enumerate(thresholds):
        column = (waiting if len(waiting) else scores)[:, exit_index]
        windows.append(tuple(rng.permutation(column)[:WINDOW].tolist()))
        waiting = waiting[waiting[:, exit_index] < tie_range(threshold)[0]]
    return tuple(windows)


def guaranteed_by(policy: Policy) -> str:
    """Return what is guaranteed about a policy, or what is not, in a sentence.

    >>> from alight import calibrate, recordings
    >>> labelled, test, costs = recordings.load()
    >>> guaranteed_by(calibrate.eero(costs, "50%", labelled))
    "Not guaranteed: new samples may cost a little more than the budget on average; contract 'probability' prevents it."
    """
    if policy.certificate is not None:
        return str(policy.certificate)
    doubt = "new samples may cost a little more than the budget on average"
    return f"Not guaranteed: {doubt}; contract 'probability' prevents it."


def budget_of(policy: Policy) -> float:
    """Return the budget of a policy, without which nothing can be guaranteed about its cost."""
    if policy.budget is None:
        method = policy.method or "given"
        raise BadInput(f"the method {method} made a policy without a budget: a guarantee on cost needs one")
    return policy.budget


def allowed_by(policy: Policy, network: Costs) -> str:
    """Return the budget in words, with its share of the full network."""
    return f"{quantity(budget_of(policy), policy.unit)} ({percent(budget_of(policy) / network.full)})"


def same_distribution(samples: int, *, has_delta: bool) -> str:
    """Return the assumption that new samples are exchangeable with those of the calibration, and what delta counts."""
    assumption = f"Assumes new samples come from the same distribution as the {samples:,} calibration samples."
    counted = "Confidence counts all calibrations, whether a guarantee could be issued or not."
    return f"{assumption} {counted}" if has_delta else assumption


def certified(policy: Policy, certificate: Certificate) -> Policy:
    """Return the policy with its certificate."""
    if policy.unit and not policy.unit.lower().endswith(("flops", "macs")):
        measured = "The guarantee is about the measured costs, not about the clock or the meter."
        certificate = replace(certificate, assumption=f"{certificate.assumption} {measured}".strip())
    return replace(policy, certificate=certificate)


def lowered(policy: Policy, level: float, scores: Floats) -> Policy:
    """Return the policy with all thresholds moved together: at 1 all samples leave at once, at -1 none leaves.

    A level of 0.1 takes a tenth off the share of scores below a threshold. Costs are nested: no sample leaves later at
    a higher level.
    """
    if level == 0 or isinstance(policy, ExitAt):
        return policy
    if isinstance(policy, Threshold):
        columns = [scores[:, exit_index] for exit_index in policy.open_exits[:-1]]
        moved = [_moved(*pair, level) for pair in zip(policy.thresholds, columns, strict=True)]
        ties = [1.0] * len(moved)
        for index, threshold in enumerate(policy.thresholds):
            if level < 0 and tie_range(moved[index])[0] <= tie_range(threshold)[1]:  # else some would leave earlier
                moved[index], ties[index] = threshold, policy.tie_shares[index]
        return replace(policy, thresholds=tuple(moved), tie_shares=tuple(ties), exit_rates=())
    if isinstance(policy, Streak):
        if level >= 1:
            return replace(policy, threshold=-math.inf, patience=1)
        pooled = scores[:, list(policy.open_exits)].ravel()
        return replace(policy, threshold=_moved(policy.threshold, pooled, level))
    if isinstance(policy, Patience):
        return _patience(policy, policy, _towards(policy.patience, level, len(policy.costs)))
    if isinstance(policy, Mixture):
        first, second, share = policy.first, policy.second, policy.share
        if isinstance(first, Patience) and isinstance(second, Patience):
            length = share * first.patience + (1 - share) * second.patience
            return _patience(policy, first, _towards(length, level, len(policy.costs)))
        return replace(policy, first=lowered(first, level, scores), second=lowered(second, level, scores))
    raise BadInput(f"a {type(policy).__name__} has no thresholds to lower: certify another method")


def _towards(value: float, level: float, most: float) -> float:
    return value * (1 - level) if level > 0 else value - level * (most - value)


def _moved(threshold: float, column: Floats, level: float) -> float:
    """Return the threshold below which that much less, or more, of the column lies."""
    below = _towards(float((column < threshold).mean()), level, 1.0)
    rank = math.floor(below * len(column) + 1e-9)
    if level >= 1 or rank <= 0:
        return -math.inf
    return math.inf if rank >= len(column) else float(np.partition(column, rank)[rank])


def _patience(policy: Policy, part: Patience, length: float) -> Policy:
    """Return patience of any length for what the policy carries: a mixture of the two whole ones beside it."""
    whole = math.floor(length)
    terms = policy.terms() | {"settings": {"patience": whole, "share of next": length - whole}}
    return Mixture(replace(part, patience=whole + 1), replace(part, patience=whole), length - whole, **terms)


def certify_random_costs(
    policy: Policy, network: Costs, fitting: HeadOutputs, certifying: HeadOutputs, contract: CostContract
) -> Policy:
    """Return the most expensive member of a nested family that can be certified when every call has its own cost.

    The law of exit shares says nothing about such costs. But a sample's spend never rises with the level of the family,
    and lies between 0 and the most M that all calls of a request can cost, so two bounds hold for any distribution of
    costs, heavy tails and costs that depend on the request included. For the mean, conformal risk control: (sum of the
    n spends + M) / (n + 1) <= budget implies E[spend of a new sample] <= budget; a calibration that is refused spends
    nothing and counts so. For a probability, the betting test of the mean of spend / M, level after level up to the
    first that fails: the cheapest, then from where the table that fitted the policy spends half of the budget. Both
    need M: the largest cost seen is not a bound.
    """
    caps = most_per_call(certifying, contract.max_costs, network.unit)[list(policy.open_exits)]
    most, budget, samples = float(caps.sum()), budget_of(policy), len(certifying)
    if most <= budget:
        guarantee = (
            f"Guaranteed for every sample: cost <= {quantity(most, policy.unit)}, the most that its calls can cost."
        )
        return certified(policy, Certificate(contract.name, guarantee, "", {"budget": budget, "most per sample": most}))
    reference, levels = policy.view(fitting).scores, np.linspace(1, -1, LEVELS)

    def spent(index: int, table: HeadOutputs = certifying) -> Floats:
        return replay(lowered(policy, float(levels[index]), reference), table).spent

    numbers: Numbers = {"budget": budget, "samples": samples, "most per sample": most}
    if contract.name == "mean":
        accepted = largest(-1, LEVELS - 1, lambda index: (spent(index).sum() + most) / (samples + 1) <= budget)
        basis = "conformal risk control"
    else:
        test, accepted, delta = P_VALUES[contract.bound], -1, contract.delta
        half = largest(0, LEVELS - 1, lambda index: float(spent(index, fitting).mean()) <= budget / 2)
        for index in dict.fromkeys([0, *range(half, LEVELS)]):  # an order that the certifying table has no part in
            if test(spent(index) / most, budget / most, delta) > delta:
                break
            accepted = index
        numbers |= {"delta": contract.delta, "bound": contract.bound}
        basis = f"fixed-sequence testing, {contract.bound.replace('_', '-')} bound"
    if accepted < 0:
        first = policy.exit_names[policy.open_exits[0]]
        raise BadInput(
            f"{samples:,} samples cannot certify a mean cost <= {allowed_by(policy, network)}, not even if {first}"
            f" answers all requests (mean {quantity(float(spent(0).mean()), policy.unit)}, at most"
            f" {quantity(most, policy.unit)} per request): raise the budget, lower max_costs, or log more requests"
        )
    member = replace(lowered(policy, float(levels[accepted]), reference), budget=budget)
    numbers |= {"level": float(levels[accepted]), "mean cost": float(spent(accepted).mean()), "basis": basis}
    certificate = contract.certificate(allowed_by(policy, network), samples, numbers)
    return certified(member, replace(certificate, assumption=f"{certificate.assumption} {capped(most, policy.unit)}"))


def capped(most: float, unit: str) -> str:
    """Return the assumption that no request costs more than this."""
    return f"Assumes that no request costs more than {quantity(most, unit)}."


def spend_to_aim_at(
    network: Costs, budget: Budget, fitting: HeadOutputs, samples: int, contract: CostContract
) -> float:
    """Return the spend that so many samples can about certify, which a method is best fitted for.

    The budget less the width of Bernstein's inequality, as if the most expensive member answered a share of the
    requests. It only says where a family begins: what is certified, and may be more, is tested.
    """
    assert fitting.costs is not None
    most, amount = float(most_per_call(fitting, contract.max_costs, network.unit).max()), network.budget(budget)
    means, squares = fitting.costs.mean(axis=0), (fitting.costs**2).mean(axis=0)
    variance = float(squares.max()) * min(1.0, amount / float(means.max()))
    strength = math.log(1 / contract.delta) / samples
    margin = math.sqrt(2 * strength * variance) + most * strength / 3
    return Amount(max(amount - margin, min(amount, 1.1 * float(means[0]))))  # a method may open the first member


def metered(
    policy: Policy,
    network: Costs,
    table: HeadOutputs,
    max_costs: npt.ArrayLike | None,
    contract: Literal["batch", "stream"],
) -> Policy:
    """Return the policy under a meter of real costs, which keeps a batch or a stream within the budget.

    Nothing is assumed about requests: before every call that is not a request's first, the most that it can cost must
    be left of what the budget allows.
    """
    caps = most_per_call(table, max_costs, network.unit)[list(policy.open_exits)]
    made = meter(policy, caps.tolist(), per_batch=contract == "batch")
    allowed, most = allowed_by(policy, network), quantity(float(caps.sum()), policy.unit)
    if contract == "batch":
        guarantee = f"Guaranteed for every batch: mean cost <= {allowed}."
    else:
        guarantee = f"Guaranteed at every moment: t requests cost <= t x {allowed} + {most}."
    numbers: Numbers = {
        "budget": budget_of(policy),
        "ahead at most": made.overdraft,
        "basis": "counting of what was spent",
    }
    assumption = "No assumption on requests; assumes that no call costs more than its max_costs."
    return certified(made, Certificate(contract, guarantee, assumption, numbers))


def most_per_call(table: HeadOutputs, max_costs: npt.ArrayLike | None, unit: str) -> Floats:
    """Return the most that a call of each member can cost, once it is given and no call in the table has cost more."""
    assert table.costs is not None
    if max_costs is None:
        raise BadInput(
            "every call in this table has its own cost, so a guarantee needs the most that a call of each member can"
            f" cost (most tokens x price): give max_costs=[...], {table.num_exits} numbers; the largest cost seen is"
            " not a bound"
        )
    caps = np.asarray(max_costs, dtype=np.float64)
    if caps.shape != (table.num_exits,) or not np.isfinite(caps).all() or (caps <= 0).any():
        raise BadInput(f"max_costs {caps.tolist()}: give a positive number for each of the {table.num_exits} members")
    largest_seen = table.costs.max(axis=0)
    if (above := largest_seen > caps * (1 + ROUNDING)).any():
        index = int(np.argmax(above))
        cost, cap = (quantity(float(each[index]), unit) for each in (largest_seen, caps))
        raise BadInput(f"a call of {table.exit_names[index]} cost {cost}, above its max_costs of {cap}: raise that")
    return np.maximum(caps, largest_seen)
