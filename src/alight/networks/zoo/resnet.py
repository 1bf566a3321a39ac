"""ResNet for small images (He et al., Deep Residual Learning, CVPR 2016; the stem as for CIFAR)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from alight.errors import BadInput

WIDTHS = (64, 128, 256, 512)


class ResidualBlock(nn.Module):
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
        """Return features of as many channels as the block is wide."""
        changed = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(features)))))
        return self.relu(changed + self.downsample(features))


class ResNet(nn.Module):
    """Layers of residual blocks behind a 3 x 3 stem that keeps the size; four of two blocks each make a ResNet-18.

    `widths` has the channels of every layer, `channels` is of the images. Its weights are named as torchvision's are.

    >>> ResNet(num_classes=100)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 100])
    """

    def __init__(
        self,
        num_classes: int = 100,
        blocks: Sequence[int] = (2, 2, 2, 2),
        *,
        widths: Sequence[int] = WIDTHS,
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
        for index, name in enumerate(self.layers):
            before, stride = (widths[index - 1], 2) if index else (widths[0], 1)
            self.add_module(name, _layer(before, widths[index], stride, blocks[index]))
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


def _layer(channels: int, width: int, stride: int, blocks: int) -> nn.Sequential:
    later = (ResidualBlock(width, width, 1) for _ in range(blocks - 1))
    return nn.Sequential(ResidualBlock(channels, width, stride), *later)
