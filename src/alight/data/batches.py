"""One way in for data: a batch as the network takes it, and batches of whatever form the data has.

an array or a tensor          taken unchanged; bytes (uint8) of images are normalised, float64 arrays become float32
a list of pictures or arrays  stacked; pictures (Pillow) are brought to the network's size first
a dict by name, or a tuple    one array per input, as of text: tokens and mask
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from alight.data.preprocess import InputSpec, TensorSpec, as_array, image_batch, is_picture, is_pixels, is_tensor
from alight.data.tokens import SEGMENTS
from alight.errors import BadInput

if TYPE_CHECKING:
    import torch

Array = Any  # a NumPy array, or a tensor of torch
Arrays = tuple[Array, ...]

BATCH_SIZE = 128  # by default
AHEAD = 3  # batches that are fetched before they are asked for
LABELS = ("labels", "label")  # the names that Hugging Face gives them
ONE_CLASS = (
    "alight gives each sample one class: several labels per sample need a network of two classes for each label,"
    " a regression needs classes, such as ranges of its target"
)
ROUNDING = 0.01  # by which shares of classes may miss a sum of one
SPENT = "an iterator is spent after one pass, so give a DataLoader, a list, or anything that starts anew"


@dataclass(frozen=True)
class Batch:
    """Inputs of a network, and the labels, None where the loader gives none."""

    inputs: Any
    labels: Array | None  # (samples,), class indices; or (samples, classes), shares of classes

    def __len__(self) -> int:
        return len(self.inputs[0] if isinstance(self.inputs, tuple) else self.inputs)

    def to(self, device: "str | torch.device", channels_last: bool = False) -> "Batch":
        """Return the batch as tensors on a device, images with their channels last if wanted."""
        import torch

        def moved(value: Array) -> torch.Tensor:
            placed = as_tensor(value).to(device, non_blocking=True)
            images = channels_last and placed.ndim == 4 and placed.is_floating_point()
            return placed.to(memory_format=torch.channels_last) if images else placed

        labels = None if self.labels is None else as_tensor(self.labels).to(device, non_blocking=True)
        return Batch(tuple(map(moved, self.inputs)), labels)

    def check(self, num_classes: int) -> None:
        """Check that the labels are classes of the network."""
        if self.labels is None:
            return
        if self.labels.ndim == 2:
            _check_shares(as_array(self.labels), num_classes)
            return
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= num_classes:
            raise BadInput(
                f"labels run from {low} to {high}, but the network has {num_classes} classes, 0 to {num_classes - 1}:"
                f" number the classes from 0, or attach heads with more classes ({ONE_CLASS})"
            )


def _check_shares(shares: np.ndarray, num_classes: int) -> None:
    """Check that each row shares one sample among the classes of the network."""
    if shares.shape[1] != num_classes:
        raise BadInput(
            f"labels share each sample among {shares.shape[1]} classes, but the network has {num_classes}:"
            f" give a column for each ({ONE_CLASS})"
        )
    wrong = np.flatnonzero(~(np.abs(shares.sum(1) - 1) <= ROUNDING) | (shares < 0).any(1))
    if wrong.size:
        row = shares[wrong[0]]
        raise BadInput(
            f"the labels of {wrong.size} of {len(shares)} samples are not shares of classes that sum to one (those of"
            f" sample {wrong[0]} lie in [{row.min():g}, {row.max():g}] and sum to {row.sum():g}): {ONE_CLASS}"
        )


def as_inputs(inputs: Any, spec: InputSpec) -> Arrays:
    """Return one batch as the first stage takes it, in the order of the names that the network has for its inputs.

    Tensors stay tensors, wherever they are; all else becomes contiguous NumPy arrays. Sizes are not compared with the
    spec, since a network may take others than it was built with: `fitted` does that for exported ones.

    >>> as_inputs(np.zeros((5, 4)), InputSpec())[0].dtype
    dtype('float32')
    """
    if len(spec.tensors) < 2 and _is_ready(inputs):
        return (inputs,)
    parts = (inputs,) if _is_array(inputs) else _parts(inputs, spec)
    if spec.tensors and len(parts) != len(spec.tensors):
        raise BadInput(f"{len(parts)} inputs, and the network takes {'; '.join(map(str, spec.tensors))}")
    arrays = tuple([_numbers(part, spec) for part in parts])
    sizes = {part.shape[0] if part.ndim else 0 for part in arrays}
    if len(sizes) != 1 or 0 in sizes:
        raise BadInput(
            f"inputs of {sorted(sizes)} samples: the first axis is the samples, at least 1, as many of each input"
        )
    return arrays


def fitted(inputs: Arrays, spec: InputSpec) -> tuple[np.ndarray, ...]:
    """Return inputs as NumPy arrays of the sizes and dtypes that the spec names, as an exported network takes them.

    >>> spec = InputSpec((TensorSpec("tokens", (None, None), "int64"),))
    >>> fitted((np.array([[1, 2]], dtype=np.int32),), spec)[0].dtype
    dtype('int64')
    """
    return tuple([_fitted(each, own) for each, own in zip(inputs, spec.tensors, strict=True)])


def by_name(inputs: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    """Return the inputs of these names from a dict, which may hold labels too, but nothing that the network ignores.

    Token types that are all 0 are those of single texts, as a network takes them to be where none are given.
    """
    if not names or any(name not in inputs for name in names):
        raise BadInput(f"the batch has {sorted(inputs)}, the network takes {list(names) or 'one tensor'}")
    others = [name for name in inputs if name not in names and name not in LABELS and inputs[name] is not None]
    if ignored := [name for name in others if name != SEGMENTS or as_array(inputs[SEGMENTS]).any()]:
        pairs = " (pairs of texts)" if SEGMENTS in ignored else ""
        raise BadInput(
            f"the batch has {', '.join(map(repr, ignored))}{pairs}, and the network was cut with {list(names)} alone:"
            " attach heads with an example that has it, or leave it out of the batch"
        )
    return tuple([inputs[name] for name in names])


def as_tensor(values: Array) -> "torch.Tensor":
    """Return numbers as a tensor, of a tensor or a writable array without a copy."""
    import torch

    if isinstance(values, torch.Tensor):
        return values
    array = as_array(values)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def split_labels(batch: Any, spec: InputSpec | None = None) -> Batch:
    """Return a loader's batch with its labels apart: a tensor, (inputs, ..., labels), or a dict with "labels".

    The last of several is the labels if it has one axis, or if the network takes one input less; a mask or a second
    image has more axes. Labels may be shares of classes, (samples, classes): of smoothed labels and mixed images.

    >>> split_labels({"input_ids": np.ones((2, 4)), "labels": np.array([1, 0])}).labels
    array([1, 0])
    """
    if isinstance(batch, Mapping):
        inputs: Any = {name: part for name, part in batch.items() if name not in LABELS}
        labels = next((batch[name] for name in LABELS if batch.get(name) is not None), None)
    elif isinstance(batch, list | tuple):
        inputs, labels = (batch[:-1], batch[-1]) if _ends_in_labels(batch, spec) else (batch, None)
    else:
        return Batch(batch, None)
    if not inputs:
        raise BadInput("a batch holds no tensor: give a tensor, (inputs, labels), or a dict of tensors")
    if isinstance(batch, Mapping):
        return Batch(inputs, labels)
    return Batch(inputs[0] if len(inputs) == 1 and labels is not None else inputs, labels)


def _ends_in_labels(batch: Sequence[Any], spec: InputSpec | None) -> bool:
    if len(batch) < 2 or np.ndim(batch[-1]) == 1:
        return len(batch) > 1
    return spec is not None and len(batch) == len(spec.tensors) + 1 and not _is_sample(batch[0], spec)


def as_batch(batch: Any, spec: InputSpec) -> Batch:
    """Return a loader's batch as the network takes it, with its labels, which are checked.

    >>> as_batch((np.zeros((3, 2)), [0, 1, 1]), InputSpec()).labels
    array([0, 1, 1])
    """
    raw = split_labels(batch, spec)
    unnamed = isinstance(raw.inputs, Mapping) and len(raw.inputs) == 1 and not spec.names
    inputs = as_inputs(next(iter(raw.inputs.values())) if unnamed else raw.inputs, spec)
    return Batch(inputs, None if raw.labels is None else _class_indices(raw.labels, len(inputs[0])))


def batches(loader: Iterable[Any], spec: InputSpec, what: str) -> Iterator[Batch]:
    """Yield every batch of a loader as the network takes it; `what` says in the error which pass got none.

    >>> [len(batch) for batch in batches([(np.zeros((3, 2)), np.array([0, 1, 1]))], InputSpec(), "the test")]
    [3]
    """
    empty = True
    for batch in loader:
        empty = False
        yield as_batch(batch, spec)
    if empty:
        raise BadInput(f"the loader gave no batch in {what}: {SPENT}")


def length_of(loader: Iterable[Any]) -> int | None:
    """Return the number of batches that a loader gives, None where it does not know."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


def in_batches(
    data: Any, spec: InputSpec, batch_size: int = BATCH_SIZE, *, shuffle: bool | None = None
) -> Iterable[Any]:
    """Return batches of arrays, tensors, data sets or lists of samples; what comes in batches is returned unchanged.

    Samples come in order and without torch, unless `shuffle` is True or False: then torch's DataLoader reads them,
    shuffled by torch's generator or not, for trainings.

    >>> [len(labels) for _, labels in in_batches((np.zeros((5, 4)), np.arange(5)), InputSpec(), batch_size=2)]
    [2, 2, 1]
    """
    rows = _rows(data, spec)
    if rows is None:
        return data
    if not len(rows):
        raise BadInput(f"the {type(data).__name__} has no samples: give at least one")
    return make_loader(rows, partial(_collated, spec), batch_size, shuffle)


@dataclass(frozen=True)
class Loader:
    """Samples in their order, read when their batch is asked for."""

    dataset: Any
    batch_size: int
    collate: Callable[[Any], Any]

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        rows = range(len(self.dataset))
        for start in rows[:: self.batch_size]:
            chosen = rows[start : start + self.batch_size]
            together = getattr(self.dataset, "__getitems__", None)
            yield self.collate(together(chosen) if together else [self.dataset[row] for row in chosen])


def make_loader(
    dataset: Any, collate: Callable[[Any], Any], batch_size: int, shuffle: bool | None = None, workers: int = 0
) -> Iterable[Any]:
    """Return a loader of a data set with indices: torch's, with batches of tensors, where it takes its services."""
    if batch_size < 1:
        raise BadInput(f"batch size {batch_size}: give 1 or more")
    if shuffle is None and not workers and not _is_torch_dataset(dataset):
        return Loader(dataset, batch_size, collate)
    from torch.utils.data import DataLoader

    together = partial(_tensors, collate)
    return DataLoader(dataset, batch_size, shuffle=bool(shuffle), collate_fn=together, num_workers=workers)


def _is_ready(inputs: Any) -> bool:
    """Return whether it is a batch in single precision, quickly, since a single sample is that at best."""
    if type(inputs) is np.ndarray:
        return bool(inputs.dtype.char == "f" and inputs.ndim and len(inputs) and inputs.flags.c_contiguous)
    return is_tensor(inputs) and inputs.is_floating_point() and inputs.ndim > 0 and inputs.shape[0] > 0


def _parts(inputs: Any, spec: InputSpec) -> tuple[Any, ...]:
    """Return the inputs one by one, samples and pictures stacked."""
    if isinstance(inputs, Mapping):
        return by_name(inputs, spec.names)
    if is_picture(inputs):
        return (image_batch([inputs], spec),)
    if isinstance(inputs, list) and inputs and _is_sample(inputs[0], spec):
        return (_stacked(inputs, spec),)
    if isinstance(inputs, list) and len(spec.tensors) < 2 and not any(map(_is_array, inputs)):
        return (inputs,)  # numbers in lists
    return tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)


def _numbers(value: Any, spec: InputSpec) -> Array:
    """Return one input: a tensor unchanged, bytes of images normalised, all else as an array."""
    if is_pixels(value, spec):
        return image_batch(value, spec)
    if is_tensor(value):
        return value
    array = as_array(value)
    if array.dtype == np.float64 and all(own.dtype != "float64" for own in spec.tensors):
        array = array.astype(np.float32)  # the precision of networks
    return np.asarray(array, order="C")


def _fitted(values: Array, own: TensorSpec) -> np.ndarray:
    """Return the array in the dtype that the network takes, if that loses no more than digits."""
    array = values if type(values) is np.ndarray else as_array(values)
    if not own.fits(array.shape):
        raise BadInput(f"an array of shape {array.shape}, and the network takes {own}")
    if array.dtype != own.dtype:
        if not np.can_cast(array.dtype, own.dtype, casting="same_kind"):
            raise BadInput(f"an array of {array.dtype}, and the network takes {own}")
        array = array.astype(own.dtype)
    return np.ascontiguousarray(array)


def _class_indices(labels: Any, num_samples: int) -> Array:
    """Return labels as integers, one per sample, or as shares of classes in float32."""
    tensor = is_tensor(labels)
    labels = labels if tensor else np.asarray(labels)
    floating = labels.is_floating_point() if tensor else labels.dtype.kind == "f"
    if floating and labels.ndim == 2 and len(labels) == num_samples:
        return labels.float() if tensor else labels.astype(np.float32)
    kind = str(labels.dtype).removeprefix("torch.")
    if not kind.startswith(("int", "uint")):
        raise BadInput(f"labels are {labels.dtype}, not class indices: give integers, or rows of shares ({ONE_CLASS})")
    if labels.shape != (num_samples,):
        raise BadInput(
            f"labels have shape {tuple(labels.shape)} for {num_samples} samples: give one class index per sample"
            f" (argmax of one-hot rows; {ONE_CLASS})"
        )
    return labels.long() if tensor else labels.astype(np.int64)


def _rows(data: Any, spec: InputSpec) -> Any:
    """Return the data sample by sample; None of data that comes in batches."""
    if _is_array(data):
        return _Rows([data])
    if isinstance(data, Mapping):
        return _Rows([*data.values()], [*data])
    if isinstance(data, tuple) and data and all(map(_is_array, data)):
        return _Rows(data)
    if isinstance(data, list):
        first = data[0] if data else None
        return data if _is_sample(first[0] if isinstance(first, tuple) and first else first, spec) else None
    return data if _is_torch_dataset(data) and hasattr(data, "__len__") and hasattr(data, "__getitem__") else None


class _Rows:
    """Arrays of one length, whose rows are samples."""

    def __init__(self, parts: Sequence[Any], names: Sequence[str] = ()) -> None:
        self.parts, self.names = [part if _is_array(part) else np.asarray(part) for part in parts], names
        sizes = [len(part) for part in self.parts]
        if len(set(sizes)) > 1:
            raise BadInput(
                f"a tuple or dict of arrays with {sizes} samples: give as many rows of each, or batches in a list"
            )

    def __len__(self) -> int:
        return len(self.parts[0]) if self.parts else 0

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])

    def __getitems__(self, rows: Sequence[int]) -> Any:
        chosen = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        parts = [part[chosen] for part in self.parts]
        if self.names:
            return dict(zip(self.names, parts, strict=True))
        return tuple(parts) if len(parts) > 1 else parts[0]


def _collated(spec: InputSpec, samples: Any) -> Any:
    """Return samples as a batch: each an input, a tuple whose first is one, or a dict; rows of arrays are one."""
    if not isinstance(samples, list):
        return samples
    first = samples[0]
    if isinstance(first, Mapping):
        return {name: _stacked([each[name] for each in samples]) for name in first}
    if not isinstance(first, tuple | list):
        return _stacked(samples, spec)
    inputs, *others = zip(*samples, strict=True)
    return (_stacked(inputs, spec), *map(_stacked, others))


def _stacked(samples: Sequence[Any], spec: InputSpec | None = None) -> Array:
    spec = spec or InputSpec()
    if any(is_picture(each) or is_pixels(each, spec) for each in samples):
        return image_batch(samples, spec)
    tensors = is_tensor(samples[0])
    parts = [as_tensor(each) if tensors else as_array(each) for each in samples]
    try:
        return sys.modules["torch"].stack(parts) if tensors else np.stack(parts)
    except (RuntimeError, ValueError) as error:
        raise BadInput(f"the samples do not fit into one batch ({error}): bring them to one shape") from error


def _tensors(collate: Callable[[Any], Any], samples: Any) -> Any:
    """Return a batch as tensors, which torch's loaders hand from process to process in shared memory."""
    import torch

    def tensor(values: Any) -> torch.Tensor:
        made = as_tensor(values)
        return made.to(torch.get_default_dtype()) if made.dtype is torch.float64 and not is_tensor(values) else made

    batch = collate(samples)
    if isinstance(batch, Mapping):
        return {name: tensor(part) for name, part in batch.items()}
    return tuple(map(tensor, batch)) if isinstance(batch, tuple) else tensor(batch)


def _is_sample(value: Any, spec: InputSpec) -> bool:
    """Return whether it is one image or one row of numbers, not a batch or a part of one."""
    if _is_array(value):
        return len(spec.tensors) == 1 and value.ndim == len(spec.tensors[0].shape) - 1
    return is_picture(value)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or is_tensor(value)


def _is_torch_dataset(value: Any) -> bool:
    torch = sys.modules.get("torch")
    data = getattr(getattr(torch, "utils", None), "data", None)
    return data is not None and isinstance(value, data.Dataset) and not isinstance(value, data.IterableDataset)


def prefetch(source: Iterable[Any]) -> Iterator[Any]:
    """Yield what the source gives, in its order, fetched in another thread; its errors come when their turn comes.

    >>> list(prefetch(range(5)))
    [0, 1, 2, 3, 4]
    """
    items, end = iter(source), object()
    thread = ThreadPoolExecutor(1, "alight-prefetch")
    try:
        futures = deque(thread.submit(next, items, end) for _ in range(AHEAD))
        while (item := futures.popleft().result()) is not end:
            futures.append(thread.submit(next, items, end))
            yield item
    finally:
        thread.shutdown(cancel_futures=True)
