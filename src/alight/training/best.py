"""The best epoch: judged on validation data, its weights kept, and how long ago it was."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from alight.errors import BadInput
from alight.training.metrics import Epoch
from alight.training.settings import ResolvedSettings


class BestEpoch:
    """The epoch with the highest validation accuracy, or the lowest loss, and the weights after it."""

    def __init__(self, settings: ResolvedSettings, exits: Sequence[str], start: int) -> None:
        self._settings, self._exits, self._start = settings, exits, start  # earlier epochs train something else
        self.index: int | None = None
        self.weights: dict[str, Tensor] = {}  # on the CPU
        if settings.monitor_exit is not None and settings.monitor_exit not in exits:
            raise BadInput(f"monitor_exit {settings.monitor_exit!r} is none of the exits {', '.join(map(repr, exits))}")

    def update(self, epochs: Sequence[Epoch], module: nn.Module) -> bool:
        """Look at the last of these epochs; return whether the training has waited for a better one long enough."""
        before, self.index = self.index, self._best(epochs)
        if self.index != before and self._settings.keep_best:
            self.weights = {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}
        patience, first = self._settings.patience, self._start if self.index is None else self.index
        return patience is not None and len(epochs) - 1 - first >= patience

    def restore(self, epochs: Sequence[Epoch], weights: Mapping[str, Tensor]) -> None:
        """Resume after these epochs, with the weights of the best of them."""
        self.index, self.weights = self._best(epochs), dict(weights)

    def _best(self, epochs: Sequence[Epoch]) -> int | None:
        """Return the first of the best epochs; None where no loss is finite."""
        values = {index: self._value(epochs[index]) for index in range(self._start, len(epochs))}
        known = {index: value for index, value in values.items() if value == value}  # NaN is not equal to itself
        return max(known, key=lambda index: known[index], default=None)

    def _value(self, epoch: Epoch) -> float:
        """Return what is monitored in one epoch, higher for a better one."""
        accuracy = self._settings.monitor == "accuracy"
        row = epoch.validation_accuracies if accuracy else epoch.validation_losses
        if not row:
            raise BadInput("the validation data have no labels, so no epoch has an accuracy: set monitor='loss'")
        weights = dict(zip(self._exits, self._settings.loss_weights, strict=True))
        if self._settings.monitor_exit is not None:
            weights = {self._settings.monitor_exit: 1.0}
        values = dict(zip(self._exits, row, strict=True))
        mean = sum(weight * (values[each] or 0.0) for each, weight in weights.items() if weight) / sum(weights.values())
        return mean if accuracy else -mean
