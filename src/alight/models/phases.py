"""What is trained when: the heads, the backbone, or everything."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from alight.models.losses import rescale_gradients
from alight.models.multi_exit import Carried, MultiExitModel, advance, read
from alight.models.settings import Settings


class _Heads(nn.Module):
    """All heads, on features that were made before."""

    def __init__(self, model: MultiExitModel) -> None:
        super().__init__()
        self.heads = model.heads

    def forward(self, features: Sequence[Carried]) -> dict[int, Tensor]:
        """Logits by exit."""
        return {index: read(head, features[index]) for index, head in enumerate(self.heads)}


class _LastExit(nn.Module):
    """The backbone as it was before it had exits."""

    def __init__(self, model: MultiExitModel) -> None:
        super().__init__()
        self.stages, self.head = model.stages, model.heads[-1]

    def forward(self, carried: Carried) -> dict[int, Tensor]:
        """Logits by exit: of the last alone."""
        for stage in self.stages:
            carried = advance(stage, carried)
        return {len(self.stages) - 1: read(self.head, carried)}


class _EveryExit(nn.Module):
    """The whole network, its gradients rescaled where exits branch off if wanted."""

    def __init__(self, model: MultiExitModel, rescale: bool) -> None:
        super().__init__()
        self.stages, self.heads, self._rescale = model.stages, model.heads, rescale

    def forward(self, carried: Carried) -> dict[int, Tensor]:
        """Logits by exit."""
        logits = {}
        for index, (stage, head) in enumerate(zip(self.stages, self.heads, strict=True)):
            carried = advance(stage, carried)
            share = 1 / (len(self.stages) - index)  # of all exits from here on
            logits[index] = read(head, rescale_gradients(carried, share) if self._rescale else carried)
            carried = rescale_gradients(carried, 1 - share) if self._rescale else carried
        return logits


@dataclass(frozen=True)
class Phase:
    """Epochs in which the same part of the network is trained."""

    start: int
    stop: int
    module: nn.Module
    frozen: bool = False


def phases(model: MultiExitModel, settings: Settings) -> list[Phase]:
    """The phases of a training, first to last."""
    first, last = settings.backbone_epochs, settings.epochs
    if settings.mode == "frozen":
        return [Phase(0, last, _Heads(model), frozen=True)]
    whole = Phase(first, last, _EveryExit(model, settings.rescale_gradients))
    return [Phase(0, first, _LastExit(model)), whole] if first else [whole]
