"""Measure images per second and joules per image, with exits and without.

    python benchmarks/energy.py --device cuda --models resnet50,convnext_tiny --batch-sizes 256

Weights are random and samples leave at random exits, as in runtime.py. The full network and the predictor run
interleaved, some seconds each, under the device's own energy counter (NVML, RAPL); `watts_idle` is the power before
anything runs. Medians over rounds, with minimum and maximum. Joules are of the device, without its host. Writes
results/energy_<device>.csv.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from alight.engine.prepare import as_dtype, prepared
from runtime import ROOT, Row, network, policy_for, random_inputs
from torch import Tensor

from alight.costing.energy import Meter, meter_for
from alight.costing.measure import time_stages
from alight.engine.predictor import Predictor
from alight.files import write_rows
from alight.networks.attach import attach_heads
from alight.provenance import provenance

ROUNDS = 3
SECONDS = 2.0  # of every run, many updates of a counter


def metered(work: Callable[[], object], images: int, meter: Meter, seconds: float) -> tuple[float, float]:
    """Return images per second and joules per image of work on this many images that fetches its predictions."""
    work()
    start, begin, count = meter.joules(), time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        work()
        count += images
    elapsed, joules = time.perf_counter() - begin, meter.joules() - start
    return count / elapsed, joules / count


def idle_watts(meter: Meter, seconds: float) -> float:
    start, begin = meter.joules(), time.perf_counter()
    time.sleep(seconds)
    return (meter.joules() - start) / (time.perf_counter() - begin)


@torch.inference_mode()
def dense_classes(dense: Any, images: Tensor, batch_size: int) -> np.ndarray:
    """Return the predictions of the full network, fetched once."""
    classes: np.ndarray = torch.cat([dense(part).argmax(-1) for part in torch.split(images, batch_size)]).cpu().numpy()
    return classes


def measure(options: argparse.Namespace, name: str, watts_idle: float, meter: Meter) -> Iterator[Row]:
    torch.manual_seed(0)
    full, example = network(name)
    model = attach_heads(full, after="auto", count=options.exits, example=example)
    settings: dict[str, Any] = {"device": options.device, "dtype": options.dtype, "channels_last": options.on_gpu}
    dense = full.to(device=options.device, dtype=as_dtype(options.dtype))
    if options.on_gpu:
        dense = dense.to(memory_format=torch.channels_last)
    for batch_size in map(int, options.batch_sizes.split(",")):
        (images,) = random_inputs(example, options.images, settings)
        shares = cost_shares(model, images[:batch_size], settings)
        runs: dict[str, Callable[[], object]] = {"dense": partial(dense_classes, dense, images, batch_size)}
        shared = Predictor(model, policy_for("uniform", options.exits + 1), batch_size=batch_size, **settings)
        spent = {"dense": 1.0}
        for mix in ("uniform", "early"):
            predictor = shared.with_policy(policy_for(mix, options.exits + 1))
            runs[mix] = partial(predictor, images)
            spent[mix] = float(shares[predictor(images).exits].mean())
        rounds = [
            {mix: metered(run, options.images, meter, options.seconds) for mix, run in runs.items()}
            for _ in range(ROUNDS)
        ]
        for mix in runs:
            speeds, joules = np.array([each[mix] for each in rounds]).T
            yield {
                "device": options.device_name,
                "model": name,
                "exits": options.exits,
                "mode": mix,
                "batch_size": batch_size,
                "dtype": options.dtype,
                "time_share": spent[mix],
                "images_per_second": float(np.median(speeds)),
                "images_per_second_low": float(speeds.min()),
                "images_per_second_high": float(speeds.max()),
                "joules_per_image": float(np.median(joules)),
                "joules_per_image_low": float(joules.min()),
                "joules_per_image_high": float(joules.max()),
                "watts": float(np.median(speeds * joules)),
                "watts_idle": watts_idle,
            }


def cost_shares(model: Any, batch: Tensor, settings: dict[str, Any]) -> np.ndarray:
    """Return the time up to every exit, heads included, as a share of the full network's."""
    costs = time_stages(prepared(model, **settings), batch).costs()
    return np.asarray(costs.cumulative() / costs.full)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default="resnet50,convnext_tiny")
    parser.add_argument("--exits", type=int, default=4, help="auxiliary exits")
    parser.add_argument("--batch-sizes", default="256")
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--commit", default="", help="of this code, where it is not a git repository")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.on_gpu = options.device == "cuda"
    options.dtype = options.dtype or ("bf16" if options.on_gpu else "fp32")
    options.device_name = torch.cuda.get_device_name() if options.on_gpu else "cpu"
    torch.backends.cudnn.benchmark = options.on_gpu
    made = provenance("numpy", "torch", "torchvision", "timm", folder=ROOT)
    made |= {"commit": options.commit} if options.commit else {}
    meter = meter_for(torch.device(options.device))
    watts_idle = idle_watts(meter, options.seconds)
    rows: list[Row] = []
    for name in options.models.split(","):
        for row in measure(options, name, watts_idle, meter):
            rows.append({**row, **made})
            print(
                f"{name} batch {row['batch_size']}, {row['mode']}: {row['images_per_second']:.0f}/s,"
                f" {1e3 * float(row['joules_per_image']):.1f} mJ an image, {row['watts']:.0f} W"
                f" ({watts_idle:.0f} W idle)",
                flush=True,
            )
            write_rows(options.output or ROOT / f"results/energy_{options.device}.csv", rows)


if __name__ == "__main__":
    main()
