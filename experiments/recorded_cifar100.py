"""Recordings of the networks that were trained for the experiments, kept in results/."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alight import Costs, HeadOutputs

RESULTS = Path(__file__).parent.parent / "results"
FOLDER = RESULTS / "recordings"
RUNS = RESULTS / "cifar100_runs.csv"  # every exit of every training
MODES = RESULTS / "cifar100_modes.csv"  # policies on every training
USUAL = "1000"  # calibration images, as in the paper
NETWORKS = {  # kept as recordings, and what they are called
    "resnet18_frozen": "ResNet-18, frozen heads",
    "resnet18_mixed_distilled": "ResNet-18, mixed + distilled",
    "convnext_frozen": "ConvNeXt, frozen heads",
    "msdnet_joint": "MSDNet",
}
BENCHMARKED = {  # trained for fewer epochs, with log-probabilities; how many seeds: NAME_0, NAME_1, ...
    "resnet18_frozen": 3,
    "resnet18_frozen_separable": 3,
    "resnet18_mixed_distilled": 3,
    "convnext_frozen": 1,
    "msdnet_joint": 1,
}
FROZEN = ("resnet18_frozen", "convnext_frozen")  # of them, those with the paper's heads
PACKAGED = {"resnet18_cifar100_frozen": "ResNet-18 of the package, frozen heads"}  # another one, in alight.recordings
PUBLISHED = ("geometric", "gaussian", "patience")  # what the paper compares EERO with
TEXTS = {"minilm_banking77": "MiniLM, banking77", "minilm_clinc150": "MiniLM, CLINC150"}


@dataclass(frozen=True)
class Result:
    """A trained network: how it was trained, what its exits say, and what they cost."""

    run: dict[str, Any]
    calibration: HeadOutputs
    test: HeadOutputs
    costs: Costs

    @classmethod
    def of(cls, folder: Path) -> "Result":
        """What lies in a folder."""
        return cls(
            run=json.loads((folder / "run.json").read_text()),
            calibration=HeadOutputs.load(folder / "calibration.npz"),
            test=HeadOutputs.load(folder / "test.npz"),
            costs=Costs.load(folder / "costs.json"),
        )


def folders() -> list[Path]:
    """The recordings of the benchmark: of a network that has one with log-probabilities (NAME_0), not NAME."""
    kept = sorted(path for path in FOLDER.iterdir() if (path / "run.json").exists())
    return [path for path in kept if not (FOLDER / f"{path.name}_0").exists()]


def load(name: str) -> Result:
    """The recording of a network of this name."""
    known = NETWORKS | TEXTS
    if name not in known:
        raise SystemExit(f"there is no recording {name!r}: choose one of {', '.join(known)}")
    return Result.of(FOLDER / name)


def budgets(costs: Costs, step: int = 5) -> list[str]:
    """Return percentages of the full network, from the cheapest exit to beyond the last, by so many percent."""
    cheapest, last = 100 * costs.cumulative()[[0, -1]] / costs.full
    first = f"{np.ceil(10 * cheapest) / 10:g}%"  # as small as can be
    return [first, *(f"{percent}%" for percent in range(step, 1000, step) if cheapest < percent < last + step)]


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def usual(path: Path) -> list[dict[str, str]]:
    """The rows of trainings with the usual number of calibration images."""
    return [row for row in rows(path) if row["calibration_images"] == USUAL]
