"""Calibration from a recording that memory need not hold: the same policy, in how much memory and time?

    python benchmarks/large_calibration.py                     20 million rows, 1.5 GB of disk, about two minutes
    python benchmarks/large_calibration.py --rows 200000       a smaller one

Made-up outputs of a network with four exits, in partitions of 65,536 rows, a tenth of the scores at the first exit
equal to each other. A process of its own calibrates by EERO part by part, as `alight calibrate FOLDER` does, another
one with the whole table in memory; `held` is the most memory that each had. Writes results/large_calibration.csv.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from alight.files import write_rows
from alight.outputs import HeadOutputs
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
PARTITION = 65_536
WHOLE = """
import sys
from alight import PartitionedOutputs, calibrate
table = PartitionedOutputs.open(sys.argv[1]).load()
calibrate.eero([1.0, 2.0, 3.5, 5.0], sys.argv[2], table).save(sys.argv[3])
"""


def made_up(rng: np.random.Generator, rows: int) -> HeadOutputs:
    """Outputs of an imaginary network whose later exits know more."""
    labels = rng.integers(100, size=rows)
    right = rng.uniform(size=(rows, 4)) < np.array([0.5, 0.6, 0.7, 0.75])
    predictions = np.where(right, labels[:, None], (labels[:, None] + rng.integers(1, 100, size=(rows, 4))) % 100)
    scores = rng.beta(1 + 2 * right, 1.5)
    scores[rng.uniform(size=rows) < 0.1, 0] = 0.75
    return HeadOutputs(scores, predictions, labels)


def write(folder: Path, rows: int) -> int:
    """The bytes of a recording of so many rows, in partitions."""
    rng, total = np.random.default_rng(0), 0
    for index, start in enumerate(range(0, rows, PARTITION)):
        table, path = made_up(rng, min(PARTITION, rows - start)), folder / f"part-{index:05}.npz"
        arrays = {"alight": np.array("HeadOutputs"), "schema": np.array(1), **table.rows(), **table.metadata()}
        np.savez(path, **arrays)  # type: ignore[arg-type]
        total += path.stat().st_size
    return total


def watched(line: list[str]) -> tuple[float, float]:
    """Seconds that a command takes, and the most memory it held, in MB."""
    begun = time.perf_counter()
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"it failed: {line}")
    return time.perf_counter() - begun, usage.ru_maxrss * 1024 / 1e6


def measure(folder: Path, rows: int, budget: str) -> list[dict[str, str | float | int]]:
    """Part by part and as a whole: time, memory, and that the policies are one."""
    recording = folder / str(rows)
    recording.mkdir()
    size = write(recording, rows) / 1e6
    parted, whole = folder / "parted.json", folder / "whole.json"
    line = [sys.executable, "-m", "alight.cli", "calibrate", str(recording), "--costs", "1,2,3.5,5", "--quiet"]
    ways = {
        "part by part": [*line, "--budget", budget, "-o", str(parted)],
        "in memory": [sys.executable, "-c", WHOLE, str(recording), budget, str(whole)],
    }
    figures = {way: watched(command) for way, command in ways.items()}
    same = json.loads(parted.read_text()) == json.loads(whole.read_text())
    return [
        {"rows": rows, "megabytes": size, "way": way, "seconds": seconds, "held": held, "same_policy": str(same)}
        for way, (seconds, held) in figures.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 20_000_000])
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--output", type=Path, default=ROOT / "results/large_calibration.csv")
    options = parser.parse_args()
    found = []
    for rows in options.rows:
        with tempfile.TemporaryDirectory() as name:
            for each in measure(Path(name), rows, options.budget):
                print(each, flush=True)
                found.append({**each, **provenance("numpy", folder=ROOT)})
    write_rows(options.output, found)


if __name__ == "__main__":
    main()
