"""Networks of torch as members of a cascade."""

from typing import Any

import torch
from torch import nn

from alight.data.preprocess import Normalisation
from alight.errors import BadInput
from alight.networks.attach import attach_heads
from alight.networks.multi_exit import MultiExitModel


def torch_member(
    network: Any, example: Any = None, image_size: int | None = None, normalisation: Normalisation | None = None
) -> MultiExitModel:
    """Return a network with its exits, or one without as a network with a single exit, its end."""
    if isinstance(network, MultiExitModel):
        return network
    if not isinstance(network, nn.Module):
        raise BadInput(
            f"a {type(network).__name__} is not a network: give one of torch, a MultiExitModel, a folder that alight"
            " wrote, an .onnx or .tflite file, or a URL"
        )
    if image_size is not None:
        channels = 3 if normalisation is None else len(normalisation.mean)
        example = torch.zeros(2, channels, image_size, image_size)
    if example is None:
        raise BadInput(
            f"a {type(network).__name__} does not say what it takes: give cascade(networks, example=...) a batch, or"
            " the network as Member(network, image_size=..., normalisation=...)"
        )
    return attach_heads(network, (), example=example, normalisation=normalisation)
