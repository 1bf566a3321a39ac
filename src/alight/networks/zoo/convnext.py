"""ConvNeXt (Liu et al., A ConvNet for the 2020s, CVPR 2022)."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from alight.errors import BadInput


class ConvNeXt(nn.Module):
    """Four stages of blocks, the map halved between them; its weights are named as timm's are.

    `drop_path` is the probability that the last block is left out for a sample in training; it grows from 0 at the
    first block (stochastic depth, Huang et al. 2016).

    >>> ConvNeXt(depths=(1, 1, 2, 1), widths=(8, 16, 32, 64), num_classes=10)(torch.zeros(2, 3, 64, 64)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        depths: Sequence[int],
        widths: Sequence[int],
        num_classes: int,
        *,
        patch: int = 4,
        scale: float = 1e-6,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        if len(depths) != len(widths) or not depths:
            raise BadInput(f"{len(depths)} depths and {len(widths)} widths: give one of each per stage")
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], patch, patch), ChannelNorm(widths[0]))
        channels = [widths[0], *widths]
        self.stages = nn.Sequential(
            *(
                ConvNeXtStage(*pair, depth, scale, halve=index > 0)
                for index, (pair, depth) in enumerate(zip(pairwise(channels), depths, strict=True))
            )
        )
        if not 0 <= drop_path < 1:
            raise BadInput(f"drop_path {drop_path:g} is out of bounds: give a probability from 0 to below 1")
        blocks = [part for part in self.stages.modules() if isinstance(part, Block)]
        for index, block in enumerate(blocks):
            block.drop_path.probability = drop_path * index / max(len(blocks) - 1, 1)
        self.head = Classifier(widths[-1], num_classes)
        for part in self.modules():
            if isinstance(part, nn.Conv2d | nn.Linear) and part.bias is not None:
                nn.init.trunc_normal_(part.weight, std=0.02)
                nn.init.zeros_(part.bias)

    @property
    def blocks(self) -> list[str]:
        """Return names of all blocks, in the order in which they run."""
        return [name for name, part in self.named_modules() if isinstance(part, Block)]

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(self.stages(self.stem(images)))


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of (batch, channels, height, width)."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-6)

    def forward(self, features: Tensor) -> Tensor:
        """Return features of the same shape."""
        return super().forward(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class MLP(nn.Module):
    """Two linear layers over the channels, the inner one four times as wide."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels, 4 * channels)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(4 * channels, channels)

    def forward(self, features: Tensor) -> Tensor:
        """Return features of the same shape, channels last."""
        return self.fc2(self.act(self.fc1(features)))


class DropPath(nn.Module):
    """Zeros in the place of random samples in training; the others are scaled so that the mean stays."""

    def __init__(self, probability: float = 0.0) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, features: Tensor) -> Tensor:
        """Return features of the same shape."""
        if not self.training or self.probability == 0:
            return features
        ones = features.new_ones(features.shape[:1] + (1,) * (features.ndim - 1))
        return features * functional.dropout(ones, self.probability)


class Block(nn.Module):
    """A 7 x 7 depth-wise convolution, then an MLP over the channels, scaled and added to what came in."""

    def __init__(self, channels: int, scale: float) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.mlp = MLP(channels)
        self.gamma = nn.Parameter(scale * torch.ones(channels))
        self.drop_path = DropPath()

    def forward(self, features: Tensor) -> Tensor:
        """Return features of the same shape."""
        changed = self.mlp(self.norm(self.conv_dw(features).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return features + self.drop_path(changed * self.gamma.reshape(1, -1, 1, 1))


class ConvNeXtStage(nn.Module):
    """Blocks of one width, behind a halving of the map where there is one."""

    def __init__(self, channels: int, width: int, depth: int, scale: float, *, halve: bool) -> None:
        super().__init__()
        self.downsample = (
            nn.Sequential(ChannelNorm(channels), nn.Conv2d(channels, width, 2, 2)) if halve else nn.Identity()
        )
        self.blocks = nn.Sequential(*(Block(width, scale) for _ in range(depth)))

    def forward(self, features: Tensor) -> Tensor:
        """Return features of this stage's width."""
        return self.blocks(self.downsample(features))


class Classifier(nn.Module):
    """The average over the map, normalised, and a linear layer."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits."""
        return self.fc(self.norm(features.mean((2, 3))))
