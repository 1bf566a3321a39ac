"""Calibration from a random sample of a recording in partitions: how much memory and time, and what does it lose?

    python benchmarks/large_calibration.py                     20 million rows, 1.5 GB of disk, about two minutes
    python benchmarks/large_calibration.py --rows 200000       a smaller one

Made-up outputs of a network with four exits, in partitions of 65,536 rows, a tenth of the scores at the first exit
equal to each other. A process of its own calibrates by EERO on a million rows drawn at random, as `alight calibrate
FOLDER` does, another one on all rows; `held` is the most memory that each had, `spent` the share of the budget that the
policy spends on the whole recording. Writes results/large_calibration.csv.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from alight import Policy, load_policy, replay
from alight.files import write_rows
from alight.outputs import ROWS, HeadOutputs
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
PARTITION = 65_536
CALIBRATE = """
import sys
from alight import HeadOutputs, calibrate
table = HeadOutputs.load_sample(sys.argv[1], rows=int(sys.argv[2]))
calibrate.eero([1.0, 2.0, 3.5, 5.0], sys.argv[3], table, spend_all=True).save(sys.argv[4])
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
    """Seconds of CPU time that a command takes, and the most memory it held, in MB."""
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"it failed: {line}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6


def measure(folder: Path, rows: int, budget: str, sample: int = ROWS) -> list[dict[str, str | float | int]]:
    """By a sample and by all rows: time, memory, and what the policy spends and gets right on all of them."""
    recording = folder / str(rows)
    recording.mkdir()
    size = write(recording, rows) / 1e6
    found: list[dict[str, str | float | int]] = []
    for way, drawn in {"a random sample": min(sample, rows), "all rows": rows}.items():
        policy = folder / f"{drawn}.json"
        line = [sys.executable, "-c", CALIBRATE, str(recording), str(drawn), budget, str(policy)]
        seconds, held = watched(line)
        spent, accuracy = judged(load_policy(policy), recording)
        figures = {"seconds": seconds, "held": held, "spent": spent, "accuracy": accuracy}
        found.append({"rows": rows, "megabytes": size, "way": way, "drawn": drawn, **figures})
    return found


def judged(policy: Policy, recording: Path) -> tuple[float, float]:
    """Share of its budget that a policy spends on all rows, and its accuracy."""
    spent, right, rows = 0.0, 0, 0
    for path in sorted(recording.glob("*.npz")):
        part = HeadOutputs.load(path)
        decisions = replay(policy, part)
        spent, rows = spent + float(decisions.spent.sum()), rows + len(part)
        right += int((decisions.predictions == part.labels).sum())
    return spent / rows / (policy.budget or 1.0), right / rows


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
