import itertools

import numpy as np
import pytest
from conftest import made_up
from hypothesis import given
from hypothesis import strategies as st

from alight.errors import BudgetTooSmall, LabelsNeeded, Mismatch
from alight.evaluation import oracle, oracle_within

COSTS = np.array([1.0, 2.0, 4.0])


def test_the_free_oracle_leaves_at_the_cheapest_correct_exit():
    table = made_up(0, 300, 3)
    decisions = oracle(COSTS, table)
    right = table.correct()
    assert decisions.accuracy(table.labels) == right.any(axis=1).mean()
    for sample, exit_index in enumerate(decisions.exits):
        assert not right[sample, :exit_index].any()
        assert right[sample, exit_index] or (exit_index == 0 and not right[sample].any())


@given(st.integers(0, 1000), st.floats(1.0, 4.5))
def test_within_a_budget_no_choice_of_exits_is_more_accurate(seed, budget):
    table = made_up(seed, 7, 3, classes=3)
    decisions = oracle_within(COSTS, budget, table)
    assert decisions.mean_cost <= budget + 1e-9
    right = table.correct()
    best = max(
        right[np.arange(7), list(exits)].mean()
        for exits in itertools.product(range(3), repeat=7)
        if COSTS[list(exits)].mean() <= budget + 1e-12
    )
    assert decisions.accuracy(table.labels) == pytest.approx(best)


def test_with_enough_budget_the_oracle_is_free():
    table = made_up(0, 300, 3)
    np.testing.assert_array_equal(oracle_within(COSTS, "100%", table).exits, oracle(COSTS, table).exits)


def test_the_oracle_needs_labels_and_a_budget():
    with pytest.raises(LabelsNeeded, match="the oracle needs labels"):
        oracle(COSTS, made_up(0, 5, 3).unlabelled())
    with pytest.raises(Mismatch, match="3 exits, but there are 2 costs"):
        oracle(COSTS[:2], made_up(0, 5, 3))
    with pytest.raises(BudgetTooSmall):
        oracle_within(COSTS, 0.5, made_up(0, 5, 3))
