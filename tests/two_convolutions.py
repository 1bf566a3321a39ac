"""Small networks that tests of attaching and verifying change."""

import random

import torch
from torch import nn

IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Network(nn.Module):
    """Two convolutions and a classifier; subclasses change what lies between."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.norm, self.classifier = nn.BatchNorm2d(6), nn.Linear(6, 4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.classifier(self.rest(self.first(x).relu()))

    def rest(self, x):
        return self.norm(self.second(x)).mean((2, 3))


class DropsAtRandom(Network):
    def rest(self, x):
        return super().rest(x) if self.training and random.random() < 0.5 else super().rest(x) * 2
