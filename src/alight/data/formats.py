"""Data on disk as batches for a network: images and text, with labels where there are any.

    images.npz             images (samples, height, width, channels) or (samples, channels, height, width), and labels
    folder/class/*.png     a folder for each class; folder/*.png without labels
    cifar100:folder        a data set of torchvision that lies in the folder
    folder                 a data set that Hugging Face's `save_to_disk` wrote
    lines.jsonl            one object per line with "text" and "label"

Images are brought to the network's size and normalised as its config says; text is cut into tokens by its tokenizer.
"""

import errno
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from alight.data.preprocess import Images, Sample
from alight.errors import BadFile, BadInput
from alight.files import PathLike
from alight.networks.multi_exit import MultiExitModel, described_example

IMAGE_NAMES, LABEL_NAMES, TEXT_NAMES = (
    ("images", "image", "img", "x", "data"),
    ("labels", "label", "y", "targets", "fine_label"),
    ("text", "sentence", "utterance"),
)  # of arrays and columns, the first that is there
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")


def load_data(
    where: PathLike,
    model: MultiExitModel,
    *,
    split: str = "train",
    batch_size: int = 128,
    shuffle: bool = False,
    augment: bool = False,
    tokenizer: PathLike | None = None,
    max_tokens: int = 128,
    workers: int = 0,
) -> DataLoader[Any]:
    """Batches of the data that lie there, as this network takes them.

    `split` chooses among the parts of a data set that has several. `augment` flips and moves images at random. Texts
    are cut off after `max_tokens`.
    """
    samples, kind = _open(str(where), model, split)
    if not len(samples):  # type: ignore[arg-type]
        raise BadInput(f"{where} has no samples: give data with at least one")
    collate = collation(kind, model, where, augment=augment, tokenizer=tokenizer, max_tokens=max_tokens)
    return DataLoader(samples, batch_size, shuffle=shuffle, collate_fn=collate, num_workers=workers)


def collation(
    kind: str,
    model: MultiExitModel,
    where: PathLike,
    *,
    augment: bool = False,
    tokenizer: PathLike | None = None,
    max_tokens: int = 128,
) -> Callable[[Sequence[Sample]], Any]:
    """What makes a batch of samples, "images" or "text", as this network takes them."""
    if kind == "text":
        return _Texts(model, _tokenizer(tokenizer, where), max_tokens, str(where))
    return Images(model, augment, str(where))


def example_of(model: MultiExitModel, tokens: int | None = None) -> Any:
    """A batch as the network takes it, of ones: as its config describes it, or of text with so many tokens."""
    described = model.recipe.get("example")
    if not described:
        raise BadInput("the network does not say what it takes: build it with attach_heads, which keeps an example")
    example = described_example(described)
    if isinstance(example, dict) and tokens is not None:
        example = {name: torch.ones(len(part), tokens, dtype=part.dtype) for name, part in example.items()}
    return example


def names_of(data: DataLoader[Any]) -> list[str] | None:
    """The samples' files, where each lies in one of its own; None where they are known by number alone."""
    items = getattr(data.dataset, "items", None)
    return [str(item) for item in items] if isinstance(items, list) and isinstance(items[0], Path) else None


class _Samples(Dataset[Sample]):
    """Images or texts one by one, with their classes."""

    def __init__(self, items: Any, labels: Sequence[int] | np.ndarray | None, read: Callable[[Any], Any] | None = None):
        self.items, self.labels, self.read = items, labels, read  # an item is read when it is asked for

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Sample:
        item = self.read(self.items[index]) if self.read else self.items[index]
        return item, None if self.labels is None else int(self.labels[index])


def _open(where: str, model: MultiExitModel, split: str) -> tuple[Dataset[Sample], str]:
    """The samples that lie there, and whether they are "images" or "text"."""
    path = Path(where)
    name, colon, root = where.partition(":")
    if colon and not path.exists():
        return _torchvision(name, root, split), "images"
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "there is no such file or folder", where)
    if path.suffix == ".npz":
        return _arrays(path), "images"
    if path.suffix == ".jsonl":
        return _lines(path, model), "text"
    if path.is_dir() and any((path / told).exists() for told in ("dataset_info.json", "dataset_dict.json")):
        return _hugging_face(path, split)
    if path.is_dir():
        return _folders(path, model), "images"
    raise BadInput(f"{where} is no kind of data that alight reads: give .npz, .jsonl, a folder, or NAME:FOLDER")


def _arrays(path: Path) -> _Samples:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # a damaged archive fails in a dozen ways
        raise BadFile(path, f"it is damaged or holds objects ({error})", "save plain arrays with np.savez") from error
    images, labels = _first(arrays, IMAGE_NAMES), _first(arrays, LABEL_NAMES)
    if images is None:
        raise BadFile(path, f"it has {', '.join(arrays) or 'nothing'}", "save np.savez(path, images=..., labels=...)")
    if labels is not None and (labels.ndim != 1 or len(labels) != len(images) or labels.dtype.kind not in "iu"):
        raise BadFile(
            path, f"its labels are {labels.dtype} of shape {labels.shape}", f"give {len(images)} class indices"
        )
    return _Samples(images, labels)


def _folders(path: Path, model: MultiExitModel) -> _Samples:
    names = sorted(folder.name for folder in path.iterdir() if folder.is_dir())
    if loose := sorted(file for file in path.iterdir() if _is_image(file)):
        if names:
            raise BadInput(
                f"{path} has both images and folders: put each image into the folder of its class, or all here"
            )
        return _Samples(loose, None, _picture)
    files = [(file, name) for name in names for file in sorted((path / name).rglob("*")) if _is_image(file)]
    if not files:
        raise BadInput(f"{path} has no folders with images ({' '.join(SUFFIXES)}): make one folder for each class")
    indices = class_indices(names, model, str(path))
    return _Samples([file for file, _ in files], [indices[name] for _, name in files], _picture)


def _torchvision(name: str, root: str, split: str) -> Dataset[Sample]:
    sets = _library("torchvision.datasets", "vision")
    known = {each.lower(): each for each in sets.__all__}
    if name.lower() not in known:
        raise BadInput(f"torchvision has no data set {name!r}: choose among {', '.join(sorted(known))}")
    kind = getattr(sets, known[name.lower()])
    taken = inspect.signature(kind).parameters
    arguments: dict[str, Any] = {"download": False} if "download" in taken else {}
    if "train" in taken:
        arguments["train"] = split == "train"
    elif "split" in taken:
        arguments["split"] = split
    try:
        data: Dataset[Sample] = kind(root, **arguments)
    except (RuntimeError, ValueError) as error:
        raise BadInput(f"{known[name.lower()]} is not in {root!r} ({error}): download it there first") from error
    return data


def _hugging_face(path: Path, split: str) -> tuple[_Samples, str]:
    data = _library("datasets", "").load_from_disk(str(path))
    if isinstance(data, Mapping):
        if split not in data:
            raise BadInput(f"{path} has no part {split!r}: choose among {', '.join(data)}")
        data = data[split]
    columns = {name: name for name in data.column_names}
    image, text, label = (_first(columns, names) for names in (IMAGE_NAMES, TEXT_NAMES, LABEL_NAMES))
    if image is None and text is None:
        raise BadInput(f"{path} has columns {', '.join(columns)}: name one 'image' or 'text', and one 'label'")
    shown = str(image or text)
    labels = None if label is None else np.asarray(data[label])
    return _Samples(data, labels, itemgetter(shown)), "images" if image else "text"


def _lines(path: Path, model: MultiExitModel) -> _Samples:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line) if line.strip() else None
        except json.JSONDecodeError as error:
            raise BadFile(path, f"line {number} is no JSON ({error})", "write one object per line") from error
        if row is not None:
            if not isinstance(row, dict) or not isinstance(_first(row, TEXT_NAMES), str):
                raise BadFile(path, f"line {number} has no text", 'write {"text": ..., "label": ...} on every line')
            rows.append((_first(row, TEXT_NAMES), _first(row, LABEL_NAMES)))
    if not rows:
        raise BadFile(path, "it is empty", 'write {"text": ..., "label": ...} on every line')
    texts, labels = [text for text, _ in rows], [label for _, label in rows]
    if all(label is None for label in labels):
        return _Samples(texts, None)
    if not all(type(label) is int for label in labels):
        if not all(isinstance(label, str) for label in labels):
            raise BadFile(path, "some labels are missing or no names", "give every line a name or an index as label")
        indices = class_indices(sorted(set(labels)), model, str(path))
        labels = [indices[label] for label in labels]
    return _Samples(texts, labels)


def class_indices(names: Sequence[str], model: MultiExitModel, where: str) -> dict[str, int]:
    """The index of every class: by the network's own names if it has them, by the alphabet if not."""
    if model.classes and (unknown := [name for name in names if name not in model.classes]):
        raise BadInput(f"{where} has a class {unknown[0]!r} that the network does not know: {_some(model.classes)}")
    if not model.classes and model.num_classes is not None and len(names) != model.num_classes:
        raise BadInput(
            f"{where} has {len(names)} classes by name and the network {model.num_classes}: number them instead,"
            " or give data with every class"
        )
    return {name: index for index, name in enumerate(model.classes or names)}


class _Texts:
    """Texts to tokens, as many as the longest of a batch has."""

    def __init__(self, model: MultiExitModel, tokenizer: Any, max_tokens: int, where: str) -> None:
        if not model.input_names:
            raise BadInput(f"the network does not take text, and {where} holds some: give images")
        self.names, self.tokenizer = model.input_names, tokenizer
        self.max_tokens = min(max_tokens, tokenizer.model_max_length)

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        texts = [text for text, _ in samples]
        made = self.tokenizer(texts, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt")
        batch = {name: made[name] for name in self.names}
        labels = [label for _, label in samples]
        return batch if None in labels else {**batch, "labels": torch.tensor(labels)}


def _tokenizer(folder: PathLike | None, where: PathLike) -> Any:
    if folder is None or not Path(folder).is_dir():
        raise BadInput(f"{where} holds text, which needs a tokenizer: name the folder of one (--tokenizer FOLDER)")
    auto = _library("transformers", "text").AutoTokenizer
    return auto.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def _picture(path: Path) -> Any:
    return picture(path, path)


def picture(file: Any, path: PathLike) -> Any:
    """The picture in a file, opened or by name; `path` is its name in errors."""
    image = _library("PIL.Image", "vision")
    try:
        with image.open(file) as opened:
            opened.load()
            return opened.copy()
    except (OSError, SyntaxError, ValueError) as error:
        raise BadFile(path, f"it is no whole image ({error})", "take it out of the folder") from error


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file()


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = f'"alight[{extra}]"' if extra else name
        raise BadInput(f"{name.partition('.')[0]} is not installed: pip install {package}") from error


def _first(found: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((found[name] for name in names if found.get(name) is not None), None)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
