"""How training went: loss and accuracy of every exit, epoch by epoch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alight.training.distributed import Processes

Row = tuple[float | None, ...]  # one per exit, None where an exit was not looked at


@dataclass(frozen=True)
class Epoch:
    """One pass over the training data, with means over its samples; and the validation data after it."""

    losses: Row
    accuracies: Row  # empty without labels
    validation_losses: Row = ()
    validation_accuracies: Row = ()

    @classmethod
    def read(cls, told: Mapping[str, Sequence[float | None]]) -> "Epoch":
        """An epoch as a checkpoint keeps it."""
        return cls(**{name: tuple(values) for name, values in told.items()})

    def plain(self) -> dict[str, Any]:
        """The epoch as a checkpoint keeps it."""
        return asdict(self)


@dataclass(frozen=True)
class History:
    """Every epoch of a training.

    >>> print(History(("layer1", "last"), (Epoch((0.9, 0.1), (0.7, 0.98)), Epoch((0.5, 0.1), (0.85, 0.98)))))
    after 2 epochs            loss  accuracy
    layer1          0.900 -> 0.500     85.0%
    last            0.100 -> 0.100     98.0%
    """

    exits: tuple[str, ...]
    epochs: tuple[Epoch, ...]

    @property
    def accuracies(self) -> Row:
        """Of every exit after the last epoch: on validation data, or else on training data while it was trained."""
        last = self.epochs[-1]
        return last.validation_accuracies or last.accuracies

    def __str__(self) -> str:
        first, last = self.epochs[0], self.epochs[-1]
        title = f"after {len(self.epochs)} epoch{'s' * (len(self.epochs) > 1)}"
        width = max(len(title), *map(len, self.exits))
        columns: dict[str, list[str]] = {
            "loss": [
                f"{_number(start)} -> {_number(end)}" for start, end in zip(first.losses, last.losses, strict=True)
            ]
        }
        for name in ("accuracies", "validation_accuracies"):
            if values := getattr(last, name):
                columns[name.replace("accuracies", "accuracy").replace("_", " ")] = [_percent(each) for each in values]
        widths = {name: max(len(name), *map(len, cells)) for name, cells in columns.items()}
        header = title.ljust(width) + "".join(f"  {name:>{widths[name]}}" for name in columns)
        rows = [
            exit_name.ljust(width) + "".join(f"  {cells[index]:>{widths[name]}}" for name, cells in columns.items())
            for index, exit_name in enumerate(self.exits)
        ]
        return "\n".join([header, *rows])

    def __repr__(self) -> str:
        reached = " ".join(_percent(each) for each in self.accuracies)
        return f"History({len(self.epochs)} epochs, {len(self.exits)} exits{reached and ', accuracy ' + reached})"


class Tally:
    """Sums of losses and right answers, kept where the network is, so that nobody waits for them."""

    def __init__(self, num_exits: int, device: torch.device) -> None:
        self._sums = torch.zeros(2, num_exits, dtype=torch.float64, device=device)  # losses, right
        self._counts = np.zeros((2, num_exits))  # labelled samples, samples

    @torch.no_grad()
    def add(self, losses: Mapping[int, Tensor], logits: Mapping[int, Tensor], labels: Tensor | None) -> None:
        """Count a batch: by exit, the loss of every sample and the logits."""
        exits = slice(min(losses), max(losses) + 1)  # all, or the last alone; no list, which a GPU would wait for
        together = torch.stack([*losses.values()])  # (exits, samples)
        self._sums[0, exits] += together.sum(1, dtype=torch.float64)
        self._counts[1, exits] += together.shape[1]
        if labels is not None:
            said = torch.stack([logits[index].argmax(-1) for index in losses])
            truth = labels.argmax(-1) if labels.ndim == 2 else labels  # of shares the largest
            self._sums[1, exits] += (said == truth).sum(1)
            self._counts[0, exits] += len(labels)

    @property
    def samples(self) -> int:
        """How many samples the last exit has seen."""
        return int(self._counts[1, -1])

    def rows(self, own: Processes | None = None) -> tuple[Row, Row]:
        """Mean loss and accuracy of every exit so far, over all processes."""
        everything = torch.cat([self._sums, torch.from_numpy(self._counts).to(self._sums)])
        losses, right, labelled, samples = (own.total(everything) if own else everything).tolist()
        accuracies = _ratios(right, labelled) if any(labelled) else ()
        return _ratios(losses, samples), accuracies


def _ratios(values: Sequence[float], counts: Sequence[float]) -> Row:
    return tuple(value / count if count else None for value, count in zip(values, counts, strict=True))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
