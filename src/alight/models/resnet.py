"""ResNet for small images (He et al., Deep Residual Learning, CVPR 2016; the stem as for CIFAR)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from alight.errors import BadInput

WIDTHS = (64, 128, 256, 512)


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions and what came in."""

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
        """Features of as many channels as the block is wide."""
        changed = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(features)))))
        added: Tensor = self.relu(changed + self.downsample(features))
        return added


class ResNet(nn.Module):
    """Four layers of residual blocks behind a 3 x 3 stem that keeps the size; two blocks each make a ResNet-18.

    Its weights are named as torchvision's are.

    >>> ResNet(num_classes=100)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 100])
    """

    def __init__(self, num_classes: int = 100, blocks: Sequence[int] = (2, 2, 2, 2)) -> None:
        super().__init__()
        if len(blocks) != len(WIDTHS) or min(blocks) < 1:
            raise BadInput(f"blocks {tuple(blocks)} are not one number per layer, at least 1: give four")
        self.conv1 = nn.Conv2d(3, WIDTHS[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _layer(WIDTHS[0], WIDTHS[0], 1, blocks[0])
        self.layer2 = _layer(WIDTHS[0], WIDTHS[1], 2, blocks[1])
        self.layer3 = _layer(WIDTHS[1], WIDTHS[2], 2, blocks[2])
        self.layer4 = _layer(WIDTHS[2], WIDTHS[3], 2, blocks[3])
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(WIDTHS[3], num_classes)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        features = self.relu(self.bn1(self.conv1(images)))
        features = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(features), 1))
        return logits


def _layer(channels: int, width: int, stride: int, blocks: int) -> nn.Sequential:
    later = (ResidualBlock(width, width, 1) for _ in range(blocks - 1))
    return nn.Sequential(ResidualBlock(channels, width, stride), *later)
