"""`verify` finds what cutting refuses, also where the guard that refuses it is taken out."""

import random
import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from two_convolutions import IMAGES, DropsAtRandom, Network

from alight.cli import main
from alight.cutting import calls, proof, stages, tracing
from alight.cutting import cut as cutting
from alight.errors import BadInput
from alight.networks.attach import attach_heads
from alight.networks.store import save_model


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


class KeepsAnAverage(Network):
    def rest(self, x):
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * x.detach().mean()
        return super().rest(x)


class MixesMany(Network):
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0) if len(x) > 5 else x

    def __init__(self):
        super().__init__()
        self.norm = nn.Sequential(self.Centred(), nn.BatchNorm2d(6))


class DividesByTheLargest(Network):
    """Divides by the largest number of the batch, and multiplies by it behind the exit."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1, bias=False)

    def forward(self, x):
        largest = x.abs().amax()
        return self.classifier(self.rest((self.first(x / largest) * largest).relu()))


def unproven(monkeypatch):
    monkeypatch.setattr(cutting, "prove", lambda network, stages, inputs, heads=(): stages)


MUTATIONS = {  # the guard that is taken out, for the network that it guards, and what is found
    ReadsABuffer: (
        lambda patch: (unproven(patch), patch.setattr(calls, "CONTENT_READS", set())),
        "with other weights the stages do not give",
    ),
    PoolsBySize: (
        lambda patch: (
            patch.setattr(calls, "traced_number", lambda number, *_: number),
            patch.setattr(proof, "_fix_other_sizes", lambda *_: None),
        ),
        "the network fails on the example",
    ),
    MixesSamples: (unproven, "depend on the other samples of its batch"),
    MixesMany: (
        lambda patch: (
            patch.setattr(tracing, "_check_closed_modules", lambda *_: None),
            patch.setattr(proof, "check_many_samples", lambda *_: None),
        ),
        "depend on the other samples of its batch, which a function joins at .*test_guards.py",
    ),
    DividesByTheLargest: (
        unproven,
        "depend on the other samples of its batch, which a function joins at .*largest = x.abs",
    ),
    WritesInPlace: (unproven, "once some samples have left"),
    FreezesTheStem: (
        lambda patch: (
            unproven(patch),
            patch.setattr(stages._GraphBuilder, "_detached", lambda self, value, node: node),
        ),
        "the gradient of 'first.weight' is there, and the network has none",
    ),
    KeepsAnAverage: (unproven, "buffer 'scale' differs"),
    DropsAtRandom: (
        lambda patch: (unproven(patch), patch.setattr(random, "random", lambda: 0.9)),
        "one step of training differs",
    ),
}


@pytest.mark.parametrize("kind", MUTATIONS)
def test_verify_finds_what_is_wrong_where_the_guard_is_taken_out(kind, monkeypatch):
    take_out, found = MUTATIONS[kind]
    take_out(monkeypatch)
    after = ["norm"] if kind is WritesInPlace else ["first"]
    model = attach_heads(kind(), after, example=IMAGES)
    monkeypatch.undo()
    with pytest.raises(BadInput, match=found):
        model.verify()


@pytest.mark.parametrize("kind", MUTATIONS)
def test_the_command_finds_what_is_wrong_in_a_folder_that_was_saved_so(kind, monkeypatch, tmp_path, capsys):
    take_out, found = MUTATIONS[kind]
    take_out(monkeypatch)
    after = ["norm"] if kind is WritesInPlace else ["first"]
    folder = save_model(attach_heads(kind(), after, example=IMAGES), tmp_path / "saved")
    monkeypatch.undo()
    assert main(["check", str(folder), "--network", f"{__file__}:{kind.__name__}"]) == 1
    assert re.search(
        f"{found}|does not give what the network gives|do not give what the network", capsys.readouterr().err
    )
