"""Separate networks in a chain: a sample that does not leave after one is given to the next."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from alight.errors import BadInput
from alight.networks.multi_exit import Carried, MultiExitModel, describe, input_names


def cascade(models: Sequence[nn.Module], exits: Sequence[str] = (), example: Any = None) -> MultiExitModel:
    """Chain separate networks, from cheap to expensive, as one model with an exit after each.

    `exits` names the networks. With an `example`, a batch as every network takes it, the number of classes is checked.

    >>> import torch
    >>> model = cascade([nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))])
    >>> [tuple(logits.shape) for logits in model(torch.zeros(5, 4))]
    [(5, 3), (5, 3)]
    """
    names = input_names(example)
    stages = [CascadeStage(network, first=index == 0, input_names=names) for index, network in enumerate(models)]
    model = MultiExitModel(stages, [nn.Identity() for _ in stages], exits, names, recipe={"source": "cascade"})
    if example is not None:
        widths = [logits.shape[-1] for logits in model.try_out(example)]
        if len(set(widths)) > 1:
            raise BadInput(f"the networks give {widths} logits: give networks with the same classes")
        model.num_classes = widths[0]
        model.recipe["example"] = describe(example)
    return model


class CascadeStage(nn.Module):
    """One network of a cascade: returns its logits, then the inputs."""

    def __init__(self, network: nn.Module, *, first: bool, input_names: Sequence[str] = ()) -> None:
        super().__init__()
        self.network, self.first, self.input_names = network, first, tuple(input_names)

    def forward(self, *carried: Tensor) -> Carried:
        """Return the logits, then the inputs."""
        inputs = carried if self.first else carried[1:]
        if self.input_names:
            output = self.network(**dict(zip(self.input_names, inputs, strict=True)))
        else:
            output = self.network(*inputs)
        return (getattr(output, "logits", output), *inputs)  # transformers return an object that has logits
