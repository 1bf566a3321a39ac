"""CIFAR-100 for the experiments: split by a seed, kept on the device and augmented there.

A folder holds train.npz and test.npz, each with `images` (uint8, N x 32 x 32 x 3) and `labels` (fine classes, 0 to 99).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import functional

from alight import Normalisation

SIZE = 32
PADDING = 4  # pixels by which a picture may be moved
SEED = 0  # of the noise
HOLE = 8  # rows and columns that cutout removes, the choice of its paper for CIFAR-100 (DeVries and Taylor 2017)


@dataclass(frozen=True)
class Pictures:
    """Pictures and their classes."""

    pixels: Tensor  # (samples, rows, columns, channels), uint8
    labels: Tensor  # (samples,)

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "Pictures":
        """Return the same pictures on a device."""
        return Pictures(self.pixels.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Split:
    """Pictures to train on, to calibrate on, and to test on; no two share one."""

    train: Pictures
    calibration: Pictures
    test: Pictures


def read(folder: Path, seed: int, calibration: int, limit: int | None = None) -> Split:
    """Return the split of a seed; `limit` keeps this many of each part, for a rehearsal."""
    train, test = (_pictures(folder / f"{name}.npz") for name in ("train", "test"))
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(train)))  # the file is sorted by class
    if limit is not None:
        test = _chosen(test, torch.from_numpy(np.random.default_rng(seed).permutation(len(test))[:limit]))
        order = order[: limit + min(limit, calibration)]
        calibration = min(limit, calibration)
    return Split(_chosen(train, order[calibration:]), _chosen(train, order[:calibration]), test)


def _pictures(path: Path) -> Pictures:
    with np.load(path, allow_pickle=False) as file:
        return Pictures(torch.from_numpy(file["images"]), torch.from_numpy(file["labels"]))


def _chosen(pictures: Pictures, rows: Tensor) -> Pictures:
    return Pictures(pictures.pixels[rows], pictures.labels[rows])


def blurred(pixels: Tensor, width: float) -> Tensor:
    """Return images (samples, channels, rows, columns) under a Gaussian blur of so many pixels."""
    return functional.gaussian_blur(pixels, [7, 7], [width, width])


def noisy(pixels: Tensor, width: float) -> Tensor:
    """Return images with Gaussian noise of this standard deviation, drawn from torch's generator."""
    return pixels + width * torch.randn_like(pixels)


def darker(pixels: Tensor, share: float) -> Tensor:
    """Return images with this share of their light."""
    return pixels * share


CHANGES: dict[str, tuple[Callable[[Tensor, float], Tensor], tuple[float, ...]]] = {
    "blur": (blurred, (0.5, 0.75, 1.25)),  # pixels
    "noise": (noisy, (5.0, 12.0, 25.0)),  # of 255
    "darkness": (darker, (0.6, 0.3, 0.15)),  # of the light is left
}


def changed(pictures: Pictures, kind: str, strength: float) -> Pictures:
    """Return the pictures after one change, in whole numbers again."""
    change, _ = CHANGES[kind]
    torch.manual_seed(SEED)
    pixels = change(pictures.pixels.permute(0, 3, 1, 2).float(), strength)
    return Pictures(pixels.round().clamp(0, 255).byte().permute(0, 2, 3, 1), pictures.labels)


def changes() -> Iterator[tuple[str, float, str]]:
    """Yield kind, strength and name of every change."""
    for kind, (_, strengths) in CHANGES.items():
        for number, strength in enumerate(strengths, 1):
            yield kind, strength, f"{kind}-{number}"


class Batches:
    """Batches as a network takes them, made on the device that the pictures are on.

    For training, every epoch has a new order; every picture is moved by up to four pixels, mirrored at random, and
    loses a square (cutout); a last partial batch is dropped. All random numbers are torch's.

    With `mixing`, the probability that a picture is mixed with another of its batch, or `smoothing`, the share of a
    label that goes to all classes alike, a batch is a dict whose labels are shares of `num_classes` classes.
    """

    def __init__(
        self,
        pictures: Pictures,
        normalisation: Normalisation,
        batch_size: int,
        *,
        training: bool = False,
        mixing: float = 0.0,
        smoothing: float = 0.0,
        num_classes: int = 100,
        on_epoch: Callable[[int], object] | None = None,
    ) -> None:
        self.mixing, self.smoothing, self.num_classes = mixing, smoothing, num_classes
        self.batch_size, self.training, self.on_epoch = min(batch_size, len(pictures)), training, on_epoch
        self.labels, self.device = pictures.labels, pictures.labels.device
        self.mean, self.std = (
            torch.tensor(values, device=self.device) for values in (normalisation.mean, normalisation.std)
        )
        self.pixels = _padded(pictures.pixels) if training else pictures.pixels

    def __len__(self) -> int:
        count = len(self.labels)
        return count // self.batch_size if self.training else -(-count // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Note that an epoch starts; the training calls this."""
        if self.on_epoch is not None:
            self.on_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        count = len(self.labels)
        if not self.training:
            for first in range(0, count, self.batch_size):
                taken = slice(first, first + self.batch_size)
                yield self._images(self.pixels[taken]), self.labels[taken]
            return
        order = torch.randperm(count, device=self.device)
        top, left = torch.randint(2 * PADDING + 1, (2, count), device=self.device)
        mirrored = torch.rand(count, device=self.device) < 0.5
        holes = torch.randint(SIZE, (2, count), device=self.device)
        for index in range(len(self)):
            rows = order[index * self.batch_size : (index + 1) * self.batch_size]
            images = self._images(_moved(self.pixels, rows, top[rows], left[rows], mirrored[rows]))
            if self.mixing or self.smoothing:
                images, labels = self._mixed(images, self.labels[rows])
                yield {"images": images * _kept(holes[:, rows]), "labels": labels}
            else:
                yield images * _kept(holes[:, rows]), self.labels[rows]

    def _mixed(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mix some pictures with others, half of them everywhere and half in a window; labels become class shares."""
        count = len(images)
        other = torch.randperm(count, device=self.device)
        own = torch.rand(count, 1, 1, 1, device=self.device)  # share of the picture itself
        size = SIZE * (1 - own).sqrt().flatten()
        window = _window(torch.randint(SIZE, (2, count), device=self.device), size)
        kinds = torch.rand(count, 1, 1, 1, device=self.device)
        own = torch.where(kinds < self.mixing / 2, own, (~window).float())
        own = torch.where(kinds < self.mixing, own, torch.ones_like(own))
        mixed = own * images + (1 - own) * images[other]
        shares = torch.nn.functional.one_hot(labels, self.num_classes).float()
        share = own.mean((1, 2, 3))[:, None]
        shares = share * shares + (1 - share) * shares[other]
        return mixed, (1 - self.smoothing) * shares + self.smoothing / self.num_classes

    def _images(self, pixels: Tensor) -> Tensor:
        """Return (samples, channels, rows, columns), normalised."""
        return ((pixels.float() / 255 - self.mean) / self.std).permute(0, 3, 1, 2)


def _padded(pixels: Tensor) -> Tensor:
    """Return pictures with a black border."""
    return torch.nn.functional.pad(pixels, (0, 0, PADDING, PADDING, PADDING, PADDING))


def _moved(pixels: Tensor, rows: Tensor, top: Tensor, left: Tensor, mirrored: Tensor) -> Tensor:
    """Return of every padded picture the part that begins at `top` and `left`, mirrored where wanted."""
    along = torch.arange(SIZE, device=rows.device)
    across = torch.where(mirrored[:, None], along.flip(0), along)
    return pixels[rows[:, None, None], (top[:, None] + along)[:, :, None], (left[:, None] + across)[:, None, :]]


def _kept(centres: Tensor) -> Tensor:
    """Return (samples, 1, rows, columns): True where cutout leaves a pixel; its centre may lie at an edge."""
    return ~_window(centres, torch.full_like(centres[0], HOLE))


def _window(centres: Tensor, sizes: Tensor) -> Tensor:
    """Return (samples, 1, rows, columns): True inside a square of this size about its centre, cut at the edges."""
    along = torch.arange(SIZE, device=centres.device)
    distance = along - centres[..., None]  # (2, samples, SIZE)
    half = (sizes / 2)[:, None]
    inside = (distance >= -half) & (distance < half)
    return (inside[0][:, :, None] & inside[1][:, None, :])[:, None]
