"""A local search on exit rates, and the sorted table that makes it fast."""

import time

import numpy as np
import pytest
from conftest import made_up

from alight import Costs, HeadOutputs, calibrate, replay
from alight.budgeting.rates import geometric_rates
from alight.budgeting.thresholds import survivor_thresholds
from alight.calibrate.crossval import Ranked, folds, halves
from alight.calibrate.problem import Problem
from alight.calibrate.search import _average, _climb, _closed, _exchanged, _starts, conditional_risks
from alight.policies.policy import Threshold

COSTS = Costs(stages=[1.0, 1.0, 1.5, 0.5, 2.0], heads=[0.2, 0.3, 0.1, 0.2, 0.1])
TABLE = made_up(1, 600, 5)


@pytest.mark.parametrize("ties", [False, True])
def test_the_fast_count_is_the_accuracy_of_the_replayed_policy(ties):
    table, rng = made_up(3, 301, 5, ties=ties), np.random.default_rng(0)
    plans = [*rng.dirichlet(np.ones(5), size=20), [0, 0.5, 0, 0.5, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]]
    for rates in map(np.array, plans):
        thresholds = survivor_thresholds(table.scores, rates)
        policy = Threshold(tuple(thresholds.values), tuple(thresholds.tie_shares), costs=COSTS.cumulative())
        assert Ranked(table).accuracy(rates) == replay(policy, table).accuracy(table.labels)


def test_folds_hold_everyone_once_and_halves_come_both_ways_round():
    parts = folds(103, 5)
    assert sorted(np.concatenate(parts)) == list(range(103))
    assert {len(part) for part in parts} == {20, 21}
    for half, other in halves(103, 2):
        assert sorted([*half, *other]) == list(range(103))
    assert len(halves(103, 2)) == 4


def test_exchanges_keep_the_sum_and_the_cost():
    problem = Problem.of("search", COSTS, "60%", TABLE, None)
    rng = np.random.default_rng(0)
    for plan in _starts(problem, (0, 1, 2, 3, 4)):
        for _ in range(50):
            moved = _exchanged(plan, rng.normal(), rng) or plan
            assert moved.rates.min() >= 0
            assert moved.rates.sum() == pytest.approx(1, abs=1e-12)
            assert moved.planned == pytest.approx(plan.planned, rel=1e-12)
            plan = moved


def test_closing_an_exit_takes_its_head_off_the_bill_and_keeps_the_spending():
    problem = Problem.of("search", COSTS, "60%", TABLE, None)
    plan = _starts(problem, (0, 1, 2, 3, 4))[0]
    for seed in range(5):
        closed = _closed(problem, plan, np.random.default_rng(seed))
        assert len(closed.open_exits) == 4
        np.testing.assert_array_equal(closed.costs, COSTS.cumulative(closed.open_exits))
        assert closed.planned == pytest.approx(plan.planned, rel=1e-9)
        assert closed.rates.sum() == pytest.approx(1)


def test_a_climb_never_ends_worse_on_the_half_that_keeps():
    problem = Problem.of("search", COSTS, "60%", TABLE, None)
    tried, kept = (Ranked(TABLE.take(part)) for part in folds(len(TABLE), 2))
    for start in _starts(problem, (0, 1, 2, 3, 4))[::5]:
        best = _climb(problem, start, tried, kept, 100, np.random.default_rng(0))
        assert kept.accuracy(best.rates) >= kept.accuracy(start.rates)


def test_the_average_of_plans_keeps_the_budget_exactly():
    problem = Problem.of("search", COSTS, "60%", TABLE, None)
    rng = np.random.default_rng(0)
    plans = [_closed(problem, plan, rng) for plan in _starts(problem, (0, 1, 2, 3, 4))]
    mean = _average(problem, plans)
    assert mean.planned <= problem.budget
    assert mean.planned == pytest.approx(np.mean([plan.planned for plan in plans]), rel=1e-9)


def test_search_closes_an_expensive_head_that_adds_nothing():
    costs = Costs(stages=[1.0, 1.0, 1.0, 1.0, 1.0], heads=[0.1, 3.0, 0.1, 0.1, 0.1])
    policy = calibrate.search(costs, 4.0, TABLE)
    assert 1 not in policy.open_exits
    expensive = calibrate.eero(costs, 4.0, TABLE)
    assert replay(policy, TABLE).accuracy(TABLE.labels) > replay(expensive, TABLE).accuracy(TABLE.labels)


def test_search_does_without_a_first_head_that_it_cannot_afford():
    costs = Costs(stages=[1.0, 0.1, 1.0, 1.0, 1.0], heads=[5.0, 0.1, 0.1, 0.1, 0.1])
    policy = calibrate.search(costs, 2.0, TABLE)
    assert policy.open_exits[0] == 1
    assert replay(policy, TABLE).mean_cost <= 2.0


def test_search_depends_on_its_seed_alone():
    first, again, other = (calibrate.search(COSTS, "60%", TABLE, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.thresholds != other.thresholds


def test_rates_come_from_labelled_and_thresholds_from_unlabelled_data():
    other = made_up(2, 300, 5).unlabelled()
    policy = calibrate.search(COSTS, "60%", TABLE, other)
    assert policy.exit_rates == calibrate.search(COSTS, "60%", TABLE).exit_rates
    opened = list(policy.open_exits)
    expected = survivor_thresholds(other.scores[:, opened], np.array(policy.exit_rates))
    np.testing.assert_array_equal(policy.thresholds, expected.values)


def test_search_finds_what_rates_of_a_fixed_shape_miss():
    fixed, found = [], []
    for seed in range(4):
        table, fresh = made_up(seed, 2000, 5), made_up(100 + seed, 20_000, 5)
        policy = calibrate.search(COSTS, "60%", table, fresh.unlabelled())
        found.append(replay(policy, fresh).accuracy(fresh.labels))
        rates = geometric_rates(COSTS.cumulative(), COSTS.budget("60%"))
        fixed.append(Ranked(fresh).accuracy(rates))
    assert np.mean(found) > np.mean(fixed)


def test_a_search_on_the_recording_takes_seconds(frozen):
    start = time.thread_time()  # which others on this machine do not slow
    calibrate.search(frozen.costs, "50%", frozen.labelled)
    assert time.thread_time() - start < 5


def uninformed(seed: int, samples: int) -> HeadOutputs:
    """Outputs whose scores tell nothing of who is right."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(5, size=samples)
    right = rng.uniform(size=(samples, 4)) < [0.3, 0.5, 0.6, 0.8]
    return HeadOutputs(
        rng.uniform(size=(samples, 4)), np.where(right, labels[:, None], (labels[:, None] + 1) % 5), labels
    )


@pytest.mark.parametrize("budget", [1.5, 2.5, 3.9])
def test_the_fixed_point_of_eero_is_eero_where_scores_tell_nothing(budget):
    for seed in range(5):
        table = uninformed(seed, 2000)
        conditional, plain = (
            method([1.0, 2.0, 3.0, 4.0], budget, table) for method in (calibrate.eero_conditional, calibrate.eero)
        )
        assert conditional.exit_rates == plain.exit_rates
        assert conditional.thresholds == plain.thresholds


def test_risks_of_leaving_samples_are_right_about_the_first_of_two_exits():
    table = made_up(1, 3000, 2)
    rates = np.array([0.4, 0.6])
    risks = conditional_risks(Ranked(table), rates)
    policy = calibrate.two_exits([1.0, 2.0], 1.6, table)
    left = replay(policy, table).exits == 0
    measured = table.correct()[left, 1].mean() - table.correct()[left, 0].mean()
    assert risks[1] == table.risks()[1]
    assert risks[0] - risks[1] == pytest.approx(measured, abs=0.05)  # less what sampling error could have done


def test_the_fixed_point_gains_over_eero_where_eero_loses(frozen):
    def accuracy(method, percent: int) -> float:
        return replay(method(frozen.costs, f"{percent}%", frozen.labelled), frozen.test).accuracy(frozen.test.labels)

    gains = [accuracy(calibrate.eero_conditional, each) - accuracy(calibrate.eero, each) for each in (70, 80, 90)]
    assert min(gains) > 0
    assert np.mean(gains) > 0.004
