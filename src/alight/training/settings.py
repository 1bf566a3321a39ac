"""How to train: settings, and the optimizer, schedule, phases and weight average that they stand for."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from alight.errors import BadInput
from alight.networks.multi_exit import Carried, MultiExitModel, advance, read

MODES = ("frozen", "joint", "mixed")
SCHEDULES = ("cosine", "onecycle", None)
PRECISIONS = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How to train: everything that makes one training differ from another.

    `mode` says what is trained. "frozen" (the paper): the heads alone, on the sum of their cross-entropies; the
    backbone runs once per batch without gradient, and neither its weights nor its batch-norm statistics change.
    "joint": everything. "mixed": for `backbone_epochs` the backbone on its last exit, then everything. A module whose
    weights all have requires_grad=False stays in evaluation mode: its batch-norm statistics do not change either.

    `distill` replaces that share of every earlier exit's loss by the divergence from the last exit's probabilities, at
    a softmax `temperature`; with a frozen backbone it needs no labels. `rescale_gradients` gives every stage the
    average of its exits' gradients instead of their sum (Li et al. 2019). `compile` runs what is trained through
    torch.compile, which pays where many small kernels wait for the host: after minutes of compiling, and with last
    bits that differ.

    >>> TrainingSettings(mode="joint", optimizer="sgd").resolve(num_exits=2).learning_rate
    0.03
    """

    mode: str = "frozen"  # or "joint", "mixed"
    epochs: int = 10
    backbone_epochs: int | None = None  # of mode "mixed"; None: half of all
    optimizer: str = "adamw"  # whose first beta is the momentum; or "sgd"
    learning_rate: float | None = None  # None: 1e-3 for adamw, 3e-2 for sgd
    weight_decay: float = 1e-4
    momentum: float = 0.9
    nesterov: bool = False  # for sgd
    schedule: str | None = "cosine"  # of the learning rate; or "onecycle", None
    loss_weights: Sequence[float] | None = None  # one per exit; None: 1 each
    distill: float = 0.0
    temperature: float = 1.0
    rescale_gradients: bool = False
    amp: str | None = None  # mixed precision: "bf16" or "fp16"
    channels_last: bool = False  # memory layout of images for a GPU's kernels; ignored on a CPU
    clip: float | None = None  # largest norm of the gradient
    ema: float | None = None  # decay, such as 0.999: the model ends with the average of its weights
    compile: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.loss_weights is not None:
            object.__setattr__(self, "loss_weights", tuple(map(float, self.loss_weights)))
        choices = {"mode": MODES, "optimizer": OPTIMIZERS, "schedule": SCHEDULES, "amp": PRECISIONS}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise BadInput(f"{name} {getattr(self, name)!r} is none of {', '.join(map(repr, known))}")
        for name, (holds, bound) in self._bounds().items():
            if not holds:
                raise BadInput(f"{name} {getattr(self, name)} is out of bounds: give {bound}")
        if self.mode == "mixed" and (self.loss_weights or (1.0,))[-1] == 0:
            raise BadInput("mixed training starts with the last exit, whose loss weight is 0: give it some")
        if self.nesterov and (self.optimizer != "sgd" or self.momentum == 0):
            raise BadInput("nesterov is a kind of SGD's momentum: use optimizer='sgd' with some, or leave it out")
        if self.rescale_gradients and self.mode == "frozen":
            raise BadInput("rescale_gradients changes nothing in a frozen backbone: leave it out, or use mode='joint'")

    def _bounds(self) -> dict[str, tuple[bool, str]]:
        """Return for every number whether it is allowed, and what is."""
        rate, weights, first = self.learning_rate, self.loss_weights, self.backbone_epochs
        in_epochs = self.mode != "mixed" or first is None or (type(first) is int and 0 <= first < self.epochs)
        return {
            "epochs": (type(self.epochs) is int and self.epochs >= 1, "a whole number, at least 1"),
            "learning_rate": (rate is None or rate > 0, "above 0"),
            "weight_decay": (self.weight_decay >= 0, "at least 0"),
            "momentum": (0 <= self.momentum < 1, "from 0 to below 1"),
            "distill": (0 <= self.distill <= 1, "a share from 0 to 1"),
            "temperature": (self.temperature > 0, "above 0"),
            "clip": (self.clip is None or self.clip > 0, "above 0, or None"),
            "ema": (self.ema is None or 0 < self.ema < 1, "between 0 and 1, or None"),
            "seed": (type(self.seed) is int and self.seed >= 0, "a whole number, at least 0"),
            "loss_weights": (not weights or min(weights) >= 0 < max(weights), "none below 0 and some above"),
            "backbone_epochs": (in_epochs, f"a whole number from 0 to below epochs, {self.epochs}"),
        }

    def resolve(self, num_exits: int) -> "ResolvedSettings":
        """Fill in the defaults that depend on other settings and on the network."""
        weights = (1.0,) * num_exits if self.loss_weights is None else tuple(self.loss_weights)
        if len(weights) != num_exits:
            raise BadInput(f"{len(weights)} loss weights for {num_exits} exits: give one per exit")
        first = self.epochs // 2 if self.backbone_epochs is None else self.backbone_epochs
        rate = OPTIMIZERS[self.optimizer] if self.learning_rate is None else self.learning_rate
        first = first if self.mode == "mixed" else 0
        filled_in = {"backbone_epochs": first, "learning_rate": rate, "loss_weights": weights}
        return ResolvedSettings(**asdict(self) | filled_in)


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings(TrainingSettings):
    """Settings for one network, without defaults left open."""

    backbone_epochs: int
    learning_rate: float
    loss_weights: tuple[float, ...]

    def uses_channels_last(self, device: torch.device) -> bool:
        """Return whether images have their channels last on this device: on a CPU, torch 2.15 may crash with it."""
        return self.channels_last and device.type == "cuda"

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with; the number of epochs only where the learning rate depends on it."""
        found = asdict(self) | {"loss_weights": list(self.loss_weights)}
        left_out = {"compile"} | ({"epochs"} if self.schedule is None else set())
        return {name: value for name, value in found.items() if name not in left_out}


OPTIMIZERS = {"adamw": 1e-3, "sgd": 3e-2}  # with their default learning rates
WARM_UP = 0.3  # share of the training in which a one-cycle schedule climbs
FIRST, FINAL = 1 / 25, 1e-4 / 25  # of the peak, where a one-cycle schedule starts and ends (Smith and Topin 2018)


def make_optimizer(settings: ResolvedSettings, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the optimizer of these settings."""
    rate, decay, momentum = settings.learning_rate, settings.weight_decay, settings.momentum
    if settings.optimizer == "sgd":
        return SGD(parameters, lr=rate, weight_decay=decay, momentum=momentum, nesterov=settings.nesterov)
    return AdamW(parameters, lr=rate, weight_decay=decay, betas=(momentum, 0.999))


def learning_rate_factor(schedule: str | None, done: float) -> float:
    """Return the factor of the learning rate once this share of the training is done.

    >>> [round(learning_rate_factor("cosine", done), 2) for done in (0.0, 0.5, 1.0)]
    [1.0, 0.5, 0.0]
    """
    if schedule is None:
        return 1.0
    done = min(done, 1.0)
    if schedule == "cosine":
        return _cosine(done)
    if done < WARM_UP:
        return 1 - (1 - FIRST) * _cosine(done / WARM_UP)
    return FINAL + (1 - FINAL) * _cosine((done - WARM_UP) / (1 - WARM_UP))


def _cosine(done: float) -> float:
    return 0.5 * (1 + cos(pi * done))


@dataclass(frozen=True)
class Phase:
    """Epochs in which the same part of the network is trained: a module that returns logits by exit."""

    start: int
    stop: int
    module: nn.Module
    frozen: bool = False  # whether the module takes features of a frozen backbone instead of inputs


def phases(model: MultiExitModel, settings: ResolvedSettings) -> list[Phase]:
    """Return the phases of a training, first to last."""
    first, last = settings.backbone_epochs, settings.epochs
    if settings.mode == "frozen":
        return [Phase(0, last, _HeadsAlone(model), frozen=True)]
    whole = Phase(first, last, _Exits(model, range(model.num_exits), settings.rescale_gradients))
    return [Phase(0, first, _Exits(model, [model.num_exits - 1])), whole] if first else [whole]


class _HeadsAlone(nn.Module):
    """All heads, on features that were computed before."""

    def __init__(self, model: MultiExitModel) -> None:
        super().__init__()
        self.heads = model.heads

    def forward(self, features: Sequence[Carried]) -> dict[int, Tensor]:
        return {index: read(head, features[index]) for index, head in enumerate(self.heads)}


class _Exits(nn.Module):
    """All stages with the heads of some exits, and gradients rescaled at each if wanted."""

    def __init__(self, model: MultiExitModel, exits: Iterable[int], rescale: bool = False) -> None:
        super().__init__()
        self.stages, self._rescale = model.stages, rescale
        self.heads = nn.ModuleDict({str(index): model.heads[index] for index in exits})

    def forward(self, carried: Carried) -> dict[int, Tensor]:
        logits = {}
        for index, stage in enumerate(self.stages):
            carried = advance(stage, carried)
            if str(index) in self.heads:
                share = 1 / (len(self.stages) - index)  # of all exits from here on
                towards_head = rescale_gradients(carried, share) if self._rescale else carried
                logits[index] = read(self.heads[str(index)], towards_head)
                carried = rescale_gradients(carried, 1 - share) if self._rescale else carried
        return logits


class _RescaleGradient(torch.autograd.Function):
    """Identity whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * gradients[0], None


def rescale_gradients(carried: Carried, factor: float) -> Carried:
    """Return the carried tensors with gradients multiplied by a factor in the backward pass.

    With 1 / n towards a head and 1 - 1 / n towards the next stage, n being the number of exits from here on, every
    stage gets the average of the gradients of all later exits (Li et al. 2019, gradient equilibrium).
    """
    return tuple(_RescaleGradient.apply(tensor, factor) if tensor.requires_grad else tensor for tensor in carried)


class WeightAverage:
    """The exponential moving average of a module's weights and batch-norm statistics."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._module, self._decay, self.steps = module, decay, 0
        self.state = _cloned(module)

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the module's weights; in early steps faster, so that the initial weights are forgotten."""
        self.steps += 1
        decay = min(self._decay, (1 + self.steps) / (10 + self.steps))
        for name, tensor in self._module.state_dict().items():
            if tensor.is_floating_point():
                self.state[name].lerp_(tensor, 1 - decay)
            else:
                self.state[name].copy_(tensor)

    def load(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Resume from the state of a checkpoint."""
        self.steps = steps
        for name, tensor in state.items():
            self.state[name].copy_(tensor)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the module the averaged weights for a while."""
        own = _cloned(self._module)
        self._module.load_state_dict(self.state)
        try:
            yield
        finally:
            self._module.load_state_dict(own)


def _cloned(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
