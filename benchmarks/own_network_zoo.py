"""Small networks written the way people write their own, each with what it takes and what is expected of its exits.

`benchmarks/own_networks.py` tries alight on all of them. A network is a class or a function under `@case`, which says
what it is an example of, draws batches for it, and names the modules after which exits are attached.
"""

# ruff: noqa: D101, D102, D106  # the line of a case says what its network does

import importlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from alight import TwoLogits

CLASSES = 5
VOCABULARY = 50
MIXED, RANDOM = "the logits of a sample depend on its batch", "the logits are random"
Batch = Any  # a tensor, a tuple, a list or a dict of tensors, as the network takes it
Maker = Callable[[int], Batch]  # draws a batch of so many samples from torch's generator
Make = TypeVar("Make", bound=Callable[[], nn.Module])


def only_output(output: Any) -> Tensor:
    return output


@dataclass(frozen=True)
class Case:
    """A network, what it takes, and what is expected of it."""

    name: str
    kind: str
    tests: str  # what it tests
    make: Callable[[], nn.Module]  # returns the network with random weights
    batch: Maker
    after: str | Sequence[str]
    others: Mapping[str, Maker] = field(default_factory=dict)  # batches of other sizes that the network takes
    extras: Mapping[str, Maker] = field(default_factory=dict)  # batches with inputs that the example does not have
    arguments: Mapping[str, Any] = field(default_factory=dict)  # for attach_heads
    logits: Callable[[Any], Tensor] = only_output  # where the logits are in the network's output
    classes: int = CLASSES
    widths: Sequence[int] = ()  # channels that each head must read
    padded: Callable[[], tuple[Batch, Batch]] | None = None  # samples alone and padded, with the same logits
    must_refuse: str = ""  # why no answer can be right
    needs: str = ""  # a package
    trains: bool | Literal["heads"] = True  # the whole network, not at all, or heads alone
    remedy: str = ""  # what a refusal asked for, and is done here
    example: Maker | None = None  # draws the example; None: as batches are drawn


CASES: dict[str, Case] = {}


def case(
    name: str, kind: str, tests: str, batch: Maker, after: str | Sequence[str], **expected: Any
) -> Callable[[Make], Make]:
    """Register a network as a case under this name; `expected` are the other fields of `Case`."""
    if name in CASES:
        raise ValueError(f"there are two cases named {name!r}: rename one")

    def register(make: Make) -> Make:
        CASES[name] = Case(name, kind, tests, make, batch, after, **expected)
        return make

    return register


def remedied(name: str, remedy: str, make: Callable[[], nn.Module] | None = None, **changes: Any) -> None:
    """Register a case again, with what its refusal asks for."""
    old = CASES[name]
    made = {"make": make or old.make, "must_refuse": "", **changes}
    CASES[f"{name}_told"] = replace(old, name=f"{name}_told", remedy=remedy, **made)


# Batches.


def floats(*shape: int) -> Maker:
    return lambda samples: torch.randn(samples, *shape)


def tokens(length: int) -> Maker:
    return lambda samples: torch.randint(3, VOCABULARY, (samples, length))


def padding_mask(length: int) -> Maker:
    """Return a maker of masks that are 1 where a token is read and 0 at the end of each text."""

    def make(samples: int) -> Tensor:
        lengths = 2 + torch.arange(samples) % (length - 1)
        return (torch.arange(length) < lengths[:, None]).long()

    return make


def hidden_mask(length: int) -> Maker:
    """Return a maker of masks that are True at padding, as those of `nn.TransformerEncoder`."""
    return lambda samples: padding_mask(length)(samples) == 0


def lengths_up_to(length: int) -> Maker:
    return lambda samples: 2 + torch.arange(samples) % (length - 1)


def named(**makers: Maker) -> Maker:
    return lambda samples: {name: make(samples) for name, make in makers.items()}


def several(*makers: Maker) -> Maker:
    return lambda samples: tuple(make(samples) for make in makers)


# Parts that people copy from network to network.


def conv(inputs: int, outputs: int, stride: int = 1, *, inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=inplace)
    )


def conv1d(inputs: int, outputs: int, kernel: int = 5, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(inputs, outputs, kernel, stride, kernel // 2), nn.BatchNorm1d(outputs), nn.ReLU(inplace=True)
    )


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        if bias is not None:
            scores = scores + bias
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))


class TransformerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), bias)
        return x + self.mlp(self.norm2(x))


class Pipeline(nn.Module):
    """Three convolutional stages and a linear classifier, which subclasses put together in their own `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.tail = conv(3, 8), conv(8, 12, 2), conv(12, 16, 2)
        self.fc = nn.Linear(16, CLASSES)

    def classified(self, x: Tensor) -> Tensor:
        return self.fc(x.mean((2, 3)))

    def forward(self, x: Tensor) -> Any:
        return self.classified(self.tail(self.body(self.stem(x))))


IMAGES, LARGER = floats(3, 16, 16), {"24 x 24": floats(3, 24, 24), "16 x 24": floats(3, 16, 24)}
STAGES = ["stem", "body"]


# 1. Numbers of the network that Python reads.


@case(
    "buffer_item_scale", "numbers", "buffer.item() scales the features", IMAGES, STAGES, others=LARGER, widths=(8, 12)
)
class BufferItemScale(Pipeline):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(()) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x)) * self.scale.item()
        return self.classified(self.tail(x))


@case("float_temperature", "numbers", "float(self.temperature) divides the logits", IMAGES, STAGES, others=LARGER)
class FloatTemperature(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.rand(()) + 0.5, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.classified(self.tail(self.body(self.stem(x)))) / float(self.temperature)


@case("branch_on_parameter", "numbers", "a Python branch on a parameter's value", IMAGES, STAGES)
class BranchOnParameter(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(()), requires_grad=False)
        self.other = conv(12, 16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        return self.classified(self.tail(x) if self.gate > 0 else self.other(x))


@case("buffer_list_of_scales", "numbers", "buffer.tolist() gives a weight to each branch", IMAGES, STAGES)
class BufferListOfScales(Pipeline):
    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.other = conv(12, 16, 2)
        self.register_buffer("weights", torch.rand(2) + 0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        first, second = self.weights.tolist()
        return self.classified(first * self.tail(x) + second * self.other(x))


@case("unregistered_tensor", "numbers", "a tensor attribute that is not a buffer", IMAGES, STAGES, others=LARGER)
class UnregisteredTensor(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.linspace(-1, 1, 3).view(1, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x - self.mean) / 2)


@case("layer_count_parameter", "numbers", "int(buffer) layers run", IMAGES, STAGES)
class LayerCountBuffer(Pipeline):
    depth: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("depth", torch.randint(1, 4, ()))
        self.extra = nn.ModuleList(conv(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.tail(self.body(self.stem(x)))
        for layer in list(self.extra)[: int(self.depth)]:
            x = layer(x)
        return self.classified(x)


# 2. Sizes of the input that Python reads.


@case(
    "cifar_resnet_auto", "sizes", "the same, exits placed by 'auto'", floats(3, 32, 32), "auto",
    others={"48 x 48": floats(3, 48, 48), "32 x 48": floats(3, 48, 32)},
)  # fmt: skip
@case(
    "cifar_resnet", "sizes", "F.avg_pool2d(x, x.size()[3])", floats(3, 32, 32), ["layer1", "layer2"],
    others={"48 x 48": floats(3, 48, 48), "16 x 16": floats(3, 16, 16)}, widths=(8, 12),
)  # fmt: skip
class CifarResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8))
        self.layer2 = nn.Sequential(BasicBlock(8, 12, 2), BasicBlock(12, 12))
        self.layer3 = nn.Sequential(BasicBlock(12, 16, 2), BasicBlock(16, 16))
        self.linear = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        out = F.avg_pool2d(out, out.size()[3])
        out = out.view(out.size(0), -1)
        return self.linear(out)


@case("sum_by_area", "sizes", "x.sum((2, 3)) / (H * W)", IMAGES, STAGES, others=LARGER, widths=(8, 12))
class SumByArea(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = self.tail(self.body(self.stem(x)))
        height, width = x.shape[2:]
        return self.fc(x.sum((2, 3)) / (height * width))


@case(
    "last_step", "sizes", "x[:, T - 1], the last step of a sequence", floats(10, 6), ["first", "second"],
    others={"14 steps": floats(14, 6), "7 steps": floats(7, 6)}, widths=(16, 16),
)  # fmt: skip
class LastStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.first, self.second, self.third = (TransformerBlock(16) for _ in range(3))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.third(self.second(self.first(self.embed(x))))
        steps = x.shape[1]
        return self.fc(x[:, steps - 1])


@case("space_to_depth", "sizes", "x.view(B, -1, H // 2, W // 2)", IMAGES, STAGES, others=LARGER)
class SpaceToDepth(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.tail = conv(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        batch, _, height, width = x.shape
        return self.classified(self.tail(x.view(batch, -1, height // 2, width // 2)))


@case(
    "token_grid", "sizes", "int(math.sqrt(N)) makes a map of tokens", floats(16, 12), ["first", "second"],
    others={"25 tokens": floats(25, 12), "9 tokens": floats(9, 12)}, widths=(12, 12),
)  # fmt: skip
class TokenGrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = TransformerBlock(12), TransformerBlock(12)
        self.conv, self.fc = conv(12, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        batch, number, width = x.shape
        side = int(math.sqrt(number))
        x = x.transpose(1, 2).reshape(batch, width, side, side)
        return self.fc(self.conv(x)[:, :, side // 2].mean(2))


@case(
    "position_embedding_cropped", "sizes", "self.position[:, :T]", tokens(10), ["first", "second"],
    others={"14 tokens": tokens(14), "6 tokens": tokens(6)}, widths=(16, 16),
)  # fmt: skip
class CroppedPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, 16), nn.Parameter(torch.randn(1, 32, 16))
        self.first, self.second, self.third = (TransformerBlock(16) for _ in range(3))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position[:, : ids.size(1)]
        return self.fc(self.third(self.second(self.first(x))).mean(1))


class Patches(nn.Module):
    """Patches, positions, three transformer blocks; subclasses say what positions are added."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.position = nn.Parameter(torch.randn(1, 16, 16))
        self.first, self.second, self.third = (TransformerBlock(16) for _ in range(3))
        self.fc = nn.Linear(16, CLASSES)

    def positions(self, height: int, width: int) -> Tensor:
        return self.position

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x)
        x = x.flatten(2).transpose(1, 2) + self.positions(x.shape[2], x.shape[3])
        return self.fc(self.third(self.second(self.first(x))).mean(1))


case(
    "position_embedding_fixed", "sizes", "one position embedding for one size", IMAGES, ["first", "second"],
    widths=(16, 16),
)(Patches)  # fmt: skip


@case(
    "position_embedding_interpolated", "sizes", "positions interpolated to the input", IMAGES, ["first", "second"],
    others=LARGER, widths=(16, 16),
)  # fmt: skip
class InterpolatedPositions(Patches):
    def positions(self, height: int, width: int) -> Tensor:
        if height * width == self.position.shape[1]:
            return self.position
        grid = self.position.reshape(1, 4, 4, -1).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, size=(height, width), mode="bicubic", align_corners=False)
        return grid.flatten(2).transpose(1, 2)


@case(
    "loop_over_time", "sizes", "for t in range(T): hidden = cell(x[:, t], hidden)", floats(8, 6), ["embed", "norm"],
    others={"12 steps": floats(12, 6), "5 steps": floats(5, 6)},
)  # fmt: skip
class LoopOverTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(6, 12), nn.LayerNorm(12)
        self.cell, self.fc = nn.GRUCell(12, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.relu(self.embed(x)))
        hidden = x.new_zeros(x.size(0), 16)
        for step in range(x.size(1)):
            hidden = self.cell(x[:, step], hidden)
        return self.fc(hidden)


@case(
    "branch_on_height", "sizes", "if H > 40: x = pool(x)", floats(3, 32, 32), STAGES,
    others={"48 x 48": floats(3, 48, 48), "40 x 40": floats(3, 40, 40)},
)  # fmt: skip
class BranchOnHeight(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        tall = x.shape[2] > 40
        x = self.body(self.stem(x))
        if tall:
            x = F.max_pool2d(x, 2)
        return self.classified(self.tail(x))


@case("interpolate_to_input", "sizes", "U-shaped, F.interpolate to the input's size", IMAGES, STAGES, others=LARGER)
class InterpolateToInput(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.merge, self.fc = conv(8 + 16, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2:]
        skip = self.stem(x)
        deep = self.tail(self.body(skip))
        up = F.interpolate(deep, size=size, mode="bilinear", align_corners=False)
        return self.classified(self.merge(torch.cat([skip, up], 1)))


@case(
    "growing_table", "sizes", "a cached positional table that grows with the input", floats(8, 16),
    ["first", "second"], others={"12 steps": floats(12, 16), "5 steps": floats(5, 16)}, widths=(16, 16),
)  # fmt: skip
class GrowingTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.first, self.second, self.third = (TransformerBlock(16) for _ in range(3))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.size(1)
        if self.table is None or self.table.size(0) < steps:
            angles = torch.arange(steps, dtype=x.dtype, device=x.device)[:, None] * torch.logspace(0, -3, 8)
            self.table = torch.cat([angles.sin(), angles.cos()], 1)
        x = x + self.table[:steps]
        return self.fc(self.third(self.second(self.first(x))).mean(1))


@case(
    "pad_to_multiple", "sizes", "padding to multiples of 8", floats(3, 14, 14), STAGES,
    others={"20 x 20": floats(3, 20, 20), "16 x 16": floats(3, 16, 16)},
)  # fmt: skip
class PadToMultiple(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        x = F.pad(x, (0, -width % 8, 0, -height % 8))
        x = self.tail(self.body(self.stem(x)))
        return self.classified(x[:, :, : math.ceil(height / 4), : math.ceil(width / 4)])


@case("adaptive_pool", "sizes", "nn.AdaptiveAvgPool2d and flatten", IMAGES, ["0", "1"], others=LARGER, widths=(8, 12))
def adaptive_pool() -> nn.Module:
    layers = [conv(3, 8), conv(8, 12, 2), conv(12, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16, CLASSES))


@case(
    "arange_positions", "sizes", "nn.Embedding of torch.arange(T)", tokens(10), ["first", "second"],
    others={"14 tokens": tokens(14), "6 tokens": tokens(6)},
)  # fmt: skip
class ArangePositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, 16), nn.Embedding(32, 16)
        self.first, self.second, self.third = (TransformerBlock(16) for _ in range(3))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        return self.fc(self.third(self.second(self.first(x))).mean(1))


@case(
    "causal_mask", "sizes", "torch.triu(torch.ones(T, T)) as a causal mask", tokens(10), ["first", "second"],
    others={"14 tokens": tokens(14), "6 tokens": tokens(6)},
)  # fmt: skip
class CausalMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.first, self.second, self.third = (TransformerBlock(16) for _ in range(3))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.size(1)
        bias = torch.triu(torch.full((length, length), float("-inf"), device=ids.device), diagonal=1)
        x = self.third(self.second(self.first(self.embed(ids), bias), bias), bias)
        return self.fc(x[:, -1])


@case(
    "scale_by_length", "sizes", "x.sum(1) / math.sqrt(T)", floats(10, 6), ["first", "second"],
    others={"14 steps": floats(14, 6), "7 steps": floats(7, 6)}, widths=(16, 16),
)  # fmt: skip
class ScaleByLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        return self.fc(self.second(self.first(x)).sum(1) / math.sqrt(length))


@case(
    "chunks_of_time", "sizes", "x.chunk(T // 4, dim=1), each chunk pooled", floats(8, 6), ["first", "second"],
    others={"16 steps": floats(16, 6), "12 steps": floats(12, 6)}, widths=(16, 16),
)  # fmt: skip
class ChunksOfTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        parts = [part.amax(1) for part in x.chunk(x.size(1) // 4, dim=1)]
        return self.fc(torch.stack(parts).mean(0))


# 3. Samples of a batch that see each other.


@case("batch_statistics", "mixing", "hand-written statistics over the batch", IMAGES, STAGES, must_refuse=MIXED)
class BatchStatistics(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        mean, deviation = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
        return self.classified(self.tail((x - mean) / (deviation + 1e-5)))


@case("batch_norm_untracked", "mixing", "BatchNorm2d(track_running_stats=False)", IMAGES, STAGES, must_refuse=MIXED)
class BatchNormUntracked(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(12, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.classified(self.tail(self.norm(self.body(self.stem(x)))))


@case(
    "contrastive_softmax", "mixing", "a softmax over the other samples of the batch", IMAGES, STAGES, must_refuse=MIXED
)
class ContrastiveSoftmax(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        z = self.tail(self.body(self.stem(x))).mean((2, 3))
        similar = (F.normalize(z, dim=1) @ F.normalize(z, dim=1).t() / 0.1).softmax(1)
        return self.fc(similar @ z)


@case("sorted_batch", "mixing", "the batch sorted before the cut, restored after it", IMAGES, STAGES)
class SortedBatch(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        order = x.mean((1, 2, 3)).argsort()
        x = self.body(self.stem(x[order]))
        return self.classified(self.tail(x)[order.argsort()])


@case("sorted_within_stage", "mixing", "the batch sorted and restored behind the cut", IMAGES, STAGES)
class SortedWithinStage(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        order = x.mean((1, 2, 3)).argsort()
        return self.classified(self.tail(x[order])[order.argsort()])


@case("minus_batch_mean", "mixing", "x - x.mean(0)", IMAGES, STAGES, must_refuse=MIXED)
class MinusBatchMean(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = self.tail(self.body(self.stem(x)))
        return self.classified(x - x.mean(0))


@case("over_batch_maximum", "mixing", "x / x.abs().max()", IMAGES, STAGES, must_refuse=MIXED)
class OverBatchMaximum(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = self.tail(self.body(self.stem(x)))
        return self.classified(x / x.abs().max())


@case("batch_mean_first", "mixing", "x - x.mean(0) before the first exit", IMAGES, STAGES, must_refuse=MIXED)
class BatchMeanFirst(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


@case("batch_attention", "mixing", "attention with the batch as the sequence", IMAGES, STAGES, must_refuse=MIXED)
class BatchAttention(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(16)

    def forward(self, x: Tensor) -> Tensor:
        z = self.tail(self.body(self.stem(x))).mean((2, 3))
        return self.fc(z + self.attention(z[None])[0])


# 4. Tensors changed in place.


def in_place_head(shape: tuple[int, ...], *, inplace: bool = True) -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=inplace), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(shape[0], CLASSES))


@case(
    "head_in_place", "in place", "a head of one's own that starts with nn.ReLU(inplace=True)", IMAGES, STAGES,
    arguments={"head": in_place_head},
)  # fmt: skip
class HeadInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.tail = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3), nn.Conv2d(12, 16, 3)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(torch.tanh(self.stem(x)))
        return self.fc(torch.tanh(self.tail(torch.tanh(x))).mean((2, 3)))


@case("skip_alias", "in place", "skip = x; x += f(x), so skip changes too", IMAGES, STAGES, others=LARGER, trains=False)
class SkipAlias(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.same = conv(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skip = x
        x += self.same(x)
        x = self.body(x + skip)
        return self.classified(self.tail(x))


@case(
    "alias_across_cut", "in place", "a skip alive across the cut, changed through its alias", IMAGES, STAGES,
    trains=False,
)  # fmt: skip
class AliasAcrossCut(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.same = conv(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skip = x[:, :4]
        y = self.body(x)
        x += 1.0
        return self.classified(self.tail(self.same(y) + skip.mean((1, 2, 3), keepdim=True)))


@case("view_alias", "in place", "y = x.view(B, -1) carried, x changed in place later", IMAGES, STAGES, trains=False)
class ViewAlias(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12 * 8 * 8, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = nn.functional.max_pool2d(x, 2)
        x = torch.cat([x, x[:, :4]], 1)
        flat = x.view(x.size(0), -1)
        y = self.body(x[:, :8])
        x *= 0.5
        return self.fc(self.tail(y).mean((2, 3)) + self.gate(flat))


@case("relu_after_cut", "in place", "F.relu_ on the features behind the cut", IMAGES, STAGES, others=LARGER)
class ReluAfterCut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.tail = (nn.Conv2d(a, b, 3, 2, 1) for a, b in ((3, 8), (8, 12), (12, 16)))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.stem(x))
        x = F.relu_(self.body(x))
        return self.fc(F.relu_(self.tail(x)).mean((2, 3)))


@case("in_place_block", "in place", "blocks that start with nn.ReLU(inplace=True) and add their input", IMAGES, STAGES)
class InPlaceBlock(nn.Module):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layers(x)

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.stem, self.body, self.tail = nn.Conv2d(3, 8, 3), self.Block(), self.Block(), self.Block()
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.tail(self.body(self.stem(self.conv(x)))).mean((2, 3)))


@case("slice_assignment", "in place", "x[:, :2] = 0 and x[..., 0] += 1", IMAGES, STAGES, others=LARGER, trains=False)
class SliceAssignment(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x[:, :2] = 0
        x = self.body(x)
        x[..., 0] += 1
        return self.classified(self.tail(x))


@case("input_in_place", "in place", "the input normalised in place", IMAGES, STAGES, trains=False)
class InputInPlace(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x.sub_(0.5).div_(0.25)
        return super().forward(x)


# 5. Masks and lengths.


def encoder_case(
    name: str, after: Sequence[str], *, with_mask: bool = False, **expected: Any
) -> Callable[[Make], Make]:
    """Register a text encoder, attached with an example without a mask and given one later, or with one at once."""
    plain = named(input_ids=tokens(10))
    masked = named(input_ids=tokens(10), attention_mask=padding_mask(10))
    if with_mask:
        longer = {"14 tokens": named(input_ids=tokens(14), attention_mask=padding_mask(14))}
        return case(
            name, "masks", "attached with attention_mask", masked, after, others=longer, logits=named_logits,
            padded=padded_texts, **expected,
        )  # fmt: skip
    return case(
        name, "masks", "attached without attention_mask, given one later", plain, after,
        others={"14 tokens": named(input_ids=tokens(14)), "6 tokens": named(input_ids=tokens(6))},
        extras={"attention_mask": masked}, logits=named_logits, needs="transformers", **expected,
    )  # fmt: skip


def named_logits(output: Any) -> Tensor:
    return output.logits


def padded_texts() -> tuple[Batch, Batch]:
    """Return texts of six tokens, alone and padded to ten."""
    ids = tokens(6)(4)
    alone = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return alone, {name: F.pad(part, (0, 4)) for name, part in alone.items()}


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 40, "num_labels": CLASSES, "pad_token_id": 0,
}  # fmt: skip


def text_classifier(kind: str, **settings: Any) -> nn.Module:
    """Return a sequence classifier of transformers with random weights."""
    library = importlib.import_module("transformers")
    config = getattr(library, f"{kind}Config")(**settings)
    return getattr(library, f"{kind}ForSequenceClassification")(config)


def layers(path: str) -> list[str]:
    return [f"{path}.0", f"{path}.1"]


@encoder_case("bert_with_mask", layers("bert.encoder.layer"), with_mask=True)
@encoder_case("bert", layers("bert.encoder.layer"), widths=(16, 16))
def bert() -> nn.Module:
    return text_classifier("Bert", **SMALL)


@case(
    "bert_segments", "masks", "attached without token_type_ids, given pairs of texts later",
    named(input_ids=tokens(10), attention_mask=padding_mask(10)), layers("bert.encoder.layer"),
    extras={
        "token_type_ids": named(
            input_ids=tokens(10), attention_mask=padding_mask(10), token_type_ids=lambda n: (tokens(10)(n) > 20).long()
        ),
        "position_ids": named(
            input_ids=tokens(10), attention_mask=padding_mask(10),
            position_ids=lambda n: torch.arange(9, -1, -1).expand(n, -1),
        ),
    },
    logits=named_logits, needs="transformers",
)  # fmt: skip
def bert_segments() -> nn.Module:
    return bert()


@case(
    "bert_positional", "masks", "attached with a tensor of tokens, given a tuple with a mask later", tokens(10),
    layers("bert.encoder.layer"), others={"14 tokens": tokens(14)},
    extras={"attention_mask": several(tokens(10), padding_mask(10))}, logits=named_logits, needs="transformers",
)  # fmt: skip
def bert_positional() -> nn.Module:
    return bert()


@case(
    "bert_tuple", "masks", "attached with a tuple of tokens and a mask", several(tokens(10), padding_mask(10)),
    layers("bert.encoder.layer"), logits=named_logits, needs="transformers",
)  # fmt: skip
def bert_tuple() -> nn.Module:
    return bert()


@encoder_case("roberta", layers("roberta.encoder.layer"), widths=(16, 16))
def roberta() -> nn.Module:
    return text_classifier("Roberta", **SMALL)


@encoder_case("electra", layers("electra.encoder.layer"), widths=(16, 16))
def electra() -> nn.Module:
    return text_classifier("Electra", **SMALL, embedding_size=8)


@encoder_case("distilbert", layers("distilbert.transformer.layer"), widths=(16, 16))
def distilbert() -> nn.Module:
    small = {"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 32, "num_labels": CLASSES}
    return text_classifier("DistilBert", vocab_size=VOCABULARY, **small)


@encoder_case("mpnet", layers("mpnet.encoder.layer"), widths=(16, 16))
def mpnet() -> nn.Module:
    return text_classifier("MPNet", **SMALL)


@encoder_case("modernbert_with_mask", layers("model.layers"), with_mask=True)
@encoder_case("modernbert", layers("model.layers"), widths=(16, 16))
def modernbert() -> nn.Module:
    other = {"global_attn_every_n_layers": 2, "local_attention": 4}
    other |= {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return text_classifier("ModernBert", **SMALL, **other)


@encoder_case("xlnet", layers("transformer.layer"), widths=(16, 16))
def xlnet() -> nn.Module:
    small = {"d_model": 16, "n_layer": 3, "n_head": 2, "d_inner": 32, "num_labels": CLASSES}
    return text_classifier("XLNet", vocab_size=VOCABULARY, **small)


@encoder_case("funnel", ["funnel.encoder.blocks.0.0", "funnel.encoder.blocks.1.0"])
def funnel() -> nn.Module:
    small: dict[str, Any] = {"block_sizes": [1, 1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32}
    return text_classifier("Funnel", vocab_size=VOCABULARY, num_labels=CLASSES, **small)


def padded_with(name: str) -> Callable[[], tuple[Batch, Batch]]:
    """Return a function that makes texts of six tokens, alone and padded to ten; the mask is True at padding."""

    def make() -> tuple[Batch, Batch]:
        ids = tokens(6)(4)
        alone = {"ids": ids, name: torch.zeros(4, 6, dtype=torch.bool)}
        return alone, {"ids": F.pad(ids, (0, 4)), name: F.pad(alone[name], (0, 4), value=True)}

    return make


@case(
    "transformer_encoder_with_mask", "masks", "nn.TransformerEncoder, src_key_padding_mask True at padding",
    named(ids=tokens(10), src_key_padding_mask=hidden_mask(10)), layers("encoder.layers"),
    others={"14 tokens": named(ids=tokens(14), src_key_padding_mask=hidden_mask(14))}, widths=(16, 16),
    padded=padded_with("src_key_padding_mask"),
)  # fmt: skip
@case(
    "transformer_encoder", "masks", "nn.TransformerEncoder attached without a mask, given one later",
    named(ids=tokens(10)), layers("encoder.layers"), others={"14 tokens": named(ids=tokens(14))},
    extras={"src_key_padding_mask": named(ids=tokens(10), src_key_padding_mask=hidden_mask(10))}, widths=(16, 16),
)  # fmt: skip
class EncoderWithPadding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        x = self.encoder(self.embed(ids), src_key_padding_mask=src_key_padding_mask)
        return self.fc(x[:, 0])


@case(
    "encoder_with_lengths", "masks", "an encoder with an input of lengths",
    named(ids=tokens(10), lengths=lengths_up_to(10)), ["first", "second"],
    others={"14 tokens": named(ids=tokens(14), lengths=lengths_up_to(14))}, widths=(16, 16),
)  # fmt: skip
class EncoderWithLengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.first, self.second, self.third = (TransformerBlock(16) for _ in range(3))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        read = torch.arange(ids.size(1), device=ids.device) < lengths[:, None]
        bias = torch.zeros_like(read, dtype=torch.float).masked_fill(~read, -1e9)[:, None, None]
        x = self.third(self.second(self.first(self.embed(ids), bias), bias), bias)
        return self.fc((x * read[..., None]).sum(1) / read.sum(1, keepdim=True))


@case(
    "attention_mask_inverted", "masks", "an attention_mask that is True at padding",
    named(ids=tokens(10), attention_mask=hidden_mask(10)), ["first", "second"], widths=(16, 16),
    padded=padded_with("attention_mask"),
)  # fmt: skip
class InvertedMask(EncoderWithLengths):
    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        bias = attention_mask[:, None, None] * -1e9
        x = self.third(self.second(self.first(self.embed(ids), bias), bias), bias)
        read = ~attention_mask
        return self.fc((x * read[..., None]).sum(1) / read.sum(1, keepdim=True))


@case(
    "padding_token", "masks", "a mask made of the tokens: ids != 0", named(ids=tokens(10)), ["first", "second"],
    others={"14 tokens": named(ids=tokens(14))}, widths=(16, 16),
)  # fmt: skip
class PaddingToken(EncoderWithLengths):
    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        read = ids != 0
        bias = torch.zeros(ids.shape, device=ids.device).masked_fill(~read, -1e9)[:, None, None]
        x = self.third(self.second(self.first(self.embed(ids), bias), bias), bias)
        return self.fc((x * read[..., None]).sum(1) / read.sum(1, keepdim=True))


# 6. Axes: what is a channel, what is time or space.


@case(
    "ecg_conv1d", "axes", "Conv1d on 12-lead signals (B, C, T)", floats(12, 64), ["block1", "block2"],
    others={"96 samples": floats(12, 96)}, widths=(16, 24),
)  # fmt: skip
class EcgNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2, self.block3 = conv1d(12, 16, stride=2), conv1d(16, 24, stride=2), conv1d(24, 24)
        self.fc = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.block3(self.block2(self.block1(x))).mean(-1))


@case(
    "audio_wave", "axes", "strided Conv1d on a raw wave (B, T)", floats(400), ["block1", "block2"],
    others={"560 samples": floats(560)}, widths=(8, 16),
)  # fmt: skip
class AudioWave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2 = conv1d(1, 8, 9, 4), conv1d(8, 16, 9, 4)
        self.block3, self.fc = conv1d(16, 24, 5, 2), nn.Linear(24, CLASSES)

    def forward(self, wave: Tensor) -> Tensor:
        x = self.block3(self.block2(self.block1(wave.unsqueeze(1))))
        return self.fc(F.adaptive_max_pool1d(x, 1).squeeze(-1))


@case(
    "conv1d_square", "axes", "Conv1d features with as many channels as steps", floats(4, 16), ["block1", "block2"],
    others={"24 steps": floats(4, 24)}, widths=(16, 16),
)  # fmt: skip
class SquareConv1d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2, self.block3 = conv1d(4, 16), conv1d(16, 16), conv1d(16, 24)
        self.fc = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.block3(self.block2(self.block1(x))).mean(-1))


@case(
    "pointnet", "axes", "PointNet on (B, 3, N), maximum over points", floats(3, 40), ["mlp1", "mlp2"],
    others={"60 points": floats(3, 60)}, widths=(16, 24),
)  # fmt: skip
class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transform = nn.Sequential(conv1d(3, 8, 1), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(8, 9))
        self.mlp1, self.mlp2, self.mlp3 = conv1d(3, 16, 1), conv1d(16, 24, 1), conv1d(24, 32, 1)
        self.fc = nn.Linear(32, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        turn = self.transform(points).view(-1, 3, 3) + torch.eye(3, device=points.device)
        points = torch.bmm(points.transpose(2, 1), turn).transpose(2, 1)
        return self.fc(torch.max(self.mlp3(self.mlp2(self.mlp1(points))), 2)[0])


@case(
    "wide_image_dict", "axes", "an image of 32 x 128 pixels given as a dict", named(image=floats(3, 32, 128)), STAGES,
    others={"32 x 96": named(image=floats(3, 32, 96))}, widths=(8, 12),
)  # fmt: skip
class WideImage(Pipeline):
    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image)


@case(
    "channels_equal_height", "axes", "maps of 8 channels and 8 x 12 pixels given as a dict",
    named(image=floats(3, 8, 12)), STAGES, others={"12 x 12": named(image=floats(3, 12, 12))}, widths=(8, 12),
)  # fmt: skip
class ChannelsEqualHeight(WideImage):
    pass


@case(
    "spectrogram", "axes", "Conv2d on (B, 1, mel, time)", floats(1, 20, 50), STAGES,
    others={"20 x 70": floats(1, 20, 70)}, widths=(8, 12),
)  # fmt: skip
class Spectrogram(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(1, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tail(self.body(self.stem(x.clamp(min=1e-5).log())))
        return self.fc(x.mean(2).amax(2))


class WindowBlock(nn.Module):
    """Attention in windows of 4 x 4 of a (B, H, W, C) map."""

    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.shift, self.norm, self.attention = shift, nn.LayerNorm(width), Attention(width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        y = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2))
        y = y.view(batch, height // 4, 4, width // 4, 4, channels).permute(0, 1, 3, 2, 4, 5)
        y = self.attention(y.reshape(-1, 16, channels))
        y = y.view(batch, height // 4, width // 4, 4, 4, channels).permute(0, 1, 3, 2, 4, 5)
        x = x + torch.roll(y.reshape(batch, height, width, channels), (self.shift, self.shift), (1, 2))
        return x + self.mlp(x)


@case(
    "swin_nhwc", "axes", "windows of a (B, H, W, C) map, as in Swin", floats(3, 16, 32), ["block1", "block2"],
    others={"32 x 32": floats(3, 32, 32)}, widths=(24, 24),
)  # fmt: skip
class SwinLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 24, 2, 2)
        self.block1, self.block2, self.block3 = WindowBlock(24, 0), WindowBlock(24, 2), WindowBlock(24, 0)
        self.fc = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).permute(0, 2, 3, 1)
        return self.fc(self.block3(self.block2(self.block1(x))).mean((1, 2)))


@case(
    "nhwc_input", "axes", "an image with channels last, moved in forward", floats(16, 16, 3), STAGES,
    others={"24 x 24": floats(24, 24, 3)}, widths=(8, 12),
)  # fmt: skip
class ChannelsLastInput(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 3, 1, 2).contiguous())


class CausalBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        self.padding = 2 * dilation
        self.conv = nn.Conv1d(inputs, outputs, 3, padding=self.padding, dilation=dilation)
        self.down = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x)[:, :, : -self.padding] + self.down(x))


@case(
    "tcn", "axes", "dilated causal convolutions, the last step classified", floats(6, 30), ["block1", "block2"],
    others={"40 steps": floats(6, 40)}, widths=(16, 16),
)  # fmt: skip
class TemporalConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2, self.block3 = CausalBlock(6, 16, 1), CausalBlock(16, 16, 2), CausalBlock(16, 16, 4)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.block3(self.block2(self.block1(x)))[:, :, -1])


@case(
    "wav2vec_like", "axes", "a Conv1d stem, then transformer blocks on (B, T, C)", floats(1, 200), ["stem", "first"],
    others={"280 samples": floats(1, 280)}, widths=(16, 16),
)  # fmt: skip
@case(
    "wav2vec_like_blocks", "axes", "exits after transformer blocks that follow a Conv1d stem", floats(1, 200),
    ["first", "second"], others={"280 samples": floats(1, 280)}, widths=(16, 16),
)  # fmt: skip
class Wav2VecLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv1d(1, 8, 7, 4), conv1d(8, 16, 5, 2))
        self.position = nn.Conv1d(16, 16, 9, padding=4, groups=4)
        self.first, self.second, self.third = (TransformerBlock(16) for _ in range(3))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, wave: Tensor) -> Tensor:
        x = self.stem(wave)
        x = (x + F.gelu(self.position(x))).transpose(1, 2)
        return self.fc(self.third(self.second(self.first(x))).mean(1))


@case(
    "video_conv3d", "axes", "Conv3d on (B, C, frames, H, W)", floats(3, 4, 12, 12), ["0", "3"],
    others={"8 frames": floats(3, 8, 12, 12)}, widths=(8, 16),
)  # fmt: skip
def video_conv3d() -> nn.Module:
    body = [nn.Conv3d(3, 8, 3, (1, 2, 2), 1), nn.BatchNorm3d(8), nn.ReLU(inplace=True), nn.Conv3d(8, 16, 3, 2, 1)]
    return nn.Sequential(*body, nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, CLASSES))


@case("tabular_mlp", "axes", "an MLP on (B, features)", floats(10), ["1", "4"], widths=(16, 16))
def tabular_mlp() -> nn.Module:
    body = [nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()]
    return nn.Sequential(*body, nn.Linear(16, CLASSES))


@case(
    "ft_transformer", "axes", "one token per feature and a class token", floats(10), ["first", "second"],
    widths=(16, 16),
)  # fmt: skip
class FeatureTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(10, 16)), nn.Parameter(torch.randn(10, 16))
        self.cls = nn.Parameter(torch.randn(1, 1, 16))
        self.first, self.second, self.third = (TransformerBlock(16) for _ in range(3))
        self.head = nn.Sequential(nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., None] * self.weight + self.bias
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        return self.head(self.third(self.second(self.first(x)))[:, 0])


# 7. Outputs: where the logits are.


@dataclass
class Output:
    features: Tensor
    logits: Tensor


class AuxiliaryOutput(NamedTuple):
    aux: Tensor
    logits: Tensor


class WithFeatures(Pipeline):
    """A network that computes features and logits, which subclasses return in their own form."""

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.tail(self.body(self.stem(x))).mean((2, 3))
        return features, self.fc(features)


@case("features_logits", "outputs", "return features, logits", IMAGES, STAGES, logits=lambda output: output[1])
class FeaturesLogits(WithFeatures):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.both(x)


@case("logits_features", "outputs", "return logits, features", IMAGES, STAGES, logits=lambda output: output[0])
class LogitsFeatures(WithFeatures):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features, logits = self.both(x)
        return logits, features


@case("dict_out", "outputs", "return {'features', 'out'}", IMAGES, STAGES, logits=lambda output: output["out"])
class DictOut(WithFeatures):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features, logits = self.both(x)
        return {"features": features, "out": logits}


@case("dict_logits", "outputs", "return {'features', 'logits'}", IMAGES, STAGES, logits=lambda output: output["logits"])
class DictLogits(WithFeatures):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features, logits = self.both(x)
        return {"features": features, "logits": logits}


@case("dataclass_output", "outputs", "return a dataclass", IMAGES, STAGES, logits=named_logits)
class DataclassOutput(WithFeatures):
    def forward(self, x: Tensor) -> Output:
        return Output(*self.both(x))


@case("namedtuple_aux", "outputs", "return a namedtuple (aux, logits)", IMAGES, STAGES, logits=named_logits)
class NamedTupleAux(WithFeatures):
    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> AuxiliaryOutput:
        x = self.body(self.stem(x))
        return AuxiliaryOutput(self.aux(x.mean((2, 3))), self.classified(self.tail(x)))


@case(
    "aux_in_training", "outputs", "return logits, and (logits, aux) in training", IMAGES, STAGES,
    logits=lambda output: output[0] if isinstance(output, tuple) else output,
)  # fmt: skip
class AuxInTraining(NamedTupleAux):
    def forward(self, x: Tensor) -> Any:
        x = self.body(self.stem(x))
        logits = self.classified(self.tail(x))
        return (logits, self.aux(x.mean((2, 3)))) if self.training else logits


@case(
    "aux_first_in_training", "outputs", "return logits, and [aux, logits] in training", IMAGES, STAGES,
    logits=lambda output: output[-1] if isinstance(output, list) else output,
)  # fmt: skip
class AuxFirstInTraining(NamedTupleAux):
    def forward(self, x: Tensor) -> Any:
        x = self.body(self.stem(x))
        logits = self.classified(self.tail(x))
        return [self.aux(x.mean((2, 3))), logits] if self.training else logits


case("single_tensor", "outputs", "return logits", IMAGES, STAGES, others=LARGER, widths=(8, 12))(Pipeline)


@case("list_of_one", "outputs", "return [logits]", IMAGES, STAGES, logits=lambda output: output[0])
class ListOfOne(WithFeatures):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.both(x)[1]]


@case(
    "equal_width_features", "outputs", "return embedding, logits of the same width", IMAGES, STAGES,
    logits=lambda output: output[1],
)  # fmt: skip
class EqualWidthFeatures(WithFeatures):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, CLASSES)
        self.last = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        embedding = self.embed(self.both(x)[0])
        return embedding, self.last(embedding)


@case("squeezed_output", "outputs", "x.squeeze(), which also drops a batch of one", IMAGES, STAGES)
class SqueezedOutput(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.tail(self.body(self.stem(x))), 1)
        return self.fc(x.squeeze())


# 8. Training.


@case("no_grad_stem", "training", "with torch.no_grad(): x = self.stem(x)", IMAGES, STAGES, others=LARGER)
class NoGradStem(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.stem(x)
        return self.classified(self.tail(self.body(x)))


@case("no_grad_inside", "training", "a target made under torch.no_grad() inside a stage", IMAGES, STAGES)
class NoGradInside(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = conv(12, 16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        with torch.no_grad():
            target = self.teacher(x * 2)
        return self.classified(self.tail(x) + target)


@case("detached", "training", "x.detach() stops the gradient", IMAGES, STAGES, others=LARGER)
class Detached(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        return self.classified(self.tail(self.body(self.stem(x)).detach()))


@case("running_average", "training", "self.average = 0.9 * self.average + 0.1 * mean in training", IMAGES, STAGES)
class RunningAverage(Pipeline):
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.mean((0, 2, 3)).detach()
        return self.classified(self.tail(x - self.average[:, None, None]))


@case("running_average_in_place", "training", "self.average.mul_(0.9).add_(0.1 * mean) in training", IMAGES, STAGES)
class RunningAverageInPlace(RunningAverage):
    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(0.1 * x.mean((0, 2, 3)))
        return self.classified(self.tail(x - self.average[:, None, None]))


@case("step_counter", "training", "self.steps += 1, and a warm-up that reads it", IMAGES, STAGES)
class StepCounter(Pipeline):
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        if self.training:
            self.steps += 1
            x = x * (self.steps / 10).clamp(max=1.0)
        return self.classified(self.tail(x))


@case("stochastic_depth", "training", "random.random() decides whether a block runs", IMAGES, STAGES)
class StochasticDepth(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.block = BasicBlock(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        if not self.training or random.random() < 0.5:
            x = x + self.block(x)
        return self.classified(self.tail(x))


@case("frozen_stage", "training", "requires_grad_(False) on a stage with BatchNorm", IMAGES, STAGES)
def frozen_stage() -> nn.Module:
    network = Pipeline()
    network.body.requires_grad_(False)
    return network


@case("train_override", "training", "train() keeps BatchNorm in evaluation mode", IMAGES, STAGES)
class TrainOverride(Pipeline):
    def train(self, mode: bool = True) -> "TrainOverride":
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


@case("dropout", "training", "nn.Dropout and F.dropout(training=self.training)", IMAGES, STAGES, others=LARGER)
class WithDropout(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.body(self.stem(x)))
        return self.classified(F.dropout(self.tail(x), 0.3, training=self.training))


@case(
    "dropout_always", "training", "F.dropout(x, 0.5), random in evaluation mode too", IMAGES, STAGES, must_refuse=RANDOM
)
class DropoutAlways(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        return self.classified(F.dropout(self.tail(self.body(self.stem(x))), 0.5))


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x / 0.7 * torch.rand(x.shape[0], 1, 1, 1, device=x.device).add_(0.7).floor_()


@case("drop_path", "training", "DropPath drops residual branches per sample", IMAGES, STAGES, others=LARGER)
class WithDropPath(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.drop_path = BasicBlock(12, 12), DropPath()

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        return self.classified(self.tail(x + self.drop_path(self.block(x))))


@case("input_noise", "training", "x + torch.randn_like(x) in training", IMAGES, STAGES, others=LARGER)
class InputNoise(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + 0.1 * torch.randn_like(x)
        return super().forward(x)


@case("unused_parameter", "training", "a head that forward never calls", IMAGES, STAGES, others=LARGER)
class UnusedParameter(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(16, 8)


# 9. Tasks.


@case(
    "multi_label",
    "tasks",
    "a network for several labels: torch.sigmoid at the end",
    IMAGES,
    STAGES,
    must_refuse="several labels may be right",
)
class MultiLabel(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(x))


@case("softmax_output", "tasks", "softmax at the end, so the output is probabilities", IMAGES, STAGES)
class SoftmaxOutput(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(super().forward(x), dim=1)


@case("log_softmax_output", "tasks", "log_softmax at the end", IMAGES, STAGES)
class LogSoftmaxOutput(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(super().forward(x), dim=1)


@case(
    "one_logit", "tasks", "one logit, for BCEWithLogitsLoss", IMAGES, STAGES, classes=1,
    must_refuse="one logit has no class to predict",
)  # fmt: skip
class OneLogit(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 1)


@case(
    "regression", "tasks", "one number per sample, (B,)", IMAGES, STAGES, classes=1,
    must_refuse="a number is not a class",
)  # fmt: skip
class Regression(OneLogit):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze(1)


@case(
    "segmentation", "tasks", "logits of every pixel, (B, C, H, W)", IMAGES, STAGES,
    must_refuse="a sample has many classes",
)  # fmt: skip
class Segmentation(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.out(self.tail(self.body(self.stem(x))))
        return F.interpolate(x, scale_factor=4.0)


@case(
    "detection", "tasks", "boxes and scores of every anchor", IMAGES, STAGES,
    logits=lambda output: output["scores"], must_refuse="a sample has many boxes",
)  # fmt: skip
class Detection(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.boxes, self.scores = nn.Conv2d(16, 4, 1), nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.tail(self.body(self.stem(x)))
        return {"boxes": self.boxes(x).flatten(2), "scores": self.scores(x).flatten(2)}


@case(
    "sequence_labelling", "tasks", "logits of every step, (B, T, C)", tokens(10), ["first", "second"],
    must_refuse="a sample has many classes",
)  # fmt: skip
class SequenceLabelling(ArangePositions):
    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(self.third(self.second(self.first(self.embed(ids)))))


# 10. Others.


@case(
    "lstm_batch_first", "others", "nn.LSTM(batch_first=True), the last step", floats(9, 6), ["first", "second"],
    others={"12 steps": floats(12, 6)}, widths=(12, 16),
)  # fmt: skip
class LstmBatchFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(6, 12, batch_first=True), nn.LSTM(12, 16, batch_first=True)
        self.third, self.fc = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.first(x)
        x, _ = self.second(x)
        _, (hidden, _) = self.third(x)
        return self.fc(hidden[-1])


@case(
    "lstm_time_first", "others", "nn.LSTM on (T, B, C), transposed in forward", floats(9, 6), ["first", "second"],
    others={"12 steps": floats(12, 6)}, widths=(12, 16),
)  # fmt: skip
class LstmTimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.LSTM(6, 12), nn.LSTM(12, 16), nn.LSTM(16, 16)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        x = self.first(x)[0]
        x = self.second(x)[0]
        return self.fc(self.third(x)[0][-1])


@case(
    "gru_hidden_passed", "others", "the hidden state of one GRU starts the next", floats(9, 6), ["first", "second"],
    others={"12 steps": floats(12, 6)}, widths=(12, 12),
)  # fmt: skip
class GruHiddenPassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRU(6, 12, batch_first=True), nn.GRU(12, 12, batch_first=True)
        self.third, self.fc = nn.GRU(12, 12, batch_first=True), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x, hidden = self.first(x)
        x, hidden = self.second(x, hidden)
        return self.fc(self.third(x, hidden)[0].mean(1))


@case(
    "lstm_packed", "others", "pack_padded_sequence with an input of lengths",
    named(ids=tokens(9), lengths=lengths_up_to(9)), ["embed", "norm"],
    others={"12 tokens": named(ids=tokens(12), lengths=lengths_up_to(12))},
)  # fmt: skip
class LstmPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, 12), nn.LayerNorm(12)
        self.lstm, self.fc = nn.LSTM(12, 16, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.fc(hidden[-1])


@case("siamese", "others", "two images through one network", several(IMAGES, IMAGES), ["joint.0", "joint.2"])
class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(conv(3, 8, 2), conv(8, 12, 2))
        self.joint = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = self.encoder(left).mean((2, 3)), self.encoder(right).mean((2, 3))
        return self.joint(torch.cat([(a - b).abs(), a * b], 1))


@case(
    "image_and_table", "others", "a table beside an image, read at the end",
    named(image=IMAGES, table=floats(6)), STAGES,
    others={"24 x 24": named(image=floats(3, 24, 24), table=floats(6))}, widths=(8, 12),
)  # fmt: skip
class ImageAndTable(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Linear(6, 16), nn.Linear(32, CLASSES)

    def forward(self, image: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        x = self.tail(self.body(self.stem(image))).mean((2, 3))
        return self.fc(torch.cat([x, F.relu(self.table(table))], 1))


@case(
    "optional_input", "others", "an optional second input that the example does not have", named(image=IMAGES), STAGES,
    extras={"table": named(image=IMAGES, table=floats(16))},
)  # fmt: skip
class OptionalInput(Pipeline):
    def forward(self, image: Tensor, table: Tensor | None = None) -> Tensor:
        x = self.tail(self.body(self.stem(image))).mean((2, 3))
        return self.fc(x if table is None else x + table)


@case(
    "optional_positional", "others", "an optional second input given in a tuple, attached with a tensor", IMAGES,
    STAGES, extras={"table": several(IMAGES, floats(16))},
)  # fmt: skip
class OptionalPositional(OptionalInput):
    pass


@case("weight_tying", "others", "the output layer shares the weights of the embedding", tokens(10), ["first", "second"])
class WeightTying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.first, self.second, self.third = (TransformerBlock(16) for _ in range(3))
        self.decoder = nn.Linear(16, VOCABULARY, bias=False)
        self.decoder.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(self.third(self.second(self.first(self.embed(ids)))).mean(1))[:, :CLASSES]


@case("shared_module", "others", "one block called twice, across the cut", IMAGES, STAGES, others=LARGER)
class SharedModule(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Conv2d(3, 3, 3, 1, 1)
        self.to_image = nn.Conv2d(12, 3, 1)
        self.tail = conv(3, 16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(self.shared(x)))
        return self.classified(self.tail(self.shared(self.to_image(x))))


@case("recurrent_block", "others", "one block called four times, an exit after it", IMAGES, ["block"], others=LARGER)
class RecurrentBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.fc = conv(3, 8), BasicBlock(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(4):
            x = self.block(x)
        return self.fc(x.mean((2, 3)))


@case("data_parallel", "others", "nn.DataParallel around the network", IMAGES, ["module.stem", "module.body"])
def data_parallel() -> nn.Module:
    return nn.DataParallel(Pipeline())


@case("jit_script", "others", "torch.jit.script of the network", IMAGES, ["0", "1"])
def jit_script() -> nn.Module:
    return torch.jit.script(adaptive_pool())


@case("jit_trace", "others", "torch.jit.trace of the network", IMAGES, ["0", "1"])
def jit_trace() -> nn.Module:
    return torch.jit.trace(adaptive_pool().eval(), torch.randn(2, 3, 16, 16))  # type: ignore[no-untyped-call]


@case("jit_script_inside", "others", "one block under torch.jit.script", IMAGES, STAGES, others=LARGER)
def jit_script_inside() -> nn.Module:
    network = Pipeline()
    network.add_module("tail", torch.jit.script(network.tail))
    return network


@case("lora_peft", "others", "peft's LoRA around the network", IMAGES, "auto", needs="peft")
def lora_peft() -> nn.Module:
    peft = importlib.import_module("peft")
    return peft.get_peft_model(Pipeline(), peft.LoraConfig(target_modules=["fc"], r=2))


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 0.5


@case("lora_own", "others", "hand-written LoRA around linear layers", tokens(10), ["first", "second"])
def lora_own() -> nn.Module:
    network = ArangePositions()
    for block in (network.first, network.second, network.third):
        block.attention.add_module("qkv", LoraLinear(block.attention.qkv))
    return network


@case(
    "dynamic_quantised",
    "others",
    "quantize_dynamic on linear layers",
    floats(10),
    ["1", "4"],
    trains=False,
    must_refuse=MIXED,
)
def dynamic_quantised() -> nn.Module:
    quantize: Any = torch.ao.quantization.quantize_dynamic
    return quantize(tabular_mlp().eval(), {nn.Linear}, torch.qint8)


@case(
    "clip_vision", "others", "transformers' CLIP vision tower and a linear classifier", IMAGES,
    layers("tower.encoder.layers"), widths=(16, 16), needs="transformers",
)  # fmt: skip
class ClipClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        library = importlib.import_module("transformers")
        small = {"hidden_size": 16, "intermediate_size": 32, "image_size": 16, "patch_size": 4}
        config = library.CLIPVisionConfig(**small, num_hidden_layers=3, num_attention_heads=2)
        self.tower: nn.Module = library.CLIPVisionModel(config)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.fc(self.tower(pixel_values=pixels).pooler_output)


@case(
    "timm_fine_tuned", "others", "a network of timm with a new classifier", floats(3, 32, 32), "auto",
    others={"48 x 48": floats(3, 48, 48)}, needs="timm",
)  # fmt: skip
def timm_fine_tuned() -> nn.Module:
    import timm

    network: Any = timm.create_model("test_resnet")
    network.fc = nn.Linear(network.num_features, CLASSES)
    return network


@case(
    "timm_features", "others", "timm with num_classes=0 in a module of one's own", floats(3, 32, 32),
    ["backbone.stages.0", "backbone.stages.1"], needs="timm",
)  # fmt: skip
class TimmFeatures(nn.Module):
    def __init__(self) -> None:
        import timm

        super().__init__()
        backbone: Any = timm.create_model("test_convnext", num_classes=0)
        self.backbone = backbone
        self.fc = nn.Sequential(nn.Dropout(0.2), nn.Linear(backbone.num_features, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.backbone(x))


class MixtureOfExperts(nn.Module):
    """The two best experts of each token, found with a mask per expert."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            share = (weights * (chosen == index)).sum(-1, keepdim=True)
            out = out + share * expert(x)
        return out


class SparseMixtureOfExperts(MixtureOfExperts):
    """The same, where an expert runs on the tokens that chose it only."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == index)
            if rows.numel():
                out[rows] += weights[rows, place, None] * expert(flat[rows])
        return out.view_as(x)


@case(
    "moe_dense", "others", "top-2 experts per token, all experts run", floats(8, 12), ["first", "second"],
    widths=(12, 12),
)  # fmt: skip
class MoeDense(nn.Module):
    kind: type[MixtureOfExperts] = MixtureOfExperts

    def __init__(self) -> None:
        super().__init__()
        self.first, self.moe1, self.second = TransformerBlock(12), self.kind(12), TransformerBlock(12)
        self.moe2, self.fc = self.kind(12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.second(x + self.moe1(x))
        return self.fc((x + self.moe2(x)).mean(1))


@case("moe_sparse", "others", "top-2 experts per token, tokens gathered per expert", floats(8, 12), ["first", "second"])
class MoeSparse(MoeDense):
    kind = SparseMixtureOfExperts


@case("moe_rare_expert", "others", "16 experts, most of them without a token of the example", floats(2, 12), ["first"])
class MoeRareExpert(SparseMixtureOfExperts):
    def __init__(self) -> None:
        super().__init__(12, 16)
        self.first, self.fc = TransformerBlock(12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.fc((x + super().forward(x)).mean(1))


@case(
    "moe_capacity",
    "others",
    "experts with room for half of the batch's tokens",
    floats(8, 12),
    ["first", "second"],
    must_refuse=MIXED,
)
class MoeCapacity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.router = TransformerBlock(12), TransformerBlock(12), nn.Linear(12, 1)
        self.expert, self.fc = nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        flat = x.reshape(-1, x.shape[-1])
        best = self.router(flat).squeeze(-1).topk(flat.shape[0] // 2).indices
        flat = flat.index_add(0, best, self.expert(flat[best]))
        return self.fc(flat.view_as(x).mean(1))


@case("checkpointed", "others", "torch.utils.checkpoint around early blocks", IMAGES, STAGES, others=LARGER)
class Checkpointed(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.early = BasicBlock(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = checkpoint(self.early, x, use_reentrant=False)
        return self.classified(self.tail(self.body(x)))


@case("fft_block", "others", "complex numbers: rfft2, a complex filter, irfft2", IMAGES, STAGES, widths=(8, 12))
class FftBlock(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(12, 8, 5, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        spectrum = torch.fft.rfft2(x, norm="ortho") * torch.view_as_complex(self.filter)
        return self.classified(self.tail(torch.fft.irfft2(spectrum, s=x.shape[-2:], norm="ortho")))


@case(
    "message_passing", "others", "a graph with a dense adjacency input",
    named(nodes=floats(7, 6), adjacency=lambda n: (torch.rand(n, 7, 7) > 0.5).float()), ["first", "second"],
    others={"9 nodes": named(nodes=floats(9, 6), adjacency=lambda n: (torch.rand(n, 9, 9) > 0.5).float())},
    widths=(12, 12),
)  # fmt: skip
class MessagePassing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 16)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        share = adjacency / adjacency.sum(-1, keepdim=True).clamp(min=1)
        x = F.relu(share @ self.first(nodes))
        x = F.relu(share @ self.second(x)) + x
        return self.fc(F.relu(share @ self.third(x)).sum(1))


@case(
    "one_graph", "others", "one adjacency for the whole batch, an input of (N, N)",
    lambda n: (torch.randn(n, 7, 6), torch.rand(7, 7)), ["first", "second"], widths=(12, 12),
)  # fmt: skip
class OneGraph(MessagePassing):
    pass


@case("hypernetwork", "others", "weights per sample, as a grouped convolution over the batch", IMAGES, STAGES)
class Hypernetwork(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(12, 16 * 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        batch, channels, height, width = x.shape
        kernels = self.weights(x.mean((2, 3))).view(batch * 16, channels, 1, 1)
        x = F.conv2d(x.reshape(1, batch * channels, height, width), kernels, groups=batch)
        return self.classified(x.view(batch, 16, height, width))


@case("spectral_norm", "others", "parametrizations.spectral_norm", IMAGES, STAGES, others=LARGER)
class SpectralNorm(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(12, 16, 3)), nn.ReLU())
        parametrizations.spectral_norm(self.fc)


@case("weight_norm", "others", "parametrizations.weight_norm", IMAGES, STAGES, others=LARGER)
class WeightNorm(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(12, 16, 3)), nn.ReLU())
        parametrizations.weight_norm(self.fc)


@case("weight_norm_by_hook", "others", "nn.utils.weight_norm, which sets the weight in a hook", IMAGES, STAGES)
class WeightNormByHook(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Sequential(nn.utils.weight_norm(nn.Conv2d(12, 16, 3)), nn.ReLU())


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


@case("weight_standardised", "others", "weights standardised in forward", IMAGES, STAGES, others=LARGER)
class WeightStandardised(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Standardised(8, 12, 3, 2, 1), nn.GroupNorm(4, 12), nn.ReLU(inplace=True))


class RoundStraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return torch.round(4 * x) / 4

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clamp(-0.01, 0.01)


@case("autograd_function", "others", "a torch.autograd.Function with its own gradient", IMAGES, STAGES, others=LARGER)
class CustomAutograd(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        x = RoundStraightThrough.apply(x)
        return self.classified(self.tail(x))


@case("autograd_function_early", "others", "a torch.autograd.Function before the first exit", IMAGES, STAGES)
class CustomAutogradEarly(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(RoundStraightThrough.apply(self.scaled(x)))

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Conv2d(3, 3, 1)


@case(
    "einsum_attention", "others", "attention written with torch.einsum", floats(8, 12), ["first", "second"],
    others={"11 tokens": floats(11, 12)}, widths=(12, 12),
)  # fmt: skip
class EinsumAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.query, self.key, self.value = (nn.Parameter(torch.randn(2, 12, 6)) for _ in range(3))
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.second(F.gelu(self.first(x))))
        q, k, v = (torch.einsum("btc,hcd->bhtd", x, weight) for weight in (self.query, self.key, self.value))
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(q.shape[-1])
        out = torch.einsum("bhts,bhsd->bthd", scores.softmax(-1), v).flatten(2)
        return self.fc(out.mean(1))


@case("float16_buffer", "others", "a float16 buffer in a float32 network", IMAGES, STAGES, others=LARGER)
class Float16Buffer(Pipeline):
    codebook: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codebook", torch.randn(1, 12, 1, 1).half())

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        return self.classified(self.tail(x + self.codebook.to(x.dtype) * 0.5))


@case("half_inside", "others", "one stage computed in bfloat16", IMAGES, STAGES, others=LARGER)
class HalfInside(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Sequential(nn.Conv2d(12, 16, 3), nn.ReLU()).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x)).to(torch.bfloat16)
        return self.classified(self.tail(x).float())


@case("autocast_inside", "others", "forward under torch.autocast", IMAGES, STAGES, others=LARGER)
class AutocastInside(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.tail(self.body(self.stem(x)))
        return self.classified(x.float())


@case("double_network", "others", "a float64 network that converts its input", IMAGES, STAGES, others=LARGER)
class DoubleNetwork(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double()).float()


@case("frozen_backbone", "others", "a frozen backbone and a trainable head", IMAGES, ["backbone.0", "backbone.1"])
class FrozenBackbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(conv(3, 8), conv(8, 12, 2), conv(12, 16, 2))
        self.backbone.requires_grad_(False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x).mean((2, 3)))


@case("two_branches", "others", "the mean of two branches on one stem", IMAGES, ["stem", "left.0"], others=LARGER)
class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8)
        self.left, self.right = nn.Sequential(conv(8, 12, 2), conv(12, 16, 2)), conv(8, 16, 4)
        self.fc1, self.fc2 = nn.Linear(16, CLASSES), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return (self.fc1(self.left(x).mean((2, 3))) + self.fc2(self.right(x).mean((2, 3)))) / 2


@case("functional_batch_norm", "others", "F.batch_norm with buffers of one's own", IMAGES, STAGES, others=LARGER)
class FunctionalBatchNorm(Pipeline):
    mean: Tensor
    var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(12))
        self.register_buffer("var", torch.rand(12) + 0.5)
        self.gain = nn.Parameter(torch.rand(12) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        x = F.batch_norm(x, self.mean, self.var, self.gain, training=self.training, momentum=0.1)
        return self.classified(self.tail(x))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(channels, channels // 4), nn.Linear(channels // 4, channels)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, _, _ = x.size()
        weights = torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3))), inplace=True)))
        return x * weights.view(batch, channels, 1, 1).expand_as(x)


@case("squeeze_excite", "others", "squeeze and excite with expand_as", IMAGES, STAGES, others=LARGER, widths=(8, 12))
class WithSqueezeExcite(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.excite = SqueezeExcite(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.classified(self.tail(self.excite(self.body(self.stem(x)))))


@case("grid_sample", "others", "offsets and F.grid_sample, as in deformable layers", IMAGES, STAGES, others=LARGER)
class GridSample(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.offsets = nn.Conv2d(12, 2, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        batch, _, height, width = x.shape
        rows, columns = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
        grid = torch.stack([columns, rows], -1).to(x).expand(batch, -1, -1, -1)
        grid = grid + 0.1 * torch.tanh(self.offsets(x)).permute(0, 2, 3, 1)
        return self.classified(self.tail(F.grid_sample(x, grid, align_corners=True)))


@case("vit_class_token", "others", "a ViT with a class token", IMAGES, ["first", "second"], widths=(16, 16))
class VitClassToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.cls = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.zeros(1, 1, 16))
        self.position = nn.Parameter(torch.zeros(1, 17, 16))
        self.first, self.second, self.third = (TransformerBlock(16) for _ in range(3))
        self.norm, self.fc = nn.LayerNorm(16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.repeat(x.shape[0], 1, 1), x), dim=1) + self.position
        return self.fc(self.norm(self.third(self.second(self.first(x))))[:, 0])


class MixerBlock(nn.Module):
    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_tokens = nn.Sequential(nn.Linear(number, 24), nn.GELU(), nn.Linear(24, number))
        self.over_channels = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norm2(x))


@case("mixer", "others", "an MLP-Mixer, as many tokens as channels", IMAGES, ["blocks.0", "blocks.1"], widths=(16, 16))
class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.blocks, self.fc = nn.Sequential(*(MixerBlock(16, 16) for _ in range(3))), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.patch(x).flatten(2).transpose(1, 2)).mean(1))


@case(
    "kwargs_forward", "others", "forward(self, **kwargs)", named(image=IMAGES, scale=floats(1)), STAGES,
    extras={"shift": named(image=IMAGES, scale=floats(1), shift=floats(1))},
)  # fmt: skip
class KwargsForward(Pipeline):
    def forward(self, **kwargs: Tensor) -> Tensor:  # type: ignore[override]
        x = self.body(self.stem(kwargs["image"])) * kwargs["scale"][:, :, None, None]
        logits = self.classified(self.tail(x))
        return logits + kwargs["shift"] * logits.flip(1) if "shift" in kwargs else logits


@case("list_input", "others", "one argument that is a list of tensors", lambda n: [IMAGES(n), IMAGES(n)], STAGES)
class ListInput(Pipeline):
    def forward(self, images: list[Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(torch.stack(images).mean(0))


@case(
    "nested_dict_input", "others", "an input that is a dict of dicts",
    lambda n: {"left": {"image": IMAGES(n)}, "right": {"image": IMAGES(n)}}, STAGES,
)  # fmt: skip
class NestedDictInput(Pipeline):
    def forward(self, left: dict[str, Tensor], right: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(left["image"] - right["image"])


@case("forward_hook", "others", "a forward hook that changes the features", IMAGES, STAGES, others=LARGER)
def forward_hook() -> nn.Module:
    network = Pipeline()
    network.body.register_forward_hook(lambda module, args, output: output.clamp(max=1.0))
    network.tail[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return network


@case("feature_hook", "others", "a hook keeps features that forward reads later", IMAGES, STAGES, others=LARGER)
class FeatureHook(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self.early = nn.Linear(8, 16)
        self.stem.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept["stem"] = output

    def forward(self, x: Tensor) -> Tensor:
        x = self.tail(self.body(self.stem(x))).mean((2, 3))
        return self.fc(x + self.early(self.kept["stem"].mean((2, 3))))


@case(
    "multihead_attention", "others", "nn.MultiheadAttention with the batch second", floats(8, 12),
    ["first", "second"], others={"11 steps": floats(11, 12)}, widths=(12, 12),
)  # fmt: skip
class BatchSecondAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fc = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, CLASSES)
        self.attention = nn.MultiheadAttention(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first(x.permute(1, 0, 2)))))
        return self.fc(self.attention(x, x, x, need_weights=False)[0].mean(0))


@case(
    "video_folded", "others", "frames folded into the batch: x.view(B * T, C, H, W)", floats(3, 3, 12, 12), STAGES,
    others={"5 frames": floats(5, 3, 12, 12)},
)  # fmt: skip
class FoldedVideo(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        batch, frames = x.shape[:2]
        x = self.tail(self.body(self.stem(x.view(batch * frames, *x.shape[2:])))).mean((2, 3))
        return self.fc(x.view(batch, frames, -1).mean(1))


@case("multi_crop", "others", "crops stacked along the batch: torch.cat([x, x.flip(3)])", IMAGES, STAGES)
class MultiCrop(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, x.flip(3)])
        left, right = self.tail(self.body(self.stem(x))).mean((2, 3)).chunk(2)
        return self.fc(left + right)


@case("branch_on_content", "others", "if x.mean() > 0 takes another path", IMAGES, STAGES, must_refuse=MIXED)
class BranchOnContent(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.other = conv(12, 16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        return self.classified(self.tail(x) if x.mean() > 0.5 else self.other(x))


@case(
    "module_dict_auto", "others", "nn.ModuleDict of blocks, exits placed by 'auto'", floats(3, 32, 32), "auto",
    others={"24 x 24": floats(3, 24, 24)},
)  # fmt: skip
class ModuleDictNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 8, 12, 12, 16)
        self.blocks = nn.ModuleDict({f"b{i}": BasicBlock(a, b) for i, (a, b) in enumerate(pairwise(widths))})
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for name in sorted(self.blocks):
            x = self.blocks[name](x)
        return self.fc(x.mean((2, 3)))


@case(
    "dense_connections", "others", "torch.cat of all earlier features, as in DenseNet", IMAGES,
    ["layers.0", "layers.1"], others=LARGER,
)  # fmt: skip
class DenseConnections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.fc = nn.ModuleList(conv(3 + 8 * i, 8) for i in range(3)), nn.Linear(27, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.fc(torch.cat(features, 1).mean((2, 3)))


@case(
    "embedding_bag", "others", "nn.EmbeddingBag on tokens", tokens(10), ["embed", "hidden"],
    others={"7 tokens": tokens(7)}, widths=(12, 16),
)  # fmt: skip
class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden = nn.EmbeddingBag(VOCABULARY, 12, mode="mean"), nn.Linear(12, 16)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(F.relu(self.hidden(F.relu(self.embed(ids)))))


@case("vector_quantised", "others", "the nearest code of a codebook, straight through", IMAGES, STAGES, others=LARGER)
class VectorQuantised(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        flat = x.permute(0, 2, 3, 1)
        nearest = (flat[..., None, :] - self.codes.weight).square().sum(-1).argmin(-1)
        coded = self.codes(nearest).permute(0, 3, 1, 2)
        return self.classified(self.tail(x + (coded - x).detach()))


@case(
    "last_valid_token", "others", "x[torch.arange(B), lengths - 1]",
    named(ids=tokens(10), lengths=lengths_up_to(10)), ["first", "second"], widths=(16, 16),
    others={"14 tokens": named(ids=tokens(14), lengths=lengths_up_to(14))},
)  # fmt: skip
class LastValidToken(EncoderWithLengths):
    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.third(self.second(self.first(self.embed(ids))))
        return self.fc(x[torch.arange(x.shape[0], device=x.device), lengths - 1])


@case("loop_over_samples", "others", "torch.stack([self.tail(one) for one in x])", IMAGES, STAGES, trains=False)
class LoopOverSamples(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        return self.fc(torch.stack([self.tail(one[None]).mean((0, 2, 3)) for one in x]))


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


@cache
def scripted_swish() -> Callable[[Tensor], Tensor]:
    return torch.jit.script(swish)


@case("scripted_function", "others", "a function under @torch.jit.script as activation", IMAGES, STAGES, others=LARGER)
class ScriptedFunction(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        activation = scripted_swish()
        return self.classified(activation(self.tail(activation(self.body(self.stem(x))))))


@case("numpy_inside", "others", "features computed with NumPy", IMAGES, STAGES, trains=False)
class NumpyInside(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        waves = torch.from_numpy(np.sin(x.detach().numpy()))
        return self.classified(self.tail(x + waves))


@case(
    "length_tensor", "sizes", "x.sum(1) / torch.tensor(T)", floats(10, 6), ["first", "second"],
    others={"14 steps": floats(14, 6), "7 steps": floats(7, 6)}, widths=(16, 16),
)  # fmt: skip
class LengthTensor(ScaleByLength):
    def forward(self, x: Tensor) -> Tensor:
        length = torch.tensor(x.size(1), dtype=x.dtype)
        return self.fc(self.second(self.first(x)).sum(1) / length)


@case("data_attribute", "training", "x.data instead of x.detach()", IMAGES, STAGES, others=LARGER)
class DataAttribute(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        return self.classified(self.tail(x + x.data.tanh()))


@case("gradient_hook", "training", "x.register_hook scales the gradient", IMAGES, STAGES, others=LARGER)
class GradientHook(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.1)  # type: ignore[no-untyped-call]
        return self.classified(self.tail(x))


@case("gradient_reversal", "training", "2 * x.detach() - x turns the gradient", IMAGES, STAGES, others=LARGER)
class GradientReversal(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        return self.classified(self.tail(2 * x.detach() - x))


@case("pruned", "others", "torch.nn.utils.prune on a convolution", IMAGES, STAGES, others=LARGER)
class Pruned(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        prune.random_unstructured(self.tail[0], "weight", amount=0.5)  # type: ignore[no-untyped-call]


@case("vmap_inside", "others", "torch.vmap over the samples", IMAGES, STAGES, others=LARGER)
class VmapInside(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = self.tail(self.body(self.stem(x))).mean((2, 3))
        return torch.vmap(lambda row: self.fc.weight @ row + self.fc.bias)(x)


@case("compiled", "others", "torch.compile around the network", IMAGES, ["_orig_mod.stem", "_orig_mod.body"])
def compiled() -> nn.Module:
    return torch.compile(Pipeline(), backend="eager")  # type: ignore[return-value]


@case(
    "averaged",
    "others",
    "torch.optim.swa_utils.AveragedModel around the network",
    IMAGES,
    ["module.stem", "module.body"],
)
def averaged() -> nn.Module:
    return AveragedModel(Pipeline())


@case(
    "rotary_cache", "sizes", "rotary angles cached in a buffer that is not saved", floats(10, 16), ["first", "second"],
    others={"14 steps": floats(14, 16), "6 steps": floats(6, 16)}, widths=(16, 16),
)  # fmt: skip
class RotaryCache(nn.Module):
    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.outer(torch.arange(32), torch.logspace(0, -2, 8)), persistent=False)
        self.first, self.second, self.third = (TransformerBlock(16) for _ in range(3))
        self.fc = nn.Linear(16, CLASSES)

    def turned(self, x: Tensor) -> Tensor:
        angles = self.angles[: x.size(1)]
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.cat([even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1)

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.first, self.second, self.third):
            x = block(self.turned(x))
        return self.fc(x.mean(1))


@case(
    "global_local_tuple", "outputs", "blocks that return (features, state), both used later", IMAGES,
    ["first", "second"], others=LARGER, widths=(8, 8),
)  # fmt: skip
class TupleBlocks(nn.Module):
    class Block(nn.Module):
        def __init__(self, inputs: int) -> None:
            super().__init__()
            self.conv, self.mix = conv(inputs, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
            x = self.conv(x)
            pooled = self.mix(x.mean((2, 3)))
            return x, pooled if state is None else state + pooled

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = self.Block(3), self.Block(8), self.Block(8)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x, state = self.first(x)
        x, state = self.second(x, state)
        x, state = self.third(x, state)
        return self.fc(torch.cat([x.amax((2, 3)), state], 1))


@case(
    "branch_on_batch_size", "mixing", "another path for a single sample", IMAGES, STAGES, others=LARGER,
    must_refuse=MIXED,
)  # fmt: skip
class BranchOnBatchSize(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tail(self.body(self.stem(x))).mean((2, 3))
        return self.fc(self.norm(x) if x.size(0) > 1 else x)


@case(
    "batch_size_scale",
    "mixing",
    "x * math.sqrt(B), a number that follows the batch size",
    IMAGES,
    STAGES,
    must_refuse=MIXED,
)
class BatchSizeScale(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = self.tail(self.body(self.stem(x)))
        return self.classified(x * math.sqrt(x.size(0)))


@case(
    "ghost_batches", "mixing", "statistics over groups of the batch of at most four", IMAGES, STAGES, must_refuse=MIXED
)
class GhostBatches(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = self.tail(self.body(self.stem(x)))
        groups = [group - group.mean(0, keepdim=True) / 2 for group in torch.split(x, 4)]
        return self.classified(torch.cat(groups))


# 11. Networks of a second search for silent differences.


class Steps(nn.Module):
    """Three blocks on (B, T, 16) and a linear classifier, which subclasses put together in their own `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (TransformerBlock(16) for _ in range(3))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.third(self.second(self.first(x))).mean(1))


STEPS, BLOCKS = floats(10, 16), ["first", "second"]
LONGER = {"14 steps": floats(14, 16), "6 steps": floats(6, 16)}
STATE = "the logits follow the batches before"
TIMES_AND_LENGTHS = several(STEPS, lengths_up_to(10))


@case(
    "largest_length", "mixing", "x[:, : lengths.max()] behind an exit", TIMES_AND_LENGTHS, ["first"],
    arguments={"mask": {}},
)  # fmt: skip
class LargestLength(Steps):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        longest, kept = lengths.max(), torch.arange(x.shape[1]) < lengths[:, None]
        bias = torch.where(kept, 0.0, -1e9)[:, None, None]
        x = self.second(self.first(x, bias)[:, :longest], bias[..., :longest])
        return self.fc((x * kept[:, :longest, None]).sum(1) / lengths[:, None])


@case(
    "largest_length_first", "sizes", "x[:, : lengths.max()] before any exit", TIMES_AND_LENGTHS, BLOCKS,
    arguments={"mask": {}},
)  # fmt: skip
class LargestLengthFirst(Steps):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        x = x[:, : lengths.max()]
        kept = torch.arange(x.shape[1]) < lengths[:, None]
        bias = torch.where(kept, 0.0, -1e9)[:, None, None]
        x = self.third(self.second(self.first(x, bias), bias), bias)
        return self.fc((x * kept[..., None]).sum(1) / lengths[:, None])


@case("mixed_in_large_batches", "mixing", "a module that centres batches of six or more", IMAGES, STAGES,
      must_refuse=MIXED)  # fmt: skip
class MixedInLargeBatches(Pipeline):
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0, keepdim=True) if len(x) >= 6 else x

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Sequential(self.Centred(), conv(12, 16, 2))


@case("row_parity", "mixing", "torch.arange(B) % 2 scales every second sample", IMAGES, STAGES, must_refuse=MIXED)
class RowParity(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        return self.classified(self.tail(x * (1 - 0.5 * (torch.arange(x.shape[0]) % 2)).view(-1, 1, 1, 1)))


@case("hidden_kept", "mixing", "self.hidden is kept from batch to batch", STEPS, ["first"], must_refuse=STATE)
class HiddenKept(Steps):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.hidden = nn.GRU(16, 16, batch_first=True), torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        same = len(self.hidden) and self.hidden.shape[1] == len(x)
        steps, hidden = self.gru(self.first(x), self.hidden if same else None)
        self.hidden = hidden.detach()
        return self.fc(steps[:, -1])


@case("average_in_evaluation", "mixing", "a buffer that follows the batches in evaluation too", IMAGES, STAGES,
      must_refuse=STATE)  # fmt: skip
class AverageInEvaluation(Pipeline):
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        self.average.mul_(0.9).add_(0.1 * x.detach().mean((0, 2, 3)))
        return self.classified(self.tail(x - self.average.view(-1, 1, 1)))


@case("calls_counted", "mixing", "a module that scales by how often it was called", IMAGES, STAGES, must_refuse=STATE)
class CallsCounted(Pipeline):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * (1 + 0.1 * self.calls)

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Sequential(self.Counting(), conv(12, 16, 2))


@case("sample_counter", "training", "self.seen += len(x), in evaluation too", IMAGES, STAGES, others=LARGER)
class SampleCounter(Pipeline):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.size(0)
        return super().forward(x)


@case("embedding_max_norm", "others", "nn.Embedding(max_norm=1), which writes to its weights", tokens(10), BLOCKS,
      others={"14 tokens": tokens(14)}, widths=(16, 16))  # fmt: skip
class EmbeddingMaxNorm(Steps):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.embed(x))


@case("numpy_sqrt", "sizes", "int(np.sqrt(N)) and np.log of a size", floats(9, 16), BLOCKS,
      others={"16 steps": floats(16, 16)})  # fmt: skip
class NumpySqrt(Steps):
    def forward(self, x: Tensor) -> Tensor:
        x, side = self.second(self.first(x)), int(np.sqrt(x.shape[1]))
        return self.fc(self.third(x.view(-1, side, side, 16).mean(1)).mean(1) / np.log(x.shape[1]))


@case("mask_by_length", "sizes", "a dict attribute of masks by length", STEPS, BLOCKS, others=LONGER, widths=(16, 16))
class MaskByLength(Steps):
    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length not in self.masks:
            self.masks[length] = torch.full((length, length), -1e9).triu(1)
        for block in (self.first, self.second, self.third):
            x = block(x, self.masks[length])
        return self.fc(x[:, -1])


@case("positions_made_once", "sizes", "if self.positions is None: self.positions = ...", STEPS, BLOCKS, others=LONGER)
class PositionsMadeOnce(Steps):
    def __init__(self) -> None:
        super().__init__()
        self.positions: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.positions is None or len(self.positions) != x.shape[1]:
            self.positions = torch.outer(torch.arange(x.shape[1]).float(), torch.logspace(0, -2, 16)).sin()
        return super().forward(x + self.positions)


class CausalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(made.transpose(1, 2).flatten(2))


@case("causal_attention", "sizes", "scaled_dot_product_attention(is_causal=True)", STEPS, BLOCKS, others=LONGER,
      widths=(16, 16))  # fmt: skip
class CausalNetwork(Steps):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (CausalAttention() for _ in range(3))  # type: ignore[assignment]


@case("token_pruning", "sizes", "the top 70 % of the tokens by their score", STEPS, BLOCKS, others=LONGER)
class TokenPruning(Steps):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        best = self.score(x).squeeze(-1).topk(int(x.shape[1] * 0.7), 1).indices
        x = x.gather(1, best[..., None].expand(-1, -1, 16))
        return self.fc(self.third(self.second(x)).mean(1))


@case("gated_scan", "sizes", "a recurrence over x.unbind(1) inside a block", STEPS, BLOCKS, others=LONGER)
class GatedScan(Steps):
    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.value = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            state, made = torch.zeros_like(x[:, 0]), []
            for gate, value in zip(self.gate(x).sigmoid().unbind(1), self.value(x).unbind(1), strict=True):
                state = gate * state + (1 - gate) * value
                made.append(state)
            return x + torch.stack(made, 1)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (self.Scan() for _ in range(3))  # type: ignore[assignment]


@case("fixed_point", "others", "iterations end when the batch has converged", floats(16), ["inject"], must_refuse=MIXED)
class FixedPoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inject, self.update, self.fc = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inject(x)
        state = torch.zeros_like(x)
        for _ in range(20):
            before, state = state, torch.tanh(0.3 * self.update(state) + x)
            if (state - before).norm() < 0.3:
                break
        return self.fc(state)


@case("rows_by_domain", "others", "rows of each domain through a module of its own",
      named(x=IMAGES, domain=lambda n: torch.arange(n) % 2), STAGES)  # fmt: skip
class RowsByDomain(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.domains = nn.ModuleDict({"0": nn.Linear(16, CLASSES), "1": nn.Linear(16, CLASSES)})

    def forward(self, x: Tensor, domain: Tensor) -> Tensor:  # type: ignore[override]
        x = self.tail(self.body(self.stem(x))).mean((2, 3))
        made = torch.zeros(len(x), CLASSES)
        for name, classifier in self.domains.items():
            made[domain == int(name)] = classifier(x[domain == int(name)])
        return made


@case(
    "jagged", "others", "x.repeat_interleave(counts, 0) and index_add", several(floats(6), lengths_up_to(4)), ["embed"]
)
class JaggedRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.fc = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        x = self.embed(x)
        owner = torch.arange(len(x)).repeat_interleave(counts)
        rows = self.mix(x.repeat_interleave(counts, 0)).relu()
        return self.fc(torch.zeros_like(x).index_add(0, owner, rows) / counts[:, None])


@case("gru_over_frames", "others", "a convolutional network on frames, a GRU on its features", floats(4, 3, 12, 12),
      ["frames", "steps"], arguments={"channels": "first"})  # fmt: skip
class GruOverFrames(nn.Module):
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(12, 16, 2, batch_first=True)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.gru(x)

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.steps = nn.Sequential(conv(3, 8, 2), conv(8, 12, 2)), self.Recurrent()
        self.mix, self.fc = nn.Linear(48, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        made = self.frames(x.flatten(0, 1)).mean((2, 3)).unflatten(0, x.shape[:2])
        made, hidden = self.steps(made)
        return self.fc(self.mix(torch.cat([made[:, -1], *hidden], 1)).relu())


@case("perceiver", "others", "latents.expand(B, -1, -1) attend to the input", STEPS, ["cross", "second"], others=LONGER)
class PerceiverLike(Steps):
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, latents: Tensor, x: Tensor) -> Tensor:
            return latents + self.attention(latents, x, x, need_weights=False)[0]

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.cross = nn.Parameter(torch.randn(4, 16)), self.Cross()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.cross(self.latents.expand(len(x), -1, -1), x))


@case("ensemble", "others", "the mean of three networks, exits in the first", IMAGES,
      ["members.0.stem", "members.0.body"], others=LARGER)  # fmt: skip
class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(Pipeline() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x).softmax(-1) for member in self.members]).mean(0).log()


@case("bytes_input", "others", "x.float() / 255 of an image in bytes",
      lambda n: torch.randint(256, (n, 3, 16, 16), dtype=torch.uint8), STAGES, widths=(8, 12))  # fmt: skip
class BytesInput(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float() / 127.5 - 1)


@case(
    "channels_last_inside", "others", "x.contiguous(memory_format=torch.channels_last)", IMAGES, STAGES, others=LARGER
)
class ChannelsLastInside(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x.contiguous(memory_format=torch.channels_last)))
        return self.classified(self.tail(x).contiguous())


@case("drawn_weights", "others", "random weights of a seeded generator in forward", IMAGES, STAGES)
class DrawnWeights(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        weights = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
        return self.fc(self.tail(self.body(self.stem(x))).mean((2, 3)) @ weights / 4)


@case("classes_first", "outputs", "return logits.t()", IMAGES, STAGES, logits=lambda output: output.t())
class ClassesFirst(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).t()


@case("skipped_block_opened", "training", "torch.rand(1).item() skips a block around an exit", IMAGES,
      ["body", "tail.block"], others=LARGER)  # fmt: skip
class SkippedBlock(Pipeline):
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = conv(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return x + 0.7 * self.block(x)
            return x if torch.rand(1).item() < 0.3 else x + self.block(x)

    def __init__(self) -> None:
        super().__init__()
        self.tail, self.fc = self.Skipping(), nn.Linear(12, CLASSES)  # type: ignore[assignment]


@case("own_parametrization", "others", "parametrize with a module of one's own", floats(6), ["0", "2"])
def own_parametrization() -> nn.Module:
    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).transpose(-1, -2)

    network = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    nn.utils.parametrize.register_parametrization(network[2], "weight", Symmetric())
    return network


# 12. Networks from above that were refused, with what the refusal asks for.


class Own(nn.Module):
    """Lines of a `forward` in a module of its own, which stays closed when the network is cut."""

    def __init__(self, lines: Callable[..., Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.lines = lines
        for name, part in parts.items():
            self.add_module(name, part) if isinstance(part, nn.Module) else self.register_buffer(name, part)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.lines(self, *inputs)


def pipeline(**parts: nn.Module) -> nn.Module:
    """Return the pipeline with other parts."""
    network = Pipeline()
    for name, part in parts.items():
        network.add_module(name, part)
    return network


def behind_body(lines: Callable[..., Tensor], **parts: nn.Module | Tensor) -> nn.Module:
    """Return the pipeline with these lines before its tail."""
    return pipeline(tail=nn.Sequential(Own(lines, **parts), conv(12, 16, 2)))


def branches(lines: Callable[..., Tensor], numbers: Tensor) -> nn.Module:
    """Return the pipeline with two tails and lines that put them together."""
    return pipeline(tail=Own(lines, one=conv(12, 16, 2), two=conv(12, 16, 2), numbers=numbers))


def as_many_layers(own: Any, x: Tensor) -> Tensor:
    for layer in [own.first, *own.extra[: int(own.depth)]]:
        x = layer(x)
    return x


class TrackedBatchNorm(BatchNormUntracked):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(12)


ALONE = "the line in a module of its own"

remedied("features_logits", "logits=1", arguments={"logits": 1})
remedied("logits_features", "logits=0", arguments={"logits": 0})
remedied("dict_out", "logits='out'", arguments={"logits": "out"})
remedied("equal_width_features", "logits=1", arguments={"logits": 1})
remedied("aux_in_training", "logits=function", arguments={"logits": CASES["aux_in_training"].logits})
remedied("aux_first_in_training", "logits=function", arguments={"logits": CASES["aux_first_in_training"].logits})
remedied("video_folded", "channels='first'", arguments={"channels": "first"})
remedied("attention_mask_inverted", "mask={...: 'padding'}", arguments={"mask": {"attention_mask": "padding"}})
remedied("head_in_place", "inplace=False", arguments={"head": lambda shape: in_place_head(shape, inplace=False)})
remedied(
    "one_logit", "alight.TwoLogits(network)", lambda: TwoLogits(OneLogit()), after=["network.stem", "network.body"],
    classes=2,
)  # fmt: skip
remedied("recurrent_block", "cut after 'stem'", after=["stem"])
remedied("jit_script", "the network before torch.jit.script", adaptive_pool)
remedied("jit_trace", "the network before torch.jit.trace", adaptive_pool)
remedied("jit_script_inside", "the block before torch.jit.script", Pipeline)
remedied("batch_norm_untracked", "BatchNorm2d with stored statistics", TrackedBatchNorm)
remedied(
    "one_graph", "an adjacency for each sample",
    batch=lambda n: (torch.randn(n, 7, 6), torch.rand(7, 7).repeat(n, 1, 1)),
)  # fmt: skip
for _name in (
    "xlnet",
    "funnel",
    "running_average",
    "stochastic_depth",
    "train_override",
    "gradient_hook",
    "checkpointed",
):
    remedied(_name, "heads trained alone", trains="heads")

remedied(
    "buffer_item_scale", ALONE, lambda: behind_body(lambda own, x: x * own.scale.item(), scale=torch.rand(()) + 0.5)
)
remedied(
    "float_temperature", ALONE,
    lambda: pipeline(
        fc=nn.Sequential(
            nn.Linear(16, CLASSES), Own(lambda own, x: x / float(own.temperature), temperature=torch.rand(()) + 0.5)
        )
    ),
)  # fmt: skip
remedied(
    "branch_on_parameter", ALONE,
    lambda: branches(lambda own, x: own.one(x) if own.numbers > 0 else own.two(x), torch.randn(())),
)  # fmt: skip
remedied(
    "buffer_list_of_scales", ALONE,
    lambda: branches(
        lambda own, x: sum(a * b(x) for a, b in zip(own.numbers.tolist(), (own.one, own.two), strict=True)),
        torch.rand(2) + 0.2,
    ),
)  # fmt: skip
remedied(
    "layer_count_parameter", ALONE,
    lambda: pipeline(
        tail=Own(
            as_many_layers, first=conv(12, 16, 2), depth=torch.randint(1, 4, ()),
            extra=nn.ModuleList(conv(16, 16) for _ in range(3)),
        )
    ),
)  # fmt: skip
remedied("numpy_inside", ALONE, lambda: behind_body(lambda own, x: x + torch.from_numpy(np.sin(x.detach().numpy()))))
remedied("scripted_function", ALONE, lambda: behind_body(lambda own, x: scripted_swish()(x)))
remedied(
    "vmap_inside", ALONE,
    lambda: pipeline(
        fc=Own(
            lambda own, x: torch.vmap(lambda row: own.linear.weight @ row + own.linear.bias)(x),
            linear=nn.Linear(16, CLASSES),
        )
    ),
)  # fmt: skip
remedied(
    "loop_over_samples", ALONE,
    lambda: pipeline(
        tail=Own(lambda own, x: torch.cat([own.inner(one[None]) for one in x]), inner=conv(12, 16, 2))
    ),
)  # fmt: skip


class MoeModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.moe, self.fc = TransformerBlock(12), SparseMixtureOfExperts(12, 16), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.fc((x + self.moe(x)).mean(1))


class PackedModule(LstmPacked):
    class Recurrent(nn.LSTM):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            return super().forward(packed)[1][0][-1]

    def __init__(self) -> None:
        super().__init__()
        self.lstm = self.Recurrent(12, 16, batch_first=True)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.fc(self.lstm(self.norm(self.embed(ids)), lengths))


remedied("moe_rare_expert", ALONE, MoeModule)
remedied("lstm_packed", ALONE, PackedModule)


class DropoutInTraining(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        return self.classified(F.dropout(self.tail(self.body(self.stem(x))), 0.5, self.training))


class NewSkip(AliasAcrossCut):
    def forward(self, x: Tensor) -> Tensor:
        skip = self.stem(x)
        y = self.body(skip)
        return self.classified(self.tail(self.same(y) + (skip[:, :4] + 1.0).mean((1, 2, 3), keepdim=True)))


class NewView(ViewAlias):
    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.stem(x), 2)
        x = torch.cat([x, x[:, :4]], 1)
        y = self.body(x[:, :8])
        return self.fc(self.tail(y).mean((2, 3)) + self.gate(0.5 * x.flatten(1)))


class CropsSideBySide(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        crops = torch.stack([x, x.flip(3)], 1).flatten(0, 1)
        x = self.tail(self.body(self.stem(crops))).mean((2, 3))
        return self.fc(x.view(-1, 2, 16).sum(1))


class ListWrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = ListInput()

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.network([left, right])


class NestedWrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = NestedDictInput()

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.network({"image": left}, {"image": right})


WRAPPED = {"batch": several(IMAGES, IMAGES), "after": ["network.stem", "network.body"]}

remedied("dropout_always", "F.dropout(x, 0.5, self.training)", DropoutInTraining)
remedied("alias_across_cut", "no tensor written in place", NewSkip, trains=True)
remedied("view_alias", "no tensor written in place", NewView, trains=True)
remedied("multi_crop", "crops side by side, channels='first'", CropsSideBySide, arguments={"channels": "first"})
remedied("list_input", "a module around it that takes tensors", ListWrapped, **WRAPPED)
remedied("nested_dict_input", "a module around it that takes tensors", NestedWrapped, **WRAPPED)


class StoredMeanFirst(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class StoredMean(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(16, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.classified(self.norm(self.tail(self.body(self.stem(x)))))


class OverOwnMaximum(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = self.tail(self.body(self.stem(x)))
        return self.classified(x / x.abs().amax((1, 2, 3), keepdim=True))


class BranchPerSample(BranchOnContent):
    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        return self.classified(torch.where(x.mean((1, 2, 3), keepdim=True) > 0.5, self.tail(x), self.other(x)))


class RoomPerSample(MoeCapacity):
    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        best = self.router(x).topk(x.shape[1] // 2, dim=1).indices.expand(-1, -1, x.shape[2])
        return self.fc(x.scatter_add(1, best, self.expert(x.gather(1, best))).mean(1))


def sorted_tail(own: Any, x: Tensor) -> Tensor:
    order = x.mean((1, 2, 3)).argsort()
    return own.inner(x[order])[order.argsort()]


STORED = "stored statistics"
remedied("minus_batch_mean", STORED, StoredMean)
remedied("batch_mean_first", STORED, StoredMeanFirst)
remedied("over_batch_maximum", "the maximum of each sample", OverOwnMaximum)
remedied("branch_on_content", "torch.where for each sample", BranchPerSample)
remedied("moe_capacity", "room for half of each sample's tokens", RoomPerSample)
remedied("sorted_batch", ALONE, lambda: pipeline(tail=Own(sorted_tail, inner=conv(12, 16, 2))))
remedied(
    "optional_positional", "an example with both inputs", batch=CASES["optional_positional"].extras["table"], extras={}
)


class LengthBehindTheExit(LargestLength):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        kept = torch.arange(x.shape[1]) < lengths[:, None]
        bias = torch.where(kept, 0.0, -1e9)[:, None, None]
        x, longest = self.first(x, bias), lengths.max()
        x = self.second(x[:, :longest], bias[..., :longest])
        return self.fc((x * kept[:, :longest, None]).sum(1) / lengths[:, None])


remedied("largest_length", "the length computed behind the exit", LengthBehindTheExit)
remedied("skipped_block_opened", "heads trained alone", trains="heads")
remedied("classes_first", "logits=function", arguments={"logits": CASES["classes_first"].logits})


# What code hands over beside its arguments.


class MaskedLayer(nn.Module):
    """Reads a mask that somebody has put into it."""

    mask: Tensor | None = None

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        if self.mask is not None:
            made = made.masked_fill(self.mask[..., None], 0)
        return x + made.mean(1, keepdim=True)


@case("mask_in_blocks", "attributes", "a mask is put into blocks", floats(6, 8), ["middle"], others={"9": floats(9, 8)})
class MaskInBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = MaskedLayer(), nn.Linear(8, 8), MaskedLayer()
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.first, self.last):
            block.mask = x[..., 0] > 0.5
        return self.fc(self.last(self.middle(self.first(x))).mean(1))


class Scaled(nn.Module):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@case(
    "number_in_child", "attributes", "a number is put into a child", floats(6, 8), ["first"], others={"9": floats(9, 8)}
)
class NumberInChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scaled, self.fc = nn.Linear(8, 8), Scaled(), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.scaled.factor = x.shape[1] ** -0.5
        return self.fc(self.scaled(self.first(x)).sum(1))


class Shared:
    size: Sequence[int] = ()


class SharedPatches(nn.Module):
    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared, self.inner = shared, nn.Conv2d(3, 8, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        self.shared.size = x.shape[2:]
        return x.flatten(2).transpose(1, 2)


class SharedBlock(nn.Module):
    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared, self.inner = shared, nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        images = x.transpose(1, 2).reshape(len(x), 8, *self.shared.size)
        return x + self.inner(images).flatten(2).transpose(1, 2)


@case("shared_object", "attributes", "blocks read a size from an object", floats(3, 32, 32), ["first"])
class SharedObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = Shared()
        self.patches, self.first, self.second = SharedPatches(shared), SharedBlock(shared), SharedBlock(shared)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.second(self.first(self.patches(x))).amax(1))


class SetByFirstBatch(nn.Module):
    ready = False

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.shift.copy_(x.mean(0))
            self.ready = True
        return x - self.shift


@case("set_by_first_batch", "statistics", "the first batch sets a parameter", floats(8), ["first"])
class ActNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.fc = SetByFirstBatch(), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.first(self.norm(x)).relu())


class TrimmedMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, : max(1, int((x.abs().sum(-1) > 0).sum(1).max()))].mean(1)


@case(
    "trimmed_sequences",
    "mixing",
    "steps that are zero in all samples are cut",
    floats(6, 8),
    ["first"],
    must_refuse=MIXED,
)
class TrimmedSequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.pool, self.fc = nn.Linear(8, 8, bias=False), TrimmedMean(), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.first(x).relu()))


@case("powers", "functions", "x ** 2, 2 ** x and x **= 0.5", floats(8), ["first"])
class Powers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) ** 2 + 1
        x **= 0.5
        return self.fc(2**x - x**3)


# Limits, lengths and caches: what shows in some batches alone.


def packed_mean(own: Any, x: Tensor, lengths: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(own.rnn(packed)[0], batch_first=True)[0].mean(1)


def trimmed_mean(own: Any, x: Tensor, padding: Tensor) -> Tensor:
    return x[:, : int((~padding).sum(1).max())].mean(1)


class TwoInputs(nn.Module):
    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.first, self.pool, self.fc = nn.Linear(16, 16), pool, nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, second: Tensor) -> Tensor:
        return self.fc(self.pool(self.first(x), second))


@case(
    "packed_mean", "mixing", "the mean of an unpacked sequence, an example of full length", TIMES_AND_LENGTHS,
    ["first"],
    must_refuse=MIXED, example=several(STEPS, lambda samples: torch.full((samples,), 10)),
)  # fmt: skip
def packed_mean_network() -> nn.Module:
    return TwoInputs(Own(packed_mean, rnn=nn.GRU(16, 16, batch_first=True)))


@case(
    "trimmed_by_mask", "mixing", "cut to the longest of a batch, an example without padding",
    several(STEPS, hidden_mask(10)), ["first"], must_refuse=MIXED, arguments={"mask": {"second": "padding"}},
    example=several(STEPS, lambda samples: torch.zeros(samples, 10, dtype=torch.bool)),
)  # fmt: skip
def trimmed_by_mask() -> nn.Module:
    return TwoInputs(Own(trimmed_mean))


class Before(Pipeline):
    """Lines of one's own before the pipeline."""

    def __init__(self, lines: Callable[..., Tensor]) -> None:
        super().__init__()
        self.before = Own(lines)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.before(x))


@case(
    "bytes_over_largest", "mixing", "x / x.max() of bytes, an example of one image",
    lambda samples: torch.randint(0, 256, (samples, 3, 16, 16), dtype=torch.uint8), STAGES, must_refuse=MIXED,
    example=lambda _: torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8),
)  # fmt: skip
def bytes_over_largest() -> nn.Module:
    return Before(lambda own, x: x.float() / x.max())


@case(
    "spectra_over_largest", "mixing", "x / x.abs().max() of complex numbers, an example of one sample",
    lambda samples: torch.randn(samples, 3, 16, 16, dtype=torch.complex64), STAGES, must_refuse=MIXED,
    example=lambda _: torch.randn(1, 3, 16, 16, dtype=torch.complex64),
)  # fmt: skip
def spectra_over_largest() -> nn.Module:
    return Before(lambda own, x: (x / x.abs().max()).abs())


@case("scaled_if_bright", "mixing", "if x.max() > 1: x = x / 255", IMAGES, STAGES, must_refuse=MIXED)
def scaled_if_bright() -> nn.Module:
    return Before(lambda own, x: x / 255 if x.max() > 1 else x)


@case("halved_if_large", "mixing", "features are halved if one is large", IMAGES, STAGES, must_refuse=MIXED)
def halved_if_large() -> nn.Module:
    return behind_body(lambda own, x: x / 2 if x.max() > 8 else x)


@case("halved_where_large", "mixing", "the same by torch.where", IMAGES, STAGES, must_refuse=MIXED)
def halved_where_large() -> nn.Module:
    return behind_body(lambda own, x: torch.where(x.max() > 8, x / 2, x))


@case("best_32", "mixing", "the best 32 of a batch go on", IMAGES, STAGES, must_refuse=MIXED, trains=False)
def best_32() -> nn.Module:
    def lines(own: Any, x: Tensor) -> Tensor:
        left = torch.ones(len(x))
        left[x.mean((1, 2, 3)).argsort(descending=True)[32:]] = 0
        return x * left.view(-1, 1, 1, 1)

    return behind_body(lines)


def experts(own: Any, x: Tensor) -> Tensor:
    chosen = F.one_hot(own.gate(x).argmax(-1), 2)
    taken = chosen * (chosen.cumsum(0) <= max(8, len(x) // 2))
    return x + taken[:, :1] * own.one(x) + taken[:, 1:] * own.two(x)


@case("least_capacity", "mixing", "experts that take eight samples at least", floats(16), ["0"], must_refuse=MIXED)
def least_capacity() -> nn.Module:
    moe = Own(experts, gate=nn.Linear(16, 2), one=nn.Linear(16, 16), two=nn.Linear(16, 16))
    return nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), moe, nn.Linear(16, CLASSES))


@case("first_64", "mixing", "samples after the 64th are zeros", IMAGES, STAGES, must_refuse=MIXED)
def first_64() -> nn.Module:
    def lines(own: Any, x: Tensor) -> Tensor:
        made = torch.zeros_like(x)
        made[:64] = x[:64]
        return made

    return behind_body(lines)


@case("capacity_of_64", "mixing", "an expert that takes 64 samples", IMAGES, STAGES, must_refuse=MIXED)
def capacity_of_64() -> nn.Module:
    def lines(own: Any, x: Tensor) -> Tensor:
        taken = (x.mean((1, 2, 3)) > 0).long().cumsum(0) <= 64
        return x * taken.view(-1, 1, 1, 1)

    return behind_body(lines)


@case("near_duplicates", "mixing", "samples like an earlier one are dropped", IMAGES, STAGES, must_refuse=MIXED)
def near_duplicates() -> nn.Module:
    def lines(own: Any, x: Tensor) -> Tensor:
        distances = torch.cdist(x.flatten(1), x.flatten(1))
        near = ((distances > 0) & (distances < 1e-3)).tril(-1).any(1)
        return x * ~near.view(-1, 1, 1, 1)

    return behind_body(lines)


@case("doubled_by_mean", "mixing", "if x.tanh().mean() > 0.95 doubles features", IMAGES, STAGES, must_refuse=MIXED)
def doubled_by_mean() -> nn.Module:
    return behind_body(lambda own, x: x * 2 if x.tanh().mean() > 0.95 else x)


@case("clamped_if_infinite", "others", "features are clamped if one is infinite", IMAGES, STAGES, others=LARGER)
def clamped_if_infinite() -> nn.Module:
    return behind_body(lambda own, x: x.clamp(-1e4, 1e4) if torch.isinf(x).any() else x)


@case("norm_is_kept", "others", "the norm of all features is kept for a log", IMAGES, STAGES, others=LARGER)
def norm_is_kept() -> nn.Module:
    def lines(own: Any, x: Tensor) -> Tensor:
        own.norm = x.norm().item()
        return x

    return behind_body(lines)


@case(
    "difference_of_two", "mixing", "|f(a) - f(b)| over the largest, an example of zeros",
    several(floats(16), floats(16)), ["second"], must_refuse=MIXED,
    example=lambda samples: (torch.zeros(samples, 16), torch.zeros(samples, 16)),
)  # fmt: skip
class DifferenceOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fc = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        x = self.second((self.first(a) - self.first(b)).abs()).relu()
        return self.fc(x / x.max().clamp(min=1e-3))


def halted(own: Any, x: Tensor) -> Tensor:
    total, made = torch.zeros(len(x), 1), torch.zeros_like(x)
    for _ in range(8):
        weight = own.halt(x).sigmoid() * (total < 0.99)
        made, total, x = made + weight * x, total + weight, own.cell(x).tanh()
        if (total >= 0.99).all():
            break
    return made


@case("adaptive_steps", "others", "steps until every sample has halted", floats(16), ["0"])
def adaptive_steps() -> nn.Module:
    loop = Own(halted, cell=nn.Linear(16, 16), halt=nn.Linear(16, 1))
    return nn.Sequential(nn.Linear(16, 16), loop, nn.Linear(16, CLASSES))


class KeptKeys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.kept = nn.Linear(16, 48), torch.zeros(0, 4, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if len(self.kept) == len(x):
            k, v = torch.cat([self.kept, k], 1), torch.cat([self.kept, v], 1)
        self.kept = k[:, -4:].detach()
        return F.scaled_dot_product_attention(q, k, v)


@case("keys_kept", "mixing", "keys of the last batch are kept", STEPS, ["first"], must_refuse=STATE, trains=False)
class KeysKept(Steps):
    def __init__(self) -> None:
        super().__init__()
        self.second = KeptKeys()  # type: ignore[assignment]


class RandomFrequencies(nn.Module):
    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(16, 8), persistent=False)
        self.rnn = nn.GRU(8, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn((x @ self.frequencies).sin())[0]


@case("frequencies_unsaved", "others", "a random buffer with persistent=False", STEPS, ["second"])
class FrequenciesUnsaved(Steps):
    def __init__(self) -> None:
        super().__init__()
        self.first = RandomFrequencies()  # type: ignore[assignment]


class MergedLora(LoraLinear):
    """Merges its weights in evaluation mode, as loralib does."""

    merged = False

    def train(self, mode: bool = True) -> "MergedLora":
        super().train(mode)
        if self.merged == mode:
            self.base.weight.data += (-0.5 if mode else 0.5) * self.up.weight.data @ self.down.weight.data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) if self.merged else super().forward(x)


@case("lora_merged", "others", "LoRA whose weights eval() merges", floats(16), ["0"])
def lora_merged() -> nn.Module:
    return nn.Sequential(
        MergedLora(nn.Linear(16, 16)), nn.ReLU(), MergedLora(nn.Linear(16, 16)), nn.Linear(16, CLASSES)
    )


# Common parts.


def merged_tokens(own: Any, x: Tensor) -> Tensor:
    """Return tokens of which the three most alike are merged, as ToMe does."""
    a, b = x[:, ::2], x[:, 1::2]
    alike, partner = (F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).transpose(1, 2)).max(-1)
    order = alike.argsort(-1, descending=True)[..., None].expand(-1, -1, x.shape[-1])
    into = partner[..., None].expand_as(a).gather(1, order)[:, :3]
    b = b.scatter_reduce(1, into, a.gather(1, order[:, :3]), "mean")
    return torch.cat([a.gather(1, order[:, 3:]), b], 1)


@case("token_merging", "sizes", "similar tokens are merged, as in ToMe", STEPS, ["first"], others=LONGER)
class TokenMerging(Steps):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Sequential(Own(merged_tokens), TransformerBlock(16))  # type: ignore[assignment]


@case("window_padding", "sizes", "F.pad to windows of four, cropped after them", STEPS, ["second"], others=LONGER)
class WindowPadding(Steps):
    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        more = -length % 4
        windows = self.first(F.pad(x, (0, 0, 0, more)).view(-1, 4, width))
        return self.fc(self.third(self.second(windows.view(batch, length + more, width)[:, :length])).mean(1))


@case("distance_bias", "sizes", "a bias by distance, as in ALiBi", STEPS, BLOCKS, others=LONGER)
class DistanceBias(Steps):
    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1], device=x.device)
        bias = -(steps[None] - steps[:, None]).abs() * torch.tensor([0.5, 0.25], device=x.device).view(2, 1, 1)
        return self.fc(self.third(self.second(self.first(x, bias), bias), bias).mean(1))


@case("causal_if_long", "sizes", "is_causal=T > 12", STEPS, BLOCKS, others=LONGER)
class CausalIfLong(Steps):
    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))[:, None]
        return self.fc(self.third(F.scaled_dot_product_attention(x, x, x, is_causal=x.shape[2] > 12)[:, 0]).mean(1))


@case("coordinates", "sizes", "coordinates are stacked on the image", IMAGES, STAGES, others=LARGER)
class Coordinates(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        axes = [torch.linspace(-1, 1, size, device=x.device) for size in x.shape[2:]]
        grid = torch.stack(torch.meshgrid(*axes, indexing="ij"))
        return super().forward(torch.cat([x, grid.expand(len(x), -1, -1, -1)], 1))


@case(
    "queries", "masks", "learned queries, memory_key_padding_mask", several(STEPS, hidden_mask(10)), ["first"],
    arguments={"mask": {"padding": "padding"}}, others={"14": several(floats(14, 16), hidden_mask(14))},
)  # fmt: skip
class Queries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.queries = TransformerBlock(16), nn.Parameter(torch.randn(3, 16))
        self.decoder, self.fc = nn.TransformerDecoderLayer(16, 2, 32, 0, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        queries = self.queries.expand(len(x), -1, -1)
        return self.fc(self.decoder(queries, self.first(x), memory_key_padding_mask=padding).mean(1))


@case("spectrogram_inside", "axes", "torch.stft in forward", floats(256), ["first"], others={"200": floats(200)})
class SpectrogramInside(nn.Module):
    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(32), persistent=False)
        self.first, self.second, self.fc = conv1d(17, 16), conv1d(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.stft(x, 32, 8, window=self.window, return_complex=True).abs().clamp(min=1e-5).log()
        return self.fc(self.second(self.first(spectrum)).mean(-1))


@case("rows_of_a_mask", "others", "x[mask] through a layer and back", STEPS, BLOCKS, others=LONGER)
class RowsOfAMask(Steps):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        mask, more = x[..., 0] > 0, torch.zeros_like(x)
        more[mask] = self.extra(x[mask])
        return self.fc(self.third(self.second(x + more)).mean(1))


@case("unused_input", "others", "an input that is not read", several(IMAGES, floats(4)), STAGES)
class UnusedInput(Pipeline):
    def forward(self, x: Tensor, _: Tensor | None = None) -> Tensor:
        return super().forward(x)


@case("bfloat16_backbone", "others", "bfloat16 below a float32 classifier", IMAGES, STAGES, trains=False)
class Bfloat16Backbone(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)
        self.fc.float()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.tail(self.body(self.stem(x.bfloat16()))).float().mean((2, 3)))


@case("pixels_embedded", "axes", "int64 pixels are embedded", lambda n: torch.randint(0, 256, (n, 16, 16)), ["body"])
class PixelsEmbedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pixels, self.body, self.fc = nn.Embedding(256, 8), conv(8, 12, 2), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(self.pixels(x).permute(0, 3, 1, 2)).mean((2, 3)))


@case("finite_or_raise", "others", "assert torch.isfinite(x).all()", IMAGES, STAGES)
class FiniteOrRaise(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        assert torch.isfinite(x).all(), "not finite"
        return super().forward(x)


remedied("finite_or_raise", "the line in a module of its own", lambda: Before(finite))


def finite(own: Any, x: Tensor) -> Tensor:
    assert torch.isfinite(x).all(), "not finite"
    return x


# 10. Styles of well-known repositories.


@case("autocast_off", "training", "torch.autocast(enabled=False) around the end", IMAGES, STAGES, others=LARGER)
class AutocastOff(Pipeline):
    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        with torch.autocast("cpu", enabled=False):
            return self.classified(self.tail(x.float()))


@case("autocast_block", "others", "one block under torch.autocast", STEPS, BLOCKS, others=LONGER, trains="heads")
class AutocastBlock(Steps):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.second(x)
        return self.fc(self.third(x.float()).mean(1))


class PackedGru(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.gru = nn.GRU(inputs, 8, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=x.shape[1])[0]


@case(
    "gru_packed_modules", "others", "bidirectional GRUs on packed sequences, in modules",
    named(ids=tokens(10), lengths=lengths_up_to(10)), ["first"],
    others={"14 tokens": named(ids=tokens(14), lengths=lengths_up_to(14))},
)  # fmt: skip
class GruPackedModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(VOCABULARY, 8), nn.Linear(16, CLASSES)
        self.first, self.second = PackedGru(8), PackedGru(16)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.second(self.first(self.embed(ids), lengths), lengths)
        valid = torch.arange(x.shape[1], device=x.device)[None] < lengths[:, None]
        return self.fc((x * valid[..., None]).sum(1) / lengths[:, None])


class SwitchBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        shares = self.gate(flat).softmax(-1)
        weights, chosen = shares.topk(2, -1)
        made = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == index)
            made.index_add_(0, rows, expert(flat[rows]) * weights[rows, places, None])
        return x + made.view_as(x), shares.mean(0).square().sum()


@case(
    "moe_balance_loss", "outputs", "experts, and a loss that balances them beside the logits", STEPS,
    ["blocks.0", "blocks.1"], others=LONGER, logits=lambda output: output[0], arguments={"logits": 0},
)  # fmt: skip
class MoeBalanceLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.fc = nn.ModuleList(SwitchBlock() for _ in range(3)), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        losses = []
        for block in self.blocks:
            x, loss = block(x)
            losses.append(loss)
        return self.fc(x.mean(1)), torch.stack(losses).sum()


class ShiftedFrames(nn.Module):
    def __init__(self, block: nn.Module, frames: int = 4) -> None:
        super().__init__()
        self.block, self.frames = block, frames

    def forward(self, x: Tensor) -> Tensor:
        size, channels, height, width = x.shape
        x = x.view(size // self.frames, self.frames, channels, height, width)
        part, moved = channels // 4, torch.zeros_like(x)
        moved[:, :-1, :part] = x[:, 1:, :part]
        moved[:, 1:, part : 2 * part] = x[:, :-1, part : 2 * part]
        moved[:, :, 2 * part :] = x[:, :, 2 * part :]
        return self.block(moved.view(size, channels, height, width))


@case(
    "temporal_shift", "axes", "frames in the batch, channels shifted in time, as in TSM", floats(4, 3, 16, 16), STAGES,
    arguments={"channels": "first"}, others={"20 x 24": floats(4, 3, 20, 24)},
)  # fmt: skip
class TemporalShift(Pipeline):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(ShiftedFrames(conv(8, 12, 2)))
        self.tail = nn.Sequential(ShiftedFrames(conv(12, 16, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(-1, 3, *x.shape[-2:])).view(-1, 4, CLASSES).mean(1)


def left_padded(samples: int) -> Batch:
    mask = padding_mask(10)(samples).flip(1)
    return {"input_ids": tokens(10)(samples) * mask, "attention_mask": mask}


@case(
    "mistral_left_padded", "masks", "a decoder with a sliding window, padded on the left", left_padded,
    layers("model.layers"), logits=named_logits, widths=(16, 16),
)  # fmt: skip
def mistral_left_padded() -> nn.Module:
    return text_classifier("Mistral", **SMALL, num_key_value_heads=1, sliding_window=4)


class Edges(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2 * inputs, outputs, 1), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2))

    def forward(self, x: Tensor) -> Tensor:
        samples, channels, points = x.shape
        nearest = torch.cdist(x.transpose(1, 2), x.transpose(1, 2)).topk(4, largest=False)[1]
        rows = (nearest + torch.arange(samples, device=x.device).view(-1, 1, 1) * points).view(-1)
        flat = x.transpose(1, 2).reshape(samples * points, channels)
        others = flat[rows].view(samples, points, 4, channels)
        own = flat.view(samples, points, 1, channels).expand(-1, -1, 4, -1)
        return self.layers(torch.cat([others - own, own], 3).permute(0, 3, 1, 2)).amax(-1)


@case(
    "edge_convolutions", "axes", "graphs of nearest points, numbered over the batch, as in DGCNN", floats(3, 24),
    ["first", "second"], others={"30 points": floats(3, 30)}, widths=(8, 12),
)  # fmt: skip
class EdgeConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fc = Edges(3, 8), Edges(8, 12), nn.Linear(20, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return self.fc(torch.cat([first.amax(-1), self.second(first).mean(-1)], 1))


class RecurrentConvolution(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.gates = nn.Conv2d(inputs + 6, 24, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = torch.zeros(len(x), 6, *x.shape[-2:], device=x.device, dtype=x.dtype)
        states = []
        for step in range(x.shape[1]):
            let, keep, show, new = self.gates(torch.cat([x[:, step], hidden], 1)).split(6, 1)
            cell = keep.sigmoid() * cell + let.sigmoid() * new.tanh()
            hidden = show.sigmoid() * cell.tanh()
            states.append(hidden)
        return torch.stack(states, 1)


def flat_head(shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool3d((None, 1, 1)), nn.Flatten(), nn.Linear(shape[0] * shape[1], CLASSES))


@case(
    "conv_lstm", "axes", "ConvLSTM layers on (B, frames, C, H, W)", floats(4, 3, 8, 8), ["first"],
    arguments={"head": flat_head}, others={"12 x 12": floats(4, 3, 12, 12)},
)  # fmt: skip
class ConvLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fc = RecurrentConvolution(3), RecurrentConvolution(6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.second(self.first(x))[:, -1].mean((2, 3)))


class SkeletonBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.space, self.time = nn.Conv2d(inputs, 2 * outputs, 1), nn.Conv2d(outputs, outputs, (3, 1), padding=(1, 0))

    def forward(self, x: Tensor, graph: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.einsum("nkctv,kvw->nctw", self.space(x).unflatten(1, (2, -1)), graph)
        return self.time(x.contiguous()).relu(), graph


@case(
    "skeleton_graph", "axes", "joints of two persons in the batch and a fixed graph, as in ST-GCN", floats(3, 8, 6, 2),
    ["blocks.0", "blocks.1"], arguments={"channels": "first"}, others={"12 frames": floats(3, 12, 6, 2)},
)  # fmt: skip
class SkeletonGraph(nn.Module):
    graph: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SkeletonBlock(3, 8), SkeletonBlock(8, 8), SkeletonBlock(8, 12)])
        self.register_buffer("graph", torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(0)))
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        samples, channels, frames, joints, persons = x.shape
        x = x.permute(0, 4, 1, 2, 3).reshape(samples * persons, channels, frames, joints)
        for block in self.blocks:
            x, _ = block(x, self.graph)
        return self.fc(F.avg_pool2d(x, x.shape[2:]).view(samples, persons, -1).mean(1))


@case(
    "classes_of_last_four", "outputs", "class tokens of the last hidden states of BERT, joined",
    named(ids=tokens(10), mask=padding_mask(10)), layers("bert.encoder.layer"),
)  # fmt: skip
class ClassesOfLastFour(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert: Any = bert().bert
        self.fc = nn.Linear(64, CLASSES)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states = self.bert(ids, attention_mask=mask, output_hidden_states=True).hidden_states
        return self.fc(torch.cat([state[:, 0] for state in states[-4:]], -1))


remedied(
    "classes_of_last_four", "mask={...: 'tokens'}", arguments={"mask": {"mask": "tokens"}},
)  # fmt: skip


@case("softmax_over_samples", "mixing", "softmax(dim=0) for the attention of steps", STEPS, BLOCKS, must_refuse=MIXED)
class SoftmaxOverSamples(Steps):
    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        return self.fc((self.third(x) * x.mean(-1).softmax(0)[..., None]).sum(1))
