"""Samples to look at: pictures or texts, and where they leave under some policies."""

import base64
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from alight.errors import BadFile, BadInput
from alight.files import PathLike
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy
from alight.policies.route import replay

Pixels = npt.NDArray[np.uint8]

SIDE = 64  # pixels of an image at most, so that a hundred of them stay under a megabyte
LETTERS = 160  # of a text at most, as many as fit below an exit
COUNT = 60
GREY, COLOUR = 0, 2  # as PNG calls them


@dataclass(frozen=True)
class SampleWalk:
    """Where each example left under one policy, and what it was answered there."""

    method: str
    budget: float  # allowed per sample, in the network's unit
    exits: tuple[int, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Examples:
    """Samples as images or as texts, and where they left under some policies.

    >>> walk = SampleWalk("eero", budget=2.0, exits=(0,), answers=("positive",))
    >>> len(Examples((), labels=("positive",), walks=(walk,), texts=("A delight from start to end.",)))
    1
    """

    images: tuple[str, ...]  # PNG files as data: addresses, () where the samples are texts
    labels: tuple[str, ...]  # their classes, () where these are not known
    walks: tuple[SampleWalk, ...]
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.images and self.texts:
            raise BadInput(f"{len(self.images)} images and {len(self.texts)} texts: give samples of one kind")
        if not self.walks:
            raise BadInput("there are no walks: give where the samples left under at least one policy")
        counts = {len(own) for walk in self.walks for own in (walk.exits, walk.answers)} | {len(self)}
        if len(counts | ({len(self.labels)} if self.labels else set())) > 1:
            kind = "texts" if self.texts else "images"
            raise BadInput(f"{len(self)} {kind}, but labels or walks of others: give one entry for each sample")

    def __len__(self) -> int:
        return len(self.images or self.texts)


def examples(
    samples: Any,
    policies: Sequence[Policy],
    outputs: HeadOutputs,
    *,
    chosen: Policy | None = None,
    classes: Sequence[str] = (),
    count: int = COUNT,
) -> Examples:
    """Choose some of these samples, and return where they leave under each of the policies.

    `samples` are texts or images in the order of the table `outputs`; images are grey or RGB, channels first or last,
    of bytes or of floats. Shown are the first to leave at each exit under the `chosen` policy (without one, the policy
    in the middle), an equal number of each as far as there are.

    >>> from alight.policies.policy import Threshold
    >>> policy = Threshold(thresholds=(0.5,), costs=(1.0, 3.0), budget=2.0, method="by hand")
    >>> outputs = HeadOutputs(scores=[[0.2, 0.9], [0.7, 0.8]], predictions=[[1, 0], [2, 2]])
    >>> examples(np.zeros((2, 8, 8)), [policy], outputs).walks
    (SampleWalk(method='by hand', budget=2.0, exits=(1, 0), answers=('0', '2')),)
    >>> examples(["Not  bad,\\nnot good.", "A delight."], [policy], outputs).texts
    ('Not bad, not good.', 'A delight.')
    """
    policies = [*policies, *([] if chosen is None else [chosen])]
    if len(samples) != len(outputs):
        raise BadInput(f"{len(samples)} samples for a table of {len(outputs)}: give those that were recorded")
    if not policies or count < 1:
        raise BadInput(f"{len(policies)} policies and {count} examples: give at least one of each")
    decided = [replay(policy, outputs) for policy in policies]
    rows = _first_of_each(decided[len(decided) // 2 if chosen is None else -1].exits, count)

    walks = {}  # of the chosen policy where another one has its method and budget
    for policy, each in zip(policies, decided, strict=True):
        budget = each.mean_cost if policy.budget is None else float(policy.budget)
        exits, answers = tuple(each.exits[rows].tolist()), _names(each.predictions[rows], classes)
        walks[policy.method, budget] = SampleWalk(policy.method, budget, exits, answers)
    labels = () if outputs.labels is None else _names(outputs.labels[rows], classes)
    taken = [samples[row] for row in rows.tolist()]
    if all(isinstance(each, str) for each in taken):
        return Examples((), labels, tuple(walks.values()), texts=tuple(map(shortened, taken)))
    pixels = as_pixels([np.asarray(each) for each in taken])
    return Examples(tuple(map(data_address, pixels)), labels, tuple(walks.values()))


def _names(indices: npt.NDArray[np.int64], classes: Sequence[str]) -> tuple[str, ...]:
    return tuple(classes[index] if index < len(classes) else str(index) for index in indices.tolist())


def shortened(text: str) -> str:
    """Return the text in one line, cut after a word where it is too long.

    >>> len(shortened("word " * 100)) <= LETTERS, shortened("word " * 100)[-6:]
    (True, 'word …')
    """
    line = " ".join(text.split())
    if len(line) <= LETTERS:
        return line
    return f"{line[: LETTERS - 1].rpartition(' ')[0] or line[: LETTERS - 2]} …"


def read_images(path: PathLike) -> np.ndarray:
    """Read the array `images` of an .npz file; pickled ones are refused, since they could run code."""
    remedy = "save np.savez(path, images=...), in the order in which they were recorded"
    try:
        with np.load(path, allow_pickle=False) as file:
            return np.asarray(file["images"])
    except (ValueError, KeyError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise BadFile(path, f"it holds no images ({error})", remedy) from error


def as_pixels(images: Sequence[np.ndarray]) -> list[Pixels]:
    """Return images as bytes, (height, width[, 3]), shrunk to `SIDE`; floats beyond [0, 1] are stretched."""
    shaped = [_channels_last(image) for image in images]
    if all(image.dtype == np.uint8 for image in shaped):
        low, high = 0.0, 255.0
    else:
        low, high = min(0.0, *(float(image.min()) for image in shaped)), max(float(image.max()) for image in shaped)
        high = 1.0 if low == 0 and high <= 1 else high
    scale = 255 / (high - low)
    return [np.round((_shrunk(image) - low) * scale).clip(0, 255).astype(np.uint8) for image in shaped]


def data_address(pixels: Pixels) -> str:
    """Return the image as a PNG file in a data: address."""
    height, width = pixels.shape[:2]
    lines = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))  # each begins with a zero: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, GREY if pixels.ndim == 2 else COLOUR, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n"
    for kind, content in {b"IHDR": header, b"IDAT": zlib.compress(lines.tobytes(), 9), b"IEND": b""}.items():
        file += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return "data:image/png;base64," + base64.b64encode(file).decode()


def _first_of_each(exits: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Return rows in their order, `count` in all, as evenly over the exits as the samples that left there allow."""
    ranks = np.empty_like(exits)  # the first to leave at its exit is 0
    for index in np.unique(exits):
        ranks[exits == index] = np.arange((exits == index).sum())
    return np.sort(np.lexsort((exits, ranks))[:count])


def _channels_last(image: np.ndarray) -> np.ndarray:
    """Return the image as (height, width) or (height, width, 3)."""
    if image.ndim == 3 and image.shape[0] in (1, 3) and image.shape[2] not in (1, 3):
        image = np.moveaxis(image, 0, -1)
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[..., 0]
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != 3):
        raise BadInput(f"an image of shape {image.shape}: give (height, width) with 1 or 3 channels, first or last")
    return image


def _shrunk(image: np.ndarray) -> npt.NDArray[np.float64]:
    """Return the image with each block of pixels made one, so that no side is longer than `SIDE`."""
    step = -(-max(image.shape[:2]) // SIDE)
    height, width = (side // step * step for side in image.shape[:2])
    blocks = image[:height, :width].astype(np.float64).reshape(height // step, step, width // step, step, -1)
    return blocks.mean(axis=(1, 3)).reshape(height // step, width // step, *image.shape[2:])
