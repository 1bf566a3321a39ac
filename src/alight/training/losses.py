"""The loss of every exit: cross-entropy with the labels, and divergence from the last exit."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from alight.networks.multi_exit import Carried


def exit_losses(
    logits: Sequence[Tensor], labels: Tensor | None, *, distill: float = 0.0, temperature: float = 1.0
) -> list[Tensor]:
    """Return the loss of every sample at every exit, (samples,) each.

    It is the cross-entropy with the labels, which are classes or (samples, classes) shares of them. Before the last
    exit a share `distill` of it is replaced by the divergence from the last exit's probabilities at a softmax
    temperature; without labels only that divergence is left.

    >>> early, last = torch.zeros(1, 2), torch.tensor([[0.0, 9.0]])
    >>> [round(loss.item(), 3) for loss in exit_losses([early, last], torch.tensor([1]))]
    [0.693, 0.0]
    """
    teacher = logits[-1].detach()
    losses = []
    for index, student in enumerate(map(_at_least_float32, logits)):
        last = index == len(logits) - 1
        share = 0.0 if last else 1.0 if labels is None else distill
        loss = student.new_zeros(len(student))
        if labels is not None and share < 1:
            target = labels.to(student.dtype) if labels.ndim == 2 else labels
            loss = (1 - share) * functional.cross_entropy(student, target, reduction="none")
        if share > 0:
            loss = loss + share * divergence(student, teacher, temperature)
        losses.append(loss)
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
