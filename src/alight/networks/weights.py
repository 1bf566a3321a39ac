"""Tensors of a network: how they are identified, written once and put in place."""

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from alight.errors import BadFile, BadInput, Mismatch
from alight.files import PathLike
from alight.networks.multi_exit import MultiExitModel

CONVERT = 'convert it once: safetensors.torch.save_file(torch.load(path, weights_only=True), "weights.safetensors")'


def digest(state: Mapping[str, Tensor], structure: str = "") -> str:
    """Return the SHA-256 of a text and of tensors with names, types and shapes, the first 16 hexadecimal digits."""
    hashed = hashlib.sha256(structure.encode())
    for name, tensor in state.items():
        whole = tensor.detach().cpu().contiguous()
        hashed.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        hashed.update(whole.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()[:16]


def load_backbone(model: MultiExitModel, path: PathLike) -> None:
    """Give the stages the weights of a safetensors file, by the names that they had before the network was cut."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = load_file(os.fspath(path))
    except SafetensorError as error:
        raise BadFile(path, f"it is not a whole safetensors file ({error})", CONVERT) from error
    own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("stages.")}
    original = {name: name.split(".", 2)[2] for name in own}  # after "stages." and the stage's number
    missing = [each for each in original.values() if each not in state]
    other = [each for name, each in original.items() if each in state and state[each].shape != own[name].shape]
    unknown = sorted(state.keys() - set(original.values()))
    for problem, names in {"are missing": missing, "have another shape": other, "are not needed": unknown}.items():
        if names:
            raise Mismatch(
                f"the weights are another network's: {len(names)} {problem}, the first {names[0]!r};"
                " name the network (and its number of classes) that they were saved from"
            )
    for name, tensor in own.items():
        tensor.copy_(state[original[name]])


def untied(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return every tensor once, whole and in memory of its own, and the names of those that are another one."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise BadInput(f"{name} is a {type(tensor).__name__}, not a tensor: only tensors can be saved")
        place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            tied[name] = seen[place]
        else:
            seen[place] = name
            tensors[name] = tensor.detach().cpu().contiguous()
    stored = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
    alone = {name: stored[tensor.untyped_storage().data_ptr()] == 1 for name, tensor in tensors.items()}
    return {name: tensor if alone[name] else tensor.clone() for name, tensor in tensors.items()}, tied


def put(model: MultiExitModel, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    """Put saved tensors into a network, in their dtype; what is shared stays shared."""
    whole = {**tensors, **{name: tensors[other] for name, other in tied.items()}}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensor.data = tensor.data.to(whole[name].dtype)
    model.load_state_dict(whole)
