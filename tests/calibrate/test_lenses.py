"""Lenses as they are fitted: laws of each, and of methods calibrated through them."""

import sys

import numpy as np
import pytest
from conftest import made_up

from alight import Costs, HeadOutputs, load_policy, replay, sweep
from alight.calibrate import (
    METHODS,
    best_single_exit,
    eero,
    fit_ensemble,
    fit_gain,
    fit_recall,
    geometric,
    global_threshold,
    patience,
    two_exits,
    with_lens,
)
from alight.errors import AlightError, BadInput, BudgetTooSmall, LabelsNeeded, Mismatch

COSTS = Costs(stages=[2.0, 1.0, 3.0, 2.0], heads=[0.5, 0.25, 0.25, 0.5], unit="ms")
LABELLED, UNLABELLED, FRESH = made_up(1, 1000, 4), made_up(2, 800, 4).unlabelled(), made_up(3, 4000, 4)


def spoken(seed: int, samples: int, exits: int = 4, classes: int = 6) -> HeadOutputs:
    """Exits of growing skill whose errors are partly their own, with log-probabilities."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=samples)
    shared, own = rng.normal(size=(samples, 1, classes)), rng.normal(size=(samples, exits, classes))
    logits = 0.5 * shared + own
    logits[np.arange(samples), :, labels] += np.linspace(0.7, 1.6, exits)
    return HeadOutputs.from_logits(2 * logits, labels, keep_log_probabilities=True)


TABLES = {
    "gain": (fit_gain, LABELLED, UNLABELLED, FRESH),
    "recall": (fit_recall, LABELLED, UNLABELLED, FRESH),
    "ensemble": (fit_ensemble, spoken(1, 1000), spoken(2, 800).unlabelled(), spoken(3, 4000)),
}
every_lens = pytest.mark.parametrize("kind", TABLES)


@every_lens
@pytest.mark.parametrize("method", [eero, geometric, global_threshold, patience])
def test_fresh_samples_cost_what_was_allowed_up_to_sampling_error(kind, method):
    fit, labelled, unlabelled, fresh = TABLES[kind]
    for table, other in ((labelled, None), (labelled, unlabelled)):
        policy = with_lens(method, fit)(COSTS, 5.0, table, other)
        decisions = replay(policy, fresh)
        calibrated = len(table) // 2 if other is None else len(other)
        error = decisions.spent.std() * np.sqrt(1 / calibrated + 1 / len(fresh))
        assert decisions.mean_cost <= 5.0 + 4 * error


@every_lens
def test_the_unlabelled_table_keeps_the_budget_that_it_sets(kind):
    fit, labelled, unlabelled, _ = TABLES[kind]
    assert replay(with_lens(eero, fit)(COSTS, 5.0, labelled, unlabelled), unlabelled).mean_cost <= 5.0


@every_lens
def test_the_same_seed_gives_the_same_policy_and_another_another(kind):
    fit, labelled, _, _ = TABLES[kind]
    first, again, other = (with_lens(eero, fit, seed=seed)(COSTS, 5.0, labelled) for seed in (0, 0, 1))
    assert first == again
    assert first != other


@every_lens
def test_a_policy_with_its_lens_survives_saving(kind, tmp_path):
    fit, labelled, _, fresh = TABLES[kind]
    policy = with_lens(eero, fit)(COSTS, 5.0, labelled)
    policy.save(tmp_path / "policy.json")
    loaded = load_policy(tmp_path / "policy.json")
    assert loaded == policy
    np.testing.assert_array_equal(replay(loaded, fresh).exits, replay(policy, fresh).exits)
    assert (policy.method, policy.score) == (f"eero through {kind}", policy.lens.score)
    assert policy.unit == "ms"


@every_lens
def test_a_method_through_a_lens_is_a_method(kind):
    fit, labelled, _, fresh = TABLES[kind]
    methods = {"with": with_lens(eero, fit), "without": eero}
    points = sweep(methods, COSTS, ["50%", "80%"], labelled=labelled, test=fresh, references=False)
    assert [point.method for point in points] == ["with", "with", "without", "without"]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_calibrated_through_a_lens(name):
    own = {"population": 8, "generations": 2} if name == "genetic" else {}
    policy = with_lens(METHODS[name], fit_recall)(COSTS, 5.0, LABELLED, UNLABELLED, **own)
    decisions = replay(policy, UNLABELLED)
    assert decisions.mean_cost <= 5.0 * (1 + 1e-12)
    np.testing.assert_allclose(policy.costs, COSTS.cumulative(policy.open_exits))


@pytest.mark.parametrize("method", [two_exits, best_single_exit])
@every_lens
def test_where_exits_are_closed_the_lens_is_fitted_for_those_left(kind, method):
    fit, labelled, _, fresh = TABLES[kind]
    policy = with_lens(method, fit)(COSTS, 5.0, labelled)
    assert policy.lens.exits == policy.open_exits != (0, 1, 2, 3)
    assert policy.num_exits == 4
    assert replay(policy, fresh).num_exits == 4
    plain = replay(policy.__class__(**{**vars(policy), "lens": None}), policy.lens.apply(fresh))
    np.testing.assert_array_equal(replay(policy, fresh).predictions, plain.predictions)


def test_gain_is_learned_where_there_is_something_to_learn():
    outputs, fresh = made_up(5, 4000, 3), made_up(6, 4000, 3)
    seen = fit_gain(outputs).apply(fresh)
    right = fresh.correct().astype(float)
    for index in range(2):
        gain = right[:, -1] - right[:, index]
        likely = -seen.scores[:, index]
        assert likely.mean() == pytest.approx(gain.mean(), abs=0.03)
        assert gain[likely > np.median(likely)].mean() > gain[likely <= np.median(likely)].mean() + 0.1
    np.testing.assert_allclose(seen.scores[:, -1], 0, atol=1e-12)  # nothing comes after the last exit


def test_logistic_regression_orders_samples_by_whether_going_on_mends_them(frozen):
    lens = fit_gain(frozen.labelled, model="logistic")
    seen = lens.apply(frozen.test)
    mended = frozen.test.correct()[:, -1] & ~frozen.test.correct()[:, 5]
    nothing_to_gain, something = seen.scores[~mended, 5], seen.scores[mended, 5]
    assert (nothing_to_gain[:, None] > something[None, :500]).mean() > 0.7  # higher is surer
    with pytest.raises(BadInput, match="choose ridge or logistic"):
        fit_gain(frozen.labelled, model="forest")


def test_cross_fitting_uses_every_sample_and_nearly_keeps_the_budget(frozen):
    policy = with_lens(eero, fit_recall, folds=4)(frozen.costs, "50%", frozen.labelled)
    assert policy.settings["folds"] == 4
    assert "share" not in policy.settings
    assert replay(policy, frozen.test).mean_cost <= 1.1 * policy.budget
    whole = fit_recall(frozen.labelled, eero(frozen.costs, "50%", frozen.labelled))
    assert policy.lens == whole
    with pytest.raises(BadInput, match="1 folds"):
        with_lens(eero, fit_recall, folds=1)(frozen.costs, "50%", frozen.labelled)


def test_gain_asks_where_the_policy_would_go_on_to():
    policy = geometric(COSTS, 5.0, LABELLED)
    assert fit_gain(LABELLED, policy) != fit_gain(LABELLED)


def test_gain_reads_every_score_of_the_table():
    outputs = spoken(0, 200)
    both = HeadOutputs(outputs.scores, outputs.predictions, outputs.labels, features={"double": 2 * outputs.scores})
    assert fit_gain(both).inputs == ("margin", "double")


def test_reliability_is_how_often_an_exit_is_right():
    seen = fit_recall(LABELLED, handicap=1.0).apply(FRESH)
    right = FRESH.correct()
    for index in range(4):
        for part in np.array_split(np.argsort(seen.scores[:, index]), 5):
            assert seen.scores[part, index].mean() == pytest.approx(right[part, index].mean(), abs=0.1)


def test_recall_keeps_the_order_of_scores_inside_an_exit():
    seen = fit_recall(LABELLED, handicap=1.0).apply(LABELLED)
    np.testing.assert_array_equal(seen.predictions, LABELLED.predictions)
    order = np.argsort(LABELLED.scores[:, 0], kind="stable")
    assert (np.diff(seen.scores[order, 0]) >= 0).all()
    assert len(np.unique(seen.scores[:, 0])) == len(np.unique(LABELLED.scores[:, 0]))


def test_fitted_handicaps_leave_no_fewer_answers_right_than_the_exits_themselves():
    seen = fit_recall(LABELLED).apply(LABELLED)
    assert (seen.correct().sum(axis=0) >= LABELLED.correct().sum(axis=0)).all()


def test_recall_without_labels_trusts_the_last_exit():
    blind = fit_recall(LABELLED.unlabelled())
    np.testing.assert_array_equal(blind.apply(LABELLED).predictions[:, -1], LABELLED.predictions[:, -1])
    assert isinstance(with_lens(eero, fit_gain)(COSTS, 5.0, LABELLED.unlabelled()).planned_cost, float)


def test_equal_scores_of_an_exit_are_no_trouble():
    flat = HeadOutputs(np.ones((50, 2)), np.zeros((50, 2), dtype=int), np.zeros(50, dtype=int))
    for fit in (fit_gain, fit_recall):
        policy = with_lens(eero, fit)([1.0, 2.0], 1.5, flat)
        assert replay(policy, flat).accuracy(flat.labels) == 1


def test_an_ensemble_of_independent_exits_beats_its_last_one():
    labelled, fresh = spoken(1, 3000), spoken(2, 6000)
    lens = fit_ensemble(labelled)
    assert min(*lens.kept, *lens.fresh) >= 0
    gain = lens.apply(fresh).correct()[:, -1].astype(float) - fresh.correct()[:, -1]
    assert gain.mean() > 4 * gain.std() / np.sqrt(len(gain))


def test_an_ensemble_of_one_exit_answers_as_it_does():
    outputs = spoken(0, 500, exits=1)
    seen = fit_ensemble(outputs).apply(outputs)
    clear = outputs.scores > 1e-2
    np.testing.assert_array_equal(seen.predictions[clear], outputs.predictions[clear])


def test_labels_or_logarithms_that_are_missing_are_asked_for():
    with pytest.raises(LabelsNeeded, match="an ensemble of exits needs labels"):
        fit_ensemble(spoken(0, 50).unlabelled())
    with pytest.raises(Mismatch, match="keep_log_probabilities=True"):
        fit_ensemble(LABELLED)


def test_too_few_samples_and_foreign_tables_are_refused():
    with pytest.raises(BadInput, match=r"0\.5 of 30 labelled samples to fit a lens: both parts need at least 20"):
        with_lens(eero, fit_recall)(COSTS, 5.0, made_up(0, 30, 4))
    with pytest.raises(BadInput, match=r"1\.5 of 1000 labelled samples"):
        with_lens(eero, fit_recall, share=1.5)(COSTS, 5.0, LABELLED)
    with pytest.raises(Mismatch, match="the labelled table has 3 exits, but there are 4 costs"):
        with_lens(eero, fit_recall)(COSTS, 5.0, made_up(0, 100, 3))
    with pytest.raises(BudgetTooSmall, match="below the cheapest exit"):
        with_lens(eero, fit_recall)(COSTS, 2.0, LABELLED)


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(AlightError, match=r"pip install 'alight\[learn\]'"):
        fit_gain(LABELLED)
