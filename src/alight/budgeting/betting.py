"""Tests of a mean from a finite sample: probabilities, valid whatever the distribution, of data as good as these.

All are for values in [0, 1] and the claim that their mean exceeds a bound; a small p-value refutes it.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from alight.budgeting.bounds import largest

Floats = npt.NDArray[np.float64]


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
    from scipy.special import bdtr

    count, mean = len(values), float(np.mean(values))
    if bound <= 0 or mean >= bound:
        return 1.0
    if bound >= 1:
        return 0.0
    hoeffding = math.exp(-count * _divergence(mean, bound))
    bentkus = math.e * float(bdtr(math.ceil(count * mean), count, bound))
    return min(1.0, hoeffding, bentkus)


def smallest_sample(
    bound: float, delta: float, *, best: float = 0.0, test: Callable[[Floats, float, float], float] = betting_p_value
) -> int:
    """Return how many values a test needs to refute a mean above the bound, if all are as good as possible.

    >>> smallest_sample(0.01, 0.05)
    308
    """

    def fails(count: int) -> bool:
        return test(np.full(count, best), bound, delta) > delta

    high = 1
    while fails(high):
        high *= 2
        if high > 10**8:
            raise ValueError(f"no sample refutes a mean above {bound:g} when values are {best:g}")
    return 1 + largest(high // 2, high - 1, fails)


def _divergence(mean: float, bound: float) -> float:
    """Return the Kullback-Leibler divergence of two Bernoulli distributions."""
    first = mean * math.log(mean / bound) if mean > 0 else 0.0
    return first + (1 - mean) * math.log((1 - mean) / (1 - bound)) if mean < 1 else first
