"""Checkpoints: the state of a training as a file, and that of its optimizer as tensors and numbers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor
from torch.optim import Optimizer

from alight.errors import BadFile, BadInput
from alight.files import SCHEMA, PathLike, write_whole
from alight.networks.store import read_tensors

KIND = "Checkpoint"
DELETE = "delete it to train from the start"
RECOMPUTED = ("params", "lr", "param_names")  # of an optimizer's groups
GROUP = "group"


@dataclass(frozen=True)
class Checkpoint:
    """The state of a training at the end of an epoch, in one safetensors file: all that the next epoch needs."""

    epochs_done: int
    settings: Mapping[str, Any]  # a training with other settings must not resume from here
    tensors: Mapping[str, Tensor]  # "model.", "optimizer.", "average." or "best." and a name
    numbers: Mapping[str, Any]  # history, counters, the loss scale, states of callbacks

    def part(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one part, by their names in it."""
        prefix = f"{name}."
        return {key.removeprefix(prefix): tensor for key, tensor in self.tensors.items() if key.startswith(prefix)}

    def save(self, path: PathLike) -> None:
        """Write the checkpoint; if that fails, the previous one is still there."""
        metadata = {"alight": KIND, "schema": SCHEMA, "epochs_done": self.epochs_done}
        metadata |= {"settings": self.settings, "numbers": self.numbers}
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.tensors.items()}
        content = save(tensors, metadata={"alight": json.dumps(metadata)})
        try:
            write_whole(path, lambda file: file.write(content))
        except OSError as error:
            state = "the previous checkpoint is kept" if Path(path).exists() else "there is no previous checkpoint"
            raise OSError(error.errno, f"{error.strerror}; {state}", str(path)) from error

    @classmethod
    def load(cls, path: PathLike) -> "Checkpoint":
        """Read the file that `save` wrote."""
        tensors, text = read_tensors(path, remedy=DELETE)
        try:
            metadata = json.loads(text.get("alight", "null"))
        except json.JSONDecodeError as error:
            raise BadFile(path, f"it is damaged ({error})", DELETE) from error
        if not isinstance(metadata, dict) or metadata.get("alight") != KIND or type(metadata.get("schema")) is not int:
            raise BadFile(path, "it is not a checkpoint of alight", "give another path for the checkpoint")
        if (schema := metadata["schema"]) > SCHEMA:
            raise BadFile(path, f"its schema is {schema}, this alight reads up to {SCHEMA}", "upgrade alight")
        try:
            return cls(metadata["epochs_done"], metadata["settings"], tensors, metadata["numbers"])
        except KeyError as error:
            raise BadFile(path, f"it lacks {error}", DELETE) from error


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's state, named by the parameter's index, or the group's, and their own."""
    return {
        f"{section}.{name}": value
        for section, values in _sections(optimizer).items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def optimizer_numbers(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return all else that an optimizer keeps, of parameters and of groups of them; refuse what is not data."""
    return {
        section: {name: _as_data(name, value) for name, value in values.items() if not isinstance(value, Tensor)}
        for section, values in _sections(optimizer).items()
    }


def restore_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
    """Give an optimizer the state that these tensors and numbers hold."""
    sections: dict[str, dict[str, Any]] = {
        section: {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        for section, values in numbers.items()
    }
    for key, tensor in tensors.items():
        section, _, name = key.partition(".")
        sections[section][name] = tensor
    groups = [
        group | sections.pop(f"{GROUP}{number}") for number, group in enumerate(optimizer.state_dict()["param_groups"])
    ]
    state = {int(index): values for index, values in sections.items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _sections(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return what an optimizer keeps, by parameter and by group, without what settings give anew."""
    found = optimizer.state_dict()
    groups = {
        f"{GROUP}{number}": {name: value for name, value in group.items() if name not in RECOMPUTED}
        for number, group in enumerate(found["param_groups"])
    }
    return {str(index): dict(values) for index, values in found["state"].items()} | groups


def _as_data(name: str, value: Any) -> Any:
    plain = (bool, int, float, str, type(None))
    if isinstance(value, plain) or (isinstance(value, tuple) and all(isinstance(each, plain) for each in value)):
        return value
    raise BadInput(
        f"the optimizer keeps a {type(value).__name__} as {name!r}, and a checkpoint keeps tensors and numbers alone:"
        " train without a checkpoint, or use another optimizer"
    )
