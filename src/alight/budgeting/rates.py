"""Exit rates: the share of samples that leaves at each exit, planned for an average budget or counted in a batch.

Exponential weights, geometric and Gaussian rates are each a family `exp(base + tilt * direction)`, normalised,
whose mean cost rises with the tilt. One bisection serves them all, and ends on the affordable side.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

import numpy as np
import numpy.typing as npt

from alight.errors import BadInput, BudgetTooSmall

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Prior = Literal["inverse_cost", "uniform"] | npt.ArrayLike

HALVINGS = 80  # of an interval of logarithms at most 1 wide: past double precision
ROUNDING = 1e-9  # samples of a batch by which a whole number may be missed


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
    base, tilt = _exponential(risks, costs, budget, temperature, prior, spend_all)
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
    _, tilt = _exponential(risks, costs, budget, temperature, prior, spend_all)
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


def _exponential(
    risks: Floats, costs: Floats, budget: float, temperature: float, prior: Prior, spend_all: bool
) -> tuple[Floats, float]:
    """Return the logarithms of the weights before the budget counts, and the tilt that makes them keep it."""
    if not (math.isfinite(temperature) and temperature >= 1e-12):
        raise BadInput(f"temperature {temperature:g} must be positive and not vanish: the paper uses 0.04")
    with np.errstate(divide="ignore"):  # an exit of prior 0 is never planned
        base = np.log(prior_weights(prior, costs)) - risks / temperature
    return base, _largest_affordable_tilt(base, costs / costs[-1], costs, budget, np.inf if spend_all else 0.0)


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
    if _tilted(base, direction, highest) @ costs <= budget:
        return highest
    if budget == possible[0]:
        return -np.inf
    sign = 1.0 if _tilted(base, direction, 0.0) @ costs <= budget else -1.0

    def beyond(size: float) -> bool:  # the boundary, seen from 0
        return bool(_tilted(base, direction, sign * size) @ costs <= budget) == (sign < 0)

    return _boundary(beyond, sign)


def _boundary(beyond: Callable[[float], bool], sign: float) -> float:
    """Return the affordable side of the boundary among tilts of this sign, by bisection of the tilt's logarithm."""
    near = 1.0
    while beyond(near) and near > 1e-300:
        near /= 2
    while not beyond(2 * near) and 2 * near < 1e300:
        near *= 2
    far = 2 * near
    for _ in range(HALVINGS):
        middle = math.sqrt(near) * math.sqrt(far)
        if middle in (near, far):  # no number lies between them
            break
        near, far = (near, middle) if beyond(middle) else (middle, far)
    if sign > 0:
        return 0.0 if beyond(near) else near
    return -far if beyond(far) else -np.inf  # only the cheapest exit is affordable


def quota_counts(exit_rates: Floats, costs: Floats, budget: float, total: int) -> Integers:
    """Return how many of `total` samples leave at each exit: planned counts rounded, at most `total * budget`.

    The number of samples that pass an exit is the planned one, rounded down, so the batch costs at most what is
    planned; then it is rounded up at the exits whose next stages cost most, as far as the plan's cost allows. So at
    every exit the number of samples that have left is less than 1 from the plan, and what stays unspent is less than
    the stages from one exit to a next one cost. Exits of rate 0 get no sample, but for the first when nothing else is
    affordable. A plan that costs more than the budget is tilted to it before.

    >>> quota_counts(np.array([0.5, 0.3, 0.2]), np.array([1.0, 2.0, 4.0]), 1.9, 7)
    array([3, 3, 1])
    """
    if budget < costs[0]:
        raise BudgetTooSmall(budget, float(costs[0]))
    exit_rates = _affordable(exit_rates / exit_rates.sum(), costs, budget)
    planned_exits = np.flatnonzero(exit_rates > 0)
    steps = np.diff(costs[planned_exits])
    planned = total * (1 - np.cumsum(exit_rates[planned_exits])[:-1])  # samples that pass each but the last
    passing = np.maximum(np.floor(planned + ROUNDING), 0.0).astype(np.int64)
    left = total * (min(budget, float(exit_rates @ costs)) * (1 - 1e-12) - costs[planned_exits[0]]) - passing @ steps
    while True:
        before = np.concatenate([[total], passing])[:-1]
        fitting = (passing < planned - ROUNDING) & (passing < before) & (steps <= left)
        if not fitting.any():
            break
        up = int(np.argmax(np.where(fitting, steps, -1.0)))
        passing[up] += 1
        left -= steps[up]
    counts = np.zeros(len(costs), dtype=np.int64)
    counts[planned_exits] = -np.diff([total, *passing, 0])
    while not _within(counts, costs, total, budget):  # by a rounding error
        last = planned_exits[counts[planned_exits] > 0][-1]
        counts[[last, planned_exits[0]]] += -1, 1
    return counts


def _affordable(exit_rates: Floats, costs: Floats, budget: float) -> Floats:
    """Return the rates, tilted to the budget; the first exit helps where no planned one is cheap enough."""
    if exit_rates @ costs <= budget:
        return exit_rates
    first = int(np.flatnonzero(exit_rates)[0])
    if costs[first] <= budget:
        return tilted_rates(exit_rates, costs, budget)
    rates = np.zeros(len(costs))
    rates[[0, first]] = two_exit_rates(costs[[0, first]], budget)
    return rates


def _within(counts: Integers, costs: Floats, total: int, budget: float) -> bool:
    """Return whether a batch keeps its budget, in exact arithmetic."""
    spent = sum(count * Fraction(cost) for count, cost in zip(counts.tolist(), costs.tolist(), strict=True))
    return spent <= total * Fraction(budget)
