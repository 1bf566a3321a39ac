from dataclasses import replace

import numpy as np
import pytest
from conftest import made_up

from alight import Decisions, HeadOutputs, replay
from alight.errors import BadInput, LabelsNeeded, Mismatch
from alight.evaluation import SINGLE_EXIT, Point, area_under_curve, bootstrap, calibration_errors, per_class
from alight.policies.policy import Threshold

TABLE = made_up(1, 2000, 4)
DECISIONS = replay(Threshold((0.8, 0.7, 0.6), costs=(1.0, 2.0, 4.0, 5.0)), TABLE)


def test_the_bootstrap_over_kinds_is_the_bootstrap_over_samples():
    ours = bootstrap(DECISIONS, TABLE.labels, np.random.default_rng(0), draws=20_000)
    rng = np.random.default_rng(1)
    rows = rng.integers(len(TABLE), size=(4000, len(TABLE)))
    accuracy = (DECISIONS.predictions == TABLE.labels)[rows].mean(axis=1)
    cost = DECISIONS.spent[rows].mean(axis=1)
    np.testing.assert_allclose(ours.accuracy, np.quantile(accuracy, [0.025, 0.975]), atol=0.002)
    np.testing.assert_allclose(ours.mean_cost, np.quantile(cost, [0.025, 0.975]), atol=0.008)


def test_bootstrap_intervals_cover_the_truth_as_often_as_they_say():
    covered = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        right = (rng.uniform(size=400) < 0.7).astype(int)
        interval = bootstrap(Decisions(right, 0 * right, np.ones(400)), np.ones(400, int), rng, draws=400).accuracy
        covered += interval.low <= 0.7 <= interval.high
    assert 180 <= covered <= 199  # 190 expected; a binomial leaves these bounds once in a thousand


def test_a_bootstrap_is_decided_by_its_generator():
    first, again = (bootstrap(DECISIONS, TABLE.labels, np.random.default_rng(3)) for _ in range(2))
    assert first == again


def test_classes_add_up_to_the_whole():
    table = per_class(DECISIONS, TABLE)
    weights = table.samples / table.samples.sum()
    assert weights @ table.accuracy == pytest.approx(DECISIONS.accuracy(TABLE.labels))
    assert weights @ table.mean_cost == pytest.approx(DECISIONS.mean_cost)
    np.testing.assert_allclose(weights @ table.exit_shares, DECISIONS.exit_shares)
    np.testing.assert_allclose(weights @ table.full_accuracy, 1 - TABLE.risks()[-1])
    np.testing.assert_allclose(table.gain, table.accuracy - table.full_accuracy)


def test_classes_that_are_not_there_have_no_row():
    outputs = HeadOutputs(np.ones((2, 1)), [[0], [7]], labels=[7, 7])
    table = per_class(Decisions([0, 7], [0, 0], [1.0, 1.0]), outputs)
    assert table.classes.tolist() == [7]
    assert table.accuracy.tolist() == [0.5]


def test_labels_and_tables_of_other_samples_are_refused():
    with pytest.raises(BadInput, match=r"shape \(3,\) for 2000 decisions"):
        bootstrap(DECISIONS, [1, 2, 3], np.random.default_rng(0))
    with pytest.raises(BadInput, match="0 draws"):
        bootstrap(DECISIONS, TABLE.labels, np.random.default_rng(0), draws=0)
    with pytest.raises(Mismatch, match="2000 decisions about a table of 10 samples"):
        per_class(DECISIONS, made_up(0, 10, 4))


def test_classes_need_labels():
    with pytest.raises(LabelsNeeded):
        per_class(DECISIONS, TABLE.unlabelled())


ALONE = [Point(SINGLE_EXIT, cost, accuracy, cost) for cost, accuracy in ((2.0, 0.4), (4.0, 0.5), (6.0, 0.8))]


def area_of(*places: tuple[float, float]) -> float:
    return area_under_curve([*(Point("mine", cost, accuracy, cost) for cost, accuracy in places), *ALONE])["mine"]


def test_an_area_is_the_mean_accuracy_of_the_best_mixtures():
    budgets = np.linspace(2, 6, 4001)
    envelope = np.maximum(np.interp(budgets, [2, 3, 6], [0.4, 0.7, 0.8]), 0)  # (5, 0.72) is below the mixture
    assert area_of((3.0, 0.7), (5.0, 0.72)) == pytest.approx(np.mean((envelope[1:] + envelope[:-1]) / 2))
    assert area_under_curve(ALONE)[SINGLE_EXIT] == pytest.approx(0.6)  # from (2, 0.4) to (6, 0.8): (4, 0.5) is below


def test_no_budget_has_to_be_spent():
    assert area_of((3.0, 0.9)) == pytest.approx((0.65 + 3 * 0.9) / 4)  # better than the full network, at half its cost


def test_an_area_counts_no_budget_above_the_full_network():
    assert area_of((8.0, 0.8)) == pytest.approx(0.6)
    assert area_of((8.0, 1.0)) == pytest.approx(0.6)  # the mixture with the cheapest exit is on the same line
    assert area_of((8.0, 1.3)) == pytest.approx(np.mean([0.4, 1.0]))


def test_another_point_never_makes_an_area_smaller():
    rng = np.random.default_rng(0)
    places = [(float(cost), float(right)) for cost, right in rng.uniform([2, 0], [6, 1], size=(30, 2))]
    areas = [area_of(*places[:count]) for count in range(1, 31)]
    assert areas == sorted(areas)


def test_an_area_needs_the_exits_alone():
    with pytest.raises(BadInput, match="references=True"):
        area_under_curve([Point("mine", 1.0, 0.5, 1.0)])
    with pytest.raises(BadInput, match="no budgets between"):
        area_under_curve(ALONE[:1])


def test_calibration_errors_are_the_gap_between_probability_and_accuracy():
    rng = np.random.default_rng(0)
    probabilities = rng.uniform(0.5, 1, size=(100_000, 2))
    accuracies = np.stack([probabilities[:, 0], probabilities[:, 1] - 0.2], axis=1)  # one honest, one too sure
    predictions = (rng.uniform(size=accuracies.shape) >= accuracies).astype(int)
    table = HeadOutputs(probabilities, predictions, np.zeros(100_000, int), score="max_probability")
    np.testing.assert_allclose(calibration_errors(table), [0, 0.2], atol=0.01)


def test_probabilities_are_the_score_a_feature_or_log_probabilities_and_never_a_margin():
    logits = np.random.default_rng(0).normal(size=(500, 3, 4))
    labels = np.zeros(500, int)
    score = HeadOutputs.from_logits(logits, labels, "max_probability")
    feature = HeadOutputs.from_logits(logits, labels, features=["max_probability"])
    logs = HeadOutputs.from_logits(logits, labels)
    np.testing.assert_array_equal(calibration_errors(score), calibration_errors(feature))
    np.testing.assert_allclose(calibration_errors(score), calibration_errors(logs), atol=0.01)
    with pytest.raises(BadInput, match="has the margin and no probabilities"):
        calibration_errors(replace(logs, top=None))
    with pytest.raises(LabelsNeeded):
        calibration_errors(score.unlabelled())
