"""Measure what experiments/capacity.py reads: stages and whole batches on a CPU core, and exit shares.

    python experiments/capacity_inputs.py                 # exit shares alone, from the committed recording: seconds
    python experiments/capacity_inputs.py STATE DATA      # all of it: three minutes

STATE holds results of cifar100_train.py, DATA is CIFAR-100 (see cifar100_data.py). Writes

    results/capacity_shares.csv     share of the test images that leaves at each exit, under the policy of the measured
                                    service (benchmarks/serve_load.py): a stream at 48 % of the full network's FLOPs
    results/capacity_stages.csv     milliseconds of every stage and head for one batch, by its size, with quartiles
    results/capacity_batches.csv    milliseconds of a batch by the full network and by a predictor that paces itself at
                                    half of the full network's time, interleaved on the same images; `modelled_ms` is
                                    what stages and heads, as lines in the number of samples, take for the same exits
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from capacity import Floats, Row, stage_lines
from cifar100_data import Batches, read
from cifar100_train import Job, load_result
from recorded_cifar100 import RESULTS, load
from torch import Tensor

from alight import MultiExitModel, Policy, Predictor, calibrate, replay
from alight.costing.measure import Timings, time_stages
from alight.files import write_rows
from alight.networks.multi_exit import advance
from alight.networks.multi_exit import read as read_head
from alight.networks.zoo import CIFAR
from alight.provenance import provenance

NETWORK = "resnet18_mixed_distilled"
SERVED = "48%"  # budget of the measured service
REPEATS = {1: 60, 2: 60, 4: 40, 8: 30, 16: 20, 32: 15, 64: 15}  # passes timed, by batch size
ROUNDS = 7
IMAGES, BATCHES = 128, 16  # of a round and size, at most


def share_rows(batch_size: int = 16) -> list[Row]:
    """Return the share of recorded test images that leaves at each exit."""
    own = load(NETWORK)
    policy = calibrate.certified_stream(calibrate.eero, seed=0)(own.costs, SERVED, own.calibration)
    left = np.bincount(replay(policy, own.test, batch_size=batch_size).exits, minlength=len(own.costs))
    policy_name = f"stream at {SERVED} of the FLOPs"
    return [
        {"network": NETWORK, "policy": policy_name, "exit": index, "share": share}
        for index, share in enumerate((left / left.sum()).tolist())
    ]


def stage_rows(timings: Sequence[Timings]) -> Iterator[Row]:
    """Yield every stage and head at every size."""
    for timed in timings:
        quartiles = timed.quartiles()
        for index, name in enumerate(timed.exits):
            row: Row = {"network": NETWORK, "batch_size": timed.batch_size, "exit": name}
            for part, spread in (("stage", quartiles[:, 0]), ("head", quartiles[:, 1])):
                low, middle, high = spread[:, index].tolist()
                row |= {f"{part}_ms": middle, f"{part}_ms_low": low, f"{part}_ms_high": high}
            yield row


def batch_rows(model: MultiExitModel, images: Tensor, lines: Floats, predictor: Predictor) -> Iterator[Row]:
    """Yield the full network and the predictor, interleaved, every size in every round."""
    parts = {size: torch.split(images, size)[: max(2, min(BATCHES, IMAGES // size))] for size in REPEATS}
    rounds = [[_round(model, parts[size], lines, predictor) for size in REPEATS] for _ in range(ROUNDS + 1)]
    milliseconds = np.array(rounds[1:])  # (rounds, sizes, 3), the first has warmed up
    for index, size in enumerate(REPEATS):
        dense, exits, modelled = milliseconds[:, index].T
        row: Row = {"network": NETWORK, "batch_size": size, "batches": len(parts[size]) * ROUNDS}
        for name, values in (("dense", dense), ("exits", exits)):
            low, middle, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
            row |= {f"{name}_ms": middle, f"{name}_ms_low": low, f"{name}_ms_high": high}
        yield row | {"modelled_ms": float(modelled.mean()), "over_modelled": float(np.median(exits / modelled))}


def _round(model: MultiExitModel, parts: Sequence[Tensor], lines: Floats, predictor: Predictor) -> list[float]:
    """Return milliseconds of a batch by the full network, by the predictor, and by the lines for the exits it took."""
    seconds, (fixed, each) = np.zeros(3), lines.sum(axis=0).T
    for part in parts:
        start = time.perf_counter()
        full_network(model, part)
        middle = time.perf_counter()
        decisions = predictor(part)
        end = time.perf_counter()
        reached = (decisions.exits[:, None] >= np.arange(model.num_exits)).sum(axis=0)
        seconds += middle - start, end - middle, fixed[reached > 0].sum() + reached @ each
    return (1e3 * seconds / len(parts)).tolist()


@torch.inference_mode()
def full_network(model: MultiExitModel, images: Tensor) -> Tensor:
    """Return classes by the full network."""
    carried: tuple[Tensor, ...] = (images,)
    for stage in model.stages:
        carried = advance(stage, carried)
    return read_head(model.heads[-1], carried).argmax(-1)


def half_of_the_time(timed: Timings) -> Policy:
    """Return a stream policy that may take half of the full network's time in batches of this size."""
    given = (timed.costs(), "50%", load(NETWORK).calibration)
    return calibrate.certified_stream(calibrate.eero, seed=0)(*given, spend_all=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path, nargs="?")
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    root = Path(__file__).parent.parent
    made = provenance("numpy", "scipy", folder=root)
    write_rows(options.output / "capacity_shares.csv", [{**row, **made} for row in share_rows()])
    if options.data is None:
        return
    torch.set_num_threads(options.threads)
    model = load_result(Job(NETWORK), options.state)
    images = torch.cat([part for part, _ in Batches(read(options.data, 0, 1000).test, CIFAR, 1000)])[:1000]
    made = {"device": "cpu", **provenance("numpy", "torch", folder=root), "threads": str(options.threads)}
    timings = [time_stages(model, images[:size], repeats=repeats) for size, repeats in REPEATS.items()]
    rows = [{**row, **made} for row in stage_rows(timings)]
    write_rows(options.output / "capacity_stages.csv", rows)
    lines = stage_lines([{name: str(cell) for name, cell in row.items()} for row in rows])
    predictor = Predictor(model, half_of_the_time(timings[-1]), batch_size=max(REPEATS))
    found = [{**row, **made} for row in batch_rows(model, images, lines, predictor)]
    write_rows(options.output / "capacity_batches.csv", found)


if __name__ == "__main__":
    main()
