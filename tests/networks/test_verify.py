"""`verify` finds what attaching refuses, also where the guard that refuses it is taken out."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from alight.cutting import cut as cutting
from alight.cutting import proof, stages, tracing
from alight.errors import BadInput
from alight.networks import attach
from alight.networks.attach import attach_heads, cascade, from_outputs
from alight.networks.store import load_model, save_model

IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Network(nn.Module):
    """Two convolutions and a classifier; subclasses change what lies between."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.norm, self.classifier = nn.BatchNorm2d(6), nn.Linear(6, 4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.classifier(self.rest(self.first(x).relu()))

    def rest(self, x):
        return self.norm(self.second(x)).mean((2, 3))


class ReadsABuffer(Network):
    def rest(self, x):
        return super().rest(x) * self.scale.item()


class PoolsBySize(Network):
    def rest(self, x):
        return functional.avg_pool2d(self.second(x), x.size()[3]).flatten(1)


class MixesSamples(Network):
    def rest(self, x):
        x = super().rest(x)
        return x - x.mean(0)


class WritesInPlace(Network):
    def rest(self, x):
        x = self.second(x)
        view = x.flatten(2)
        y = self.norm(x.clone())
        x += 1
        return (y.flatten(2) + view).mean(2)


class FreezesTheStem(Network):
    def forward(self, x):
        with torch.no_grad():
            x = self.first(x)
        return self.classifier(self.rest(x))


class DropsAtRandom(Network):
    def rest(self, x):
        return super().rest(x) if self.training and random.random() < 0.5 else super().rest(x) * 2


def unproven(monkeypatch):
    monkeypatch.setattr(cutting, "prove", lambda network, stages, inputs, heads=(): stages)


MUTATIONS = {  # the guard that is taken out, for the network that it guards
    ReadsABuffer: lambda patch: patch.setattr(tracing, "CONTENT_READS", set()),
    PoolsBySize: lambda patch: (
        patch.setattr(tracing, "traced_number", lambda number, *_: number),
        patch.setattr(proof, "_fix_other_sizes", lambda *_: None),
    ),
    MixesSamples: unproven,
    WritesInPlace: unproven,
    FreezesTheStem: lambda patch: (
        unproven(patch),
        patch.setattr(stages._GraphBuilder, "_detached", lambda self, value, node: node),
    ),
    DropsAtRandom: lambda patch: (unproven(patch), patch.setattr(random, "random", lambda: 0.9)),
}


@pytest.mark.parametrize("kind", MUTATIONS)
def test_verify_finds_what_is_wrong_where_the_guard_is_taken_out(kind, monkeypatch):
    MUTATIONS[kind](monkeypatch)
    after = ["norm"] if kind is WritesInPlace else ["first"]
    model = attach_heads(kind(), after, example=IMAGES)
    monkeypatch.undo()
    with pytest.raises(BadInput):
        model.verify()


def test_verify_finds_a_head_that_writes_into_what_it_reads(monkeypatch):
    monkeypatch.setattr(attach, "checked_read", lambda head, carried, name: head(carried[0]))
    model = attach_heads(Network(), ["first"], example=IMAGES)
    model.heads[0] = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(6 * 144, 4))
    with pytest.raises(BadInput, match="in place"):
        model.verify()


def test_verify_finds_weights_that_were_exchanged_in_the_network_alone():
    model = attach_heads(Network(), ["first"], example=IMAGES)
    model.network.classifier = nn.Linear(6, 4)
    with pytest.raises(BadInput, match="do not give what the network gives"):
        model.verify()


def test_verify_changes_nothing_and_says_whether_the_network_can_be_trained(tmp_path):
    model = attach_heads(Network(), ["first"], example=IMAGES).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = torch.randn(1, 3, 20, 16)
    state = random.getstate(), torch.get_rng_state()
    assert model.verify() == ""
    assert model.verify(other) == ""
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert (random.getstate(), torch.get_rng_state().tolist()) == (state[0], state[1].tolist())
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    again = load_model(save_model(model, tmp_path), backbone=Network())
    assert again.verify() == ""
    assert again.sizes == "(3, any size 1, any size 2)"
    refusing = attach_heads(DropsAtRandom(), ["first"], example=IMAGES)
    assert "cannot run in training mode" in refusing.verify()


def test_a_model_without_a_network_has_nothing_to_be_compared_with():
    with pytest.raises(BadInput, match="was not cut from a network"):
        cascade([nn.Linear(4, 3), nn.Linear(4, 3)], example=torch.zeros(2, 4)).verify()


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.early, self.late = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        return [self.early(x), self.late(self.second(x))]


def test_a_network_with_several_outputs_is_verified():
    assert from_outputs(TwoOutputs(), torch.randn(2, 4)).verify() == ""


def test_a_network_in_another_dtype_is_verified_in_it():
    assert attach_heads(Network(), ["first"], example=IMAGES).to(torch.bfloat16).verify() == ""


class Negated(nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, *carried):
        return -self.stage(*carried)


def test_verify_finds_a_loaded_stage_that_is_not_the_networks(tmp_path):
    model = load_model(save_model(attach_heads(Network(), ["first"], example=IMAGES), tmp_path), backbone=Network())
    model.stages[1] = Negated(model.stages[1])
    with pytest.raises(BadInput, match="do not give what the network gives"):
        model.verify()
