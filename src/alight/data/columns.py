"""Columns of a table, and which of them are the inputs of a network and the labels: one rule for tables of any kind.

input_ids, attention_mask, ...   the inputs by name of a network that takes these
text, sentence, ...              of a network that reads text; or the only column of texts
image, img, x, ...               of a network that takes one tensor; or the only column of arrays or pictures
columns of numbers               of a network that takes rows of numbers, in their order
label, labels, fine_label, ...   the labels, wherever they are
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, Literal

import numpy as np

from alight.data.preprocess import InputSpec, as_array, is_picture, is_tensor
from alight.errors import BadInput

IMAGE_NAMES, LABEL_NAMES, TEXT_NAMES = (
    ("images", "image", "img", "pixel_values", "x", "data"),
    ("labels", "label", "y", "targets", "target", "fine_label"),
    ("text", "sentence", "utterance"),
)  # of arrays and columns, the first that is there
Kind = Literal["text", "number", "array"]  # of one sample's value
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")  # of image files
NAMING = "name one 'image' or 'text', and one 'label'"


class LazyColumn:
    """Values that are read when their rows are asked for."""

    def __init__(self, length: int, kind: Kind, read: Callable[[Sequence[int]], list[Any]]) -> None:
        self.length, self.kind, self.read = length, kind, read

    def __len__(self) -> int:
        return self.length


Columns = Mapping[str, Any]  # arrays, tensors, lists and lazy columns by name


@dataclass(frozen=True)
class Chosen:
    """The columns that are the inputs, what they are together, and the column of labels."""

    inputs: tuple[str, ...]
    form: Literal["one", "named", "numbers"]
    label: str | None


def is_array(value: Any) -> bool:
    """Return whether it is an array of NumPy or a tensor."""
    return isinstance(value, np.ndarray) or is_tensor(value)


def depth(value: Any) -> int:
    """Return the number of axes of an array or of nested lists; 0 of a number, a text or a picture.

    >>> depth([[1, 2], [3, 4]]), depth("text"), depth(np.zeros((2, 3, 4)))
    (2, 0, 3)
    """
    if isinstance(value, list | tuple):
        return 1 + (depth(value[0]) if value else 0)
    return 0 if is_picture(value) else int(getattr(value, "ndim", 0))


def kind_of(values: Any) -> Kind:
    """Return what a column holds for each sample: a text, a number, or anything else.

    >>> kind_of(["a", "b"]), kind_of(np.arange(3)), kind_of(np.zeros((3, 2)))
    ('text', 'number', 'array')
    """
    if isinstance(values, LazyColumn):
        return values.kind
    if is_array(values) and (is_tensor(values) or values.dtype.kind not in "OUST"):
        return "number" if values.ndim == 1 else "array"
    first: Any = next((each for each in values if each is not None), None)
    if isinstance(first, str):
        return "text"
    return "number" if isinstance(first, Number) or (is_array(first) and first.ndim == 0) else "array"


def take(values: Any, rows: Sequence[int]) -> Any:
    """Return these rows of a column."""
    if isinstance(values, LazyColumn):
        return values.read(rows)
    if is_array(values):
        return values[rows.start : rows.stop] if isinstance(rows, range) else values[list(rows)]
    return [values[row] for row in rows]


def whole(values: Any) -> Any:
    """Return all of a column."""
    return values.read(range(len(values))) if isinstance(values, LazyColumn) else values


def choose(columns: Columns, spec: InputSpec, where: str = "the data") -> Chosen:
    """Return which columns are the inputs of a network and the labels.

    >>> choose({"img": np.zeros((5, 3, 8, 8)), "fine_label": np.zeros(5, int), "coarse_label": [0] * 5}, InputSpec())
    Chosen(inputs=('img',), form='one', label='fine_label')
    """
    present = [name for name in columns if columns[name] is not None]
    label = first_of(present, [name for name in LABEL_NAMES if name not in spec.names])
    kinds = {name: kind_of(columns[name]) for name in present if name in spec.names or name not in LABEL_NAMES}
    if spec.names:
        inputs = _inputs_by_name(kinds, spec, where)
        return Chosen(inputs, "named" if spec.names[0] in inputs else "one", label)
    if _takes_rows(kinds, spec):
        _check_numbers(columns, kinds, spec, where)
        return Chosen(tuple(kinds), "numbers", label)
    return Chosen((_one_column(kinds, spec, where),), "one", label)


def _inputs_by_name(kinds: Mapping[str, Kind], spec: InputSpec, where: str) -> tuple[str, ...]:
    """Return the columns of a network whose inputs have names: these and further arrays, or the column of texts."""
    if all(name in kinds for name in spec.names):
        return tuple(name for name, kind in kinds.items() if name in spec.names or kind == "array")
    if not spec.takes_texts or any(name in kinds for name in spec.names):
        raise BadInput(f"{where} has {sorted(kinds)}, the network takes {list(spec.names)}")
    texts = [name for name, kind in kinds.items() if kind == "text"]
    found = first_of(texts, TEXT_NAMES) or (texts[0] if len(texts) == 1 else None)
    if found is None:
        held = f"{len(texts)} columns of texts ({', '.join(texts)})" if texts else f"columns {', '.join(kinds)}"
        raise BadInput(f"{where} has {held}, and the network reads one text: name one 'text', and one 'label'")
    return (found,)


def _one_column(kinds: Mapping[str, Kind], spec: InputSpec, where: str) -> str:
    """Return the column of a network of one tensor: one that is called so, or the only one; no array is left out."""
    others = [name for name, kind in kinds.items() if kind != "number" or not spec.tensors]
    arrays = {name for name, kind in kinds.items() if kind == "array"}
    named = [name for name in IMAGE_NAMES if name in others][:1]
    for found in (named, others, [*arrays]):
        if len(found) == 1 and arrays <= {*found}:
            return found[0]
    takes = f"the network takes {spec.accepted[0] if spec.tensors else 'one tensor'}"
    raise BadInput(f"{where} has columns {', '.join(map(str, kinds))}, and {takes}: {NAMING}")


def _takes_rows(kinds: Mapping[str, Kind], spec: InputSpec) -> bool:
    """Return whether columns are the numbers of rows: there are no arrays, and the network takes rows of numbers."""
    if not spec.tensors:
        return len(kinds) > 1 and {*kinds.values()} == {"number"}
    return len(spec.tensors) == 1 and len(spec.tensors[0].shape) == 2 and "array" not in kinds.values()


def first_of(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    """Return the first of the wanted names that is there."""
    return next((name for name in wanted if name in names), None)


def numbers(columns: Sequence[Any]) -> np.ndarray:
    """Return columns of numbers as one array, (samples, columns)."""
    return np.stack([as_array(whole(each)) for each in columns], axis=1)


def is_path(value: Any) -> bool:
    """Return whether it names a file: a text or a Path."""
    return isinstance(value, str | os.PathLike)


def are_image_files(values: Any) -> bool:
    """Return whether it is a list of image files by name.

    >>> are_image_files(["a.png", "b.png"]), are_image_files(["Where is my card?"])
    (True, False)
    """
    first = values[0] if isinstance(values, list) and values else None
    return is_path(first) and (not isinstance(first, str) or first.lower().endswith(SUFFIXES))


def _check_numbers(columns: Columns, kinds: Mapping[str, Kind], spec: InputSpec, where: str) -> None:
    """Raise unless there are as many columns of numbers as the network takes."""
    odd = [name for name, kind in kinds.items() if kind != "number"]
    if spec.tensors and spec.accepted[0].shape[1] not in (None, len(kinds)):
        names = [*map(str, kinds)]
        listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        label = f"name the column of labels 'label', and leave out {odd[0]!r}" if odd else "leave out the others"
        takes = f"the network takes {spec.accepted[0]}"
        raise BadInput(f"{where} has {len(kinds)} columns beside the label ({listed}), and {takes}: {label}")
    if odd:
        value = next(each for each in whole(columns[odd[0]]) if each is not None)
        raise BadInput(f"column {odd[0]!r} of {where} holds {value!r}, which is not a number: give numbers alone")
