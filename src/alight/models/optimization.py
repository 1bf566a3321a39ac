"""How weights move: the optimizer, its learning rate over time, and the average of its path."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import cos, pi

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from alight.errors import BadInput

OPTIMIZERS = {"adamw": 1e-3, "sgd": 3e-2}  # with the learning rate that is taken where none is given
WARM_UP = 0.3  # share of the training in which a one-cycle schedule climbs
FIRST, FINAL = 1 / 25, 1e-4 / 25  # of the peak, where a one-cycle schedule starts and ends (Smith and Topin 2018)


def make_optimizer(
    name: str,
    parameters: Iterable[nn.Parameter],
    learning_rate: float,
    weight_decay: float,
    momentum: float,
    nesterov: bool = False,
) -> Optimizer:
    """The optimizer of this name."""
    if name == "sgd":
        return SGD(parameters, lr=learning_rate, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov)
    return AdamW(parameters, lr=learning_rate, weight_decay=weight_decay, betas=(momentum, 0.999))


def _constant(_: float) -> float:
    return 1.0


def _cosine(done: float) -> float:
    return 0.5 * (1 + cos(pi * done))


def _one_cycle(done: float) -> float:
    if done < WARM_UP:
        return 1 - (1 - FIRST) * _cosine(done / WARM_UP)
    return FINAL + (1 - FINAL) * _cosine((done - WARM_UP) / (1 - WARM_UP))


SCHEDULES = {"cosine": _cosine, "onecycle": _one_cycle, None: _constant}


def learning_rate_factor(schedule: str | None, done: float) -> float:
    """By how much to multiply the learning rate once this share of the training is done.

    >>> [round(learning_rate_factor("cosine", done), 2) for done in (0.0, 0.5, 1.0)]
    [1.0, 0.5, 0.0]
    """
    return SCHEDULES[schedule](min(done, 1.0))


class Average:
    """The exponential moving average of a module's weights and statistics."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        if not 0 < decay < 1:
            raise BadInput(f"ema {decay:g} must lie inside (0, 1): 0.999 averages over the last thousand steps")
        self._module, self._decay, self.steps = module, decay, 0
        self.state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the module's weights of now; at first quickly, so that the start is forgotten."""
        self.steps += 1
        decay = min(self._decay, (1 + self.steps) / (10 + self.steps))
        for name, tensor in self._module.state_dict().items():
            if tensor.is_floating_point():
                self.state[name].lerp_(tensor, 1 - decay)
            else:
                self.state[name].copy_(tensor)

    def load(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Take up an average where it was left."""
        self.steps = steps
        for name, tensor in state.items():
            self.state[name].copy_(tensor)

    @contextmanager
    def worn(self) -> Iterator[None]:
        """The module with averaged weights for a while."""
        own = {name: tensor.detach().clone() for name, tensor in self._module.state_dict().items()}
        self._module.load_state_dict(self.state)
        try:
            yield
        finally:
            self._module.load_state_dict(own)
