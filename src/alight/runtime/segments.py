"""What lies between two open exits: stages, one head, and what the host is told of it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from alight.models.multi_exit import Carried, MultiExitModel, advance, read
from alight.policies.policy import Policy
from alight.scores import probabilities, score_of

Floats = npt.NDArray[np.float64]

SMALL = 2**14  # logits up to which NumPy is quicker than torch on the host: it costs less to call
LOGS = "log_probabilities"
CHANCE = "probability"  # of the class that is answered


class Segment(nn.Module):
    """The stages up to an open exit, and its head."""

    def __init__(
        self, stages: Sequence[nn.Module], head: nn.Module, columns: Sequence[str], *, carries_on: bool
    ) -> None:
        super().__init__()
        self.stages, self.head = nn.ModuleList(stages), head
        self.columns = tuple(columns)  # what the policy reads here
        self.carries_on = carries_on  # the last one's features are not needed again

    def forward(self, *carried: Tensor) -> tuple[Carried, Tensor]:
        """What is carried on, and what is told of each sample, in float64."""
        carried, logits = self.logits(*carried)
        return carried, torch.cat(told(logits.double(), self.columns), dim=1)

    def logits(self, *carried: Tensor) -> tuple[Carried, Tensor]:
        """What is carried on, and the head's logits."""
        for stage in self.stages:
            carried = advance(stage, carried)
        logits = read(self.head, carried)
        return (carried if self.carries_on else ()), logits


def segments(model: MultiExitModel, policy: Policy, *, with_chance: bool = False) -> list[Segment]:
    """The network as the policy opens it: closed exits' heads are not in it, nor what comes after the last open one."""
    made, start, last = [], 0, policy.open_exits[-1]
    for exit_index in policy.open_exits:
        columns = policy.inputs if exit_index < last or policy.lens else ()  # the last takes everyone, unread
        stages = [*model.stages][start : exit_index + 1]
        columns = (*columns, CHANCE) if with_chance else columns
        made.append(Segment(stages, model.heads[exit_index], columns, carries_on=exit_index < last))
        start = exit_index + 1
    return made


def told(logits: Any, columns: Sequence[str]) -> list[Any]:
    """Class, largest logit and each column of some logits, one row per sample; of arrays or of tensors."""
    largest = logits.max(-1) if isinstance(logits, np.ndarray) else logits.amax(-1)
    parts = [logits.argmax(-1)[:, None], largest[:, None]]
    for name in columns:
        if name == LOGS:
            chances = probabilities(logits)
            parts.append(np.log(np.maximum(chances, 1e-300)) if isinstance(chances, np.ndarray) else chances.log())
        else:
            parts.append(score_of("max_probability" if name == CHANCE else name, logits)[:, None])
    return parts


def tell_small(segment: Segment, carried: Carried) -> tuple[Carried, Floats]:
    """What a segment carries on and tells, the telling by NumPy: for few logits on the host."""
    carried, logits = segment.logits(*carried)
    if logits.numel() > SMALL:
        return carried, torch.cat(told(logits.double(), segment.columns), dim=1).numpy()
    return carried, np.concatenate(told(logits.double().numpy(), segment.columns), axis=1)


def columns_of(values: Floats, columns: Sequence[str]) -> dict[str, np.ndarray]:
    """The columns of what was told, by name; logarithms as they are recorded."""
    found: dict[str, np.ndarray] = {}
    start, wide = 2, values.shape[1] - 2 - sum(name != LOGS for name in columns)
    for name in columns:
        if name == LOGS:
            found[name] = values[:, start : start + wide].astype(np.float16)
            start += wide
        else:
            found[name] = values[:, start]
            start += 1
    return found
