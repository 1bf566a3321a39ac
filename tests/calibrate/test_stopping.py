"""Optimal stopping: one price for cost, from the last exit back."""

import time
from itertools import pairwise

import numpy as np
import pytest
from conftest import made_up
from scipy.optimize import isotonic_regression

from alight import HeadOutputs, calibrate, replay
from alight.budgeting.thresholds import survivor_thresholds
from alight.calibrate.crossval import Ranked
from alight.calibrate.stopping import _concave, _PricedPlan, _slope, _upper, rates_at_price
from alight.policies.policy import Mixture, Threshold

COSTS = np.array([1.0, 2.0, 3.5, 4.0, 6.0])
TABLE = made_up(1, 800, 5)


def test_those_leave_whose_isotonic_advantage_is_above_zero():
    rng = np.random.default_rng(0)
    for _ in range(50):
        advantage, order = rng.normal(rng.normal(), 1, size=40), rng.permutation(40)
        fit = isotonic_regression(advantage[order]).x
        np.testing.assert_array_equal(_upper(advantage, order)[order], fit >= 0)


def test_with_two_exits_a_price_has_the_best_threshold_there_is():
    table = made_up(2, 300, 2)
    costs, price = np.array([0.4, 1.0]), 0.5
    share = rates_at_price(Ranked(table), costs, price)[0]
    order = np.argsort(table.scores[:, 0])[::-1]  # surest first
    right = table.correct()[order]
    here = np.concatenate([[0], np.cumsum(right[:, 0] - price * costs[0])])
    later = np.concatenate([np.cumsum((right[:, 1] - price * costs[1])[::-1])[::-1], [0]])
    assert (here + later)[round(share * 300)] == pytest.approx((here + later).max())


def test_a_higher_price_spends_less_and_the_ends_are_the_ends():
    ranked, costs = Ranked(TABLE), COSTS / COSTS[-1]
    spent = [rates_at_price(ranked, costs, price) @ costs for price in (0.0, 0.1, 0.3, 1.0, 3.0, 100.0)]
    assert spent == sorted(spent, reverse=True)
    assert spent[-1] == pytest.approx(costs[0])


def test_no_budget_falls_between_two_prices():
    for budget in np.linspace(1.0, 4.25, 14):
        decisions = replay(calibrate.optimal_stopping(COSTS, budget, TABLE), TABLE)
        assert budget - 6.0 * 5 / len(TABLE) <= decisions.mean_cost <= budget


def test_a_gap_between_two_prices_is_bridged():
    rng = np.random.default_rng(0)  # the middle exit is as bad as the first, so no price ever chooses it
    labels = rng.integers(5, size=1000)
    wrong = (labels + 1) % 5
    predictions = np.stack([wrong, wrong, labels], axis=1)
    table = HeadOutputs(np.tile(rng.uniform(size=(1000, 1)), 3), predictions, labels)
    decisions = replay(calibrate.optimal_stopping([1.0, 2.0, 3.0], 2.0, table), table)
    np.testing.assert_allclose(decisions.exit_shares, [0.5, 0, 0.5], atol=0.005)
    assert decisions.accuracy(labels) == pytest.approx(0.5, abs=0.005)


def test_where_the_unsure_are_beyond_help_policies_are_mixed_and_not_rates():
    fresh = made_up(77, 20_000, 5)  # here a low score means that later exits are wrong too: sending it on is a waste
    for budget in (1.5, 2.0, 2.5):
        policy = calibrate.optimal_stopping(COSTS, budget, TABLE, fresh.unlabelled())
        assert isinstance(policy, Mixture)
        assert isinstance(policy.first, Threshold)
        decisions = replay(policy, fresh)
        assert decisions.mean_cost <= budget
        eero = replay(calibrate.eero(COSTS, budget, TABLE, fresh.unlabelled()), fresh)
        assert decisions.accuracy(fresh.labels) > eero.accuracy(fresh.labels) + 0.03


def test_plans_on_the_hull_rise_with_falling_slope():
    rng = np.random.default_rng(0)
    plans = [_PricedPlan(1.0, np.ones(1), *pair) for pair in rng.uniform(size=(50, 2))]
    hull = _concave(plans)
    slopes = [_slope(*pair) for pair in pairwise(hull)]
    assert slopes == sorted(slopes, reverse=True)
    assert min(slopes) > 0
    assert hull[-1].accuracy == max(plan.accuracy for plan in plans)
    costs, accuracies = ([getattr(plan, name) for plan in hull] for name in ("cost", "accuracy"))
    for plan in plans:
        assert plan.cost < hull[0].cost or plan.accuracy <= np.interp(plan.cost, costs, accuracies) + 1e-12


def test_going_on_is_not_paid_for_where_it_brings_nothing():
    late = HeadOutputs(TABLE.scores, TABLE.predictions[:, [0, 1, 2, 2, 2]], TABLE.labels)
    policy = calibrate.optimal_stopping(COSTS, 6.0, late)
    assert replay(policy, late).mean_cost <= 3.5
    assert replay(policy, late).accuracy(late.labels) >= late.correct()[:, 2].mean() - 0.01


def test_the_plan_comes_from_labelled_and_thresholds_from_unlabelled_data():
    other = made_up(2, 300, 5).unlabelled()
    policy = calibrate.optimal_stopping(COSTS, 4.0, TABLE, other)
    assert policy.exit_rates == calibrate.optimal_stopping(COSTS, 4.0, TABLE).exit_rates
    np.testing.assert_array_equal(
        policy.thresholds, survivor_thresholds(other.scores, np.array(policy.exit_rates)).values
    )


def test_stopping_beats_eero_on_the_frozen_recording(frozen):
    def mean_accuracy(method) -> float:
        policies = [method(frozen.costs, f"{percent}%", frozen.labelled) for percent in range(20, 91, 10)]
        return float(np.mean([replay(policy, frozen.test).accuracy(frozen.test.labels) for policy in policies]))

    start = time.thread_time()  # which others on this machine do not slow
    optimal = mean_accuracy(calibrate.optimal_stopping)
    assert time.thread_time() - start < 8 * 5
    assert optimal >= mean_accuracy(calibrate.eero) + 0.005
