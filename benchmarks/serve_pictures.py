"""A dense service and one with early exits under the same open-loop load of pictures that have to be decoded.

    python benchmarks/serve_pictures.py STATE DATA --folder FOLDER --prepare    # a minute
    python benchmarks/serve_pictures.py STATE DATA --folder FOLDER --seed 0     # 3 minutes on two idle cores

Network and policies are those of benchmarks/serve_load.py. Each request brings one test picture as a JPEG of 160 x 160,
which the service decodes and resizes. Both services have a timeout of two seconds: they refuse what they could not
answer in time. They share one core, and one works at a time; the client has the other. Both are sent 50, 80, 100 and
120 % of what the dense one answers when it always has work, the same pictures at the same random moments. Goodput
counts answers within the timeout; latency counts from the moment a request was due. Writes results/serve_pictures.csv,
in which other seeds are kept.
"""

import argparse
import asyncio
import base64
import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from open_loop import Client, Reply, closed_loop, open_loop
from PIL import Image
from serve_load import BATCH, CLIENT_CORE, LOADS, SERVER_CORE, Row, kept, prepare
from service_process import served

from alight import load_policy
from alight.files import write_rows
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
SIDE = 160  # pixels of the pictures that are sent
TIMEOUT = 2.0  # seconds
QUEUE = 512


def bodies(images: np.ndarray) -> list[bytes]:
    """One request for each picture, as JSON with a large JPEG in base64."""
    made = []
    for image in images:
        file = io.BytesIO()
        large = Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        large.save(file, "JPEG", quality=90)
        made.append(b'{"images":["' + base64.b64encode(file.getvalue()) + b'"]}')
    return made


def row(name: str, load: float, rate: float, replies: Sequence[Reply], labels: np.ndarray, full: float) -> Row:
    """Goodput, latencies, refusals, accuracy and spend of one load."""
    answered = [(reply, label) for reply, label in zip(replies, labels.tolist(), strict=True) if reply.status == 200]
    seconds = np.array([reply.seconds for reply, _ in answered])
    predictions = [reply.content["predictions"][0] for reply, _ in answered]
    statuses = [reply.status for reply in replies]
    correct = [each["index"] == label for each, (_, label) in zip(predictions, answered, strict=True)]
    return {
        "service": name,
        "load": load,
        "rate": rate,
        "requests": len(replies),
        "goodput": float((seconds <= TIMEOUT).sum() / len(replies) * rate),
        "p50_ms": float(1e3 * np.median(seconds)),
        "p99_ms": float(1e3 * np.quantile(seconds, 0.99)),
        "max_ms": float(1e3 * seconds.max()),
        "answered": len(answered),
        "refused_429": statuses.count(429),
        "late_504": statuses.count(504),
        "other": len([status for status in statuses if status not in (200, 429, 504)]),
        "accuracy": float(np.mean(correct)),
        "spend": float(np.mean([each["cost"] for each in predictions]) / full),
    }


async def run(
    ports: dict[str, int], images: np.ndarray, labels: np.ndarray, full: float, options: argparse.Namespace
) -> list[Row]:
    clients = {name: Client("127.0.0.1", port) for name, port in ports.items()}
    requests = bodies(images)
    capacities = {}
    for name, client in clients.items():
        await closed_loop(client, "/predict", requests, 4, 2.0)  # warm
        capacities[name] = await closed_loop(client, "/predict", requests, 2 * BATCH, options.seconds / 2)
    print("capacity: " + ", ".join(f"{name} {each:.1f}/s" for name, each in capacities.items()), flush=True)
    rows = []
    for place, load in enumerate(LOADS):
        rate = load * capacities["dense"]
        chosen = np.arange(int(rate * options.seconds)) % len(requests)
        for name, client in clients.items():
            sent = [requests[index] for index in chosen]
            replies = await open_loop(client, "/predict", sent, rate, 10 * options.seed + place)
            measured = row(name, load, rate, replies, labels[chosen], full) | {"capacity": capacities[name]}
            rows.append(measured)
            print({key: round(value, 3) if isinstance(value, float) else value for key, value in measured.items()})
    for client in clients.values():
        client.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="where network and policies are kept")
    parser.add_argument("--prepare", action="store_true", help="write network and policies, and nothing else")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "results/serve_pictures.csv")
    options = parser.parse_args()
    if options.prepare:
        options.folder.mkdir(exist_ok=True)
        prepare(options.state, options.data, options.folder)
        return
    folder = options.folder
    full = load_policy(folder / "dense.json").costs[0]
    with np.load(options.data / "test.npz") as file:
        order = np.random.default_rng(options.seed).permutation(len(file["labels"]))[:2000]
        images, labels = file["images"][order], file["labels"][order]
    os.sched_setaffinity(0, {CLIENT_CORE})
    arguments = ["--batch-size", str(BATCH), "--queue", str(QUEUE), "--timeout", str(TIMEOUT), "--no-state"]
    network, policies = folder / "model", [folder / f"{name}.json" for name in ("dense", "early")]
    with (
        served(network, policies[0], *arguments, core=SERVER_CORE) as dense,
        served(network, policies[1], *arguments, core=SERVER_CORE) as early,
    ):
        ports = {"dense": dense.port, "early": early.port}
        rows = asyncio.run(run(ports, images, labels, full, options))
    made = provenance("numpy", "torch", "fastapi", "uvicorn", "pillow", folder=ROOT)
    fixed = {"batch_size": BATCH, "timeout": TIMEOUT, "seconds": options.seconds, "seed": options.seed}
    before = [row for row in kept(options.output) if row["seed"] != str(options.seed)]
    write_rows(options.output, [*before, *(each | fixed | made for each in rows)])


if __name__ == "__main__":
    main()
