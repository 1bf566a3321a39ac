"""What sets each method apart."""

import numpy as np
import pytest
from conftest import made_up

from alight import Costs, HeadOutputs, calibrate, replay
from alight.budgeting.rates import exponential_weights, geometric_rates
from alight.budgeting.thresholds import marginal_thresholds, passing_counts, survivor_thresholds
from alight.calibrate.search import quantiles_of, rates_of
from alight.errors import BadInput, BudgetTooSmall
from alight.policies.policy import Mixture, Patience, Streak, Threshold

TABLE = made_up(1, 500, 5)
COSTS = np.array([1.0, 2.0, 3.5, 4.0, 6.0])


def test_eero_is_exponential_weights_with_survivor_thresholds():
    policy = calibrate.eero(COSTS, 3.0, TABLE, temperature=0.1)
    rates = exponential_weights(TABLE.risks(), COSTS, 3.0, temperature=0.1)
    np.testing.assert_allclose(policy.exit_rates, rates)
    np.testing.assert_array_equal(policy.thresholds, survivor_thresholds(TABLE.scores, rates).values)


def test_eero_takes_risks_from_labelled_and_thresholds_from_unlabelled_data():
    other = made_up(2, 300, 5).unlabelled()
    policy = calibrate.eero(COSTS, 3.0, TABLE, other)
    rates = exponential_weights(TABLE.risks(), COSTS, 3.0)
    np.testing.assert_array_equal(policy.thresholds, survivor_thresholds(other.scores, rates).values)


def test_eero_marginal_is_the_paper_to_the_letter():
    policy = calibrate.eero_marginal(COSTS, 3.0, TABLE)
    rates = exponential_weights(TABLE.risks(), COSTS, 3.0, temperature=0.04)
    np.testing.assert_array_equal(policy.thresholds, marginal_thresholds(TABLE.scores, rates, "paper").values)


def test_eero_says_how_much_of_a_budget_that_does_not_bind_is_left():
    flat = HeadOutputs(TABLE.scores, TABLE.predictions[:, [4] * 5], TABLE.labels)  # all exits equally good
    policy = calibrate.eero(COSTS, 5.9, flat)
    assert policy.settings["multiplier"] == 0
    assert policy.planned_cost < 5.0
    assert f"planned {policy.amount(policy.planned_cost)}" in str(policy)
    assert calibrate.eero(COSTS, 5.9, flat, spend_all=True).planned_cost == pytest.approx(5.9)


@pytest.mark.parametrize("method", [calibrate.eero, calibrate.geometric, calibrate.gaussian, calibrate.two_exits])
def test_every_slack_sends_more_samples_out_than_none(method):
    plain = replay(method(COSTS, 3.0, TABLE), TABLE).mean_cost
    for slack in ("paper", 0.5, "exact"):
        policy = method(COSTS, 3.0, TABLE, slack=slack)
        assert replay(policy, TABLE).mean_cost < plain
        assert policy.settings["slack"] == slack


def test_the_marginal_rule_takes_every_slack_too():
    spent = [
        replay(calibrate.eero_marginal(COSTS, 3.0, TABLE, slack=slack), TABLE).mean_cost
        for slack in (None, "paper", "exact", 2.5)
    ]
    assert spent[0] == max(spent)


def test_two_exits_close_all_others_and_pay_no_head_of_theirs():
    costs = Costs(stages=[1.0, 1.0, 1.0, 1.0, 1.0], heads=[0.5] * 5)
    policy = calibrate.two_exits(costs, 4.0, TABLE, early=2)
    assert policy.open_exits == (2, 4)
    assert policy.costs == (3.5, 6.0)
    assert policy.exit_rates[0] == pytest.approx((4.0 - 6.0) / (3.5 - 6.0))


def test_two_exits_choose_the_early_exit_by_labelled_accuracy():
    chosen = calibrate.two_exits(COSTS, 3.6, TABLE)
    accuracies = {
        early: replay(calibrate.two_exits(COSTS, 3.6, TABLE, early=early), TABLE).accuracy(TABLE.labels)
        for early in range(3)
    }
    assert accuracies[chosen.open_exits[0]] == max(accuracies.values())


def test_two_exits_refuse_an_early_exit_that_is_not_one():
    with pytest.raises(BadInput, match="early exit 4 of a network with exits 0 to 4"):
        calibrate.two_exits(COSTS, 3.0, TABLE, early=4)
    with pytest.raises(BudgetTooSmall, match=r"budget 3 per sample is below the cheapest exit \(4\)"):
        calibrate.two_exits(COSTS, 3.0, TABLE, early=3)


def test_geometric_plans_geometric_rates():
    np.testing.assert_allclose(calibrate.geometric(COSTS, 3.0, TABLE).exit_rates, geometric_rates(COSTS, 3.0))


def test_a_global_threshold_is_one_and_the_next_would_cost_too_much():
    policy = calibrate.global_threshold(COSTS, 3.0, TABLE)
    assert len(set(policy.thresholds)) == 1
    higher = np.unique(TABLE.scores[:, :-1])
    higher = higher[higher > policy.thresholds[0]][1]
    assert replay(Threshold((higher,) * 4, costs=COSTS), TABLE).mean_cost > 3.0


def test_patience_mixes_two_neighbouring_lengths_to_use_the_budget():
    policy = calibrate.patience(COSTS, 3.0, TABLE)
    assert isinstance(policy, Mixture)
    assert policy.first.patience == policy.second.patience + 1
    assert replay(policy, TABLE).mean_cost == pytest.approx(3.0, abs=6.0 / len(TABLE))


def test_patience_needs_no_mixture_when_the_budget_is_full():
    policy = calibrate.patience(COSTS, 6.0, TABLE)
    assert isinstance(policy, Patience)
    assert policy.patience == 4


def test_pcee_chooses_the_streak_that_is_best_on_labelled_data():
    policy = calibrate.pcee(COSTS, 3.6, TABLE)
    assert isinstance(policy, Streak)
    assert replay(policy, TABLE).accuracy(TABLE.labels) >= replay(
        calibrate.global_threshold(COSTS, 3.6, TABLE), TABLE
    ).accuracy(TABLE.labels)


def test_performance_control_asks_one_accuracy_of_all_exits():
    policy = calibrate.performance_control(COSTS, 3.0, TABLE)
    cheaper = policy.second
    asked = cheaper.settings["accuracy"]
    right = TABLE.correct()
    for exit_index, threshold in enumerate(cheaper.thresholds):
        leaving = TABLE.scores[:, exit_index] >= threshold
        if leaving.any():  # an isotonic map's pools average to their level: what leaves is at least so accurate
            assert right[leaving, exit_index].mean() >= asked - 1e-9


def test_genetic_beats_what_it_was_seeded_with_on_the_labelled_data():
    evolved = calibrate.genetic(COSTS, 3.0, TABLE)
    accuracy = replay(evolved, TABLE).accuracy(TABLE.labels)
    for method in (calibrate.eero, calibrate.geometric):
        assert accuracy >= replay(method(COSTS, 3.0, TABLE), TABLE).accuracy(TABLE.labels) - 1 / len(TABLE)
    assert replay(evolved, TABLE).mean_cost <= 3.0


def test_genetic_depends_on_its_seed_alone():
    options = {"population": 16, "generations": 5}
    first, again, other = (calibrate.genetic(COSTS, 3.0, TABLE, seed=seed, **options) for seed in (0, 0, 1))
    assert first == again
    assert first.thresholds != other.thresholds


def test_quantiles_and_rates_are_two_sides_of_one_plan():
    rates = np.array([0.3, 0.0, 0.5, 0.2])
    np.testing.assert_allclose(rates_of(quantiles_of(rates)), rates)
    np.testing.assert_allclose(quantiles_of(np.array([1.0, 0.0, 0.0])), [1, 1])


def test_best_single_exit_is_the_most_accurate_one_that_is_affordable():
    costs = Costs(stages=[1.0, 1.0, 1.5, 0.5, 2.0], heads=[0.1] * 5)
    policy = calibrate.best_single_exit(costs, 3.6, TABLE)
    assert policy.open_exits == (int(np.argmin(TABLE.risks()[:3])),)
    assert policy.costs == (pytest.approx(3.6),)  # no other head is paid for


def test_an_expensive_first_head_does_not_stop_methods_that_close_it():
    costs = Costs(stages=[1.0, 0.1], heads=[5.0, 0.1])
    table = made_up(0, 50, 2)
    assert calibrate.best_single_exit(costs, 2.0, table).open_exits == (1,)
    with pytest.raises(BudgetTooSmall, match=r"cheapest exit \(1.2 FLOPs, "):
        calibrate.best_single_exit(costs, 1.1, table)
    with pytest.raises(BudgetTooSmall, match=r"cheapest exit \(6 FLOPs, "):
        calibrate.eero(costs, 2.0, table)


def test_a_rate_of_zero_closes_the_exit_under_every_slack():
    for slack in (None, "paper", 0.5, "exact"):
        policy = calibrate.eero_marginal(COSTS, 3.5, TABLE, prior=[1, 0, 1, 1, 1], slack=slack)
        assert policy.thresholds[1] == np.inf


def test_the_exact_slack_is_written_down_with_its_delta():
    policy = calibrate.eero(COSTS, 3.0, TABLE, slack="exact", delta=0.01)
    assert policy.settings["delta"] == 0.01
    assert (passing_counts(np.array(policy.exit_rates), 500) >= 0).all()


def test_learning_to_exit_is_one_global_threshold_where_the_score_is_all_there_is():
    fresh = made_up(9, 2000, 5)
    learned, plain = (
        replay(method(COSTS, 3.0, TABLE, fresh.unlabelled()), fresh)
        for method in (calibrate.learning_to_exit, calibrate.global_threshold)
    )
    np.testing.assert_array_equal(learned.exits, plain.exits)


@pytest.mark.parametrize("method", [calibrate.eenet, calibrate.jei_dnn])
def test_trained_exits_believe_exits_that_agree(method):
    rng = np.random.default_rng(0)  # scores tell nothing: the first two exits are right exactly where they agree
    labels = rng.integers(10, size=3000)
    agree = rng.uniform(size=3000) < 0.5
    second = np.where(agree, labels, (labels + 2) % 10)
    table = HeadOutputs(
        rng.uniform(size=(3000, 3)), np.stack([np.where(agree, labels, (labels + 1) % 10), second, labels], 1), labels
    )
    policy = method([1.0, 2.0, 4.0], 3.05, table)
    left = replay(policy, table).exits == 1
    assert replay(policy, table).accuracy(labels) > 0.9
    assert left.mean() > 0.3
    assert agree[left].mean() > 0.9
