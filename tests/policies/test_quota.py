from fractions import Fraction

import numpy as np
import pytest
from conftest import made_up
from hypothesis import given
from hypothesis import strategies as st

from alight import HeadOutputs, load_policy, replay
from alight.budgeting.rates import quota_counts
from alight.errors import BadInput, BudgetTooSmall
from alight.policies.limits import Quota, surest


@st.composite
def plans(draw):
    exits, total = draw(st.integers(1, 9)), draw(st.integers(1, 3000))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    costs = np.cumsum(rng.uniform(0.01, 1, exits)) * 10.0 ** draw(st.integers(-3, 12))
    rates = rng.dirichlet(np.full(exits, draw(st.sampled_from([0.2, 1.0, 5.0]))))
    rates[rng.uniform(size=exits) < 0.2] = 0
    rates = rates / rates.sum() if rates.sum() > 0 else np.eye(exits)[0]
    return rates, costs, total


@given(plans())
def test_quotas_are_whole_complete_affordable_and_near_the_plan(plan):
    rates, costs, total = plan
    budget = float(rates @ costs)
    counts = quota_counts(rates, costs, budget, total)
    assert counts.sum() == total
    assert (counts >= 0).all()
    exact = sum(int(count) * Fraction(cost) for count, cost in zip(counts, costs.tolist(), strict=True))
    assert exact <= total * Fraction(budget)
    assert (counts[1:][rates[1:] == 0] == 0).all()
    assert_near_the_plan(counts, rates, costs, total)


def assert_near_the_plan(counts, rates, costs, total):
    """Less than one sample more or fewer have left by every exit, and less than one sample's cost is unspent."""
    assert (np.abs(np.cumsum(counts) - total * np.cumsum(rates)) < 1 + 1e-6).all()
    planned = float(rates @ costs)
    left = planned * total - (counts * costs).sum()
    opened = costs[rates > 0]
    assert -1e-9 * planned * total <= left <= np.diff(opened).max(initial=0.0) + 1e-9 * planned * total


def test_no_exchange_moves_whole_groups_of_samples_away_from_the_plan():
    rates, costs = np.array([0.37, 0.39, 0.24]), np.array([0.70, 1.48, 2.07])
    assert quota_counts(rates, costs, float(rates @ costs), 10).tolist() == [4, 4, 2]


@given(plans(), st.floats(0, 1))
def test_a_plan_more_expensive_than_the_budget_is_made_to_keep_it(plan, place):
    rates, costs, total = plan
    budget = float(costs[0] + place * (costs[-1] - costs[0]))
    counts = quota_counts(rates, costs, budget, total)
    exact = sum(int(count) * Fraction(cost) for count, cost in zip(counts, costs.tolist(), strict=True))
    assert exact <= total * Fraction(budget)
    if budget <= rates @ costs:
        assert (counts * costs).sum() >= total * budget * (1 - 1e-9) - np.ptp(costs)


@given(plans())
def test_a_plan_cheaper_than_the_budget_is_not_made_more_expensive(plan):
    rates, costs, total = plan
    counts = quota_counts(rates, costs, float(2 * costs[-1]), total)
    assert_near_the_plan(counts, rates, costs, total)


def test_a_budget_below_the_first_exit_is_refused():
    with pytest.raises(BudgetTooSmall):
        quota_counts(np.array([1.0]), np.array([2.0]), 1.0, 5)


def test_the_cheapest_budget_sends_everyone_out_at_once():
    np.testing.assert_array_equal(quota_counts(np.array([0.5, 0.5]), np.array([1.0, 2.0]), 1.0, 7), [7, 0])


@given(st.integers(0, 1000), st.integers(1, 300), st.integers(1, 400), st.booleans())
def test_every_batch_keeps_its_budget_whatever_it_holds(seed, samples, batch_size, ties):
    table = made_up(seed, samples, 4, ties=ties)
    policy = Quota(costs=(1.0, 2.0, 4.0, 5.0), exit_rates=(0.4, 0.1, 0.3, 0.2), budget=2.8)
    spent = replay(policy, table, batch_size=batch_size).spent
    for start in range(0, samples, batch_size):
        batch = spent[start : start + batch_size]
        assert batch.sum() <= len(batch) * 2.8


def test_the_surest_leave_first():
    table = made_up(0, 500, 3)
    decisions = replay(Quota(costs=(1.0, 2.0, 3.0), exit_rates=(0.5, 0.25, 0.25), budget=1.75), table)
    left = decisions.exits == 0
    assert left.sum() == 250
    assert table.scores[left, 0].min() >= table.scores[~left, 0].max()


def test_batches_are_not_mixed():
    table = made_up(0, 400, 3)
    policy = Quota(costs=(1.0, 2.0, 3.0), exit_rates=(0.5, 0.25, 0.25), budget=1.75)
    together = replay(policy, table, batch_size=100).exits
    apart = [replay(policy, table.take(slice(start, start + 100))) for start in range(0, 400, 100)]
    assert [np.bincount(together[100 * i : 100 * i + 100]).tolist() for i in range(4)] == [
        np.bincount(each.exits).tolist() for each in apart
    ]


def test_arrays_and_tensors_choose_the_same_samples():
    torch = pytest.importorskip("torch")
    scores = np.round(np.random.default_rng(0).uniform(size=200), 1)
    samples = np.arange(200)
    ours = surest(scores, samples, 77, 2**52 + 5)
    assert ours.sum() == 77
    np.testing.assert_array_equal(surest(torch.tensor(scores), torch.tensor(samples), 77, 2**52 + 5).numpy(), ours)


def test_a_quota_survives_saving(tmp_path):
    policy = Quota(costs=(1.0, 3.0), exit_rates=(0.5, 0.5), budget=2.0, method="eero")
    policy.save(tmp_path / "policy.json")
    assert load_policy(tmp_path / "policy.json") == policy
    assert "surest of each batch" in str(policy)


def test_a_quota_needs_rates_and_a_budget():
    with pytest.raises(BadInput, match="needs exit rates and a budget"):
        Quota(costs=(1.0, 2.0), budget=1.5)


def test_one_sample_is_a_batch():
    table = HeadOutputs(np.ones((1, 2)), np.zeros((1, 2), int))
    assert replay(Quota(costs=(1.0, 3.0), exit_rates=(0.5, 0.5), budget=2.0), table).spent.tolist() == [1.0]
