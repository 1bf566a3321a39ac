"""Where training stood at the end of an epoch: one safetensors file, written whole or not at all."""

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
    """All that the next epoch needs: tensors by name, and plain numbers."""

    epochs_done: int
    settings: Mapping[str, Any]  # of the training; another training must not go on from here
    tensors: Mapping[str, Tensor]  # "model.", "optimizer." or "average." and a name
    numbers: Mapping[str, Any] = field(default_factory=dict)  # history, counters, the loss scale

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors of one part."""
        return {
            key.removeprefix(f"{name}."): tensor for key, tensor in self.tensors.items() if key.startswith(f"{name}.")
        }

    def check(self, settings: Mapping[str, Any], path: PathLike) -> "Checkpoint":
        """This checkpoint, unless it is of a training with other settings."""
        other = [name for name in settings if self.settings.get(name) != settings[name]]
        if other:
            told = "; ".join(f"{name} was {self.settings.get(name)!r}, now {settings[name]!r}" for name in other)
            raise Mismatch(
                f"the checkpoint {path} is of another training ({told}):"
                " give the same settings, or delete it to start anew"
            )
        return self

    def save(self, path: PathLike) -> None:
        """Write the checkpoint; if that fails the one before it is still there."""
        from safetensors.torch import save

        told = {"alight": KIND, "schema": SCHEMA, "epochs_done": self.epochs_done}
        told |= {"settings": self.settings, "numbers": self.numbers}
        whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.tensors.items()}
        content = save(whole, metadata={"alight": json.dumps(told)})
        try:
            write_whole(path, lambda file: file.write(content))
        except OSError as error:
            problem = f"{error.strerror}; " + (
                "the checkpoint before it is kept" if Path(path).exists() else "no space"
            )
            raise OSError(error.errno, problem, str(path)) from error

    @classmethod
    def load(cls, path: PathLike) -> "Checkpoint":
        """The checkpoint of a file that `save` wrote."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                told = json.loads((file.metadata() or {}).get("alight", "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        except (SafetensorError, json.JSONDecodeError) as error:
            raise BadFile(path, f"it is damaged ({error})", "delete it to train from the start") from error
        if not isinstance(told, dict) or told.get("alight") != KIND or not isinstance(told.get("schema"), int):
            raise BadFile(path, "it is no checkpoint of alight", "give another path for the checkpoint")
        if told["schema"] > SCHEMA:
            raise BadFile(path, f"its schema is {told['schema']}, this alight reads up to {SCHEMA}", "upgrade alight")
        try:
            return cls(told["epochs_done"], told["settings"], tensors, told["numbers"])
        except KeyError as error:
            raise BadFile(path, f"it lacks {error}", "delete it to train from the start") from error


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """What an optimizer remembers, by the place of the parameter and the name of the memory."""
    return {
        f"{place}.{name}": value
        for place, memory in optimizer.state_dict()["state"].items()
        for name, value in memory.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Let an optimizer remember what `optimizer_tensors` gave."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        place, _, name = key.partition(".")
        state.setdefault(int(place), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
