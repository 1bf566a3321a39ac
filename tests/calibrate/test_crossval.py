"""Fewer exits: a method on some exits alone, and which to keep."""

from functools import partial

import numpy as np
import pytest
from conftest import made_up

from alight import Costs, HeadOutputs, calibrate, load_policy, replay
from alight.budgeting.thresholds import survivor_thresholds
from alight.calibrate import pruned
from alight.calibrate.crossval import Ranked, held_out, kept_exits, on_exits, shared_by_budgets
from alight.errors import BadInput, BudgetTooSmall
from alight.policies.policy import Threshold

COSTS = Costs(stages=[1.0, 1.0, 1.5, 0.5, 2.0], heads=[0.2, 0.3, 0.1, 0.2, 0.1])
TABLE = made_up(1, 600, 5)
EXPENSIVE = Costs(stages=[1.0] * 5, heads=[0.1, 2.0, 0.1, 2.0, 0.1])  # two heads that are not worth it

METHODS = ["eero", "eero_marginal", "geometric", "gaussian", "search"]


def test_costs_and_tables_of_some_exits_are_those_of_the_network():
    some = COSTS.at_exits([1, 2, 4])
    np.testing.assert_array_equal(some.cumulative(), COSTS.cumulative([1, 2, 4]))
    assert some.unit == COSTS.unit
    np.testing.assert_array_equal(TABLE.at_exits([1, 4]).scores, TABLE.scores[:, [1, 4]])
    np.testing.assert_array_equal(TABLE.at_exits([1, 4]).labels, TABLE.labels)


@pytest.mark.parametrize("method", [calibrate.eero, calibrate.patience, calibrate.performance_control])
def test_a_method_on_some_exits_is_a_policy_of_the_whole_network(method, tmp_path):
    opened = (0, 2, 4)
    policy = on_exits(method, opened)(COSTS, "60%", TABLE)
    inner = method(COSTS.at_exits(opened), COSTS.budget("60%"), TABLE.at_exits(opened))
    assert set(policy.open_exits) <= set(opened)
    assert (policy.num_exits, policy.budget) == (5, COSTS.budget("60%"))
    np.testing.assert_allclose(policy.costs, COSTS.cumulative(policy.open_exits))
    whole, part = replay(policy, TABLE), replay(inner, TABLE.at_exits(opened))
    np.testing.assert_array_equal(whole.exits, np.array(opened)[part.exits])
    np.testing.assert_array_equal(whole.predictions, part.predictions)
    policy.save(tmp_path / "policy.json")
    assert load_policy(tmp_path / "policy.json") == policy


def test_without_labels_the_truth_stays_the_last_exit_of_the_network():
    policy = on_exits(calibrate.eero, (0, 1))(COSTS, 2.0, TABLE.unlabelled())
    judged = HeadOutputs(TABLE.scores, TABLE.predictions, TABLE.predictions[:, -1])
    assert policy == on_exits(calibrate.eero, (0, 1))(COSTS, 2.0, judged)


@pytest.mark.parametrize("name", METHODS)
def test_pruning_closes_heads_that_are_not_worth_their_cost(name):
    method = calibrate.METHODS[name]
    if name == "search":
        method = partial(method, rounds=1, steps=20)  # else it takes a minute
    fresh = made_up(9, 5000, 5)
    plain, closed = method(EXPENSIVE, 4.5, TABLE), pruned(method)(EXPENSIVE, 4.5, TABLE)
    assert not {1, 3} & set(closed.open_exits)
    assert closed.method == name
    assert replay(closed, TABLE).mean_cost <= 4.5
    assert replay(closed, fresh).accuracy(fresh.labels) > replay(plain, fresh).accuracy(fresh.labels) - 0.005


@pytest.mark.parametrize("name", METHODS)
def test_a_method_alone_prunes_nothing(name):
    assert "pruned" not in calibrate.METHODS[name](COSTS, "60%", TABLE).settings


def test_pruning_never_lowers_the_held_out_accuracy():
    def accuracy(opened) -> float:
        return held_out(on_exits(calibrate.geometric, opened), EXPENSIVE, 4.5, TABLE, 5)[0].mean()

    kept = kept_exits(calibrate.geometric, EXPENSIVE, 4.5, TABLE)
    assert accuracy(kept) >= accuracy((0, 1, 2, 3, 4))
    fewer = [[each for each in kept if each != closed] for closed in kept]
    affordable = [each for each in fewer if EXPENSIVE.cumulative(each)[0] <= 4.5]
    assert affordable
    assert max(accuracy(each) for each in affordable) < accuracy(kept)


def test_the_last_exit_is_closed_when_the_one_before_is_as_good_and_cheaper():
    copied = HeadOutputs(TABLE.scores[:, [0, 1, 2, 3, 3]], TABLE.predictions[:, [0, 1, 2, 3, 3]], TABLE.labels)
    policy = pruned(calibrate.eero)(COSTS, 3.5, copied, spend_all=True)
    assert policy.open_exits[-1] < 4
    decisions = replay(policy, copied)
    assert decisions.mean_cost <= 3.5
    assert decisions.num_exits == 5


def test_pruning_is_judged_on_samples_that_set_no_rates():
    seen = []

    def method(costs, budget, labelled, unlabelled):
        seen.append((labelled, unlabelled))
        return calibrate.eero(costs, budget, labelled, unlabelled)

    right, spent = held_out(method, COSTS, 4.0, TABLE, 5)
    assert sum(len(unlabelled) for _, unlabelled in seen) == len(TABLE) == len(right)
    for labelled, unlabelled in seen:
        assert unlabelled.labels is None
        assert not set(map(tuple, labelled.scores)) & set(map(tuple, unlabelled.scores))
    assert spent.mean() <= 4.0


def test_a_too_expensive_first_head_is_pruned_and_a_budget_below_all_is_refused():
    costs = Costs(stages=[1.0, 0.1, 1.0, 1.0, 1.0], heads=[5.0, 0.1, 0.1, 0.1, 0.1])
    assert 0 not in pruned(calibrate.eero)(costs, 2.0, TABLE).open_exits
    with pytest.raises(BudgetTooSmall, match=r"cheapest exit \(1.2 FLOPs, "):
        pruned(calibrate.eero)(costs, 1.1, TABLE)


def test_a_prior_given_exit_by_exit_cannot_be_pruned():
    with pytest.raises(BadInput, match=r"a prior of 5 weights for 4 exits: .* where exits are closed, name it"):
        pruned(calibrate.eero)(COSTS, 4.0, TABLE, prior=[1, 1, 1, 1, 1])


def test_two_samples_are_enough_to_prune():
    policy = pruned(calibrate.eero)(COSTS, 4.0, made_up(0, 2, 5))
    assert replay(policy, made_up(0, 2, 5)).mean_cost <= 4.0


def test_what_does_not_depend_on_a_budget_is_computed_once_and_again_for_other_content():
    calls = []

    @shared_by_budgets
    def counted(table, further):
        calls.append(further)
        return float(table.scores.sum())

    table = made_up(1, 50, 3)
    again = made_up(1, 50, 3)
    assert counted(table, 1) == counted(again, 1) == counted(table, 1)
    assert calls == [1]
    before = counted(table, 2)
    table.scores[0, 0] += 1.0  # in place: the same table of another content
    assert counted(table, 2) == pytest.approx(before + 1.0)
    assert calls == [1, 2, 2]


@pytest.mark.parametrize("seed", range(20))
def test_samples_reach_the_exits_that_survivor_thresholds_let_them_leave_at(seed):
    rng = np.random.default_rng(seed)
    table = made_up(seed, 200, 4)
    rates = rng.dirichlet(np.ones(4)) * (rng.uniform(size=4) > 0.2)
    rates = rates / rates.sum() if rates.sum() else np.eye(4)[3]
    exits = np.argmax(np.vstack([Ranked(table).reached(rates), np.ones(200, dtype=bool)]), axis=0)
    thresholds = survivor_thresholds(table.scores, rates)
    policy = Threshold(thresholds.values, thresholds.tie_shares, costs=(1.0, 2.0, 3.0, 4.0), score=table.score)
    np.testing.assert_array_equal(exits, replay(policy, table).exits)
