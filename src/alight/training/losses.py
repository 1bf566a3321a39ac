"""What each exit is trained for: the labels, and what the last exit says."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from alight.networks.multi_exit import Carried


def exit_losses(
    logits: Sequence[Tensor], labels: Tensor | None, *, distill: float = 0.0, temperature: float = 1.0
) -> list[Tensor]:
    """Loss of every sample at every exit, (samples,) each.

    Cross-entropy with the labels, which are classes or (samples, classes) shares of them; before the last exit a share
    `distill` of it is replaced by the divergence from what the last exit says at a softmax temperature, and without
    labels only that divergence is left.

    >>> early, last = torch.zeros(1, 2), torch.tensor([[0.0, 9.0]])
    >>> [round(loss.item(), 3) for loss in exit_losses([early, last], torch.tensor([1]))]
    [0.693, 0.0]
    """
    teacher = logits[-1].detach()
    losses = []
    for index, each in enumerate(logits):
        last = index == len(logits) - 1
        share = 0.0 if last else 1.0 if labels is None else distill
        loss = _wide(each).new_zeros(len(each))
        if labels is not None and share < 1:
            target = labels.to(_wide(each).dtype) if labels.ndim == 2 else labels
            loss = (1 - share) * functional.cross_entropy(_wide(each), target, reduction="none")
        if share > 0:
            loss = loss + share * divergence(each, teacher, temperature)
        losses.append(loss)
    return losses


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Kullback-Leibler divergence of the student from the teacher, (samples,), both at a softmax temperature.

    It is multiplied by the temperature's square, so that gradients keep their size whatever the temperature.
    """
    said = functional.log_softmax(_wide(student) / temperature, dim=-1)
    meant = functional.log_softmax(_wide(teacher) / temperature, dim=-1)
    return temperature**2 * functional.kl_div(said, meant, reduction="none", log_target=True).sum(-1)


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


class _Rescaled(torch.autograd.Function):
    """The same tensor; its gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * gradients[0], None


def rescale_gradients(carried: Carried, factor: float) -> Carried:
    """What is carried, with gradients that shrink by a factor on their way back.

    With 1 / n towards a head and 1 - 1 / n towards the next stage, n being the number of exits from here on, every
    stage gets the average of the gradients of all exits behind it (Li et al. 2019, gradient equilibrium).
    """
    return tuple(_Rescaled.apply(tensor, factor) if tensor.requires_grad else tensor for tensor in carried)
