"""A plan pays on this machine, or is the full network."""

import numpy as np
import pytest
import torch
from torch import nn

from alight import Costs, HeadOutputs
from alight.calibrate.published import eero
from alight.engine.settings import RunSettings
from alight.errors import BadInput
from alight.networks.multi_exit import MultiExitModel
from alight.planning.plan import cheapest, largest_loss, plan, walking_costs
from alight.policies.policy import ExitAt
from alight.policies.route import replay

pytestmark = pytest.mark.alone


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
def one_thread():
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
    assert f"loses at most {found.largest_loss:.1%} of accuracy" in str(found)
    assert found.full_accuracy - found.accuracy < found.largest_loss <= 0.05
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


@pytest.mark.parametrize(("lost", "won"), [(0.03, 0.01), (0.05, 0.02), (0.1, 0.08)])
def test_the_largest_loss_is_exceeded_once_in_twenty(lost, won):
    draws = np.random.default_rng(0).uniform(size=(4000, 500))
    before, after = draws < 0.7, (draws < 0.7 - lost) | (draws > 1 - won)
    bounds = np.array([largest_loss(*pair) for pair in zip(before, after, strict=True)])
    assert (bounds < lost - won).mean() == pytest.approx(0.05, abs=0.015)
    assert np.median(bounds) < lost - won + 0.035


def test_few_samples_are_not_taken_for_certainty():
    assert largest_loss(np.ones(20), np.ones(20)) > 0.05
    assert largest_loss(np.ones(2000), np.ones(2000)) < 0.001
    assert largest_loss(np.zeros(20), np.ones(20)) == 0.0


def test_a_plan_loses_no_more_on_fresh_samples_than_it_says():
    costs, asked = Costs([1.0, 1.0, 1.0], [0.05, 0.05, 0.05], "ms"), 0.02
    fresh, accuracies = recorded([0.7, 0.8, 0.85], seed=99, size=20_000), []
    amounts = []
    for seed in range(30):
        labelled = recorded([0.7, 0.8, 0.85], seed=seed, size=800)
        amounts.append(cheapest(eero, costs, labelled, asked))
        accuracies.append(replay(eero(costs, amounts[-1], labelled), fresh).accuracy(fresh.labels))
    lost = fresh.correct()[:, -1].mean() - np.array(accuracies)
    assert (lost > asked).sum() <= 4
    assert np.median(amounts) < 0.95 * costs.full


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
