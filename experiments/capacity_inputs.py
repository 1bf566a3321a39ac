"""How long a core takes for a batch, by its size and by where its images leave: what the capacity model is fed with.

    python experiments/capacity_inputs.py STATE DATA      # three minutes

STATE holds results of cifar100_train.py, DATA is CIFAR-100 (see cifar100_data.py). Writes

    results/capacity_stages.csv     milliseconds of every stage and head for one batch, by its size, with quartiles
    results/capacity_batches.csv    milliseconds of a batch by the plain network and by a predictor that paces itself at
                                    half of the plain network's time, by turns on the same images, and what the times of
                                    stages and heads, as straight lines in the number of images, say of the same exits
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from capacity_devices import Lines, batch_seconds, half_of_the_time
from cifar100_data import Batches, read
from cifar100_train import Job, load_result
from torch import Tensor

from alight import MultiExitModel, Predictor
from alight.costing.measure import Timings, time_stages
from alight.files import write_rows
from alight.networks.multi_exit import advance
from alight.networks.multi_exit import read as read_head
from alight.networks.zoo import CIFAR
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
NETWORK = "resnet18_mixed_distilled"
SIZES = (1, 2, 4, 8, 16, 32, 64)
REPEATS = {1: 60, 2: 60, 4: 40, 8: 30, 16: 20, 32: 15, 64: 15}  # passes timed, by the batch's size
ROUNDS = 7
IMAGES, BATCHES = 128, 16  # of a round and size, at most
Row = dict[str, str | float | int]


def stage_rows(timings: Sequence[Timings]) -> Iterator[Row]:
    """Every stage and head at every size."""
    for timed in timings:
        stages, heads = timed.stages_spread(), timed.heads_spread()
        for index, name in enumerate(timed.exits):
            told: Row = {"network": NETWORK, "batch_size": timed.batch_size, "exit": name}
            for part, spread in (("stage", stages), ("head", heads)):
                low, middle, high = spread[:, index].tolist()
                told |= {f"{part}_ms": middle, f"{part}_ms_low": low, f"{part}_ms_high": high}
            yield told


def batch_rows(model: MultiExitModel, images: Tensor, lines: Lines, predictor: Predictor) -> Iterator[Row]:
    """The plain network and the predictor by turns, every size in every round."""
    parts = {size: torch.split(images, size)[: max(2, min(BATCHES, IMAGES // size))] for size in SIZES}
    rounds = [[_round(model, parts[size], lines, predictor) for size in SIZES] for _ in range(ROUNDS + 1)]
    milliseconds = np.array(rounds[1:])  # (rounds, sizes, 3), the first has warmed up
    for index, size in enumerate(SIZES):
        dense, exits, modelled = milliseconds[:, index].T
        told: Row = {"network": NETWORK, "batch_size": size, "batches": len(parts[size]) * ROUNDS}
        for name, values in (("dense", dense), ("exits", exits)):
            low, middle, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
            told |= {f"{name}_ms": middle, f"{name}_ms_low": low, f"{name}_ms_high": high}
        yield told | {"modelled_ms": float(modelled.mean()), "over_modelled": float(np.median(exits / modelled))}


def _round(
    model: MultiExitModel, parts: Sequence[Tensor], lines: Lines, predictor: Predictor
) -> tuple[float, float, float]:
    """Milliseconds of a batch by the plain network, by the predictor, and by the lines for the exits it took."""
    seconds = np.zeros(3)
    for part in parts:
        start = time.perf_counter()
        plain(model, part)
        middle = time.perf_counter()
        decisions = predictor(part)
        end = time.perf_counter()
        reached = (decisions.exits[:, None] >= np.arange(model.num_exits)).sum(axis=0)
        seconds += middle - start, end - middle, batch_seconds(reached, lines)
    dense, exits, modelled = (1e3 * seconds / len(parts)).tolist()
    return dense, exits, modelled


@torch.inference_mode()
def plain(model: MultiExitModel, images: Tensor) -> Tensor:
    """Classes by the plain network."""
    carried: tuple[Tensor, ...] = (images,)
    for stage in model.stages:
        carried = advance(stage, carried)
    return read_head(model.heads[-1], carried).argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=ROOT / "results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_result(Job(NETWORK), options.state)
    images = torch.cat([part for part, _ in Batches(read(options.data, 0, 1000).test, CIFAR, 1000)])[:1000]
    made = {"device": "cpu", **provenance("numpy", "torch", folder=ROOT), "threads": str(options.threads)}
    timings = [time_stages(model, images[:size], repeats=REPEATS[size]) for size in SIZES]
    rows = [{**row, **made} for row in stage_rows(timings)]
    write_rows(options.output / "capacity_stages.csv", rows)
    predictor, lines = Predictor(model, half_of_the_time(rows), batch_size=max(SIZES)), Lines.of_rows(rows)
    found = [{**row, **made} for row in batch_rows(model, images, lines, predictor)]
    write_rows(options.output / "capacity_batches.csv", found)
    for row in found:
        print(
            f"{row['batch_size']:3} images: {row['dense_ms']:.1f} ms plain, {row['exits_ms']:.1f} ms with exits,"
            f" {row['modelled_ms']:.1f} ms modelled"
        )


if __name__ == "__main__":
    main()
