"""Samples of whatever form: inputs in columns and labels, whose rows are read when their batch is asked for."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from alight.data.columns import Columns, choose, depth, is_path, kind_of, numbers, take, whole
from alight.data.labels import renumbered, whole_labels
from alight.data.preprocess import InputSpec, as_array, flattened, is_picture, is_tensor
from alight.data.tokens import library
from alight.errors import BadFile, BadInput
from alight.files import PathLike

Fetched = tuple[Any, Any]  # inputs of a batch (a column, several, or some by name) and its labels or None


class Samples:
    """Inputs of samples as columns, and their labels."""

    def __init__(
        self, columns: Sequence[Any], labels: Any = None, names: Sequence[str] = (), files: Sequence[str] | None = None
    ) -> None:
        self.columns, self.labels, self.names, self.files = list(columns), labels, tuple(names), files
        if len(sizes := {len(each) for each in self.columns}) > 1:
            raise BadInput(f"inputs of {sorted(sizes)} samples: give as many rows of each, or batches in a list")
        if labels is not None and self.columns and len(labels) != len(self):
            raise BadInput(f"{len(self)} inputs and {len(labels)} labels: give one label for each input")

    def __len__(self) -> int:
        return len(self.columns[0]) if self.columns else 0

    def __getitem__(self, row: int) -> Fetched:
        return self.__getitems__([row])

    def __getitems__(self, rows: Sequence[int]) -> Fetched:
        parts = [take(each, rows) for each in self.columns]
        labels = None if self.labels is None else take(self.labels, rows)
        if self.names:
            return dict(zip(self.names, parts, strict=True)), labels
        return parts[0] if len(parts) == 1 else tuple(parts), labels


@dataclass(frozen=True)
class Items:
    """Samples of a data set that gives them one by one: an input, (input, label), or a dict."""

    dataset: Any
    spec: InputSpec
    labels: bool = True

    @cached_property
    def classes(self) -> Sequence[str]:
        """The names that labels are indices of, where the data set says so."""
        return declared_classes(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Fetched:
        return self.__getitems__([row])

    def __getitems__(self, rows: Sequence[int]) -> Fetched:
        together = getattr(self.dataset, "__getitems__", None)
        fetched = together([*rows]) if together else [self.dataset[row] for row in rows]
        inputs, labels = unzipped(fetched, self.spec)
        if not self.labels:
            return inputs, None
        if self.classes and labels is not None and all(type(each) is int for each in labels):
            return inputs, renumbered(np.array(labels), self.classes, self.spec)
        return inputs, labels


@dataclass(frozen=True)
class SomeRows:
    """Some of the samples."""

    samples: Samples | Items
    rows: Sequence[int]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, rows: Sequence[int]) -> Fetched:
        return self.samples.__getitems__([self.rows[row] for row in rows])


def declared_classes(dataset: Any) -> Sequence[str]:
    """Return the names that the labels of a data set are indices of, or of a part of one; none where it is not known.

    A `target_transform` may change labels, so that they are indices of something else.
    """
    while not hasattr(dataset, "classes") and hasattr(dataset, "dataset"):  # as that of torch's Subset
        dataset = dataset.dataset
    names = getattr(dataset, "classes", ())
    are_names = isinstance(names, list | tuple) and all(isinstance(each, str) for each in names)
    return names if are_names and getattr(dataset, "target_transform", None) is None else ()


def unzipped(samples: Sequence[Any], spec: InputSpec) -> Fetched:
    """Return the inputs and the labels of samples that are inputs, tuples that end in a label, or dicts.

    >>> unzipped([("a", 1), ("b", 0)], InputSpec())
    (['a', 'b'], [1, 0])
    """
    first = samples[0]
    if isinstance(first, Mapping):
        return chosen_columns({name: [each[name] for each in samples] for name in first}, spec)
    if not isinstance(first, tuple | list) or _is_nested(first, spec):
        return [*samples], None
    odd = [row for row, each in enumerate(samples) if not isinstance(each, tuple | list) or len(each) != len(first)]
    if odd:
        raise BadInput(
            f"sample {odd[0]} is not {len(first)} values like those before it: give (input, label) for each, or the"
            " input alone"
        )
    columns = [list(each) for each in zip(*samples, strict=True)]
    labels = columns.pop() if _ends_in_label(first, spec) else None
    return columns[0] if len(columns) == 1 else tuple(columns), labels


def _is_nested(sample: Sequence[Any], spec: InputSpec) -> bool:
    """Return whether it is one sample as numbers in lists, not inputs with a label behind them."""
    numbers_alone = bool(sample) and not is_path(sample[0]) and not is_picture(sample[0])
    return numbers_alone and bool(spec.tensors) and depth(sample) == len(spec.tensors[0].shape) - 1


def _ends_in_label(sample: Sequence[Any], spec: InputSpec) -> bool:
    return len(sample) > 1 and (depth(sample[-1]) == 0 or len(sample) == max(1, len(spec.tensors)) + 1)


def chosen_columns(columns: Columns, spec: InputSpec, where: str = "the data") -> Fetched:
    """Return the inputs among columns by name, and the labels, unread."""
    chosen = choose(columns, spec, where)
    labels = None if chosen.label is None else columns[chosen.label]
    if chosen.form == "named":
        return {name: columns[name] for name in chosen.inputs}, labels
    if chosen.form == "numbers":
        return numbers([columns[name] for name in chosen.inputs]), labels
    return columns[chosen.inputs[0]], labels


def samples_of_columns(
    columns: Columns, spec: InputSpec, where: PathLike | None = None, labels: bool = True
) -> Samples:
    """Return the samples of a table: the inputs among its columns, and the labels unless these are not wanted."""
    inputs, found = chosen_columns(columns, spec, "the data" if where is None else str(where))
    own = whole_labels(whole(found), spec, where) if labels and found is not None else None
    if isinstance(inputs, Mapping):
        return Samples([*inputs.values()], own, [*inputs])
    return Samples([inputs], own)


def is_texts(values: Any) -> bool:
    """Return whether it is a list, an array or a Series of texts."""
    if isinstance(values, list):
        return bool(values) and isinstance(values[0], str)
    return isinstance(values, np.ndarray) and kind_of(values) == "text"


def stacked(samples: Sequence[Any]) -> Any:
    """Return samples of one shape as one array, tensors as a tensor."""
    tensors = is_tensor(samples[0])
    try:
        if tensors:
            return sys.modules["torch"].stack([sys.modules["torch"].as_tensor(each) for each in samples])
        return np.stack([as_array(each) for each in samples])
    except (RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"the samples do not fit into one batch ({error}): bring them to one shape") from error


def picture(file: Any, path: PathLike | None = None) -> Any:
    """Return the first picture of a file, opened or by name, upright in 8 bits; `path` is its name in errors."""
    image = library("PIL.Image", "pillow")
    try:
        with image.open(file) as opened:
            return flattened(opened).copy()  # which needs no file
    except Exception as error:  # a damaged image fails in a dozen ways, each decoder its own
        remedy = "take it out of the folder" if path is not None or is_path(file) else "give another"
        raise BadFile(str(file) if path is None else path, f"it is not a usable image ({error})", remedy) from error
