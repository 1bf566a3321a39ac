"""Networks with exits that alight builds itself, with random weights.

>>> resnet18_cifar(num_classes=10).exits[-2:]
('layer4.0', 'end')
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from alight.data.preprocess import Normalisation
from alight.networks.architectures import MSDNetSettings, ResNet, msdnet_modules
from alight.networks.attach import attach_heads
from alight.networks.heads import HeadChoice
from alight.networks.multi_exit import MultiExitModel, describe

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
