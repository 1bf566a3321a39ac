"""Heads: modules that turn the features at one exit into logits."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from alight.errors import BadInput

Shape = tuple[int, ...]  # of the features of one sample, without the batch
HeadFactory = Callable[[Shape], nn.Module]  # makes a head for features of this shape
HeadChoice = str | HeadFactory | Sequence[str | HeadFactory]  # for all exits, or one per exit

SMALL_MAP = 4  # rows and columns at which a separable head takes the average


class Head(nn.Module):
    """A head that can be built again: `settings` are its arguments by name."""

    name: str  # under which HEADS has it
    reads_everything = False  # of what is carried, not only the features
    channels_last: bool | None = None  # takes (batch, ..., channels), and averages over the rest; None: reads it all

    def __init__(self, shape: Shape, num_classes: int, **options: Any) -> None:
        super().__init__()
        self.settings = {"shape": list(shape), "num_classes": num_classes, **options}


class PooledLinear(Head):
    """The average over all positions, flattened, and a linear layer (the paper's head for ConvNeXt).

    With `norm`, the average is layer-normalised before.

    >>> PooledLinear((64, 7, 7), 10)(torch.zeros(2, 64, 7, 7)).shape
    torch.Size([2, 10])
    """

    name = "pooled_linear"

    def __init__(self, shape: Shape, num_classes: int, *, channels_last: bool = False, norm: bool = False) -> None:
        super().__init__(shape, num_classes, channels_last=channels_last, norm=norm)
        self.channels_last = channels_last
        channels = shape[-1 if channels_last else 0]
        self.norm = nn.LayerNorm(channels) if norm else nn.Identity()
        self.linear = nn.Linear(channels, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits of (batch, channels, ...) or, channels last, (batch, ..., channels)."""
        return self.linear(self.norm(_average(features, self.channels_last)))


class FlattenLinear(Head):
    """All features in one row and a linear layer (the paper's head for ResNet); costs most where maps are large.

    >>> FlattenLinear((64, 4, 4), 10)(torch.zeros(2, 64, 4, 4)).shape
    torch.Size([2, 10])
    """

    name = "flatten_linear"

    def __init__(self, shape: Shape, num_classes: int) -> None:
        super().__init__(shape, num_classes)
        self.linear = nn.Linear(torch.Size(shape).numel(), num_classes)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits of features of any shape, as long as it is always the same."""
        return self.linear(features.flatten(1))


class _MapHead(Head, ABC):
    """Layers of convolutions on a map, the average, and a linear layer."""

    default_width: int

    def __init__(
        self, shape: Shape, num_classes: int, *, channels_last: bool = False, width: int | None = None
    ) -> None:
        width = self.default_width if width is None else width
        super().__init__(shape, num_classes, channels_last=channels_last, width=width)
        if len(shape) != 3:
            raise BadInput(f"features of shape {tuple(shape)} are not a map: use head='pooled_linear' or 'mlp'")
        self.channels_last = channels_last
        channels, *size = (shape[-1], *shape[:-1]) if channels_last else shape
        widths = [channels, *self._widths(channels, max(size), width)]
        self.convolutions = nn.Sequential(*(self._layer(*pair) for pair in pairwise(widths)))
        self.linear = nn.Linear(widths[-1], num_classes)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits of (batch, channels, height, width) or, channels last, (batch, height, width, channels)."""
        maps = self.convolutions(features.movedim(-1, 1) if self.channels_last else features)
        return self.linear(maps.mean((2, 3)))

    @abstractmethod
    def _widths(self, channels: int, size: int, width: int) -> list[int]:
        """Return the channels after each layer."""

    @abstractmethod
    def _layer(self, channels: int, width: int) -> nn.Module:
        """Return one layer."""


class ConvHead(_MapHead):
    """Two 3 x 3 convolutions that halve the map, the average, and a linear layer.

    >>> ConvHead((64, 8, 8), 10)(torch.zeros(2, 64, 8, 8)).shape
    torch.Size([2, 10])
    """

    name = "conv"
    default_width = 128  # as in MSDNet for small images

    def _widths(self, channels: int, size: int, width: int) -> list[int]:
        return [width, width]

    def _layer(self, channels: int, width: int) -> nn.Module:
        convolution = nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True))


class SeparableHead(_MapHead):
    """Separable convolutions that halve the map and double the channels, the average, and a linear layer.

    They end where the map is 4 x 4 and stop growing at `width` channels, so an early head is a small network of its own
    at a few percent of the backbone's cost (Zhang et al., Be Your Own Teacher, ICCV 2019).

    >>> SeparableHead((64, 32, 32), 10)(torch.zeros(2, 64, 32, 32)).shape
    torch.Size([2, 10])
    """

    name = "separable"
    default_width = 512  # as many as a ResNet-18 ends with

    def _widths(self, channels: int, size: int, width: int) -> list[int]:
        halvings = max(1, math.ceil(math.log2(size / SMALL_MAP)))
        return [max(channels, min(width, channels << index)) for index in range(1, halvings + 1)]

    def _layer(self, channels: int, width: int) -> nn.Module:
        """Return two pairs of convolutions, over each channel alone and over all channels; the first halves the map."""
        layers: list[nn.Module] = []
        for made, stride in ((channels, 2), (width, 1)):
            layers += [
                nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False),
                nn.Conv2d(channels, made, 1, bias=False),
                nn.BatchNorm2d(made),
                nn.ReLU(inplace=True),
            ]
        return nn.Sequential(*layers)


class TokenHead(Head):
    """The mean of all tokens, or the first one (a class token), and a linear layer.

    A head with a `mask` reads all that is carried: the second tensor is the mask (batch, tokens), in which 1 or True
    means "tokens" or "padding", and the mean is over tokens alone.

    >>> head = TokenHead((4, 8), 3, mask="tokens")
    >>> tokens, mask = torch.randn(2, 4, 8), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    >>> torch.allclose(head(tokens, mask)[:1], head(tokens[:1, :2], mask[:1, :2]))
    True
    """

    name = "token"
    channels_last = True

    def __init__(
        self, shape: Shape, num_classes: int, *, pooling: str = "mean", mask: str | None = None, norm: bool = True
    ) -> None:
        super().__init__(shape, num_classes, pooling=pooling, mask=mask, norm=norm)
        if len(shape) != 2:
            raise BadInput(f"features of shape {tuple(shape)} are not tokens (tokens, width): use head='pooled_linear'")
        if pooling not in ("mean", "class"):
            raise BadInput(f"there is no pooling {pooling!r}: choose 'mean' or 'class'")
        if mask not in (None, "tokens", "padding"):
            raise BadInput(f"a mask of {mask!r}: say whether 1 means 'tokens' or 'padding'")
        self.pooling, self.mask, self.reads_everything = pooling, mask, mask is not None
        self.norm = nn.LayerNorm(shape[-1]) if norm else nn.Identity()
        self.linear = nn.Linear(shape[-1], num_classes)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, *_: Tensor) -> Tensor:
        """Return the logits of (batch, tokens, width)."""
        if self.pooling == "class":
            pooled = tokens[:, 0]
        elif mask is None:
            pooled = tokens.mean(1)
        else:
            kept = mask.logical_not() if self.mask == "padding" else mask.bool()
            kept = kept.to(tokens.dtype).unsqueeze(-1)  # (batch, tokens, 1)
            pooled = (tokens * kept).sum(1) / kept.sum(1).clamp(min=1)
        return self.linear(self.norm(pooled))


class MLPHead(Head):
    """The average over all positions and a hidden layer before the linear one.

    >>> MLPHead((64,), 10)(torch.zeros(2, 64)).shape
    torch.Size([2, 10])
    """

    name = "mlp"

    def __init__(
        self, shape: Shape, num_classes: int, *, channels_last: bool = False, hidden: int | None = None
    ) -> None:
        super().__init__(shape, num_classes, channels_last=channels_last, hidden=hidden)
        self.channels_last = channels_last
        channels = shape[-1 if channels_last else 0]
        width = hidden or channels
        self.layers = nn.Sequential(
            nn.LayerNorm(channels), nn.Linear(channels, width), nn.GELU(), nn.Linear(width, num_classes)
        )

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits of (batch, channels, ...) or, channels last, (batch, ..., channels)."""
        return self.layers(_average(features, self.channels_last))


HEADS: dict[str, Callable[..., Head]] = {
    kind.name: kind for kind in (PooledLinear, FlattenLinear, ConvHead, SeparableHead, TokenHead, MLPHead)
}


def make_head(
    head: str | HeadFactory,
    shape: Sequence[int],
    num_classes: int,
    *,
    channels_last: bool | None = None,
) -> nn.Module:
    """Return a head for features of this shape (one sample's, without the batch).

    `head` is a name in HEADS, or "auto": a token head for (tokens, width), a pooled linear one for all else; or a
    function that makes one from the shape. Without `channels_last`, two axes are taken to be (tokens, width), and of
    more the first to be the channels.

    >>> make_head("auto", (197, 192), 10).name, make_head("auto", (96, 56, 56), 10).name
    ('token', 'pooled_linear')
    """
    shape = tuple(shape)
    if not shape:
        raise BadInput("features of shape (batch,) have nothing for a head to read: put the exit after another module")
    if not isinstance(head, str):
        made = head(shape)
        if not isinstance(made, nn.Module):
            raise BadInput(f"the function for heads returned a {type(made).__name__}: let it return a torch module")
        return made
    last = len(shape) == 2 if channels_last is None else channels_last
    name = ("token" if len(shape) == 2 and last else "pooled_linear") if head == "auto" else head
    if name not in HEADS:
        raise BadInput(f"there is no head {name!r}: choose 'auto', {', '.join(map(repr, HEADS))}, or give a function")
    if name == "token" and len(shape) == 2 and not last:
        raise BadInput(f"features of shape {shape} are (channels, positions), not tokens: use head='pooled_linear'")
    own = {} if name in ("token", "flatten_linear") else {"channels_last": last}
    return HEADS[name](shape, num_classes, **own)


def _average(features: Tensor, channels_last: bool | None) -> Tensor:
    """Return (batch, channels), averaged over all other axes."""
    if features.ndim < 3:
        return features
    return features.flatten(1, -2).mean(1) if channels_last else features.flatten(2).mean(2)
