"""Stages become plain data and come back; data that names anything but tensor functions is refused."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional

from alight.cutting.cut import cut
from alight.cutting.stages import NotPlainData, cut_data, stages_from_data
from alight.errors import BadInput


class Base(nn.Module):
    """Two blocks and a classifier; what differs is `forward`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.fc = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.bias = nn.Parameter(torch.randn(4))
        self.register_buffer("scale", torch.randn(4))
        self.table = torch.randn(4)  # a constant without a name

    def forward(self, x):
        return self.fc(self.second(self.first(x)))


class Constants(Base):
    def forward(self, x):
        x = self.first(x) + self.table
        return self.fc(self.second(x) * self.table[:1] + self.bias * self.scale)


class Arguments(Base):
    """Slices, dots, dtypes, infinities, tuples, keywords, the batch size and the device."""

    def forward(self, x):
        steps = torch.arange(4, dtype=torch.float32, device=x.device)
        x = self.first(x)[..., :4].to(x.dtype).clamp(min=float("-inf"), max=float("inf"))
        rows = torch.zeros((len(x), 4), dtype=x.dtype, device=x.device).masked_fill(steps > 9, float("inf"))
        x = torch.cat([x, rows], dim=-1).unflatten(-1, (2, 4)).sum(dim=(1,)) + 1 - 2 * x
        return self.fc(self.second(x.T.T.contiguous(memory_format=torch.contiguous_format))[:, None, :][:, 0])


class InPlace(Base):
    def forward(self, x):
        x = self.first(x).clone()
        x += self.bias
        x[:, :2] = x[:, :2].mul_(2)
        return self.fc(functional.relu_(self.second(x)))


class OtherInTraining(Base):
    def forward(self, x):
        return self.fc(functional.dropout(self.second(self.first(x)), 0.5, self.training))


KINDS = [Base, Constants, Arguments, InPlace, OtherInTraining]


def rows(count):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(count))


def chained(stages, batch):
    carried = (batch,)
    for stage in stages:
        carried = stage(*carried)
    return carried


def rebuilt(network, stages):
    data, constants = cut_data(stages)
    return nn.ModuleList(stages_from_data(network, json.loads(json.dumps(data)), constants))


@pytest.mark.parametrize("kind", KINDS)
def test_stages_come_back_from_data_in_both_modes(kind):
    network = kind()
    stages = nn.ModuleList(cut(network, ["first", "second"], rows(1)))
    again = rebuilt(network, stages)
    for mode in (True, False):
        results = []
        for each in (stages.train(mode), again.train(mode)):
            torch.manual_seed(0)
            logits = chained(each, rows(5))
            results.append([logits, *torch.autograd.grad(logits.square().sum(), network.fc.parameters())])
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert [stage._source for stage in again] == [stage._source for stage in stages]
    assert torch.equal(chained(again, rows(5)), network.eval()(rows(5)))


class ReadsContentInTraining(Base):
    def forward(self, x):
        x = self.first(x)
        if self.training and x.sum() > 0:
            x = -x
        return self.fc(self.second(x))


def test_why_a_stage_cannot_be_trained_comes_back():
    network = ReadsContentInTraining()
    stages = rebuilt(network, cut(network, ["first"], rows(1)))
    with pytest.raises(BadInput, match=r"cannot run in training mode .*x\.sum\(\) > 0"):
        chained(stages.train(), rows(2))
    assert torch.equal(chained(stages.eval(), rows(2)), network.eval()(rows(2)))


class Wrapper:
    def __init__(self, factor):
        self.factor = factor


class Scaled(nn.Module):
    def forward(self, x, wrapper):
        return x * wrapper.factor


class ObjectArgument(Base):
    def __init__(self):
        super().__init__()
        self.scaled, self.wrapper = Scaled(), Wrapper(2.0)

    def forward(self, x):
        return self.fc(self.scaled(self.second(self.first(x)), self.wrapper))


def test_objects_that_are_not_data_are_named():
    network = ObjectArgument().eval()
    stages = cut(network, ["first"], rows(1))
    assert torch.equal(chained(stages, rows(5)), network(rows(5)))
    with pytest.raises(NotPlainData, match="called with a Wrapper"):
        cut_data(stages)
    with pytest.raises(NotPlainData, match="registered cutter"):
        cut_data([nn.Linear(4, 4), *stages[1:]])


TAMPERED = {
    "a function of the system": ["call_function", "os.system", ["true"], {}],
    "a module inside torch": ["call_function", "torch.os.system", ["true"], {}],
    "a function of torch that reads files": ["call_function", "torch.load", ["weights.pt"], {}],
    "a function of torch that maps files": ["call_function", "torch.from_file", ["weights.pt"], {}],
    "a built-in function": ["call_function", "eval", ["1"], {}],
    "an operator that calls": ["call_function", "operator.call", [{"node": 0}], {}],
    "an attribute that leads out": ["call_function", "getattr", [{"node": 0}, "__class__"], {}],
    "an attribute that is computed": ["call_function", "getattr", [{"node": 0}, {"tuple": ["shape"]}], {}],
    "a method that pickles": ["call_method", "__reduce_ex__", [{"node": 0}, 2], {}],
    "a method that gives memory": ["call_method", "untyped_storage", [{"node": 0}], {}],
    "code as a module": ["call_module", 'first"); import os; ("', [{"node": 0}], {}],
    "code as a parameter": ["get_attr", "fc.weight + print(1)", [], {}],
    "code as a constant": ["get_attr", "_constants.x + print(1)", [], {}],
    "code as an input": ["placeholder", "x=print(1)", [], {}],
    "code as a keyword": ["call_method", "clamp", [{"node": 0}], {"min=print(1), max": 1}],
    "an unknown operation": ["exec", "print(1)", [], {}],
    "an unknown kind of argument": ["call_method", "clamp", [{"node": 0}, {"code": "print(1)"}], {}],
    "an unknown dtype": ["call_method", "to", [{"node": 0}, {"torch": "torch.load"}], {}],
    "a node that is not there yet": ["call_method", "relu", [{"node": 99}], {}],
}


@pytest.mark.parametrize("node", TAMPERED.values(), ids=TAMPERED)
def test_a_graph_that_names_anything_but_tensor_functions_is_refused(node, capsys):
    network = Base()
    data, constants = cut_data(cut(network, ["first"], rows(1)))
    data["stages"][0]["evaluation"].insert(1, node)
    with pytest.raises((BadInput, KeyError, IndexError, AttributeError, TypeError)):
        stages_from_data(network, data, constants)
    assert not capsys.readouterr().out
