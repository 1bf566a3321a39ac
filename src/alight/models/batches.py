"""What a loader gives, as a network takes it: inputs, and labels where there are any."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alight.errors import BadInput

LABELS = ("labels", "label")  # the names that Hugging Face gives them
SPENT = "an iterator is spent after one pass, so give a DataLoader, a list, or anything that starts anew"


@dataclass(frozen=True)
class Batch:
    """Inputs as the network admits them, and the labels, None where the loader gives none."""

    inputs: Any
    labels: Tensor | None  # (samples,), class indices; or (samples, classes), shares of classes

    def __len__(self) -> int:
        return len(_first(self.inputs))

    def to(self, device: torch.device, channels_last: bool = False) -> "Batch":
        """The batch on a device, images with their channels last if wanted."""

        def moved(tensor: Tensor) -> Tensor:
            placed = tensor.to(device, non_blocking=True)
            images = channels_last and placed.ndim == 4 and placed.is_floating_point()
            return placed.to(memory_format=torch.channels_last) if images else placed

        labels = None if self.labels is None else self.labels.to(device, non_blocking=True)
        return Batch(_each(self.inputs, moved), labels)

    def check(self, num_classes: int) -> None:
        """That the labels are classes of the network."""
        if self.labels is None:
            return
        if self.labels.ndim == 2:
            if self.labels.shape[1] != num_classes:
                raise BadInput(
                    f"labels share each sample among {self.labels.shape[1]} classes, but the network has {num_classes}:"
                    " give a column for each"
                )
            return
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= num_classes:
            raise BadInput(
                f"labels hold class {low if low < 0 else high}, but the network has {num_classes} classes,"
                f" 0 to {num_classes - 1}: number the classes from 0, or attach heads with more classes"
            )


def batches(loader: Iterable[Any], what: str) -> Iterator[Batch]:
    """Every batch of a loader; `what` says in the error which pass found none.

    >>> [len(batch) for batch in batches([(torch.zeros(3, 2), torch.tensor([0, 1, 1]))], "the test")]
    [3]
    """
    found = False
    for batch in loader:
        found = True
        yield as_batch(batch)
    if not found:
        raise BadInput(f"the loader gave no batch in {what}: {SPENT}")


def length_of(loader: Iterable[Any]) -> int | None:
    """How many batches a loader gives, None where it does not know."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


def as_batch(batch: Any) -> Batch:
    """A loader's batch with its labels told apart: a tensor, (inputs, ..., labels), or a dict with "labels".

    The last of several is the labels if it has one axis; a mask or a second image has more. In a dict labels may also
    be shares of classes, (samples, classes): of smoothed labels and mixed images.

    >>> as_batch({"input_ids": torch.ones(2, 4), "labels": torch.tensor([1, 0])}).labels
    tensor([1, 0])
    """
    if isinstance(batch, Mapping):
        inputs: Any = {name: _tensor(name, value) for name, value in batch.items() if name not in LABELS}
        given = [batch[name] for name in LABELS if batch.get(name) is not None]
        labels = _tensor("labels", given[0]) if given else None
        inputs = next(iter(inputs.values())) if len(inputs) == 1 else inputs
    elif isinstance(batch, list | tuple):
        parts = [_tensor(f"part {index}", value) for index, value in enumerate(batch)]
        labels = parts.pop() if len(parts) > 1 and parts[-1].ndim == 1 else None
        inputs = parts[0] if len(parts) == 1 else tuple(parts)
    else:
        inputs, labels = _tensor("the batch", batch), None
    return Batch(_full(inputs), None if labels is None else _labels(labels, len(_first(inputs))))


def _tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(
            f"{name} of a batch is a {type(value).__name__}, not a tensor: let the loader's collate_fn make tensors"
        ) from error


def _full(inputs: Any) -> Any:
    if not isinstance(inputs, Tensor) and not inputs:
        raise BadInput("a batch holds no tensor: give a tensor, (inputs, labels), or a dict of tensors")
    if not (first := _first(inputs)).ndim or not len(first):
        raise BadInput(f"a batch has inputs of shape {tuple(first.shape)}: the first axis is the samples, at least one")
    return inputs


def _labels(labels: Tensor, num_samples: int) -> Tensor:
    if labels.is_floating_point() and labels.ndim == 2 and len(labels) == num_samples:
        return labels.float()
    if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool:
        raise BadInput(f"labels are {labels.dtype}, not class indices: give integers, or rows of shares")
    if labels.shape != (num_samples,):
        raise BadInput(
            f"labels have shape {tuple(labels.shape)} for {num_samples} samples: give one class index per sample"
            " (argmax of one-hot rows)"
        )
    return labels.long()


def _first(inputs: Any) -> Tensor:
    if isinstance(inputs, Tensor):
        return inputs
    return next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs[0]


def _each(inputs: Any, change: Any) -> Any:
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, Mapping):
        return {name: change(tensor) for name, tensor in inputs.items()}
    return tuple(change(tensor) for tensor in inputs)
