"""A short name for exactly these weights, exits and settings, by which tables and policies know their network."""

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from alight.models.multi_exit import MultiExitModel, structure


def fingerprint(model: MultiExitModel, **settings: object) -> str:
    """The network's fingerprint: its weights, statistics and their dtype, exits, heads, normalisation, and settings.

    >>> from torch import nn
    >>> model = MultiExitModel([nn.Linear(4, 8)], [nn.Linear(8, 3)])
    >>> fingerprint(model) == fingerprint(model), fingerprint(model) == fingerprint(model, dtype="bfloat16")
    (True, False)
    """
    told = json.dumps({**structure(model), **settings}, sort_keys=True, default=str)
    return digest(model.state_dict(), told)


def digest(state: Mapping[str, Tensor], told: str = "") -> str:
    """SHA-256 of tensors with their names, types and shapes, the first 16 hexadecimal digits."""
    hashed = hashlib.sha256(told.encode())
    for name, tensor in state.items():
        whole = tensor.detach().cpu().contiguous()
        hashed.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        hashed.update(whole.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()[:16]
