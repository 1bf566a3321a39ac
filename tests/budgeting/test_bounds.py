import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import betainc

from alight.budgeting.bounds import (
    exact_plan,
    exact_ranks,
    expected_cost,
    mixture_risk,
    oracle_bound,
    overspend_probability,
    passing_bound,
    routing_gain,
    share_law,
)
from alight.budgeting.rates import exponential_weights, geometric_rates, inverse_cost_prior
from alight.budgeting.thresholds import passing_counts
from alight.errors import BadInput, BudgetTooSmall


@given(st.integers(1, 3000), st.integers(1, 3000), st.floats(0.01, 0.99))
def test_with_two_exits_overspending_follows_the_beta_law(first, second, budget):
    law, costs = np.array([first, second]), np.array([1.0, 2.0])
    exact = 1 - betainc(second, first, budget)
    assert overspend_probability(costs, law, 1 + budget) == pytest.approx(exact, abs=1e-8)


@pytest.mark.parametrize("law", [[3, 2, 6], [1, 1, 1], [0, 5, 40, 0, 6], [400, 300, 300, 1], [4999, 1, 1]])
def test_overspending_agrees_with_simulation(law):
    law = np.array(law)
    costs = np.array([1.0, 2.0, 4.0, 5.0, 9.0])[: len(law)]
    drawn = np.random.default_rng(0).gamma(np.maximum(law, 1e-12), size=(400_000, len(law)))
    means = (drawn / drawn.sum(axis=1, keepdims=True)) @ costs
    for level in (0.05, 0.5, 0.95):
        budget = np.quantile(means, level)
        assert overspend_probability(costs, law, budget) == pytest.approx(1 - level, abs=0.004)


def test_overspending_agrees_with_simulation_for_any_law():
    rng = np.random.default_rng(0)
    for _ in range(400):
        exits = int(rng.integers(2, 9))
        law, costs = (10 ** rng.uniform(0, 3.5, exits)).astype(int), np.cumsum(rng.uniform(0.01, 1, exits))
        drawn = rng.gamma(law, size=(4000, exits))
        means = (drawn / drawn.sum(axis=1, keepdims=True)) @ costs
        budget = means.mean() + rng.uniform(-3, 3) * means.std()
        if costs[0] < budget < costs[-1]:
            assert overspend_probability(costs, law, budget) == pytest.approx((means > budget).mean(), abs=0.04)


def test_overspending_is_certain_or_impossible_at_the_ends():
    law, costs = np.array([3, 4]), np.array([1.0, 2.0])
    assert overspend_probability(costs, law, 0.9) == 1
    assert overspend_probability(costs, law, 2.0) == 0
    assert overspend_probability(costs, np.array([5, 0]), 1.0) == 0


@given(st.integers(1, 500), st.floats(0, 1))
def test_the_law_of_the_counts_spends_at_most_the_plan_in_expectation(samples, place):
    costs = np.array([1.0, 2.0, 4.0, 5.0])
    budget = 1 + 4 * place
    law = share_law(passing_counts(geometric_rates(costs, budget), samples), samples)
    assert law.sum() == samples + 1
    assert (law >= 0).all()
    assert expected_cost(costs, law) <= budget * (1 + 1e-12)


@pytest.mark.parametrize("samples", [1, 10, 50, 1000, 100_000])
@pytest.mark.parametrize("delta", [0.01, 0.3])
def test_the_exact_plan_is_within_delta_and_wastes_little(samples, delta):
    costs = np.array([1.0, 2.0, 4.0, 5.0])
    rates = exact_plan(lambda b: geometric_rates(costs, b), costs, 3.0, samples, delta)
    law = share_law(passing_counts(rates, samples), samples)
    assert overspend_probability(costs, law, 3.0) <= delta
    if samples >= 1000:
        generous = geometric_rates(costs, float(rates @ costs) + 4 * 5.0 / samples)
        law = share_law(passing_counts(generous, samples), samples)
        assert overspend_probability(costs, law, 3.0) > delta  # a few samples more would have been too many


def test_the_exact_plan_of_a_budget_that_does_not_bind_is_the_plan():
    costs, risks = np.array([1.0, 2.0]), np.array([0.0, 0.9])
    plan = lambda b: exponential_weights(risks, costs, b)  # noqa: E731
    np.testing.assert_array_equal(exact_plan(plan, costs, 1.9, 500, 0.05), plan(1.9))


def test_the_exact_plan_refuses_what_cannot_be_guaranteed():
    costs = np.array([1.0, 2.0])
    with pytest.raises(BadInput, match="delta 0 must lie inside"):
        exact_plan(lambda b: geometric_rates(costs, b), costs, 1.5, 100, 0.0)
    with pytest.raises(BudgetTooSmall):
        exact_plan(lambda b: geometric_rates(costs, b), costs, 0.5, 100, 0.1)


def test_exact_ranks_are_the_largest_whose_beta_quantile_is_planned():
    rates, samples, delta = np.array([0.3, 0.3, 0.4]), 400, 0.1
    for rank, left in zip(exact_ranks(rates, samples, delta), [0.7, 0.4], strict=True):
        assert passing_bound(rank, samples, delta / 2) <= left < passing_bound(rank + 1, samples, delta / 2)


def test_a_passing_bound_is_a_beta_quantile():
    drawn = np.random.default_rng(0).beta(30, 71, size=200_000)
    assert passing_bound(30, 100, 0.05) == pytest.approx(np.quantile(drawn, 0.95), abs=0.002)
    assert passing_bound(0, 100, 0.05) == 0
    assert passing_bound(101, 100, 0.05) == 1


@given(st.integers(0, 10_000), st.floats(0.005, 2.0))
def test_the_oracle_inequality_holds_for_the_random_mixture(seed, temperature):
    rng = np.random.default_rng(seed)
    costs = np.cumsum(rng.uniform(0.1, 1, 6))
    risks, budget = rng.uniform(size=6), float(rng.uniform(costs[0], costs[-1]))
    rates, prior = exponential_weights(risks, costs, budget, temperature=temperature), inverse_cost_prior(costs)
    inside = rates > 0
    divergence = np.sum(rates[inside] * np.log(rates[inside] / prior[inside]))
    bound = oracle_bound(risks, costs, budget, temperature=temperature)
    assert mixture_risk(rates, risks) + temperature * divergence <= bound + 1e-9


def test_the_oracle_inequality_is_false_for_the_confidence_routed_rule():
    # two exits, both wrong half of the time, the first sure exactly where it is wrong, the second wrong on the others
    from alight import HeadOutputs, replay
    from alight.policies.policy import Threshold

    labels = np.zeros(1000, dtype=int)
    wrong_first = np.arange(1000) < 500
    predictions = np.stack([wrong_first, ~wrong_first], axis=1).astype(int)
    outputs = HeadOutputs(np.stack([wrong_first, np.ones(1000)], axis=1).astype(float), predictions, labels)
    costs, temperature = np.array([1.0, 2.0]), 0.04
    rates = exponential_weights(outputs.risks(), costs, 1.5, temperature=temperature)
    policy = Threshold((0.5,), costs=costs)
    error = 1 - replay(policy, outputs).accuracy(labels)
    assert error == 1
    assert error > oracle_bound(outputs.risks(), costs, 1.5, temperature=temperature)
    assert routing_gain(rates, outputs.risks(), error) == pytest.approx(-0.5)


def test_the_oracle_bound_needs_an_affordable_exit():
    with pytest.raises(BudgetTooSmall):
        oracle_bound(np.array([0.5]), np.array([2.0]), 1.0)
