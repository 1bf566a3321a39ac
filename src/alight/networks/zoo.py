"""Networks with exits that alight builds itself, with random weights: ResNet, which gets heads, and MSDNet.

>>> resnet18_cifar(num_classes=10).exits[-2:]
('layer4.0', 'end')
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from alight.data.preprocess import Normalisation
from alight.errors import BadInput
from alight.networks.attach import attach_heads
from alight.networks.heads import HeadChoice
from alight.networks.multi_exit import Carried, MultiExitModel, describe

SMALL_HEAD = 128  # channels inside a head of MSDNet for small images
REDUCTION = 0.5  # share of the channels that MSDNet keeps where a scale is dropped


class ResNet(nn.Module):
    """ResNet for small images (He et al., Deep Residual Learning, CVPR 2016; the stem as for CIFAR).

    Layers of residual blocks stand behind a 3 x 3 stem that keeps the size; four of two blocks each make a ResNet-18.
    `widths` has the channels of every layer, `channels` is of the images. Its weights are named as torchvision's are.

    >>> ResNet(num_classes=100)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 100])
    """

    def __init__(
        self,
        num_classes: int = 100,
        blocks: Sequence[int] = (2, 2, 2, 2),
        *,
        widths: Sequence[int] = (64, 128, 256, 512),
        channels: int = 3,
    ) -> None:
        super().__init__()
        if len(blocks) != len(widths) or min(blocks) < 1:
            raise BadInput(
                f"blocks {tuple(blocks)} are not one number per layer, at least 1: give as many as widths,"
                f" {len(widths)}"
            )
        self.conv1 = nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU(inplace=True)
        self.layers = tuple(f"layer{index + 1}" for index in range(len(widths)))
        for index, (before, width) in enumerate(pairwise([widths[0], *widths])):
            first = _ResidualBlock(before, width, stride=2 if index else 1)
            later = (_ResidualBlock(width, width, stride=1) for _ in range(blocks[index] - 1))
            self.add_module(self.layers[index], nn.Sequential(first, *later))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[-1], num_classes)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        features = self.relu(self.bn1(self.conv1(images)))
        for name in self.layers:
            features = self.get_submodule(name)(features)
        return self.fc(torch.flatten(self.avgpool(features), 1))


class _ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions, added to the input."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = nn.Sequential()
        if stride > 1 or channels != width:
            self.downsample = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, features: Tensor) -> Tensor:
        changed = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(features)))))
        return self.relu(changed + self.downsample(features))


@dataclass(frozen=True)
class MSDNetSettings:
    """The shape of an MSDNet."""

    blocks: int  # as many exits
    base: int  # layers of the first block
    step: int  # layers of every other block
    channels: int  # of the finest scale, before the first layer
    growth: int  # channels that a layer adds to the finest scale
    factors: tuple[int, ...]  # per scale, finest first: times so many channels, and so wide a bottleneck
    large_images: bool = False  # a stem that makes maps of a quarter of the size (ImageNet), and wider heads
    growing: bool = False  # blocks of step + 1, 2 step + 1, ... layers after the first (the authors' lin_grow)

    def __post_init__(self) -> None:
        if min(self.blocks, self.base, self.step, self.channels, self.growth, *self.factors) < 1:
            raise BadInput(f"{self}: every number must be at least 1")

    @property
    def layers(self) -> list[int]:
        """How many layers each block has."""
        later = [self.step * index + 1 if self.growing else self.step for index in range(1, self.blocks)]
        return [self.base, *later]


def msdnet_modules(settings: MSDNetSettings, num_classes: int) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return stages and heads of a network made for exits (Huang et al., Multi-Scale Dense Networks, ICLR 2018).

    Features are kept at several scales at once, fine to coarse. Every layer adds `growth` channels to each scale, half
    of them made from the next finer scale, and all layers see all channels made before them (dense connections). Every
    exit reads the coarsest scale, which has a wide view from the first layer on. The layers fall into as many equal
    groups as there are scales; from group to group the finest scale is dropped and the channels of all others are
    reduced.
    """
    group = math.ceil(sum(settings.layers) / len(settings.factors))  # layers after which a scale is dropped
    stages: list[nn.Module] = []
    heads: list[nn.Module] = []
    done, channels = 0, settings.channels  # layers so far, and their output channels (of a scale of factor 1)
    for count in settings.layers:
        layers: list[nn.Module] = [] if stages else [_Stem(settings)]
        for index in range(done, done + count):
            finest, finest_in = index // group, max(0, index - 1) // group
            layers.append(_DenseLayer(settings, channels, finest, finest_in))
            channels += settings.growth
            if finest > finest_in:
                reduced = math.floor(REDUCTION * channels)
                layers.append(_Transition(settings, channels, reduced, finest))
                channels = reduced
        done += count
        stages.append(_MSDNetStage(layers))
        heads.append(_msdnet_head(settings, channels * settings.factors[-1], num_classes))
    for part in nn.ModuleList([*stages, *heads]).modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out")
        elif isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)
    return stages, heads


class _MSDNetStage(nn.Module):
    """The layers between two exits; carried are the coarsest scale, for the head, then the others, finest first."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *carried: Tensor) -> Carried:
        scales = [*carried[1:], carried[0]]
        for layer in self.layers:
            scales = layer(scales)
        return scales[-1], *scales[:-1]


class _Stem(nn.Module):
    """The first layer: an image becomes features at every scale."""

    def __init__(self, settings: MSDNetSettings) -> None:
        super().__init__()
        widths = [settings.channels * factor for factor in settings.factors]
        finest = [*_convolution(3, widths[0], 7, 2), nn.MaxPool2d(3, 2, 1)] if settings.large_images else None
        self.finest = nn.Sequential(*(finest or _convolution(3, widths[0])))
        self.coarser = nn.ModuleList(nn.Sequential(*_convolution(*pair, stride=2)) for pair in pairwise(widths))

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        scales = [self.finest(images[-1])]
        for halve in self.coarser:
            scales.append(halve(scales[-1]))
        return scales


class _DenseLayer(nn.Module):
    """Every scale that is still needed gets new channels."""

    def __init__(self, settings: MSDNetSettings, channels: int, finest: int, finest_in: int) -> None:
        super().__init__()
        self.scales = nn.ModuleList(
            _DenseScale(settings, channels, scale, from_finer=scale > finest_in)
            for scale in range(finest, len(settings.factors))
        )

    def forward(self, scales: list[Tensor]) -> list[Tensor]:
        with_finer = [*zip([None, *scales[:-1]], scales, strict=True)][-len(self.scales) :]
        return [grow(finer, scale) for grow, (finer, scale) in zip(self.scales, with_finer, strict=True)]


class _DenseScale(nn.Module):
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
        halved = [] if finer is None else [self.finer(finer)]
        return torch.cat([features, *halved, self.same(features)], 1)


class _Transition(nn.Module):
    """Fewer channels at every scale."""

    def __init__(self, settings: MSDNetSettings, channels: int, reduced: int, first: int) -> None:
        super().__init__()
        self.scales = nn.ModuleList(
            nn.Sequential(*_convolution(channels * factor, reduced * factor, 1)) for factor in settings.factors[first:]
        )

    def forward(self, scales: list[Tensor]) -> list[Tensor]:
        return [reduce(scale) for reduce, scale in zip(self.scales, scales, strict=True)]


def _msdnet_head(settings: MSDNetSettings, channels: int, num_classes: int) -> nn.Module:
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


IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR = Normalisation((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))  # of CIFAR-100's training images
DIGITS = Normalisation((0.305,), (0.376,))  # of scikit-learn's handwritten digits

RESNET_EXITS = tuple(f"layer{layer}.{block}" for layer in (1, 2, 3, 4) for block in (0, 1))[:-1]  # the 8th is the end
DIGITS_EXITS = ("layer1.0", "layer1.2", "layer2.0")  # about a seventh, two fifths and three fifths of the cost

BACKBONES: dict[str, Callable[[int], nn.Module]] = {  # networks that get heads, by number of classes
    "resnet18_cifar": ResNet,
    "resnet_digits": lambda num_classes: ResNet(num_classes, (4, 4), widths=(32, 64), channels=1),
}


def msdnet_cifar(
    num_classes: int = 100,
    *,
    blocks: int | None = None,
    base: int | None = None,
    step: int | None = None,
    channels: int = 16,
    growth: int = 6,
    growing: bool = False,
) -> MultiExitModel:
    """Build MSDNet for images of 32 x 32: three scales, and as many exits as blocks.

    It is the authors' network for anytime prediction: 7 blocks, of 4 layers and then of 2 each. With `growing` it is
    theirs for budgets: 5 blocks of 1, 2, 3, 4 and 5 layers (`base`, then `step` times the block's index, plus 1).

    >>> model = msdnet_cifar(10, blocks=2, channels=4)
    >>> [tuple(logits.shape) for logits in model(torch.zeros(2, 3, 32, 32))]
    [(2, 10), (2, 10)]
    """
    given, own = (blocks, base, step), (5, 1, 1) if growing else (7, 4, 2)
    first, second, third = (default if size is None else size for size, default in zip(given, own, strict=True))
    settings = MSDNetSettings(first, second, third, channels, growth, factors=(1, 2, 4), growing=growing)
    return _msdnet("msdnet_cifar", settings, num_classes, CIFAR, 32)


def msdnet_imagenet(
    num_classes: int = 1000,
    *,
    blocks: int = 5,
    base: int | None = None,
    step: int = 4,
    channels: int = 32,
    growth: int = 16,
) -> MultiExitModel:
    """Build MSDNet for images of 224 x 224: four scales, and as many exits as blocks of `step` layers.

    The authors train steps of 4, 6 and 7; the first block has as many layers, unless `base` names another number.
    """
    base = step if base is None else base
    settings = MSDNetSettings(blocks, base, step, channels, growth, factors=(1, 2, 4, 4), large_images=True)
    return _msdnet("msdnet_imagenet", settings, num_classes, IMAGENET, 224)


def resnet18_cifar(
    num_classes: int = 100, *, backbone: ResNet | None = None, head: HeadChoice = "flatten_linear"
) -> MultiExitModel:
    """Build ResNet-18 for images of 32 x 32 with an exit after each of its first seven blocks, as in the paper.

    `backbone` is a trained `ResNet`; without one the weights are random.
    """
    return _attached("resnet18_cifar", backbone, num_classes, RESNET_EXITS, _images(32), head, CIFAR)


def resnet_digits(
    num_classes: int = 10, *, backbone: ResNet | None = None, head: HeadChoice = "pooled_linear"
) -> MultiExitModel:
    """Build a ResNet of 8 narrow blocks for grey images of 8 x 8, such as scikit-learn's digits, with 4 exits.

    It learns the digits in seconds, and is deep enough for an early exit to be worth its head.

    >>> model = resnet_digits()
    >>> model.exits
    ('layer1.0', 'layer1.2', 'layer2.0', 'end')
    >>> [tuple(logits.shape) for logits in model(torch.zeros(2, 1, 8, 8))]
    [(2, 10), (2, 10), (2, 10), (2, 10)]
    """
    return _attached("resnet_digits", backbone, num_classes, DIGITS_EXITS, _images(8, 1), head, DIGITS)


ZOO: dict[str, Callable[..., MultiExitModel]] = {
    factory.__name__: factory for factory in (msdnet_cifar, msdnet_imagenet, resnet18_cifar, resnet_digits)
}


def _attached(
    name: str,
    backbone: nn.Module | None,
    num_classes: int,
    exits: Sequence[str],
    example: torch.Tensor,
    head: HeadChoice,
    normalisation: Normalisation,
) -> MultiExitModel:
    """Return a backbone with heads after the named exits."""
    network = backbone or BACKBONES[name](num_classes)
    model = attach_heads(
        network, exits, num_classes=num_classes, example=example, head=head, normalisation=normalisation
    )
    model.recipe |= {"source": "zoo", "name": name, "arguments": {}, "num_classes": model.num_classes}
    return model


def _msdnet(
    name: str, settings: MSDNetSettings, num_classes: int, normalisation: Normalisation, size: int
) -> MultiExitModel:
    stages, heads = msdnet_modules(settings, num_classes)
    exits = [f"block {index}" for index in range(len(stages))]
    names = ("blocks", "base", "step", "channels", "growth", *(["growing"] if settings.growing else []))
    arguments = {each: getattr(settings, each) for each in names}
    recipe = {"source": "zoo", "name": name, "arguments": arguments, "num_classes": num_classes}
    recipe["example"] = describe(_images(size))
    return MultiExitModel(stages, heads, exits, num_classes=num_classes, normalisation=normalisation, recipe=recipe)


def _images(size: int, channels: int = 3) -> torch.Tensor:
    return torch.zeros(2, channels, size, size)
