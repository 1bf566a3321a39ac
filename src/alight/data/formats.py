"""Data on disk as batches for a network, in PyTorch or exported: images and text, with labels where there are any.

    images.npz             images (samples, height, width, channels) or (samples, channels, height, width), and labels
    folder/class/*.png     a folder for each class; folder/*.png without labels
    cifar100:folder        a data set of torchvision that lies in the folder
    folder                 a data set that Hugging Face's `save_to_disk` wrote
    lines.jsonl            one object per line with "text" and "label"

Images are turned upright, laid over white, brought to the network's size and normalised as it says; text is cut into
tokens by its tokenizer.
"""

import csv
import errno
import importlib
import inspect
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from alight.data.batches import ONE_CLASS, make_loader
from alight.data.preprocess import InputSpec, Sample, flattened, image_batch
from alight.data.tokens import Texts, library
from alight.errors import BadFile, BadInput
from alight.files import PathLike, write_text, write_whole
from alight.outputs import Decisions

IMAGE_NAMES, LABEL_NAMES, TEXT_NAMES = (
    ("images", "image", "img", "x", "data"),
    ("labels", "label", "y", "targets", "fine_label"),
    ("text", "sentence", "utterance"),
)  # of arrays and columns, the first that is there
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
LINE = 'write {"text": ..., "label": ...} on every line'


def load_data(
    where: PathLike,
    spec: InputSpec,
    *,
    split: str = "train",
    batch_size: int = 128,
    shuffle: bool | None = None,
    augment: bool = False,
    tokenizer: PathLike | None = None,
    max_tokens: int = 128,
    workers: int = 0,
    labels: bool = True,
) -> Iterable[Any]:
    """Return batches of the data that lie there, as a network of this spec takes them.

    `split` chooses among the parts of a data set that has several. Texts are cut off after `max_tokens`. Without
    `labels` the inputs alone are read, and folders may have any names. Batches come in order as NumPy arrays, and
    torch is not imported, unless `shuffle` is True or False, `augment` flips and moves images at random, or there are
    `workers`: then torch's DataLoader gives tensors.
    """
    samples, kind = _open(str(where), spec, split, labels)
    if not len(samples):
        raise BadInput(f"{where} has no samples: give data with at least one")
    collate = collation(kind, spec, where, augment=augment, tokenizer=tokenizer, max_tokens=max_tokens)
    return make_loader(samples, collate, batch_size, bool(shuffle) if augment else shuffle, workers)


def collation(
    kind: str,
    spec: InputSpec,
    where: PathLike,
    *,
    augment: bool = False,
    tokenizer: PathLike | None = None,
    max_tokens: int = 128,
) -> Callable[[Sequence[Sample]], Any]:
    """Return what makes a batch of samples, "images" or "text", as a network of this spec takes them."""
    if kind == "text":
        if tokenizer is None or not Path(tokenizer).is_dir():
            raise BadInput(f"{where} holds text, which needs a tokenizer: name the folder of one (--tokenizer FOLDER)")
        return partial(_batch, Texts(tokenizer, spec, max_tokens))
    if spec.image_shape is None:
        raise BadInput(f"the network does not take images, and {where} holds some: give text (.jsonl)")
    return partial(_batch, partial(image_batch, spec=spec, where=str(where), augment=augment))


def names_of(data: Any) -> list[str] | None:
    """Return the samples' files, where each lies in one of its own; None where they are known by number alone."""
    samples = data.dataset
    return [*map(str, samples.items)] if isinstance(samples, _Samples) and samples.read is picture else None


def class_indices(names: Sequence[str], spec: InputSpec, where: str) -> dict[str, int]:
    """Return the index of every class: by the network's own names if it has them, by the alphabet if not."""
    if spec.classes and (unknown := [name for name in names if name not in spec.classes]):
        listed = ", ".join(spec.classes[:5]) + (", ..." if len(spec.classes) > 5 else "")
        raise BadInput(f"{where} has a class {unknown[0]!r} that the network does not know: {listed}")
    if not spec.classes and spec.num_classes is not None and len(names) != spec.num_classes:
        raise BadInput(
            f"{where} has {len(names)} classes by name and the network {spec.num_classes}: number them instead,"
            " or give data with every class"
        )
    return {name: index for index, name in enumerate(spec.classes or names)}


def picture(file: Any, path: PathLike | None = None) -> Any:
    """Return the first picture of a file, opened or by name, upright in 8 bits; `path` is its name in errors."""
    image = library("PIL.Image", "pillow")
    try:
        with image.open(file) as opened:
            return flattened(opened)
    except Exception as error:  # a damaged image fails in a dozen ways, each decoder its own
        remedy = "take it out of the folder"
        raise BadFile(file if path is None else path, f"it is not a usable image ({error})", remedy) from error


@dataclass(frozen=True)
class _Samples:
    """Images or texts one by one, with their classes."""

    items: Any
    labels: Sequence[int] | np.ndarray | None
    read: Callable[[Any], Any] | None = None  # an item is read when it is asked for

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Sample:
        item = self.read(self.items[index]) if self.read else self.items[index]
        return item, None if self.labels is None else int(self.labels[index])


def _batch(make: Callable[[list[Any]], Any], samples: Sequence[Sample]) -> Any:
    """Return a batch of images or tokens, and of labels where all have one."""
    inputs, labels = make([item for item, _ in samples]), [label for _, label in samples]
    if None in labels:
        return inputs
    return {**inputs, "labels": np.array(labels)} if isinstance(inputs, dict) else (inputs, np.array(labels))


def _open(where: str, spec: InputSpec, split: str, labels: bool) -> tuple[Any, str]:
    """Return the samples that lie there, and whether they are "images" or "text"."""
    path = Path(where)
    name, colon, root = where.partition(":")
    if colon and not path.exists():
        return _torchvision(name, root, split), "images"
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "there is no such file or folder", where)
    if path.suffix == ".npz":
        return _arrays(path, labels), "images"
    if path.suffix == ".jsonl":
        return _lines(path, spec, labels), "text"
    if path.is_dir() and any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
        return _hugging_face(path, spec, split, labels)
    if path.is_dir():
        return _folder(path, spec, labels), "images"
    raise BadInput(f"{where} is not a kind of data that alight reads: give .npz, .jsonl, a folder, or NAME:FOLDER")


def _arrays(path: Path, labelled: bool) -> _Samples:
    try:
        with np.load(path, allow_pickle=False) as file:
            listed = file.files
            images, labels = (_first(file, names) for names in (IMAGE_NAMES, LABEL_NAMES))
    except Exception as error:  # a damaged archive fails in a dozen ways
        raise BadFile(path, f"it is damaged or holds objects ({error})", "save plain arrays with np.savez") from error
    if images is None or not images.ndim:
        raise BadFile(path, f"it has {', '.join(listed) or 'nothing'}", "save np.savez(path, images=..., labels=...)")
    if not labelled or labels is None:
        return _Samples(images, None)
    if labels.ndim != 1 or len(labels) != len(images) or labels.dtype.kind not in "iu":
        raise BadFile(
            path,
            f"its labels are {labels.dtype} of shape {labels.shape}",
            f"give {len(images)} class indices ({ONE_CLASS})",
        )
    return _Samples(images, labels)


def _folder(path: Path, spec: InputSpec, labelled: bool) -> _Samples:
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not files:
        raise BadInput(f"{path} has no images ({' '.join(SUFFIXES)}): give some, for labels in a folder for each class")
    loose = [file for file in files if file.parent == path]
    if not labelled or (len(loose) == len(files) and not any(each.is_dir() for each in path.iterdir())):
        return _Samples(files, None, picture)
    if loose:
        raise BadInput(f"{path} has both images and folders: put each image into the folder of its class, or all here")
    names = sorted(folder.name for folder in path.iterdir() if folder.is_dir())
    indices = class_indices(names, spec, str(path))
    return _Samples(files, [indices[file.relative_to(path).parts[0]] for file in files], picture)


def _torchvision(name: str, root: str, split: str) -> Any:
    sets = library("torchvision.datasets", '"alight[vision]"')
    known = {each.lower(): each for each in sets.__all__}
    if name.lower() not in known:
        raise BadInput(f"torchvision has no data set {name!r}: choose among {', '.join(sorted(known))}")
    kind = getattr(sets, known[name.lower()])
    parameters = inspect.signature(kind).parameters
    arguments = {name: value for name, value in {"download": False, "loader": picture}.items() if name in parameters}
    if "train" in parameters:
        arguments["train"] = split == "train"
    elif "split" in parameters:
        arguments["split"] = split
    try:
        return kind(root, **arguments)
    except (RuntimeError, ValueError) as error:
        raise BadInput(f"{known[name.lower()]} is not in {root!r} ({error}): download it there first") from error


def _hugging_face(path: Path, spec: InputSpec, split: str, labelled: bool) -> tuple[_Samples, str]:
    data = library("datasets", "datasets").load_from_disk(str(path))
    if isinstance(data, Mapping):
        if split not in data:
            raise BadInput(f"{path} has no part {split!r}: choose among {', '.join(data)}")
        data = data[split]
    columns = {name: name for name in data.column_names}
    image, text, label = (_first(columns, names) for names in (IMAGE_NAMES, TEXT_NAMES, LABEL_NAMES))
    if image is None and text is None:
        raise BadInput(f"{path} has columns {', '.join(columns)}: name one 'image' or 'text', and one 'label'")
    labels = _indices([*data[label]], path, spec) if labelled and label is not None else None
    return _Samples(data, labels, itemgetter(str(image or text))), "images" if image else "text"


def _lines(path: Path, spec: InputSpec, labelled: bool) -> _Samples:
    rows = [*_objects(path)]
    if not rows:
        raise BadFile(path, "it is empty", LINE)
    texts, labels = [_first(row, TEXT_NAMES) for row in rows], [_first(row, LABEL_NAMES) for row in rows]
    return _Samples(texts, _indices(labels, path, spec) if labelled else None)


def _objects(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the object of every line, which has a text."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadFile(path, f"line {number} is not JSON ({error})", "write one object per line") from error
        if not isinstance(row, dict) or not isinstance(_first(row, TEXT_NAMES), str):
            raise BadFile(path, f"line {number} has no text", LINE)
        yield row


def _indices(labels: Sequence[Any], path: Path, spec: InputSpec) -> list[int] | None:
    """Return labels as class indices: all of them indices, all names, or none there."""
    if all(label is None for label in labels):
        return None
    if all(type(label) is int for label in labels):
        return [*labels]
    if wrong := [row for row, label in enumerate(labels) if not isinstance(label, str)]:
        row = next((row for row in wrong if type(labels[row]) is not int), wrong[0])
        problem = f"the label of sample {row} is {labels[row]!r}, not a name or an index like the others"
        raise BadFile(path, problem, f"give names or indices of classes ({ONE_CLASS})")
    indices = class_indices(sorted(set(labels)), spec, str(path))
    return [indices[label] for label in labels]


def _first(values: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((value for name in names if (value := values.get(name)) is not None), None)


def write_answers(
    decisions: Decisions,
    path: PathLike,
    *,
    names: Sequence[str] | None = None,
    classes: Sequence[str] = (),
    unit: str = "",
) -> Path:
    """The path of a table of samples, labels, exits, probabilities and costs; .parquet needs pyarrow.

    A label is the class's name where `classes` has names, else its index.
    """
    columns = answer_columns(decisions, names or range(len(decisions)), classes, unit)
    if Path(path).suffix != ".parquet":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        return write_text(path, text.getvalue())
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise BadInput(f"{path} is to be Parquet, which needs pyarrow: pip install pyarrow, or write .csv") from error
    return write_whole(path, lambda file: parquet.write_table(arrow.table(columns), file))


def answer_columns(
    decisions: Decisions, samples: Sequence[Any], classes: Sequence[str] = (), unit: str = ""
) -> dict[str, list[Any]]:
    """The columns of a table of answers, each with a cell for every sample.

    >>> answer_columns(Decisions([1], [0], [2.5]), ["a.png"], ["cat", "dog"], "ms")
    {'sample': ['a.png'], 'label': ['dog'], 'exit': [0], 'cost_ms': [2.5]}
    """
    columns = {
        "sample": list(samples),
        "label": [classes[index] if classes else index for index in decisions.predictions.tolist()],
        "exit": decisions.exits.tolist(),
        f"cost_{unit}" if unit else "cost": decisions.spent.tolist(),
    }
    if decisions.probabilities is not None:
        columns["probability"] = decisions.probabilities.tolist()
    return columns
