"""Statistical guarantees, each over many calibration draws; a bound fails by chance once in a thousand checks."""

import numpy as np
import pytest
from scipy.stats import beta, binom, kstest

from alight import HeadOutputs, calibrate, replay
from alight.budgeting.bounds import exact_plan, exact_ranks, overspend_probability, passing_bound, share_law
from alight.budgeting.rates import cumulative_rates, exponential_weights, geometric_rates
from alight.budgeting.thresholds import (
    PROVEN_SLACK,
    SALTS,
    hash01,
    marginal_thresholds,
    passing_counts,
    survivor_thresholds,
    thresholds_at_ranks,
    tie_range,
)

pytestmark = pytest.mark.guarantee

SEEDS = 200
COSTS = np.array([1.0, 2.0, 3.5, 5.0, 8.0])
RISKS = np.array([0.7, 0.5, 0.45, 0.3, 0.25])  # known beforehand, so rates do not depend on the calibration sample
BUDGET = 4.0
RATES = exponential_weights(RISKS, COSTS, BUDGET, temperature=0.2, spend_all=True)


def independent(rng, size):
    """Scores that know nothing of each other."""
    return rng.uniform(size=(size, 5))


def one_for_all(rng, size):
    """The same score at every exit."""
    return rng.uniform(size=(size, 1)).repeat(5, axis=1)


def opposed(rng, size):
    """Who is sure at one exit is unsure at the next."""
    sure = rng.uniform(size=(size, 1))
    return np.concatenate([sure, 1 - sure, sure, 1 - sure, sure], axis=1)


DRAWS = {each.__name__: each for each in (independent, one_for_all, opposed)}


def true_shares(draw, thresholds):
    """Shares of fresh samples that leave at each exit, exactly: all scores are uniform."""
    limits = np.clip(thresholds, 0, 1)
    if draw == "independent":
        staying = np.cumprod(limits)
    elif draw == "one_for_all":
        staying = np.minimum.accumulate(limits)
    else:  # passes the odd ones where sure < limit, the even ones where 1 - sure < limit
        below = np.minimum.accumulate(np.where(np.arange(4) % 2 == 0, limits, 1.0))
        above = np.maximum.accumulate(np.where(np.arange(4) % 2 == 0, 0.0, 1 - limits))
        staying = np.maximum(below - above, 0)
    return -np.diff(np.concatenate([[1.0], staying, [0.0]]))


def costs_over_seeds(draw, samples, threshold_values, seeds=SEEDS):
    """Mean cost of fresh samples for each calibration draw."""
    tables = (DRAWS[draw](np.random.default_rng(seed), samples) for seed in range(seeds))
    return np.array([true_shares(draw, threshold_values(table)) @ COSTS for table in tables])


def assert_mean_at_most(values, bound):
    assert values.mean() <= bound + 3.1 * values.std() / np.sqrt(len(values))


every_draw = pytest.mark.parametrize("draw", DRAWS)
every_size = pytest.mark.parametrize("samples", [50, 500])


@every_draw
@every_size
def test_without_slack_survivor_thresholds_spend_the_budget_in_expectation(draw, samples):
    costs = costs_over_seeds(draw, samples, lambda table: survivor_thresholds(table, RATES).values)
    assert_mean_at_most(costs, BUDGET)
    assert costs.mean() >= BUDGET - 4 * COSTS[-1] / samples - 3.1 * costs.std() / np.sqrt(SEEDS)  # and little less


@every_draw
@every_size
def test_without_slack_marginal_thresholds_overspend_by_at_most_one_sample_per_exit(draw, samples):
    costs = costs_over_seeds(draw, samples, lambda table: marginal_thresholds(table, RATES, None).values)
    assert_mean_at_most(costs, BUDGET + np.diff(COSTS).sum() / (samples + 1))


@every_draw
@every_size
@pytest.mark.parametrize("slack", ["paper", 1.0, PROVEN_SLACK])
@pytest.mark.parametrize("rule", [survivor_thresholds, marginal_thresholds])
def test_the_papers_slack_keeps_the_budget_in_expectation(draw, samples, slack, rule):
    costs = costs_over_seeds(draw, samples, lambda table: rule(table, RATES, slack).values)
    assert_mean_at_most(costs, BUDGET)


@every_size
def test_the_proven_slack_passes_on_less_than_planned_at_every_exit_in_expectation(samples):
    passed = np.array(
        [
            np.clip(
                marginal_thresholds(independent(np.random.default_rng(seed), samples), RATES, PROVEN_SLACK).values, 0, 1
            )
            for seed in range(SEEDS)
        ]
    )
    assert (passed.mean(axis=0) <= 1 - cumulative_rates(RATES)[:-1]).all()


@every_draw
@every_size
@pytest.mark.parametrize("delta", [0.05, 0.3])
def test_the_exact_slack_overspends_no_more_often_than_delta(draw, samples, delta):
    rates = exact_plan(lambda budget: geometric_rates(COSTS, budget), COSTS, BUDGET, samples, delta)
    costs = costs_over_seeds(draw, samples, lambda table: survivor_thresholds(table, rates).values)
    assert (costs > BUDGET).sum() <= binom.ppf(0.999, SEEDS, delta)


@every_size
@pytest.mark.parametrize("delta", [0.05, 0.3])
def test_the_exact_slack_of_the_marginal_rule_passes_on_too_much_no_more_often_than_delta(samples, delta):
    ranks = exact_ranks(RATES, samples, delta)
    planned = 1 - cumulative_rates(RATES)[:-1]
    failures = 0
    for seed in range(SEEDS):
        passed = thresholds_at_ranks(independent(np.random.default_rng(seed), samples), ranks).values
        failures += bool((np.clip(passed, 0, 1) > planned).any())
    assert failures <= binom.ppf(0.999, SEEDS, delta)


def order_statistics(table, counts):
    """The k-th smallest score of those waiting, which the law is about; the thresholds in use lie midway below it."""
    values, waiting = survivor_thresholds(table, rates_for(counts, len(table))).values, table
    at = np.empty_like(values)
    for exit_index, threshold in enumerate(values):
        at[exit_index] = waiting[waiting[:, exit_index] >= threshold, exit_index].min()
        waiting = waiting[waiting[:, exit_index] < threshold]
    return at


def rates_for(counts, samples):
    """Rates whose passing counts are these."""
    return share_law(counts, samples) / (samples + 1)


@every_draw
@every_size
def test_exit_shares_follow_the_dirichlet_law(draw, samples):
    counts = passing_counts(RATES, samples)
    law = share_law(counts, samples)
    np.testing.assert_array_equal(passing_counts(rates_for(counts, samples), samples), counts)
    shares, used = [], []
    for seed in range(2000):
        table = DRAWS[draw](np.random.default_rng(seed), samples)
        shares.append(true_shares(draw, order_statistics(table, counts)))
        used.append(true_shares(draw, survivor_thresholds(table, rates_for(counts, samples)).values))
    shares, used = np.array(shares), np.array(used)
    for exit_index, each in enumerate(law):
        assert kstest(shares[:, exit_index], beta(each, law.sum() - each).cdf).pvalue > 1e-4
    for level in (0.1, 0.5, 0.9):  # and jointly: the law of the cost
        budget = float(np.quantile(shares @ COSTS, level))
        expected = overspend_probability(COSTS, law, budget)
        assert (shares @ COSTS > budget).mean() == pytest.approx(expected, abs=3.3 * np.sqrt(0.25 / 2000))
    assert (np.cumsum(used, axis=1) >= np.cumsum(shares, axis=1) - 1e-12).all()  # never more cost than the law says


@every_size
def test_the_share_that_passes_one_exit_follows_the_beta_law(samples):
    rank = samples * 7 // 10
    passed = [np.sort(np.random.default_rng(seed).uniform(size=samples))[rank - 1] for seed in range(2000)]
    assert kstest(passed, beta(rank, samples + 1 - rank).cdf).pvalue > 1e-4
    failures = np.sum(np.array(passed) > passing_bound(rank, samples, 0.1))
    assert abs(failures - 200) <= 3.3 * np.sqrt(2000 * 0.1 * 0.9)


@every_draw
def test_tied_scores_still_spend_the_budget(draw):
    samples, levels = 500, 8
    costs = []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        calibration, fresh = (np.floor(DRAWS[draw](rng, size) * levels) for size in (samples, 4000))
        thresholds = survivor_thresholds(calibration, RATES)
        noise, staying, cost = rng.uniform(size=4000), np.ones(4000, bool), np.full(4000, COSTS[0])  # a fair hash
        for exit_index, (value, share) in enumerate(zip(*thresholds, strict=True)):
            scores, (lowest, highest) = fresh[:, exit_index], tie_range(value)
            staying &= (scores < lowest) | ((scores <= highest) & (noise >= share))
            cost[staying] = COSTS[exit_index + 1]
        costs.append(cost.mean())
    assert np.mean(costs) <= BUDGET * 1.01
    assert np.mean(costs) >= BUDGET * 0.98


@pytest.mark.parametrize(
    "samples",
    [3, 19, 100, *(pytest.param(each, marks=pytest.mark.slow) for each in (*range(7, 40, 4), 64, 250) if each != 19)],
)
def test_equal_scores_keep_the_budget_on_average_over_salts(samples):
    """With one salt for all, the tie shares of a number of samples are the same in every draw, and may be too small."""
    salts = np.random.default_rng(samples).integers(SALTS, size=2000).tolist()
    fresh, costs = hash01(np.arange(10_000)), []  # of new samples, whose own salt is independent
    for salt in salts:
        shares = survivor_thresholds(np.ones((samples, 5)), RATES, salt=salt).tie_shares
        passed = (fresh[:, None] >= np.maximum.accumulate(shares)).mean(axis=0)
        costs.append(COSTS[0] + passed @ np.diff(COSTS))
    error = np.std(costs) / np.sqrt(len(costs))
    assert np.mean(costs) <= BUDGET + 3.3 * error
    assert np.mean(costs) >= BUDGET * (1 - 5 / (samples + 1))  # counts are whole samples


@pytest.mark.parametrize("samples", [7, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "method", [calibrate.geometric, pytest.param(calibrate.performance_control, marks=pytest.mark.slow)]
)
def test_a_certified_mean_of_equal_scores_holds_over_its_salts(method, samples):
    table, fitting = (HeadOutputs(np.ones((size, 5)), np.zeros((size, 5), int)) for size in (samples, 30))
    fresh = HeadOutputs(np.ones((2000, 5)), np.zeros((2000, 5), int))
    policies = [calibrate.certified_mean(method, seed=seed)(COSTS, BUDGET, fitting, table) for seed in range(300)]
    costs = [replay(policy, fresh).mean_cost for policy in policies]
    assert np.mean(costs) <= BUDGET + 3.3 * np.std(costs) / np.sqrt(len(costs))
    assert len({policy.salt for policy in policies}) == 300


def test_a_certified_probability_of_equal_scores_is_broken_no_more_often_than_delta():
    """A share of equal scores leaves by tie shares alone, so the true mean cost of a policy is known exactly."""
    table, fitting = (HeadOutputs(np.ones((size, 5)), np.zeros((size, 5), int)) for size in (50, 30))
    costs = []
    for seed in range(400):
        policy = calibrate.certified_probability(calibrate.geometric, delta=0.1, seed=seed)(
            COSTS, BUDGET, fitting, table
        )
        leave = np.where(np.array(policy.thresholds) <= 1, policy.tie_shares, 0.0)
        costs.append(COSTS[0] + (1 - np.maximum.accumulate(leave)) @ np.diff(COSTS))
    broken = int((np.array(costs) > BUDGET).sum())
    assert binom.ppf(0.001, 400, 0.05) <= broken <= binom.ppf(0.999, 400, 0.1)  # not by spending far too little
