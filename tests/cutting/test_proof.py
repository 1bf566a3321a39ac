"""What a cut refuses: networks that mix samples, share memory, or read numbers from their weights."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from alight import attach_heads, load_model, save_model
from alight.cutting.cut import CUTTERS, cut, register_cutter
from alight.cutting.placement import suggest_exits
from alight.cutting.running import chain
from alight.errors import BadInput, Mismatch


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
    [
        (BatchStatistics, r"which a function joins at .*test_proof\.py:.*x - x\.mean\(0\)"),
        (UntrackedNorm, r"as first seen in what 'norm' \(BatchNorm1d\)"),
        (SortedBatch, "as first seen in what 'third'"),
    ],
)
def test_samples_that_mix_are_refused(kind, where):
    torch.manual_seed(0)
    with pytest.raises(BadInput, match=f"depend on the other samples of its batch, {where}"):
        cut(kind().eval(), ["first"], torch.randn(4, 6))


def test_carried_tensors_that_share_memory_are_refused():
    with pytest.raises(BadInput, match="shares memory that the network writes to later"):
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
    ("kind", "difference"),
    [(RunningAverage, "average"), (RandomDepth, "output 0|other functions|random numbers of Python")],
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


class AverageOfOneLength(RunningAverage):
    def forward(self, x):
        return super().forward(x.sum(1) / int(x.shape[1]))


def test_training_that_differs_is_refused_where_sizes_are_fixed():
    stages = cut(AverageOfOneLength(), ["first"], torch.randn(4, 8, 6))
    with pytest.raises(BadInput, match=r"network was cut for \(8, 6\)|8 with 4|compares"):
        chain([stage.eval() for stage in stages], (torch.randn(5, 4, 6),))
    with pytest.raises(BadInput, match=r"cannot run in training mode.*average"):
        chain([stage.train() for stage in stages], (torch.randn(5, 8, 6),))


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


class Counts(Network):
    def __init__(self):
        super().__init__()
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.embedding = nn.Embedding(5, 6, max_norm=0.5)

    def forward(self, x):
        self.in_place += len(x)
        self.replaced = self.replaced + 1
        return super().forward(x + self.embedding((x[:, 0] > 0).long()))


def test_proving_puts_back_what_a_pass_in_evaluation_writes():
    network = Counts().eval()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    model = attach_heads(network, ["first"], example=torch.randn(2, 6))
    model.verify()
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


class KeepsTheLast(nn.Module):
    """An attribute that is kept from batch to batch: a number or a tensor."""

    def __init__(self, start):
        super().__init__()
        self.last = start

    def forward(self, x):
        last, self.last = self.last, self.last + 0.1
        return x * last


@pytest.mark.parametrize("start", [1.0, torch.ones(())])
def test_a_module_that_keeps_something_from_batch_to_batch_is_refused(start):
    network = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), KeepsTheLast(start), nn.Linear(6, 3))
    with pytest.raises(BadInput, match="keep nothing from batch to batch"):
        cut(network, ["1"], torch.randn(2, 6))
    assert network[2].last == start


def test_logits_with_another_first_axis_than_the_samples_are_refused():
    class Transposed(Network):
        def forward(self, x):
            return super().forward(x).t()

    with pytest.raises(BadInput, match="gives 3 rows for 4 samples"):
        cut(Transposed(), ["first"], torch.randn(2, 6))


def test_numbers_of_numpy_are_plain_numbers_in_a_stage():
    class Scaled(Network):
        def forward(self, x):
            return super().forward(x * np.float32(0.5)) / np.sqrt(2.0)

    network, batch = Scaled(), torch.randn(5, 6)
    assert torch.equal(chain(cut(network, ["first"], torch.randn(2, 6)), (batch,)), network(batch))


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


class OverMaximum(Network):
    def forward(self, x):
        x = self.second(self.first(x))
        return self.third(x / x.abs().max())


@pytest.mark.parametrize("largest", range(5))
def test_samples_that_one_of_the_batch_scales_are_found_wherever_it_is(largest):
    example = torch.randn(5, 6)
    example[largest] *= 20
    with pytest.raises(BadInput, match="the logits of a sample depend on the other samples"):
        cut(OverMaximum(), ["first"], example)


class LateAlias(nn.Module):
    """A view is taken before the fifth exit, and its memory is written to after it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.end = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks[:4]:
            x = block(x).relu()
        view = x.view(-1, 2, 3)
        y = self.blocks[4](x.clone()).relu()
        x += 1
        return self.end(self.blocks[5](y) + view.flatten(1))


def test_memory_that_is_shared_past_a_late_exit_is_found():
    with pytest.raises(BadInput, match="shares memory that the network writes to later"):
        cut(LateAlias(), [f"blocks.{index}" for index in range(5)], torch.randn(4, 6))


class Parts(Network):
    """Works in parts of the batch, to save memory."""

    size = 64

    def forward(self, x):
        x = self.second(self.first(x))
        return self.third(torch.cat([part.tanh() for part in x.split(self.size)]))


class PartsByIndex(Parts):
    def forward(self, x):
        x = self.second(self.first(x))
        made = torch.zeros_like(x)
        for start in range(0, len(x), self.size):
            made[start : start + self.size] = x[start : start + self.size].tanh()
        return self.third(made)


class OtherForMany(Network):
    def forward(self, x):
        x = self.second(self.first(x))
        return self.third(x if len(x) < 1000 else x.half().float())


@pytest.mark.parametrize("kind", [Parts, PartsByIndex, OtherForMany])
def test_code_that_treats_large_batches_otherwise_is_refused_with_the_line(kind):
    with pytest.raises(BadInput, match=r"something else for a batch of 4099 samples than for 2 \(.*test_proof.py:"):
        cut(kind(), ["first"], torch.randn(2, 6))


class OtherForManyInside(Network):
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0) if len(x) > 5 else x

    def __init__(self):
        super().__init__()
        self.third = nn.Sequential(self.Centred(), nn.Linear(6, 3))


def test_a_closed_module_that_treats_large_batches_otherwise_is_refused():
    with pytest.raises(BadInput, match="module 'third' calls other functions for a batch of 4099 samples than for 2"):
        cut(OtherForManyInside(), ["first"], torch.randn(2, 6))


class KeepsATable(Network):
    class Shifted(nn.Module):
        table = None

        def forward(self, x):
            if self.table is None or self.table.shape[-1] != x.shape[-1]:
                self.table = torch.linspace(0, 1, x.shape[-1]).to(x)
            return x + self.table

    def __init__(self):
        super().__init__()
        self.third = nn.Sequential(self.Shifted(), nn.Linear(6, 3))


def test_a_closed_module_that_keeps_a_table_of_its_first_run_is_cut():
    network, x = KeepsATable(), torch.randn(5, 6)
    stages = cut(network, ["first"], x[:2])
    assert torch.equal(chain(stages, (x,)), network(x))


class UntilTheLongest(nn.Module):
    """Behind the exit, steps are dropped that no sample of the batch has."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x, lengths):
        longest = lengths.max()
        x = self.first(x).relu()
        x = self.second(x[:, :longest]).relu()
        kept = torch.arange(x.shape[1]) < lengths[:, None]
        return self.third((x * kept[..., None]).sum(1))


@pytest.mark.parametrize("lengths", [[2, 5], [7, 7]])
def test_a_number_of_the_whole_batch_is_not_carried_past_an_exit(lengths):
    """Survivors of two batches go on together, and each would get the first one's number."""
    with pytest.raises(BadInput, match=r"one for all samples.*longest = lengths\.max\(\)"):
        cut(UntilTheLongest(), ["first"], (torch.randn(2, 7, 6), torch.tensor(lengths)))


class Rotary(nn.Module):
    """What is one for all samples is made beside them, but not of them."""

    class Angles(nn.Module):
        def forward(self, x):
            return torch.arange(x.shape[1]).to(x.dtype).cos(), torch.arange(x.shape[1]).to(x.dtype).sin()

    def __init__(self):
        super().__init__()
        self.first, self.angles, self.second, self.third = Tuple(), self.Angles(), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        (x,) = self.first(x)
        cosine, sine = self.angles(x)
        x = self.second(x * cosine[:, None])
        return self.third((x * sine[:, None]).mean(1))


def test_a_tensor_for_all_samples_that_is_made_of_sizes_alone_is_carried():
    network, batch = Rotary(), torch.randn(5, 7, 6)
    stages = cut(network, ["first", "second"], torch.randn(2, 7, 6))
    assert torch.equal(chain(stages, (batch,)), network(batch))


class Tokens(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.embed, self.first, self.end = nn.Embedding(vocabulary, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, ids):
        x = self.first(self.embed(ids % self.embed.num_embeddings)).relu()
        there = ids.ne(0)
        return self.end((x * there[..., None]).sum(1) / there.sum(1).max())  # the longest of the batch


@pytest.mark.parametrize("example", [torch.ones(2, 12, dtype=torch.long), torch.randint(1, 50, (2, 12))])
@pytest.mark.parametrize("vocabulary", [50, 30_000])
def test_texts_that_mix_by_their_padding_are_refused(example, vocabulary):
    with pytest.raises(BadInput, match="depend on the other samples of its batch"):
        cut(Tokens(vocabulary), ["first"], example)


class Peak(Network):
    def forward(self, x):
        x = self.second(self.first(x))
        return self.third(x / x.abs().max().clamp(min=5.0))


class GatedMean(Network):
    """Mixes samples behind a gate that training opens."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        x = self.second(self.first(x))
        return self.third(x + self.gate * (x - x.mean(0)))


@pytest.mark.parametrize("kind", [Peak, GatedMean])
@pytest.mark.parametrize("example", [torch.zeros(2, 6), torch.randn(2, 6)])
def test_mixing_that_a_clamp_or_a_zero_weight_hides_is_found(kind, example):
    with pytest.raises(BadInput, match="depend on the other samples of its batch"):
        cut(kind(), ["first"], example)


class NumpyDice(Network):
    def forward(self, x):
        x = self.second(self.first(x))
        return self.third(x * 0.5 if self.training and np.random.rand() < 0.2 else x)  # noqa: NPY002


class CountsSteps(Network):
    steps = 0

    def forward(self, x):
        x = self.second(self.first(x))
        if self.training:
            self.steps += 1
            x = x * min(1.0, self.steps / 1000)
        return self.third(x)


class CountsFar(CountsSteps):
    """Does something else in the thousandth step alone."""

    def forward(self, x):
        x = self.second(self.first(x))
        self.steps += self.training
        return self.third(-x if self.steps > 1000 else x)


class CountsInAList(Network):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        x = self.second(self.first(x))
        if self.training:
            self.seen.append(1)
        return self.third(x * min(1.0, len(self.seen) / 20) if self.training else x)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (NumpyDice, "random numbers of Python or NumPy, which its code draws in every step, stay the same"),
        (CountsSteps, "output 0 of a second step differs|the attribute 'steps'"),
        (CountsFar, "the attribute 'steps', which its code changes in every step, stays the same"),
        (CountsInAList, "output 0 of a second step differs"),
    ],
)
@pytest.mark.parametrize("state", range(3))
def test_training_that_follows_dice_or_steps_is_refused(kind, reason, state):
    random.seed(state)
    np.random.seed(state)  # noqa: NPY002
    network = kind()
    stages = cut(network, ["first"], torch.randn(4, 6))
    with pytest.raises(BadInput, match=reason):
        chain([each.train() for each in stages], (torch.randn(4, 6),))
    assert not getattr(network, "steps", 0)
    assert not getattr(network, "seen", [])


class SharedWeight(Network):
    def __init__(self):
        super().__init__()
        self.tied = self.first.weight.detach()

    def forward(self, x):
        return self.third(self.second(self.first(x).relu()) @ self.tied)


def test_proving_puts_every_weight_back():
    network = Network()
    before = {name: each.clone() for name, each in network.state_dict().items()}
    cut(network, ["first"], torch.randn(4, 6))
    assert all(torch.equal(each, before[name]) for name, each in network.state_dict().items())


def test_an_attribute_that_shares_a_weights_memory_is_refused_once_it_would_not(tmp_path):
    model = attach_heads(SharedWeight(), ["first"], example=torch.randn(4, 6))
    save_model(model, tmp_path)
    with pytest.raises(Mismatch, match="its stages do not give what the network gives that was passed in"):
        load_model(tmp_path, SharedWeight())


class MaskOfBlocks(nn.Module):
    """Writes a mask into its blocks, which read it."""

    class Block(nn.Module):
        mask = None

        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x):
            return x + self.inner(x).masked_fill(self.mask[..., None], 0).mean(1, keepdim=True)

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = self.Block(), nn.Linear(6, 6), self.Block()
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        for block in (self.first, self.third):
            block.mask = x.abs().sum(-1) == 0
        return self.last(self.third(self.second(self.first(x))).mean(1))


def test_what_code_writes_into_blocks_is_seen_by_the_stages():
    torch.manual_seed(0)
    network, padded = MaskOfBlocks().eval(), torch.randn(7, 5, 6)
    padded[2, 3:] = padded[5, 1:] = 0
    stages = cut(network, ["second"], torch.randn(2, 5, 6))
    for batch in (padded, torch.randn(7, 5, 6), padded[:, :4]):
        expected = copy.deepcopy(network)(batch)
        assert torch.equal(chain(stages, (batch,)), expected)


class NumberOfLayer(Network):
    """Writes a number that follows the input's size into a layer of torch."""

    def forward(self, x):
        x = self.first(x)
        self.dropped.p = 1 / x.shape[1]
        return self.third(self.dropped(self.second(x)))

    def __init__(self):
        super().__init__()
        self.dropped = nn.Dropout()


def test_writing_into_a_layer_of_torch_is_refused_with_the_line():
    with pytest.raises(BadInput, match=r"writes 'p' into module 'dropped', which reads it, at .*test_proof.py:"):
        cut(NumberOfLayer(), ["first"], torch.randn(2, 6))


class SharedContext(nn.Module):
    """Closed modules that hand a size on by an object."""

    class Context:
        size = ()

    class Patches(nn.Module):
        def __init__(self, context):
            super().__init__()
            self.context, self.inner = context, nn.Conv2d(3, 6, 2, 2)

        def forward(self, x):
            x = self.inner(x)
            self.context.size = x.shape[2:]
            return x.flatten(2).transpose(1, 2)

    class Block(nn.Module):
        def __init__(self, context):
            super().__init__()
            self.context, self.inner = context, nn.Conv2d(6, 6, 3, padding=1)

        def forward(self, x):
            images = x.transpose(1, 2).reshape(len(x), 6, *self.context.size)
            return self.inner(images).flatten(2).transpose(1, 2)

    def __init__(self):
        super().__init__()
        context = self.Context()
        self.patches, self.block, self.last = self.Patches(context), self.Block(context), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.block(self.patches(x)).amax(1))


def test_an_object_by_which_stages_hand_something_on_is_found():
    with pytest.raises(BadInput, match="leaves something for a later one that is not carried"):
        cut(SharedContext(), ["patches"], torch.randn(2, 3, 8, 8))


class SetsItselfUp(Network):
    class Centred(nn.Module):
        ready = False

        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(6))

        def forward(self, x):
            if not self.ready:
                with torch.no_grad():
                    self.shift.copy_(x.mean(0))
                self.ready = True
            return x - self.shift

    def __init__(self):
        super().__init__()
        self.third = nn.Sequential(self.Centred(), nn.Linear(6, 3))


def test_a_parameter_that_the_first_batch_sets_is_left_alone_and_refused_until_it_is_set():
    network = SetsItselfUp().eval()
    with pytest.raises(BadInput, match=r"writes to its parameter 'third.0.shift' in evaluation mode.*run it once"):
        cut(network, ["first"], torch.randn(2, 6))
    assert not network.third[0].ready
    assert not network.third[0].shift.any()
    batch = torch.randn(9, 6)
    network(batch)
    assert torch.equal(chain(cut(network, ["first"], torch.randn(2, 6)), (batch,)), network(batch))


class Trimmed(nn.Module):
    """Drops steps that are zero in the whole batch."""

    class Trim(nn.Module):
        def forward(self, x):
            return x[:, : max(1, int((x.abs().sum(-1) > 0).sum(1).max()))].mean(1)

    def __init__(self):
        super().__init__()
        self.first, self.trim, self.last = nn.Linear(6, 6, bias=False), self.Trim(), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.trim(self.first(x).relu()))


def test_samples_that_mix_only_where_sequences_end_in_zeros_are_found():
    with pytest.raises(BadInput, match=r"depend on the other samples of its batch.*'trim' \(Trim\)"):
        cut(Trimmed(), ["first"], torch.randn(2, 5, 6))


class Powers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        y = self.first(x).abs() ** 0.5
        y **= 2
        return self.last(2**y + y**2 + (-y) ** 3)


def test_powers_are_cut():
    network, batch = Powers(), torch.randn(5, 6)
    assert torch.equal(chain(cut(network, ["first"], torch.randn(2, 6)), (batch,)), network(batch))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.pool, self.last = nn.Linear(4, 6), PackedMean(), nn.Linear(6, 3)

    def forward(self, x, lengths):
        return self.last(self.pool(self.first(x), lengths))


class PackedMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(6, 6, batch_first=True)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0].mean(1)


class TrimmedByMask(Packed):
    def __init__(self):
        super().__init__()
        self.pool = TrimmedMean()


class TrimmedMean(nn.Module):
    def forward(self, x, padding):
        return x[:, : (~padding).sum(1).max()].mean(1)


@pytest.mark.parametrize(
    ("network", "second"),
    [(Packed, torch.full((2,), 8)), (TrimmedByMask, torch.zeros(2, 8, dtype=torch.bool))],
    ids=["lengths", "mask"],
)
def test_samples_that_mix_by_lengths_are_found_by_an_example_of_full_length(network, second):
    with pytest.raises(BadInput, match=r"depend on the other samples.*'pool'"):
        cut(network(), ["first"], (torch.randn(2, 8, 4), second))


class PackedToTheEnd(nn.Module):
    """Recurrent layers on packed sequences, unpacked to the length of the input."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.second = (kind(6, 3, batch_first=True, bidirectional=True) for _ in range(2))

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        packed, _ = self.second(self.first(packed)[0])
        return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])[0].mean(1)


@pytest.mark.parametrize("lengths", [[8, 8], [2, 3], [5, 1, 8]])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_packed_sequences_that_are_kept_apart_are_cut(kind, lengths):
    torch.manual_seed(0)
    network = Packed().eval()
    network.pool = PackedToTheEnd(kind).eval()
    stages = cut(network, ["first"], (torch.randn(len(lengths), 8, 4), torch.tensor(lengths)))
    batch = torch.randn(6, 8, 4), torch.tensor([3, 8, 1, 7, 2, 8])
    with torch.no_grad():
        assert torch.equal(chain(stages, batch), network(*batch))


class OverLargest(nn.Module):
    def forward(self, x):
        return x.abs().flatten(1).float() / x.abs().max()


@pytest.mark.parametrize(
    "example",
    [torch.randint(0, 256, (1, 3, 2), dtype=torch.uint8), torch.randn(1, 3, 2, dtype=torch.complex64)],
    ids=["bytes", "complex"],
)
def test_bytes_and_complex_numbers_that_mix_are_found_by_an_example_of_one_sample(example):
    with pytest.raises(BadInput, match="depend on the other samples"):
        cut(nn.Sequential(OverLargest(), Network()), ["1.first"], example)


class Difference(Network):
    def forward(self, x, y):
        x = self.second((self.first(x) - self.first.forward(y)).abs()).relu()
        return self.third(x / x.max().clamp(min=1e-3))


def test_two_inputs_of_one_shape_differ_in_the_proof():
    with pytest.raises(BadInput, match="depend on the other samples"):
        cut(Difference(), ["second"], (torch.zeros(2, 6), torch.zeros(2, 6)))


class HalvedIfLarge(nn.Module):
    def forward(self, x):
        return x / 2 if x.max() > 1 else x


class HalvedWhereLarge(nn.Module):
    def forward(self, x):
        return torch.where(x.max() > 1, x / 2, x)


class WithCapacity(nn.Module):
    """Two experts, each of which takes at least eight samples."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 2), nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x):
        chosen = functional.one_hot(self.gate(x).argmax(-1), 2)
        taken = chosen * (chosen.cumsum(0) <= max(8, len(x) // 2))
        return x + sum(taken[:, index, None] * expert(x) for index, expert in enumerate(self.experts))


class Own(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, lines):
        super().__init__()
        self.lines = lines

    def forward(self, x):
        return self.lines(x)


@pytest.mark.parametrize(
    ("kind", "line"),
    [(HalvedIfLarge, r"x\.max\(\) > 1"), (HalvedWhereLarge, r"x\.max\(\) > 1"), (WithCapacity, r"cumsum\(0\)")],
)
def test_samples_that_mix_past_a_limit_are_found(kind, line):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), kind(), nn.Linear(6, 3))
    with pytest.raises(BadInput, match=f"depend on the other samples.*test_proof.py:.*{line}"):
        cut(layers, ["0"], torch.rand(2, 6))


def first_64(x):
    made = torch.zeros_like(x)
    made[:64] = x[:64]
    return made


def best_64(x):
    kept = torch.ones(len(x))
    kept[x.mean(1).argsort()[64:]] = 0
    return x * kept.to(x)[:, None]


def at_most_64(x):
    taken = (x[:, 0] > 0).long().cumsum(0) <= 64
    return x * taken[:, None]


def best_64_by_topk(x):
    rows = x.sum(1).topk(min(64, len(x))).indices
    made = torch.zeros_like(x)
    made[rows] = x[rows]
    return made


def without_near_duplicates(x):
    unit = functional.normalize(x, dim=1)
    return x * ~((unit @ unit.T).triu(1) > 0.999999).any(0)[:, None]


def without_close_ones(x):
    distances = torch.cdist(x.float(), x.float())
    return x * ~((distances < 1e-5) & (distances > 0)).tril(-1).any(1)[:, None]


def doubled_by_mean(x):
    return x * 2 if x.tanh().mean() > 0.95 else x


def doubled_by_number(x):
    return x * 2 if x.tanh().mean().item() > 0.95 else x


def doubled_where_mean(x):
    return torch.where(x.tanh().mean() > 0.95, x * 2, x)


def halved_if_any_is_huge(x):
    return x / 2 if (x.abs() > 1e9).any() else x


def halved_if_many(x):
    return x / 2 if (x[:, 0] > -100).sum() > 45 else x


MIXING = [
    first_64, best_64, at_most_64, best_64_by_topk, without_near_duplicates, without_close_ones, doubled_by_mean,
    doubled_by_number, doubled_where_mean, halved_if_any_is_huge, halved_if_many,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("lines", MIXING, ids=lambda lines: lines.__name__)
def test_samples_that_mix_where_no_trial_reaches_are_refused_with_the_line(lines, dtype):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), Own(lines), nn.Linear(6, 3)).to(dtype).eval()
    with pytest.raises(BadInput, match=f"depend on the other samples.*test_proof.py:.* in {lines.__name__}: "):
        cut(layers, ["0"], torch.rand(2, 6, dtype=dtype))


def checked(x):
    assert torch.isfinite(x).all()
    if x.abs().max() > 1e4:
        raise ValueError("too large")
    return x


def clamped_if_infinite(x):
    return x.clamp(-100, 100) if torch.isinf(x).any() else x


def masked_if_some(x):
    negative = x < 0
    return x.masked_fill(negative, 0) if negative.sum() > 0 else x


def in_chunks(x):
    return torch.cat([part * 2 for part in x.split(64)])


def by_row(x):
    return torch.stack([row * 2 if row.mean() > 0 else row for row in x])


def sorted_and_back(x):
    order = (x[:, 0] > 0).long().argsort()
    made = torch.empty_like(x)
    made[order] = x[order] * 2
    return made


class KeepsNumbers(nn.Module):
    """Keeps what is computed from all samples, as for a loss or a log."""

    def forward(self, x):
        self.mean, self.norm = x.mean(0), x.norm().item()
        return x


APART = [checked, clamped_if_infinite, masked_if_some, in_chunks, by_row, sorted_and_back]


@pytest.mark.parametrize("module", [*map(Own, APART), KeepsNumbers()], ids=[*(each.__name__ for each in APART), "kept"])
def test_modules_that_look_at_all_samples_and_keep_them_apart_are_cut(module):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), module, nn.Linear(6, 3)).eval()
    batch = torch.randn(70, 6)
    with torch.no_grad():
        assert torch.equal(chain(cut(layers, ["0"], torch.rand(2, 6)), (batch,)), layers(batch))


class TopExpert(WithCapacity):
    def forward(self, x):
        chosen, made = self.gate(x).argmax(-1), x.clone()
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(1)
            made[rows] += expert(x[rows])
        return made


def test_experts_without_a_limit_are_cut():
    layers = nn.Sequential(nn.Linear(6, 6), TopExpert(), nn.Linear(6, 3)).eval()
    batch = torch.randn(30, 6)
    with torch.no_grad():
        assert torch.equal(chain(cut(layers, ["0"], torch.rand(2, 6)), (batch,)), layers(batch))


class Merged(nn.Module):
    """Adds a low rank to a weight in evaluation mode, and takes it away in training mode."""

    merged = False

    def __init__(self):
        super().__init__()
        self.base, self.low, self.high = (
            nn.Linear(6, 6),
            nn.Parameter(torch.randn(1, 6)),
            nn.Parameter(torch.randn(6, 1)),
        )

    def train(self, mode=True):
        super().train(mode)
        if self.merged == mode:
            self.base.weight.data += (-1 if mode else 1) * self.high.data @ self.low.data
            self.merged = not mode
        return self

    def forward(self, x):
        return self.base(x) + (0 if self.merged else x @ self.low.T @ self.high.T)


def test_weights_that_a_change_of_mode_merges_are_left_as_they_were():
    network = nn.Sequential(Merged(), nn.ReLU(), nn.Linear(6, 3)).eval()
    before, batch = copy.deepcopy(network.state_dict()), torch.randn(5, 6)
    with torch.no_grad():
        expected = network(batch)
        stages = cut(network, ["1"], torch.randn(2, 6))
        assert torch.equal(network(batch), expected)
        assert torch.equal(chain(stages, (batch,)), expected)
    assert all(torch.equal(each, before[name]) for name, each in network.state_dict().items())


def test_a_run_that_would_not_fit_in_memory_is_refused(monkeypatch):
    network = nn.Sequential(nn.Linear(6, 64), HalvedWhereLarge(), nn.Linear(64, 3))
    network.forward = lambda x: network[2](network[1](network[0](x)).numpy(force=True) * torch.ones(()))  # needs data
    monkeypatch.setattr("alight.cutting.calls._memory", lambda: 2000)
    with pytest.raises(
        BadInput, match=r"a run of 2 samples keeps more than .* a quarter of the memory: give a smaller"
    ):
        cut(network, ["0"], torch.rand(2, 6))
