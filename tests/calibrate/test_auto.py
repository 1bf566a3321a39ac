"""The method that does best on held-out labels."""

from pathlib import Path

import numpy as np
import pytest
from conftest import made_up

from alight import Costs, HeadOutputs, calibrate, read_points, recordings, replay
from alight.calibrate.auto import CANDIDATES, EXPECTED_GAIN, FOLDS, candidates_for, expected_gain
from alight.calibrate.crossval import held_out, held_out_parts
from alight.costs import as_costs
from alight.errors import BadInput
from alight.policies.policy import ExitAt

COSTS = np.array([1.0, 2.0, 3.5, 4.0, 6.0])
TABLE = made_up(1, 500, 5)
QUICK = {name: calibrate.METHODS[name] for name in ("optimal_stopping", "eero", "geometric", "best_single_exit")}
RESULTS = Path(__file__).parents[2] / "results"
PERCENTS = range(20, 91, 10)


def test_auto_says_who_won_and_how_well():
    policy = calibrate.auto(COSTS, 3.0, TABLE, candidates=QUICK)
    winner = policy.settings["winner"]
    right, _ = held_out(QUICK[winner], COSTS, 3.0, TABLE, FOLDS)
    assert policy.settings["compared accuracy"] == right.mean()
    assert policy.method == "auto"
    again = QUICK[winner](COSTS, 3.0, TABLE)
    np.testing.assert_array_equal(replay(policy, TABLE).exits, replay(again, TABLE).exits)


def test_a_candidate_that_is_clearly_best_wins():
    rng = np.random.default_rng(0)  # scores tell nothing, and only exit 2 knows anything
    labels = rng.integers(5, size=600)
    predictions = rng.integers(5, size=(600, 5))
    predictions[:, 2] = labels
    table = HeadOutputs(rng.uniform(size=(600, 5)), predictions, labels)
    policy = calibrate.auto(COSTS, 3.5, table, candidates=QUICK | {"optimal_stopping": calibrate.geometric})
    assert policy.settings["winner"] == "best_single_exit"
    assert replay(policy, table).accuracy(labels) == 1


def answering(exit_index):
    """A method whose samples all leave at this exit."""

    def method(costs, budget, labelled, unlabelled=None):
        alone = as_costs(costs).cumulative([exit_index])
        return ExitAt(costs=alone, open_exits=(exit_index,), num_exits=5, score=labelled.score, budget=budget)

    return method


@pytest.mark.parametrize(("ahead_on", "winner"), [((0,), "first"), ((0, 1, 2), "lucky")])
def test_luck_on_the_first_fold_does_not_unseat_the_first_candidate(ahead_on, winner):
    """The second candidate is ahead clearly on some folds, and clearly behind on the others."""
    parts = [part for _, part in held_out_parts(900, 3)]
    predictions = np.zeros((900, 5), dtype=int)
    for number, part in enumerate(parts):
        worse = 0 if number in ahead_on else 1
        predictions[part[:30], worse] = 1  # wrong for 30 of 300
    table = HeadOutputs(np.random.default_rng(0).uniform(size=(900, 5)), predictions, np.zeros(900, dtype=int))
    candidates = {"first": answering(0), "lucky": answering(1)}
    assert calibrate.auto(COSTS, 3.0, table, candidates=candidates, folds=3).settings["winner"] == winner


def test_a_gain_counts_less_the_less_sure_it_is():
    sure, unsure = np.tile([1.0, 0.0, 0.0, 0.0], 2000), np.tile([1.0, 0.0, 0.0, 0.0], 3)
    assert EXPECTED_GAIN < expected_gain(unsure) < 0 < expected_gain(sure) < 0.25
    assert expected_gain(np.full(10, 0.1)) == pytest.approx(0.1)  # no doubt at all


def test_auto_tries_combined_answers_where_labels_suffice_to_fit_them():
    assert [*candidates_for(made_up(1, 1000, 5), COSTS)] == [
        "eero_conditional, vote",
        "global_threshold, vote",
        "learned_stopping",
        "best_single_exit",
    ]
    assert {*CANDIDATES} < {*candidates_for(made_up(1, 999, 5), COSTS)}
    assert candidates_for(TABLE.take(slice(0, 100)), COSTS) == CANDIDATES
    logits = np.random.default_rng(0).normal(size=(200, 5, 4))
    recorded = HeadOutputs.from_logits(logits, np.zeros(200, dtype=int))
    assert "global_threshold, geometric_mean" in candidates_for(recorded, COSTS)
    for samples in (3, 20, 159, 160):  # all folds are large enough
        assert calibrate.auto(COSTS, 3.0, TABLE.take(slice(0, samples))).settings["winner"]


def test_auto_tries_to_close_exits_where_heads_cost_much():
    networks = {heads: Costs(stages=[1.0] * 5, heads=[heads] * 5) for heads in (0.05, 0.2)}
    assert {heads: "search" in candidates_for(TABLE, costs) for heads, costs in networks.items()} == {
        0.05: False,
        0.2: True,
    }


def test_candidates_that_cannot_afford_the_budget_are_passed_over():
    costs = Costs(stages=[1.0, 0.1, 1.0, 1.0, 1.0], heads=[5.0, 0.1, 0.1, 0.1, 0.1])
    policy = calibrate.auto(costs, 2.0, TABLE, candidates=QUICK)
    assert policy.settings["winner"] == "best_single_exit"
    with pytest.raises(BadInput, match="none of eero affords the budget 2"):
        calibrate.auto(costs, 2.0, TABLE, candidates={"eero": calibrate.eero})
    for folds in (1, 0, -3):
        with pytest.raises(BadInput, match=f"^{folds} folds hold no samples out"):
            calibrate.auto(costs, 2.0, TABLE, folds=folds)
    with pytest.raises(BadInput, match="auto has 0 candidates"):
        calibrate.auto(costs, 2.0, TABLE, candidates={})


@pytest.mark.slow
@pytest.mark.guarantee
def test_auto_gains_half_a_point_over_eero_on_the_frozen_recording(frozen):
    def mean_accuracy(method) -> float:
        policies = [method(frozen.costs, f"{percent}%", frozen.labelled) for percent in PERCENTS]
        return float(np.mean([replay(policy, frozen.test).accuracy(frozen.test.labels) for policy in policies]))

    assert mean_accuracy(calibrate.auto) >= mean_accuracy(calibrate.eero) + 0.005


def test_the_committed_results_are_those_of_this_code():
    recording = recordings.load("resnet18_cifar100_joint")
    points = read_points(RESULTS / "recorded_resnet18_joint.csv")
    for method in ("search", "optimal_stopping", "learned_stopping", "auto"):
        point = next(
            point for point in points if (point.method, round(100 * point.budget / point.full_cost)) == (method, 50)
        )
        policy = calibrate.METHODS[method](recording.costs, "50%", recording.labelled)
        assert replay(policy, recording.test).accuracy(recording.test.labels) == point.accuracy
