"""Tables of one distribution are seldom reported to differ, whatever their size and ties; others are."""

import time
from pathlib import Path

import numpy as np
import pytest
from conftest import made_up
from scipy.stats import binom

from alight import Costs, HeadOutputs, calibrate, diagnose_shift, sweep
from alight.errors import Mismatch, ShiftWarning
from alight.policies.policy import Threshold
from alight.policies.shift import LEVEL

COSTS = Costs(stages=[1.0, 1.0, 2.0], heads=[0.1] * 3)
DRAWS = 1000
RECORDINGS = Path(__file__).parents[2] / "results" / "recordings"


def table(rng, samples, levels=None):
    scores = rng.uniform(size=(samples, 1)) + 0.3 * rng.uniform(size=(samples, 3))
    scores = scores if levels is None else np.floor(scores * levels)
    right = rng.uniform(size=(samples, 3)) < 0.7
    return HeadOutputs(scores, (~right).astype(int), np.zeros(samples, int))


@pytest.mark.slow
@pytest.mark.guarantee
@pytest.mark.parametrize("sizes", [(12, 30), (200, 90)])
@pytest.mark.parametrize("levels", [None, 4])
@pytest.mark.parametrize("method", [calibrate.geometric, calibrate.global_threshold])
def test_one_distribution_is_reported_as_two_in_at_most_one_of_a_thousand_draws(sizes, levels, method):
    reported = small = 0
    for seed in range(DRAWS):
        rng = np.random.default_rng(seed)
        first, second = (table(rng, size, levels) for size in sizes)
        shift = diagnose_shift(first, second, [method(COSTS, 2.5, first)])  # thresholds set on the first
        reported += shift.is_significant
        small += shift.p_value < 20 * LEVEL
    assert reported <= binom.ppf(0.999, DRAWS, LEVEL)
    assert small <= binom.ppf(0.999, DRAWS, 20 * LEVEL)


@pytest.mark.parametrize("folder", sorted(RECORDINGS.iterdir()), ids=lambda path: path.name)
def test_calibration_and_test_samples_of_the_committed_recordings_are_of_one_distribution(folder):
    first, second = (HeadOutputs.load(folder / f"{part}.npz") for part in ("calibration", "test"))
    policy = calibrate.eero(Costs.load(folder / "costs.json"), "50%", first)
    assert not diagnose_shift(first, second, [policy]).is_significant


def test_the_worst_exit_is_named_with_its_numbers():
    rng = np.random.default_rng(0)
    first, second = table(rng, 800), table(rng, 900)
    scores = second.scores.copy()
    scores[:, 1] += 0.2
    shift = diagnose_shift(first, HeadOutputs(scores, second.predictions))
    assert shift.is_significant
    assert shift.exit_index == 1
    assert f"means {first.scores[:, 1].mean():.3g} and {scores[:, 1].mean():.3g}" in str(shift)


def test_labels_show_what_scores_do_not():
    rng = np.random.default_rng(0)
    first, second = table(rng, 800), table(rng, 900)
    wrong = second.predictions.copy()
    wrong[:200, 2] = 1
    worse = HeadOutputs(second.scores, wrong, second.labels)
    assert not diagnose_shift(first, second).is_significant
    assert not diagnose_shift(first, worse.unlabelled()).is_significant
    shift = diagnose_shift(first, worse)
    assert shift.is_significant
    assert str(shift).startswith("exit 3: 71.6% and 54.2% of its answers are right")
    method = calibrate.certified_risk(calibrate.eero, risk="error", alpha=0.4)
    with pytest.warns(ShiftWarning, match="of its answers are right"):
        (point,) = sweep({"risk": method}, COSTS, [4.3], labelled=first, test=worse, references=False)
    assert "Doubtful" in point.guarantee


def test_shares_show_what_no_exit_shows_alone():
    rng = np.random.default_rng(0)
    one = rng.uniform(size=(1000, 1))
    alike, opposed = np.hstack([one, one, one]), np.hstack([one, 1 - one, one])
    tables = [HeadOutputs(scores, np.zeros((1000, 3), int)) for scores in (alike, opposed)]
    policy = Threshold((0.5, 0.5), costs=(1.0, 2.0, 3.0), method="by hand")
    assert not diagnose_shift(*tables).is_significant
    shift = diagnose_shift(*tables, [policy])
    assert shift.is_significant
    assert str(shift).startswith("exit 2: 0.0% and 47.3%")
    assert "leave under by hand" in str(shift)


def test_a_million_rows_are_compared_in_about_two_sorts_per_exit():
    scores = np.random.default_rng(0).uniform(size=(2, 500_000, 1))
    tables = [HeadOutputs(each, np.zeros_like(each, dtype=int)) for each in scores]
    diagnose_shift(tables[0].take(slice(10)), tables[1].take(slice(10)))  # what is loaded once

    def seconds(run):
        begin = time.process_time()
        run()
        return time.process_time() - begin

    sort = min(seconds(lambda: np.sort(scores, axis=None, kind="stable")) for _ in range(3))  # others use AVX-512
    assert min(seconds(lambda: diagnose_shift(*tables)) for _ in range(2)) < 4 * sort


def test_coarse_scores_that_are_alike_are_compared_without_a_word_of_scipy():
    """For such counts its exact law fails: it took the asymptotic one, with a warning of its own."""
    counts = ([41, 108, 189, 116, 46], [39, 109, 190, 117, 45])
    tables = [HeadOutputs(np.repeat(np.arange(5.0), each)[:, None], np.zeros((500, 1), int)) for each in counts]
    assert diagnose_shift(*tables).p_value > 0.99


def test_tables_of_other_networks_cannot_be_compared():
    with pytest.raises(Mismatch, match="record both with one network"):
        diagnose_shift(made_up(0, 20, 3), made_up(1, 20, 4))
