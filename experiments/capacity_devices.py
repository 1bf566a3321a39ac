"""What a device takes for a batch, from what was measured: a core that runs a ResNet-18, a GPU that runs a ResNet-50.

    python experiments/capacity_devices.py       # counts the FLOPs of benchmarked networks: results/capacity_shares.csv

A batch pays a part for itself and a part for each of its images at every stage and head that anyone of it reaches. On
the core every stage and head was timed at seven sizes (capacity_inputs.py), and so were whole batches: what those took
beyond is put down to asking at an exit, the same for each. On the GPU whole networks were timed, plain and with exits
(benchmarks/runtime.py); there an exit that stands at a share f of the FLOPs is taken to stand at a share a + (1 - a) f
of the time, with the `a` that meets the measured mixes best, and asking takes what a policy takes on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from recorded_cifar100 import RESULTS, load, rows

from alight import Costs, Policy, calibrate, replay
from alight.files import write_rows
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
RECORDING = "resnet18_mixed_distilled"
CORE_SIZE = 16  # images of a batch
GPU_NETWORK = "resnet50"
GPU_SIZE, GPU_MODE = 1024, "eager"
MIXES = {"uniform": 1.0, "early": 0.6}  # how many leave at an exit for one who leaves at the exit before: runtime.py


@dataclass(frozen=True, eq=False)
class Lines:
    """Seconds of every stage and head: a part for a batch and a part for each of its images; (exits,) each."""

    stage_fixed: Floats
    stage_each: Floats
    head_fixed: Floats
    head_each: Floats

    @classmethod
    def of_rows(cls, measured: Sequence[Any]) -> "Lines":
        """Straight lines through the milliseconds of stages and heads at several sizes."""
        exits = list(dict.fromkeys(row["exit"] for row in measured))
        fitted = []
        for part in ("stage", "head"):
            for name in exits:
                own = [row for row in measured if row["exit"] == name]
                sizes = np.array([float(row["batch_size"]) for row in own])
                fitted.append(line(sizes, np.array([float(row[f"{part}_ms"]) for row in own]) / 1e3))
        found = np.array(fitted).reshape(2, len(exits), 2)
        return cls(found[0, :, 0], found[0, :, 1], found[1, :, 0], found[1, :, 1])

    def costs(self, batch_size: int) -> Costs:
        """Milliseconds of an image in a batch of this size that stays whole."""
        stages, heads = (
            1e3 * (fixed / batch_size + each)
            for fixed, each in ((self.stage_fixed, self.stage_each), (self.head_fixed, self.head_each))
        )
        return Costs(stages, heads, "ms")


def line(sizes: Floats, seconds: Floats) -> tuple[float, float]:
    """What a batch and what an image of it takes: the straight line with the least relative errors, neither below 0.

    >>> line(np.array([1.0, 2.0, 4.0]), np.array([3.0, 4.0, 6.0]))
    (2.0, 1.0)
    """
    if not seconds.any():
        return 0.0, 0.0
    from scipy.optimize import nnls

    weights = 1 / np.maximum(seconds, seconds[seconds > 0].min())
    fixed, each = nnls(np.stack([weights, weights * sizes], axis=1), weights * seconds)[0]
    return round(float(fixed), 12), round(float(each), 12)


def batch_seconds(reached: Integers, lines: Lines) -> float:
    """What stages and heads take when so many images of a batch come to each exit; all exits are open."""
    fixed, each = lines.stage_fixed + lines.head_fixed, lines.stage_each + lines.head_each
    return float(fixed[reached > 0].sum() + reached @ each)


@dataclass(frozen=True, eq=False)
class Device:
    """A machine that serves a network, with a queue before it."""

    name: str
    network: str
    lines: Lines
    dense_fixed: float  # seconds of the plain network for a batch
    dense_each: float  # and for each of its images
    asking: float  # seconds at every exit that anyone of a batch reaches, beside its stage and head
    lost: float  # times all that
    batch_size: int  # of a micro-batch, at most
    max_wait: float  # seconds that the first image of a micro-batch waits for others
    queue: int  # images that may wait
    target: float  # seconds within which 99 % are to be answered
    entrance: float = 0.0  # seconds of every image beside the network: a request, its bytes, its answer

    @property
    def costs(self) -> Costs:
        """Milliseconds of an image at each exit, in a full batch."""
        return self.lines.costs(self.batch_size)

    @property
    def dense_per_second(self) -> float:
        """Images a second of the plain network in full batches."""
        return self.batch_size / self.dense_seconds(self.batch_size)

    def seconds(self, reached: Integers) -> float:
        """What a batch takes when so many of its images come to each exit."""
        network = batch_seconds(reached, self.lines) + self.asking * int((reached > 0).sum())
        return self.lost * network + self.entrance * int(reached[0])

    def dense_seconds(self, count: int) -> float:
        """What the plain network takes for so many images."""
        return self.dense_fixed + count * (self.dense_each + self.entrance)


def core() -> Device:
    """The core that capacity_inputs.py timed, with the network whose recording is drawn from."""
    measured, batches = rows(RESULTS / "capacity_stages.csv"), rows(RESULTS / "capacity_batches.csv")
    sizes = np.array([float(row["batch_size"]) for row in batches])
    fixed, each = line(sizes, np.array([float(row["dense_ms"]) for row in batches]) / 1e3)
    lines = Lines.of_rows(measured)
    asking = asking_seconds(measured, batches)
    return Device("CPU core", "ResNet-18, 32 px", lines, fixed, each, asking, 1.0, CORE_SIZE, 0.05, 256, 1.0)


def asking_seconds(measured: Sequence[dict[str, str]], batches: Sequence[dict[str, str]]) -> float:
    """What every exit that anyone of a full batch reaches adds to stages and heads; of a smaller one it is less."""
    full = next(row for row in batches if row["batch_size"] == str(CORE_SIZE))
    missing = (float(full["exits_ms"]) - float(full["modelled_ms"])) / 1e3
    return missing / exits_asked(half_of_the_time(measured), CORE_SIZE)


def half_of_the_time(measured: Sequence[Any]) -> Policy:
    """The policy under which batches were timed: a stream that may take half of the plain network's time."""
    largest = max(int(row["batch_size"]) for row in measured)
    own = [row for row in measured if int(row["batch_size"]) == largest]
    stages, heads = (np.array([float(row[f"{part}_ms"]) for row in own]) / largest for part in ("stage", "head"))
    given = (Costs(stages, heads, "ms"), "50%", load(RECORDING).calibration)
    return calibrate.certified_stream(calibrate.eero)(*given, spend_all=True)


def exits_asked(policy: Policy, batch_size: int, images: int = 1024) -> float:
    """How many exits anyone of a batch reaches, on average over recorded images."""
    exits = replay(policy, load(RECORDING).test.take(np.arange(images)), batch_size=batch_size).exits
    return float(1 + exits.reshape(-1, batch_size).max(axis=1).mean())


def h200() -> Device:
    """An H200 with a ResNet-50, in which an exit says what the recorded one at the same share of the FLOPs says."""
    measured = gpu_rows()
    sizes = sorted({int(row["batch_size"]) for row in measured})
    dense = [size / _median(measured, "dense_per_second", batch_size=size) for size in sizes]
    fixed, each = line(np.array(sizes, dtype=np.float64), np.array(dense))
    costs = load(RECORDING).costs
    trunk = time_shares(np.cumsum(costs.stages) / costs.full, first_share(measured))
    parts = np.diff(trunk, prepend=0.0)
    heads = np.append(np.full(len(parts) - 1, head_share(measured)), 0.0)
    lines = Lines(parts * fixed, parts * each, heads * fixed, heads * each)
    lost = 1 / float(np.median([float(row["reached"]) for row in measured if row["mix"] in MIXES]))
    asking = deciding_seconds("stream", GPU_SIZE) / len(parts)
    return Device("H200", "ResNet-50, 224 px", lines, fixed, each, asking, lost, GPU_SIZE, 0.02, 8 * GPU_SIZE, 0.25)


def deciding_seconds(contract: str, batch_size: int) -> float:
    """What a policy takes on the host to decide about a batch."""
    found = {(row["contract"], row["batch_size"]): row for row in rows(RESULTS / "capacity_decisions.csv")}
    return float(found[contract, str(batch_size)]["ms"]) / 1e3


DEVICES = {"cpu": core, "h200": h200}


def gpu_rows() -> list[dict[str, str]]:
    """Every run of the GPU's network with four auxiliary exits, in the mode that is modelled."""
    wanted = {"model": GPU_NETWORK, "exits": "4", "mode": GPU_MODE}
    return [row for row in rows(RESULTS / "runtime_cuda.csv") if wanted.items() <= row.items()]


def first_share(measured: Sequence[dict[str, str]]) -> float:
    """The share of the time that is gone where hardly a FLOP is, by least squares over the measured mixes."""
    shares, left = mixed_shares(GPU_NETWORK), []
    for row in measured:
        if row["mix"] in MIXES:
            time_share, flops_share = 1 / float(row["possible"]), shares[row["mix"]]
            trunk = time_share - head_share(measured) * heads_asked(row["mix"], 4)
            left.append(((trunk - flops_share), (1 - flops_share)))
    missing, rest = np.array(left).T
    return float(missing @ rest / (rest @ rest))


def time_shares(flops_shares: Floats, first: float) -> Floats:
    """Shares of the time from shares of the FLOPs."""
    return first + (1 - first) * flops_shares


def head_share(measured: Sequence[dict[str, str]]) -> float:
    """What one auxiliary head takes of the plain network's time, of the runs in which nobody leaves."""
    asked = [1 / float(row["possible"]) - 1 for row in measured if row["mix"] == "never"]
    return float(np.median(asked)) / 4


def rates(mix: str, exits: int) -> Floats:
    """Shares of the images that leave at each exit, in a benchmarked mix."""
    weights = MIXES[mix] ** np.arange(exits)
    return weights / weights.sum()


def heads_asked(mix: str, auxiliary: int) -> float:
    """Auxiliary heads that an image meets on average, in a benchmarked mix."""
    return float(rates(mix, auxiliary + 1) @ np.minimum(np.arange(auxiliary + 1) + 1, auxiliary))


def mixed_shares(network: str) -> dict[str, float]:
    """The share of the FLOPs that every benchmarked mix takes, heads not counted."""
    counted = [row for row in rows(RESULTS / "capacity_shares.csv") if row["network"] == network]
    trunk = np.array([float(row["flops_share"]) for row in counted])
    return {mix: float(rates(mix, len(trunk)) @ trunk) for mix in MIXES}


def fit_errors(measured: Sequence[dict[str, str]]) -> Floats:
    """Modelled over measured time of every run with exits, less 1."""
    shares, first, head = mixed_shares(GPU_NETWORK), first_share(measured), head_share(measured)
    told = [
        (time_shares(np.array(shares[row["mix"]]), first) + head * heads_asked(row["mix"], 4)) * float(row["possible"])
        for row in measured
        if row["mix"] in MIXES
    ]
    return np.array(told) - 1


def _median(measured: Sequence[dict[str, str]], column: str, **where: object) -> float:
    chosen = [row for row in measured if all(row[name] == str(value) for name, value in where.items())]
    return float(np.median([float(row[column]) for row in chosen]))


def count() -> None:
    """Write where the exits of the benchmarked networks stand, in FLOPs."""
    import timm
    from torch import randn
    from torchvision.models import resnet50

    from alight import attach_heads, measure_costs

    made = provenance("numpy", "torch", "torchvision", "timm", folder=ROOT)
    found = []
    for name in ("resnet50", "convnext_tiny"):
        plain = resnet50() if name == "resnet50" else timm.create_model(name, num_classes=1000)
        model = attach_heads(plain.eval(), after="auto", count=4, example=randn(1, 3, 224, 224))
        costs = measure_costs(model, randn(1, 3, 224, 224))
        for exit_name, share in zip(model.exits, np.cumsum(costs.stages) / costs.full, strict=True):
            found.append({"network": name, "exit": exit_name, "flops_share": float(share), **made})
    write_rows(RESULTS / "capacity_shares.csv", found)


if __name__ == "__main__":
    count()
