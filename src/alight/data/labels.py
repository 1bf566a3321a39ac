"""Labels become class indices, one per sample, or shares of classes: names by the classes that the network has."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from alight.data.preprocess import InputSpec, is_tensor
from alight.errors import AlightError, BadFile, BadInput
from alight.files import PathLike

ONE_CLASS = (
    "alight gives each sample one class: several labels per sample need a network of two classes for each label,"
    " a regression needs classes, such as ranges of its target"
)
ROUNDING = 0.01  # by which shares of classes may miss a sum of one
INTEGERS = "give integers, or rows of shares"


class UnknownClasses(BadInput):
    """Data has classes by name, and the network has no names for its own, or another number of them."""

    def __init__(self, names: Sequence[str], where: str, num_classes: int | None) -> None:
        self.names = tuple(names)
        if num_classes is None:
            problem = "and the network does not say which it has: set model.classes, in the order of its logits"
        else:
            problem = (
                f"{len(names)} of them, and the network has {num_classes}: build it with {len(names)} (num_classes,"
                " --classes), give data with every class"
            )
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        super().__init__(f"{where} has classes by name ({shown}), {problem}, or number the labels")


def class_indices(names: Sequence[str], spec: InputSpec, where: str) -> dict[str, int]:
    """Return the index of every class: by the network's own names if it has them, by the alphabet if not.

    >>> class_indices(["cat", "dog"], InputSpec(classes=("dog", "cat")), "the data")
    {'dog': 0, 'cat': 1}
    """
    if spec.classes and (unknown := [name for name in names if name not in spec.classes]):
        listed = ", ".join(spec.classes[:5]) + (", ..." if len(spec.classes) > 5 else "")
        raise BadInput(f"{where} has a class {unknown[0]!r} that the network does not know: {listed}")
    if not spec.classes and len(names) != spec.num_classes:
        raise UnknownClasses(names, where, spec.num_classes)
    return {name: index for index, name in enumerate(spec.classes or names)}


def whole_labels(labels: Any, spec: InputSpec, where: PathLike | None = None) -> Any:
    """Return the labels of all samples as class indices or shares of classes, None where no sample has one.

    Names are those of the network's classes, or sorted by the alphabet where it has as many without names. `where` is
    the file that they were read from.

    >>> whole_labels(["b", "a", "b"], InputSpec(num_classes=2))
    array([1, 0, 1])
    """
    if labels is None or is_tensor(labels):
        return labels
    if where is not None and isinstance(labels, list):
        return _of_objects(labels, spec, where)
    values = _as_array(labels)
    if values.dtype.kind in "OUST":
        return _of_objects(values.tolist(), spec, where)
    if values.dtype.kind not in "iu" and where is not None:
        raise _refused_label(where, 0, values[0])
    return values


def batch_labels(labels: Any, num_samples: int, spec: InputSpec) -> Any:
    """Return the labels of a batch as integers, one per sample, or as shares of classes in float32.

    >>> batch_labels(["cat", "dog"], 2, InputSpec(classes=("dog", "cat")))
    array([1, 0])
    """
    tensor = is_tensor(labels)
    labels = labels if tensor else _as_array(labels)
    if not tensor and labels.dtype.kind in "OUST":
        if not spec.classes:
            raise BadInput(
                f"labels are names such as {str(labels.ravel()[0])!r}, and the network has no names for its classes:"
                " set model.classes, in the order of its logits, or number the labels"
            )
        labels = whole_labels(labels, spec)
    floating = labels.is_floating_point() if tensor else labels.dtype.kind == "f"
    if floating and labels.ndim == 2 and len(labels) == num_samples:
        return labels.float() if tensor else labels.astype(np.float32)
    if not str(labels.dtype).removeprefix("torch.").startswith(("int", "uint")):
        raise BadInput(f"labels are {labels.dtype}, not class indices: {INTEGERS}{_cast(labels)} ({ONE_CLASS})")
    if labels.shape != (num_samples,):
        remedy = "y[:, 0]" if labels.shape == (num_samples, 1) else f"argmax of one-hot rows; {ONE_CLASS}"
        raise BadInput(
            f"labels have shape {tuple(labels.shape)} for {num_samples} samples: give one class index per sample"
            f" ({remedy})"
        )
    return labels.long() if tensor else labels.astype(np.int64)


def _cast(labels: Any) -> str:
    """Return how labels become integers, where they may be whole numbers or yes and no."""
    kind = str(labels.dtype)
    made = "y.long()" if is_tensor(labels) else "y.astype(int)"
    if "bool" in kind:
        return f" ({made})"
    return f" ({made} where they are whole numbers)" if "float" in kind else ""


def check_shares(shares: np.ndarray, num_classes: int) -> None:
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


def single_classes(labels: np.ndarray) -> np.ndarray:
    """Return one class index per sample, also of one-hot rows; rows that share a sample among classes are refused.

    >>> single_classes(np.array([[0.0, 1.0], [1.0, 0.0]])), single_classes(np.array([1, 0]))
    (array([1, 0]), array([1, 0]))
    """
    if labels.ndim == 1:
        return labels
    if not ((labels == 0) | (labels == 1)).all():
        raise BadInput(
            "labels share samples among classes, which is for training alone: give validation data with one class"
            " index per sample"
        )
    return labels.argmax(1)


def are_in_other_order(names: Sequence[str], spec: InputSpec) -> bool:
    """Return whether the network knows all of these names of classes, and numbers them in another way."""
    return bool(names) and set(names) <= set(spec.classes) and tuple(names) != spec.classes[: len(names)]


def renumbered(indices: Any, names: Sequence[str], spec: InputSpec) -> Any:
    """Return indices into the names that a data set declares as indices into the network's, where it knows them all.

    >>> renumbered(np.array([0, 1]), ["cat", "dog"], InputSpec(classes=("dog", "cat")))
    array([1, 0])
    """
    if not are_in_other_order(names, spec):
        return indices
    own = np.array([spec.classes.index(name) for name in names])
    whole = np.asarray(indices)
    known = (whole >= 0) & (whole < len(own))
    return np.where(known, own[np.where(known, whole, 0)], whole)


def _as_array(labels: Any) -> np.ndarray:
    try:
        return np.asarray(labels)
    except ValueError as error:  # rows of different lengths
        raise BadInput(
            f"labels have rows of different lengths, such as {labels[0]!r}: give one class index per sample"
            f" ({ONE_CLASS})"
        ) from error


def _of_objects(labels: list[Any], spec: InputSpec, where: PathLike | None) -> Any:
    """Return labels as class indices: all of them indices, all names, or none there."""
    if all(label is None for label in labels):
        return None
    if all(map(_is_index, labels)):
        return np.array(labels)
    if wrong := [row for row, label in enumerate(labels) if not isinstance(label, str)]:
        row = next((row for row in wrong if not _is_index(labels[row])), wrong[0])
        raise _refused_label(where, row, labels[row])
    indices = class_indices(sorted(set(labels)), spec, "the data" if where is None else str(where))
    return np.array([indices[label] for label in labels])


def _is_index(label: Any) -> bool:
    return isinstance(label, int | np.integer) and not isinstance(label, bool)


def _refused_label(where: PathLike | None, row: int, label: Any) -> AlightError:
    problem = f"the label of sample {row} is {label!r}, not a name or an index like the others"
    remedy = f"give names or indices of classes ({ONE_CLASS})"
    return BadInput(f"{problem}: {remedy}") if where is None else BadFile(where, problem, remedy)
