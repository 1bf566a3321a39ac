"""Exit rates: the planned share of samples that leaves at each exit, for an average budget.

Exponential weights, geometric and Gaussian rates are each a family `exp(base + tilt * direction)`, normalised,
whose mean cost rises with the tilt. One bisection serves them all, and ends on the affordable side.
"""

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from alight.errors import BadInput, BudgetTooSmall

Floats = npt.NDArray[np.float64]
Prior = Literal["inverse_cost", "uniform"] | npt.ArrayLike

HALVINGS = 80  # of an interval of logarithms at most 1 wide: past double precision


def inverse_cost_prior(costs: Floats) -> Floats:
    """Return the prior over exits that favours cheap ones (pi in the paper).

    >>> inverse_cost_prior(np.array([1.0, 3.0]))
    array([0.75, 0.25])
    """
    weights = costs[0] / costs
    return weights / weights.sum()


def prior_weights(prior: Prior, costs: Floats) -> Floats:
    """Return the prior as a probability vector, from its name or from one weight per exit."""
    if isinstance(prior, str):
        if prior not in ("inverse_cost", "uniform"):
            raise BadInput(f"there is no prior {prior!r}: give 'inverse_cost', 'uniform' or one weight per exit")
        return inverse_cost_prior(costs) if prior == "inverse_cost" else np.full(len(costs), 1 / len(costs))
    weights = np.asarray(prior, dtype=np.float64)
    if weights.shape != costs.shape:
        raise BadInput(
            f"a prior of {weights.size} weights for {len(costs)} exits: give one per exit, or, where exits are closed,"
            " name it, 'inverse_cost' or 'uniform'"
        )
    if not (np.isfinite(weights) & (weights >= 0)).all() or not weights.any():
        raise BadInput(f"prior {np.asarray(prior).tolist()} must be {len(costs)} weights >= 0, not all 0: one per exit")
    return weights / weights.sum()


def exponential_weights(
    risks: Floats,
    costs: Floats,
    budget: float,
    *,
    temperature: float = 0.04,
    prior: Prior = "inverse_cost",
    spend_all: bool = False,
) -> Floats:
    """Rates that minimise risk plus `temperature` times their divergence from the prior (Eq. 6-7, Prop. 3.8).

        minimise    sum_l e_l R_l + temperature * sum_l e_l log(e_l / prior_l)
        subject to  sum_l e_l = 1,  sum_l e_l costs_l <= budget     (= budget with `spend_all`)

    >>> exponential_weights(np.array([0.5, 0.1]), np.array([1.0, 2.0]), 1.5).round(6)
    array([0.5, 0.5])
    """
    base = _log_weights(risks, costs, temperature, prior)
    tilt = _largest_affordable_tilt(base, costs / costs[-1], costs, budget, highest=np.inf if spend_all else 0.0)
    return _tilted(base, costs / costs[-1], tilt)


def budget_multiplier(
    risks: Floats,
    costs: Floats,
    budget: float,
    *,
    temperature: float = 0.04,
    prior: Prior = "inverse_cost",
    spend_all: bool = False,
) -> float:
    """Return the price of cost in that problem (mu-hat), for a last exit that costs 1; 0 where the budget is slack.

    >>> budget_multiplier(np.array([0.5, 0.1]), np.array([1.0, 2.0]), 2.0)
    0.0
    """
    base = _log_weights(risks, costs, temperature, prior)
    tilt = _largest_affordable_tilt(base, costs / costs[-1], costs, budget, highest=np.inf if spend_all else 0.0)
    return -temperature * tilt if tilt else 0.0


def geometric_rates(costs: Floats, budget: float) -> Floats:
    """Rates proportional to q^l, with q such that they spend the budget (MSDNet).

    >>> geometric_rates(np.array([1.0, 2.0, 3.0]), 2.0)
    array([0.33333333, 0.33333333, 0.33333333])
    """
    position = np.arange(len(costs), dtype=np.float64)
    base = np.zeros(len(costs))
    return _tilted(base, position, _largest_affordable_tilt(base, position, costs, budget))


def gaussian_rates(
    costs: Floats, budget: float, *, width: float | None = None, axis: Literal["index", "cost"] = "index"
) -> Floats:
    """Rates proportional to exp(-(l - m)^2 / (2 width^2)), with m such that they spend the budget (Predictive Exit).

    `width` is a sixth of the number of exits by default; with `axis="cost"` exits stand at their cost, stretched
    over the same range as their indices.

    >>> gaussian_rates(np.array([1.0, 2.0, 3.0]), 2.0).round(3)
    array([0.107, 0.787, 0.107])
    """
    width = len(costs) / 6 if width is None else width
    if not 1e-6 <= width <= 1e6:
        raise BadInput(
            f"width {width:g} of the Gaussian must lie in 1e-6 to 1e6: leave it out for a sixth of the exits"
        )
    if axis not in ("index", "cost"):
        raise BadInput(f"there is no axis {axis!r}: exits stand at their 'index' or their 'cost'")
    position = np.arange(len(costs), dtype=np.float64)
    if axis == "cost" and len(costs) > 1:
        position = (len(costs) - 1) * (costs - costs[0]) / (costs[-1] - costs[0])
    base = -(position**2) / (2 * width**2)  # the square's cross term, position * m / width^2, is the tilt
    return _tilted(base, position, _largest_affordable_tilt(base, position, costs, budget))


def two_exit_rates(costs: Floats, budget: float) -> Floats:
    """Rates of two exits that spend the budget (Prop. C.1); no risks are needed.

    >>> two_exit_rates(np.array([1.0, 3.0]), 2.0)
    array([0.5, 0.5])
    """
    if budget < costs[0]:
        raise BudgetTooSmall(budget, float(costs[0]))
    early = float(np.clip((budget - costs[1]) / (costs[0] - costs[1]), 0, 1))
    while early < 1 and np.array([early, 1 - early]) @ costs > budget:
        early = min(1.0, early + (1 - early) * 1e-15 + 1e-16)  # a rounding: end on the affordable side
    return np.array([early, 1 - early])


def tilted_rates(exit_rates: Floats, costs: Floats, budget: float) -> Floats:
    """Return the rates nearest to these, in divergence, that spend the budget; exits of rate 0 stay closed.

    >>> tilted_rates(np.array([0.5, 0.0, 0.5]), np.array([1.0, 2.0, 3.0]), 1.5).round(6)
    array([0.75, 0.  , 0.25])
    """
    with np.errstate(divide="ignore"):
        base = np.log(exit_rates)
    return _tilted(base, costs / costs[-1], _largest_affordable_tilt(base, costs / costs[-1], costs, budget))


def cumulative_rates(exit_rates: Floats) -> Floats:
    """Return the share of samples that should have left by each exit (Eq. 8, epsilon_seq); exactly 1 at the last."""
    gone = np.minimum(np.cumsum(exit_rates), 1.0)
    gone[-1] = 1.0
    return gone


def _log_weights(risks: Floats, costs: Floats, temperature: float, prior: Prior) -> Floats:
    if not (math.isfinite(temperature) and temperature >= 1e-12):
        raise BadInput(f"temperature {temperature:g} must be positive and not vanish: the paper uses 0.04")
    with np.errstate(divide="ignore"):  # an exit of prior 0 is never planned
        return np.log(prior_weights(prior, costs)) - risks / temperature


def _tilted(base: Floats, direction: Floats, tilt: float) -> Floats:
    """Return exp(base + tilt * direction), normalised without overflow; all mass at an end for ±inf."""
    if np.isinf(tilt):
        rates = np.zeros(len(base))
        rates[np.flatnonzero(np.isfinite(base))[0 if tilt < 0 else -1]] = 1.0
        return rates
    exponents = base + tilt * direction
    weights = np.exp(exponents - exponents.max())
    return weights / weights.sum()


def _largest_affordable_tilt(
    base: Floats, direction: Floats, costs: Floats, budget: float, highest: float = np.inf
) -> float:
    """Return the largest tilt up to `highest` (0 or inf) whose rates cost at most the budget, exactly."""
    possible = costs[np.isfinite(base)]
    if budget < possible[0]:
        raise BudgetTooSmall(budget, float(possible[0]))

    def affordable(tilt: float) -> bool:
        return bool(_tilted(base, direction, tilt) @ costs <= budget)

    if affordable(highest):
        return highest
    if budget == possible[0]:
        return -np.inf
    if affordable(0.0):  # seek above 0: towards 0 is cheaper
        return _boundary(affordable, sign=1.0)
    return _boundary(affordable, sign=-1.0)


def _boundary(affordable: Callable[[float], bool], sign: float) -> float:
    """Return the affordable side of the boundary among tilts of this sign, by bisection of the tilt's logarithm."""

    def far(size: float) -> bool:  # beyond the boundary, seen from 0
        return affordable(sign * size) == (sign < 0)

    size = 1.0
    if far(size):
        while far(size) and size > 1e-300:
            size /= 2
        near_size, far_size = size, 2 * size
    else:
        while not far(size) and size < 1e300:
            size *= 2
        near_size, far_size = size / 2, size
    for _ in range(HALVINGS):
        middle = math.sqrt(near_size) * math.sqrt(far_size)
        if middle in (near_size, far_size):  # no number lies between them
            break
        near_size, far_size = (near_size, middle) if far(middle) else (middle, far_size)
    if sign > 0:
        return 0.0 if far(near_size) else near_size
    return -far_size if far(far_size) else -np.inf  # only the cheapest exit is affordable
