"""Fitted combinations: laws of each, and of methods calibrated on combined answers."""

import time
from dataclasses import replace

import numpy as np
import pytest
from conftest import made_up

from alight import Costs, HeadOutputs, calibrate, load_policy, replay, sweep
from alight.calibrate import (
    COMBINE,
    METHODS,
    best_single_exit,
    combined,
    eero,
    fit_agreement,
    fit_geometric_mean,
    fit_temperature,
    fit_vote,
    geometric,
    global_threshold,
    patience,
    two_exits,
)
from alight.errors import BadInput, BudgetTooSmall, Mismatch
from alight.evaluation import calibration_errors
from alight.policies.combinations import Vote

COSTS = Costs(stages=[2.0, 1.0, 3.0, 2.0], heads=[0.5, 0.25, 0.25, 0.5], unit="ms")
LABELLED, UNLABELLED, FRESH = made_up(1, 1000, 4), made_up(2, 800, 4).unlabelled(), made_up(3, 4000, 4)


def spoken(seed: int, samples: int, exits: int = 4, classes: int = 6) -> HeadOutputs:
    """Exits of growing skill whose errors are partly their own, with log-probabilities."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=samples)
    shared, own = rng.normal(size=(samples, 1, classes)), rng.normal(size=(samples, exits, classes))
    logits = 0.5 * shared + own
    logits[np.arange(samples), :, labels] += np.linspace(0.7, 1.6, exits)
    return HeadOutputs.from_logits(2 * logits, labels)


TABLES = dict.fromkeys(COMBINE, (LABELLED, UNLABELLED, FRESH))
TABLES |= dict.fromkeys(
    ("agreement", "temperature", "geometric_mean"), (spoken(1, 1000), spoken(2, 800).unlabelled(), spoken(3, 4000))
)
each_combination = pytest.mark.parametrize("kind", TABLES)


@each_combination
@pytest.mark.parametrize("method", [eero, geometric, global_threshold, patience])
def test_fresh_samples_cost_what_was_allowed_up_to_sampling_error(kind, method):
    labelled, unlabelled, fresh = TABLES[kind]
    for table, other in ((labelled, None), (labelled, unlabelled)):
        policy = combined(method, kind)(COSTS, 5.0, table, other)
        decisions = replay(policy, fresh)
        calibrated = len(table) if other is None else len(other)
        error = decisions.spent.std() * np.sqrt(1 / calibrated + 1 / len(fresh))
        assert decisions.mean_cost <= 5.0 + 4 * error


@each_combination
def test_the_unlabelled_table_keeps_the_budget_that_it_sets(kind):
    labelled, unlabelled, _ = TABLES[kind]
    assert replay(combined(eero, kind)(COSTS, 5.0, labelled, unlabelled), unlabelled).mean_cost <= 5.0


@each_combination
def test_a_policy_with_its_combination_survives_saving(kind, tmp_path):
    labelled, _, fresh = TABLES[kind]
    policy = combined(eero, kind)(COSTS, 5.0, labelled)
    policy.save(tmp_path / "policy.json")
    loaded = load_policy(tmp_path / "policy.json")
    assert loaded == policy
    np.testing.assert_array_equal(replay(loaded, fresh).exits, replay(policy, fresh).exits)
    assert (policy.method, policy.score) == (f"eero, {kind}", policy.combination.score)
    assert policy.unit == "ms"


@each_combination
def test_a_method_with_combined_answers_is_a_method(kind):
    labelled, _, fresh = TABLES[kind]
    methods = {"with": combined(eero, kind), "without": eero}
    points = sweep(methods, COSTS, ["50%", "80%"], labelled=labelled, test=fresh, references=False)
    assert [point.method for point in points] == ["with", "with", "without", "without"]


COMBINING = ("learning_to_exit", "eenet", "jei_dnn", "learned_stopping", "auto")  # score by all exits so far


@pytest.mark.parametrize("name", COMBINING[:-1])
def test_a_method_that_combines_itself_is_not_combined_once_more(name):
    with pytest.raises(BadInput, match="cannot be combined once more"):
        combined(METHODS[name], "vote")(COSTS, 5.0, LABELLED, UNLABELLED)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in COMBINING])
def test_every_other_method_can_be_calibrated_with_combined_answers(name):
    own = {"population": 8, "generations": 2} if name == "genetic" else {}
    policy = combined(METHODS[name], "vote")(COSTS, 5.0, LABELLED, UNLABELLED, **own)
    decisions = replay(policy, UNLABELLED)
    assert decisions.mean_cost <= 5.0 * (1 + 1e-12)
    np.testing.assert_allclose(policy.costs, COSTS.cumulative(policy.open_exits))


@pytest.mark.parametrize("method", [two_exits, best_single_exit])
@each_combination
def test_where_exits_are_closed_the_combination_is_fitted_for_those_left(kind, method):
    labelled, _, fresh = TABLES[kind]
    policy = combined(method, kind)(COSTS, 5.0, labelled)
    assert policy.combination.exits == policy.open_exits != (0, 1, 2, 3)
    assert policy.num_exits == 4
    assert replay(policy, fresh).num_exits == 4
    plain = replay(policy.__class__(**{**vars(policy), "combination": None}), policy.combination.apply(fresh))
    np.testing.assert_array_equal(replay(policy, fresh).predictions, plain.predictions)


@pytest.mark.parametrize("top", [3, 6])
def test_a_temperature_makes_probabilities_true(top):
    labelled, fresh = (too_sure(seed, top) for seed in (1, 2))
    fitted = fit_temperature(labelled)
    np.testing.assert_allclose(fitted.temperatures, 3.0, rtol=0.15)
    before, after = calibration_errors(fresh), calibration_errors(fitted.apply(fresh))
    assert (before > 0.1).all()
    assert (after < 0.03).all()
    assert np.array_equal(fitted.apply(fresh).predictions, fresh.predictions)


def too_sure(seed: int, top: int) -> HeadOutputs:
    """Labels drawn from the softmax of logits, which are then three times as large."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.normal(size=(4000, 2, 6))
    logits[:, 1] = logits[:, 0]  # one distribution of the label, at both exits
    labels = (rng.gumbel(size=(4000, 6)) + logits[:, 0]).argmax(axis=1)
    return HeadOutputs.from_logits(3 * logits, labels, top=top)


@each_combination
def test_without_labels_the_last_exit_is_trusted(kind):
    labelled, _, _ = TABLES[kind]
    blind = COMBINE[kind](labelled.unlabelled()).apply(labelled)
    assert (blind.predictions[:, -1] == labelled.predictions[:, -1]).mean() > 0.999
    assert isinstance(combined(eero, kind)(COSTS, 5.0, labelled.unlabelled()).planned_cost, float)


def test_agreement_keeps_every_answer_and_is_surest_where_exits_agree():
    labelled, _, _ = TABLES["agreement"]
    found = fit_agreement(labelled.unlabelled()).apply(labelled)
    np.testing.assert_array_equal(found.predictions, labelled.predictions)
    alike = labelled.predictions[:, 1] == labelled.predictions[:, 0]
    assert found.scores[alike, 1].min() > found.scores[~alike, 1].max()
    with pytest.raises(BadInput, match="agreement adds scores from 0 to 1 to votes, and 'margin' runs from -"):
        fit_agreement(LABELLED)


def test_equal_scores_of_an_exit_are_no_trouble():
    logits = np.tile([0.0, 1.0], (50, 2, 1))
    flat = HeadOutputs.from_logits(logits, np.ones(50, dtype=int))
    for kind in COMBINE:
        policy = combined(eero, kind)([1.0, 2.0], 1.5, flat)
        assert replay(policy, flat).accuracy(flat.labels) == 1


@pytest.mark.parametrize("kind", ["vote", "geometric_mean"])
def test_exits_that_err_independently_answer_better_together(kind):
    labelled, fresh = spoken(1, 3000), spoken(2, 6000)
    gain = COMBINE[kind](labelled).apply(fresh).correct()[:, -1].astype(float) - fresh.correct()[:, -1]
    assert gain.mean() > 4 * gain.std() / np.sqrt(len(gain))


@pytest.mark.parametrize("kind", COMBINE)
def test_the_first_exit_answers_for_itself_and_keeps_the_order_of_its_scores(kind):
    outputs = spoken(0, 500)
    seen = COMBINE[kind](outputs).apply(outputs)
    clear = outputs.scores[:, 0] > 1e-2  # log-probabilities are kept in half precision
    np.testing.assert_array_equal(seen.predictions[clear, 0], outputs.predictions[clear, 0])
    if kind == "vote":  # the others have scores of their own
        assert (np.diff(seen.scores[np.argsort(outputs.scores[:, 0], kind="stable"), 0]) >= 0).all()


def penalised_surprise(vote: Vote, outputs: HeadOutputs, exit_index: int) -> float:
    """Negative log-likelihood of the labels under the vote at an exit, and the ridge penalty, class by class."""
    constants, slopes, other = (part[exit_index] for part in (vote.constants, vote.slopes, vote.others))
    total = 0.5 * sum(number**2 for number in (*constants, *slopes))
    for row, label in enumerate(outputs.labels):
        votes = {}
        for place, prediction in enumerate(outputs.predictions[row, : exit_index + 1]):
            cast = constants[place] + slopes[place] * outputs.scores[row, place]
            votes[prediction] = votes.get(prediction, 0.0) + cast
        total += np.logaddexp.reduce([other, *votes.values()]) - votes.get(label, other)
    return total


def test_a_fitted_vote_is_the_likeliest_under_its_penalty():
    outputs, rng = spoken(4, 300), np.random.default_rng(0)
    vote = fit_vote(outputs)
    best = penalised_surprise(vote, outputs, 3)
    for _ in range(20):
        moved = {
            name: (*getattr(vote, name)[:3], tuple(np.maximum(0, getattr(vote, name)[3] + rng.normal(0, 0.05, 4))))
            for name in ("constants", "slopes")
        }
        others = (*vote.others[:3], vote.others[3] + rng.normal(0, 0.05))
        assert penalised_surprise(replace(vote, **moved, others=others), outputs, 3) > best


def test_logarithms_that_are_missing_and_unknown_names_are_refused():
    with pytest.raises(Mismatch, match="record it again"):
        fit_geometric_mean(LABELLED)
    with pytest.raises(BadInput, match="no combination 'guess': choose one of vote, agreement, geometric_mean"):
        combined(eero, "guess")


def test_a_vote_of_many_samples_and_exits_is_fitted_in_a_second():
    outputs = spoken(0, 5000, exits=18, classes=100)

    def seconds() -> float:
        start = time.thread_time()  # which others on this machine do not slow
        fit_vote(outputs)
        return time.thread_time() - start

    assert any(seconds() < 1 for _ in range(3))  # half of it on most machines


def test_too_few_samples_and_foreign_tables_are_refused():
    with pytest.raises(BadInput, match="30 labelled samples to fit a combination: record at least 40"):
        combined(eero, "vote")(COSTS, 5.0, made_up(0, 30, 4))
    with pytest.raises(Mismatch, match="the labelled table has 3 exits, but there are 4 costs"):
        combined(eero, "vote")(COSTS, 5.0, made_up(0, 100, 3))
    with pytest.raises(BudgetTooSmall, match="below the cheapest exit"):
        combined(eero, "vote")(COSTS, 2.0, LABELLED)


def graded_likelihoods():
    """Two exits that name classes 0 and 1 while class 2 is second for both: their mean says 2, which nobody graded."""
    logs = np.log(np.tile([[[0.5, 0.4, 0.1], [0.5, 0.4, 0.1]]], (60, 1, 1)))
    classes = np.tile([[[0, 2, 1], [1, 2, 0]]], (60, 1, 1))
    return HeadOutputs(
        np.tile([0.1, 0.1], (60, 1)),
        np.tile([0, 1], (60, 1)),
        np.full(60, 2),
        quality=np.tile([0.2, 0.7], (60, 1)),
        top=(classes, logs),
    )


def test_an_answer_that_no_exit_gave_has_no_quality_and_is_refused():
    graded = graded_likelihoods()
    mean = fit_geometric_mean(graded)
    assert (mean.apply(replace(graded, quality=None)).predictions[:, -1] == 2).all()
    with pytest.raises(BadInput, match="60 of 60 answers were given by no exit"):
        mean.apply(graded)


def test_labels_cannot_judge_answers_that_were_graded():
    graded = graded_likelihoods()
    decisions = replay(calibrate.best_single_exit([1.0, 2.0], 2.0, graded), graded)
    assert decisions.accuracy() == decisions.accuracy(graded.labels) == pytest.approx(0.7)
    with pytest.raises(BadInput, match="leave the labels out"):
        decisions.accuracy(np.ones(60, dtype=int))


def test_equal_tables_of_two_networks_are_not_mistaken_for_each_other():
    table = made_up(3, 300, 3)
    for name in "ab":
        named = replace(table, fingerprint=name, exits=(name, "middle", "end"))
        policy = combined(calibrate.eero, "vote")([1.0, 2.0, 3.0], 2.0, named)
        assert (policy.fingerprint, policy.exits[0]) == (name, name)
