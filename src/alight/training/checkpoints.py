"""Checkpoints: the state of a training at the end of an epoch, in one safetensors file written atomically."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from alight.errors import BadFile, Mismatch
from alight.files import SCHEMA, PathLike, write_whole

KIND = "Checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """All that the next epoch needs: tensors by name, and JSON values."""

    epochs_done: int
    settings: Mapping[str, Any]  # a training with other settings must not resume from here
    tensors: Mapping[str, Tensor]  # "model.", "optimizer." or "average." and a name
    numbers: Mapping[str, Any] = field(default_factory=dict)  # history, counters, the loss scale

    def part(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one part, by their names in it."""
        prefix = f"{name}."
        return {key.removeprefix(prefix): tensor for key, tensor in self.tensors.items() if key.startswith(prefix)}

    def check(self, settings: Mapping[str, Any], path: PathLike) -> "Checkpoint":
        """Return this checkpoint if it belongs to a training with these settings; raise otherwise."""
        if changed := [name for name in settings if self.settings.get(name) != settings[name]]:
            changes = "; ".join(f"{name} was {self.settings.get(name)!r}, now {settings[name]!r}" for name in changed)
            raise Mismatch(
                f"the checkpoint {path} belongs to another training ({changes}):"
                " give the same settings, or delete it to train from the start"
            )
        return self

    def save(self, path: PathLike) -> None:
        """Write the checkpoint; if that fails, the previous one is still there."""
        from safetensors.torch import save

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
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                metadata = json.loads((file.metadata() or {}).get("alight", "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, json.JSONDecodeError) as error:
            raise BadFile(path, f"it is damaged ({error})", "delete it to train from the start") from error
        if not isinstance(metadata, dict) or metadata.get("alight") != KIND or type(metadata.get("schema")) is not int:
            raise BadFile(path, "it is not a checkpoint of alight", "give another path for the checkpoint")
        if (schema := metadata["schema"]) > SCHEMA:
            raise BadFile(path, f"its schema is {schema}, this alight reads up to {SCHEMA}", "upgrade alight")
        try:
            return cls(metadata["epochs_done"], metadata["settings"], tensors, metadata["numbers"])
        except KeyError as error:
            raise BadFile(path, f"it lacks {error}", "delete it to train from the start") from error


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the state tensors of an optimizer, named by the parameter's index and the state's name."""
    return {
        f"{index}.{name}": value
        for index, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give an optimizer the state that `optimizer_tensors` returned."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
