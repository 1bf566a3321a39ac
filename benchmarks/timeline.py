"""Where the time of a predictor on a GPU goes that stages and heads alone would not take.

    python benchmarks/timeline.py --models resnet50 --batch-sizes 1024,2048 --mixes uniform,early --modes eager,compiled

Runs what benchmarks/runtime.py runs, once under torch's profiler. A row has shares of that run's time: `network` of
its kernels, `moves` of those that copy survivors from batch to batch, `pauses` between two kernels, `edges` before the
first and after the last. `alone` is the time of stages and heads at the full batch size (and of scores, where they are
compiled or captured with them), as a share of runs without the profiler. Writes results/timeline_cuda.csv.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runtime import ROOT, Row, clocked, network, policy_for, random_inputs, stage_seconds
from torch.profiler import ProfilerActivity, profile

from alight.engine.backends import State
from alight.engine.predictor import Predictor
from alight.engine.settings import RunSettings
from alight.files import write_rows
from alight.networks.attach import attach_heads
from alight.provenance import provenance

ROUNDS = 5
MOVES = ("move_rows", "index_copy", "Memcpy DtoD")  # in the names of kernels that copy survivors
SHOWN = 8  # pauses, the longest


def measure(options: argparse.Namespace, name: str, mode: str) -> Iterator[Row]:
    """Yield a row for each batch size and mix of exits."""
    torch.manual_seed(0)
    backbone, example = network(name)
    model = attach_heads(backbone, after=options.exits, example=example)
    settings = RunSettings("cuda", "bf16", channels_last=True, compile=mode == "compiled", graphs=mode == "graphs")
    for batch_size in map(int, options.batch_sizes.split(",")):
        inputs = random_inputs(example, options.images, settings)
        uniform = policy_for("uniform", options.exits + 1)
        shared = Predictor(model, uniform, batch_size=batch_size, settings=settings)
        for mix in options.mixes.split(","):
            predictor = shared.with_policy(policy_for(mix, options.exits + 1))
            with torch.inference_mode():
                parts = split(predictor, inputs, batch_size, show=options.show)
            yield {"model": name, "exits": options.exits, "mix": mix, "batch_size": batch_size, "mode": mode, **parts}


def split(predictor: Predictor, inputs: State, batch_size: int, *, show: bool) -> Row:
    """Return one run in its parts."""
    exits = predictor(inputs).exits
    predictor(inputs)
    batch = tuple(each[:batch_size] for each in inputs)
    walls, ideals = [], []
    for _ in range(ROUNDS):
        walls.append(clocked(partial(predictor, inputs), "cuda"))
        alone = stage_seconds(predictor, batch, "cuda").sum(axis=1)
        ideals.append(sum(seconds * (exits >= index).sum() / batch_size for index, seconds in enumerate(alone)))
    wall, alone = float(np.median(walls)), float(np.median(ideals))
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        watched = clocked(partial(predictor, inputs), "cuda")
    names, starts, ends = kernels(profiled)
    behind = np.maximum.accumulate(ends)
    pauses = np.maximum(starts[1:] - behind[:-1], 0)
    if show:
        for place in np.argsort(-pauses)[:SHOWN]:
            at = starts[place] - starts[0]
            print(
                f"  {pauses[place] * 1e6:.0f} us at {at * 1e3:.2f} ms: {names[place][:60]} -> {names[place + 1][:60]}"
            )
    taken = ends - starts
    moves = sum(part for name, part in zip(names, taken, strict=True) if any(each in name for each in MOVES))
    busy = float(behind[-1] - starts[0] - pauses.sum())
    return {
        "seconds": wall,
        "profiled_seconds": watched,
        "alone": alone / wall,
        "network": (busy - moves) / watched,
        "moves": moves / watched,
        "pauses": float(pauses.sum()) / watched,
        "edges": 1 - float(behind[-1] - starts[0]) / watched,
        "kernels": len(names),
    }


def kernels(profiled: Any) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return names, starts and ends in seconds of everything that the GPU ran, by start."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    ours = [each for each in events if each.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    ours.sort(key=lambda each: float(each["ts"]))
    starts = np.array([float(each["ts"]) for each in ours]) * 1e-6
    return [each["name"] for each in ours], starts, starts + np.array([float(each["dur"]) for each in ours]) * 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="resnet50")
    parser.add_argument("--exits", type=int, default=4, help="auxiliary exits (default: 4)")
    parser.add_argument("--batch-sizes", default="1024,2048")
    parser.add_argument("--modes", default="eager,compiled", help="of eager, compiled, graphs")
    parser.add_argument("--mixes", default="uniform,early")
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--show", action="store_true", help="print the longest pauses")
    parser.add_argument("--output", type=Path, default=ROOT / "results/timeline_cuda.csv")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    made = provenance("numpy", "torch", "torchvision", "timm", folder=ROOT)
    made["hardware"] = torch.cuda.get_device_name()
    rows: list[Row] = []
    for name in options.models.split(","):
        for mode in options.modes.split(","):
            for row in measure(options, name, mode):
                rows.append({**row, **made})
                print(
                    ", ".join(
                        f"{key} {value:.4g}" if isinstance(value, float) else f"{value}" for key, value in row.items()
                    )
                )
                write_rows(options.output, rows)


if __name__ == "__main__":
    main()
