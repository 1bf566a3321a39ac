"""Handwritten digits and a small network with exits that learns them in seconds."""

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from alight.networks.multi_exit import MultiExitModel

HELD_OUT = 397


@cache
def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out digits, shuffled, 8 x 8 with values in [0, 1]."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(found.target)[order]
    return TensorDataset(images[HELD_OUT:], labels[HELD_OUT:]), TensorDataset(images[:HELD_OUT], labels[:HELD_OUT])


def loader(samples: int = 1400, batch_size: int = 64, *, shuffle: bool = True) -> DataLoader:
    """Training digits in batches."""
    images, labels = digits()[0][:samples]
    return DataLoader(TensorDataset(images, labels), batch_size, shuffle=shuffle)


def held_out(batch_size: int = 200) -> DataLoader:
    """Digits that no training sees."""
    return DataLoader(digits()[1], batch_size)


def network(seed: int = 0, dropout: float = 0.0) -> MultiExitModel:
    """Three exits: the first two with pooled linear heads, the last the network's own classifier."""
    torch.manual_seed(seed)
    last = nn.Sequential(nn.MaxPool2d(2), _block(32, 32), nn.Dropout(dropout), nn.Flatten(), nn.Linear(128, 10))
    return MultiExitModel(
        [_block(1, 16), nn.Sequential(nn.MaxPool2d(2), _block(16, 32)), last],
        [_head(16, 4, dropout), _head(32, 2, dropout), nn.Identity()],
    )


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def _head(channels: int, size: int, dropout: float) -> nn.Sequential:
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(size), nn.Flatten(), nn.Dropout(dropout))
    return nn.Sequential(pooled, nn.Linear(channels * size * size, 10))
