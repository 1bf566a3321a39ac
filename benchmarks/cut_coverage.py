"""Which networks can be cut: one of every family in timm and torchvision, at three places, compared bit by bit.

    python benchmarks/cut_coverage.py              # writes results/cut_coverage.csv, half an hour on two cores
    python benchmarks/cut_coverage.py timm/vgg     # prints one family

A family is a module of `timm.models` or `torchvision.models` that defines classifiers; the one with the fewest weights
times pixels stands for it, with random weights at its own input size. The places are those of `suggest_exits`. The
output of the chain of stages must have the very bits of the network's, for batches of 1 and 5. Every family runs in a
process of its own, with one thread and a limit on its time.
"""

import csv
import io
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision

from alight.files import write_text
from alight.models.cut import cut
from alight.models.places import suggest_exits
from alight.provenance import provenance

RESULTS = Path(__file__).parent.parent / "results" / "cut_coverage.csv"
AT_LEAST = 0.95
SECONDS = 600.0  # that a family may take
WORKERS = 2


@dataclass(frozen=True)
class Row:
    """What became of one family."""

    family: str
    model: str
    library: str
    places: str
    ok: bool
    reason: str
    seconds: float


def families() -> Iterator[str]:
    """All families as library/module."""
    yield from (f"timm/{module}" for module in timm.list_modules() if timm.list_models(module=module))
    yield from sorted({f"torchvision/{_module_of(name)}" for name in _torchvision_names()})


def _torchvision_names() -> list[str]:
    return torchvision.models.list_models(module=torchvision.models)


def _module_of(name: str) -> str:
    return torchvision.models.get_model_builder(name).__module__.rpartition(".")[2]


def smallest(family: str) -> tuple[str, tuple[int, ...]]:
    """The network with the fewest weights times pixels of a family, and the size of its input."""
    library, module = family.split("/")
    if library == "torchvision":
        names = [name for name in _torchvision_names() if _module_of(name) == module]
        best = min(names, key=lambda name: weights_of(torchvision.models.get_model, name))
        return best, (3, 299, 299) if module == "inception" else (3, 224, 224)
    names = timm.list_models(module=module)
    names = [name for name in names if not name.startswith("test_")] or names  # toys stand for nothing
    sizes = {name: input_size(name) for name in names}
    best = min(sizes, key=lambda name: weights_of(timm.create_model, name) * sizes[name][1] * sizes[name][2])
    return best, sizes[best]


def input_size(name: str) -> tuple[int, ...]:
    """Channels, height and width of the images that a network of timm takes."""
    known = timm.get_pretrained_cfg(name)
    return tuple(known.input_size) if known else (3, 224, 224)


def weights_of(create: Any, name: str) -> float:
    """How many weights a network has; infinitely many if it cannot be built without data."""
    try:
        with torch.device("meta"):
            return sum(weight.numel() for weight in create(name).parameters())
    except Exception:
        return float("inf")


def tried(family: str) -> Row:
    """What becomes of a family."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    library, name = family.split("/")
    places: list[str] = []
    start = time.perf_counter()
    try:
        name, size = smallest(family)
        create = timm.create_model if library == "timm" else torchvision.models.get_model
        start = time.perf_counter()
        model = create(name).eval()
        example = torch.randn(1, *size)
        places = suggest_exits(model, example, count=3)
        problem = difference(model, cut(model, places, example), size)
    except Exception as error:  # whatever stops it is the reason
        problem = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    return Row(family.split("/")[1], name, library, " ".join(places), not problem, problem, round(seconds, 1))


@torch.no_grad()
def difference(model: torch.nn.Module, stages: list[torch.nn.Module], size: tuple[int, ...]) -> str:
    """Where the chain of stages is not the network; nothing if it is."""
    for samples in (1, 5):
        batch = torch.randn(samples, *size)
        carried: Any = (batch,)
        for stage in stages:
            carried = stage(*carried)
        expected = model(batch)
        if not torch.equal(carried, expected):
            return f"batch of {samples}: differs by {(carried - expected).abs().max():.2g}"
    return ""


def in_process(family: str) -> Row:
    """What becomes of a family in a process of its own, which may take so long and no longer."""
    library, module = family.split("/")
    try:
        told = subprocess.run(
            [sys.executable, __file__, family], capture_output=True, text=True, timeout=SECONDS, check=True
        )
        row = Row(**json.loads(told.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        row = Row(module, "", library, "", False, f"took longer than {SECONDS:g} s", SECONDS)
    except subprocess.CalledProcessError as error:
        row = Row(module, "", library, "", False, f"process ended with {error.returncode}", 0.0)
    print(f"{family}: {row.model} {row.places or ''} {'ok' if row.ok else row.reason}", flush=True)
    return row


def main() -> int:
    with ThreadPoolExecutor(WORKERS) as pool:
        rows = list(pool.map(in_process, families()))
    made = provenance("torch", "torchvision", "timm", folder=RESULTS.parent)
    text = io.StringIO()
    table = [asdict(row) | made for row in rows]
    writer = csv.DictWriter(text, table[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    write_text(RESULTS, text.getvalue())
    share = sum(row.ok for row in rows) / len(rows)
    print(f"{sum(row.ok for row in rows)} of {len(rows)} families ({share:.1%}) cut at three places, bit by bit")
    return int(share < AT_LEAST)


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(asdict(tried(sys.argv[1]))))
    else:
        sys.exit(main())
