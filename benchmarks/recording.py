"""What a recording takes beside one pass of the full network over the same batches, on this machine.

    python benchmarks/recording.py --device cpu  --models resnet18_cifar,minilm --batch-sizes 64 --images 512
    python benchmarks/recording.py --device cuda --models resnet50,convnext_tiny --batch-sizes 256 --sources device,host

Random weights. `ratio` is the recording's time over the full network's, interleaved, median and quartiles; `at_most`
is the aim: 1.1 times the full network, and the heads' own share, each head timed in the same run. Margins and classes
are recorded into `memory` or straight to the `disk`, there also with the log-probabilities of `all classes`.
Batches lie where the network runs (`device`), or on the `host`, from where both copy them. Writes
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
from runtime import ROOT, ROUNDS, Row, clocked, device_parser, network, parsed, random_inputs, with_settings

from alight.costing.measure import head_overhead, time_stages
from alight.engine.backends.torch.prepare import placed, prepared
from alight.engine.recorder import Recorder, record
from alight.engine.settings import RunSettings
from alight.files import write_rows
from alight.networks.attach import attach_heads
from alight.networks.multi_exit import MultiExitModel
from alight.outputs import KEPT

AT_MOST = 1.1  # times the full network, beside the heads
DRAWN = 4  # batches that are drawn, and come again and again


def batches(example: Any, count: int, batch_size: int, settings: RunSettings, source: str) -> list[Any]:
    """Return so many labelled batches as a loader gives them."""
    here = settings if source == "device" else RunSettings("cpu", "fp32")
    inputs = random_inputs(example, min(count, DRAWN) * batch_size, here)
    labels = torch.zeros(len(inputs[0]), dtype=torch.long)
    names = [*example] if isinstance(example, dict) else []
    made: list[Any] = []
    for start in range(0, len(labels), batch_size):
        parts = [each[start : start + batch_size] for each in (*inputs, labels)]
        made.append(dict(zip([*names, "labels"], parts, strict=True)) if names else tuple(parts))
    return [made[index % len(made)] for index in range(count)]


def full_pass(full: Any, loader: list[Any], settings: RunSettings) -> None:
    """Run all batches through the full network."""
    device = torch.device(settings.device)
    with torch.inference_mode():
        for batch in loader:
            if isinstance(batch, dict):
                *names, _ = batch
                full(**dict(zip(names, placed(tuple(batch[name] for name in names), device, settings), strict=True)))
            else:
                full(*placed(batch[:-1], device, settings))


def recordings(
    model: MultiExitModel, loader: list[Any], settings: RunSettings, folder: str
) -> dict[str, Callable[[], object]]:
    """Return the ways to record, by name."""
    memory = partial(record, model, loader, settings=settings, progress=False)

    def disk(top: int = KEPT) -> None:
        Recorder(model, top=top, settings=settings).write(Path(folder) / "table.npz", loader, progress=False)

    return {"memory": memory, "disk": disk, "disk, all classes": partial(disk, top=10**6)}


def measure(options: argparse.Namespace, name: str, batch_size: int, source: str) -> Iterator[Row]:
    torch.manual_seed(0)
    backbone, example = network(name)
    settings: RunSettings = options.settings
    model = prepared(attach_heads(backbone, after=options.exits, example=example), settings)
    full = with_settings(backbone, settings)
    loader = batches(example, -(-options.images // batch_size), batch_size, settings, source)
    heads = head_overhead(time_stages(model, example, batch_size).costs())
    with tempfile.TemporaryDirectory() as folder:
        ways = recordings(model, loader, settings, folder)
        runs: list[Callable[[], object]] = [partial(full_pass, full, loader, settings), *ways.values()]
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
    parser = device_parser(__doc__)
    parser.add_argument("--exits", type=int, default=4, help="auxiliary exits")
    parser.add_argument("--sources", default="device", help="device, host")
    options, machine = parsed(parser)
    rows: list[Row] = []
    for name in options.models.split(","):
        for batch_size in map(int, options.batch_sizes.split(",")):
            for source in options.sources.split(","):
                for row in measure(options, name, batch_size, source):
                    rows.append({**row, **machine})
                    print(
                        f"{name}, batch {batch_size} on the {source}, {row['kept']}: {row['ratio']:.3f} times the"
                        f" full network ({row['ratio_low']:.3f} to {row['ratio_high']:.3f}), at most"
                        f" {row['at_most']:.3f}; {row['per_second']:.0f}/s",
                        flush=True,
                    )
                write_rows(options.output or ROOT / f"results/recording_{options.device}.csv", rows)


if __name__ == "__main__":
    main()
