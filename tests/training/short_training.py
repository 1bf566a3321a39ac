"""Trainings of a second or two, and weights to compare after them."""

import torch
from digits import loader
from torch import nn

from alight.networks.multi_exit import MultiExitModel
from alight.training.metrics import History
from alight.training.settings import TrainingSettings
from alight.training.training import train_heads

FEW = 256  # samples, for tests that need not learn
OF_THE_CALL = {"validation", "checkpoint", "checkpoint_every", "callbacks"}


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def quick(model: MultiExitModel, data=None, **options) -> History:
    """Train for two epochs; options are of the call where it has them, of the settings otherwise."""
    of_the_call = {name: options.pop(name) for name in options.keys() & OF_THE_CALL}
    settings = TrainingSettings(**{"epochs": 2, **options})
    return train_heads(model, loader(FEW) if data is None else data, settings, progress=False, **of_the_call)
