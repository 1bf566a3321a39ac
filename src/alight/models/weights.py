"""Weights of a trained backbone, put into the stages that it was cut into."""

import os
from collections.abc import Mapping

from torch import Tensor

from alight.errors import BadFile, Mismatch
from alight.files import PathLike
from alight.models.multi_exit import MultiExitModel

CONVERT = 'convert it once: safetensors.torch.save_file(torch.load(path, weights_only=True), "weights.safetensors")'


def load_backbone(model: MultiExitModel, path: PathLike) -> None:
    """Give the stages the weights of a safetensors file, by the names that they had before the network was cut."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(os.fspath(path))
    except SafetensorError as error:
        raise BadFile(path, f"it is no whole safetensors file ({error})", CONVERT) from error
    put_backbone(model, found)


def put_backbone(model: MultiExitModel, state: Mapping[str, Tensor]) -> None:
    """Give the stages these weights, by the names that they had before the network was cut."""
    own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("stages.")}
    original = {name: name.split(".", 2)[2] for name in own}  # after "stages." and the stage's number
    missing = [each for each in original.values() if each not in state]
    other = [each for name, each in original.items() if each in state and state[each].shape != own[name].shape]
    unknown = sorted(state.keys() - set(original.values()))
    for what, names in {"are missing": missing, "have another shape": other, "belong nowhere": unknown}.items():
        if names:
            raise Mismatch(
                f"the weights are another network's: {len(names)} {what}, the first {names[0]!r};"
                " name the network (and its number of classes) that they were saved from"
            )
    for name, tensor in own.items():
        tensor.copy_(state[original[name]])
