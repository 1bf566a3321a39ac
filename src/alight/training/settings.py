"""How to train: settings, and the optimizer, schedule, phases and weight average that they stand for."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import cos, isfinite, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from alight.errors import BadInput
from alight.networks.multi_exit import Carried, MultiExitModel, advance, read
from alight.training.checkpoints import identity_of
from alight.training.metrics import Loss, cross_entropy

MODES = ("frozen", "joint", "mixed")
SCHEDULES = ("cosine", "onecycle", None)
MONITORS = ("accuracy", "loss")
PRECISIONS = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}
OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]  # of parameter groups, as a class of torch.optim is
Schedule = Callable[[float], float]  # of the share of the training that is done, 0 to 1: a factor of the learning rate


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

    `optimizer` may be a function of parameter groups, such as a class of torch.optim or a `partial` of one; settings
    that are None are then its own. `schedule` may be a function of the share of the training that is done, 0 to 1,
    which returns a factor of the learning rate. `loss` may be a function of (logits, labels), or one per exit, which
    returns one loss per sample; labels are classes or (samples, classes) shares, as the data give them.

    `keep_best` ends with the weights of the epoch that is best on the validation data, by the `monitor` of one exit
    (`monitor_exit`) or its mean over the exits by their loss weights; `patience` stops after as many epochs without a
    better one. In mode "mixed" both look at the epochs in which everything is trained.

    >>> TrainingSettings(mode="joint", optimizer="sgd").resolve(num_exits=2).learning_rate
    0.03
    """

    mode: str = "frozen"  # the heads alone; or "joint", "mixed"
    epochs: int = 10  # passes over the data
    backbone_epochs: int | None = None  # of mode "mixed"; None: half of all
    optimizer: str | OptimizerFactory = "adamw"  # or "sgd", or a function of parameter groups
    learning_rate: float | None = None  # None: 1e-3 for adamw, 3e-2 for sgd
    weight_decay: float | None = None  # None: 1e-4 for adamw and sgd
    decay_norms: bool = True  # False: no weight decay on norms and biases, which are the weights with one axis
    momentum: float | None = None  # None: 0.9 for adamw and sgd
    nesterov: bool = False  # for sgd
    schedule: str | Schedule | None = "cosine"  # of the learning rate; or "onecycle", None, or a function
    warm_up: float = 0.0  # epochs in which the learning rate climbs from 1/25
    accumulate: int = 1  # batches whose gradients make one step of the optimizer
    loss: Loss | Sequence[Loss] | None = None  # None: cross-entropy
    loss_weights: Sequence[float] | None = None  # one per exit; None: 1 each
    distill: float = 0.0  # share of the loss of earlier exits that is learnt from the last one
    temperature: float = 1.0  # of the softmax that is learnt from
    rescale_gradients: bool = False  # the average of the gradients of a stage's exits, not the sum
    amp: str | None = None  # mixed precision: "bf16" or "fp16"
    channels_last: bool = False  # memory layout of images for a GPU's kernels; ignored on a CPU
    clip: float | None = None  # largest norm of the gradient
    ema: float | None = None  # decay, such as 0.999: the model ends with the average of its weights
    keep_best: bool = False  # end with the weights of the best epoch
    patience: int | None = None  # None: train all epochs
    monitor: str = "accuracy"  # or "loss", on the validation data
    monitor_exit: str | None = None  # name of an exit
    compile: bool = False  # with torch.compile
    seed: int = 0  # of shuffling and dropout

    def __post_init__(self) -> None:
        if self.loss_weights is not None:
            object.__setattr__(self, "loss_weights", tuple(map(float, self.loss_weights)))
        if isinstance(self.loss, list):
            object.__setattr__(self, "loss", tuple(self.loss))
        if self.monitor_exit is not None:
            object.__setattr__(self, "monitor_exit", str(self.monitor_exit))  # names of layers may be numbers
        self._check_choices()
        for name, (holds, bound) in self._bounds().items():
            if not holds:
                raise BadInput(f"{name} {getattr(self, name)} is out of bounds: give {bound}")
        self._check_together()

    def _check_choices(self) -> None:
        """Check the settings that are one of a few, or a function."""
        choices = {"mode": MODES, "optimizer": OPTIMIZERS, "schedule": SCHEDULES, "amp": PRECISIONS}
        for name, known in (choices | {"monitor": MONITORS}).items():
            value, functions = getattr(self, name), name in ("optimizer", "schedule")
            if value not in known and not (functions and callable(value)):
                also = ", and not a function" * functions
                if name == "optimizer" and hasattr(value, "param_groups"):
                    also += ": give what makes one of parameter groups, as partial(torch.optim.Adam, lr=3e-3)"
                shown = repr(value) if isinstance(value, str) else f"{type(value).__name__}(...)"
                raise BadInput(f"{name} {shown} is none of {', '.join(map(repr, known))}{also}")
        losses = self.loss if isinstance(self.loss, tuple) else (self.loss or cross_entropy,)
        if not all(map(callable, losses)):
            raise BadInput(f"loss {self.loss!r} is not a function of (logits, labels): give one, or one per exit")

    def _check_together(self) -> None:
        """Check the settings that exclude each other."""
        if self.mode == "mixed" and (self.loss_weights or (1.0,))[-1] == 0:
            raise BadInput("mixed training starts with the last exit, whose loss weight is 0: give it some")
        self._check_momentum()
        if self.rescale_gradients and self.mode == "frozen":
            raise BadInput("rescale_gradients changes nothing in a frozen backbone: leave it out, or use mode='joint'")
        if self.schedule == "onecycle" and self.warm_up:
            raise BadInput("schedule 'onecycle' warms up by itself: leave out warm_up, or use schedule='cosine'")
        if not self.watches_validation and (self.monitor != "accuracy" or self.monitor_exit is not None):
            raise BadInput("monitor says which epoch is best: set keep_best or patience too, or leave it out")

    def _check_momentum(self) -> None:
        """Check that the optimizer has the momentum that is asked for."""
        if callable(self.optimizer) and (self.momentum is not None or self.nesterov):
            raise BadInput("momentum and nesterov are for 'adamw' and 'sgd': bind them to your optimizer with partial")
        if self.nesterov and (self.optimizer != "sgd" or self.momentum == 0):
            raise BadInput("nesterov is a kind of SGD's momentum: use optimizer='sgd' with some, or leave it out")

    def _bounds(self) -> dict[str, tuple[bool, str]]:
        """Return for every number whether it is allowed, and what is."""
        rate, decay, momentum, first = self.learning_rate, self.weight_decay, self.momentum, self.backbone_epochs
        in_epochs = self.mode != "mixed" or first is None or (type(first) is int and 0 <= first < self.epochs)
        weights, patience = self.loss_weights, self.patience
        return {
            "epochs": (type(self.epochs) is int and self.epochs >= 1, "a whole number, at least 1"),
            "learning_rate": (rate is None or rate > 0, "above 0"),
            "weight_decay": (decay is None or decay >= 0, "at least 0"),
            "momentum": (momentum is None or 0 <= momentum < 1, "from 0 to below 1"),
            "warm_up": (self.warm_up >= 0, "a number of epochs, at least 0"),
            "accumulate": (type(self.accumulate) is int and self.accumulate >= 1, "a whole number, at least 1"),
            "distill": (0 <= self.distill <= 1, "a share from 0 to 1"),
            "temperature": (self.temperature > 0, "above 0"),
            "clip": (self.clip is None or self.clip > 0, "above 0, or None"),
            "ema": (self.ema is None or 0 < self.ema < 1, "between 0 and 1, or None"),
            "patience": (patience is None or (type(patience) is int and patience >= 1), "a number of epochs, or None"),
            "seed": (type(self.seed) is int and self.seed >= 0, "a whole number, at least 0"),
            "loss_weights": (not weights or min(weights) >= 0 < max(weights), "none below 0 and some above"),
            "backbone_epochs": (in_epochs, f"a whole number from 0 to below epochs, {self.epochs}"),
        }

    @property
    def watches_validation(self) -> bool:
        """Whether the training depends on what the validation data say."""
        return self.keep_best or self.patience is not None

    def resolve(self, num_exits: int) -> "ResolvedSettings":
        """Fill in the defaults that depend on other settings and on the network."""
        weights = (1.0,) * num_exits if self.loss_weights is None else tuple(self.loss_weights)
        losses = self.loss if isinstance(self.loss, tuple) else (self.loss or cross_entropy,) * num_exits
        for what, count in {"loss weights": len(weights), "losses": len(losses)}.items():
            if count != num_exits:
                raise BadInput(f"{count} {what} for {num_exits} exits: give one per exit")
        first = self.epochs // 2 if self.backbone_epochs is None else self.backbone_epochs
        first = first if self.mode == "mixed" else 0
        if self.warm_up >= (shortest := min(first or self.epochs, self.epochs - first)):
            raise BadInput(f"warm_up {self.warm_up} is out of bounds: give fewer epochs than are trained, {shortest}")
        filled_in: dict[str, Any] = {"backbone_epochs": first, "loss": losses, "loss_weights": weights}
        if isinstance(self.optimizer, str):
            defaults = {"learning_rate": OPTIMIZERS[self.optimizer], "weight_decay": 1e-4, "momentum": 0.9}
            filled_in |= {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return ResolvedSettings(**{each.name: getattr(self, each.name) for each in fields(self)} | filled_in)


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings(TrainingSettings):
    """Settings for one network, without defaults left open but those of an own optimizer."""

    backbone_epochs: int
    loss: tuple[Loss, ...]
    loss_weights: tuple[float, ...]

    def uses_channels_last(self, device: torch.device) -> bool:
        """Return whether images have their channels last on this device: on a CPU, torch 2.15 may crash with it."""
        return self.channels_last and device.type == "cuda"

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with; the number of epochs only where the learning rate depends on it."""
        left_out = {"compile"} | ({"epochs"} if self.schedule is None else set())
        return {each.name: identity_of(getattr(self, each.name)) for each in fields(self) if each.name not in left_out}


OPTIMIZERS = {"adamw": 1e-3, "sgd": 3e-2}  # with their default learning rates
WARM_UP = 0.3  # share of the training in which a one-cycle schedule climbs
FIRST, FINAL = 1 / 25, 1e-4 / 25  # of the peak, where a one-cycle schedule starts and ends (Smith and Topin 2018)


def make_optimizer(settings: ResolvedSettings, parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return the optimizer of these settings for named parameters."""
    groups = parameter_groups(settings, parameters)
    if settings.optimizer == "sgd":
        return SGD(groups, momentum=settings.momentum or 0.0, nesterov=settings.nesterov)
    if settings.optimizer == "adamw":
        return AdamW(groups, betas=(settings.momentum or 0.0, 0.999))
    made = settings.optimizer(groups)  # type: ignore[operator]
    if not isinstance(made, Optimizer) or any("lr" not in group for group in made.param_groups):
        raise BadInput(f"the optimizer function gave a {type(made).__name__}: return an Optimizer of torch with lr")
    return made


def parameter_groups(
    settings: ResolvedSettings, parameters: Iterable[tuple[str, nn.Parameter]]
) -> list[dict[str, Any]]:
    """Return the groups that an optimizer takes: all parameters, or those without weight decay apart, as in timm.

    >>> settings = TrainingSettings(decay_norms=False, weight_decay=0.05).resolve(num_exits=1)
    >>> groups = parameter_groups(settings, nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).named_parameters())
    >>> [(group["weight_decay"], [tuple(each.shape) for each in group["params"]]) for group in groups]
    [(0.05, [(3, 2)]), (0.0, [(3,), (3,), (3,)])]
    """
    own = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    shared = {name: value for name, value in own.items() if value is not None}
    decayed, others = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in parameters:
        is_decayed = settings.decay_norms or (parameter.ndim > 1 and not name.endswith(".bias"))
        (decayed if is_decayed else others).append(parameter)
    groups = [{"params": decayed, **shared}, {"params": others, **shared, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def learning_rate_factor(settings: TrainingSettings, passed: float, epochs: int) -> float:
    """Return the factor of the learning rate once some of these epochs have passed: that of warm-up or schedule.

    >>> [round(learning_rate_factor(TrainingSettings(warm_up=1), passed, 3), 2) for passed in (0, 0.5, 1, 2, 3)]
    [0.04, 0.52, 1.0, 0.5, 0.0]
    """
    warm_up = settings.warm_up
    if passed < warm_up:
        return (FIRST + (1 - FIRST) * passed / warm_up) * scheduled_factor(settings.schedule, 0.0)
    return scheduled_factor(settings.schedule, (passed - warm_up) / (epochs - warm_up))


def scheduled_factor(schedule: str | Schedule | None, done: float) -> float:
    """Return a schedule's factor of the learning rate once this share of it is done.

    >>> [round(scheduled_factor("cosine", done), 2) for done in (0.0, 0.5, 1.0)]
    [1.0, 0.5, 0.0]
    """
    if schedule is None:
        return 1.0
    done = min(done, 1.0)
    if not isinstance(schedule, str):
        factor = float(schedule(done))
        if not (isfinite(factor) and factor >= 0):
            raise BadInput(f"the schedule gave {factor} at {done:.1%} of the training: give a factor, at least 0")
        return factor
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
    is_last: bool = True
    frozen: bool = False  # whether the module takes features of a frozen backbone instead of inputs


def phases(model: MultiExitModel, settings: ResolvedSettings) -> list[Phase]:
    """Return the phases of a training, first to last."""
    first, last = settings.backbone_epochs, settings.epochs
    if settings.mode == "frozen":
        return [Phase(0, last, _HeadsAlone(model), frozen=True)]
    whole = Phase(first, last, _Exits(model, range(model.num_exits), settings.rescale_gradients))
    return [Phase(0, first, _Exits(model, [model.num_exits - 1]), is_last=False), whole] if first else [whole]


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
