"""How to train: everything that makes one training another than the next."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from alight.errors import BadInput
from alight.models.optimization import OPTIMIZERS, SCHEDULES

MODES = ("frozen", "joint", "mixed")
PRECISIONS = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """What makes one training another than the next."""

    mode: str
    epochs: int
    backbone_epochs: int
    optimizer: str
    learning_rate: float
    weight_decay: float
    momentum: float
    nesterov: bool
    schedule: str | None
    loss_weights: tuple[float, ...]
    distill: float
    temperature: float
    rescale_gradients: bool
    amp: str | None
    channels_last: bool
    clip: float | None
    ema: float | None
    seed: int

    def __post_init__(self) -> None:
        choices = {"mode": MODES, "optimizer": OPTIMIZERS, "schedule": SCHEDULES, "amp": PRECISIONS}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise BadInput(f"{name} {getattr(self, name)!r} is none of {', '.join(map(repr, known))}")
        bounds = {
            "epochs": (type(self.epochs) is int and self.epochs >= 1, "a whole number, at least 1"),
            "learning_rate": (self.learning_rate > 0, "above 0"),
            "weight_decay": (self.weight_decay >= 0, "at least 0"),
            "momentum": (0 <= self.momentum < 1, "from 0 to below 1"),
            "distill": (0 <= self.distill <= 1, "a share from 0 to 1"),
            "temperature": (self.temperature > 0, "above 0"),
            "clip": (self.clip is None or self.clip > 0, "above 0, or None"),
            "ema": (self.ema is None or 0 < self.ema < 1, "between 0 and 1, or None"),
            "seed": (self.seed >= 0, "at least 0"),
            "loss_weights": (min(self.loss_weights) >= 0 < max(self.loss_weights), "none below 0 and some above"),
            "backbone_epochs": (0 <= self.backbone_epochs < self.epochs, f"from 0 to below epochs, {self.epochs}"),
        }
        for name, (holds, bound) in bounds.items():
            if not holds:
                raise BadInput(f"{name} {getattr(self, name)} is out of bounds: give {bound}")
        if self.mode == "mixed" and self.loss_weights[-1] == 0:
            raise BadInput("mixed training starts with the last exit, whose loss weight is 0: give it some")
        if self.nesterov and (self.optimizer != "sgd" or self.momentum == 0):
            raise BadInput("nesterov is a kind of SGD's momentum: use optimizer='sgd' with some, or leave it out")
        if self.rescale_gradients and self.mode == "frozen":
            raise BadInput("rescale_gradients changes nothing in a frozen backbone: leave it out, or use mode='joint'")

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with; the number of epochs only where the learning rate depends on it."""
        told = asdict(self) | {"loss_weights": list(self.loss_weights)}
        if self.schedule is None:
            del told["epochs"]
        return told
