"""A network with exits: stages in a chain, a head after each."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from alight.errors import BadInput

Carried = tuple[Tensor, ...]  # what crosses a cut: the features that the head reads, then all else that is used later


class MultiExitModel(nn.Module):
    """A backbone cut into stages, with a head after each.

    A stage takes what is carried, one argument each, and gives a tuple: the features for its head first. A head takes
    the features, or all that is carried if it says `reads_everything = True`, and gives logits.

    >>> import torch
    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> [tuple(logits.shape) for logits in model(torch.zeros(5, 4))]
    [(5, 3), (5, 3)]
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        heads: Sequence[nn.Module],
        exits: Sequence[str] = (),
        input_names: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if not stages or len(stages) != len(heads):
            raise BadInput(f"{len(stages)} stages and {len(heads)} heads: give one stage and one head per exit")
        self.stages, self.heads = nn.ModuleList(stages), nn.ModuleList(heads)
        self.exits = tuple(exits) or tuple(f"exit {index}" for index in range(len(stages)))  # names, earliest first
        self.input_names = tuple(input_names)  # of a network whose input is a dict of tensors

    @property
    def num_exits(self) -> int:
        """Number of exits."""
        return len(self.stages)

    def forward(self, inputs: Any) -> list[Tensor]:
        """Logits of every exit, earliest first."""
        logits, carried = [], self.admit(inputs)
        for stage, head in zip(self.stages, self.heads, strict=True):
            carried = advance(stage, carried)
            logits.append(read(head, carried))
        return logits

    def admit(self, inputs: Any) -> Carried:
        """A batch as the first stage takes it: a tensor, several, or a dict of them by name."""
        if isinstance(inputs, Mapping):
            missing = [name for name in self.input_names if name not in inputs]
            if missing or not self.input_names:
                raise BadInput(f"the batch has {sorted(inputs)}, the network takes {list(self.input_names)}")
            return tuple(inputs[name] for name in self.input_names)
        return tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)


def advance(stage: nn.Module, carried: Carried) -> Carried:
    """What a stage makes of what is carried."""
    made = stage(*carried)
    return made if isinstance(made, tuple) else (made,)


def read(head: nn.Module, carried: Carried) -> Tensor:
    """The logits of a head."""
    logits: Tensor = head(*carried) if getattr(head, "reads_everything", False) else head(carried[0])
    return logits
