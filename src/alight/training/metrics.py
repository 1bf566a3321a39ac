"""Loss and accuracy of every exit: computed per sample, summed up on the device, kept epoch by epoch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from alight.display import aligned
from alight.errors import BadInput
from alight.training.distributed import Processes

Loss = Callable[[Tensor, Tensor], Tensor]  # of logits and labels: one loss per sample
Row = tuple[float | None, ...]  # one per exit, None where an exit was not trained


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of every sample with labels that are classes or (samples, classes) shares of them.

    >>> cross_entropy(torch.zeros(1, 2), torch.tensor([[0.5, 0.5]]))
    tensor([0.6931])
    """
    target = labels.to(logits.dtype) if labels.ndim == 2 else labels
    return functional.cross_entropy(logits, target, reduction="none")


def exit_losses(
    logits: Sequence[Tensor],
    labels: Tensor | None,
    *,
    distill: float = 0.0,
    temperature: float = 1.0,
    loss: Loss | Sequence[Loss] = cross_entropy,
) -> list[Tensor]:
    """Return the loss of every sample at every exit, (samples,) each: what `train_heads` trains on, for own loops.

    It is the cross-entropy with the labels, which are classes or (samples, classes) shares of them, or another `loss`,
    the same for all exits or one per exit. Before the last exit a share `distill` of it is replaced by the divergence
    from the last exit's probabilities at a softmax temperature; without labels only that divergence is left.

    Args:
        logits: Of every exit, (samples, classes) each.
        labels: Classes, or (samples, classes) shares; None: distillation alone.
        distill: Share of earlier exits' loss that is the divergence from the last exit.
        temperature: Of the softmax in that divergence.
        loss: A function of (logits, labels), or one per exit.

    >>> early, last = torch.zeros(1, 2), torch.tensor([[0.0, 9.0]])
    >>> [round(loss.item(), 3) for loss in exit_losses([early, last], torch.tensor([1]))]
    [0.693, 0.0]
    """
    teacher = logits[-1].detach()
    functions = [loss] * len(logits) if callable(loss) else loss
    losses = []
    for index, (student, function) in enumerate(zip(map(_at_least_float32, logits), functions, strict=True)):
        last = index == len(logits) - 1
        share = 0.0 if last else 1.0 if labels is None else distill
        values = student.new_zeros(len(student))
        if labels is not None and share < 1:
            values = (1 - share) * _checked(function(student, labels), len(student))
        if share > 0:
            values = values + share * divergence(student, teacher, temperature)
        losses.append(values)
    return losses


def _checked(losses: Tensor, samples: int) -> Tensor:
    if not isinstance(losses, Tensor) or losses.shape != (samples,):
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise BadInput(
            f"the loss function gave {found} for {samples} samples: return one loss per sample, as losses of"
            " torch do with reduction='none'"
        )
    return losses


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the Kullback-Leibler divergence of the student from the teacher, (samples,), at a softmax temperature.

    It is multiplied by the temperature's square, so that gradients keep their size whatever the temperature.
    """
    log_probabilities, target = (
        functional.log_softmax(_at_least_float32(logits) / temperature, dim=-1) for logits in (student, teacher)
    )
    return temperature**2 * functional.kl_div(log_probabilities, target, reduction="none", log_target=True).sum(-1)


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


@dataclass(frozen=True)
class Epoch:
    """Means over the samples of one pass over the training data, and of the validation data after it."""

    losses: Row
    accuracies: Row  # empty without labels
    validation_losses: Row = ()
    validation_accuracies: Row = ()

    def metrics(self, exits: Sequence[str]) -> dict[str, float]:
        """Return the numbers by names that loggers take.

        >>> Epoch((0.9, 0.1), (0.7, 0.98)).metrics(["layer1", "end"])
        {'loss/layer1': 0.9, 'loss/end': 0.1, 'accuracy/layer1': 0.7, 'accuracy/end': 0.98}
        """
        names = {"losses": "loss", "accuracies": "accuracy"}
        names |= {f"validation_{field}": f"validation_{name}" for field, name in names.items()}
        return {
            f"{name}/{each}": value
            for field, name in names.items()
            for each, value in zip(exits, asdict(self)[field], strict=False)
            if value is not None
        }


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
    best: int | None = None  # index of the epoch whose weights were kept, where `keep_best` asked for it

    @property
    def kept(self) -> Epoch:
        """The epoch whose weights the network has: the last, or the best where `keep_best` asked for it."""
        return self.epochs[-1 if self.best is None else self.best]

    @property
    def accuracies(self) -> Row:
        """Accuracy of every exit after the epoch that was kept: on validation data, or else on the training data."""
        return self.kept.validation_accuracies or self.kept.accuracies

    def __str__(self) -> str:
        first, last = self.epochs[0], self.kept
        losses = [f"{_number(start)} -> {_number(end)}" for start, end in zip(first.losses, last.losses, strict=True)]
        title = f"after {len(self.epochs)} epoch{'s' * (len(self.epochs) > 1)}"
        title = title if self.best is None else f"epoch {self.best + 1} of {len(self.epochs)}, the best"
        columns = [[title, *self.exits], ["loss", *losses]]
        accuracies = {"accuracy": last.accuracies, "validation accuracy": last.validation_accuracies}
        columns += [[name, *map(_percent, row)] for name, row in accuracies.items() if row]
        return "\n".join(aligned(columns))

    def __repr__(self) -> str:
        reached = " ".join(map(_percent, self.accuracies))
        return f"History({len(self.epochs)} epochs, {len(self.exits)} exits{reached and ', accuracy ' + reached})"


class RunningMetrics:
    """Sums of losses and correct predictions, kept on the network's device so that nothing waits for them."""

    def __init__(self, num_exits: int, device: torch.device) -> None:
        self._sums = torch.zeros(2, num_exits, dtype=torch.float64, device=device)  # losses, correct predictions
        self._counts = np.zeros((2, num_exits))  # labelled samples, samples

    @torch.no_grad()
    def add(self, losses: Mapping[int, Tensor], logits: Mapping[int, Tensor], labels: Tensor | None) -> None:
        """Add a batch: by exit, the loss of every sample and the logits."""
        exits = slice(min(losses), max(losses) + 1)  # all, or the last alone; a list would make a GPU wait
        stacked = torch.stack([*losses.values()])  # (exits, samples)
        self._sums[0, exits] += stacked.sum(1, dtype=torch.float64)
        self._counts[1, exits] += stacked.shape[1]
        if labels is not None:
            predictions = torch.stack([logits[index].argmax(-1) for index in losses])
            classes = labels.argmax(-1) if labels.ndim == 2 else labels  # of shares the largest
            self._sums[1, exits] += (predictions == classes).sum(1)
            self._counts[0, exits] += len(labels)

    @property
    def samples(self) -> int:
        """Number of samples that the last exit has seen."""
        return int(self._counts[1, -1])

    def means(self, processes: Processes | None = None) -> tuple[Row, Row]:
        """Return the mean loss and accuracy of every exit so far: of this process, or over all of them."""
        sums = torch.cat([self._sums, torch.from_numpy(self._counts).to(self._sums)])
        losses, correct, labelled, samples = (processes.sum(sums) if processes else sums).tolist()
        return _ratios(losses, samples), _ratios(correct, labelled) if any(labelled) else ()


def _ratios(values: Sequence[float], counts: Sequence[float]) -> Row:
    return tuple(value / count if count else None for value, count in zip(values, counts, strict=True))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
