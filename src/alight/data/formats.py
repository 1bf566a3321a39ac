"""Data on disk as samples for a network, in PyTorch or exported: images, texts and numbers, with labels where known.

    images.npz             images or other arrays, bytes with channels first or last, and labels
    images.npy             arrays alone; folder/images.npy and labels.npy beside it
    folder/class/*.png     a folder for each class; folder/*.png, or one file, without labels
    cifar100:folder        a data set of torchvision that lies in the folder
    folder                 a data set that Hugging Face's `save_to_disk` wrote, or files of Parquet
    table.parquet          images as bytes of files or as arrays, texts, or columns of numbers; and labels
    table.csv, lines.jsonl a column of texts, or columns of numbers; and one of labels

The part of a data set that has several stands in brackets behind the path, as in "cifar100:folder[test]". Images are
turned upright, laid over white, brought to the network's size and normalised as it says; floats are what the network
takes; texts are cut into tokens by its tokenizer.
"""

import errno
import importlib
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from alight.data.columns import IMAGE_NAMES, LABEL_NAMES, SUFFIXES, LazyColumn, first_of
from alight.data.labels import ONE_CLASS, class_indices
from alight.data.preprocess import InputSpec
from alight.data.samples import Items, Samples, picture, samples_of_columns
from alight.data.tables import csv_columns, hugging_face, line_columns, parquet_columns
from alight.data.tokens import library
from alight.errors import BadFile, BadInput
from alight.files import PathLike, write_csv, write_whole
from alight.outputs import Decisions

READ = ".npz, .npy, .parquet, .csv, .jsonl, an image, a folder, or NAME:FOLDER"
KINDS_OF_LABELS = {(1, "i"), (1, "u"), (2, "f")}  # axes and dtype: class indices, or one-hot rows
SAVE = "save np.savez(path, images=..., labels=...)"


def open_path(where: PathLike, spec: InputSpec, split: str | None = None, labels: bool = True) -> Samples | Items:
    """Return the samples that lie there; `split` is the part of a data set that has several, unless the path says."""
    text, split = without_part(str(where), split)
    path = Path(text)
    name, colon, root = text.partition(":")
    if colon and not path.exists():
        return _torchvision(name, root, split, spec, labels)
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "there is no such file or folder", text)
    return _folder(path, spec, split, labels) if path.is_dir() else _file(path, spec, labels)


def names_of(data: Any) -> list[str] | None:
    """Return the samples' files, where each lies in one of its own; None where they are known by number alone."""
    files = getattr(getattr(data, "dataset", None), "files", None)
    return None if files is None else [*files]


def without_part(where: str, split: str | None = None) -> tuple[str, str | None]:
    """Return the path without the part that stands in brackets behind it, and the part.

    >>> without_part("cifar100:folder[test]", "train")
    ('cifar100:folder', 'test')
    """
    path, bracket, part = where.removesuffix("]").rpartition("[")
    return (path, part) if bracket and where.endswith("]") and not Path(where).exists() else (where, split)


def _file(path: Path, spec: InputSpec, labels: bool) -> Samples:
    suffix = path.suffix.lower()
    if suffix in (".npz", ".npy"):
        return _arrays(path, spec, labels)
    if suffix in SUFFIXES:
        return _pictures([path], None)
    if suffix == ".jsonl":
        columns = line_columns(path, spec)
    elif suffix in (".csv", ".tsv"):
        columns = csv_columns(path, spec)
    elif suffix == ".parquet":
        columns = parquet_columns(path)
    else:
        raise BadInput(f"{path} is not a kind of data that alight reads: give {READ}")
    return samples_of_columns(columns, spec, path, labels)


def _folder(path: Path, spec: InputSpec, split: str | None, labels: bool) -> Samples | Items:
    if any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
        return _saved_by_hugging_face(path, spec, split, labels)
    if any(path.glob("*.parquet")):
        return samples_of_columns(parquet_columns(path), spec, path, labels)
    arrays = {file.stem: file for file in path.glob("*.npy")}
    if arrays:
        inputs, labelled = (first_of([*arrays], names) for names in (IMAGE_NAMES, LABEL_NAMES))
        if inputs is None and len(arrays) > 1:
            raise BadInput(f"{path} has {', '.join(sorted(arrays))}: save images.npy, and labels.npy beside it")
        found = _array(arrays[inputs or next(iter(arrays))])
        own = _array(arrays[labelled]) if labels and labelled is not None and inputs is not None else None
        return Samples([found], _checked_labels(own, len(found), path, spec))
    return _image_folder(path, spec, labels)


def _arrays(path: Path, spec: InputSpec, labels: bool) -> Samples:
    if path.suffix.lower() == ".npy":
        return Samples([_array(path)])
    try:
        with np.load(path, allow_pickle=False) as file:
            by_name = spec.names if spec.names and all(name in file.files for name in spec.names) else ()
            inputs, label = (first_of(file.files, names) for names in (IMAGE_NAMES, LABEL_NAMES))
            columns = [file[name] for name in by_name or filter(None, [inputs])]
            own = file[label] if labels and label is not None else None
            listed = ", ".join(file.files) or "nothing"
    except Exception as error:  # a damaged archive fails in a dozen ways
        raise BadFile(path, f"it is damaged or holds objects ({error})", "save plain arrays with np.savez") from error
    if not columns or not columns[0].ndim:
        raise BadFile(path, f"it has {listed}", SAVE)
    return Samples(columns, _checked_labels(own, len(columns[0]), path, spec), by_name)


def _array(path: Path) -> np.ndarray:
    try:
        made = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # as above
        raise BadFile(path, f"it is not a complete .npy file ({error})", "save it with np.save") from error
    if not made.ndim:
        raise BadFile(path, "it holds a single number", "save arrays whose first axis is the samples")
    return made


def _checked_labels(labels: np.ndarray | None, count: int, path: Path, spec: InputSpec) -> np.ndarray | None:
    if labels is not None and labels.dtype.kind == "U" and labels.ndim == 1:
        indices = class_indices(sorted({*labels.tolist()}), spec, str(path))
        labels = np.array([indices[name] for name in labels.tolist()])
    if labels is not None and (len(labels) != count or (labels.ndim, labels.dtype.kind) not in KINDS_OF_LABELS):
        problem = f"its labels are {labels.dtype} of shape {labels.shape}"
        raise BadFile(path, problem, f"give {count} class indices or names ({ONE_CLASS})")
    return labels


def _image_folder(path: Path, spec: InputSpec, labels: bool) -> Samples:
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not files:
        raise BadInput(f"{path} has no images ({' '.join(SUFFIXES)}): give some, for labels in a folder for each class")
    loose = [file for file in files if file.parent == path]
    if not labels or (len(loose) == len(files) and not any(each.is_dir() for each in path.iterdir())):
        return _pictures(files, None)
    if loose:
        raise BadInput(f"{path} has both images and folders: put each image into the folder of its class, or all here")
    names = sorted(folder.name for folder in path.iterdir() if folder.is_dir())
    indices = class_indices(names, spec, str(path))
    return _pictures(files, np.array([indices[file.relative_to(path).parts[0]] for file in files]))


def _pictures(files: Sequence[Path], labels: np.ndarray | None) -> Samples:
    return Samples([LazyColumn(len(files), "array", partial(_read_pictures, files))], labels, files=[*map(str, files)])


def _read_pictures(files: Sequence[Path], rows: Sequence[int]) -> list[Any]:
    return [picture(files[row]) for row in rows]


def _torchvision(name: str, root: str, split: str | None, spec: InputSpec, labels: bool) -> Items:
    sets = library("torchvision.datasets", '"alight[vision]"')
    known = {each.lower(): each for each in sets.__all__}
    if name.lower() not in known:
        raise BadInput(f"torchvision has no data set {name!r}: choose among {', '.join(sorted(known))}")
    kind = getattr(sets, known[name.lower()])
    parameters = inspect.signature(kind).parameters
    arguments = {name: value for name, value in {"download": False, "loader": picture}.items() if name in parameters}
    if split is None and ("train" in parameters or "split" in parameters):
        raise BadInput(f"{name}:{root} has several parts: choose one, as in '{name}:{root}[train]' or [test]")
    if "train" in parameters:
        arguments["train"] = split == "train"
    elif "split" in parameters:
        arguments["split"] = split
    try:
        return Items(kind(root, **arguments), spec, labels=labels)
    except (RuntimeError, ValueError) as error:
        raise BadInput(f"{known[name.lower()]} is not in {root!r} ({error}): download it there first") from error


def _saved_by_hugging_face(path: Path, spec: InputSpec, split: str | None, labels: bool) -> Samples | Items:
    data = library("datasets", "datasets").load_from_disk(str(path))
    if isinstance(data, Mapping):
        if split is None:
            raise BadInput(f"{path} has the parts {', '.join(data)}: choose one, as in '{path}[{next(iter(data))}]'")
        if split not in data:
            raise BadInput(f"{path} has no part {split!r}: choose among {', '.join(data)}")
        data = data[split]
    return hugging_face(data, spec, labels, path)


def write_answers(
    decisions: Decisions, path: PathLike, *, names: Sequence[str] | None = None, classes: Sequence[str] = ()
) -> Path:
    """Write a table of answers, `answer_columns`, and return its path; .parquet needs pyarrow."""
    columns = answer_columns(decisions, names or range(len(decisions)), classes)
    if Path(path).suffix != ".parquet":
        return write_csv(path, columns, zip(*columns.values(), strict=True))
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise BadInput(f"{path} is to be Parquet, which needs pyarrow: pip install pyarrow, or write .csv") from error
    return write_whole(path, lambda file: parquet.write_table(arrow.table(columns), file))


def answer_columns(decisions: Decisions, samples: Sequence[Any], classes: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Return the columns of a table of answers, each with a cell for every sample; the true label where it is known.

    Classes are shown by name where `classes` has names, else by index.

    >>> decisions = Decisions([1], [0], [2.5], labels=[0], unit="ms", exit_names=["layer1"])
    >>> answer_columns(decisions, ["a.png"], ["cat", "dog"])
    {'sample': ['a.png'], 'prediction': ['dog'], 'exit': ['layer1'], 'cost_ms': [2.5], 'label': ['cat']}
    """

    def shown(indices: np.ndarray) -> list[Any]:
        known = len(classes) > int(indices.max(initial=-1))
        return [classes[index] for index in indices.tolist()] if known and classes else indices.tolist()

    columns = {
        "sample": list(samples),
        "prediction": shown(decisions.predictions),
        "exit": [decisions.exit_names[index] for index in decisions.exits.tolist()],
        f"cost_{decisions.unit}" if decisions.unit else "cost": decisions.spent.tolist(),
    }
    if decisions.probabilities is not None:
        columns["probability"] = decisions.probabilities.tolist()
    return columns if decisions.labels is None else {**columns, "label": shown(decisions.labels)}
