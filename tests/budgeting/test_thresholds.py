import math

import numpy as np
import pytest
from conftest import made_up
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, chi2

from alight.budgeting.rates import cumulative_rates, geometric_rates
from alight.budgeting.thresholds import (
    PROVEN_SLACK,
    SALTS,
    hash01,
    hash32,
    hashed_below,
    marginal_thresholds,
    padded_rates,
    passing_counts,
    survivor_thresholds,
)
from alight.errors import BadInput
from alight.outputs import HeadOutputs
from alight.policies.policy import Threshold
from alight.policies.route import replay


@st.composite
def plans(draw):
    """A table of scores, tied or not, and exit rates, some of them 0."""
    samples, exits = draw(st.integers(1, 200)), draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    scores = rng.uniform(size=(samples, exits))
    if (levels := draw(st.sampled_from([0, 1, 2, 5, 30]))) > 0:
        scores = np.round(scores * (levels - 1)) / max(levels - 1, 1)
    weights = np.array(draw(st.lists(st.floats(0, 1), min_size=exits, max_size=exits))) + 1e-9
    weights[rng.uniform(size=exits) < draw(st.sampled_from([0.0, 0.4]))] = 0
    weights[-1] += float(weights.sum() == 0)
    return scores, weights / weights.sum()


def left_by(scores, thresholds):
    """How many calibration samples have left by each exit, as a policy walks them."""
    samples, exits = scores.shape
    policy = Threshold(thresholds.values, thresholds.tie_shares, costs=np.arange(1.0, exits + 1))
    decisions = replay(policy, HeadOutputs(scores, np.zeros((samples, exits), dtype=int)))
    return np.cumsum(np.bincount(decisions.exits, minlength=exits))


@given(plans())
def test_survivor_thresholds_pass_on_one_less_than_their_counts_whatever_the_ties(plan):
    scores, rates = plan
    counts = passing_counts(rates, len(scores))
    staying = len(scores) - left_by(scores, survivor_thresholds(scores, rates))[:-1]
    np.testing.assert_array_equal(staying, np.where(counts == len(scores) + 1, len(scores), np.maximum(counts - 1, 0)))


@given(plans())
def test_survivor_thresholds_hit_the_planned_shares_on_the_calibration_data(plan):
    scores, rates = plan
    samples = len(scores)
    gone, planned = left_by(scores, survivor_thresholds(scores, rates)), cumulative_rates(rates)
    never = np.cumsum(rates) == 0  # nobody is planned to have left yet, and nobody has
    assert (gone[never] == 0).all()
    # one calibration sample stands for the new one, (N + 1) c in all, and a fraction of a sample is rounded off:
    # never fewer have left than planned, and never two samples more
    assert (gone[~never] >= samples * planned[~never] - 1e-6).all()
    assert (gone[~never] < samples * planned[~never] + 2 + 1e-6).all()
    # of N + 1 samples, to 1 / (N + 1)
    expected = 1 - passing_counts(rates, samples) / (samples + 1)
    assert (expected >= planned[:-1] - 1e-9).all()
    assert (expected <= planned[:-1] + 1 / (samples + 1) + 1e-9).all()


@given(plans(), st.sampled_from([None, "paper", 0.5, PROVEN_SLACK]))
def test_marginal_thresholds_never_pass_on_more_than_planned(plan, slack):
    scores, rates = plan
    thresholds = marginal_thresholds(scores, rates, slack)
    planned = 1 - padded_rates(rates, len(scores), slack)[:-1]
    closed = np.isposinf(thresholds.values)
    passed = (scores[:, :-1] < thresholds.values).mean(axis=0)
    assert (passed <= planned + 1e-9)[~closed].all()
    np.testing.assert_array_equal(closed, (rates[:-1] == 0) & (planned > 0))


@given(plans())
def test_the_marginal_rule_passes_all_exits_no_more_often_than_planned(plan):
    scores, rates = plan
    gone = left_by(scores, marginal_thresholds(scores, rates, slack=None))
    assert (gone / len(scores) >= cumulative_rates(rates) - 1e-9).all()


@given(plans(), st.sampled_from(["paper", 0.5, PROVEN_SLACK]))
def test_slack_only_ever_sends_more_samples_out(plan, slack):
    scores, rates = plan
    assert (passing_counts(rates, len(scores), slack) <= passing_counts(rates, len(scores))).all()


def test_marginal_thresholds_are_the_papers_order_statistics():
    scores = np.random.default_rng(0).normal(size=(101, 3))
    rates = np.array([0.25, 0.5, 0.25])
    thresholds = marginal_thresholds(scores, rates, slack="paper")
    for exit_index, gone in enumerate([0.25, 0.75]):
        rank = math.ceil(101 * (1 - (gone + gone / math.sqrt(101))))
        assert thresholds.values[exit_index] == np.sort(scores[:, exit_index])[rank - 1]
        empirical_cdf = (scores[:, exit_index, None] <= scores[None, :, exit_index]).mean(axis=0)  # the paper's F-hat
        leaves = empirical_cdf >= 1 - (gone + gone / math.sqrt(101)) - 1e-12
        np.testing.assert_array_equal(leaves, scores[:, exit_index] >= thresholds.values[exit_index])


def test_a_rate_of_zero_closes_the_exit_and_a_full_one_opens_it_to_all():
    scores = np.random.default_rng(0).uniform(size=(50, 4))
    rates = np.array([0.0, 0.5, 0.5, 0.0])
    for thresholds in (survivor_thresholds(scores, rates), marginal_thresholds(scores, rates, None)):
        assert thresholds.values[0] == np.inf
        assert np.isfinite(thresholds.values[1])
        assert thresholds.values[2] == -np.inf


def test_thresholds_lie_midway_so_that_small_errors_of_the_score_do_not_cross_them():
    scores = np.array([[0.1], [0.2], [0.4], [0.9]]).repeat(2, axis=1)
    thresholds = survivor_thresholds(scores, np.array([0.5, 0.5]))
    assert thresholds.values[0] == pytest.approx(0.15)


def test_neighbouring_doubles_are_still_separated():
    low = 1.0
    scores = np.array([[low], [np.nextafter(low, 2)], [2.0]]).repeat(2, axis=1)
    thresholds = survivor_thresholds(scores, np.array([0.5, 0.5]))
    assert (scores[:, 0] < thresholds.values[0]).sum() == 1


def test_all_scores_equal_still_leave_as_planned():
    scores = np.ones((1000, 4))
    rates = geometric_rates(np.array([1.0, 2.0, 3.0, 4.0]), 2.0)
    thresholds = survivor_thresholds(scores, rates)
    gone = left_by(scores, thresholds)
    np.testing.assert_array_equal(1000 - gone[:-1], passing_counts(rates, 1000) - 1)
    fresh = hash01(np.arange(10**6, 2 * 10**6))  # other samples, in expectation
    np.testing.assert_allclose(
        [(fresh >= share).mean() for share in thresholds.tie_shares], 1 - np.cumsum(rates)[:-1], atol=0.05
    )


@given(
    st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=50, unique=True),
    st.floats(0, 1),
    st.integers(0, SALTS - 1),
    st.integers(0, 200),
)
def test_the_hash_is_the_same_for_arrays_and_tensors_and_exact(indices, share, salt, purpose):
    torch = pytest.importorskip("torch")
    samples, drawn = np.array(indices), (share, salt, purpose)
    below = hashed_below(samples, *drawn)
    np.testing.assert_array_equal(below, hash01(samples, salt, purpose) < share)
    np.testing.assert_array_equal(hashed_below(torch.tensor(indices), *drawn).numpy(), below)
    assert [hashed_below(index, *drawn) for index in indices] == below.tolist()


@pytest.mark.parametrize("number", [0, 7, 2**62])
def test_over_salts_the_hash_of_a_number_is_uniform(number):
    """Each low half of a salt gives another of the 2^32 hashes, so all of them give every hash once."""
    for high in (0, 1, 2**21 - 1):
        hashes = {hash32(number, (high << 32) + low) for low in [*range(20_000), *range(2**32 - 20_000, 2**32)]}
        assert len(hashes) == 40_000
        assert max(hashes) < 2**32


@pytest.mark.parametrize("count", [2, 10, 50])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_over_salts_the_hashes_of_numbers_are_independent(count, share):
    salts = np.random.default_rng(count).integers(SALTS, size=10_000).tolist()
    left = np.array([hashed_below(np.arange(count), share, salt).sum() for salt in salts])
    error = math.sqrt(count * share * (1 - share) / len(salts))
    assert abs(left.mean() - count * share) < 3.3 * error
    expected = np.bincount(np.arange(count + 1), binom.pmf(np.arange(count + 1), count, share)) * len(salts)
    seen = np.bincount(left, minlength=count + 1)
    common = expected >= 5
    assert chi2.sf(((seen - expected)[common] ** 2 / expected[common]).sum(), common.sum() - 1) > 1e-4


def test_the_hash_is_even_one_to_one_and_its_purposes_are_unrelated():
    hashes = [hash01(np.arange(100_000), purpose=purpose) for purpose in (0, 1)]
    for each in hashes:
        assert len(np.unique(each)) == len(each)
        assert np.abs(np.sort(each) - (np.arange(len(each)) + 0.5) / len(each)).max() < 1.63 / math.sqrt(len(each))
        assert abs(np.corrcoef(each[1:], each[:-1])[0, 1]) < 0.02
    assert abs(np.corrcoef(*hashes)[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("slack", "message"), [("much", "no slack 'much'"), (-1.0, "slack -1"), (float("nan"), "slack nan")]
)
def test_bad_slack_is_refused(slack, message):
    with pytest.raises(BadInput, match=message):
        padded_rates(np.array([0.5, 0.5]), 10, slack)


def test_ties_in_a_real_shape_of_table_are_met_by_the_policy():
    table = made_up(3, 500, 5, ties=True)
    rates = np.array([0.3, 0.1, 0.2, 0.15, 0.25])
    counts = passing_counts(rates, 500)
    np.testing.assert_array_equal(
        500 - left_by(table.scores, survivor_thresholds(table.scores, rates))[:-1], counts - 1
    )
