"""Test whether held-out images of CIFAR-100 are easier than test images because more training images resemble them.

    python experiments/cifar100_duplicates.py DATA      # a folder with train.npz and test.npz; a minute on one core

For every calibration image (the split of seed 0) and every test image, the most similar of the 49,000 training images:
correlation of the pixels, halved in size, mirrored too. Writes results/cifar100_duplicates.csv: the share of images
with a neighbour of at least some similarity, and the accuracy of the recorded networks' last exits on the others.

Measured (see the CSV for hardware, versions, date and commit): see "Calibration images" in docs/experiments.md.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from recorded_cifar100 import NETWORKS, RESULTS, load

from alight.files import write_rows
from alight.provenance import provenance

RESULT = RESULTS / "cifar100_duplicates.csv"
SIMILAR = (0.9, 0.95, 0.97, 0.99)  # correlations
SEED, CALIBRATION = 0, 1000
AT_ONCE = 500  # images

Floats = npt.NDArray[np.float32]


def run(folder: Path) -> None:
    train, test = (np.load(folder / f"{part}.npz", allow_pickle=False) for part in ("train", "test"))
    order = np.random.default_rng(SEED).permutation(len(train["labels"]))  # the split of cifar100_data.read
    held_out, kept = order[:CALIBRATION], order[CALIBRATION:]
    images, labels = train["images"], train["labels"]
    parts = {"calibration": (images[held_out], labels[held_out]), "test": (test["images"], test["labels"])}
    rows = []
    seen = unit(images[kept])
    for part, (own, truth) in parts.items():
        similarity, nearest = neighbours(own, seen)
        same = labels[kept][nearest] == truth
        for at_least in SIMILAR:
            near = similarity >= at_least
            rows.append(
                {"part": part, "images": len(own), "similarity": at_least, "near": near.mean()}
                | {"near_of_same_class": (near & same).mean()}
                | {f"{name}, all": accuracy(name, part, np.ones(len(own), bool), truth) for name in NETWORKS}
                | {f"{name}, not near": accuracy(name, part, ~near, truth) for name in NETWORKS}
            )
    write(rows)


def unit(images: npt.NDArray[np.uint8]) -> Floats:
    """Return images halved in size, as vectors of mean 0 and length 1."""
    halved = images.reshape(-1, 16, 2, 16, 2, 3).mean(axis=(2, 4), dtype=np.float32).reshape(len(images), -1)
    centred = halved - halved.mean(axis=1, keepdims=True)
    return centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-6)


def neighbours(images: npt.NDArray[np.uint8], seen: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return for every image the similarity and the index of the most similar one that was seen."""
    best, which = np.full(len(images), -1, np.float32), np.zeros(len(images), np.int64)
    for turned in (images, images[:, :, ::-1]):
        for first in range(0, len(images), AT_ONCE):
            taken = slice(first, first + AT_ONCE)
            similarity = unit(turned[taken]) @ seen.T
            highest = similarity.max(axis=1)
            better = highest > best[taken]
            best[taken] = np.where(better, highest, best[taken])
            which[taken] = np.where(better, similarity.argmax(axis=1), which[taken])
    return best, which


def accuracy(network: str, part: str, chosen: npt.NDArray[np.bool_], truth: npt.NDArray[np.int64]) -> float:
    """Return the accuracy of a network's last exit on the chosen images."""
    recorded = getattr(load(network), part)
    if not np.array_equal(recorded.labels, truth):
        raise SystemExit(f"{network} was recorded on other {part} images than those of this folder")
    return float(recorded.correct()[chosen, -1].mean())


def write(rows: list[dict[str, Any]]) -> None:
    made = provenance("numpy", folder=RESULTS)
    print(write_rows(RESULT, [row | made for row in rows]).read_text())


if __name__ == "__main__":
    run(Path(sys.argv[1]))
