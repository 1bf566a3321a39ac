"""What can be guaranteed: exact laws of exit shares and cost given calibration, and the paper's risk bound.

With continuous scores and thresholds set on N exchangeable samples by `passing_counts` k_1 >= k_2 >= ..., the shares
of fresh samples that leave at each exit are Dirichlet(k_0 - k_1, k_1 - k_2, ...), with k_0 = N + 1 and k_M = 0,
whatever the data.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from alight.budgeting.rates import Floats, Integers, Prior, cumulative_rates, prior_weights
from alight.budgeting.thresholds import marginal_ranks, passing_counts
from alight.errors import BadInput, BudgetTooSmall

Plan = Callable[[float], Floats]  # a budget becomes exit rates


def share_law(counts: Integers, num_samples: int) -> Integers:
    """Return the parameters of the Dirichlet law of the exit shares; 0 where no sample ever leaves.

    >>> share_law(np.array([4, 2]), num_samples=7)
    array([4, 2, 2])
    """
    return -np.diff(np.concatenate([[num_samples + 1], counts, [0]]))


def expected_cost(costs: Floats, law: Integers) -> float:
    """Return the mean cost of a fresh sample, over calibration data and sample."""
    return float(costs @ law / law.sum())


def overspend_probability(costs: Floats, law: Integers, budget: float) -> float:
    """Return the probability, over the calibration data, that the mean cost of fresh samples exceeds the budget.

    P(costs . Dirichlet(law) > budget) is P(Q > 0) for Q = sum_l (costs_l - budget) G_l with independent Gamma(law_l)
    variables G_l: one integral of Q's moment generating function along the line through its saddle point, on which it
    is largest at the saddle point itself, so that nothing cancels and the tails are kept.

    >>> round(overspend_probability(np.array([1.0, 2.0]), np.array([50, 50]), 1.5), 9)
    0.5
    """
    from scipy.integrate import quad  # slow to import, rarely needed
    from scipy.optimize import brentq

    open_exits = law > 0
    excess, shapes = costs[open_exits] - budget, law[open_exits].astype(np.float64)
    if (excess <= 0).all() or (excess >= 0).all():
        return float((excess > 0).any())
    excess = excess / np.sqrt(shapes @ excess**2)  # Q has variance 1, and its generating function exists for |s| < 1
    edges = (1 - 1e-12) / excess.min(), (1 - 1e-12) / excess.max()
    saddle = brentq(lambda s: shapes @ (excess / (1 - excess * s)), *edges)
    start = saddle if abs(saddle) > 0.5 else np.copysign(0.5, saddle)  # keep off the pole at 0

    def integrand(u: float) -> float:
        s = complex(start, u)
        return float((np.exp(-(shapes @ np.log1p(-excess * s))) / s).real)

    pieces = [0.0, 0.5, 2.0, 6.0, 20.0, 1e2, 1e3, 1e5]  # beyond, less than 1e-9 is left even for two samples
    parts = [quad(integrand, *piece, epsabs=1e-12, epsrel=1e-9, limit=500, full_output=1) for piece in pairwise(pieces)]
    area = sum(part[0] + part[1] for part in parts)  # with quad's own bound of its error, about 1e-11: the safe side
    assert np.isfinite(area), f"overspending of {budget:g} with law {law.tolist()} is not finite"
    return float(np.clip((start < 0) + area / np.pi, 0, 1))


def passing_bound(count: int, num_samples: int, delta: float) -> float:
    """Bound the share of fresh samples that pass an exit, with probability 1 - delta: a quantile of Beta(k, N + 1 - k).

    >>> round(passing_bound(50, 99, 0.05), 3)
    0.582
    """
    from scipy.special import betaincinv

    if not 0 < count <= num_samples:
        return float(count > 0)
    return float(betaincinv(count, num_samples + 1 - count, 1 - delta))


def exact_plan(plan: Plan, costs: Floats, budget: float, num_samples: int, delta: float) -> Floats:
    """Return the plan for the largest budget b <= budget with which overspending `budget` has probability <= delta.

    One joint bound for all exits: survivor thresholds on N samples follow the Dirichlet law.
    """
    check_delta(delta)

    def safe(planned: float) -> bool:
        law = share_law(passing_counts(plan(planned), num_samples), num_samples)
        return overspend_probability(costs, law, budget) <= delta

    if budget < costs[0]:
        raise BudgetTooSmall(budget, float(costs[0]))
    generous = plan(budget)
    if safe(budget):
        return generous
    low, high = float(costs[generous > 0][0]), budget  # all samples at the first exit that is planned at all are safe
    for _ in range(40):  # far below one sample's share of the budget
        middle = low + (high - low) / 2
        low, high = (middle, high) if safe(middle) else (low, middle)
    return plan(low)


def exact_ranks(exit_rates: Floats, num_samples: int, delta: float) -> Integers:
    """Return ranks of marginal thresholds with which, with probability 1 - delta, no exit passes on more than planned.

    The marginal rule has no joint law, so delta is shared out evenly among the exits.
    """
    check_delta(delta)
    left = 1 - cumulative_rates(exit_rates)[:-1]
    ranks = marginal_ranks(exit_rates, num_samples, None)
    for exit_index in np.flatnonzero(ranks <= num_samples):  # the others are closed

        def within(rank: int, planned: float = left[exit_index]) -> bool:
            return passing_bound(rank, num_samples, delta / len(ranks)) <= planned

        ranks[exit_index] = largest(0, int(ranks[exit_index]), within)
    return ranks


def oracle_bound(
    risks: Floats, costs: Floats, budget: float, *, temperature: float = 0.04, prior: Prior = "inverse_cost"
) -> float:
    """Return the right-hand side of Theorem 3.9: min over affordable exits of R_l + temperature * log(1 / prior_l).

    It bounds the error of the random mixture that sends a share e_l of the samples to exit l whatever they are, plus
    the divergence term; not the error of the confidence-routed rule, as the paper states it.
    """
    affordable = costs <= budget
    if not affordable.any():
        raise BudgetTooSmall(budget, float(costs[0]))
    with np.errstate(divide="ignore"):
        return float((risks - temperature * np.log(prior_weights(prior, costs)))[affordable].min())


def mixture_risk(exit_rates: Floats, risks: Floats) -> float:
    """Return the error of the random mixture, sum_l e_l R_l."""
    return float(exit_rates @ risks)


def routing_gain(exit_rates: Floats, risks: Floats, routed_error: float) -> float:
    """Return how much lower the routed rule's error is than the random mixture's; negative where confidence misleads.

    >>> routing_gain(np.array([0.5, 0.5]), np.array([0.5, 0.5]), routed_error=1.0)  # sure exactly where it is wrong
    -0.5
    """
    return mixture_risk(exit_rates, risks) - routed_error


def largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number up to `high` for which it holds, `low` if there is none; it holds for all smaller ones.

    >>> largest(0, 100, lambda number: number**2 < 50)
    7
    """
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def smallest(start: int, most: int, holds: Callable[[int], bool]) -> int | None:
    """Return the smallest number for which it holds, and for all larger ones; None if doubling `start` exceeds `most`.

    >>> smallest(1, 100, lambda number: number**2 > 50)
    8
    """
    high = start
    while not holds(high):
        high *= 2
        if high > most:
            return None
    return 1 + largest(high // 2, high - 1, lambda number: not holds(number))


def check_delta(delta: float) -> None:
    """Check that a probability of failure lies inside (0, 1)."""
    if not 0 < delta < 1:
        raise BadInput(f"delta {delta:g} must lie inside (0, 1): 0.05 is 95 % confidence")


def betting_p_value(values: Floats, bound: float, delta: float = 0.05) -> float:
    """Return the p-value of the betting test of Waudby-Smith and Ramdas: one over the largest capital won.

    Stakes are set before each value is seen, for the variance so far; `delta` is the level they are tuned to.

    >>> betting_p_value(np.zeros(100), 0.1) < 0.001
    True
    """
    count = len(values)
    if bound <= 0 or not count:
        return 1.0
    steps = np.arange(1, count + 1)
    means = (0.5 + np.cumsum(values)) / (1 + steps)
    variances = (0.25 + np.cumsum((values - means) ** 2)) / (1 + steps)
    before = np.concatenate([[0.25], variances[:-1]])
    stakes = np.sqrt(2 * math.log(1 / delta) / (count * before))
    stakes = np.minimum(stakes, 0.99 / max(1 - bound, 1e-12))  # the worst value, 1, never takes all
    capital = np.cumsum(np.log1p(stakes * (bound - values)))
    return float(min(1.0, math.exp(-max(0.0, float(capital.max())))))


def hoeffding_bentkus_p_value(values: Floats, bound: float) -> float:
    """Return the p-value of Hoeffding's and Bentkus' inequalities, the smaller of the two (Bates et al. 2021).

    >>> hoeffding_bentkus_p_value(np.zeros(100), 0.1) < 0.001
    True
    """
    from scipy.special import bdtr, rel_entr  # slow to import

    count, mean = len(values), float(np.mean(values))
    if bound <= 0 or mean >= bound:
        return 1.0
    if bound >= 1:
        return 0.0
    divergence = float(rel_entr(mean, bound) + rel_entr(1 - mean, 1 - bound))  # of two Bernoulli distributions
    hoeffding = math.exp(-count * divergence)
    bentkus = math.e * float(bdtr(math.ceil(count * mean), count, bound))
    return min(1.0, hoeffding, bentkus)


def smallest_sample(
    bound: float, delta: float, *, best: float = 0.0, test: Callable[[Floats, float, float], float] = betting_p_value
) -> int:
    """Return how many values a test needs to refute a mean above the bound, if all are as good as possible.

    >>> smallest_sample(0.01, 0.05)
    308
    """

    count = smallest(1, 10**8, lambda count: test(np.full(count, best), bound, delta) <= delta)
    if count is None:
        raise ValueError(f"no sample refutes a mean above {bound:g} when values are {best:g}")
    return count
