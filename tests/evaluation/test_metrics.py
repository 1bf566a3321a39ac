import numpy as np
import pytest
from conftest import made_up

from alight import Decisions, HeadOutputs, replay
from alight.errors import BadInput, LabelsNeeded, Mismatch
from alight.evaluation import bootstrap, per_class
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


@pytest.mark.parametrize("confidence", [0, 1, 95])
def test_a_confidence_outside_its_range_is_refused(confidence):
    with pytest.raises(BadInput, match="confidence"):
        bootstrap(DECISIONS, TABLE.labels, np.random.default_rng(0), confidence=confidence)


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
