"""Learned stopping: backward induction on all that was seen so far."""

import numpy as np
import pytest
from conftest import made_up

from alight import HeadOutputs, calibrate, load_policy, replay
from alight.calibrate.learned import _class_effects, ridge
from alight.calibrate.stopping import cut_to
from alight.errors import BadInput

COSTS = np.array([1.0, 2.0, 4.0])


def known_by_agreement(seed: int, samples: int) -> HeadOutputs:
    """Outputs whose scores tell nothing: where the first two exits agree they are right, else the last one is."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(10, size=samples)
    agree = rng.uniform(size=samples) < 0.5
    wrong = (labels + 1 + rng.integers(4, size=samples)) % 10
    second = np.where(agree, labels, (labels + 5 + rng.integers(4, size=samples)) % 10)
    predictions = np.stack([np.where(agree, labels, wrong), second, labels], axis=1)
    return HeadOutputs(rng.uniform(size=(samples, 3)), predictions, labels)


def known_by_class(seed: int, samples: int) -> HeadOutputs:
    """Outputs whose scores tell nothing: the first exit is right where it predicts an even class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(10, size=samples)
    guess = rng.integers(5, size=samples) * 2 + 1
    first = np.where(labels % 2 == 0, labels, guess)
    return HeadOutputs(rng.uniform(size=(samples, 2)), np.stack([first, labels], axis=1), labels)


def test_exits_that_agree_are_believed_where_scores_tell_nothing():
    labelled, fresh = known_by_agreement(0, 2000), known_by_agreement(1, 4000)
    learned, by_score = (
        replay(method(COSTS, 3.0, labelled, fresh.unlabelled()), fresh)
        for method in (calibrate.learned_stopping, calibrate.optimal_stopping)
    )
    assert max(learned.mean_cost, by_score.mean_cost) <= 3.0
    assert learned.accuracy(fresh.labels) > 0.98  # half leave at the second exit, the others at the last
    assert by_score.accuracy(fresh.labels) < 0.9


def test_classes_that_a_head_knows_leave_there():
    labelled, fresh = known_by_class(0, 2000), known_by_class(1, 4000)
    decisions = replay(calibrate.learned_stopping([1.0, 3.0], 2.1, labelled, fresh.unlabelled()), fresh)
    assert decisions.accuracy(fresh.labels) > 0.95
    assert decisions.mean_cost <= 2.1


def test_class_effects_are_shrunk_to_nothing_where_classes_do_not_differ():
    rng = np.random.default_rng(0)
    parts = np.array_split(np.arange(1000), 5)
    without_effects = [_class_effects(rng.integers(50, size=1000), rng.normal(size=1000), parts)[1] for _ in range(20)]
    assert np.mean(np.square(without_effects)) < 0.01  # the means of classes of 20 samples have a variance of 0.05
    classes = rng.integers(50, size=1000)
    effect = rng.normal(size=50)
    held_out, table = _class_effects(classes, effect[classes] + rng.normal(size=1000), parts)
    assert np.corrcoef(table, effect)[0, 1] > 0.9
    assert np.corrcoef(held_out, effect[classes])[0, 1] > 0.9


def test_no_sample_helps_to_predict_itself():
    rng = np.random.default_rng(0)
    columns = np.concatenate([np.ones((60, 1)), rng.normal(size=(60, 4))], axis=1)
    targets, parts = rng.normal(size=(60, 2)), np.array_split(np.arange(60), 3)
    before, _ = ridge(columns, targets, parts, 1.0)
    changed = targets.copy()
    changed[parts[1]] += 100
    after, _ = ridge(columns, changed, parts, 1.0)
    np.testing.assert_allclose(after[parts[1]], before[parts[1]])
    assert not np.allclose(after[parts[0]], before[parts[0]])


def test_the_plan_is_met_by_thresholds_and_can_be_certified(tmp_path):
    table = made_up(1, 1500, 3)
    policy = calibrate.certified_probability(calibrate.learned_stopping)(COSTS, 2.5, table)
    assert policy.certificate is not None
    policy.save(tmp_path / "policy.json")
    fresh = made_up(2, 3000, 3)
    np.testing.assert_array_equal(
        replay(load_policy(tmp_path / "policy.json"), fresh).exits, replay(policy, fresh).exits
    )
    assert replay(policy, fresh).mean_cost <= 2.5


def test_the_penalty_is_a_positive_number():
    with pytest.raises(BadInput, match="penalty 0 of the ridge regressions must be a positive number"):
        calibrate.learned_stopping(COSTS, 2.5, made_up(1, 50, 3), penalty=0)


def test_rates_that_cost_too_much_by_a_rounding_are_cut():
    rates, costs = np.array([0.1, 0.2, 0.7]), np.array([1.0, 2.0, 4.0])
    assert cut_to(rates, costs, rates @ costs) is rates
    budget = np.nextafter(rates @ costs, 0)
    within = cut_to(rates, costs, budget)
    assert within @ costs <= budget
    np.testing.assert_allclose(within, rates, atol=1e-14)


def test_learned_stopping_gains_over_optimal_stopping_on_the_frozen_recording(frozen):
    def mean_accuracy(method) -> float:
        policies = [method(frozen.costs, f"{percent}%", frozen.labelled) for percent in (30, 50, 70)]
        return float(np.mean([replay(policy, frozen.test).accuracy(frozen.test.labels) for policy in policies]))

    assert mean_accuracy(calibrate.learned_stopping) >= mean_accuracy(calibrate.optimal_stopping) + 0.007


def test_regressions_run_in_one_thread_and_leave_others_theirs(monkeypatch):
    threadpoolctl = pytest.importorskip("threadpoolctl")
    seen = []

    def threads():
        return {each["num_threads"] for each in threadpoolctl.threadpool_info() if each["user_api"] == "blas"}

    def watched(*arguments):
        seen.append(threads())
        return ridge(*arguments)

    monkeypatch.setattr("alight.calibrate.learned.ridge", watched)
    with threadpoolctl.threadpool_limits(2, "blas"):
        before = threads()
        for method in (calibrate.eenet, calibrate.learned_stopping):
            method(COSTS, 3.0, made_up(5, 200, 3))
        assert threads() == before
    assert seen
    assert all(each == {1} for each in seen)
