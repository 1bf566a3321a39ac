"""Networks with exits that alight builds itself, with fresh weights.

>>> resnet18_cifar(num_classes=10).exits[-2:]
('layer4.0', 'end')
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from alight.networks.attach import attach_heads
from alight.networks.heads import Factory
from alight.networks.multi_exit import MultiExitModel, Normalisation, describe
from alight.networks.zoo.convnext import ConvNeXt
from alight.networks.zoo.msdnet import MSDNetSettings, msdnet_modules
from alight.networks.zoo.resnet import ResNet

IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR = Normalisation((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))  # of CIFAR-100's training images
DIGITS = Normalisation((0.305,), (0.376,))  # of scikit-learn's handwritten digits
Heads = str | Factory | Sequence[str | Factory]

RESNET_EXITS = tuple(f"layer{layer}.{block}" for layer in (1, 2, 3, 4) for block in (0, 1))[:-1]  # the 8th is the end
DIGITS_EXITS = ("layer1.0", "layer1.2", "layer2.0")  # about a seventh, two fifths and three fifths of the cost


def msdnet_cifar(
    num_classes: int = 100, *, blocks: int = 7, base: int = 4, step: int = 2, channels: int = 16, growth: int = 6
) -> MultiExitModel:
    """MSDNet for images of 32 x 32: three scales, and as many exits as blocks.

    >>> model = msdnet_cifar(10, blocks=2, channels=4)
    >>> [tuple(logits.shape) for logits in model(torch.zeros(2, 3, 32, 32))]
    [(2, 10), (2, 10)]
    """
    arguments = {"blocks": blocks, "base": base, "step": step, "channels": channels, "growth": growth}
    settings = MSDNetSettings(blocks, base, step, channels, growth, factors=(1, 2, 4))
    return _msdnet(settings, num_classes, CIFAR, 32, {"name": "msdnet_cifar", "arguments": arguments})


def msdnet_imagenet(
    num_classes: int = 1000, *, blocks: int = 5, base: int = 4, step: int = 4, channels: int = 32, growth: int = 16
) -> MultiExitModel:
    """MSDNet for images of 224 x 224: four scales, and as many exits as blocks; the paper has steps of 4, 6 and 7."""
    arguments = {"blocks": blocks, "base": base, "step": step, "channels": channels, "growth": growth}
    settings = MSDNetSettings(blocks, base, step, channels, growth, factors=(1, 2, 4, 4), large_images=True)
    return _msdnet(settings, num_classes, IMAGENET, 224, {"name": "msdnet_imagenet", "arguments": arguments})


def resnet18_cifar(
    num_classes: int = 100, *, backbone: ResNet | None = None, head: Heads = "flatten_linear"
) -> MultiExitModel:
    """ResNet-18 for images of 32 x 32 with an exit after each of its first seven blocks, as in the paper.

    `backbone` is a trained `ResNet`; without one the weights are fresh.
    """
    network = backbone or ResNet(num_classes)
    model = attach_heads(
        network, RESNET_EXITS, num_classes=num_classes, example=_images(32), head=head, normalisation=CIFAR
    )
    return _from_zoo(model, {"name": "resnet18_cifar", "arguments": {}})


def resnet_digits(
    num_classes: int = 10, *, backbone: ResNet | None = None, head: Heads = "pooled_linear"
) -> MultiExitModel:
    """A ResNet of 8 narrow blocks for grey images of 8 x 8, such as scikit-learn's digits, with 4 exits.

    It learns the digits in seconds, and is deep enough for an early exit to be worth its head.

    >>> model = resnet_digits()
    >>> model.exits
    ('layer1.0', 'layer1.2', 'layer2.0', 'end')
    >>> [tuple(logits.shape) for logits in model(torch.zeros(2, 1, 8, 8))]
    [(2, 10), (2, 10), (2, 10), (2, 10)]
    """
    network = backbone or ResNet(num_classes, (4, 4), widths=(32, 64), channels=1)
    model = attach_heads(
        network, DIGITS_EXITS, num_classes=num_classes, example=_images(8, 1), head=head, normalisation=DIGITS
    )
    return _from_zoo(model, {"name": "resnet_digits", "arguments": {}})


def convnext_tiny(
    num_classes: int = 1000, *, backbone: ConvNeXt | None = None, head: Heads = "pooled_linear"
) -> MultiExitModel:
    """ConvNeXt-T for images of 224 x 224 with an exit after every block: 17 heads and the network's own.

    `backbone` is a trained `ConvNeXt`, which takes timm's weights; without one the weights are fresh.
    """
    network = backbone or ConvNeXt((3, 3, 9, 3), (96, 192, 384, 768), num_classes)
    return _convnext(network, num_classes, head, IMAGENET, 224, {"name": "convnext_tiny", "arguments": {}})


def convnext_cifar(
    num_classes: int = 100, *, backbone: ConvNeXt | None = None, head: Heads = "pooled_linear"
) -> MultiExitModel:
    """A small ConvNeXt for images of 32 x 32 with an exit after every block: 11 heads and its own."""
    network = backbone or ConvNeXt((2, 2, 6, 2), (40, 80, 160, 320), num_classes, patch=2)
    return _convnext(network, num_classes, head, CIFAR, 32, {"name": "convnext_cifar", "arguments": {}})


NATIVE = ("msdnet_cifar", "msdnet_imagenet")  # networks that have heads of their own
ZOO: dict[str, Callable[..., MultiExitModel]] = {
    factory.__name__: factory
    for factory in (convnext_cifar, convnext_tiny, msdnet_cifar, msdnet_imagenet, resnet18_cifar, resnet_digits)
}


def _msdnet(
    settings: MSDNetSettings, num_classes: int, normalisation: Normalisation, size: int, recipe: dict[str, Any]
) -> MultiExitModel:
    stages, heads = msdnet_modules(settings, num_classes)
    model = MultiExitModel(
        stages,
        heads,
        [f"block {index}" for index in range(len(stages))],
        num_classes=num_classes,
        normalisation=normalisation,
        recipe={"example": describe(_images(size))},
    )
    return _from_zoo(model, recipe)


def _convnext(
    network: ConvNeXt, num_classes: int, head: Heads, normalisation: Normalisation, size: int, recipe: dict[str, Any]
) -> MultiExitModel:
    model = attach_heads(
        network,
        network.blocks[:-1],
        num_classes=num_classes,
        example=_images(size),
        head=head,
        normalisation=normalisation,
    )
    return _from_zoo(model, recipe)


def _from_zoo(model: MultiExitModel, recipe: dict[str, Any]) -> MultiExitModel:
    model.recipe |= {"source": "zoo", **recipe, "num_classes": model.num_classes}
    return model


def _images(size: int, channels: int = 3) -> torch.Tensor:
    return torch.zeros(2, channels, size, size)
