"""Is one checkout as fast as another? Runs benchmarks/runtime.py of both, interleaved, in fresh processes, on the CPU.

    python benchmarks/before_after.py OLD NEW --runs 5 --threads 1

OLD and NEW are roots of checkouts; each runs its own benchmarks/runtime.py on its own src/, with the options that are
not known here. Prints for every network, mix of exits and batch size, NEW over OLD, the median of the runs so far, the
lowest and the highest: of samples per second, which follow the machine's speed from process to process, and of what is
timed interleaved in one process and does not: the speed-up over the full network, and the share that the stages alone
need of the predictor's time (`reached`).
The order of the two alternates from run to run.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

OPTIONS = ("--device", "cpu", "--batch-sizes", "1,64", "--images", "512")  # those that are given come after them


def speeds(checkout: Path, options: Sequence[str]) -> dict[str, float]:
    """Return what one run of a checkout's benchmark measures, by case."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "runtime.csv"
        command = [sys.executable, str(checkout / "benchmarks/runtime.py"), *options, "--output", str(output)]
        environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        with output.open(newline="") as file:
            rows = [*csv.DictReader(file)]
    names = ("model", "exits", "mode", "mix")
    return {
        f"{' '.join(row[name] for name in names)}, batch {row['batch_size']}, {measure}": float(row[measure])
        for row in rows
        for measure in ("per_second", "speedup", "reached")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--runs", type=int, default=5, help="of each checkout (default: 5)")
    known, others = parser.parse_known_args()
    checkouts, runs = (known.old.resolve(), known.new.resolve()), []
    for run in range(known.runs):
        first = run % 2
        measured = {index: speeds(checkouts[index], [*OPTIONS, *others]) for index in (first, 1 - first)}
        runs.append({case: measured[1][case] / old for case, old in measured[0].items()})
        print(f"after {run + 1} of {known.runs} runs:")
        for case in runs[0]:
            ratios = [each[case] for each in runs]
            print(f"{case}: new / old {np.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", flush=True)


if __name__ == "__main__":
    main()
