"""What a GPU decides is what a replay decides; here with the same programs and kernels, without one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from interpreted import EXECUTOR, INTERPRETED, interpreted, passed_in_a_process_of_their_own
from torch import nn

from alight import calibrate
from alight.engine.backends.torch import open_stages
from alight.engine.backends.torch.device_walk import DeviceWalk
from alight.engine.backends.torch.values import half
from alight.engine.predictor import _reads
from alight.engine.recorder import record
from alight.engine.walk import Answers, usable
from alight.errors import BadInput
from alight.networks.multi_exit import MultiExitModel
from alight.outputs import half as numpy_half
from alight.policies.combinations import Gain
from alight.policies.policy import ExitAt, Lottery, Mixture, Patience, Streak, Threshold
from alight.policies.route import replay

COSTS = (1.0, 2.0, 3.0)


@pytest.mark.skipif(INTERPRETED, reason="is that process")
def test_walks_are_decided_as_replayed_in_a_process_of_their_own():
    pytest.importorskip("triton")
    assert " passed" in passed_in_a_process_of_their_own(__file__)


class Split(nn.Module):
    """A stage that hands on two tensors of different kinds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, inputs):
        return self.linear(inputs).tanh(), inputs[:, :3] > 0


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, features, signs):
        return self.linear(features).tanh() + signs.float().sum(1, keepdim=True), signs


class Last(nn.Module):
    def forward(self, features, signs):
        return features[:, :5].contiguous(), signs


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return MultiExitModel([Split(), Joined(), Last()], [nn.Linear(8, 4), nn.Linear(6, 4), nn.Linear(5, 4)]).eval()


@pytest.fixture(scope="module")
def inputs():
    return torch.randn(61, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def table(model, inputs):
    labels = np.random.default_rng(2).integers(4, size=61)
    return record(model, (inputs, labels), progress=False)


def rules(table):
    middle = tuple(np.median(table.scores, axis=0)[:2].tolist())
    threshold = Threshold(middle, costs=COSTS)
    cut = float(np.sort(table.scores[:, 0])[30])
    terms = {"costs": COSTS, "salt": 7 << 32 | 11}
    return {
        "threshold": threshold,
        "ties": Threshold((cut, cut), tie_shares=(0.0, 0.5), **terms),
        "nobody leaves": Threshold((np.inf, np.inf), costs=COSTS),
        "everybody leaves": Threshold((-np.inf, -np.inf), costs=COSTS),
        "lottery": Lottery(exit_rates=(0.3, 0.3, 0.4), **terms),
        "one exit": ExitAt(costs=(3.0,), open_exits=(2,)),
        "patience": Patience(patience=1, costs=COSTS),
        "streak": Streak(threshold=middle[0], patience=2, costs=COSTS),
        "mixture": Mixture(
            first=replace(threshold, salt=5), second=Patience(patience=1, costs=COSTS), share=0.4, **terms
        ),
        "vote": calibrate.combined(calibrate.eero, "vote")(COSTS, "60%", table),
        "geometric mean": calibrate.combined(calibrate.eero, "geometric_mean")(COSTS, "60%", table),
        "gain": replace(threshold, combination=GAIN, thresholds=(-0.1, -0.2)),
    }


GAIN = Gain(
    exits=(0, 1, 2),
    columns=("margin",),
    knots=(((0.2,),), ((0.3,),), ((),)),
    weights=((0.3, -0.4, 0.1), (0.2, -0.3, 0.1, 0.05, 0.02, 0.03, 0.04, 0.1, -0.1, 0.05, -0.02), (0.0,) * 9),
    class_gains=((0.01, -0.02, 0.03), (0.0, 0.05), ()),
)


def decided(model, rule, inputs, *, size, parts, window=3, probability=False):
    """Samples, predictions, open exits and probabilities of a walk that takes the inputs in these parts."""
    reads = _reads(rule, probability)
    stages = [stage.forward for stage in open_stages(model, rule.open_exits, reads)]
    with torch.inference_mode():
        walk = DeviceWalk(stages, reads, rule, lambda given: given, (inputs[:3],), size, EXECUTOR, window=window)
        found, start = [], 0
        for part in parts:
            walk.push(np.arange(start, start + part), (inputs[start : start + part],))
            found += walk.fetched(pending=1)
            start += part
        walk.end()
        found += walk.fetched()
    joined = Answers(*(None if each[0] is None else np.concatenate(each) for each in zip(*found, strict=True)))
    order = np.argsort(joined.samples)
    assert joined.samples[order].tolist() == [*range(start)]  # each once
    return walk, Answers(*(None if each is None else each[order] for each in joined))


NAMES = "threshold, ties, nobody leaves, everybody leaves, lottery, one exit, patience, streak, mixture, vote"


@interpreted
@pytest.mark.parametrize("name", [*NAMES.split(", "), "geometric mean", "gain"])
@pytest.mark.parametrize(("size", "parts"), [(1, [1] * 9), (8, [20, 1, 40]), (20, [5, 7]), (7, [61])])
def test_a_walk_decides_as_a_replay_does(model, inputs, table, name, size, parts):
    rule = rules(table)[name]
    _, answers = decided(model, rule, inputs, size=size, parts=parts)
    expected = replay(rule, table.take(np.arange(sum(parts))))
    np.testing.assert_array_equal(np.asarray(rule.open_exits)[answers.open_indices], expected.exits)
    np.testing.assert_array_equal(answers.predictions, expected.predictions)


@interpreted
def test_one_batch_is_answered_by_itself_and_a_walk_takes_the_numbers_of_another_policy(model, inputs, table):
    first = rules(table)["threshold"]
    walk, _ = decided(model, first, inputs, size=32, parts=[40], probability=True)
    assert [*walk.sizes] == [32, 16]
    for rule in (first, rules(table)["ties"], rules(table)["lottery"]):
        for count in (1, 9, 32):
            with torch.inference_mode():
                walk.use(rule)
                found = walk.one_batch(np.arange(count), (inputs[:count],))
            order, expected = np.argsort(found.samples), replay(rule, table.take(np.arange(count)))
            np.testing.assert_array_equal(found.open_indices[order], expected.exits)
            np.testing.assert_array_equal(found.predictions[order], expected.predictions)
            assert ((found.probabilities > 0.25) & (found.probabilities <= 1)).all()


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_samples_with_unusable_logits_are_named_and_the_others_answered(model, inputs, table):
    broken = inputs[:40].clone()
    broken[13] = float("nan")
    rule = rules(table)["nobody leaves"]
    _, answers = decided(model, rule, broken, size=8, parts=[40])
    assert answers.open_indices[13] == -1
    answered = usable(rule, [answers])
    assert len(next(answered).samples) == 39
    with pytest.raises(BadInput, match="unusable logits for 1 samples, the first is sample 13, at exit 0"):
        next(answered)


@interpreted
def test_a_walk_that_was_left_starts_empty_again(model, inputs, table):
    rule = rules(table)["nobody leaves"]
    walk, _ = decided(model, rule, inputs, size=8, parts=[8])
    with torch.inference_mode():
        walk.push(np.arange(30), (inputs[:30],))
        walk.reset()
        walk.push(np.arange(5), (inputs[:5],))
        walk.end()
        (answers,) = walk.fetched()
    assert sorted(answers.samples.tolist()) == [*range(5)]


def test_numbers_are_rounded_to_half_precision_once():
    numbers = np.random.default_rng(0).normal(size=4000) * 10
    ties = np.repeat(1 + 2.0**-11 * np.arange(1, 400, 2), 3) + np.tile([-1e-10, 0.0, 1e-10], 200)
    both = np.concatenate([numbers, ties, -ties, [0.0, -np.inf, -1e9, -1e-9]])
    np.testing.assert_array_equal(half(torch.from_numpy(both)).numpy(), numpy_half(both))


def test_the_host_decides_where_no_gpu_is(model, table):
    from alight import Predictor, RunSettings

    rule = rules(table)["threshold"]
    assert Predictor(model, rule).decided_by == "the host decides"
    with pytest.raises(BadInput, match="a GPU can decide and the network runs on cpu: leave decide out"):
        Predictor(model, rule, settings=RunSettings(decide="device"))
    with pytest.raises(BadInput, match="decide 'gpu': choose auto, device or host"):
        RunSettings(decide="gpu")
