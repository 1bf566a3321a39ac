"""What stages that were compiled ahead of time take to make, decide, and gain beside eager PyTorch, on this machine.

    python benchmarks/compiled.py WORK --networks STATE --images test.npz --texts FOLDER    # exports: 15 minutes
    python benchmarks/compiled.py WORK                                                      # decides and times: 4

Networks, policies and samples are those of experiments/same_decisions.py: a trained ResNet-18 on CIFAR-100 images, and
MiniLM with trained heads on texts of several lengths, with their masks. Each is exported twice, as packages of
AOTInductor and as ONNX, which is timed and kept in WORK. Then 500 samples are decided by each and by a `Predictor` in
eager PyTorch; a decision that differs is near where a score lies within 1e-5 of its threshold. `speedup` is the time of
eager PyTorch under the same policy over that of the exported stages, interleaved, median and quartiles over rounds.
The second command writes results/compiled_cpu.csv.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alight import Policy, Predictor, RunSettings, export_model, load_policy, record
from alight.data.batches import as_inputs, as_tensor
from alight.engine.manifest import AOTI, ONNX
from alight.files import write_rows, write_text
from alight.networks.multi_exit import MultiExitModel
from alight.networks.store import load_model, save_model
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
SAMPLES = 500
ROUNDS = 7
ROUND = {1: 64, 32: SAMPLES}  # samples of a round, by batch size
FORMATS = (AOTI, ONNX)
SECONDS = "seconds.json"  # that exporting took, by format
Row = dict[str, str | float | int]
Batch = tuple[torch.Tensor, ...]  # as the network takes them


def prepare(options: argparse.Namespace) -> None:
    """Put networks, policies and samples into the folder, and export them."""
    sys.path.insert(0, str(ROOT / "experiments"))
    from same_decisions import images, texts

    cases = {
        "resnet18, CIFAR-100": partial(images, options.networks, options.images),
        "minilm, banking77": partial(texts, options.texts),
    }
    for name, make in cases.items():
        folder = options.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "model").exists():
            case = make(folder, count=SAMPLES)
            case.policy.save(folder / "policy.json")
            inputs = [as_inputs(batch, case.model.input_spec) for batch in case.batches]
            torch.save([tuple(map(as_tensor, batch)) for batch in inputs], folder / "batches.pt")
            save_model(case.model, folder / "model")
        export(folder)


def export(folder: Path) -> None:
    """Export a network in every format, and write down how long that took."""
    model, policy, _ = kept(folder)
    seconds: dict[str, float] = {}
    for form in FORMATS:
        begin = time.perf_counter()
        export_model(model, policy, folder / form, format=form, progress=True)
        seconds[form] = time.perf_counter() - begin
        print(f"{folder.name}, {form}: {seconds[form]:.0f} s", flush=True)
    write_text(folder / SECONDS, json.dumps(seconds))


def kept(folder: Path) -> tuple[MultiExitModel, Policy, list[Batch]]:
    """Return a network, its policy and its samples in batches."""
    return load_model(folder / "model").eval(), load_policy(folder / "policy.json"), torch.load(folder / "batches.pt")


def as_arrays(batch: Batch) -> tuple[np.ndarray, ...]:
    return tuple(each.numpy() for each in batch)


def in_sizes(batches: Sequence[Batch], size: int) -> list[Batch]:
    """Return the samples of a round in batches of a size; texts keep the length that they were padded to."""
    cut: list[Batch] = []
    for batch in batches:
        cut += [tuple(each[start : start + size] for each in batch) for start in range(0, len(batch[0]), size)]
    return cut[: ROUND[size] // size + 1]


def differing(truth: Any, other: Any, near: np.ndarray) -> Row:
    """Return how many decisions differ."""
    labels, exits = truth.predictions != other.predictions, truth.exits != other.exits
    return {
        "samples": len(truth),
        "exits_taken": len({*truth.exits.tolist()}),
        "other_labels": int(labels.sum()),
        "other_exits": int(exits.sum()),
        "near": int(((labels | exits) & near).sum()),
    }


def timed(decide: Callable[[Any], object], batches: Sequence[Any]) -> float:
    start = time.perf_counter()
    for batch in batches:
        decide(batch)
    return time.perf_counter() - start


def compare(folder: Path, threads: int) -> Iterator[Row]:
    """Yield a row for every format and batch size."""
    sys.path.insert(0, str(ROOT / "experiments"))
    from same_decisions import near_a_threshold

    model, policy, batches = kept(folder)
    settings = RunSettings(threads=threads)
    eager = Predictor(model, policy, settings=settings)
    engines = {form: Predictor.load(folder / form, settings=settings, allow_compiled=True) for form in FORMATS}
    seconds = json.loads((folder / SECONDS).read_text())
    truth, near = eager.run(batches, progress=False), near_a_threshold(policy, record(model, batches, progress=False))
    same = {
        form: differing(truth, each.run([*map(as_arrays, batches)], progress=False), near)
        for form, each in engines.items()
    }
    for size in ROUND:
        tensors = in_sizes(batches, size)
        arrays = [as_arrays(batch) for batch in tensors]
        total = sum(len(batch[0]) for batch in arrays)
        turns = [
            [timed(eager, tensors), *(timed(each, arrays) for each in engines.values())] for _ in range(ROUNDS + 1)
        ]
        theirs, *ours = np.array(turns[1:]).T
        for form, own in zip(engines, ours, strict=True):
            low, middle, high = np.quantile(theirs / own, [0.25, 0.5, 0.75]).tolist()
            yield {
                "network": folder.name,
                "format": form,
                "stages": len(policy.open_exits),
                "export_seconds": seconds[form],
                "mib": sum(path.stat().st_size for path in (folder / form).iterdir()) / 2**20,
                **same[form],
                "batch_size": size,
                "eager_per_second": total / float(np.median(theirs)),
                "per_second": total / float(np.median(own)),
                "speedup": middle,
                "speedup_low": low,
                "speedup_high": high,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where all is kept between the two commands")
    parser.add_argument("--networks", type=Path, help="results of experiments/cifar100_train.py")
    parser.add_argument("--images", type=Path, help="test images of CIFAR-100, .npz")
    parser.add_argument("--texts", type=Path, help="folder of banking77's train.csv and test.csv")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.networks and options.images and options.texts:
        return prepare(options)
    made = provenance("torch", "onnxruntime", "transformers", "numpy", folder=ROOT) | {"threads": str(options.threads)}
    rows: list[Row] = []
    for folder in sorted(options.folder.iterdir(), reverse=True):
        for row in compare(folder, options.threads):
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            rows.append({**row, **made})
    write_rows(ROOT / "results/compiled_cpu.csv", rows)
    return None


if __name__ == "__main__":
    main()
