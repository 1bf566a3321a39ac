"""Scores that differ only by rounding are tied with a threshold alike, in whatever batch, runtime and library."""

import math
from itertools import pairwise

import numpy as np
import pytest
from conftest import made_up
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies

from alight import Costs, HeadOutputs, calibrate, replay
from alight.budgeting.rates import geometric_rates
from alight.budgeting.thresholds import hash01, hashed_below, passing_counts, survivor_thresholds, tie_cell, tie_range
from alight.calibrate import METHODS
from alight.calibrate.cost_guarantees import lowered
from alight.policies.paced import _cut
from alight.policies.policy import Streak, Threshold, reaches

COSTS = Costs(stages=[2.0, 1.0, 3.0, 2.0], heads=[0.5, 0.25, 0.25, 0.5])
levels = st.floats(-50, 50) | st.floats(0, 1) | st.floats(0, 1e-4) | st.floats(1e-15, 1e-3).map(lambda gap: 1 - gap)
FAST = sorted(METHODS.keys() - {"auto", "genetic"})


def repeated(seed, samples, exits, *, share=0.4, noise=1e-8):
    """A table in which a share of the samples shows one image, whose scores differ by rounding."""
    table, rng = made_up(seed, samples, exits), np.random.default_rng(seed)
    same = rng.random(samples) < share
    scores, predictions = table.scores.copy(), table.predictions.copy()
    scores[same] = rng.uniform(0.3, 0.8, size=exits) + noise * rng.normal(size=(int(same.sum()), exits))
    predictions[same] = predictions[np.argmax(same)]
    return HeadOutputs(scores, predictions, table.labels)


@pytest.mark.parametrize("threshold", [0.0, -0.0, 1.0, math.inf, -math.inf])
def test_nothing_else_is_tied_where_scores_saturate_and_at_infinity(threshold):
    assert tie_range(threshold) == (threshold, threshold)


@given(levels)
def test_the_range_of_ties_is_relative_but_for_small_margins_and_holds_the_threshold(threshold):
    lowest, highest = tie_range(threshold)
    assert lowest <= threshold <= highest
    width = 1e-5 * min(max(threshold, 0.1) if threshold > 0 else -threshold, abs(1 - threshold))
    ends = (max(0.0, threshold - width) if threshold > 0 else threshold - width), threshold + width
    assert (lowest, highest) == pytest.approx(ends, rel=1e-15, abs=1e-20)


@given(levels, levels)
def test_a_higher_threshold_has_higher_ties(one, other):
    low, high = sorted((one, other))
    assert tie_range(low)[0] <= tie_range(high)[0]
    assert tie_range(low)[1] <= tie_range(high)[1]


@given(st.integers(2, 15), st.integers(2, 15))
def test_saturated_scores_keep_their_order(one, other):
    assume(one != other)
    low, high = sorted((1 - 10.0**-one, 1 - 10.0**-other))
    assert tie_range(low)[1] < tie_range(high)[0]
    leaving = Threshold((high,), (0.5,), costs=(1.0, 2.0)).step(0, np.arange(100), None, np.full(100, low), ())[0]
    assert not leaving.any()


def edges(threshold):
    """Scores at both ends of the ties, one step of floating point inside and outside, and the threshold."""
    ends = [np.nextafter(end, to) for end in tie_range(threshold) for to in (-np.inf, end, np.inf)]
    return np.array([*ends, threshold])


@given(levels, st.floats(0, 1), st.integers(0, 2**53 - 1))
def test_arrays_tensors_and_numbers_decide_alike_at_the_ends_of_the_ties(threshold, share, salt):
    torch = pytest.importorskip("torch")
    scores = np.repeat(edges(threshold), 20)
    samples = np.arange(len(scores))
    lowest, highest = tie_range(threshold)
    drawn = hashed_below(samples, share, salt)
    expected = [score > highest or (lowest <= score and each) for score, each in zip(scores, drawn, strict=True)]
    decided = reaches(scores, samples, threshold, share, salt)
    assert decided.tolist() == expected
    assert reaches(torch.from_numpy(scores), torch.from_numpy(samples), threshold, share, salt).tolist() == expected
    one_by_one = [reaches(*each, threshold, share, salt) for each in zip(scores.tolist(), range(140), strict=True)]
    assert one_by_one == expected
    confident = Streak(threshold, 1, costs=(1.0, 2.0)).step(0, samples, samples, scores, ())[0]
    np.testing.assert_array_equal(confident, scores >= lowest)


@given(
    numpy_strategies.arrays(np.float64, st.tuples(st.integers(2, 80), st.just(4)), elements=st.floats(0, 1)),
    st.sampled_from([0.0, 1e-9, 3e-6, 1e-5]),
    st.lists(st.floats(0.01, 1), min_size=4, max_size=4),
)
def test_survivor_thresholds_pass_on_as_many_as_planned_whatever_nearly_equals(scores, noise, weights):
    scores = np.round(scores, 1) + noise * scores
    rates = np.array(weights) / sum(weights)
    policy = Threshold(**survivor_thresholds(scores, rates).fields(), costs=(1.0, 2.0, 3.0, 4.0))
    exits = replay(policy, HeadOutputs(scores, np.zeros(scores.shape, int))).exits
    staying = [(exits > exit_index).sum() for exit_index in range(3)]
    np.testing.assert_array_equal(staying, np.maximum(passing_counts(rates, len(scores)) - 1, 0))


@pytest.mark.parametrize("name", FAST)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 1e-8, 2e-6]), st.floats(2.5, 8.5))
def test_every_method_keeps_its_budget_where_many_samples_show_one_image(name, seed, noise, budget):
    table = repeated(seed, 60, 4, noise=noise)
    policy = METHODS[name](COSTS, budget, table)
    assert replay(policy, table).mean_cost <= budget * (1 + 1e-12)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("budget", ["45%", "60%"])
def test_rounding_of_repeated_images_changes_the_cost_of_no_method(name, budget):
    for seed in range(3):
        table, again = repeated(seed, 600, 4), repeated(seed, 600, 4)
        again.scores[:] = table.scores * (1 + 1e-7 * np.random.default_rng(1).choice([-1, 1]))
        policy = METHODS[name](COSTS, budget, table)
        planned, spent = (replay(policy, each).mean_cost / COSTS.full for each in (table, again))
        assert spent == pytest.approx(planned, abs=0.01)


def test_families_of_thresholds_stay_nested_where_scores_are_dense():
    rng = np.random.default_rng(0)
    table = HeadOutputs(0.5 + 3e-5 * rng.uniform(size=(300, 3)), np.zeros((300, 3), int), np.zeros(300, int))
    policy = calibrate.geometric([1.0, 2.0, 4.0], 2.5, table)
    assert min(policy.tie_shares) < 1
    exits = [replay(lowered(policy, level, table.scores), table).exits for level in np.linspace(1, -1, 401)]
    assert all((earlier <= later).all() for earlier, later in pairwise(exits))


@pytest.mark.parametrize("spread", [1.0, 1e-4, 3e-5, 1e-5, 1e-7])
def test_exit_shares_never_exceed_their_law_where_scores_are_dense(spread):
    """With N samples for calibration the mean share that passes the exits is at most that of the Dirichlet law."""
    samples, rates, salts = 60, geometric_rates(np.array([1.0, 2.0, 3.0]), 1.8), np.random.default_rng(1)
    passed = []
    for seed in range(600):
        rng = np.random.default_rng(seed)
        calibration, fresh = (0.5 + spread * (rng.beta(0.5, 2, size=(size, 3)) - 0.2) for size in (samples, 2000))
        salt = int(salts.integers(2**53))
        limits = survivor_thresholds(calibration, rates, salt=salt)
        policy = Threshold(**limits.fields(), costs=(1.0, 2.0, 3.0), salt=salt)
        walk = policy.step(0, np.arange(10**6, 10**6 + 2000), None, fresh[:, 0], ())[0]
        second = policy.step(1, np.arange(10**6, 10**6 + 2000), None, fresh[:, 1], ())[0]
        passed.append([(~walk).mean(), (~walk & ~second).mean()])
    law = passing_counts(rates, samples) / (samples + 1)
    error = np.std(passed, axis=0) / math.sqrt(len(passed))
    assert (np.mean(passed, axis=0) <= law + 3.3 * error).all()
    assert (np.mean(passed, axis=0) >= law - 2 / (samples + 1) - 3.3 * error).all()


@given(levels | st.floats(1e-17, 1e-9).map(lambda gap: 1 + gap) | st.floats(1e-300, 1e-3).map(lambda size: -size))
def test_cells_divide_all_scores_and_none_is_wider_than_the_ties_of_a_threshold(score):
    assume(not 0 < abs(score) < 1e-300)
    bottom, top = tie_cell(score)
    assert bottom <= score <= top
    assert tie_cell(bottom) == tie_cell(top) == (bottom, top)
    assert tie_cell(math.nextafter(top, math.inf))[0] == math.nextafter(top, math.inf)
    assert tie_cell(math.nextafter(bottom, -math.inf))[1] == math.nextafter(bottom, -math.inf)
    column = np.array([[bottom, 1.0], [top, 0.0]])
    limits = survivor_thresholds(column, np.array([0.25, 0.75]))  # the second of two samples leaves
    lowest, highest = tie_range(limits.values[0])
    assert lowest <= bottom
    assert highest <= top


@pytest.mark.parametrize(
    "round_number", [0.05, 0.1, 1 / 8, 0.25, 1 / 3, 0.5, 2 / 3, 0.75, 0.9, 2.0, -1.0, -math.log(2)]
)
def test_no_cell_ends_near_a_round_number(round_number):
    assert tie_cell(round_number * (1 - 1e-7)) == tie_cell(round_number * (1 + 1e-7))


@given(
    st.integers(0, 2**32),
    st.sampled_from([0.02, 0.3, 0.5, 0.9, 1 - 1e-9, -0.7, 3.0]),
    st.sampled_from([1e-8, 1e-6, 1e-5, 3e-5, 1e-4]),
    st.integers(2, 40),
    st.lists(st.floats(0.01, 1), min_size=3, max_size=3),
)
def test_whatever_the_scores_those_that_pass_do_so_in_an_order_that_is_the_same_for_all_data(
    seed, level, spread, samples, weights
):
    """That of cells, then of hashes: thresholds at its k-th samples give the Dirichlet law exactly."""
    rng = np.random.default_rng(seed)
    size = samples + 300
    clouds = rng.choice(rng.normal(size=(3, 1, 2)), size=size)[:, 0]  # discrete, with jitter of their own
    scores = level + spread * min(abs(level), abs(1 - level)) * (
        clouds + rng.choice([1e-3, 0.3]) * rng.random((size, 2))
    )
    calibration, fresh = np.split(scores, [samples])
    rates, salt = np.array(weights) / sum(weights), int(rng.integers(2**53))
    policy = Threshold(**survivor_thresholds(calibration, rates, salt=salt).fields(), costs=(1.0, 2.0, 3.0), salt=salt)
    numbers = np.arange(size)
    waiting, leaving = np.split(numbers, [samples])
    allowed, passing = np.ones((2, 300), dtype=bool)
    for exit_index, count in enumerate(passing_counts(rates, samples)):
        cells = (tie_cell(each)[0] for each in scores[:, exit_index].tolist())
        keys = [*zip(cells, (-hash01(numbers, salt)).tolist(), strict=True)]
        if count <= len(waiting):
            kth = sorted(keys[number] for number in waiting)[count - 1] if count else (-math.inf, -1.0)
            waiting = np.array([number for number in waiting if keys[number] < kth], dtype=int)
            allowed &= np.array([keys[number] < kth for number in leaving])
        passing &= ~policy.step(exit_index, leaving, None, fresh[:, exit_index], ())[0]
        assert not (passing & ~allowed).any()


def test_two_clouds_a_width_of_ties_apart_pass_no_more_than_their_law():
    """Where the range of ties went with the k-th score, 4 samples in 1,000 too many passed on average."""
    samples, low, width, rng = 1000, 0.3, 3e-6, np.random.default_rng(0)
    rates = np.array([0.45, 0.55])
    count, start, end = int(passing_counts(rates, samples)[0]), low + 0.97 * width, low + 1.27 * width

    def uniform(score):
        return 0.5 * np.clip((score - start) / (end - start), 0, 1)

    passed = []
    for _ in range(2000):
        is_low = rng.random(samples) < 0.5
        scores = np.where(is_low, low, rng.uniform(start, end, samples))[:, None].repeat(2, axis=1)
        limits = survivor_thresholds(scores, rates, salt=int(rng.integers(2**53)))
        lowest, highest = tie_range(limits.values[0])
        below, at_most = 0.5 * (low < lowest) + uniform(lowest), 0.5 * (low <= highest) + uniform(highest)
        passed.append(below + (at_most - below) * (1 - limits.tie_shares[0]))
    assert np.mean(passed) <= count / (samples + 1) + 3 * np.std(passed) / math.sqrt(len(passed))


def test_the_cut_of_a_stream_counts_what_is_nearly_equal():
    rng = np.random.default_rng(0)
    scores = np.concatenate([0.5 + 1e-8 * rng.normal(size=400), rng.uniform(size=600)])
    salts = rng.integers(2**53, size=50).tolist()
    for share in np.linspace(0.05, 0.95, 19):
        threshold, ties = _cut(scores, share)
        left = [reaches(scores, np.arange(1000), threshold, ties, salt).mean() for salt in salts]
        assert np.mean(left) == pytest.approx(share, abs=0.01)
