"""Contracts, as a user asks for them; their statistics are in the guarantees."""

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import made_up
from scipy.stats import binom

from alight import Costs, HeadOutputs, calibrate, load_policy, replay
from alight.calibrate import (
    CONTRACTS,
    METHODS,
    certified_batch,
    certified_mean,
    certified_probability,
    certified_risk,
    certified_stream,
)
from alight.calibrate.cost_guarantees import lowered
from alight.errors import BadInput, BudgetTooSmall, LabelsNeeded, Mismatch, ShiftWarning
from alight.policies.limits import Quota
from alight.policies.paced import Paced
from alight.policies.policy import ExitAt, Threshold

ROOT = Path(__file__).parent.parent.parent
COSTS = Costs(stages=[1.0, 1.0, 2.0, 2.0], heads=[0.1] * 4, unit="ms")
TABLE = made_up(1, 1200, 4)
FAST = [name for name in METHODS if name not in ("genetic", "auto", "search")]


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("contract", ["mean", "probability"])
def test_every_method_can_be_certified(name, contract, tmp_path):
    policy = CONTRACTS[contract](METHODS[name], seed=0)(COSTS, 3.0, TABLE)
    assert policy.certificate.contract == contract
    assert "3 ms" in str(policy.certificate)
    assert "not about the clock" in policy.certificate.assumption
    policy.save(tmp_path / "policy.json")
    loaded = load_policy(tmp_path / "policy.json")
    assert loaded == policy
    assert str(policy.certificate) in str(loaded)
    assert replay(policy, made_up(2, 4000, 4)).mean_cost <= 3.0 * (1.03 if contract == "mean" else 1.01)


@pytest.mark.parametrize("name", FAST)
def test_a_probable_guarantee_spends_less_than_one_on_average(name):
    if name == "best_single_exit":
        return
    spent = [
        replay(CONTRACTS[contract](METHODS[name], seed=0)(COSTS, 3.0, TABLE), TABLE).mean_cost
        for contract in ("probability", "mean")
    ]
    assert spent[0] <= spent[1]


def test_a_smaller_delta_spends_less():
    spent = [
        replay(certified_probability(calibrate.eero, delta=delta)(COSTS, 3.0, TABLE), TABLE).mean_cost
        for delta in (0.001, 0.05, 0.4)
    ]
    assert spent == sorted(spent)


def test_options_go_to_the_method():
    hot = certified_mean(calibrate.eero)(COSTS, 3.0, TABLE, temperature=0.5, spend_all=True)
    assert hot.settings["temperature"] == 0.5


def test_the_same_seed_gives_the_same_certificate():
    first, again, other = (certified_mean(calibrate.eero, seed=seed)(COSTS, 3.0, TABLE) for seed in (0, 0, 1))
    assert first == again
    assert first.thresholds != other.thresholds


def test_unlabelled_data_are_used_whole_for_the_certificate():
    policy = certified_mean(calibrate.eero)(COSTS, 3.0, TABLE, made_up(5, 700, 4).unlabelled())
    assert policy.certificate.numbers["samples"] == 700


@pytest.mark.parametrize("name", FAST)
def test_batch_gives_a_quota_for_any_method(name):
    policy = certified_batch(METHODS[name])(COSTS, 3.0, TABLE)
    assert isinstance(policy, ExitAt if name == "best_single_exit" else Quota)
    decisions = replay(policy, made_up(3, 999, 4), batch_size=100)
    assert decisions.mean_cost <= 3.0
    if not (plain := METHODS[name](COSTS, 3.0, TABLE)).exit_rates:
        np.testing.assert_allclose(policy.exit_rates, replay(plain, TABLE).exit_shares)


@pytest.mark.parametrize("folder", sorted((ROOT / "results/recordings").glob("*[!_]?")), ids=lambda each: each.name)
def test_batch_with_auto_is_certified_at_every_budget(folder):
    """On most recordings `auto` chooses a method that plans no rates at some of these budgets."""
    labelled, costs = HeadOutputs.load(folder / "calibration.npz"), Costs.load(folder / "costs.json")
    test = HeadOutputs.load(folder / "test.npz").take(slice(0, 500))
    few = {name: METHODS[name] for name in ("optimal_stopping", "eero", "global_threshold", "best_single_exit")}
    for percent in range(20, 91, 10):
        if costs.budget(f"{percent}%") < costs.cumulative()[0]:
            continue
        policy = certified_batch(calibrate.auto)(costs, f"{percent}%", labelled, candidates=few)
        decisions = replay(policy, test, batch_size=100)
        assert decisions.mean_cost <= policy.budget
        assert decisions.mean_cost >= 0.95 * policy.planned_cost  # and what was planned is used


@pytest.mark.parametrize("name", ["eero", "global_threshold", "patience"])
def test_stream_gives_a_paced_policy_for_any_method(name):
    policy = certified_stream(METHODS[name], alarm_rate=0.02, horizon=5000)(COSTS, 3.0, TABLE)
    assert isinstance(policy, Paced)
    assert (policy.alarm_rate, policy.horizon) == (0.02, 5000)
    spent = np.cumsum(replay(policy, made_up(3, 2000, 4), batch_size=10).spent)
    counts = np.arange(10, 2001, 10)
    assert (spent[counts - 1] <= counts * 3.0 + policy.costs[-1]).all()


@pytest.mark.parametrize("name", ["global_threshold", "pcee", "patience", "performance_control", "eero_marginal"])
def test_lowering_thresholds_nests_costs(name):
    policy = METHODS[name](COSTS, 3.0, TABLE)
    fresh = made_up(9, 500, 4, ties=True)
    spent = [replay(lowered(policy, level, TABLE.scores), fresh).spent for level in np.linspace(1, -1, 41)]
    for cheaper, costlier in itertools.pairwise(spent):
        assert (cheaper <= costlier).all()
    assert (spent[0] == COSTS.cumulative()[0]).all()
    assert (spent[-1] == COSTS.cumulative()[-1]).all()


def test_too_few_samples_certify_the_first_exit_alone_and_say_how_many_would_do():
    few = made_up(1, 6, 4)
    policy = certified_probability(calibrate.geometric, delta=0.001)(COSTS, 1.2, few)
    assert isinstance(policy, ExitAt)
    needed = policy.certificate.numbers["smallest sample"]
    assert f"at least {needed:,} are needed, and there are 3 calibration" in policy.certificate.guarantee
    enough = made_up(2, int(needed), 4)
    assert isinstance(certified_probability(calibrate.geometric, delta=0.001)(COSTS, 1.2, few, enough), Threshold)
    short = made_up(2, int(needed) - 1, 4)
    assert isinstance(certified_probability(calibrate.geometric, delta=0.001)(COSTS, 1.2, few, short), ExitAt)


def test_a_method_that_lets_all_leave_at_the_first_exit_asks_for_no_more_samples():
    worse_later = made_up(1, 400, 4)
    predictions = worse_later.predictions.copy()
    predictions[:, 0], predictions[:, 1:] = worse_later.labels, (worse_later.labels[:, None] + 1) % 2
    policy = certified_probability(calibrate.eero)(COSTS, 3.0, replace(worse_later, predictions=predictions))
    assert isinstance(policy, ExitAt)
    assert policy.certificate.guarantee.endswith("since all leave after exit 1: the method chose so.")
    assert policy.certificate.numbers["smallest sample"] == 0


def test_the_order_of_a_table_does_not_change_what_can_be_certified():
    table = made_up(3, 1000, 4).unlabelled()
    easy_first = table.take(np.argsort(-table.scores[:, 0]))
    policy = certified_probability(calibrate.global_threshold)(COSTS, 3.0, TABLE, easy_first)
    assert replay(policy, made_up(4, 20_000, 4)).mean_cost <= 3.0


def test_a_method_that_plans_too_much_is_held_to_the_budget():
    from dataclasses import replace

    def greedy(costs, budget, labelled, unlabelled=None):
        return replace(calibrate.geometric(costs, 5.0, labelled, unlabelled), budget=3.0)

    for contract in ("mean", "probability"):
        policy = CONTRACTS[contract](greedy)(COSTS, 3.0, TABLE)
        assert policy.planned_cost <= 3.0
        assert replay(policy, made_up(4, 20_000, 4)).mean_cost <= 3.1


@pytest.mark.parametrize("contract", ["mean", "probability", "batch", "stream"])
@pytest.mark.parametrize("budget", [1.1, 6.4, 9.0])
def test_budgets_at_the_ends_can_be_guaranteed(contract, budget):
    policy = CONTRACTS[contract](calibrate.geometric)(COSTS, budget, TABLE)
    assert policy.certificate.contract == contract
    assert replay(policy, made_up(2, 500, 4), batch_size=50).mean_cost <= budget * (1 + 1e-12)


@pytest.mark.parametrize("contract", ["mean", "probability", "batch", "stream"])
@pytest.mark.parametrize("name", ["eero", "global_threshold", "patience"])
def test_a_network_with_one_exit_can_be_guaranteed(contract, name):
    policy = CONTRACTS[contract](METHODS[name])([2.0], 2.5, made_up(0, 50, 1))
    assert policy.certificate.contract == contract


@pytest.mark.parametrize("percent", [90, 99])
def test_streams_at_large_budgets_can_be_guaranteed(frozen, percent):
    policy = certified_stream(calibrate.eero, seed=0)(frozen.costs, f"{percent}%", frozen.labelled)
    assert sum(policy.law) == len(frozen.labelled) // 2 + 1  # half of the table certifies
    spent = replay(policy, frozen.test, batch_size=100).spent.sum()
    assert spent <= len(frozen.test) * policy.budget + policy.costs[-1]


def test_a_combination_does_not_stop_the_first_exit_from_being_guaranteed():
    logits = np.random.default_rng(0).normal(size=(100, 4, 3))
    table = HeadOutputs.from_logits(logits, logits[:, -1].argmax(-1))
    for combine in calibrate.COMBINE:
        combined = calibrate.combined(calibrate.geometric, combine)
        policy = certified_probability(combined, delta=1e-9)(COSTS, 1.11, table)
        assert isinstance(policy, ExitAt)
        assert (replay(policy, table).exits == 0).all()


def test_a_seed_fixes_the_salt_and_without_one_it_is_random():
    for name, contract in CONTRACTS.items():
        if name != "batch":  # which holds whatever the draws
            first, again = (contract(calibrate.patience, seed=3)(COSTS, 3.0, TABLE) for _ in range(2))
            assert first == again
            salts = {contract(calibrate.patience)(COSTS, 3.0, TABLE).salt for _ in range(3)}
            assert len(salts | {first.salt}) == 4
    thresholds = {certified_mean(calibrate.eero)(COSTS, 3.0, TABLE).thresholds for _ in range(3)}
    assert len(thresholds) == 1  # the split stays


def test_coarse_scores_are_not_taken_for_equal_samples():
    coarse = [made_up(seed, 1200, 4, classes=2, ties=True) for seed in (1, 2)]
    assert 0 < coarse[0].shared_samples(coarse[1]) < 0.2
    tables = [replace(each, scores=np.ones((1200, 4)), predictions=np.zeros((1200, 4), int)) for each in coarse]
    assert certified_mean(calibrate.eero)(COSTS, 3.0, *tables).certificate.contract == "mean"


@pytest.mark.parametrize("contract", ["mean", "probability", "stream"])
def test_copies_of_samples_make_a_guarantee_doubtful(contract):
    """Of 100 samples ten times each, 18 to 27 % of the guarantees of 95 % confidence were false, without a word."""
    method, copied = CONTRACTS[contract](calibrate.eero), made_up(2, 100, 4).take(np.repeat(np.arange(100), 10))
    with pytest.warns(ShiftWarning, match="90 % of the 1,000 samples repeat others exactly"):
        policy = method(COSTS, 3.0, copied)
    assert "Doubtful: 90 %" in str(policy.certificate)
    with pytest.warns(ShiftWarning, match="Leave copies out"):  # also where the copies certify alone
        method(COSTS, 3.0, copied.take(np.arange(0, 1000, 10)), made_up(3, 100, 4).take(np.repeat(np.arange(100), 2)))
    assert "Doubtful" not in str(method(COSTS, COSTS.cumulative()[-1], copied).certificate)  # nothing is assumed
    coarse = made_up(1, 1200, 4, classes=2, ties=True)
    assert "Doubtful" not in str(method(COSTS, 3.0, coarse).certificate)


@pytest.mark.parametrize("budget", [None, 3.0])
def test_copies_of_samples_make_a_guarantee_of_risk_doubtful(budget):
    copied = made_up(2, 300, 4).take(np.tile(np.arange(300), 4))
    with pytest.warns(ShiftWarning, match="75 % of the 1,200 samples repeat others"):
        policy = calibrate.certified_risk(calibrate.eero, risk="disagreement", alpha=0.95)(COSTS, budget, copied)
    assert "Doubtful" in str(policy.certificate)


def test_with_one_seed_equal_scores_are_cut_anew_in_every_calibration():
    """With salts of the seed alone the tie shares were the same for every table of so many samples, right or not."""

    def equal(seed):
        return replace(made_up(seed, 60, 4), scores=np.ones((60, 4)))

    method, spent = certified_mean(calibrate.geometric, seed=0), []
    for seed in range(300):
        policy = method(COSTS, 3.0, equal(seed))
        leaving = np.append(policy.tie_shares, 1.0)
        gone = np.maximum.accumulate(leaving)  # ties are ordered by one draw at all exits
        spent.append(float(np.diff(gone, prepend=0.0) @ policy.costs))
    assert method(COSTS, 3.0, equal(7)).tie_shares == method(COSTS, 3.0, equal(7)).tie_shares
    assert len({*spent}) > 290
    assert np.mean(spent) <= 3.0 + 3 * np.std(spent) / np.sqrt(len(spent))
    assert np.mean(spent) >= 2.8  # and the budget is used


@pytest.mark.parametrize("contract", ["mean", "probability"])
def test_patience_with_combined_answers_can_be_certified(contract):
    policy = CONTRACTS[contract](calibrate.combined(calibrate.patience, "vote"), seed=0)(COSTS, 3.0, TABLE)
    assert policy.combination is not None
    assert replay(policy, TABLE).mean_cost <= 3.0


@pytest.mark.parametrize("contract", ["mean", "probability", "stream"])
def test_a_guarantee_comes_after_all_choices(contract):
    certified = CONTRACTS[contract](calibrate.eero)
    candidates = {"only": certified}
    wrapped = {"combined": calibrate.combined(certified), "pruned": calibrate.pruned(certified)}
    for name, method in (wrapped | {"auto": partial(calibrate.auto, candidates=candidates)}).items():
        with pytest.raises(BadInput, match=rf"{name} chooses on the samples that certified eero.*certify last"):
            method(COSTS, 3.0, TABLE)
    assert calibrate.combined(certified_batch(calibrate.eero))(COSTS, 3.0, TABLE).certificate.contract == "batch"


def test_a_mixture_has_one_salt():
    policy = certified_mean(calibrate.patience, seed=5)(COSTS, 3.0, TABLE)
    assert {policy.first.salt, policy.second.salt} == {policy.salt}


def test_what_is_fitted_on_a_table_cannot_be_certified_on_it():
    order = np.random.default_rng(0).permutation(len(TABLE))
    larger = HeadOutputs.joined([made_up(2, 1500, 4), TABLE])
    for same in (TABLE, TABLE.take(order), TABLE.take(order[:900]), larger, larger.unlabelled()):
        with pytest.raises(BadInput, match=r"^100 % of the samples .* cannot be certified on them"):
            certified_mean(calibrate.eero)(COSTS, 3.0, TABLE, same)
    with pytest.raises(BadInput, match="leave unlabelled out"):
        certified_risk(calibrate.eero, risk="error", alpha=0.5)(COSTS, None, TABLE, made_up(2, 50, 4))
    with pytest.raises(Mismatch):
        certified_mean(calibrate.eero)(COSTS, 3.0, TABLE, made_up(2, 50, 3))


def test_a_budget_below_the_first_exit_cannot_be_guaranteed():
    with pytest.raises(BudgetTooSmall):
        certified_mean(calibrate.eero)(COSTS, 1.0, TABLE)


def test_a_budget_of_the_whole_network_needs_no_statistics():
    policy = certified_probability(calibrate.eero)(COSTS, 10.0, TABLE)
    assert "Guaranteed for every sample" in policy.certificate.guarantee


def accurate(seed: int, samples: int) -> HeadOutputs:
    """A network whose last exit is right on 97 of 100, and whose first knows the easy ones."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(10, size=samples)
    hardness = rng.uniform(size=(samples, 1))
    right = hardness < np.array([0.6, 0.75, 0.9, 0.97])
    predictions = np.where(right, labels[:, None], (labels[:, None] + 1) % 10)
    return HeadOutputs(np.clip(1 - hardness + 0.05 * rng.normal(size=(samples, 4)), 0, 1), predictions, labels)


@pytest.mark.parametrize(("risk", "alpha"), [("error", 0.1), ("excess_error", 0.03), ("disagreement", 0.05)])
def test_the_cheapest_policy_for_a_guaranteed_risk(risk, alpha, tmp_path):
    calibration, fresh = accurate(1, 4000), accurate(2, 20_000)
    given = calibration.unlabelled() if risk == "disagreement" else calibration
    policy = certified_risk(calibrate.eero, risk=risk, alpha=alpha)(COSTS, None, given, spend_all=True)
    decisions = replay(policy, fresh)
    wrong, last = decisions.predictions != fresh.labels, fresh.predictions[:, -1]
    risks = {
        "error": wrong.mean(),
        "excess_error": wrong.mean() - (last != fresh.labels).mean(),
        "disagreement": (decisions.predictions != last).mean(),
    }
    assert risks[risk] <= alpha
    assert decisions.mean_cost < 0.8 * COSTS.full
    policy.save(tmp_path / "policy.json")
    assert load_policy(tmp_path / "policy.json").certificate == policy.certificate


@pytest.mark.guarantee
def test_a_guaranteed_risk_is_exceeded_no_more_often_than_delta():
    fresh = accurate(10**6, 20_000)
    method, failures = certified_risk(calibrate.geometric, risk="error", alpha=0.1, delta=0.1), 0
    for seed in range(100):
        policy = method(COSTS, None, accurate(seed, 600))
        failures += replay(policy, fresh).accuracy(fresh.labels) < 0.9
    assert failures <= binom.ppf(0.999, 100, 0.1)


def test_cost_and_risk_can_be_guaranteed_together():
    calibration = accurate(1, 6000)
    policy = certified_risk(calibrate.eero, risk="error", alpha=0.15, cost="probability")(COSTS, "70%", calibration)
    assert policy.certificate.contract == "probability, error"
    assert "error <= 15 % (" in policy.certificate.guarantee
    with pytest.raises(BadInput, match="too near or above alpha"):
        certified_risk(calibrate.eero, risk="error", alpha=0.1, cost="probability")(COSTS, "25%", calibration)


def surely_right_at_the_end(seed: int, samples: int) -> HeadOutputs:
    """Two exits: the first is right with the probability that its score says, the last always."""
    rng = np.random.default_rng(seed)
    sure = rng.uniform(size=samples)
    wrong = rng.uniform(size=samples) >= sure
    predictions = np.stack([wrong, np.zeros(samples)], axis=1).astype(int)
    return HeadOutputs(np.stack([sure, np.ones(samples)], axis=1), predictions, np.zeros(samples, int))


@pytest.mark.guarantee
def test_cost_and_risk_together_break_no_more_often_than_delta():
    budget, alpha, draws, broken = 1.5, 0.2, 400, []
    method = certified_risk(calibrate.geometric, risk="error", alpha=alpha, delta=0.1)
    for seed in range(draws):
        try:
            policy = method([1.0, 2.0], budget, surely_right_at_the_end(seed, 240))
        except BadInput:  # not issued
            continue
        passing = float(np.clip(policy.thresholds[0], 0, 1)) if isinstance(policy, Threshold) else 0.0
        broken.append(1 + passing > budget or (1 - passing) ** 2 / 2 > alpha)
        assert "Both together: 90 % confidence." in policy.certificate.guarantee
    assert 10 < len(broken) < draws / 2  # a test that selects
    assert sum(broken) <= binom.ppf(0.999, draws, 0.1)


def test_certificates_with_a_delta_say_what_it_counts():
    counted = "counts all calibrations, whether a guarantee could be issued or not"
    table = accurate(1, 6000)
    assert counted in str(certified_probability(calibrate.eero)(COSTS, 3.0, table).certificate)
    for budget in (None, "70%", "200%"):
        policy = certified_risk(calibrate.eero, risk="error", alpha=0.15)(COSTS, budget, table)
        assert counted in str(policy.certificate)
        assert "same distribution" in str(policy.certificate)
    assert counted not in str(certified_mean(calibrate.eero)(COSTS, 3.0, table).certificate)


def test_a_certificate_that_rests_on_two_distributions_says_so():
    shifted = accurate(2, 3000)
    harder = shifted.take(np.argsort(shifted.scores[:, 0])[:2400]).unlabelled()  # the surest are missing
    for certified in (certified_mean, certified_probability, certified_stream):
        certified(calibrate.eero)(COSTS, 3.0, accurate(1, 3000), shifted.unlabelled())  # without a warning
        with pytest.warns(ShiftWarning, match="differ at exit . *: .* and .* Calibrate with samples"):
            policy = certified(calibrate.eero)(COSTS, 3.0, accurate(1, 3000), harder)
        assert "Doubtful: the labelled and the unlabelled samples differ at exit" in str(policy.certificate)


BAD = {
    "alpha too small": (
        certified_risk,
        {"risk": "error", "alpha": 0.02},
        "error of the full network is 3.* % on .*raise alpha above",
    ),
    "too few samples": (certified_risk, {"risk": "error", "alpha": 0.0005}, "at least 6,1.. are needed"),
    "no alpha": (certified_risk, {"risk": "error", "alpha": None}, "alpha None must lie inside"),
    "unknown risk": (certified_risk, {"risk": "luck", "alpha": 0.1}, "no risk 'luck'"),
    "unknown bound": (certified_probability, {"bound": "hope"}, "no bound 'hope'"),
    "unknown bound of a risk": (certified_risk, {"risk": "error", "alpha": 0.1, "bound": "hope"}, "no bound 'hope'"),
    "delta": (certified_probability, {"delta": 1.0}, "delta 1 must lie inside"),
    "delta of a risk": (certified_risk, {"risk": "error", "alpha": 0.1, "delta": 1.0}, "delta 1 must lie inside"),
    "cost without budget": (
        certified_risk,
        {"risk": "error", "alpha": 0.2, "cost": "probability"},
        "on cost needs a budget",
    ),
    "mean cost": (certified_risk, {"risk": "error", "alpha": 0.2, "cost": "mean"}, "leave cost out"),
    "too few for excess": (certified_risk, {"risk": "excess_error", "alpha": 0.0005}, "test samples cannot certify"),
    "no budget": (certified_mean, {}, "needs a budget"),
    "no budget for batches": (certified_batch, {}, "needs a budget"),
    "risk with batch": (certified_risk, {"risk": "error", "alpha": 0.2, "cost": "batch"}, "not 'batch'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_guaranteed_is_refused_with_the_numbers(case):
    certified, options, message = BAD[case]
    with pytest.raises(BadInput, match=message):
        certified(calibrate.eero, **options)(COSTS, None, accurate(1, 2000))


def test_a_guarantee_on_error_needs_labels():
    with pytest.raises(LabelsNeeded, match="a guarantee on error"):
        certified_risk(calibrate.eero, risk="error", alpha=0.1)(COSTS, None, TABLE.unlabelled())
