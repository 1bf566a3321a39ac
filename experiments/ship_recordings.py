"""Make the recordings that ship inside the package from the raw ones of a ResNet-18 on CIFAR-100.

    python experiments/ship_recordings.py FOLDER_OF_RAW_RECORDINGS

A raw file holds `calibration_*` and `test_*` arrays (margin, predictions, labels) and the cumulative FLOPs of the trunk
up to each of 8 exits. Only the margin is kept: 1.0 MB for both networks. Seconds on any machine.
"""

import sys
from pathlib import Path

import numpy as np

from alight.costs import Costs
from alight.outputs import HeadOutputs
from alight.recordings import FOLDER, NAMES, Recording


def ship(source: Path) -> None:
    for name in NAMES:
        raw = np.load(source / f"{name}.npz", allow_pickle=False)
        labelled, test = (
            HeadOutputs(raw[f"{part}_margin"], raw[f"{part}_predictions"], raw[f"{part}_labels"], score="margin")
            for part in ("calibration", "test")
        )
        costs = Costs.from_cumulative(raw["costs_flops"].round(), unit="FLOPs")
        Recording(labelled, test, costs).save(FOLDER / f"{name}.npz")


if __name__ == "__main__":
    ship(Path(sys.argv[1]))
