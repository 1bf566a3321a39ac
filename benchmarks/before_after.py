"""Is one checkout as fast as another? Runs benchmarks/runtime.py of both, interleaved, in fresh processes, on the CPU.

    git archive 450133b | tar -x -C /path/of/old    # the tree before rooms and engine were rebuilt
    python benchmarks/before_after.py /path/of/old . --csv before_after.csv

OLD and NEW are roots of checkouts, or folders that hold one's src/ and benchmarks/; each runs its own
benchmarks/runtime.py on its own src/, by this Python, so nothing has to be installed but what both import. By default
ResNet-18 (32 px, four exits), a uniform mix of exits, single samples and batches of 64, one thread, five runs of each:
about half a minute per process on an idle core. Options of runtime.py that are not known here are handed on. Prints
for every network, mix of exits and batch size, NEW over OLD, the median of the runs so far, the lowest and the highest:
of samples per second, which follow the machine's speed from process to process, and of what is timed interleaved in one
process and does not: the speed-up over the full network, and the share that the stages alone need of the predictor's
time (`reached`). The order of the two alternates from run to run. No run begins that would end after --minutes.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

OPTIONS = (
    "--device cpu --threads 1 --batch-sizes 1,64 --images 128 --mixes uniform --rounds 2".split()
)  # and those given
MEASURES = ("per_second", "speedup", "reached")


def speeds(checkout: Path, options: Sequence[str]) -> dict[str, float]:
    """Return what one run of a checkout's benchmark measures, by case."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "runtime.csv"
        command = [sys.executable, str(checkout / "benchmarks/runtime.py"), *options, "--output", str(output)]
        paths = [str(checkout / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        with output.open(newline="") as file:
            rows = [*csv.DictReader(file)]
    names = ("model", "exits", "mode", "mix")
    return {
        f"{' '.join(row[name] for name in names)}, batch {row['batch_size']}, {measure}": float(row[measure])
        for row in rows
        for measure in MEASURES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--runs", type=int, default=5, help="of each checkout (default: 5)")
    parser.add_argument("--minutes", type=float, default=8, help="within which all runs end (default: 8)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write what every run measured")
    known, others = parser.parse_known_args()
    checkouts, runs = (known.old.resolve(), known.new.resolve()), list[dict[int, dict[str, float]]]()
    start = time.monotonic()
    for run in range(known.runs):
        if run and (time.monotonic() - start) * (run + 1) / run > 60 * known.minutes:
            print(f"stopped after {run} of {known.runs} runs: the next would end after {known.minutes:g} minutes")
            break
        first = run % 2
        runs.append({index: speeds(checkouts[index], [*OPTIONS, *others]) for index in (first, 1 - first)})
        print(f"after {run + 1} of {known.runs} runs, {time.monotonic() - start:.0f} s:")
        for case in runs[0][0]:
            old, new = (np.array([each[index][case] for each in runs]) for index in (0, 1))
            medians = f"old {np.median(old):.4g}, new {np.median(new):.4g}"
            ratios = new / old
            spread = f"{np.median(ratios):.3f} ({ratios.min():.3f} to {ratios.max():.3f})"
            print(f"{case}: {medians}, new / old {spread}", flush=True)
    if known.csv:
        with known.csv.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["case", "run", "old", "new"])
            writer.writerows(
                [case, run, each[0][case], each[1][case]] for run, each in enumerate(runs) for case in each[0]
            )


if __name__ == "__main__":
    main()
