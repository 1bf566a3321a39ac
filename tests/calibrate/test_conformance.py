"""What every method must do. A method joins by its line in METHODS."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
from conftest import made_up

from alight import Costs, Decisions, HeadOutputs, Policy, load_policy, replay
from alight.calibrate import METHODS
from alight.errors import BadInput, BudgetTooSmall, Mismatch

LABELLED = made_up(1, 400, 4)
UNLABELLED = made_up(2, 300, 4).unlabelled()
FRESH = made_up(3, 4000, 4)
COSTS = Costs(stages=[2.0, 1.0, 3.0, 2.0], heads=[0.5, 0.25, 0.25, 0.5], unit="ms")
TABLES = {"plain": LABELLED, "tied": made_up(4, 400, 4, ties=True), "tiny": made_up(5, 7, 4)}
BUDGETS = [2.5, 2.6, "40%", 5.0, "75%", 7.999, "100%", 9.0, 20.0]

every_method = pytest.mark.parametrize(  # the slow two search for seconds at each budget
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("genetic", "auto"))) for name in METHODS]
)


def decide(name: str, budget=5.0, labelled=LABELLED, unlabelled=None, costs=COSTS) -> tuple[Policy, Decisions]:
    policy = METHODS[name](costs, budget, labelled, unlabelled)
    return policy, replay(policy, labelled if unlabelled is None else unlabelled)


@every_method
@pytest.mark.parametrize("table", TABLES)
def test_the_budget_is_kept_on_the_data_that_set_the_thresholds(name, table):
    for budget in BUDGETS:
        policy, decisions = decide(name, budget, TABLES[table])
        assert decisions.mean_cost <= COSTS.budget(budget) * (1 + 1e-12)
        assert policy.budget == COSTS.budget(budget)


@every_method
def test_unlabelled_data_set_the_thresholds_when_they_are_given(name):
    _, decisions = decide(name, 5.0, LABELLED, UNLABELLED)
    assert decisions.mean_cost <= 5.0


@every_method
def test_labels_are_not_required(name):
    policy, decisions = decide(name, 5.0, LABELLED.unlabelled())
    assert decisions.mean_cost <= 5.0
    assert isinstance(policy, Policy)


@every_method
def test_fresh_samples_cost_what_was_allowed_up_to_sampling_error(name):
    policy, calibrated = decide(name)
    fresh = replay(policy, FRESH)
    error = np.sqrt(calibrated.spent.var() / len(calibrated) + fresh.spent.var() / len(fresh))
    assert fresh.mean_cost <= 5.0 + 4 * error


@every_method
def test_the_cheapest_budget_sends_everyone_out_at_the_first_exit(name):
    _, decisions = decide(name, 2.5)
    assert (decisions.exits == 0).all()


@every_method
def test_more_budget_never_means_less_spent(name):
    spent = [decide(name, budget)[1].mean_cost for budget in (3.0, 5.0, 8.0)]
    assert spent == sorted(spent)


@every_method
def test_the_policy_carries_what_it_was_made_for(name):
    policy, _ = decide(name)
    assert (policy.method, policy.unit, policy.budget, policy.inputs) == (name, "ms", 5.0, ("margin",))
    assert policy.num_exits == 4
    np.testing.assert_allclose(policy.costs, COSTS.cumulative(policy.open_exits))
    assert name in str(policy)
    if policy.exit_rates:
        assert sum(policy.exit_rates) == pytest.approx(1)
        assert policy.planned_cost <= 5.0 * (1 + 1e-12)


@every_method
def test_the_same_data_give_the_same_policy(name):
    assert decide(name)[0] == decide(name)[0]


@every_method
def test_the_policy_survives_saving_and_decides_the_same(name, tmp_path):
    policy, decisions = decide(name, 5.0, TABLES["tied"])
    policy.save(tmp_path / "policy.json")
    loaded = load_policy(tmp_path / "policy.json")
    assert loaded == policy
    np.testing.assert_array_equal(replay(loaded, TABLES["tied"]).exits, decisions.exits)
    json.loads((tmp_path / "policy.json").read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@every_method
def test_a_plain_array_of_cumulative_costs_is_as_good_as_costs(name):
    arrayed, _ = decide(name, 5.0, costs=[2.5, 3.75, 7.0, 9.5])
    costed, _ = decide(name, 5.0, costs=Costs.from_cumulative([2.5, 3.75, 7.0, 9.5], unit="ms"))
    assert arrayed.unit == ""
    assert costed.unit == "ms"
    assert arrayed.costs == costed.costs
    np.testing.assert_array_equal(replay(arrayed, FRESH).exits, replay(costed, FRESH).exits)


@every_method
@pytest.mark.parametrize("exits", [1, 2])
def test_networks_with_one_or_two_exits_are_valid(name, exits):
    table = made_up(6, 100, exits)
    costs = np.arange(1.0, exits + 1)
    for budget in (1.0, float(exits) - 0.3, float(exits)):
        if budget >= 1:
            _, decisions = decide(name, budget, table, costs=costs)
            assert decisions.mean_cost <= budget


@every_method
def test_a_budget_below_the_cheapest_exit_is_refused_with_both_numbers(name):
    with pytest.raises(BudgetTooSmall, match=r"budget 2 ms per sample is below the cheapest exit \(2.5 ms, 29.4 % of"):
        decide(name, 2.0)


@every_method
def test_a_table_of_another_network_is_refused(name):
    with pytest.raises(Mismatch, match="the labelled table has 3 exits, but there are 4 costs"):
        decide(name, 5.0, made_up(0, 50, 3))
    with pytest.raises(Mismatch, match="the unlabelled table has 3 exits"):
        decide(name, 5.0, LABELLED, made_up(0, 50, 3))


@every_method
def test_one_sample_is_too_few_to_calibrate(name):
    with pytest.raises(BadInput, match="has 1 sample: record at least 2"):
        decide(name, 5.0, made_up(0, 1, 4))


@every_method
def test_two_scores_in_one_calibration_are_refused(name):
    with pytest.raises(Mismatch, match="'margin' and the unlabelled one's 'max_probability'"):
        decide(name, 5.0, LABELLED, replace(UNLABELLED, score="max_probability"))


@every_method
def test_one_table_given_twice_is_warned_of(name):
    with pytest.warns(UserWarning, match="same table was given as labelled and unlabelled"):
        METHODS[name](COSTS, 5.0, LABELLED, LABELLED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        METHODS[name](COSTS, 5.0, LABELLED, UNLABELLED)


def with_costs(table: HeadOutputs, seed: int) -> HeadOutputs:
    """The table with a cost of its own for every call: unsure samples cost more, and some cost much."""
    rng = np.random.default_rng(seed)
    hardness = np.clip(1.5 - table.scores.mean(axis=1, keepdims=True), 0.2, 2)
    return replace(
        table, costs=np.array([1.0, 2.0, 5.0, 12.0]) * hardness**2 * rng.lognormal(0, 0.7, table.scores.shape)
    )


PRICED = {name: with_costs(table, 7) for name, table in TABLES.items()}


@every_method
@pytest.mark.parametrize("table", PRICED)
def test_the_budget_is_kept_in_real_costs_on_the_data_that_set_the_thresholds(name, table):
    priced = PRICED[table]
    costs = Costs(np.zeros(4), priced.costs.mean(axis=0), unit="USD")
    for budget in ("20%", "100%") if name in ("genetic", "auto") else ("12%", "20%", "45%", "75%", "100%", "200%"):
        if costs.budget(budget) >= costs.cumulative()[0]:
            _, decisions = decide(name, budget, priced, costs=costs)
            assert decisions.mean_cost <= costs.budget(budget) * (1 + 1e-12)


@every_method
def test_unlabelled_data_with_costs_set_the_thresholds_when_they_are_given(name):
    unlabelled = with_costs(UNLABELLED, 8)
    costs = Costs(np.zeros(4), unlabelled.costs.mean(axis=0), unit="USD")
    _, decisions = decide(name, "60%", PRICED["plain"], unlabelled, costs)
    assert decisions.mean_cost <= costs.budget("60%")


@every_method
def test_graded_answers_are_taken(name):
    right = LABELLED.correct().astype(float)
    _, decisions = decide(name, 5.0, replace(LABELLED, quality=0.2 + 0.6 * right))
    assert decisions.mean_cost <= 5.0
    assert 0.2 <= decisions.accuracy() <= 0.8


@every_method
def test_costs_of_calls_and_costs_of_shared_stages_are_not_mixed(name):
    with pytest.raises(Mismatch, match="the costs have stages that exits share"):
        decide(name, 5.0, PRICED["plain"])
    with pytest.raises(Mismatch, match="one table has a cost for every sample and the other has not"):
        decide(name, 5.0, LABELLED, with_costs(UNLABELLED, 8))


@every_method
def test_the_policy_is_for_the_size_of_the_images_that_set_its_thresholds(name, tmp_path):
    small, large = (replace(LABELLED, sample_shape=(3, size, size)) for size in (16, 32))
    policy, _ = decide(name, 5.0, small)
    policy.save(tmp_path / "policy.json")
    assert load_policy(tmp_path / "policy.json").sample_shape == (3, 16, 16)
    with pytest.raises(Mismatch, match="for samples of 3 x 16 x 16, and the table is of 3 x 32 x 32"):
        replay(policy, large)
    with pytest.raises(
        Mismatch, match="labelled table is of samples of 3 x 32 x 32, and thresholds are set on samples"
    ):
        decide(name, 5.0, large, small.unlabelled())
    measured = Costs(COSTS.stages, COSTS.heads, "ms", sample_shape=(3, 32, 32))
    with pytest.raises(Mismatch, match="costs were measured with samples of 3 x 32 x 32, and thresholds are set on"):
        decide(name, 5.0, small, costs=measured)
    assert decide(name, 5.0, large, costs=measured)[0].sample_shape == (3, 32, 32)
