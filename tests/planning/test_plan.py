"""A plan pays on this machine, or is the full network."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import nn

from alight import Costs, HeadOutputs, cascade
from alight.calibrate.published import eero
from alight.calibrate.risk_guarantees import largest_loss
from alight.engine.settings import RunSettings
from alight.errors import BadInput, Mismatch
from alight.networks.multi_exit import MultiExitModel
from alight.planning.plan import TESTING_SALT, cheapest, plan, walking_costs
from alight.policies.policy import ExitAt
from alight.policies.route import replay


def chain(widths):
    """Stages as expensive as their widths say, and small heads."""
    stages, features = [], 32
    for width in widths:
        stages.append(nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 32)))
        features = 32
    return MultiExitModel(stages, [nn.Linear(32, 4) for _ in widths]).eval()


def recorded(accuracies, seed=0, size=600):
    """Exits of these accuracies, surer where they are right."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(4, size=size)
    right = rng.uniform(size=(size, 1)) < np.array(accuracies)
    scores = np.where(right, rng.beta(5, 2, size=right.shape), rng.beta(2, 5, size=right.shape))
    return HeadOutputs(scores, np.where(right, labels[:, None], (labels[:, None] + 1) % 4), labels)


@pytest.fixture(autouse=True)
def one_thread(short_trials):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


EXAMPLE = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))


def test_where_early_exits_are_good_and_later_stages_expensive_they_pay():
    model = chain([64, 16_000, 16_000])
    found = plan(model, recorded([0.85, 0.88, 0.9]), example=EXAMPLE, batch_size=64, max_accuracy_loss=0.05)
    assert found.pays
    assert found.speedup > 1.3
    assert found.accuracy >= found.full_accuracy - 0.07
    assert "loses at most 5 % of accuracy, with 95 % confidence" in str(found)
    assert found.full_accuracy - found.accuracy < found.largest_loss == 0.05
    decisions = found.predictor()(torch.randn(100, 32))
    assert set(decisions.exits) <= set(found.open_exits)


@pytest.mark.slow
def test_where_all_the_time_goes_into_the_first_stage_the_full_network_is_the_plan():
    model = chain([20_000, 16, 16])
    found = plan(model, recorded([0.85, 0.88, 0.9]), example=EXAMPLE, batch_size=64, max_accuracy_loss=0.05)
    assert not found.pays
    assert isinstance(found.policy, ExitAt)
    assert found.open_exits == (2,)
    assert "se the full network" in found.reason


@pytest.mark.slow
def test_where_early_exits_know_nothing_the_full_network_is_the_plan():
    model = chain([64, 4000, 4000])
    table = recorded([0.25, 0.25, 0.95])
    hopeless = HeadOutputs(np.random.default_rng(0).uniform(size=table.scores.shape), table.predictions, table.labels)
    found = plan(model, hopeless, example=EXAMPLE, batch_size=16, max_accuracy_loss=0.0)
    assert not found.pays
    assert found.accuracy == found.full_accuracy


@pytest.mark.slow
def test_a_budget_of_time_is_kept_by_the_measured_costs():
    model = chain([64, 16_000, 16_000])
    table = recorded([0.7, 0.8, 0.9])
    found = plan(model, table, example=EXAMPLE, batch_size=64, budget="60%")
    assert found.pays
    assert found.policy.unit == "ms"
    assert found.policy.planned_cost <= 0.6 * found.costs.full * (1 + 1e-9)


@pytest.mark.parametrize(("lost", "won"), [(0.03, 0.01), (0.1, 0.08)])
def test_the_largest_loss_is_exceeded_at_most_once_in_twenty(lost, won):
    draws = np.random.default_rng(0).uniform(size=(400, 500))
    before, after = draws < 0.7, (draws < 0.7 - lost) | (draws > 1 - won)
    bounds = np.array([largest_loss(*pair) for pair in zip(before, after, strict=True)])
    assert (bounds < lost - won).sum() <= binom.ppf(0.999, 400, 0.05)
    assert np.median(bounds) < lost - won + 0.05


def test_few_samples_are_not_taken_for_certainty():
    assert largest_loss(np.ones(20), np.ones(20)) > 0.1
    assert largest_loss(np.ones(20_000), np.ones(20_000)) <= 0.001
    assert largest_loss(np.zeros(200), np.ones(200)) == 0.0


@pytest.mark.guarantee
def test_a_plan_loses_more_than_was_asked_in_at_most_one_of_twenty_draws():
    costs, asked, draws = Costs([1.0, 1.0, 1.0], [0.05, 0.05, 0.05], "ms"), 0.02, 200
    fresh, losses, amounts = recorded([0.7, 0.8, 0.85], seed=99_999, size=50_000), [], []
    before = fresh.correct()[:, -1].mean()
    for seed in range(draws):
        tables = recorded([0.7, 0.8, 0.85], seed=seed, size=600).split(1 / 3, np.random.default_rng(seed))
        policy = cheapest(partial(eero, spend_all=True), costs, *tables, asked)
        losses.append(0.0 if policy is None else before - replay(policy, fresh).accuracy(fresh.labels))
        amounts.append(1.0 if policy is None else policy.budget / costs.full)
    assert sum(loss > asked for loss in losses) <= binom.ppf(0.999, draws, 0.05)
    assert np.median(amounts) < 0.95


def test_candidates_are_tested_on_samples_that_did_not_fit_them_in_order_up_to_the_first_that_fails():
    costs, fitted = Costs([1.0, 1.0, 1.0], [0.05] * 3), []
    fitting, testing = recorded([0.7, 0.8, 0.85], size=3000).split(0.5, np.random.default_rng(0))

    def fit(costs, budget, labelled):
        fitted.append((budget, labelled, eero(costs, budget, labelled)))
        return fitted[-1][2]

    policy = cheapest(fit, costs, fitting, testing, 0.02)
    budgets = [budget for budget, _, _ in fitted]
    assert budgets == sorted(budgets, reverse=True)
    assert all(labelled is fitting for _, labelled, _ in fitted)
    assert len(fitted) > 2
    assert policy is fitted[-2][2]  # the last that passed, unchanged: the last that was tried failed


def test_too_few_samples_say_how_many_are_needed():
    found = plan(chain([8, 8, 8]), recorded([0.8, 0.8, 0.8], size=60), example=EXAMPLE, batch_size=4)
    assert not found.pays
    assert "from 60 labelled samples (479 are needed at least): use the full network" in found.reason


def test_bad_input_says_what_to_do():
    model, table = chain([8, 8, 8]), recorded([0.5, 0.6, 0.7])
    for wrong, message in (
        ({"budget": "50%", "max_accuracy_loss": 0.1}, "give one of them"),
        ({"max_accuracy_loss": 2.0}, "must lie in"),
    ):
        with pytest.raises(BadInput, match=message):
            plan(model, table, example=EXAMPLE, batch_size=4, **wrong)
    with pytest.raises(BadInput, match="record this network"):
        plan(model, recorded([0.5, 0.6]), example=EXAMPLE, batch_size=4)


class Steps(nn.Module):
    """Many small steps, which a compiler makes one."""

    def forward(self, features):
        for _ in range(50):
            features = features * 0.99 + 0.01
        return features


@pytest.mark.slow
def test_a_compiled_network_is_planned_by_its_compiled_times():
    stages = [nn.Sequential(nn.Linear(32, 32), Steps()) for _ in range(2)]
    model = MultiExitModel(stages, [nn.Linear(32, 4) for _ in stages]).eval()
    plain, quick = (walking_costs(model, EXAMPLE, 16, RunSettings(compile=each)) for each in (False, True))
    assert (quick.stages < 0.5 * plain.stages).all()
    assert (quick.heads > 0).all()


def linear_chain(*widths):
    members = [nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 4)) for width in widths]
    return cascade(members, ["small", "middle", "large"][: len(widths)], example=EXAMPLE)


def test_a_cascade_is_planned_against_the_cheapest_network_that_is_as_accurate_alone():
    """The middle network is as accurate as the large one, so that beating the large one is not enough."""
    table = recorded([0.5, 0.9, 0.9])
    model = linear_chain(64, 1024, 16_000)
    found = plan(model, table, batch_size=64, budget="40%", progress=False)
    assert not found.pays
    assert found.open_exits == (1,)
    assert "use middle alone" in found.reason.lower()
    assert set(found.predictor()(torch.randn(20, 32)).exits.tolist()) == {1}


def test_a_cascade_pays_where_the_small_network_answers_most():
    found = plan(linear_chain(64, 16_000), recorded([0.75, 0.9]), batch_size=64, max_accuracy_loss=0.05, progress=False)
    assert found.pays
    assert found.open_exits == (0, 1)
    assert found.speedup > 1.2
    assert "loses at most 5 %" in found.reason
    with pytest.raises(BadInput, match="every network of a cascade has settings of its own"):
        plan(linear_chain(8, 8), recorded([0.8, 0.9]), batch_size=4, speed="auto")


def test_a_cascade_loses_no_more_than_is_said_against_the_most_accurate_of_its_networks():
    """The largest is not: a plan was tested against it, and printed beside the middle one."""
    table = recorded([0.6, 0.95, 0.7], size=3000)
    found = plan(linear_chain(64, 14_000, 16_000), table, batch_size=64, max_accuracy_loss=0.05, progress=False)
    assert found.full_accuracy > 0.9
    assert found.full_accuracy - found.accuracy <= 0.05
    kept = plan(linear_chain(64, 14_000, 16_000), table, batch_size=64, budget="10%", progress=False)
    assert not kept.pays or kept.largest_loss >= kept.full_accuracy - kept.accuracy
    assert "use middle alone" in plan(linear_chain(8, 8, 8), table, batch_size=4, progress=False).reason.lower()


def test_a_plan_without_labels_says_that_it_compares_with_the_last_exit():
    model, table = chain([64, 16_000, 16_000]), recorded([0.85, 0.88, 0.9])
    unlabelled = HeadOutputs(table.scores, table.predictions)
    found = plan(model, unlabelled, example=EXAMPLE, batch_size=64, max_accuracy_loss=0.3, progress=False)
    assert "of agreement with the last exit, with 95 % confidence" in found.reason
    assert "agreement" in str(found)
    assert "accuracy" not in str(found)


def test_a_plan_is_judged_with_other_ties_than_set_its_thresholds():
    table = recorded([0.6, 0.88, 0.9], seed=1)
    tied = HeadOutputs(np.full_like(table.scores, 0.5), table.predictions, table.labels)
    found = plan(chain([64, 16_000, 16_000]), tied, example=EXAMPLE, batch_size=64, budget="50%", progress=False)
    _, testing = tied.split(1 / 3, np.random.default_rng(0))
    assert found.pays
    assert found.accuracy == replay(replace(found.policy, salt=TESTING_SALT), testing).accuracy()
    assert found.accuracy != replay(found.policy, testing).accuracy()


def test_graded_answers_lose_quality_and_not_their_label():
    """Answers other than the label that were graded as right counted as wrong."""
    table = recorded([0.6, 0.6, 0.9])
    graded = HeadOutputs(table.scores, table.predictions, table.labels, quality=np.ones((600, 3)))
    policy = cheapest(eero, Costs([1.0, 1.0, 1.0], [0.1] * 3), *graded.split(1 / 3, np.random.default_rng(0)), 0.05)
    assert policy.budget == pytest.approx(1.1)


def test_times_of_other_images_than_those_of_the_table_are_refused_and_the_full_network_knows_its_size():
    heads = [nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)) for _ in range(2)]
    model = MultiExitModel([nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)], heads).eval()
    table, terms = recorded([0.2, 0.9]), {"batch_size": 8, "max_accuracy_loss": 0.01, "progress": False}
    table = replace(table, sample_shape=(3, 16, 16))
    with pytest.raises(Mismatch, match="costs were measured with samples of 3 x 12 x 12, and thresholds are set on"):
        plan(model, table, example=torch.zeros(1, 3, 12, 12), **terms)
    assert plan(model, table, example=torch.zeros(1, 3, 16, 16), **terms).policy.sample_shape == (3, 16, 16)
