"""One way in for data: a batch as the network takes it, and batches of whatever form the data has.

an array or a tensor          what the network takes; bytes (uint8) of images are normalised, doubles become floats
a list of samples             pictures (Pillow), image files, texts, arrays, rows of numbers, dicts, pairs with a label
(inputs, labels)              inputs as above, or a table; labels as an array, a list, a Series or a tensor
a dict by name, a table       one column per input, or the columns that `columns` names; and one of labels
a data set or a path          of torch, torchvision or Hugging Face; a file or folder that `formats` reads
a DataLoader, other batches   taken unchanged, batch by batch
"""

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from alight.data.columns import LABEL_NAMES, are_image_files, depth, first_of, is_array, is_path, kind_of
from alight.data.labels import are_in_other_order, batch_labels, check_shares
from alight.data.preprocess import (
    InputSpec,
    TensorSpec,
    as_array,
    check_shapes,
    image_batch,
    is_picture,
    is_pixels,
    is_tensor,
)
from alight.data.samples import (
    Fetched,
    Items,
    Samples,
    SomeRows,
    chosen_columns,
    declared_classes,
    is_texts,
    picture,
    stacked,
)
from alight.data.sources import ONE_BY_ONE, column_of, is_one_sample, is_torch_dataset, open_data
from alight.data.tables import frame_columns, is_frame, is_hugging_face, is_series, series_values
from alight.data.tokens import MAX_TOKENS, SEGMENTS, Texts, texts_for
from alight.errors import BadInput

if TYPE_CHECKING:
    import torch

Array = Any  # a NumPy array, or a tensor of torch
Arrays = tuple[Array, ...]

BATCH_SIZE = 128  # by default
AHEAD = 3  # batches that are fetched before they are asked for
MANY = 100  # shapes that are remembered, of a network that takes images of any size
FAR = 4  # times the number for white that no normalised image reaches
SPENT = "an iterator is spent after one pass, so give a DataLoader, a list, or anything that starts anew"
LEAST_HELD_OUT = 50  # samples: the accuracy of fewer is known to worse than 7 points
SPLIT = "give more, as samples, not batches; or train first, with train_heads(..., validation=...), and then fit"
FORMS = (
    "tensors, arrays, (inputs, labels), a list of samples, a data set, a DataFrame, a DataLoader, or the path of a file"
    " or folder"
)


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
            if placed.ndim != 4 or not placed.is_floating_point():
                return placed
            # a permuted tensor has its channels last, too, and torch 2.15 may crash with such gradients on a CPU
            return placed.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)

        labels = None if self.labels is None else as_tensor(self.labels).to(device, non_blocking=True)
        return Batch(tuple(map(moved, self.inputs)), labels)

    def check(self, num_classes: int) -> None:
        """Check that the labels are classes of the network."""
        if self.labels is None:
            return
        if self.labels.ndim == 2:
            check_shares(as_array(self.labels), num_classes)
            return
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= num_classes:
            raise BadInput(
                f"labels run from {low} to {high}, but the network has {num_classes} classes, 0 to {num_classes - 1}:"
                " number the classes from 0, or give a network of more classes"
            )


def as_inputs(inputs: Any, spec: InputSpec) -> Arrays:
    """Return one batch as the first stage takes it, in the order of the names that the network has for its inputs.

    Tensors stay tensors, wherever they are; all else becomes contiguous NumPy arrays. Shapes are compared with those
    that the network takes; sizes may differ where they were proven to be free.

    >>> as_inputs(np.zeros((5, 4)), InputSpec())[0].dtype
    dtype('float32')
    """
    kind, parts = _kind(inputs, spec)
    if kind is not None and kind in spec.known_kinds:
        return parts
    arrays = _checked(_parts(inputs, spec), spec)
    if kind is not None and len(spec.known_kinds) < MANY and [*map(id, parts)] == [*map(id, arrays)]:
        spec.known_kinds.add(kind)
    return arrays


def _kind(inputs: Any, spec: InputSpec) -> tuple[Any, Arrays]:
    """Return shapes and dtypes of inputs that may be what the network takes, and these in order; or None.

    Quickly, since a single sample takes little longer: one array or tensor in single precision or less, or several
    tensors with as many samples each.
    """
    if type(inputs) is np.ndarray or is_tensor(inputs):
        return (inputs.shape[1:] if _is_ready(inputs) else None), (inputs,)
    if isinstance(inputs, Mapping) and len(inputs) == len(spec.names) > 1:
        inputs = tuple([inputs.get(name) for name in spec.names])
    if type(inputs) is not tuple or not inputs or not all(map(is_tensor, inputs)):
        return None, ()
    counts = {each.shape[0] if each.ndim else 0 for each in inputs}
    if len(counts) > 1 or 0 in counts:
        return None, ()
    return tuple([(each.shape[1:], each.dtype) for each in inputs]), inputs


def _is_ready(inputs: Any) -> bool:
    """Return whether it is a batch in single precision or, of tensors, less."""
    if type(inputs) is np.ndarray:
        is_single = inputs.dtype.char == "f" and inputs.dtype.isnative
        return bool(is_single and inputs.ndim and len(inputs) and inputs.flags.c_contiguous)
    return bool(inputs.is_floating_point() and inputs.itemsize < 8 and inputs.ndim and inputs.shape[0])


def _checked(parts: Sequence[Any], spec: InputSpec) -> Arrays:
    """Return inputs in order as arrays of the shapes and dtypes that the network takes."""
    if spec.tensors and len(parts) != len(spec.tensors):
        raise BadInput(_other_number(parts, spec))
    arrays = tuple(map(partial(_numbers, spec), parts, spec.tensors or (None,) * len(parts)))
    sizes = {part.shape[0] if part.ndim else 0 for part in arrays}
    if len(arrays) > 1 and any(part.ndim == 0 for part in arrays):
        raise BadInput(f"the data give samples one by one, with a number beside each: {ONE_BY_ONE}")
    if len(sizes) != 1 or 0 in sizes:
        raise BadInput(
            f"inputs of {sorted(sizes)} samples: the first axis is the samples, at least 1, as many of each input"
        )
    check_shapes(arrays, spec)
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
    others = [name for name in inputs if name not in names and name not in LABEL_NAMES and inputs[name] is not None]
    if ignored := [name for name in others if name != SEGMENTS or as_array(inputs[SEGMENTS]).any()]:
        pairs = " (pairs of texts)" if SEGMENTS in ignored else ""
        raise BadInput(
            f"the batch has {', '.join(map(repr, ignored))}{pairs}, and the network was cut with {list(names)} alone:"
            " attach heads with an example that has it, or leave it out of the batch"
        )
    return tuple([inputs[name] for name in names])


def as_tensor(values: Array) -> "torch.Tensor":
    """Return numbers as a tensor, of a tensor or a writable array without a copy.

    One image of a batch that was reversed is contiguous, with a negative step of which torch makes no tensor.
    """
    import torch

    if isinstance(values, torch.Tensor):
        return values
    array = values if isinstance(values, np.ndarray) else as_array(values)
    shares = array.flags.writeable and min(array.strides, default=0) >= 0
    return torch.from_numpy(array if shares else array.copy())


def split_labels(batch: Any, spec: InputSpec | None = None) -> Batch:
    """Return a loader's batch with its labels apart: a tensor, (inputs, ..., labels), or a dict with "labels".

    The last of several is the labels if it has one axis, or if the network takes one input less; a mask or a second
    image has more axes. Labels may be shares of classes, (samples, classes): of smoothed labels and mixed images.

    >>> split_labels({"input_ids": np.ones((2, 4)), "labels": np.array([1, 0])}).labels
    array([1, 0])
    """
    if isinstance(batch, Mapping):
        label = first_of([name for name in batch if batch[name] is not None], LABEL_NAMES)
        inputs: Any = {name: part for name, part in batch.items() if name not in LABEL_NAMES}
        labels = None if label is None else batch[label]
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
    if len(batch) < 2 or is_path(batch[0]):
        return False
    if isinstance(batch, tuple) and isinstance(batch[0], Mapping):
        return True
    if depth(batch[-1]) == 1:
        return spec is None or not is_one_sample(batch[0], spec)
    return spec is not None and len(batch) == len(spec.tensors) + 1 and not is_one_sample(batch[0], spec)


def as_batch(batch: Any, spec: InputSpec) -> Batch:
    """Return a loader's batch as the network takes it, with its labels, which are checked; a `Batch` unchanged.

    >>> as_batch((np.zeros((3, 2)), [0, 1, 1]), InputSpec()).labels
    array([0, 1, 1])
    """
    if isinstance(batch, Batch):
        return batch
    raw = split_labels(batch, spec)
    inputs = as_inputs(raw.inputs, spec)
    return Batch(inputs, None if raw.labels is None else batch_labels(raw.labels, len(inputs[0]), spec))


def batches(loader: Iterable[Any], spec: InputSpec, what: str) -> Iterator[Batch]:
    """Yield every batch of a loader as the network takes it; `what` says in the error which pass got none.

    >>> [len(batch) for batch in batches([(np.zeros((3, 2)), np.array([0, 1, 1]))], InputSpec(), "the test")]
    [3]
    """
    empty = True
    for batch in loader:
        made = as_batch(batch, spec)
        if empty:
            warn_of_pixels(made.inputs, spec)
        empty = False
        yield made
    if empty:
        raise BadInput(f"the loader gave no batch in {what}: {SPENT}")


def length_of(loader: Iterable[Any]) -> int | None:
    """Return the number of batches that a loader gives, None where it does not know."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


def in_batches(
    data: Any, spec: InputSpec, batch_size: int = BATCH_SIZE, *, shuffle: bool | None = None, labels: bool = True
) -> Iterable[Any]:
    """Return batches of data in any form, as a network of this spec takes them; what comes in batches is unchanged.

    Samples come in order and without torch, unless `shuffle` is True or False: then torch's DataLoader reads them,
    shuffled by torch's generator or not, for trainings. Without `labels` the inputs alone are read.

    >>> [len(batch) for batch in in_batches((np.zeros((5, 4)), np.arange(5)), InputSpec(), batch_size=2)]
    [2, 2, 1]
    """
    if isinstance(data, Loader):
        return data
    samples = open_data(data, spec, labels=labels)
    if samples is not None:
        return _loader(samples, Collate(spec, _named(data)), batch_size, shuffle)
    if not isinstance(data, Iterable):
        raise BadInput(f"a {type(data).__name__} is not data: give {FORMS}")
    _check_class_order(data, spec)
    return data


def split_batches(data: Any, spec: InputSpec, share: float, batch_size: int, seed: int) -> tuple[Any, Any]:
    """Return shuffled batches of data, and batches of a share of its samples, drawn at random, which are held out.

    >>> train, held_out = split_batches((np.zeros((500, 4)), np.arange(500)), InputSpec(), 0.2, batch_size=50, seed=0)
    >>> len(train), len(held_out)
    (8, 2)
    """
    samples = open_data(data, spec)
    what = "to choose an epoch by (keep_best, patience)"
    if samples is None:
        kind = f"a {type(data).__name__} comes in batches"
        raise BadInput(f"{kind}, of which no samples can be held out {what}: {SPLIT}")
    count = int(share * len(samples))
    if count < LEAST_HELD_OUT:
        few = f"{count} of {len(samples):,} training samples would be held out {what}"
        raise BadInput(f"{few}, and {LEAST_HELD_OUT} are needed: {SPLIT}")
    order = np.random.default_rng(seed).permutation(len(samples)).tolist()
    collate = Collate(spec, _named(data))
    parts = (SomeRows(samples, order[count:]), SomeRows(samples, order[:count]))
    train, held_out = (_loader(part, collate, batch_size, part is parts[0]) for part in parts)
    return train, held_out


def _check_class_order(loader: Any, spec: InputSpec) -> None:
    """Raise if a loader gives labels unchanged that are indices of classes which the network numbers in another way."""
    names = declared_classes(getattr(loader, "dataset", None))
    collate = getattr(loader, "collate_fn", None)
    if getattr(collate, "__module__", "").startswith("torch.") and are_in_other_order(names, spec):
        raise BadInput(
            f"the loader's data set numbers its classes {', '.join(names[:3])}, ... and the network"
            f" {', '.join(spec.classes[:3])}, ...: give the data set itself, whose labels are then renumbered"
        )


def load_data(
    data: Any,
    spec: InputSpec,
    *,
    split: str | None = None,
    batch_size: int = BATCH_SIZE,
    shuffle: bool | None = None,
    augment: bool = False,
    tokenizer: Any = None,
    max_tokens: int = MAX_TOKENS,
    workers: int = 0,
    labels: bool = True,
) -> Iterable[Any]:
    """Return batches of data that lies somewhere, as `in_batches` does, with the options of the command line.

    `split` chooses among the parts of a data set that has several. Texts are truncated after `max_tokens`, and cut into
    tokens by another `tokenizer` than the network's where one is given. Without `labels` the inputs alone are read, and
    folders may have any names. Batches come in order as NumPy arrays, and torch is not imported, unless `shuffle` is
    True or False, `augment` flips and moves images at random, or there are `workers`: then torch's DataLoader gives
    tensors.
    """
    spec = spec if tokenizer is None else replace(spec, tokenizer=tokenizer)
    samples = open_data(data, spec, split, labels)
    if samples is None:
        raise BadInput(f"a {type(data).__name__} comes in batches already: give {FORMS}")
    if augment and spec.image_shape is None:
        raise BadInput(f"{data} is to be augmented, and the network does not take images: leave augmentation out")
    collate = Collate(spec, _named(data), augment, max_tokens)
    return _loader(samples, collate, batch_size, bool(shuffle) if augment else shuffle, workers)


def first_batch(data: Any, spec: InputSpec, batch_size: int = 2, *, labels: bool = True) -> Batch:
    """Return the first samples of data in any form, as the network takes them: an example of what it is given.

    >>> len(first_batch((np.zeros((5, 4)), np.arange(5)), InputSpec()))
    2
    """
    for batch in batches(in_batches(data, spec, batch_size, labels=labels), spec, "the first batch"):
        own = None if batch.labels is None else batch.labels[:batch_size]
        return Batch(tuple(each[:batch_size] for each in batch.inputs), own)
    raise AssertionError  # `batches` raises where there is none


@dataclass(frozen=True)
class Collate:
    """What makes a batch of samples as a network takes them; `where` they come from is named in errors."""

    spec: InputSpec
    where: str = "the data"
    augment: bool = False
    max_tokens: int = MAX_TOKENS

    def load_tokenizer(self) -> Texts:
        """Return the tokenizer of the network, which is loaded once."""
        return texts_for(self.spec, self.where, self.max_tokens)

    def __call__(self, fetched: Fetched) -> Batch:
        """Return a batch of arrays, with labels where every sample has one."""
        inputs, labels = fetched
        made = as_inputs(self.inputs(inputs), self.spec)
        if labels is None or (isinstance(labels, list) and None in labels):
            return Batch(made, None)
        if isinstance(labels, list) and is_array(labels[0]):
            labels = stacked(labels)
        return Batch(made, batch_labels(labels, len(made[0]), self.spec))

    def tensors(self, fetched: Fetched) -> Batch:
        """Return a batch of tensors, which torch's loaders hand from process to process in shared memory."""
        return self(fetched).to("cpu")

    def inputs(self, inputs: Any) -> Any:
        """Return inputs as an array, or as several by name or in order."""
        if isinstance(inputs, Mapping):
            if self.spec.takes_texts and any(map(_differ, inputs.values())):
                if self.spec.tokenizer is None:
                    raise BadInput(f"{self.where} has tokens of different lengths: pad them, or set model.tokenizer")
                return self.load_tokenizer().pad(inputs)
            return {name: self.column(values) for name, values in inputs.items()}
        if isinstance(inputs, tuple):
            return tuple(map(self.column, inputs))
        if is_texts(inputs) and (self.spec.takes_texts or not are_image_files(inputs)):
            return self.load_tokenizer()(inputs)
        return self.column(inputs)

    def column(self, values: Any) -> Any:
        """Return one input of all samples of the batch as an array."""
        if are_image_files(values):
            values = [picture(each) for each in values]
        several = values if isinstance(values, list) else [values]
        if any(is_picture(each) or is_pixels(each, self.spec) for each in several):
            return image_batch(values, self.spec, self.where, self.augment)
        if self.augment and self.spec.image_shape is not None:
            return image_batch(values, self.spec, self.where, self.augment)
        return stacked(values) if isinstance(values, list) else values


def _differ(rows: Any) -> bool:
    """Return whether it is a list of rows of different lengths."""
    return isinstance(rows, list) and len({len(each) for each in rows}) > 1


@dataclass(frozen=True)
class Loader:
    """Samples in their order, read when their batch is asked for."""

    dataset: Any
    batch_size: int
    collate: Collate

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        rows = range(len(self.dataset))
        for start in rows[:: self.batch_size]:
            yield self.collate(self.dataset.__getitems__(rows[start : start + self.batch_size]))


def _loader(
    samples: Samples | Items | SomeRows, collate: Collate, batch_size: int, shuffle: bool | None, workers: int = 0
) -> Iterable[Any]:
    """Return a loader of samples: torch's, with batches of tensors, where it takes its services."""
    if not len(samples):
        raise BadInput(f"{collate.where} has no samples: give at least one")
    if batch_size < 1:
        raise BadInput(f"batch size {batch_size}: give 1 or more")
    if shuffle is None and not workers and not (isinstance(samples, Items) and is_torch_dataset(samples.dataset)):
        return Loader(samples, batch_size, collate)
    from torch.utils.data import DataLoader, Dataset

    rows, made = cast("Dataset[Any]", samples), cast("Any", collate.tensors)
    return DataLoader(rows, batch_size, shuffle=bool(shuffle), collate_fn=made, num_workers=workers)


def _named(data: Any) -> str:
    """Return what data is called in errors."""
    return str(data) if is_path(data) else f"the {type(data).__name__}"


def _parts(inputs: Any, spec: InputSpec) -> tuple[Any, ...]:
    """Return the inputs one by one, samples and pictures stacked, texts as tokens."""
    if is_array(inputs) and not is_texts(inputs):
        return (inputs,)
    if is_frame(inputs) or isinstance(inputs, Mapping):
        return _of_columns(frame_columns(inputs) if is_frame(inputs) else inputs, spec)
    inputs = _listed(inputs, spec)
    if is_texts(inputs) and (spec.takes_texts or not are_image_files(inputs)):
        return tuple(texts_for(spec)([*inputs]).values())
    if is_picture(inputs):
        return (image_batch([inputs], spec),)
    if isinstance(inputs, list | tuple) and inputs:
        return _of_sequence(inputs, spec)
    _check_is_batch(inputs)
    return (inputs,)


def _listed(inputs: Any, spec: InputSpec) -> Any:
    """Return texts as a list: one alone, a Series, or a tuple as torch's loaders make; all else unchanged."""
    if isinstance(inputs, str) and spec.takes_texts:
        return [inputs]
    if isinstance(inputs, tuple) and inputs and all(map(is_path, inputs)):
        return [*inputs]
    return series_values(inputs) if is_series(inputs) else inputs


def _of_sequence(inputs: Sequence[Any], spec: InputSpec) -> tuple[Any, ...]:
    """Return samples as one input, or several inputs in order."""
    pictures = all(map(is_picture, inputs))
    if pictures or (isinstance(inputs, list) and is_one_sample(inputs[0], spec)):
        return (Collate(spec).column([*inputs]),)
    if is_texts(inputs[0]) and spec.takes_texts:
        raise BadInput(_other_number(inputs, spec))
    if isinstance(inputs, list) and len(spec.tensors) < 2 and not any(map(is_array, inputs)):
        return (inputs,)  # numbers in lists
    return tuple(inputs)


def _of_columns(columns: Mapping[str, Any], spec: InputSpec) -> tuple[Any, ...]:
    """Return the inputs among columns by name."""
    inputs, _ = chosen_columns(columns, spec, "the batch")
    if isinstance(inputs, Mapping):
        return by_name(inputs, spec.names)
    column = column_of(inputs)
    return _parts(column, spec) if isinstance(column, list) or kind_of(column) == "text" else (column,)


def _check_is_batch(inputs: Any) -> None:
    """Raise if it is a whole data set, which other functions take."""
    several = isinstance(inputs, Iterator) or is_torch_dataset(inputs) or is_hugging_face(inputs)
    if several or is_path(inputs) or (isinstance(inputs, Iterable) and not hasattr(inputs, "__array__")):
        what = f"the path {inputs}" if is_path(inputs) else f"a {type(inputs).__name__}"
        raise BadInput(
            f"{what} is a whole data set and not a batch: `predictor.run(data)` decides about all of its samples"
        )


def _other_number(parts: Sequence[Any], spec: InputSpec) -> str:
    """Return what is wrong with so many inputs, and what to do."""
    takes = "; ".join(map(str, spec.accepted))
    if len(parts) == 2 and not depth(parts[1]) and is_one_sample(parts[0], spec):
        return f"the data give samples one by one, with a number beside each: {ONE_BY_ONE}"
    if len(parts) == 2 and (is_texts(parts[0]) or (len(spec.tensors) == 1 and depth(parts[1]) < 2)):
        return (
            f"a pair of inputs and labels where the network takes inputs alone ({takes}): give the first of the two, or"
            " both to `predictor.run`, which leaves the labels out"
        )
    what = "texts or " if spec.takes_texts else ""
    return f"{len(parts)} input{'s' * (len(parts) != 1)}, and the network takes {takes}: give {what}a dict of these"


def _numbers(spec: InputSpec, value: Any, own: TensorSpec | None) -> Array:
    """Return one input: bytes of images normalised, numbers in the dtype that the network takes."""
    array: Any = value if is_tensor(value) else as_array(value)
    if is_pixels(array, spec):
        return image_batch(array, spec)
    floats = "float" in str(getattr(array.dtype, "name", array.dtype))  # of any order of bytes
    if own is None:
        single = floats and array.itemsize >= 8 and not is_tensor(array)
    elif floats and "float" not in own.dtype:
        raise BadInput(f"an array of {str(array.dtype).removeprefix('torch.')}, and the network takes {own}")
    else:
        single = "float" in own.dtype and own.dtype != "float64" and (not floats or array.itemsize >= 8)
    if single:  # the precision of networks
        array = array.float() if is_tensor(array) else array.astype(np.float32)
    return array if is_tensor(array) else np.asarray(array, array.dtype.newbyteorder("="), order="C")


def warn_of_pixels(inputs: Arrays, spec: InputSpec) -> None:
    """Warn if images are floats that look like pixels in 0..1 or 0..255, which the network would have normalised."""
    known, images = spec.normalisation, inputs[0]
    if spec.image_shape is None or not spec.takes_floats or known is None or getattr(images, "is_cuda", False):
        return
    # what the network takes lies between these
    black, white = ((shade - np.array(known.mean)) / np.array(known.std) for shade in (0, 1))
    low, high = float(images.min()), float(images.max())
    if low >= 0 and ((low < high <= 1 and black.min() < 0) or high > FAR * white.max()):
        warnings.warn(
            f"images are floats from {low:g} to {high:g}, which are taken as what the network takes, and it normalises"
            f" pixels by mean {known.mean} and std {known.std}: give bytes (uint8) or normalised floats; if it takes"
            " pixels in 0..1, set model.normalisation = Normalisation(mean=0, std=1 for each channel)",
            stacklevel=2,
        )


def _fitted(values: Array, own: TensorSpec) -> np.ndarray:
    """Return the array in the dtype that the network takes, if that loses no more than digits."""
    array = values if type(values) is np.ndarray else as_array(values)
    if not own.fits(array.shape):
        raise BadInput(f"an array of shape {array.shape}, and the network takes {own}")
    if array.dtype != own.dtype:
        if not np.can_cast(array.dtype, own.dtype, casting="same_kind"):
            raise BadInput(f"an array of {array.dtype}, and the network takes {own}")
        given, array = array, array.astype(own.dtype)
        if array.dtype.kind in "iu" and (given != array).any():
            raise BadInput(f"an array of {given.dtype} with {given[given != array][0]}, and the network takes {own}")
    return np.ascontiguousarray(array)


def sample_shape(inputs: Arrays) -> tuple[int, ...]:
    """Return the shape of one sample of a batch, on which its cost depends; () of texts and rows of numbers.

    >>> sample_shape((np.zeros((5, 3, 32, 32)),)), sample_shape((np.zeros((5, 12)),))
    ((3, 32, 32), ())
    """
    shape = tuple(inputs[0].shape[1:])
    return shape if len(shape) > 1 else ()


def prefetch(source: Iterable[Any]) -> Iterator[Any]:
    """Yield what the source gives, in its order, fetched in another thread; its errors come when their turn comes.

    >>> list(prefetch(range(5)))
    [0, 1, 2, 3, 4]
    """
    items, end = iter(source), object()
    thread = ThreadPoolExecutor(1, "alight-prefetch")
    own = thread.submit(get_ident)  # the thread that fetches; the garbage collector may end this generator there
    try:
        futures = deque(thread.submit(next, items, end) for _ in range(AHEAD))
        while (item := futures.popleft().result()) is not end:
            futures.append(thread.submit(next, items, end))
            yield item
    finally:
        thread.shutdown(wait=get_ident() != own.result(), cancel_futures=True)
