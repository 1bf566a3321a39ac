"""What a loader gives, as a network takes it: inputs, and labels where there are any."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from alight.data.preprocess import Images, image_shape, is_picture
from alight.errors import BadInput
from alight.networks.multi_exit import MultiExitModel

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
        inputs: Any = {name: _named_tensor(name, value) for name, value in batch.items() if name not in LABELS}
        given = [batch[name] for name in LABELS if batch.get(name) is not None]
        labels = _named_tensor("labels", given[0]) if given else None
        inputs = next(iter(inputs.values())) if len(inputs) == 1 else inputs
    elif isinstance(batch, list | tuple):
        parts = [_named_tensor(f"part {index}", value) for index, value in enumerate(batch)]
        labels = parts.pop() if len(parts) > 1 and parts[-1].ndim == 1 else None
        inputs = parts[0] if len(parts) == 1 else tuple(parts)
    else:
        inputs, labels = _named_tensor("the batch", batch), None
    return Batch(_full(inputs), None if labels is None else _labels(labels, len(_first(inputs))))


def _named_tensor(name: str, value: Any) -> Tensor:
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


BATCH_SIZE = 128  # where nobody says otherwise


def in_batches(
    data: Any, model: MultiExitModel, batch_size: int = BATCH_SIZE, *, shuffle: bool = False
) -> Iterable[Any]:
    """Batches of whatever was given; what comes in batches already stays as it is.

    >>> from torch import nn
    >>> model = MultiExitModel([nn.Linear(4, 8)], [nn.Linear(8, 3)])
    >>> [len(labels) for _, labels in in_batches((np.zeros((5, 4)), np.arange(5)), model, batch_size=2)]
    [2, 2, 1]
    """
    rows = _rows(data, model)
    if rows is None:
        return data
    if batch_size < 1:
        raise BadInput(f"batch size {batch_size}: give 1 or more")
    if not len(rows):  # type: ignore[arg-type]
        raise BadInput(f"the {type(data).__name__} has no samples: give at least one")
    collate = _as_it_is if isinstance(rows, _Rows) else _Collate(model)
    return DataLoader(rows, batch_size, shuffle=shuffle, collate_fn=collate)


def as_inputs(inputs: Any, model: MultiExitModel) -> Any:
    """One batch of inputs as the network takes them: also of NumPy arrays, pictures, bytes, or a list of images.

    >>> from torch import nn
    >>> as_inputs(np.zeros((5, 4)), MultiExitModel([nn.Linear(4, 8)], [nn.Linear(8, 3)])).dtype
    torch.float32
    """
    if isinstance(inputs, Tensor) and inputs.dtype is not torch.uint8:
        return inputs
    if isinstance(inputs, list) and _are_samples(inputs, model):
        return _stacked(inputs, model)
    if isinstance(inputs, list | tuple):
        return tuple(map(_tensor, inputs))
    if isinstance(inputs, Mapping):
        return {name: _tensor(part) for name, part in inputs.items()}
    if _wants_pixels(inputs, model):
        return _pictures(inputs if isinstance(inputs, Tensor | np.ndarray) else [inputs], model)
    return _tensor(inputs)


def _rows(data: Any, model: MultiExitModel) -> "Dataset[Any] | None":
    """The data sample by sample; None of data that comes in batches."""
    if isinstance(data, Tensor | np.ndarray):
        return _Rows([data], model)
    if isinstance(data, Mapping):
        return _Rows([*data.values()], model, [*data])
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor | np.ndarray) for part in data):
        return _Rows([*data], model)
    if isinstance(data, list):
        return _List(data) if _are_samples(data, model) else None
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return data if isinstance(data, Dataset) and indexed and not isinstance(data, IterableDataset) else None


class _Rows(Dataset[Any]):
    """Arrays of one length, whose rows are samples."""

    def __init__(self, parts: Sequence[Any], model: MultiExitModel, names: Sequence[str] = ()) -> None:
        self.parts, self.names, self.model = parts, names, model
        sizes = [len(part) for part in parts]
        if len(set(sizes)) > 1:
            raise BadInput(
                f"a tuple or dict of arrays with {sizes} samples: give as many rows of each, or batches in a list"
            )

    def __len__(self) -> int:
        return len(self.parts[0]) if self.parts else 0

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])

    def __getitems__(self, rows: list[int]) -> Any:
        chosen = [
            part[torch.as_tensor(rows)] if isinstance(part, Tensor) else np.asarray(part)[rows] for part in self.parts
        ]
        if self.names:
            return dict(zip(self.names, (_tensor(each) for each in chosen), strict=True))
        first, *others = chosen
        inputs = _pictures(first, self.model) if _wants_pixels(first, self.model) else _tensor(first)
        return (inputs, *map(_tensor, others)) if others else inputs


class _List(Dataset[Any]):
    """The samples of a list."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class _Collate:
    """Samples to a batch: pictures and bytes as the network takes them, all else as torch does it."""

    def __init__(self, model: MultiExitModel) -> None:
        self.model = model

    def __call__(self, samples: Sequence[Any]) -> Any:
        first = samples[0]
        if isinstance(first, Mapping):
            return default_collate([{name: _bare(part) for name, part in each.items()} for each in samples])
        if not isinstance(first, tuple | list):
            return _stacked(samples, self.model)
        inputs = _stacked([each[0] for each in samples], self.model)
        return (inputs, *default_collate([tuple(map(_bare, each[1:])) for each in samples]))


def _are_samples(data: Sequence[Any], model: MultiExitModel) -> bool:
    """Whether a list holds single images or (image, label) pairs, not batches."""
    first = data[0] if data else None
    image = first[0] if isinstance(first, tuple) and len(first) == 2 else first
    if isinstance(image, Tensor | np.ndarray):
        example = model.recipe.get("example", {}).get("shape")
        return isinstance(example, list) and image.ndim == len(example) - 1
    return is_picture(image)


def _wants_pixels(value: Any, model: MultiExitModel) -> bool:
    """Whether it is a picture, or bytes for a network that takes images of other numbers."""
    if not isinstance(value, Tensor | np.ndarray):
        return is_picture(value)
    return is_picture(value) and image_shape(model) is not None and model.recipe["example"]["dtype"] != "uint8"


def _stacked(samples: Sequence[Any], model: MultiExitModel) -> Tensor:
    if _wants_pixels(samples[0], model):
        return _pictures(samples, model)
    try:
        return torch.stack([_tensor(each) for each in samples])
    except RuntimeError as error:
        raise BadInput(f"the samples do not fit into one batch ({error}): bring them to one shape") from error


def _pictures(pictures: Any, model: MultiExitModel) -> Tensor:
    if image_shape(model) is None:
        raise BadInput(
            "the network does not say which images it takes, so pictures cannot be brought to its size: build it with"
            " attach_heads, which keeps an example, or give tensors"
        )
    return Images(model, False, "the data").stacked(pictures)


def _tensor(values: Any) -> Tensor:
    """Numbers as a tensor; NumPy's float64 in torch's own precision."""
    if isinstance(values, Tensor):
        return values
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(
            f"a {type(values).__name__} is no numbers ({error}): give an array, a tensor or images"
        ) from error
    return tensor.to(torch.get_default_dtype()) if tensor.dtype is torch.float64 else tensor


def _bare(value: Any) -> Any:
    return _tensor(value) if isinstance(value, np.ndarray) else value


def _as_it_is(batch: Any) -> Any:
    return batch
