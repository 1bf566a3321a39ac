"""Which networks can be cut: one of every family in timm and torchvision, at three places, compared bit by bit.

    python benchmarks/cut_coverage.py              # writes results/cut_coverage.csv, 25 minutes on two busy cores
    python benchmarks/cut_coverage.py timm/vgg     # tries some families again and replaces their rows

A family is a module of `timm.models` or `torchvision.models` that defines classifiers; the one with the fewest weights
times pixels represents it, with random weights at its own input size. The largest are made smaller: images of 224
pixels instead of more than 331, eight blocks instead of more than 150 million weights. The places are those of
`suggest_exits`. The chain of stages must give the network's output bit by bit, for batches of 1 and 5, and so must
stages that were rebuilt from their saved graphs. Every family runs in a process of its own, with one thread and a time
limit.

Measured: 114 of 114 families (97 of timm 1.0.30, 17 of torchvision 0.29.2) on torch 2.15.0.
"""

import csv
import json
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision

from alight.cutting.placement import cut_evenly
from alight.cutting.stages import cut_data, stages_from_data
from alight.files import write_rows
from alight.provenance import provenance

RESULTS = Path(__file__).parent.parent / "results" / "cut_coverage.csv"
AT_LEAST = 0.95
SECONDS = 600.0  # time limit of a family
WORKERS = 2
MOST_PIXELS = 331  # along a side
MOST_WEIGHTS = 150e6


@dataclass(frozen=True)
class Row:
    """The result for one family."""

    family: str
    model: str
    library: str
    places: str
    ok: bool
    reason: str
    seconds: float


def families() -> Iterator[str]:
    """Yield all families as library/module."""
    yield from (f"timm/{module}" for module in timm.list_modules() if timm.list_models(module=module))
    yield from sorted({f"torchvision/{_module_of(name)}" for name in _torchvision_names()})


def _torchvision_names() -> list[str]:
    return torchvision.models.list_models(module=torchvision.models)


def _module_of(name: str) -> str:
    return torchvision.models.get_model_builder(name).__module__.rpartition(".")[2]


def smallest(family: str) -> tuple[str, tuple[int, ...], dict[str, Any]]:
    """Return the network with the fewest weights times pixels of a family, its input size, and how to build it."""
    library, module = family.split("/")
    if library == "torchvision":
        names = [name for name in _torchvision_names() if _module_of(name) == module]
        known = {name: next(iter(torchvision.models.get_model_weights(name))).meta for name in names}
        best = min(names, key=lambda name: known[name]["num_params"])
        return best, (3, 299, 299) if module == "inception" else (3, 224, 224), {}
    names = timm.list_models(module=module)
    names = [name for name in names if not name.startswith("test_")] or names  # test networks represent nothing
    weights = {name: weights_of(name) for name in names}
    best = min(names, key=lambda name: weights[name] * input_size(name)[1] ** 2)
    size = input_size(best)
    return (
        best,
        size if size[1] <= MOST_PIXELS else (3, 224, 224),
        {"depth": 8} if MOST_WEIGHTS < weights[best] < float("inf") else {},
    )


def input_size(name: str) -> tuple[int, ...]:
    """Return channels, height and width of the images that a network of timm takes."""
    known = timm.get_pretrained_cfg(name)
    return tuple(known.input_size) if known else (3, 224, 224)


def weights_of(name: str) -> float:
    """Return the number of weights of a network of timm; infinity if it cannot be built without data."""
    try:
        with torch.device("meta"):
            return sum(weight.numel() for weight in timm.create_model(name).parameters())
    except Exception:
        return float("inf")


def try_family(family: str) -> Row:
    """Cut one family and compare the chain with the network."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    library, name = family.split("/")
    places: list[str] = []
    start = time.perf_counter()
    try:
        name, size, settings = smallest(family)
        create = timm.create_model if library == "timm" else torchvision.models.get_model
        start = time.perf_counter()
        model = create(name, **settings).eval()
        name = f"{name} {settings or ''}".strip()
        example = torch.randn(1, *size)
        places, stages = cut_evenly(model, example, count=3)
        problem = difference(model, stages, size) or difference(model, rebuilt(model, stages), size)
    except Exception as error:  # the reason of the row
        problem = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    return Row(family.split("/")[1], name, library, " ".join(places), not problem, problem, round(seconds, 1))


@torch.no_grad()
def difference(model: torch.nn.Module, stages: list[torch.nn.Module], size: tuple[int, ...]) -> str:
    """Return where the chain of stages differs from the network; an empty text if it does not."""
    for samples in (1, 5):
        batch = torch.randn(samples, *size)
        carried: Any = (batch,)
        for stage in stages:
            carried = stage(*carried)
        expected = model(batch)
        if not torch.equal(carried, expected):
            return f"batch of {samples}: differs by {(carried - expected).abs().max():.2g}"
    return ""


def rebuilt(model: torch.nn.Module, stages: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the stages as they come back from a saved model."""
    data, constants = cut_data(stages)
    again = stages_from_data(model, json.loads(json.dumps(data)), constants, (), None)
    return [stage.eval() for stage in again]


def in_processes(names: list[str]) -> Iterator[Row]:
    """Yield the result of each family, each in a process of its own with a time limit."""
    fork = multiprocessing.get_context("fork")  # so that the libraries are loaded once
    waiting, running = list(reversed(names)), list[tuple[str, Any, Any, float]]()
    while waiting or running:
        while waiting and len(running) < WORKERS:
            family = waiting.pop()
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=send_result, args=(family, theirs))
            process.start()
            theirs.close()
            running.append((family, process, ours, time.monotonic() + SECONDS))
        for each in list(running):
            family, process, pipe, deadline = each
            if pipe.poll(0.1) or time.monotonic() > deadline:
                running.remove(each)
                yield outcome(family, process, pipe)


def send_result(family: str, pipe: Any) -> None:
    pipe.send(try_family(family))


def outcome(family: str, process: Any, pipe: Any) -> Row:
    library, module = family.split("/")
    try:
        row = pipe.recv() if pipe.poll() else Row(module, "", library, "", False, f"took over {SECONDS:g} s", SECONDS)
    except EOFError:
        row = Row(module, "", library, "", False, "its process crashed", 0.0)
    process.kill()
    process.join()
    print(f"{family}: {row.model} {row.places} {'ok' if row.ok else row.reason} ({row.seconds:g} s)", flush=True)
    return row


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    made = provenance("torch", "torchvision", "timm", folder=RESULTS.parent)
    tries: dict[str, dict[str, Any]] = {
        f"{row.library}/{row.family}": asdict(row) | {"seconds": f"{row.seconds:g}"} | made
        for row in in_processes(names or list(families()))
    }
    if names and RESULTS.exists():
        with RESULTS.open(newline="") as file:
            tries = {f"{row['library']}/{row['family']}": row for row in csv.DictReader(file)} | tries
    rows = [tries[family] for family in sorted(tries)]
    write_rows(RESULTS, rows)
    cut = sum(str(row["ok"]) == "True" for row in rows)
    print(f"{cut} of {len(rows)} families ({cut / len(rows):.1%}) cut at three places, bit by bit")
    return int(cut < AT_LEAST * len(rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
