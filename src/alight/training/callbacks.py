"""Callbacks: what a training calls after every step and every epoch, with its state."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from alight.errors import BadInput
from alight.networks.multi_exit import MultiExitModel
from alight.training.metrics import History


@dataclass(frozen=True)
class TrainingState:
    """Where a training stands when it calls a callback.

    After an epoch, `model` has the weights that were validated: with `ema`, their average. After a step, `losses` are
    its mean losses by exit, on the network's device, where reading them waits for a GPU.

    >>> from alight.training.metrics import Epoch
    >>> history = History(("layer1", "end"), (Epoch((0.9, 0.1), (0.7, 0.98)),))
    >>> TrainingState(None, None, epoch=0, step=20, losses={}, history=history).metrics["accuracy/end"]
    0.98
    """

    model: MultiExitModel  # that is trained
    optimizer: Optimizer  # that trains it
    epoch: int  # the one under way or just finished, from 0
    step: int  # steps of the optimizer since the start of the training
    losses: Mapping[str, Tensor]  # of this step, by exit
    history: History  # of the epochs that are finished

    @property
    def metrics(self) -> dict[str, float]:
        """Loss and accuracy of every exit in the last finished epoch, as `loss/layer1` or `validation_accuracy/end`."""
        return self.history.epochs[-1].metrics(self.history.exits) if self.history.epochs else {}


class Callback:
    """What a training calls: override the methods that you need. One that returns True stops the training.

    Under `torchrun` the first process alone calls them, and all stop with it. A function of the state may stand for a
    callback with `on_epoch_end` alone.

    >>> class StopAt(Callback):
    ...     def on_epoch_end(self, state):
    ...         return state.metrics["accuracy/end"] > 0.9
    """

    def on_step_end(self, state: TrainingState) -> bool | None:
        """Look at the training after a step of the optimizer; to return True ends the epoch here, and the training."""

    def on_epoch_end(self, state: TrainingState) -> bool | None:
        """Look at the training after an epoch and its validation; to return True ends the training."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep of this callback, as numbers, texts, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the state that a checkpoint has kept."""


EpochFunction = Callable[[TrainingState], bool | None]
METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class _EpochEnd(Callback):
    """A function of the state after every epoch."""

    def __init__(self, function: EpochFunction) -> None:
        self.on_epoch_end = function  # type: ignore[assignment, method-assign]


class CallbackList:
    """All callbacks of a training, called in their order."""

    def __init__(self, callbacks: Iterable[Callback | EpochFunction]) -> None:
        self._callbacks = [each if isinstance(each, Callback) else _checked_function(each) for each in callbacks]
        for each in self._callbacks:
            if unknown := [name for name in dir(each) if name.startswith("on_") and name not in METHODS]:
                raise BadInput(
                    f"the callback {type(each).__name__} has {unknown[0]}, which a training does not call:"
                    f" it calls {' and '.join(METHODS)}"
                )
        self.watches_steps = any(type(each).on_step_end is not Callback.on_step_end for each in self._callbacks)

    def on_step_end(self, state: TrainingState) -> bool:
        """Call all after a step; return whether one of them stops the training."""
        return _any_true([each.on_step_end(state) for each in self._callbacks])

    def on_epoch_end(self, state: TrainingState) -> bool:
        """Call all after an epoch; return whether one of them stops the training."""
        return _any_true([each.on_epoch_end(state) for each in self._callbacks])

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the states of all that have one, by the names of their classes and their numbers among them."""
        states = {name: each.state_dict() for name, each in self._named().items()}
        for name, state in states.items():
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise BadInput(
                    f"the state of callback {name} does not fit into a checkpoint ({error}):"
                    " return numbers, texts, lists and dicts from state_dict"
                ) from error
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Give each callback the state that was saved under its name."""
        for name, each in self._named().items():
            if name in states:
                each.load_state_dict(states[name])

    def _named(self) -> dict[str, Callback]:
        counts, named = Counter[str](), {}
        for each in self._callbacks:
            kind = type(each).__qualname__
            named[f"{kind} {counts[kind]}"] = each
            counts[kind] += 1
        return named


def _checked_function(callback: Any) -> Callback:
    if isinstance(callback, type) or not callable(callback):
        kind = f"the class {callback.__name__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
        raise BadInput(f"{kind} is not a callback: give an object of a subclass of alight.Callback, or a function")
    return _EpochEnd(callback)


def _any_true(answers: list[Any]) -> bool:
    """Return whether any is true: a bool of Python, NumPy or torch. Anything else that was returned means nothing."""
    return any(isinstance(answer, bool | np.bool_ | Tensor) and bool(answer) for answer in answers)
