"""Sizes stay free where the code computes with them, and are refused where the code fixes them."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from alight.cutting.cut import cut
from alight.cutting.running import chain
from alight.errors import BadInput


class Convolutions(nn.Module):
    """Two convolutions and a classifier; how the map becomes a row is the subclass's."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.classifier = nn.Linear(8, 5)

    def forward(self, x):
        return self.classifier(self.pooled(self.second(self.first(x).relu()).relu()))


class AveragePool(Convolutions):
    def pooled(self, x):
        return functional.avg_pool2d(x, x.size()[3]).flatten(1)


class SumOverArea(Convolutions):
    def pooled(self, x):
        _, _, height, width = x.shape
        return x.sum((2, 3)) / (height * width)


class SizeOfTheInput(Convolutions):
    """The size of the input is used after the cut."""

    def forward(self, x):
        height, width = x.shape[-2:]
        x = self.second(self.first(x).relu())
        return self.classifier(x.reshape(-1, 8, height * width).sum(2) * (1 / width))


class SizeBeforeStride(Convolutions):
    """The size of the input is used after the cut, where nothing that is carried has it."""

    def __init__(self):
        super().__init__()
        self.pool = nn.MaxPool2d(2)

    def forward(self, x):
        height = x.shape[2]
        x = self.second(self.pool(self.first(x)).relu())
        return self.classifier(x.mean((2, 3)) / height)


class SizesInATuple(Convolutions):
    """A module that is kept whole returns the size of its map, which is used after two cuts."""

    class Patches(nn.Conv2d):
        def forward(self, x):
            x = super().forward(x)
            return x.flatten(2), x.shape[2], x.shape[3]

    def __init__(self):
        super().__init__()
        self.first, self.middle = self.Patches(3, 6, 3, padding=1), nn.Linear(6, 6)

    def forward(self, x):
        x, height, width = self.first(x)
        x = self.middle(x.transpose(1, 2)).amax(1)[..., None, None].expand(-1, -1, height, width)
        return self.classifier(self.second(x).sum((2, 3)) / height)


class SizeOfContent(SizesInATuple):
    """The number that a module returns follows what is in its input; the logits hardly show it."""

    class Patches(nn.Conv2d):
        def forward(self, x):
            x = super().forward(x)
            return x.flatten(2), int(4 * x.abs().mean()) + 1, 2

    def forward(self, x):
        x, height, _ = self.first(x)
        x = self.second(self.middle(x.transpose(1, 2)).amax(1)[..., None, None])
        return self.classifier(x.repeat(1, 1, height, 2).amax((2, 3)))


class Branches(Convolutions):
    def pooled(self, x):
        return x.mean((2, 3)) if x.shape[2] < 20 else x.amax((2, 3))


class RootOfTokens(Convolutions):
    def pooled(self, x):
        tokens = x.flatten(2)
        side = int(math.sqrt(tokens.shape[2]))
        return tokens[:, :, :side].mean(2)


class LastStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.first = nn.Embedding(50, 8), nn.Linear(8, 8)
        self.second, self.classifier = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.first(self.embedding(tokens)).relu()
        x = self.second(x.cumsum(1) / torch.arange(1, length + 1)[:, None])
        return self.classifier(x[:, length - 1])


def images(height, width, samples=3):
    return torch.randn(samples, 3, height, width)


def is_same(network, stages, batch):
    with torch.no_grad():
        return torch.equal(chain(stages, (batch,)), network(batch))


@pytest.mark.parametrize("kind", [AveragePool, SumOverArea, SizeOfTheInput])
def test_image_sizes_are_free(kind):
    network = kind().eval()
    stages = cut(network, ["first"], images(12, 12))
    for side in (8, 12, 17, 31):
        assert is_same(network, stages, images(side, side))
    if kind is not AveragePool:
        assert is_same(network, stages, images(9, 14))


def test_lengths_are_free():
    network = LastStep().eval()
    stages = cut(network, ["first"], torch.randint(50, (2, 9)))
    for length in (1, 5, 9, 23):
        assert is_same(network, stages, torch.randint(50, (4, length)))


def test_a_branch_on_a_size_is_refused_where_it_would_go_the_other_way():
    network = Branches().eval()
    stages = cut(network, ["first"], images(12, 12))
    assert is_same(network, stages, images(16, 18))
    with pytest.raises(BadInput, match=r"x\.shape\[2\] < 20"):
        chain(stages, (images(24, 24),))


def test_sizes_that_leave_arithmetic_are_fixed():
    network = RootOfTokens().eval()
    stages = cut(network, ["first"], images(12, 12))
    assert is_same(network, stages, images(12, 12, samples=5))
    with pytest.raises(BadInput, match=r"math\.sqrt"):
        chain(stages, (images(16, 16),))


@pytest.mark.parametrize(
    ("kind", "after"),
    [(SizeBeforeStride, ["pool"]), (SizeBeforeStride, ["pool", "second"]), (SizesInATuple, ["first", "middle"])],
)
def test_a_size_that_no_carried_tensor_has_is_carried_too(kind, after):
    network = kind().eval()
    stages, kept = cut(network, after, images(12, 12)), [4, 1]
    for height, width in ((12, 12), (8, 8), (17, 31)):
        batch = images(height, width, samples=5)
        assert is_same(network, stages, batch)
        carried = stages[0](batch)
        for stage in stages[1:]:
            carried = stage(*(each[kept] if len(each) == 5 else each for each in carried))
        torch.testing.assert_close(carried, network(batch)[kept])


def test_a_number_that_a_module_reads_from_its_input_is_refused():
    with pytest.raises(BadInput, match="one for all samples of a batch and follows their content"):
        cut(SizeOfContent().eval(), ["middle"], images(12, 12))


COMPUTED = {  # steps that are the same at all sizes that are tried, and not at 40
    "shift": lambda size: size >> 5,
    "mask": lambda size: size & 32,
    "divmod": lambda size: divmod(size, 32)[0],
}
REFUSED = {
    "round": lambda size: round(size + 20, -2),
    "square root": lambda size: int(math.sqrt(size / 32)),
    "logarithm": lambda size: int(math.log2(size / 32) > 0),
}


def stepping(step):
    class Steps(Convolutions):
        def pooled(self, x):
            return x.mean((2, 3)) * (1 + step(x.shape[2]))

    network = Steps().eval()
    return network, cut(network, ["first"], images(16, 16))


@pytest.mark.parametrize("step", COMPUTED.values(), ids=COMPUTED)
def test_steps_that_the_tried_sizes_do_not_show_are_computed(step):
    assert is_same(*stepping(step), images(40, 40))


@pytest.mark.parametrize("step", REFUSED.values(), ids=REFUSED)
def test_steps_that_python_computes_unseen_are_refused(step):
    with pytest.raises(BadInput, match="does something else for inputs of this size"):
        is_same(*stepping(step), images(40, 40))


class OneSide(nn.Module):
    """Takes images of which one side is 12."""

    def forward(self, x):
        if 12 not in x.shape[2:]:
            raise ValueError("no side is 12")
        return x


class Loops(Convolutions):
    def __init__(self):
        super().__init__()
        self.sides = OneSide()

    def pooled(self, x):
        return sum(self.sides(x)[..., place] for place in range(x.shape[3])).mean(2)


def test_an_axis_that_cannot_vary_beside_another_is_proven_alone():
    network = Loops().eval()
    stages = cut(network, ["first"], images(12, 12))
    assert is_same(network, stages, images(30, 12))
    with pytest.raises(BadInput, match="the network was cut for"):
        chain(stages, (images(12, 30),))


class FramesInTheBatch(nn.Module):
    """Reads four frames per sample, which lie in the batch and are counted by a number in the code."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.end = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 3)

    def forward(self, x):
        x = self.second(self.first(x.reshape(-1, *x.shape[-3:])))
        x = x.view(x.shape[0] // 4, 4, *x.shape[1:])
        return self.end(x.amax((1, 3, 4)))


def test_a_size_of_which_the_network_makes_other_samples_is_not_taken_for_one_that_it_takes():
    network = FramesInTheBatch().eval()
    stages = cut(network, ["first"], torch.randn(2, 4, 3, 12, 12))
    batch = torch.randn(3, 4, 3, 16, 14)
    with torch.no_grad():
        assert torch.equal(chain(stages, (batch,)), network(batch))
        with pytest.raises(BadInput, match=r"an input of \(2, 3, 12, 12\) per sample, .* was cut for \(4,"):
            chain(stages, (torch.randn(2, 2, 3, 12, 12),))
