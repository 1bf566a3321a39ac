"""How much of the possible speed-up an exported network reaches on onnxruntime, beside the plain network there.

    python benchmarks/deploy.py --models resnet18_cifar,minilm --batch-sizes 1,32 --threads 2

The plain network is one ONNX file of all of it, run by onnxruntime with as many threads. Random weights; samples leave
by lot, so that the mix of exits is what the row says: uniform, early (most leave early), or never (every head and score
is evaluated and nobody leaves). `speedup` is the plain network's time over ours, taken by turns, medians with quartiles
over rounds; `reached` is the time that the stages alone would take for the exits taken, each timed at the full batch
size in the same round, over our time. Single samples are timed one by one, the plain network, ours and the stages by
turns. Stages are kept in --folder, so that a second run exports nothing. Writes results/deploy_cpu.csv.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runtime import network, policy_for, random_inputs

from alight import Predictor, export_model
from alight.engine.backends import State
from alight.engine.settings import RunSettings
from alight.files import write_rows
from alight.networks.attach import attach_heads
from alight.policies.policy import ExitAt
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
ROUNDS = 7
WALKS = 3  # of one batch through all stages in every round
BATCHES = {1: 64, 32: 6}  # so many of a size make up a round
SETTINGS = RunSettings(device="cpu")
Row = dict[str, str | float | int]
Seconds = tuple[float, float, float]  # of the plain network, ours, and the stages alone


def exported(name: str, exits: int, folder: Path) -> tuple[Path, Path, Any]:
    """Folders of the network with exits and of the plain one, and an example."""
    torch.manual_seed(0)
    plain, example = network(name)
    model = attach_heads(plain, after="auto", count=exits, example=example)
    early, dense = folder / f"{name}_{exits}", folder / f"{name}_plain"
    if not early.exists():
        export_model(model, policy_for("uniform", exits + 1), early, progress=True)
    if not dense.exists():
        last = ExitAt(costs=(exits + 1.0,), open_exits=(exits,), num_exits=exits + 1)
        export_model(model, last, dense, progress=True)
    return early, dense, example


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def stage_seconds(ours: Predictor, batch: State) -> np.ndarray:
    """Return seconds of every stage for one batch, one after the other, as in a walk."""
    found, state = [], batch
    for stage in sessions(ours):
        start = time.perf_counter()
        _, state = stage(state)
        found.append(time.perf_counter() - start)
    return np.array(found)


def sessions(predictor: Predictor) -> list[Any]:
    """Return the stages, without head values."""
    backend: Any = predictor.backend
    return backend.stages


def by_rounds(dense: Predictor, ours: Predictor, parts: Sequence[State], exits: np.ndarray) -> Seconds:
    """Everything once by the plain network and once by ours, and a few batches through every stage."""
    theirs = timed(lambda: [sessions(dense)[0](part) for part in parts])
    own = timed(lambda: [ours(part) for part in parts])
    walks = [stage_seconds(ours, parts[index % len(parts)]) for index in range(WALKS)]
    reach = np.array([(exits >= index).sum() for index in range(len(walks[0]))]) / len(parts[0][0])
    return theirs, own, float((reach * np.median(walks, axis=0)).sum())


def interleaved_timings(dense: Predictor, ours: Predictor, parts: Sequence[State], exits: np.ndarray) -> Seconds:
    """Sample after sample, by ours and through every stage, both after the plain network, which leaves caches alike."""
    turns = []
    for index, part in enumerate(parts):
        before = timed(partial(sessions(dense)[0], part))
        own = timed(partial(ours, part, [index]))
        again = timed(partial(sessions(dense)[0], part))
        turns.append(((before + again) / 2, own, stage_seconds(ours, part)[: exits[index] + 1].sum()))
    theirs, own, ideal = np.array(turns).sum(axis=0).tolist()
    return theirs, own, ideal


def compare(dense: Predictor, ours: Predictor, inputs: State, batch_size: int) -> Row:
    total = len(inputs[0])
    parts = [tuple(each[start : start + batch_size] for each in inputs) for start in range(0, total, batch_size)]
    exits = np.concatenate([ours(part, [index] if batch_size == 1 else None).exits for index, part in enumerate(parts)])
    seconds = interleaved_timings if batch_size == 1 else by_rounds
    seconds(dense, ours, parts[:8], exits)
    theirs, own, ideal = np.array([seconds(dense, ours, parts, exits) for _ in range(ROUNDS)]).T
    low, middle, high = np.quantile(theirs / own, [0.25, 0.5, 0.75]).tolist()
    reached_low, reached, reached_high = np.quantile(ideal / own, [0.25, 0.5, 0.75]).tolist()
    return {
        "dense_per_second": total / float(np.median(theirs)),
        "per_second": total / float(np.median(own)),
        "speedup": middle,
        "speedup_low": low,
        "speedup_high": high,
        "possible": float(np.median(theirs / ideal)),
        "reached": reached,
        "reached_low": reached_low,
        "reached_high": reached_high,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="resnet18_cifar,minilm")
    parser.add_argument("--exits", type=int, default=4, help="auxiliary exits")
    parser.add_argument("--batch-sizes", default="1,32")
    parser.add_argument("--mixes", default="uniform,early,never")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where stages are kept (default: nowhere)")
    parser.add_argument("--only-export", action="store_true")
    parser.add_argument("--output", type=Path, default=ROOT / "results/deploy_cpu.csv")
    options = parser.parse_args()
    made = provenance("numpy", "onnxruntime", "torch", folder=ROOT) | {"threads": str(options.threads)}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.models.split(","):
            early, plain, example = exported(name, options.exits, options.folder or Path(temporary))
            if options.only_export:
                continue
            dense, shared = (
                Predictor.load(folder, settings=RunSettings(threads=options.threads)) for folder in (plain, early)
            )
            for batch_size in map(int, options.batch_sizes.split(",")):
                given = random_inputs(example, batch_size * BATCHES.get(batch_size, 8), SETTINGS)
                inputs = tuple(each.numpy() for each in given)
                for mix in options.mixes.split(","):
                    ours = shared.with_policy(policy_for(mix, options.exits + 1))
                    row = compare(dense, ours, inputs, batch_size)
                    row_of: Row = {"model": name, "exits": options.exits, "mix": mix, "batch_size": batch_size}
                    rows.append({**row_of, **row, **made})
                    print(
                        f"{name}, {mix}, batch {batch_size}: {row['speedup']:.3f}x ({row['speedup_low']:.3f} to"
                        f" {row['speedup_high']:.3f}), possible {row['possible']:.3f}, reached {row['reached']:.1%}"
                        f" ({row['reached_low']:.1%} to {row['reached_high']:.1%}), {row['per_second']:.0f}/s",
                        flush=True,
                    )
                    write_rows(options.output, rows)


if __name__ == "__main__":
    main()
