"""What a recording takes beside one pass of the plain network over the same batches, on this machine.

    python benchmarks/recording.py --device cpu  --models resnet18_cifar,minilm --batch-sizes 64 --images 512
    python benchmarks/recording.py --device cuda --models resnet50,convnext_tiny --batch-sizes 256 --sources device,host

Random weights. `ratio` is the recording's time over the plain network's, taken by turns, median and quartiles;
`at_most` is what we aim at: 1.1 times the plain network, and the heads' own share, each head timed in the same run.
Recorded are margins and classes, into `memory` or straight to the `disk`, there also with `logs`, the logarithms of all
chances. Batches lie where the network runs (`device`), or on the `host`, from where both bring them. Writes
results/recording_<device>.csv.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runtime import ROOT, ROUNDS, Row, clocked, network, random_inputs

from alight.costing.measure import head_overhead, time_stages
from alight.engine.prepare import as_dtype, placed, prepared
from alight.engine.recorder import record, record_to
from alight.files import write_rows
from alight.networks.attach import attach_heads
from alight.networks.multi_exit import MultiExitModel
from alight.provenance import provenance

AT_MOST = 1.1  # times the plain network, beside the heads
DRAWN = 4  # batches that are drawn, and come again and again


def batches(example: Any, count: int, batch_size: int, settings: dict[str, Any], source: str) -> list[Any]:
    """So many labelled batches as a loader gives them."""
    here = settings if source == "device" else {**settings, "device": "cpu", "dtype": "fp32", "channels_last": False}
    inputs = random_inputs(example, min(count, DRAWN) * batch_size, here)
    labels = torch.zeros(len(inputs[0]), dtype=torch.long)
    names = [*example] if isinstance(example, dict) else []
    made: list[Any] = []
    for start in range(0, len(labels), batch_size):
        parts = [each[start : start + batch_size] for each in (*inputs, labels)]
        made.append(dict(zip([*names, "labels"], parts, strict=True)) if names else tuple(parts))
    return [made[index % len(made)] for index in range(count)]


def dense_pass(dense: Any, loader: list[Any], settings: dict[str, Any]) -> None:
    """All batches through the plain network."""
    device, kind, last = torch.device(settings["device"]), as_dtype(settings["dtype"]), settings["channels_last"]
    with torch.inference_mode():
        for batch in loader:
            if isinstance(batch, dict):
                *names, _ = batch
                dense(**dict(zip(names, placed(tuple(batch[name] for name in names), device, kind, last), strict=True)))
            else:
                dense(*placed(batch[:-1], device, kind, last))


def recordings(
    model: MultiExitModel, loader: list[Any], settings: dict[str, Any], folder: str
) -> dict[str, Callable[[], object]]:
    """The ways to record, by name."""
    given: dict[str, Any] = {"model": model, "loader": loader, "progress": False, **settings}
    disk = partial(record_to, Path(folder) / "table.npz", **given)
    return {"memory": partial(record, **given), "disk": disk, "disk, logs": partial(disk, log_probabilities=True)}


def measure(options: argparse.Namespace, name: str, batch_size: int, source: str) -> Iterator[Row]:
    torch.manual_seed(0)
    plain, example = network(name)
    settings: dict[str, Any] = {
        "device": options.device,
        "dtype": options.dtype,
        "channels_last": options.channels_last,
    }
    model = prepared(attach_heads(plain, after="auto", count=options.exits, example=example), **settings)
    dense: Any = plain.to(device=options.device, dtype=as_dtype(options.dtype))
    dense = dense.to(memory_format=torch.channels_last) if options.channels_last else dense
    loader = batches(example, -(-options.images // batch_size), batch_size, settings, source)
    heads = head_overhead(time_stages(model, example, batch_size).costs())
    with tempfile.TemporaryDirectory() as folder:
        ways = recordings(model, loader, settings, folder)
        runs: list[Callable[[], object]] = [partial(dense_pass, dense, loader, settings), *ways.values()]
        rounds = np.array([[clocked(run, options.device) for run in runs] for _ in range(ROUNDS + 1)])[1:]
    images = len(loader) * batch_size
    for way, seconds in zip(ways, rounds[:, 1:].T, strict=True):
        low, middle, high = np.quantile(seconds / rounds[:, 0], [0.25, 0.5, 0.75]).tolist()
        yield {
            "device": options.device_name,
            "model": name,
            "exits": options.exits,
            "batch_size": batch_size,
            "mode": "eager",
            "dtype": options.dtype,
            "source": source,
            "kept": way,
            "images": images,
            "dense_per_second": images / float(np.median(rounds[:, 0])),
            "per_second": images / float(np.median(seconds)),
            "ratio": middle,
            "ratio_low": low,
            "ratio_high": high,
            "heads_share": heads,
            "at_most": AT_MOST + heads,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", default="resnet18_cifar")
    parser.add_argument("--exits", type=int, default=4, help="auxiliary exits")
    parser.add_argument("--batch-sizes", default="64")
    parser.add_argument("--sources", default="device", help="device, host")
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    options.dtype = options.dtype or ("bf16" if on_gpu else "fp32")
    options.channels_last = on_gpu
    options.device_name = torch.cuda.get_device_name() if on_gpu else "cpu"
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.backends.cudnn.benchmark = on_gpu
    made = provenance("numpy", "torch", "torchvision", "timm", folder=ROOT) | {"threads": str(torch.get_num_threads())}
    rows: list[Row] = []
    for name in options.models.split(","):
        for batch_size in map(int, options.batch_sizes.split(",")):
            for source in options.sources.split(","):
                for row in measure(options, name, batch_size, source):
                    rows.append({**row, **made})
                    print(
                        f"{name}, batch {batch_size} on the {source}, {row['kept']}: {row['ratio']:.3f} times the"
                        f" plain network ({row['ratio_low']:.3f} to {row['ratio_high']:.3f}), at most"
                        f" {row['at_most']:.3f}; {row['per_second']:.0f}/s",
                        flush=True,
                    )
                write_rows(options.output or ROOT / f"results/recording_{options.device}.csv", rows)


if __name__ == "__main__":
    main()
