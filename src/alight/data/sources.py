"""One way in for data: whatever a user has becomes samples, or is found to come in batches already."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from alight.data.columns import Columns, depth, is_array, is_path
from alight.data.formats import open_path
from alight.data.labels import whole_labels
from alight.data.preprocess import InputSpec, check_several, check_shapes, is_picture, is_pixels
from alight.data.samples import Items, Samples, is_texts, samples_of_columns, unzipped
from alight.data.tables import frame_columns, hugging_face, is_frame, is_hugging_face, is_series, series_values
from alight.errors import BadInput

ONE_BY_ONE = "give batches of it: torch.utils.data.DataLoader(data, batch_size=64)"


def open_data(data: Any, spec: InputSpec, split: str | None = None, labels: bool = True) -> Samples | Items | None:
    """Return data sample by sample; None of data that comes in batches, as of a loader.

    >>> len(open_data((["a", "b", "c"], [0, 1, 0]), InputSpec()))
    3
    """
    found = open_path(data, spec, split, labels) if is_path(data) else _in_memory(data, spec, labels)
    if isinstance(found, Samples):
        _check_arrays(found, spec)
    return found


def is_torch_dataset(value: Any) -> bool:
    """Return whether it is a data set of torch with indices, which is not imported for the question."""
    torch = sys.modules.get("torch")
    data = getattr(getattr(torch, "utils", None), "data", None)
    return data is not None and isinstance(value, data.Dataset) and not isinstance(value, data.IterableDataset)


def _in_memory(data: Any, spec: InputSpec, labels: bool) -> Samples | Items | None:
    if is_array(data) or is_series(data):
        return Samples([series_values(data) if is_series(data) else data])
    if is_hugging_face(data):
        return hugging_face(data, spec, labels)
    _check_has_indices(data)
    if _holds_columns(data):
        return samples_of_columns(_columns_in(data), spec, labels=labels)
    if isinstance(data, tuple):
        return _tuple(data, spec, labels)
    if isinstance(data, list):
        return _list(data, spec, labels)
    indexed = is_torch_dataset(data) and hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return Items(data, spec, labels) if indexed else None


def _check_has_indices(data: Any) -> None:
    """Raise if it is several data sets of Hugging Face, or a stream of samples."""
    for kind in ("DatasetDict", "IterableDatasetDict"):
        if is_hugging_face(data, kind):
            raise BadInput(
                f"a {kind} has the parts {', '.join(data)}: choose one, as in data[{next(iter(data), 'train')!r}]"
            )
    if is_hugging_face(data, "IterableDataset"):
        raise BadInput(f"an IterableDataset gives samples one by one, and its number is not known: {ONE_BY_ONE}")


def _columns_in(data: Any) -> Columns:
    """Return columns of a table or dict: nested lists of numbers as arrays, Series as arrays or lists."""
    if is_frame(data):
        return frame_columns(data)
    return {str(name): column_of(values) for name, values in data.items() if values is not None}


def column_of(values: Any) -> Any:
    """Return one column as an array, a tensor or a list of texts, pictures or arrays."""
    if is_series(values):
        return series_values(values)
    if isinstance(values, list | tuple) and values and not is_path(values[0]) and not is_picture(values[0]):
        if any(map(is_array, values)) and depth(values[0]):
            return [*values]
        try:
            return np.asarray(values)
        except ValueError:  # rows of different lengths
            return [*values]
    return [*values] if isinstance(values, list | tuple) else values


def _tuple(data: tuple[Any, ...], spec: InputSpec, labels: bool) -> Samples | None:
    """Return samples of (inputs, labels), (inputs, inputs, labels) or (inputs, inputs); None of batches."""
    if not data or not all(map(_is_column, data[1:])) or not (_is_column(data[0]) or _holds_columns(data[0])):
        if data and all(map(is_picture, data)):
            return Samples([[*data]])
        if len(data) == 2 and is_one_sample(data[0], spec) and not depth(data[1]):
            raise BadInput("one sample and its label: give a list of such pairs, or (inputs, labels) of several")
        return None
    if _holds_columns(data[0]):
        return _labelled_columns(data, spec, labels)
    ends = _ends_in_labels(data, spec)
    columns = [column_of(each) for each in (data[:-1] if ends else data)]
    _check_number(columns, spec, ends)
    _check_arrays(Samples(columns), spec)
    return Samples(columns, whole_labels(data[-1], spec) if ends and labels else None)


def _holds_columns(value: Any) -> bool:
    return is_frame(value) or isinstance(value, Mapping)


def _labelled_columns(data: tuple[Any, ...], spec: InputSpec, labels: bool) -> Samples | None:
    """Return samples of a table or dict of inputs, with labels beside it; None of a tuple of batches."""
    if len(data) != 2 or (_holds_columns(data[1]) and not is_frame(data[1])):
        return None
    table, beside = data
    found = samples_of_columns(_columns_in(table), spec, labels=False)
    return Samples(found.columns, whole_labels(beside, spec) if labels else None, found.names)


def _is_column(value: Any) -> bool:
    """Return whether it holds something for every sample."""
    if is_array(value) or is_series(value) or is_frame(value):
        return value.ndim > 0
    return isinstance(value, list) and bool(value) and not isinstance(value[0], tuple | Mapping)


def _ends_in_labels(data: tuple[Any, ...], spec: InputSpec) -> bool:
    """Return whether the last of several columns is the labels: it has one axis, or the network takes one less."""
    if len(data) < 2:
        return False
    if is_texts(data[0]) or depth(data[-1]) == 1 or is_frame(data[-1]):
        return True
    return len(data) == len(spec.tensors) + 1


def _list(data: list[Any], spec: InputSpec, labels: bool) -> Samples | None:
    """Return samples of a list of them, of pairs with labels or of dicts; None of batches."""
    first = data[0] if data else None
    if isinstance(first, Mapping):
        return _list_of_dicts(data, spec, labels) if _is_named_sample(first, spec) else None
    if is_one_sample(first, spec):
        return Samples([column_of(data)])
    if not _is_tuple_of_one_sample(first, spec):
        return None
    inputs, found = unzipped(data, spec)
    columns = inputs if isinstance(inputs, tuple) else (inputs,)
    if not labels:
        found = None
    if found is not None and not (is_array(found[0]) and found[0].ndim):  # rows of shares are stacked later
        found = whole_labels([each.item() if is_array(each) else each for each in found], spec)
    return Samples([*map(column_of, columns)], found)


def _is_tuple_of_one_sample(value: Any, spec: InputSpec) -> bool:
    """Return whether it holds inputs and perhaps a label of one sample; in a list it is a pair with a number alone."""
    if not isinstance(value, tuple | list) or len(value) < 2 or not is_one_sample(value[0], spec):
        return False
    is_pair = len(value) == 2 and not depth(value[1]) and not isinstance(value[1], str)
    return isinstance(value, tuple) or is_pair


def _list_of_dicts(data: list[Any], spec: InputSpec, labels: bool) -> Samples:
    names = dict.fromkeys(name for row in data for name in row)
    columns = {name: column_of([row.get(name) for row in data]) for name in names}
    return samples_of_columns(columns, spec, labels=labels)


def is_one_sample(value: Any, spec: InputSpec) -> bool:
    """Return whether it is one picture, text, image or row of numbers, not a batch or a part of one."""
    if is_picture(value) or is_path(value):
        return True
    own = len(spec.tensors[0].shape) - 1 if len(spec.tensors) == 1 else 0
    return own > 0 and (is_array(value) or isinstance(value, list)) and depth(value) == own


def _is_named_sample(value: Mapping[str, Any], spec: InputSpec) -> bool:
    """Return whether a dict is one sample: it holds a text, a picture, or one axis less than a batch."""
    if any(is_picture(each) or isinstance(each, str) for each in value.values()):
        return True
    own = {tensor.name: len(tensor.shape) - 1 for tensor in spec.tensors}
    known = [depth(value[name]) == own[name] for name in own if name in value]
    if known:
        return all(known)
    depths = [depth(each) for each in value.values()]
    return bool(depths) and (max(depths) == 0 or _holds_one_sample(depths, [*own.values()]))


def _holds_one_sample(depths: list[int], own: list[int]) -> bool:
    """Return whether values of so many axes are a sample of a network of one input: numbers beside it, or it alone."""
    return [max(depths)] == own and (min(depths) == 0 or len(depths) == 1)


def _check_number(columns: Sequence[Any], spec: InputSpec, ends_in_labels: bool) -> None:
    """Raise if a tuple has several inputs, and the network takes one."""
    if len(spec.tensors) == 1 < len(columns):
        beside = " beside labels" if ends_in_labels else ""
        raise BadInput(
            f"a tuple of {len(columns)} inputs{beside}, and the network takes one, {spec.tensors[0]}: give (inputs,"
            " labels)"
        )


def _check_arrays(samples: Samples, spec: InputSpec) -> None:
    """Raise if arrays do not have the shape that the network takes, before the first batch is made."""
    if len(samples) and all(map(is_array, samples.columns)) and not samples.names:
        columns = samples.columns
        if len(columns) == 1 and is_pixels(columns[0], spec) and spec.image_shape is not None:
            check_several(tuple(columns[0].shape), spec.image_shape)
        elif len(columns) == len(spec.tensors) and not any(is_texts(each) for each in columns):
            check_shapes(columns, spec)
