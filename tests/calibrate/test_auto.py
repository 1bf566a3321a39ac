"""The method that does best on held-out labels."""

from pathlib import Path

import numpy as np
import pytest
from conftest import made_up

from alight import Costs, HeadOutputs, calibrate, read_points, recordings, replay
from alight.calibrate.crossval import held_out
from alight.errors import BadInput

COSTS = np.array([1.0, 2.0, 3.5, 4.0, 6.0])
TABLE = made_up(1, 500, 5)
QUICK = {name: calibrate.METHODS[name] for name in ("optimal_stopping", "eero", "geometric", "best_single_exit")}
RESULTS = Path(__file__).parents[2] / "results"
PERCENTS = range(20, 91, 10)


def test_auto_says_who_won_and_how_well():
    policy = calibrate.auto(COSTS, 3.0, TABLE, candidates=QUICK)
    winner = policy.settings["winner"]
    right, _ = held_out(QUICK[winner], COSTS, 3.0, TABLE, 3)
    assert policy.settings["held-out accuracy"] == right.mean()
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


def test_luck_does_not_unseat_the_first_candidate():
    noise = {"geometric": calibrate.geometric, "the same": calibrate.geometric}
    assert calibrate.auto(COSTS, 3.0, TABLE, candidates=noise).settings["winner"] == "geometric"


def test_candidates_that_cannot_afford_the_budget_are_passed_over():
    costs = Costs(stages=[1.0, 0.1, 1.0, 1.0, 1.0], heads=[5.0, 0.1, 0.1, 0.1, 0.1])
    policy = calibrate.auto(costs, 2.0, TABLE, candidates=QUICK)
    assert policy.settings["winner"] == "best_single_exit"
    with pytest.raises(BadInput, match="none of eero affords the budget 2"):
        calibrate.auto(costs, 2.0, TABLE, candidates={"eero": calibrate.eero})
    with pytest.raises(BadInput, match="auto has 0 candidates"):
        calibrate.auto(costs, 2.0, TABLE, candidates={})


@pytest.mark.slow
@pytest.mark.guarantee
def test_auto_gains_half_a_point_over_eero_on_the_frozen_recording(frozen):
    def mean_accuracy(method) -> float:
        policies = [method(frozen.costs, f"{percent}%", frozen.labelled) for percent in PERCENTS]
        return float(np.mean([replay(policy, frozen.test).accuracy(frozen.test.labels) for policy in policies]))

    assert mean_accuracy(calibrate.auto) >= mean_accuracy(calibrate.eero) + 0.005


@pytest.mark.parametrize("name", ["frozen", "joint"])
def test_in_the_committed_results_no_method_beats_auto_by_the_width_of_its_interval(name):
    points = read_points(RESULTS / f"recorded_resnet18_{name}.csv")
    plain = points[0].full_cost
    for percent in PERCENTS:
        here = {point.method: point for point in points if round(100 * point.budget / plain, 6) == percent}
        auto = here["auto"]
        others = [here[method].accuracy for method in calibrate.METHODS if method in here]
        assert auto.accuracy >= max(others) - (auto.accuracy_high - auto.accuracy_low)


def test_the_committed_results_are_those_of_this_code():
    recording = recordings.load("resnet18_cifar100_joint")
    points = read_points(RESULTS / "recorded_resnet18_joint.csv")
    for method in ("search", "optimal_stopping"):
        point = next(
            point for point in points if (point.method, round(100 * point.budget / point.full_cost)) == (method, 50)
        )
        policy = calibrate.METHODS[method](recording.costs, "50%", recording.labelled)
        assert replay(policy, recording.test).accuracy(recording.test.labels) == point.accuracy
