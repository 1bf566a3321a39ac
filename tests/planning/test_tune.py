"""Switches are tried on the clock, taken where they clearly pay, and never where they change answers unasked."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from alight import HeadOutputs, plan, tune_speed
from alight.engine.predictor import Predictor
from alight.engine.recorder import record
from alight.engine.settings import RunSettings
from alight.errors import BadInput
from alight.networks.attach import attach_heads
from alight.networks.multi_exit import MultiExitModel
from alight.planning import tune
from alight.policies.policy import Threshold

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ONE = RunSettings(threads=1)
pytestmark = pytest.mark.usefixtures("short_trials")
TERMS = {"example": IMAGES, "batch_size": 16}


class Work(nn.Module):
    """A convolution that takes its time, unless what it is given is as it likes it."""

    def __init__(self, channels, likes):
        super().__init__()
        self.convolution = nn.Conv2d(channels, 6, 3, padding=1)
        self.likes = likes

    def forward(self, images):
        for _ in range(2 if self.likes(images) else 20):
            made = self.convolution(images)
        return made


def network(likes):
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    return MultiExitModel([Work(3, likes), Work(6, likes)], [head, head]).eval()


def channels_last(images):
    return images.is_contiguous(memory_format=torch.channels_last)


def contiguous(images):
    return images.is_contiguous()


def half(images):
    return images.dtype is torch.bfloat16


def many(images):
    return len(images) > 15


def tried(tuned):
    return [dict(each.switches) for each in tuned.trials]


def test_a_switch_that_pays_is_taken():
    model = network(channels_last)
    tuned = tune_speed(model, settings=ONE, **TERMS)
    assert tuned.settings == replace(ONE, channels_last=True)
    assert tuned.speedup > 1.5
    assert "channels_last=True pays" in str(tuned)
    policy = Threshold((0.5,), costs=(1.0, 2.0))
    assert len(Predictor(model, policy, settings=tuned.settings)(IMAGES)) == 4
    assert len(record(model, [IMAGES], progress=False, settings=tuned.settings)) == 4


def test_a_switch_that_does_not_pay_is_left():
    tuned = tune_speed(network(contiguous), settings=ONE, **TERMS)
    assert tried(tuned) == [{}, {"channels_last": True}]
    assert tuned.settings == ONE
    assert tuned.speedup == 1
    assert "No switch clearly pays here" in str(tuned)


def test_what_wins_alone_must_win_in_the_end_too(monkeypatch):
    runs = iter([np.array([[2.0, 1.0]] * 5), np.array([[2.0, 1.99]] * 5)])
    monkeypatch.setattr(tune, "interleaved_timings", lambda *_: next(runs))
    tuned = tune_speed(network(channels_last), settings=ONE, **TERMS)
    assert tuned.settings == ONE
    assert "channels_last=True does not clearly pay: left out" in tuned.reason


def test_a_dtype_is_tried_only_if_named_and_said_to_change_answers():
    model = network(half)
    assert not any("dtype" in each for each in tried(tune_speed(model, settings=ONE, **TERMS)))
    tuned = tune_speed(model, dtypes=["bf16", "fp32"], settings=ONE, **TERMS)
    assert tuned.settings.dtype == "bfloat16"
    assert "other answers" in str(tuned)
    assert {"dtype": "float32"} not in tried(tuned)  # the network's own
    policy = Threshold((0.5,), costs=(1.0, 2.0), fingerprint="0123456789abcdef")
    with pytest.raises(BadInput, match="tune without a policy"):
        tune_speed(model, policy, dtypes=["bf16"], settings=ONE, **TERMS)


def test_what_is_given_is_kept_and_not_tried():
    given = RunSettings(device="cpu", channels_last=True, threads=1)
    tuned = tune_speed(network(contiguous), settings=given, **TERMS)
    assert tried(tuned) == [{}]
    assert tuned.settings == given


def test_under_a_policy_rebatching_is_tried_and_as_many_leave_as_planned():
    policy = Threshold((2.0,), costs=(1.0, 2.0), exit_rates=(0.9, 0.1))  # by its threshold nobody would leave
    tuned = tune_speed(network(many), policy, switches=["rebatch"], settings=ONE, **TERMS)
    assert tried(tuned) == [{}, {"rebatch": False}]
    assert tuned.rebatch  # the few survivors of each batch are faster together
    assert tuned.trials[1].speedup < 0.8


def test_threads_are_tried_on_the_host(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(tune, "available_cores", lambda: 6)
        patched.setattr(torch, "get_num_threads", lambda: 4)
        assert tune._thread_counts() == [1, 2, 6]
    now = torch.get_num_threads()
    monkeypatch.setattr(tune, "_thread_counts", lambda: [1])
    tuned = tune_speed(network(contiguous), batch_size=4, example=IMAGES, switches=["threads"])
    assert tried(tuned)[1:] == [{"threads": 1}]
    assert torch.get_num_threads() == now


def refuses(images):
    if channels_last(images):
        raise RuntimeError("no such kernel\nhere")
    return True


def test_a_setting_that_does_not_run_is_reported():
    tuned = tune_speed(network(refuses), settings=ONE, **TERMS)
    assert tuned.settings == ONE
    assert "does not run: no such kernel" in str(tuned)


def undecided(images):
    return bool(images.sum() > 0)  # which no compiler can know


def test_compiling_is_tried_only_if_asked_for():
    model = network(undecided)
    assert not any("compile" in each for each in tried(tune_speed(model, settings=ONE, **TERMS)))
    tuned = tune_speed(model, settings=replace(ONE, compile=True), switches=["compile"], **TERMS)
    assert tried(tuned) == [{}, {"compile": True}]
    assert "does not run: compiling stage 0 gave up" in str(tuned)


def test_a_network_that_describes_its_inputs_needs_no_example():
    plain = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 5))
    model = attach_heads(plain, after=["1"], example=IMAGES[:1])
    assert tune_speed(model, batch_size=4, settings=ONE).batch_size == 4
    with pytest.raises(BadInput, match="does not say what it takes"):
        tune_speed(network(half), batch_size=4)


def test_a_plan_takes_the_switches_that_pay():
    model, rng = network(channels_last), np.random.default_rng(0)
    labels = rng.integers(5, size=900)
    table = HeadOutputs(rng.uniform(size=(900, 2)), np.stack([labels, labels], axis=1), labels)
    found = plan(model, table, example=IMAGES, batch_size=16, speed="auto", settings=ONE)
    assert found.settings.channels_last
    assert "channels_last=True pays" in str(found)
    assert found.pays
    assert len(found.predictor()(IMAGES)) == 4
    with pytest.raises(BadInput, match="give 'auto'"):
        plan(model, table, example=IMAGES, batch_size=16, speed="most")
