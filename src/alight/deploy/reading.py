"""Data on disk as batches for an exported network, without PyTorch.

    images.npz       images (samples, height, width, channels) or (samples, channels, height, width)
    folder           *.png, *.jpg, ... of its own or in a folder for each class
    lines.jsonl      one object per line with "text"

Images are brought to the network's size and normalised as its manifest says; text is cut into tokens by its tokenizer.
"""

import errno
import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alight.data.tokens import Texts
from alight.deploy.inputs import normalised
from alight.engine.manifest import Manifest
from alight.errors import BadFile, BadInput
from alight.files import PathLike

IMAGES, TEXTS = ("images", "image", "img", "x", "data"), ("text", "sentence", "utterance")  # the first that is there
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class Samples:
    """Samples that are read when their batch is asked for, and their names where each is a file."""

    items: Sequence[Any] | np.ndarray
    read: Any  # a batch of items as the network takes it
    names: list[str] | None
    batch_size: int

    def __len__(self) -> int:
        return -(-len(self.items) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.items), self.batch_size):
            yield self.read(self.items[start : start + self.batch_size])


def read_data(where: PathLike, folder: PathLike, manifest: Manifest, *, batch_size: int, max_tokens: int) -> Samples:
    """The samples that lie there, for the network that was exported to a folder."""
    path = Path(where)
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "there is no such file or folder", str(where))
    if path.suffix == ".npz":
        return Samples(_arrays(path), lambda images: normalised(images, manifest), None, batch_size)
    if path.suffix == ".jsonl":
        return Samples(_lines(path), Texts(Path(folder), manifest, max_tokens), None, batch_size)
    if not path.is_dir():
        raise BadInput(f"{where} is no kind of data that is read here: give .npz, .jsonl or a folder of images")
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not files:
        raise BadInput(f"{where} has no image ({', '.join(SUFFIXES)}): give a folder of some")
    return Samples(files, lambda some: [_picture(each) for each in some], [str(each) for each in files], batch_size)


def _arrays(path: Path) -> np.ndarray:
    try:
        with np.load(path, allow_pickle=False) as file:
            name = next((name for name in IMAGES if name in file.files), None)
            found = None if name is None else file[name]
    except Exception as error:  # a damaged archive fails in a dozen ways
        raise BadFile(path, f"it is damaged or holds objects ({error})", "save plain arrays with np.savez") from error
    if found is None or not found.ndim or not len(found):
        raise BadFile(path, "it has no images", "save np.savez(path, images=...)")
    return found


def _lines(path: Path) -> list[str]:
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = next((row[name] for name in TEXTS if name in row), None)
        except (json.JSONDecodeError, TypeError) as error:
            raise BadFile(path, f"line {number} is no JSON object ({error})", "write one object per line") from error
        if not isinstance(text, str):
            raise BadFile(path, f"line {number} has no text", 'write {"text": ...} on every line')
        texts.append(text)
    if not texts:
        raise BadFile(path, "it is empty", 'write {"text": ...} on every line')
    return texts


def _picture(path: Path) -> Any:
    try:
        image = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise BadInput("image files need Pillow: pip install pillow") from error
    try:
        with image.open(path) as opened:
            opened.load()
            return opened.copy()
    except (OSError, SyntaxError, ValueError) as error:
        raise BadFile(path, f"it is no whole image ({error})", "take it out of the folder") from error
