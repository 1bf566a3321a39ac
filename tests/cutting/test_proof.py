"""What a cut refuses: networks that mix samples, share memory, or read numbers from their weights."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from alight.cutting.cut import CUTTERS, chain, cut, register_cutter
from alight.cutting.placement import suggest_exits
from alight.errors import BadInput


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.third(self.second(self.first(x).relu()).relu())


class BatchStatistics(Network):
    def forward(self, x):
        x = self.second(self.first(x))
        return self.third((x - x.mean(0)) / x.std(0))


class UntrackedNorm(Network):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6, track_running_stats=False)

    def forward(self, x):
        return self.third(self.norm(self.second(self.first(x))))


class SortedBatch(Network):
    def forward(self, x):
        x = self.second(self.first(x))
        return self.third(x + 0.5 * x.sort(0).values)


class SharedMemory(Network):
    """A view is taken before the cut, and the tensor is written to after it."""

    def forward(self, x):
        x = self.first(x)
        view = x.view(-1, 2, 3)
        y = self.second(x.clone())
        x += 1
        return self.third(y + view.flatten(1))


class NumberOfABuffer(Network):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.third(self.second(self.first(x)) * self.scale.item())


class NumberOfAParameter(Network):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.third(self.second(self.first(x))) / float(self.temperature)


class BranchOnAParameter(NumberOfAParameter):
    def forward(self, x):
        x = self.second(self.first(x))
        return self.third(x.relu() if self.temperature > 1 else x)


@pytest.mark.parametrize(
    ("kind", "where"),
    [(BatchStatistics, r"'third' \(Linear\)"), (UntrackedNorm, r"'norm' \(BatchNorm1d\)"), (SortedBatch, "'third'")],
)
def test_samples_that_mix_are_refused(kind, where):
    torch.manual_seed(0)
    with pytest.raises(BadInput, match=f"depend on the other samples of its batch, as first seen in what {where}"):
        cut(kind().eval(), ["first"], torch.randn(4, 6))


def test_carried_tensors_that_share_memory_are_refused():
    with pytest.raises(BadInput, match="share memory that the network writes to later"):
        cut(SharedMemory().eval(), ["second"], torch.randn(4, 6))


@pytest.mark.parametrize("kind", [NumberOfABuffer, NumberOfAParameter, BranchOnAParameter])
def test_numbers_read_from_weights_are_refused_with_the_line(kind):
    with pytest.raises(BadInput, match=r"asks for the content of its weights .* at .*test_proof\.py"):
        cut(kind().eval(), ["first"], torch.randn(4, 6))


def test_weights_that_are_read_by_a_closed_module_stay_live():
    network = nn.Sequential(nn.Linear(6, 6), NumberOfABuffer(), nn.Linear(3, 3)).eval()
    stages = cut(network, ["1"], torch.randn(4, 6))
    batch = torch.randn(5, 6)
    with torch.no_grad():
        network[1].scale.mul_(3)
        assert torch.equal(chain(stages, (batch,)), network(batch))


class FrozenStem(Network):
    def forward(self, x):
        with torch.no_grad():
            x = self.first(x) * 2
        return self.third(self.second(x))


class RunningAverage(Network):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x):
        x = self.first(x)
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return self.third(self.second(x) + self.average)


class RandomDepth(Network):
    def forward(self, x):
        x = self.first(x)
        if not self.training or random.random() < 0.5:
            x = self.second(x) + x
        return self.third(x * 1)


class Dropped(Network):
    def forward(self, x):
        x = functional.dropout(self.first(x), 0.5, self.training)
        return self.third(functional.dropout(self.second(x), 0.5, self.training))


@pytest.mark.parametrize(
    ("kind", "difference"), [(RunningAverage, "average"), (RandomDepth, "output 0|other functions")]
)
def test_a_network_that_would_train_differently_refuses_to_be_trained_in_stages(kind, difference):
    network = kind()
    stages = cut(network, ["first"], torch.randn(4, 6))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(BadInput, match=f"cannot run in training mode.*({difference})"):
        chain([stage.train() for stage in stages], (torch.randn(5, 6),))
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())
    chain([stage.eval() for stage in stages], (torch.randn(5, 6),))


class Doubled(torch.autograd.Function):
    """Its gradient is not that of what it computes."""

    @staticmethod
    def forward(context, x):
        return x * 1

    @staticmethod
    def backward(context, gradient):
        return gradient * 2


class OwnGradient(Network):
    def forward(self, x):
        return self.third(Doubled.apply(self.second(self.first(x))))


@pytest.mark.parametrize("kind", [Dropped, FrozenStem, OwnGradient])
def test_a_network_is_trained_in_stages_as_its_own_code_trains(kind):
    network, batch = kind(), torch.randn(5, 6)
    stages = [stage.train() for stage in cut(network, ["first" if kind is not OwnGradient else "second"], batch)]
    gradients = []
    for run in (network.train(), lambda batch: chain(stages, (batch,))):
        torch.manual_seed(0)
        network.zero_grad()
        run(batch).square().sum().backward()
        gradients.append([parameter.grad for parameter in network.parameters()])
    for own, ours in zip(*gradients, strict=True):
        assert (own is None and ours is None) or torch.equal(own, ours)


class ChangesItself(Network):
    """It keeps the smallest size that it has seen, as windows of attention do."""

    def __init__(self):
        super().__init__()
        self.window = 6

    def forward(self, x):
        self.window = min(self.window, x.shape[1])
        return self.third(self.second(self.first(x)).cumsum(1)[:, -6:]).mean(1) * self.window


class Random(Network):
    def forward(self, x):
        return self.third(functional.dropout(self.second(self.first(x)), 0.5, training=True))


def test_proving_leaves_no_trace_in_the_network():
    network = ChangesItself().eval()
    cut(network, ["first"], torch.randn(4, 6, 6))
    assert network.window == 6


def test_a_network_that_is_random_in_evaluation_is_not_said_to_mix_samples():
    with pytest.raises(BadInput, match="other logits for the same batch in evaluation mode"):
        suggest_exits(Random().eval(), torch.randn(4, 6), count=1)


def test_stages_of_a_registered_cutter_refuse_training_too():
    class Own(Network):
        pass

    @register_cutter(Own)
    def cut_own(model, after, example):
        class Rest(nn.Module):
            def __init__(self):
                super().__init__()
                self.second, self.third = model.second, model.third

            def forward(self, x):
                return self.third(self.second(x.detach() if self.training else x).relu())

        return [nn.Sequential(model.first, nn.ReLU(), Tuple()), Rest()]

    try:
        stages = cut(Own(), ["first"], torch.randn(4, 6))
    finally:
        CUTTERS.pop()
    with pytest.raises(BadInput, match="cannot run in training mode"):
        chain([stage.train() for stage in stages], (torch.randn(5, 6),))


class Tuple(nn.Module):
    def forward(self, x):
        return (x,)
