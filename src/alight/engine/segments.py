"""What lies between two open exits: stages, one head, and what the host is told of it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from alight.engine.fused import fused
from alight.networks.multi_exit import Carried, MultiExitModel, advance, read
from alight.policies.policy import Policy
from alight.scores import probabilities, score_of

Floats = npt.NDArray[np.float64]

LOGS = "log_probabilities"


class Told(NamedTuple):
    """What a head says of each sample: class, largest logit, the columns that are read, chance of the class.

    Tensors where it is computed, arrays on the host, numbers of one sample alone.
    """

    predictions: Any
    largest: Any
    columns: tuple[Any, ...]
    chances: Any | None


class Segment(nn.Module):
    """The stages up to an open exit, and its head."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        head: nn.Module,
        columns: Sequence[str],
        *,
        carries_on: bool,
        with_chance: bool = False,
    ) -> None:
        super().__init__()
        self.stages, self.head = nn.ModuleList(stages), head
        self.columns = tuple(columns)  # what the policy reads here
        self.carries_on = carries_on  # the last one's features are not needed again
        self.with_chance = with_chance

    def forward(self, *carried: Tensor) -> tuple[Carried, Tensor]:
        """What is carried on, and what is told of each sample: in float64, side by side, one tensor to be fetched.

        Where nothing is read but the answer it is the logits, which `told_of` looks at for many batches at once.
        """
        carried, logits = self.logits(*carried)
        return carried, self._wide(logits) if self.columns else logits

    def told_of(self, made: Tensor) -> Tensor:
        """What `forward` tells of one batch, or of several below each other, side by side."""
        return made if self.columns else self._wide(made)

    def _wide(self, logits: Tensor) -> Tensor:
        return wide(logits, self.columns, self.with_chance)

    def logits(self, *carried: Tensor) -> tuple[Carried, Tensor]:
        """What is carried on, and the head's logits."""
        for stage in self._modules["stages"]._modules.values():  # type: ignore[union-attr]  # quicker than by attribute
            carried = advance(stage, carried)  # type: ignore[arg-type]
        logits = read(self.head, carried)
        return (carried if self.carries_on else ()), logits

    def on_host(self, *carried: Tensor) -> tuple[Carried, Told]:
        """What is carried on, and what is told of each sample, for tensors that are on the host."""
        carried, logits = self.logits(*carried)
        return carried, apart(self._wide(logits).numpy(), self.columns, self.with_chance)


def segments(model: MultiExitModel, policy: Policy, *, with_chance: bool = False) -> list[Segment]:
    """The network as the policy opens it: closed exits' heads are not in it, nor what comes after the last open one."""
    made, start, last = [], 0, policy.open_exits[-1]
    for exit_index in policy.open_exits:
        columns = policy.inputs if exit_index < last or policy.lens else ()  # the last takes everyone, unread
        stages = [*model.stages][start : exit_index + 1]
        head, carries_on = model.heads[exit_index], exit_index < last
        made.append(Segment(stages, head, columns, carries_on=carries_on, with_chance=with_chance))
        start = exit_index + 1
    return made


def told_of_one(logits: Tensor, columns: Sequence[str], with_chance: bool = False) -> Told:
    """What is told of one sample on the host, in numbers: all of it in few calls, since each costs more than it does.

    The bits are those of `wide`: the same softmax in float64, its two largest, and their difference.
    """
    if not columns and not with_chance:
        greatest, place = logits.max(-1)
        return Told(place.item(), greatest.item(), (), None)
    if columns not in (("margin",), ("max_probability",)):
        one = apart(wide(logits, columns, with_chance).numpy(), columns, with_chance)
        chance = None if one.chances is None else one.chances.item()
        return Told(one.predictions.item(), one.largest.item(), tuple(each.item() for each in one.columns), chance)
    top, places = logits.softmax(-1, dtype=torch.float64).topk(2)
    chance, second = top.tolist()[0]
    prediction = (places if chance > second else logits.argmax(-1, keepdim=True)).tolist()[0][0]
    score = chance - second if columns == ("margin",) else chance
    largest = 0.0 if score == score else logits.amax().item()  # NaN where the logits are of no use
    return Told(prediction, largest, (score,), chance if with_chance else None)


def wide(logits: Tensor, columns: Sequence[str], with_chance: bool = False) -> Tensor:
    """What is told of some logits side by side, one tensor to be fetched: class, largest logit, columns, chance."""
    made = fused(logits, columns[:1], with_chance and len(columns) == 1)
    if made is not None and len(columns) == 1:
        return made
    exact = logits.double() if columns or with_chance else logits  # the largest is one of them as it is
    if made is None:
        largest, predictions = exact.max(-1)
        parts = [predictions.double(), largest, *(_column(name, exact) for name in columns)]
    else:
        parts = [made, *(_column(name, exact) for name in columns[1:])]
    if with_chance:
        parts.append(score_of("max_probability", exact))
    return torch.cat([part if part.ndim == 2 else part[:, None] for part in parts], dim=1)


def _column(name: str, logits: Tensor) -> Tensor:
    """What is read of logits in float64: a score, or all logarithms."""
    read: Tensor = probabilities(logits).log() if name == LOGS else score_of(name, logits)
    return read


def apart(values: Floats, columns: Sequence[str], with_chance: bool = False) -> Told:
    """What was told side by side, apart again once it is on the host."""
    classes = values.shape[1] - 2 - with_chance - sum(name != LOGS for name in columns)
    start, read = 2, []
    for name in columns:
        stop = start + (classes if name == LOGS else 1)
        read.append(values[:, start:stop].astype(np.float16) if name == LOGS else values[:, start])
        start = stop
    chances = values[:, -1] if with_chance else None
    return Told(values[:, 0].astype(np.int64), values[:, 1], tuple(read), chances)
