"""Measure Ray on this machine: speed-up by a second worker, memory, and rows lost or doubled when a process is killed.

    python benchmarks/cluster.py                        everything, about half an hour on two cores
    python benchmarks/cluster.py --only scaling         a part of it: scaling, memory, kernels, faults; the others kept
    python benchmarks/cluster.py --only scaling --network test_resnet    beside a network that is very fast

Random weights and random images of 32 x 32. Every job is `alight predict --engine ray` in a process of its own, as a
user runs it, with workers of one thread. `scaling` counts rows between the first partitions and the last, when all
workers are busy, and beside it the whole job with its start; `memory` is the most that a process ever held (VmHWM),
and of it what is not shared with others (RssAnon, looked at fifty times a second);
`kernels` is a worker's memory again where oneDNN keeps no kernels of the batch sizes that it has met, by default 1,024;
`faults` kills -9 a worker, and then the driver, in the middle of 20,000 rows. Writes results/cluster.csv.
"""

import argparse
import csv
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from pyarrow import parquet

from alight import calibrate, from_timm, measure_costs, record, save_model
from alight.files import write_rows
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
BATCH, PARTITION = 128, 512
LOOK = 0.25  # seconds between two looks at which processes there are
BLINK = 0.02  # and at what they hold, where that is the question
MARK = "ALIGHT_BENCHMARK_JOB"  # in the environment of a job's processes
Row = dict[str, str | float | int]


def prepare(folder: Path, name: str = "resnet18") -> None:
    """A network with exits and a policy that uses all of them, in the folder."""
    torch.manual_seed(0)
    model = from_timm(name, num_classes=10, image_size=32, count=2)
    save_model(model, folder / "model")
    images = np.random.default_rng(0).integers(256, size=(512, 32, 32, 3), dtype=np.uint8)
    labelled = record(model, images, progress=False)
    policy = calibrate.eero(measure_costs(model, torch.zeros(1, 3, 32, 32)), "85%", labelled)
    policy.save(folder / "policy.json")


def images(folder: Path, rows: int) -> Path:
    """Write an .npy file of so many random images."""
    path = folder / f"{rows}.npy"
    if not path.exists():
        rng = np.random.default_rng(rows)
        np.save(path, rng.integers(256, size=(rows, 32, 32, 3), dtype=np.uint8))
    return path


def workers(job: Path) -> list[int]:
    """The processes in which Ray runs the workers of a job, which have its mark from their driver."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            named = (process / "cmdline").read_bytes().startswith(b"ray::MapWorker")
            if named and f"{MARK}={job}\0".encode() in (process / "environ").read_bytes():
                processes.append(int(process.name))
        except OSError:  # it has gone
            continue
    return sorted(processes)


def held(process: int, what: str = "VmHWM") -> float:
    """Memory of a process in MB, by default the most that it ever held; 0 once it has gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) / 1e3 for line in lines if line.startswith(what)), 0.0)


@dataclass
class Job:
    """One `alight predict --engine ray`, watched."""

    folder: Path
    rows: int
    actors: int
    output: Path
    peaks: dict[int, float] = field(default_factory=dict)  # of every process that was seen
    owns: dict[int, float] = field(default_factory=dict)  # of that, without what is shared
    seconds: float = 0.0
    pause: float = LOOK  # between two looks at what they hold
    settings: Mapping[str, str] = field(default_factory=dict)  # of its environment

    def start(self) -> "subprocess.Popen[str]":
        """The command, running."""
        line = [sys.executable, "-m", "alight", "predict", str(self.folder / "model")]
        line += [str(self.folder / "policy.json"), str(images(self.folder, self.rows)), "--engine", "ray", "--quiet"]
        line += ["--actors", str(self.actors), "--batch-size", str(BATCH), "--partition-rows", str(PARTITION)]
        line += ["-o", str(self.output), "--device", "cpu", "--threads", "1"]
        env = {**os.environ, **self.settings, "OMP_NUM_THREADS": "1", MARK: str(self.output)}
        return subprocess.Popen(line, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, kill: str = "") -> "Job":
        """The job once it is done; or once its driver was killed. What is to be killed goes when half is done."""
        begun, driver = time.perf_counter(), self.start()
        while driver.poll() is None:
            self._look((driver.pid, *workers(self.output)))
            if kill and len(self.partitions()) >= self.rows // PARTITION // 2:
                os.kill(workers(self.output)[0] if kill == "worker" else driver.pid, signal.SIGKILL)
                kill = "" if kill == "worker" else "gone"
                if kill:
                    break
        _, errors = driver.communicate()
        if driver.returncode and not kill:
            raise RuntimeError(f"the job failed: {errors}")
        self.seconds, self.driver = time.perf_counter() - begun, driver.pid
        return self

    def _look(self, processes: Sequence[int]) -> None:
        """What these processes hold, while `LOOK` lasts."""
        until = time.perf_counter() + LOOK
        while time.perf_counter() < until:
            for process in processes:
                self.peaks[process] = max(self.peaks.get(process, 0.0), held(process))
                self.owns[process] = max(self.owns.get(process, 0.0), held(process, "RssAnon"))
            time.sleep(self.pause)

    def partitions(self) -> list[Path]:
        """Those that are done."""
        return sorted(self.output.glob("part-*.parquet"))

    def per_second(self) -> float:
        """Rows a second while all workers are busy: between the first and the last partition of each, roughly."""
        finished = np.sort([path.stat().st_mtime for path in self.partitions()])[self.actors : -self.actors]
        return (len(finished) - 1) * PARTITION / float(finished[-1] - finished[0])

    def counts(self) -> tuple[int, int]:
        """Rows that are missing, and rows that are there more than once."""
        samples = np.concatenate([parquet.read_table(path)["sample"].to_numpy() for path in self.partitions()])
        seen = np.bincount(samples, minlength=self.rows)
        return int((seen == 0).sum()), int((seen - 1).clip(0).sum())


def scaling(folder: Path, rows: int, rounds: int = 3) -> Iterator[Row]:
    """Run one worker and two, interleaved."""
    steady: list[list[float]] = []
    whole: list[list[float]] = []
    for turn in range(rounds):
        jobs = [Job(folder, rows, actors, folder / f"scaling-{turn}-{actors}").run() for actors in (1, 2)]
        steady.append([job.per_second() for job in jobs])
        whole.append([job.seconds for job in jobs])
    pace, clock = np.median(steady, axis=0), np.median(whole, axis=0)
    ratio = float(np.median([two / one for one, two in steady]))
    for actors in (1, 2):
        yield row("rows a second, all busy", rows, actors, float(pace[actors - 1]), "rows/s", "")
        yield row("whole job with Ray's start", rows, actors, float(clock[actors - 1]), "s", "")
    yield row("two workers over one, all busy", rows, 2, ratio, "times", ">= 1.7")
    yield row("two workers over one, whole job", rows, 2, float(clock[0] / clock[1]), "times", "")


def memory(folder: Path, sizes: list[int]) -> Iterator[Row]:
    """The most that driver and workers hold, for a few rows and for many."""
    names = ("driver", "driver, not shared", "largest worker", "largest worker, not shared")
    most: dict[str, list[float]] = {name: [] for name in names}
    for rows in sizes:
        job = Job(folder, rows, 2, folder / f"memory-{rows}", pause=BLINK).run()
        drivers = [job.peaks.pop(job.driver), job.owns.pop(job.driver)]
        for who, value in zip(names, (*drivers, max(job.peaks.values()), max(job.owns.values())), strict=True):
            most[who].append(value)
            yield row(f"peak memory, {who}", rows, 2, value, "MB", "")
    for who, values in most.items():
        ratio = values[-1] / values[0]
        yield row(f"peak memory, {who}, most rows over fewest", sizes[-1], 2, ratio, "times", "<= 1.15")


def kernels(folder: Path, sizes: list[int]) -> Iterator[Row]:
    """The most that a worker holds of its own where oneDNN keeps no kernels."""
    most = []
    for rows in sizes:
        none = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}
        job = Job(folder, rows, 2, folder / f"kernels-{rows}", pause=BLINK, settings=none).run()
        job.owns.pop(job.driver)
        most.append(max(job.owns.values()))
        yield row("peak memory, largest worker, not shared, no kernels kept", rows, 2, most[-1], "MB", "")
    what = "peak memory, largest worker, not shared, no kernels kept, most rows over fewest"
    yield row(what, sizes[-1], 2, most[-1] / most[0], "times", "<= 1.15")


def faults(folder: Path, rows: int) -> Iterator[Row]:
    """Kill a worker half-way, and then a driver, whose job is started again."""
    job = Job(folder, rows, 2, folder / "faults-worker").run(kill="worker")
    for what, value in zip(("missing", "double"), job.counts(), strict=True):
        yield row(f"rows {what}, a worker killed -9 half-way", rows, 2, value, "rows", "0")
    job = Job(folder, rows, 2, folder / "faults-driver").run(kill="driver")
    before = len(job.partitions())
    while workers(job.output):  # which notice that their driver is gone
        time.sleep(LOOK)
    job.run()
    yield row("partitions done before, the driver killed -9 half-way", rows, 2, before, "partitions", "")
    for what, value in zip(("missing", "double"), job.counts(), strict=True):
        yield row(f"rows {what}, the driver killed -9 and started again", rows, 2, value, "rows", "0")


def before(path: Path) -> list[Row]:
    """Return the rows of an earlier run."""
    return [{**each} for each in csv.DictReader(path.read_text().splitlines())] if path.exists() else []


def row(what: str, rows: int, actors: int, value: float, unit: str, target: str) -> Row:
    return {"what": what, "rows": rows, "workers": actors, "value": value, "unit": unit, "target": target}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=["scaling", "memory", "kernels", "faults"])
    parser.add_argument("--network", default="resnet18", help="a network of timm")
    parser.add_argument("--rows", type=int, default=20_000, help="of scaling and faults")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[1_000, 10_000, 30_000, 100_000, 300_000],
        help="rows whose memory is compared",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "results/cluster.csv")
    options = parser.parse_args()
    versions = provenance("numpy", "torch", "timm", "ray", "pyarrow", folder=ROOT)
    parts = {
        "scaling": lambda folder: scaling(folder, options.rows, options.rounds),
        "memory": lambda folder: memory(folder, options.sizes),
        "kernels": lambda folder: kernels(folder, [size for size in options.sizes if size <= 100_000]),
        "faults": lambda folder: faults(folder, options.rows),
    }
    chosen = [options.only] if options.only else list(parts)
    rows = [each for each in before(options.output) if each["part"] not in chosen or each["network"] != options.network]
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), options.network)
        for part in chosen:
            for each in parts[part](Path(name)):
                print(", ".join(str(value) for value in each.values()), flush=True)
                rows.append({"part": part, **each, "network": options.network, **versions})
            write_rows(options.output, rows)


if __name__ == "__main__":
    main()
