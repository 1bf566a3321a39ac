"""A meter counts real costs: no batch and no stream spends more than it may, whatever the samples are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alight import HeadOutputs, Threshold, replay
from alight.errors import BadInput
from alight.policies.limits import Metered, meter
from alight.policies.route import replay_on

MOST = (1.0, 3.0, 10.0)


def streams(seed: int, size: int) -> HeadOutputs:
    rng = np.random.default_rng(seed)
    scores = np.round(rng.uniform(size=(size, 3)), 1)  # with ties
    costs = np.array(MOST) * rng.choice([0.0, 0.1, 1.0], p=[0.2, 0.5, 0.3], size=(size, 3))
    return HeadOutputs(scores, np.zeros((size, 3), int), costs=costs)


def metered(budget: float, *, per_batch: bool) -> Metered:
    inner = Threshold(thresholds=(0.7, 0.6), costs=(0.4, 1.4, 5.0), budget=budget)
    return meter(inner, MOST, per_batch=per_batch)


@given(st.integers(0, 10**6), st.integers(1, 200), st.integers(1, 50), st.floats(1, 14))
def test_every_stream_and_every_batch_keeps_its_budget(seed, size, batch, budget):
    table = streams(seed, size)
    for per_batch, overdraft in ((True, 0.0), (False, sum(MOST))):
        spent = replay(metered(budget, per_batch=per_batch), table, batch_size=batch).spent
        sums = np.array([spent[start : start + batch].sum() for start in range(0, size, batch)])
        sizes = np.array([len(spent[start : start + batch]) for start in range(0, size, batch)])
        if not per_batch:
            sums, sizes = np.cumsum(sums), np.cumsum(sizes)
        assert (sums <= sizes * budget + overdraft).all()


def test_a_budget_that_is_never_short_leaves_the_decisions_alone():
    table = streams(0, 500)
    policy = metered(14.0, per_batch=False)
    np.testing.assert_array_equal(replay(policy, table, batch_size=10).exits, replay(policy.policy, table).exits)


def test_the_surest_samples_leave_where_the_budget_is_short():
    scores = [[0.5, 0.0, 0.0], [0.1, 0.0, 0.0], [0.3, 0.0, 0.0], [0.2, 0.0, 0.0]]
    costs = [[1.0, 3.0, 10.0]] * 4
    policy = metered(2.8, per_batch=True)  # of 11.2, 4 are spent at once, and 7.2 pay for two calls
    decisions = replay(policy, HeadOutputs(scores, np.zeros((4, 3), int), costs=costs))
    assert decisions.exits.tolist() == [0, 1, 0, 1]


def test_a_stream_goes_on_from_what_it_has_spent():
    table, policy = streams(1, 300), metered(2.0, per_batch=False)
    whole = replay(policy, table, batch_size=30).spent
    first, memory = replay_on(policy, table.take(slice(150)), batch_size=30)
    second, _ = replay_on(policy, table.take(slice(150, 300)), memory, batch_size=30)
    assert first.spent.sum() + second.spent.sum() <= 300 * 2.0 + sum(MOST)
    assert len(whole) == 300


def test_a_meter_needs_costs_and_a_budget_that_pays_for_a_first_call():
    with pytest.raises(BadInput, match="this table has no 'costs'"):
        replay(metered(2.0, per_batch=True), HeadOutputs([[0.1] * 3], [[0] * 3], score="margin"))
    with pytest.raises(BadInput, match=r"one call of exit 1 can cost 1, more than the budget of 0.5"):
        metered(0.5, per_batch=False)
    with pytest.raises(BadInput, match="give one positive number each"):
        meter(metered(2.0, per_batch=True).policy, [1.0, 2.0])
    with pytest.raises(BadInput, match="a meter needs a budget"):
        meter(Threshold(thresholds=(0.5,), costs=(1.0, 2.0)), [1.0, 2.0])
