"""MSDNet: a network made for exits (Huang et al., Multi-Scale Dense Networks, ICLR 2018).

Features are kept at several scales at once, fine to coarse. Every layer adds `growth` channels to each scale, half of
them made from the next finer scale, and all layers see all channels made before them (dense connections). Every exit
reads the coarsest scale, which has a wide view from the first layer on. The layers fall into as many equal groups as
there are scales; from group to group the finest scale is dropped and the channels of all others are reduced.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from alight.errors import BadInput
from alight.networks.multi_exit import Carried

SMALL_HEAD = 128  # channels inside a head for small images


@dataclass(frozen=True)
class MSDNetSettings:
    """The shape of an MSDNet.

    >>> MSDNetSettings(blocks=7, base=4, step=2, channels=16, growth=6, factors=(1, 2, 4)).layers_per_block
    (4, 2, 2, 2, 2, 2, 2)
    """

    blocks: int  # as many exits
    base: int  # layers of the first block
    step: int  # layers of every other block or, growing, of the second one less than of the third, and so on
    channels: int  # of the finest scale, before the first layer
    growth: int  # channels that a layer adds to the finest scale
    factors: tuple[int, ...]  # per scale, finest first: times so many channels, and so wide a bottleneck
    reduction: float = 0.5  # share of the channels that is kept where a scale is dropped
    growing: bool = False  # blocks grow by `step` layers each, instead of having `step` each
    large_images: bool = False  # a stem that makes maps of a quarter of the size (ImageNet), and wider heads

    def __post_init__(self) -> None:
        numbers = (self.blocks, self.base, self.step, self.channels, self.growth, *self.factors)
        if not self.factors or min(numbers) < 1 or not 0 < self.reduction <= 1:
            raise BadInput(f"{self}: every number must be at least 1, and the reduction in (0, 1]")

    @property
    def layers_per_block(self) -> tuple[int, ...]:
        """Return the number of layers of each block."""
        later = range(1, self.blocks)
        return (self.base, *(self.step * (index - 1) + 1 if self.growing else self.step for index in later))


class MSDNetStage(nn.Module):
    """The layers between two exits; carried are the coarsest scale, for the head, then the others, finest first."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *carried: Tensor) -> Carried:
        """Return the scales after the last layer, the coarsest first."""
        scales = [*carried[1:], carried[0]]
        for layer in self.layers:
            scales = layer(scales)
        return scales[-1], *scales[:-1]


class Stem(nn.Module):
    """The first layer: an image becomes features at every scale."""

    def __init__(self, settings: MSDNetSettings) -> None:
        super().__init__()
        widths = [settings.channels * factor for factor in settings.factors]
        finest = [*_convolution(3, widths[0], 7, 2), nn.MaxPool2d(3, 2, 1)] if settings.large_images else None
        self.finest = nn.Sequential(*(finest or _convolution(3, widths[0])))
        self.coarser = nn.ModuleList(nn.Sequential(*_convolution(*pair, stride=2)) for pair in pairwise(widths))

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        """Return features at every scale, finest first."""
        scales = [self.finest(images[-1])]
        for halve in self.coarser:
            scales.append(halve(scales[-1]))
        return scales


class DenseScale(nn.Module):
    """One scale of a layer: its features, and new ones made from them and, where there is one, from a finer scale."""

    def __init__(self, settings: MSDNetSettings, channels: int, scale: int, *, from_finer: bool) -> None:
        super().__init__()
        factor = settings.factors[scale]
        made = settings.growth * factor // (2 if from_finer else 1)
        self.same = nn.Sequential(*_bottleneck(channels * factor, made, factor))
        if from_finer:
            factor = settings.factors[scale - 1]
            self.finer = nn.Sequential(*_bottleneck(channels * factor, made, factor, stride=2))

    def forward(self, finer: Tensor | None, features: Tensor) -> Tensor:
        """Return all features of this scale so far."""
        halved = [] if finer is None else [self.finer(finer)]
        return torch.cat([features, *halved, self.same(features)], 1)


class DenseLayer(nn.Module):
    """Every scale that is still needed gets new channels."""

    def __init__(self, settings: MSDNetSettings, channels: int, finest: int, finest_in: int) -> None:
        super().__init__()
        self.scales = nn.ModuleList(
            DenseScale(settings, channels, scale, from_finer=scale > finest_in)
            for scale in range(finest, len(settings.factors))
        )

    def forward(self, scales: list[Tensor]) -> list[Tensor]:
        """Return all features so far of every scale from the finest that is still needed."""
        with_finer = [*zip([None, *scales[:-1]], scales, strict=True)][-len(self.scales) :]
        return [grow(finer, scale) for grow, (finer, scale) in zip(self.scales, with_finer, strict=True)]


class Transition(nn.Module):
    """Fewer channels at every scale."""

    def __init__(self, settings: MSDNetSettings, channels: int, reduced: int, first: int) -> None:
        super().__init__()
        self.scales = nn.ModuleList(
            nn.Sequential(*_convolution(channels * factor, reduced * factor, 1)) for factor in settings.factors[first:]
        )

    def forward(self, scales: list[Tensor]) -> list[Tensor]:
        """Return the reduced features of every scale, finest first."""
        return [reduce(scale) for reduce, scale in zip(self.scales, scales, strict=True)]


def msdnet_modules(settings: MSDNetSettings, num_classes: int) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return stages and heads of an MSDNet with random weights."""
    layers = _layers(settings)
    stages: list[nn.Module] = []
    heads: list[nn.Module] = []
    for index, count in enumerate(settings.layers_per_block):
        taken: list[nn.Module] = [Stem(settings)] if index == 0 else []
        channels = 0
        for _ in range(count):
            parts, channels = next(layers)
            taken += parts
        stages.append(MSDNetStage(taken))
        heads.append(_head(settings, channels * settings.factors[-1], num_classes))
    for part in [*stages, *heads]:
        part.apply(_start)
    return stages, heads


def _layers(settings: MSDNetSettings) -> Iterator[tuple[list[nn.Module], int]]:
    """Yield each layer with the transition that may follow, and the channels (of a scale of factor 1) that come out."""
    count = sum(settings.layers_per_block)
    group = math.ceil(count / len(settings.factors))  # layers after which a scale is dropped
    channels = settings.channels
    for index in range(count):
        finest, finest_in = index // group, max(0, index - 1) // group
        parts: list[nn.Module] = [DenseLayer(settings, channels, finest, finest_in)]
        channels += settings.growth
        if finest > finest_in and settings.reduction < 1:
            reduced = math.floor(settings.reduction * channels)
            parts.append(Transition(settings, channels, reduced, finest))
            channels = reduced
        yield parts, channels


def _head(settings: MSDNetSettings, channels: int, num_classes: int) -> nn.Module:
    """Return two convolutions that halve the coarsest scale, an average and a linear layer."""
    width = channels if settings.large_images else SMALL_HEAD
    return nn.Sequential(
        *_convolution(channels, width, stride=2),
        *_convolution(width, width, stride=2),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(width, num_classes),
    )


def _convolution(channels: int, made: int, size: int = 3, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, made, size, stride, size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(made), nn.ReLU(inplace=True)]


def _bottleneck(channels: int, made: int, width: int, stride: int = 1) -> list[nn.Module]:
    """Return a 1 x 1 convolution to at most `width` times the channels to be made, then a 3 x 3 one."""
    inner = min(channels, width * made)
    return [*_convolution(channels, inner, 1), *_convolution(inner, made, 3, stride)]


def _start(part: nn.Module) -> None:
    if isinstance(part, nn.Conv2d):
        nn.init.kaiming_normal_(part.weight, mode="fan_out")
    elif isinstance(part, nn.Linear):
        nn.init.zeros_(part.bias)
