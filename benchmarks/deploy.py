"""How much of the possible speed-up an exported network reaches on onnxruntime, beside the full network there.

    python benchmarks/deploy.py --models resnet18_cifar,minilm --batch-sizes 1,32 --threads 2

The full network is one ONNX file, run by onnxruntime with as many threads. Mixes of exits and columns are those of
benchmarks/runtime.py; times of the full network, the exported stages under a policy, and the stages alone are
interleaved, for single samples one by one. Stages are kept in --folder, so that a second run exports nothing. Writes
results/deploy_cpu.csv.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import timed
from runtime import ROOT, ROUNDS, WALKS, Row, described, in_parts, network, policy_for, random_inputs, reaching, speeds

from alight import Predictor, export_model
from alight.engine.backends import State
from alight.engine.settings import RunSettings
from alight.files import write_rows
from alight.networks.attach import attach_heads
from alight.policies.policy import ExitAt
from alight.provenance import provenance

BATCHES = {1: 64, 32: 6}  # so many of a size make up a round
SETTINGS = RunSettings(device="cpu")
Seconds = tuple[float, float, float]  # of the full network, ours, and the stages alone


def exported(name: str, exits: int, folder: Path) -> tuple[Path, Path, Any]:
    """Return the folders of the network with exits and of the full network, and an example."""
    torch.manual_seed(0)
    backbone, example = network(name)
    model = attach_heads(backbone, after=exits, example=example)
    early, full = folder / f"{name}_{exits}", folder / f"{name}_full"
    if not early.exists():
        export_model(model, policy_for("uniform", exits + 1), early, progress=True)
    if not full.exists():
        last = ExitAt(costs=(exits + 1.0,), open_exits=(exits,), num_exits=exits + 1)
        export_model(model, last, full, progress=True)
    return early, full, example


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


def by_rounds(full: Predictor, ours: Predictor, parts: Sequence[State], exits: np.ndarray) -> Seconds:
    """Return seconds of all samples by the full network, by ours, and by the stages, from a few batches."""
    theirs = timed(lambda: [sessions(full)[0](part) for part in parts])
    own = timed(lambda: [ours(part) for part in parts])
    walks = [stage_seconds(ours, parts[index % len(parts)]) for index in range(WALKS)]
    alone = reaching(exits, len(walks[0])) / len(parts[0][0]) * np.median(walks, axis=0)
    return theirs, own, float(alone.sum())


def interleaved_timings(full: Predictor, ours: Predictor, parts: Sequence[State], exits: np.ndarray) -> Seconds:
    """Return seconds of sample after sample, by ours and by the stages, both after the full network: caches alike."""
    turns = []
    for index, part in enumerate(parts):
        before = timed(partial(sessions(full)[0], part))
        own = timed(partial(ours, part, [index]))
        again = timed(partial(sessions(full)[0], part))
        turns.append(((before + again) / 2, own, stage_seconds(ours, part)[: exits[index] + 1].sum()))
    theirs, own, ideal = np.array(turns).sum(axis=0).tolist()
    return theirs, own, ideal


def compare(full: Predictor, ours: Predictor, inputs: State, batch_size: int) -> Row:
    parts = in_parts(inputs, batch_size)
    exits = np.concatenate([ours(part, [index] if batch_size == 1 else None).exits for index, part in enumerate(parts)])
    seconds = interleaved_timings if batch_size == 1 else by_rounds
    seconds(full, ours, parts[:8], exits)
    theirs, own, ideal = np.array([seconds(full, ours, parts, exits) for _ in range(ROUNDS)]).T
    return speeds(len(inputs[0]), theirs, own, ideal)


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
    machine = provenance("numpy", "onnxruntime", "torch", folder=ROOT) | {"threads": str(options.threads)}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.models.split(","):
            early, whole, example = exported(name, options.exits, options.folder or Path(temporary))
            if options.only_export:
                continue
            settings = RunSettings(threads=options.threads)
            full, shared = (Predictor.load(folder, settings=settings) for folder in (whole, early))
            for batch_size in map(int, options.batch_sizes.split(",")):
                tensors = random_inputs(example, batch_size * BATCHES.get(batch_size, 8), SETTINGS)
                inputs = tuple(each.numpy() for each in tensors)
                for mix in options.mixes.split(","):
                    ours = shared.with_policy(policy_for(mix, options.exits + 1))
                    row = compare(full, ours, inputs, batch_size)
                    row_of: Row = {"model": name, "exits": options.exits, "mix": mix, "batch_size": batch_size}
                    rows.append({**row_of, **row, **machine})
                    print(f"{name}, {mix}, batch {batch_size}: {described(row)}", flush=True)
                    write_rows(options.output, rows)


if __name__ == "__main__":
    main()
