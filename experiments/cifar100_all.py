"""Run all trainings on CIFAR-100, several at a time on one device, until the time is up; a second call resumes them.

    python experiments/cifar100_all.py DATA STATE OUT --seconds 560 --parallel 4
    python experiments/cifar100_all.py DATA STATE OUT --recordings --parallel 5    # the benchmark's, all in one call

DATA holds train.npz and test.npz; STATE keeps checkpoints and results; OUT gets archives of what is finished (see
cifar100_pack.py). Jobs are started in the order of JOBS, each as soon as the backbone it starts from is there. When the
time is up they are stopped; their checkpoints stay. A job that fails is reported and left for the next call.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cifar100_pack import pack
from cifar100_train import Job, Progress

JOBS = (  # by importance, except small ones that fill a device which others leave idle
    "resnet18_plain-0",
    "msdnet_joint-0",
    "resnet10_plain-0",
    "resnet18_mixed_distilled-0",
    "resnet18_frozen-0",
    "resnet18_joint-0",
    "resnet18_mixed-0",
    "resnet18_frozen_separable-0",
    "convnext_plain-0",
    "convnext_frozen-0",
    "resnet18_longer-0",
)
RECORDINGS = (  # those of the benchmark, with log-probabilities: the longest first, then seed by seed
    "msdnet_joint-0",
    "convnext_plain-0",
    *(f"resnet18_plain-{seed}" for seed in range(3)),
    "convnext_frozen-0",
    *(f"resnet18_{heads}-{seed}" for seed in range(3) for heads in ("mixed_distilled", "frozen", "frozen_separable")),
)
PACKING = 15  # seconds before the end that are kept for stopping and packing
LOOK = 0.5  # seconds between looks at the processes
GRACE = 8  # seconds to stop in
TAIL = 1500  # characters of a failed job's log that are shown


class Driver:
    """Jobs, and the processes that work on them."""

    def __init__(self, jobs: Sequence[Job], data: Path, state: Path, further: Sequence[str]) -> None:
        self.jobs, self.data, self.state, self.further = jobs, data, state, further
        self.running: dict[Job, subprocess.Popen[bytes]] = {}
        self.failed: list[Job] = []
        self.begin = time.monotonic()

    def run(self, seconds: float, parallel: int) -> None:
        """Run jobs until all are done or the time is up."""
        try:
            while time.monotonic() - self.begin < seconds and (self.running or self._ready()):
                for job in self._ready()[: parallel - len(self.running)]:
                    self._start(job)
                time.sleep(LOOK)
                self._reap()
        finally:
            self._stop()

    def _ready(self) -> list[Job]:
        """Return the jobs that could be started now."""
        return [
            job
            for job in self.jobs
            if job not in self.running
            and job not in self.failed
            and not self._is_done(job)
            and (job.start is None or self._is_done(job.start))
        ]

    def _is_done(self, job: Job) -> bool:
        return (self.state / job.name / "result").exists()

    def _start(self, job: Job) -> None:
        folder = self.state / job.name
        folder.mkdir(parents=True, exist_ok=True)
        script = Path(__file__).with_name("cifar100_train.py")
        arguments = [job.run, str(self.data), str(self.state), f"--seed={job.seed}", f"--calibration={job.calibration}"]
        with (folder / "log.txt").open("ab") as log:
            self.running[job] = subprocess.Popen(
                [sys.executable, str(script), *arguments, *self.further], stdout=log, stderr=subprocess.STDOUT
            )
        self._print(f"{job.name} begins")

    def _reap(self) -> None:
        """Remove processes that have ended, and report them."""
        for job, process in [*self.running.items()]:
            if process.poll() is None:
                continue
            del self.running[job]
            log = (self.state / job.name / "log.txt").read_text(errors="replace")
            if process.returncode == 0:
                self._print(log.strip().splitlines()[-1])
            else:
                self.failed.append(job)
                self._print(f"{job.name} failed with {process.returncode}:\n{log[-TAIL:]}")

    def _stop(self) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        for job, process in self.running.items():
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._print(f"{job.name} is stopped")
        self.running.clear()

    def _print(self, line: str) -> None:
        print(f"{time.monotonic() - self.begin:6.1f} s  {line}", flush=True)


def summary(jobs: Sequence[Job], state: Path) -> str:
    """Return a line per job: its epoch, and its accuracy if it is finished."""
    lines = []
    for job in jobs:
        folder = state / job.name
        runs = [rows for rows in Progress.read(folder / "progress.csv") if rows]
        line = f"{job.name:28}"
        if runs and len(rows := runs[-1]) > 1:
            (first, begin), (last, end) = rows[0], rows[-1]
            line += f" epoch {last}, {(end - begin) / max(last - first, 1):.2f} s each"
        if (folder / "result").exists():
            about = json.loads((folder / "result" / "run.json").read_text())
            line += ": % " + " ".join(f"{100 * each:.1f}" for each in about["test_accuracy"])
        lines.append(line.rstrip())
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("state", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=560.0, help="until all is stopped and packed")
    parser.add_argument("--parallel", type=int, default=4, help="trainings at a time")
    parser.add_argument("--jobs", nargs="+", default=JOBS, help="RUN-SEED or RUN-SEED-CALIBRATION, first to last")
    parser.add_argument("--recordings", action="store_true", help="short trainings for the benchmark's recordings")
    parser.add_argument("--again", action="store_true", help="pack weights that were packed before, too")
    options, further = parser.parse_known_args()  # the rest is cifar100_train's
    jobs = [Job.named(name) for name in (RECORDINGS if options.recordings else options.jobs)]
    further += ["--short"] if options.recordings else []
    options.state.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    driver = Driver(jobs, options.data, options.state, further)
    driver.run(options.seconds - PACKING, options.parallel)
    print(summary(jobs, options.state))
    for archive in pack(jobs, options.state, options.out, options.again):
        print(f"{archive.name}: {archive.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
