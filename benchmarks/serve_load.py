"""A dense service and one with early exits under the same open-loop load, on this machine.

    python benchmarks/serve_load.py STATE DATA                      # 6 minutes on two idle cores
    python benchmarks/serve_load.py STATE DATA --load pictures      # 4 minutes

STATE holds results of experiments/cifar100_train.py, DATA is CIFAR-100 (see experiments/cifar100_data.py). Both
services run the same ResNet-18 (mixed, distilled), one to its last exit, the other under the cheapest policy of a
stream that by 1,000 calibration images loses at most a point of accuracy, with 95 % confidence. The servers share one
core with one thread each, and one works at a time; the client has the other core. The capacity of the dense service is
what it answers when it always has work; both are then sent 50, 80, 100 and 120 % of it, interleaved, the same test
images at the same random moments. Latency counts from the moment a request was due; goodput counts answers within the
timeout. Other seeds are kept in the file of results.

The load of images (results/serve_load.csv) sends PNGs of 32 x 32 and refuses nothing, so that queues are seen. The load
of pictures (results/serve_pictures.csv) sends JPEGs of 160 x 160, which the service decodes and resizes, to services
with a timeout of two seconds, which refuse what they could not answer in time.

With --folder, network and policies are kept there and used again, so that nothing but the load has to be run alone.
"""

import argparse
import asyncio
import base64
import csv
import io
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from open_loop import Client, Reply, closed_loop, open_loop
from PIL import Image
from service_process import served

from alight import Costs, HeadOutputs, Policy, calibrate, load_policy, replay
from alight.files import write_rows
from alight.policies.policy import ExitAt
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
LOADS = (0.5, 0.8, 1.0, 1.2)  # of the dense service's capacity
BATCH = 16
SERVER_CORE, CLIENT_CORE = 0, 1
LOSS = 0.01  # of accuracy on new images, at most
BUDGETS = range(70, 16, -2)  # in percent of the full network
Row = dict[str, str | float | int]


@dataclass(frozen=True)
class Load:
    """What is sent, and what services do with what comes too fast."""

    output: str
    side: int  # pixels
    format: str
    images: int  # that are sent in turn
    queue: int  # samples that may wait
    timeout: float  # seconds


KINDS = {
    "images": Load("serve_load.csv", side=32, format="PNG", images=4000, queue=2048, timeout=120.0),
    "pictures": Load("serve_pictures.csv", side=160, format="JPEG", images=2000, queue=512, timeout=2.0),
}


def prepare(state: Path, data: Path, folder: Path) -> None:
    """Put the network and both policies into the folder."""
    import torch

    sys.path.insert(0, str(ROOT / "experiments"))
    from cifar100_data import Batches, read
    from cifar100_train import Job, load_result

    from alight import measure_costs, record, save_model
    from alight.networks.zoo import CIFAR

    torch.set_num_threads(2)
    model = load_result(Job("resnet18_mixed_distilled"), state).eval()
    save_model(model, folder / "model")
    loader = [*Batches(read(data, 0, 1000).calibration, CIFAR, 250)]
    labelled, costs = record(model, loader, progress=False), measure_costs(model, loader[0][0][:1])
    write_policies(labelled, costs, folder)


def write_policies(labelled: HeadOutputs, costs: Costs, folder: Path) -> None:
    """The dense policy, and the cheapest of a stream that loses little on the labelled table."""
    assert labelled.labels is not None  # as recorded
    last = labelled.num_exits - 1
    ExitAt(
        costs=(costs.full,),
        open_exits=(last,),
        num_exits=last + 1,
        budget=costs.full,
        unit=costs.unit,
        method="dense",
        fingerprint=labelled.fingerprint,
    ).save(folder / "dense.json")
    chosen = None
    for percent in BUDGETS:  # from the most expensive on, until one loses too much
        policy = calibrate.certified_stream(calibrate.eero, seed=0)(costs, f"{percent}%", labelled)
        if most_lost(policy, labelled) > LOSS:
            break
        chosen, policy_percent = policy, percent
    if chosen is None:
        raise SystemExit(
            f"no budget up to {BUDGETS[0]}% loses less than {LOSS:g} with 95 % confidence: give more images"
        )
    chosen.save(folder / "early.json")
    print(f"a budget of {policy_percent}% of the full network", flush=True)


def most_lost(policy: Policy, labelled: HeadOutputs) -> float:
    """Accuracy that is lost against the last exit at most, with 95 % confidence."""
    found = replay(policy, labelled, batch_size=BATCH).predictions == labelled.labels
    lost = (labelled.predictions[:, -1] == labelled.labels).astype(float) - found
    return float(lost.mean() + 1.645 * lost.std() / np.sqrt(len(lost)))


def bodies(images: np.ndarray, kind: Load) -> list[bytes]:
    """One request for each image, as JSON with a file in base64."""
    made = []
    for image in map(Image.fromarray, images):
        file = io.BytesIO()
        image.resize((kind.side, kind.side), Image.Resampling.BICUBIC).save(file, kind.format, quality=90)
        made.append(b'{"images":["' + base64.b64encode(file.getvalue()) + b'"]}')
    return made


def row(replies: Sequence[Reply], labels: np.ndarray, full: float, rate: float, timeout: float) -> Row:
    """Goodput, latencies, refusals, accuracy and spend of one load."""
    answered = [(reply, label) for reply, label in zip(replies, labels.tolist(), strict=True) if reply.status == 200]
    seconds = np.array([reply.seconds for reply, _ in answered])
    predictions = [reply.content["predictions"][0] for reply, _ in answered]
    statuses = [reply.status for reply in replies]
    correct = [each["index"] == label for each, (_, label) in zip(predictions, answered, strict=True)]
    return {
        "requests": len(replies),
        "goodput": float((seconds <= timeout).sum() / len(replies) * rate),
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
    ports: dict[str, int], requests: Sequence[bytes], labels: np.ndarray, full: float, options: argparse.Namespace
) -> list[Row]:
    """The rows of all loads, each sent to one service after the other."""
    clients = {name: Client("127.0.0.1", port) for name, port in ports.items()}
    for client in clients.values():
        await closed_loop(client, "/predict", requests, 4, 2.0)  # warm
    capacities = {
        name: await closed_loop(client, "/predict", requests, 2 * BATCH, options.seconds / 2)
        for name, client in clients.items()
    }
    print("capacity: " + ", ".join(f"{name} {each:.1f}/s" for name, each in capacities.items()), flush=True)
    rows: list[Row] = []
    for place, load in enumerate(LOADS):
        rate = load * capacities["dense"]
        chosen = np.arange(int(rate * options.seconds)) % len(requests)
        sent = [requests[index] for index in chosen.tolist()]
        for name, client in clients.items():
            replies = await open_loop(client, "/predict", sent, rate, 10 * options.seed + place)
            measured = row(replies, labels[chosen], full, rate, KINDS[options.load].timeout)
            rows.append({"service": name, "load": load, "rate": rate, **measured, "capacity": capacities[name]})
            print({key: round(value, 3) if isinstance(value, float) else value for key, value in rows[-1].items()})
    for client in clients.values():
        client.close()
    return rows


def kept(path: Path) -> list[Row]:
    """The rows of a file that may be there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [dict(row) for row in csv.DictReader(file)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--load", choices=KINDS, default="images")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where network and policies are kept, to be used again")
    parser.add_argument("--output", type=Path, help="by default the file of the load, in results/")
    options = parser.parse_args()
    kind = KINDS[options.load]
    output = options.output or ROOT / "results" / kind.output
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        if not (folder / "early.json").exists():
            prepare(options.state, options.data, folder)
        full = load_policy(folder / "dense.json").costs[0]
        with np.load(options.data / "test.npz") as file:
            order = np.random.default_rng(options.seed).permutation(len(file["labels"]))[: kind.images]
            requests, labels = bodies(file["images"][order], kind), file["labels"][order]
        os.sched_setaffinity(0, {CLIENT_CORE})
        arguments = ["--batch-size", BATCH, "--queue", kind.queue, "--timeout", kind.timeout, "--no-state"]
        network, policies = folder / "model", [folder / f"{name}.json" for name in ("dense", "early")]
        with (
            served(network, policies[0], *map(str, arguments), core=SERVER_CORE) as dense,
            served(network, policies[1], *map(str, arguments), core=SERVER_CORE) as early,
        ):
            rows = asyncio.run(run({"dense": dense.port, "early": early.port}, requests, labels, full, options))
    made = provenance("numpy", "torch", "fastapi", "uvicorn", "pillow", folder=ROOT)
    fixed = {"batch_size": BATCH, "timeout": kind.timeout, "seconds": options.seconds, "seed": options.seed}
    before = [row for row in kept(output) if row["seed"] != str(options.seed)]
    write_rows(output, [*before, *(each | fixed | made for each in rows)])


if __name__ == "__main__":
    main()
