"""A dense service and one with early exits under the same open-loop load of pictures that have to be decoded.

    python benchmarks/serve_pictures.py DATA --folder FOLDER --prepare      # trains: 10 minutes on one core
    python benchmarks/serve_pictures.py DATA --folder FOLDER --seed 0       # 4 minutes on two idle cores

DATA is CIFAR-100 (see experiments/cifar100_data.py). A ResNet of 18 layers, narrower than usual, learns 20 of its
classes with three exits; each request brings one test picture as a JPEG of 160 x 160, which the service decodes and
resizes. The dense service runs every sample to the end; the other one keeps a stream within the cheapest budget that by
1,000 calibration pictures loses at most a point of accuracy, with 95 % confidence. Both have a timeout of a second, so
that they refuse what they could not answer in time. The servers share one core, and one works at a time; the client has
the other. Both are sent 50, 80, 100 and 120 % of what the dense one answers when it always has work, the same pictures
at the same random moments. Goodput counts answers within the timeout; latency counts from the moment a request was due.
Writes results/serve_pictures.csv, in which other seeds are kept.
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
from serve_load import BATCH, CLIENT_CORE, LOADS, SERVER_CORE, Row, kept, write_policies
from service_process import served

from alight import TrainingSettings, attach_heads, load_policy, measure_costs, record, save_model, train_heads
from alight.files import write_rows
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
CLASSES, CALIBRATION = 20, 1000
SIDE = 160  # pixels of the pictures that are sent
TIMEOUT = 1.0  # seconds
QUEUE = 512
EXITS = ("layer1.1", "layer2.1", "layer3.1")
WIDTHS, EPOCHS = (24, 48, 96, 192), 10


def pictures(data: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The pictures of the first classes, in a random order: (samples, 3, 32, 32), and their labels."""
    with np.load(data / f"{name}.npz") as file:
        images, labels = file["images"], file["labels"].astype(np.int64)
    rows = np.random.default_rng(0).permutation(np.flatnonzero(labels < CLASSES))
    return np.ascontiguousarray(images[rows].transpose(0, 3, 1, 2)), labels[rows]


def prepare(data: Path, folder: Path) -> None:
    """Train the network, and put it and both policies into the folder."""
    import torch

    from alight.networks.architectures import ResNet
    from alight.networks.zoo import CIFAR

    torch.manual_seed(0)
    backbone = ResNet(CLASSES, widths=WIDTHS)
    model = attach_heads(backbone, EXITS, example=torch.zeros(1, 3, 32, 32), normalisation=CIFAR)
    images, labels = pictures(data, "train")
    settings = TrainingSettings(mode="joint", epochs=EPOCHS, learning_rate=2e-3, schedule="onecycle", weight_decay=0.05)
    train_heads(model, (images[CALIBRATION:], labels[CALIBRATION:]), settings, batch_size=128, progress=False)
    save_model(model, folder / "model")
    labelled = record(model, (images[:CALIBRATION], labels[:CALIBRATION]), progress=False)
    write_policies(labelled, measure_costs(model, torch.zeros(1, 3, 32, 32)), folder)


def bodies(images: np.ndarray) -> list[bytes]:
    """One request for each picture, as JSON with a large JPEG in base64."""
    made = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image.transpose(1, 2, 0)).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(
            file, "JPEG", quality=90
        )
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
    parser.add_argument("data", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="where network and policies are kept")
    parser.add_argument("--prepare", action="store_true", help="train the network, and nothing else")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "results/serve_pictures.csv")
    options = parser.parse_args()
    if options.prepare:
        prepare(options.data, options.folder)
        return
    folder = options.folder
    full = load_policy(folder / "dense.json").costs[0]
    images, labels = pictures(options.data, "test")
    order = np.random.default_rng(options.seed).permutation(len(labels))
    os.sched_setaffinity(0, {CLIENT_CORE})
    arguments = ["--batch-size", str(BATCH), "--queue", str(QUEUE), "--timeout", str(TIMEOUT), "--no-state"]
    network, policies = folder / "model", [folder / f"{name}.json" for name in ("dense", "early")]
    with (
        served(network, policies[0], *arguments, core=SERVER_CORE) as dense,
        served(network, policies[1], *arguments, core=SERVER_CORE) as early,
    ):
        ports = {"dense": dense.port, "early": early.port}
        rows = asyncio.run(run(ports, images[order], labels[order], full, options))
    made = provenance("numpy", "torch", "fastapi", "uvicorn", "pillow", folder=ROOT)
    fixed = {"batch_size": BATCH, "timeout": TIMEOUT, "seconds": options.seconds, "seed": options.seed}
    before = [row for row in kept(options.output) if row["seed"] != str(options.seed)]
    write_rows(options.output, [*before, *(each | fixed | made for each in rows)])


if __name__ == "__main__":
    main()
