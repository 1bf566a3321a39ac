import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, minimize

from alight.budgeting.rates import (
    budget_multiplier,
    cumulative_rates,
    exponential_weights,
    gaussian_rates,
    geometric_rates,
    inverse_cost_prior,
    prior_weights,
    two_exit_rates,
)
from alight.errors import BadInput, BudgetTooSmall

SHAPES = {
    "exponential": lambda risks, costs, budget: exponential_weights(risks, costs, budget),
    "exponential, spend_all": lambda risks, costs, budget: exponential_weights(risks, costs, budget, spend_all=True),
    "exponential, uniform": lambda risks, costs, budget: exponential_weights(risks, costs, budget, prior="uniform"),
    "exponential, cold": lambda risks, costs, budget: exponential_weights(risks, costs, budget, temperature=1e-4),
    "exponential, hot": lambda risks, costs, budget: exponential_weights(risks, costs, budget, temperature=1e3),
    "geometric": lambda risks, costs, budget: geometric_rates(costs, budget),
    "gaussian": lambda risks, costs, budget: gaussian_rates(costs, budget),
    "gaussian by cost": lambda risks, costs, budget: gaussian_rates(costs, budget, axis="cost"),
}
SPENDS_ALL = [name for name in SHAPES if not name.startswith("exponential") or "spend_all" in name]


@st.composite
def problems(draw):
    exits = draw(st.integers(1, 25))
    scale = 10.0 ** draw(st.floats(-3, 13))
    steps = draw(st.lists(st.floats(1e-3, 1.0), min_size=exits, max_size=exits))
    risks = draw(st.lists(st.floats(0, 1), min_size=exits, max_size=exits))
    costs = np.cumsum(steps) / np.sum(steps) * scale
    budget = costs[0] + draw(st.floats(0, 1.1)) * (costs[-1] - costs[0])
    return np.array(risks), costs, float(budget)


@pytest.mark.parametrize("shape", SHAPES)
@given(problem=problems())
def test_rates_are_a_probability_vector_that_spends_at_most_the_budget_exactly(shape, problem):
    risks, costs, budget = problem
    rates = SHAPES[shape](risks, costs, budget)
    assert rates.sum() == pytest.approx(1, abs=1e-12)
    assert (rates >= 0).all()
    assert rates @ costs <= budget


@pytest.mark.parametrize("shape", SPENDS_ALL)
@given(problem=problems())
def test_shapes_that_spend_all_do_so(shape, problem):
    risks, costs, budget = problem
    spent = SHAPES[shape](risks, costs, budget) @ costs
    assert spent == pytest.approx(min(budget, costs[-1]), rel=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
@given(problem=problems())
def test_a_larger_budget_never_sends_more_samples_out_early(shape, problem):
    risks, costs, budget = problem
    smaller = float(costs[0] + 0.7 * (budget - costs[0]))
    gone = [np.cumsum(SHAPES[shape](risks, costs, each)) for each in (smaller, budget)]
    assert (gone[0] >= gone[1] - 1e-9).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_at_the_cheapest_budget_everyone_leaves_at_once(shape):
    costs = np.array([1.0, 2.0, 5.0])
    np.testing.assert_array_equal(SHAPES[shape](np.array([0.9, 0.5, 0.1]), costs, 1.0), [1, 0, 0])


@pytest.mark.parametrize("shape", SPENDS_ALL)
def test_at_the_full_budget_everyone_stays_to_the_end(shape):
    costs = np.array([1.0, 2.0, 5.0])
    for budget in (5.0, 7.0):
        np.testing.assert_array_equal(SHAPES[shape](np.array([0.1, 0.5, 0.9]), costs, budget), [0, 0, 1])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_budget_below_the_cheapest_exit_is_refused_with_both_numbers(shape):
    with pytest.raises(BudgetTooSmall, match=r"budget 0.5 per sample is below the cheapest exit \(1\): raise it"):
        SHAPES[shape](np.array([0.9, 0.5]), np.array([1.0, 2.0]), 0.5)


@given(problem=problems(), temperature=st.floats(1e-3, 10))
def test_the_multiplier_is_zero_exactly_when_the_budget_does_not_bind(problem, temperature):
    risks, costs, budget = problem
    free = exponential_weights(risks, costs, float(2 * costs[-1]), temperature=temperature)
    multiplier = budget_multiplier(risks, costs, budget, temperature=temperature)
    if free @ costs <= budget:
        assert multiplier == 0
        np.testing.assert_array_equal(exponential_weights(risks, costs, budget, temperature=temperature), free)
    else:
        assert multiplier > 0


def test_spend_all_makes_the_multiplier_negative_where_the_budget_would_be_left():
    risks, costs = np.array([0.1, 0.9]), np.array([1.0, 2.0])
    assert budget_multiplier(risks, costs, 1.9) == 0
    assert budget_multiplier(risks, costs, 1.9, spend_all=True) < 0


def objective(rates, risks, prior, temperature):
    inside = rates > 0
    return rates @ risks + temperature * np.sum(rates[inside] * np.log(rates[inside] / prior[inside]))


def test_no_general_convex_solver_does_better_on_200_random_problems():
    rng = np.random.default_rng(0)
    agreed = 0
    for _ in range(200):
        exits = int(rng.integers(2, 12))
        costs = np.cumsum(rng.uniform(0.05, 1, exits))
        costs /= costs[-1]
        risks, temperature = rng.uniform(size=exits), 10 ** rng.uniform(-2, 0.5)
        prior = inverse_cost_prior(costs) if rng.uniform() < 0.5 else prior_weights(rng.uniform(0.1, 1, exits), costs)
        budget = float(rng.uniform(costs[0], 1.1))
        spend_all = bool(rng.uniform() < 0.3 and budget < 1)
        options = {"temperature": temperature, "prior": prior, "spend_all": spend_all}
        rates = exponential_weights(risks, costs, budget, **options)
        ours = objective(rates, risks, prior, temperature)

        # the Karush-Kuhn-Tucker conditions: stationarity, complementary slackness
        multiplier = budget_multiplier(risks, costs, budget, **options)
        inside = rates > 1e-300
        gradient = risks + temperature * np.log(rates / prior, where=inside, out=np.zeros(exits)) + multiplier * costs
        assert np.ptp(gradient[inside]) <= 1e-9
        assert abs(multiplier * (budget - rates @ costs)) <= 1e-9

        simplex = LinearConstraint(np.ones((1, exits)), 1, 1)
        limit = LinearConstraint(costs[None], budget if spend_all else -np.inf, budget)
        solved = minimize(
            lambda e: objective(np.maximum(e, 1e-300), risks, prior, temperature),  # noqa: B023
            np.full(exits, 1 / exits),
            jac=lambda e: risks + temperature * (np.log(np.maximum(e, 1e-300) / prior) + 1),  # noqa: B023
            method="SLSQP",
            bounds=[(1e-12, 1)] * exits,
            constraints=[simplex, limit],
            options={"ftol": 1e-15, "maxiter": 2000},
        )
        overspent = max(0.0, solved.x @ costs - budget) + abs(solved.x.sum() - 1)
        assert ours <= solved.fun + 1e-9 + 10 * overspent
        if solved.success and overspent < 1e-10 and solved.fun - ours < 1e-12:
            agreed += 1
            np.testing.assert_allclose(rates, solved.x, atol=1e-6 + 1e-12 * exits)
    assert agreed >= 100  # so the comparison above has been made in earnest


@given(problem=problems())
def test_two_exits_follow_the_closed_form(problem):
    _, costs, budget = problem
    costs = np.array([costs[0], costs[-1] * 2])
    rates = two_exit_rates(costs, budget)
    assert rates @ costs <= budget
    expected = np.clip((budget - costs[1]) / (costs[0] - costs[1]), 0, 1)
    np.testing.assert_allclose(rates, [expected, 1 - expected], atol=1e-12)
    np.testing.assert_allclose(
        rates, exponential_weights(np.array([0.5, 0.1]), costs, budget, spend_all=True), atol=1e-9
    )


def test_two_exits_refuse_a_budget_below_the_early_one():
    with pytest.raises(BudgetTooSmall):
        two_exit_rates(np.array([1.0, 2.0]), 0.9)


def test_geometric_rates_grow_by_one_factor():
    rates = geometric_rates(np.array([1.0, 2.0, 4.0, 7.0]), 5.0)
    np.testing.assert_allclose(rates[1:] / rates[:-1], rates[1] / rates[0])


def test_gaussian_rates_have_the_asked_width():
    rates = gaussian_rates(np.arange(1.0, 8.0), 3.7, width=1.3)
    np.testing.assert_allclose(np.diff(np.log(rates), 2), -1 / 1.3**2)


def test_cumulative_rates_end_at_exactly_one():
    gone = cumulative_rates(np.full(10, 0.1))
    assert gone[-1] == 1
    assert (gone <= 1).all()


def test_an_exit_of_prior_zero_is_never_planned():
    rates = exponential_weights(np.array([0.5, 0.4, 0.1]), np.array([1.0, 2.0, 3.0]), 2.5, prior=[1, 0, 1])
    assert rates[1] == 0
    assert rates @ [1.0, 2.0, 3.0] <= 2.5
    with pytest.raises(BudgetTooSmall, match=r"cheapest exit \(2\)"):
        exponential_weights(np.array([0.5, 0.4, 0.1]), np.array([1.0, 2.0, 3.0]), 1.5, prior=[0, 1, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature 0 must be positive"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"prior": "flat"}, "no prior 'flat'"),
        ({"prior": [1.0]}, "1 weights for 2 exits"),
        ({"prior": [-1.0, 2.0]}, "2 weights >= 0"),
        ({"prior": [0.0, 0.0]}, "not all 0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(BadInput, match=message):
        exponential_weights(np.array([0.5, 0.4]), np.array([1.0, 2.0]), 1.5, **options)


def test_a_gaussian_of_no_width_is_refused():
    with pytest.raises(BadInput, match="width 0"):
        gaussian_rates(np.array([1.0, 2.0]), 1.5, width=0)
