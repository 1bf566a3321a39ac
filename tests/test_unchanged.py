"""A network is never changed in place, unless that was asked for: weights, modes, gradients, hooks and code stay."""

import copy

import pytest
import torch
from torch import nn

from alight import Predictor, RunSettings, Threshold, attach_heads, measure_costs, plan, record, save_model
from alight.planning import plan as planning
from alight.planning import timing

IMAGES, LABELS = torch.rand(64, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3


class Net(nn.Module):
    """Modes, gradients and a hook that are not as they come."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
        self.out = nn.Linear(4, 3)
        self.calls = 0

    def forward(self, images):
        return self.out(self.second(self.first(images)).mean((2, 3)))


def look(module):
    """What can be seen of a module and of all that is in it."""
    state = {name: each.detach().clone() for name, each in module.state_dict().items()}
    gradients = {name: (each.requires_grad, id(each), each.dtype) for name, each in module.named_parameters()}
    insides = {
        name: (each.training, type(each), len(each._forward_hooks), len(each._forward_pre_hooks), each.forward.__func__)
        for name, each in module.named_modules()
    }
    return state, gradients, insides


def check_same(before, after):
    assert before[1:] == after[1:]
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(each, after[0][name]) for name, each in before[0].items())


@pytest.fixture
def network():
    torch.manual_seed(0)
    made = Net().train()
    made.second.eval()
    made.first[0].weight.requires_grad_(False)
    made.out.register_forward_hook(lambda *_: None)
    return made


def test_attaching_and_saving_leave_the_network_alone(network, tmp_path):
    before = look(network)
    model = attach_heads(network, ["first"], example=IMAGES[:2])
    check_same(before, look(network))
    save_model(model, tmp_path)
    check_same(before, look(network))


@pytest.mark.parametrize(
    "settings", [RunSettings(), RunSettings(dtype="bf16", channels_last=True), RunSettings(threads=1)], ids=str
)
def test_recording_predicting_measuring_and_planning_leave_the_model_alone(network, settings, monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0.01)
    monkeypatch.setattr(planning, "ROUNDS", 2)
    model = attach_heads(network, ["first"], example=IMAGES[:2])
    model.heads[0].train()
    seen, whole = look(model), look(network)
    policy = Threshold((0.5,), costs=(1.0, 2.0))
    table = record(model, (IMAGES, LABELS), settings=settings, progress=False)
    check_same(seen, look(model))
    Predictor(model, policy, settings=settings).run((IMAGES, LABELS), progress=False)
    check_same(seen, look(model))
    measure_costs(model, unit="ms", repeats=2, progress=False)
    measure_costs(model)
    check_same(seen, look(model))
    plan(model, table, batch_size=16, settings=settings, progress=False)
    check_same(seen, look(model))
    check_same(whole, look(network))


def test_a_changed_network_is_seen(network):
    before = look(network)
    for change in (lambda net: net.out.weight.data.add_(1), lambda net: net.second.train(), lambda net: net.half()):
        changed = copy.deepcopy(network)
        own = look(changed)
        change(changed)
        with pytest.raises(AssertionError):
            check_same(own, look(changed))
    check_same(before, look(network))
