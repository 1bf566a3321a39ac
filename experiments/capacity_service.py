"""The simulation beside a service that was measured: the same core, network, micro-batches, rates and policy.

    python experiments/capacity_service.py       # seconds

Reads results/serve_load.csv (benchmarks/serve_load.py), in which one core answers single images over HTTP. What a
request takes beside the network is not part of the model: it is found from the capacity of the dense service, and put
on every image. All else is foretold. Writes results/capacity_service.csv.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from capacity import ROOT, Row, stream
from capacity_devices import RECORDING, Device, core
from capacity_queue import Dense, Exits, Serving, Traffic, simulate
from recorded_cifar100 import RESULTS, load, rows

from alight import calibrate
from alight.files import write_rows
from alight.provenance import provenance

SEEDS = range(8)
FULL = 400  # full batches, for the capacity


def compared() -> Iterator[Row]:
    """Every load and service: measured, and simulated over as many seconds with several seeds."""
    measured = [row for row in rows(RESULTS / "serve_load.csv") if row["seed"] == "0"]
    device = replace(core(), max_wait=float(measured[0]["max_wait_ms"]) / 1e3, queue=2048)
    dense = next(row for row in measured if row["service"] == "dense")
    device = replace(device, entrance=1 / float(dense["capacity"]) - 1 / device.dense_per_second)
    budget = max(round(100 * float(row["spend"])) for row in measured if row["service"] == "early")
    for row in measured:
        rate, seconds = float(row["rate"]), float(row["seconds"])
        found = []
        for seed in SEEDS:
            rng, serving = np.random.default_rng(seed), serving_for(device, row["service"], budget)
            arrivals = Traffic(rate, 1.0).arrivals(0.0, seconds, 1.0, rng)
            images = rng.integers(len(stream().table), size=len(arrivals))
            served = simulate(arrivals, images, device, serving, stream().correct, seconds)
            found.append(1e3 * np.quantile(served.delays, [0.5, 0.99]))
        p50, p99 = np.median(found, axis=0).tolist()
        low, high = np.array(found)[:, 1].min(), np.array(found)[:, 1].max()
        yield {
            "service": row["service"],
            "load": row["load"],
            "rate": rate,
            "measured_capacity": float(row["capacity"]),
            "simulated_capacity": capacity(device, serving_for(device, row["service"], budget)),
            "measured_p50_ms": float(row["p50_ms"]),
            "simulated_p50_ms": p50,
            "measured_p99_ms": float(row["p99_ms"]),
            "simulated_p99_ms": p99,
            "simulated_p99_ms_low": float(low),
            "simulated_p99_ms_high": float(high),
            "entrance_ms": 1e3 * device.entrance,
        }


def serving_for(device: Device, service: str, percent: int) -> Serving:
    """The plain network, or a stream that spends such a percentage of its FLOPs."""
    if service == "dense":
        return Dense(device)
    found = load(RECORDING)
    policy = calibrate.certified_stream(calibrate.eero)(found.costs, f"{percent}%", found.calibration)
    return Exits(device, policy, stream().table)


def capacity(device: Device, serving: Serving) -> float:
    """Images a second in full batches."""
    rng, table = np.random.default_rng(0), stream().table
    drawn = rng.integers(len(table), size=(FULL, device.batch_size))
    return FULL * device.batch_size / sum(serving(images)[0] for images in drawn)


def main() -> None:
    made = provenance("numpy", "scipy", folder=ROOT)
    found = [{**row, **made} for row in compared()]
    write_rows(RESULTS / "capacity_service.csv", found)
    for row in found:
        print(
            f"{row['service']:5} {row['rate']:6.1f}/s: half within {row['measured_p50_ms']:.0f} ms measured,"
            f" {row['simulated_p50_ms']:.0f} simulated; 99 % within {row['measured_p99_ms']:.0f} and"
            f" {row['simulated_p99_ms']:.0f}; capacity {row['measured_capacity']:.1f} and"
            f" {row['simulated_capacity']:.1f} a second"
        )


if __name__ == "__main__":
    main()
