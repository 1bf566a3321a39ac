"""What a training keeps: its state as a file, which settings that state belongs to, and the weights of its best epoch.

Settings are remembered as data, functions among them by name and a digest of what they do.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim import Optimizer

from alight.errors import BadFile, BadInput
from alight.files import SCHEMA, PathLike, write_whole
from alight.networks.multi_exit import digest
from alight.networks.store import read_tensors
from alight.training.metrics import Epoch

if TYPE_CHECKING:
    from alight.training.settings import ResolvedSettings

KIND = "Checkpoint"
DELETE = "delete it to train from the start"
RECOMPUTED = ("params", "lr", "param_names")  # of an optimizer's groups
GROUP = "group"
LIBRARIES = ("torch", "alight")  # whose functions are known by their names
DATA = (bool, int, float, str, bytes, type(None))


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


def identity_of(value: Any) -> Any:
    """Return a setting as JSON keeps it, a function as its name with a digest of its code, bound values and constants.

    Of networks that a function refers to only the class counts, since their weights change.

    >>> def focal(logits, labels, power=2): ...
    >>> def harder(logits, labels, power=3): ...
    >>> identity_of(focal) == identity_of(focal) != identity_of(harder)
    True
    >>> identity_of((0.5, nn.functional.cross_entropy))
    [0.5, 'torch.nn.functional.cross_entropy']
    """
    if isinstance(value, tuple | list):
        return [identity_of(each) for each in value]
    if not callable(value) or _is_known(value):
        return _name(value) if callable(value) else value
    return f"{_name(value)} {hashlib.sha256(repr([*_traits(value, set())]).encode()).hexdigest()[:16]}"


def _name(value: Any) -> str:
    named = value.func if isinstance(value, partial) else value
    named = named if hasattr(named, "__qualname__") else type(named)
    return f"{named.__module__}.{named.__qualname__}"


def _is_known(value: Any) -> bool:
    """Return whether the name says all: of a class, or of a function of a library."""
    home = (getattr(value, "__module__", None) or "").partition(".")[0]
    return isinstance(value, type) or (hasattr(value, "__qualname__") and home in LIBRARIES)


def _traits(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield texts that differ where the value does something else."""
    if isinstance(value, DATA):
        yield repr(value)
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    yield _name(value)
    for part in _parts(value):
        yield from _traits(part, seen)


def _parts(value: Any) -> list[Any]:
    """Return what a value consists of, as far as it can be known."""
    if isinstance(value, FunctionType) and not _is_known(value):
        return [value.__code__, value.__defaults__, value.__kwdefaults__, *_referred(value)]
    if isinstance(value, CodeType):
        return [value.co_code, *value.co_names, *value.co_consts]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, Tensor):
        return [digest({"": value})]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, value.tolist() if value.dtype.hasobject else value.tobytes()]
    if isinstance(value, dict):
        return [part for key in sorted(value, key=repr) for part in (key, value[key])]
    if isinstance(value, list | tuple):
        return [*value]
    return sorted(value, key=repr) if isinstance(value, set | frozenset) else _attributes(value)


def _attributes(value: Any) -> list[Any]:
    """Return the attributes of an object, unless its name says all or it is a network, whose weights change."""
    learns = isinstance(value, nn.Module) and any(True for _ in value.parameters())
    return [] if learns or isinstance(value, type) else [getattr(value, "__dict__", None)]


def _referred(function: FunctionType) -> list[Any]:
    """Return what a function takes from around it: its closure, and constants and functions of its module."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    names = [name for name in function.__code__.co_names if name in function.__globals__]
    around = [function.__globals__[name] for name in names]
    own = [each for each in around if isinstance(each, FunctionType) and each.__module__ == function.__module__]
    return [*cells, *own, *(each for each in around if isinstance(each, DATA))]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a name that is bound after the function
        return False


class BestEpoch:
    """The epoch with the highest validation accuracy, or the lowest loss, and the weights after it."""

    def __init__(self, settings: "ResolvedSettings", exits: Sequence[str], start: int) -> None:
        self._settings, self._exits, self._start = settings, exits, start  # earlier epochs train something else
        self.index: int | None = None
        self.weights: dict[str, Tensor] = {}  # on the CPU
        if settings.monitor_exit is not None and settings.monitor_exit not in exits:
            raise BadInput(f"monitor_exit {settings.monitor_exit!r} is none of the exits {', '.join(map(repr, exits))}")

    def update(self, epochs: Sequence[Epoch], module: nn.Module) -> bool:
        """Look at the last of these epochs; return whether the training has waited for a better one long enough."""
        before, self.index = self.index, self._best(epochs)
        if self.index != before and self._settings.keep_best:
            self.weights = {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}
        patience, first = self._settings.patience, self._start if self.index is None else self.index
        return patience is not None and len(epochs) - 1 - first >= patience

    def restore(self, epochs: Sequence[Epoch], weights: Mapping[str, Tensor]) -> None:
        """Resume after these epochs, with the weights of the best of them."""
        self.index, self.weights = self._best(epochs), dict(weights)

    def _best(self, epochs: Sequence[Epoch]) -> int | None:
        """Return the first of the best epochs; None where no loss is finite."""
        values = {index: self._value(epochs[index]) for index in range(self._start, len(epochs))}
        known = {index: value for index, value in values.items() if value == value}  # NaN is not equal to itself
        return max(known, key=lambda index: known[index], default=None)

    def _value(self, epoch: Epoch) -> float:
        """Return what is monitored in one epoch, higher for a better one."""
        accuracy = self._settings.monitor == "accuracy"
        row = epoch.validation_accuracies if accuracy else epoch.validation_losses
        if not row:
            raise BadInput("the validation data have no labels, so no epoch has an accuracy: set monitor='loss'")
        weights = dict(zip(self._exits, self._settings.loss_weights, strict=True))
        if self._settings.monitor_exit is not None:
            weights = {self._settings.monitor_exit: 1.0}
        values = dict(zip(self._exits, row, strict=True))
        mean = sum(weight * (values[each] or 0.0) for each, weight in weights.items() if weight) / sum(weights.values())
        return mean if accuracy else -mean
