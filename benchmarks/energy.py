"""Images per second and joules per image, with exits and without, on this machine.

    python benchmarks/energy.py --device cuda --models resnet50,convnext_tiny --batch-sizes 256

Random weights; samples leave at random, as in runtime.py. Runs of the full network and of the predictor, some seconds
each, are interleaved and read the device's own energy counter (NVML, RAPL); `watts_idle` is its power before anything
runs. Medians over rounds, with minimum and maximum. Joules are the device's, without the host. Writes
results/energy_<device>.csv.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from runtime import ROOT, Row, device_parser, network, parsed, policy_for, random_inputs, with_settings
from torch import Tensor

from alight.costing.measure import Meter, meter_for, time_stages
from alight.engine.backends.torch.prepare import prepared
from alight.engine.predictor import Predictor
from alight.engine.settings import RunSettings
from alight.files import write_rows
from alight.networks.attach import attach_heads
from alight.networks.multi_exit import MultiExitModel

ROUNDS = 3
SECONDS = 2.0  # of every run: many updates of a counter


def metered(work: Callable[[], object], images: int, meter: Meter, seconds: float) -> tuple[float, float]:
    """Return images per second and joules per image of work that handles so many images and fetches its answers."""
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
def full_classes(full: Any, images: Tensor, batch_size: int) -> np.ndarray:
    """Return the full network's answers, fetched once."""
    classes: np.ndarray = torch.cat([full(part).argmax(-1) for part in torch.split(images, batch_size)]).cpu().numpy()
    return classes


def measure(options: argparse.Namespace, name: str, watts_idle: float, meter: Meter) -> Iterator[Row]:
    torch.manual_seed(0)
    backbone, example = network(name)
    model = attach_heads(backbone, after=options.exits, example=example)
    settings: RunSettings = options.settings
    full = with_settings(backbone, settings)
    for batch_size in map(int, options.batch_sizes.split(",")):
        (images,) = random_inputs(example, options.images, settings)
        shares = cost_shares(model, images[:batch_size], settings)
        runs: dict[str, Callable[[], object]] = {"dense": partial(full_classes, full, images, batch_size)}
        shared = Predictor(model, policy_for("uniform", options.exits + 1), batch_size=batch_size, settings=settings)
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


def cost_shares(model: MultiExitModel, batch: Tensor, settings: RunSettings) -> np.ndarray:
    """Return the time of stages and heads up to every exit as a share of the full network's."""
    costs = time_stages(prepared(model, settings), batch).costs()
    return costs.shares()


def main() -> None:
    parser = device_parser(__doc__)
    parser.add_argument("--exits", type=int, default=4, help="auxiliary exits")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--commit", default="", help="of this code, where it is not a git repository")
    parser.set_defaults(device="cuda", models="resnet50,convnext_tiny", batch_sizes="256", images=4096)
    options, machine = parsed(parser)
    machine |= {"commit": options.commit} if options.commit else {}
    meter = meter_for(torch.device(options.device))
    watts_idle = idle_watts(meter, options.seconds)
    rows: list[Row] = []
    for name in options.models.split(","):
        for row in measure(options, name, watts_idle, meter):
            rows.append({**row, **machine})
            print(
                f"{name} batch {row['batch_size']}, {row['mode']}: {row['images_per_second']:.0f}/s,"
                f" {1e3 * float(row['joules_per_image']):.1f} mJ per image, {row['watts']:.0f} W"
                f" ({watts_idle:.0f} W idle)",
                flush=True,
            )
            write_rows(options.output or ROOT / f"results/energy_{options.device}.csv", rows)


if __name__ == "__main__":
    main()
