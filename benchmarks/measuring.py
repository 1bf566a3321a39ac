"""Measurements: medians with their spread, ratios of interleaved timings, written with the machine and versions."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from alight.files import write_rows
from alight.provenance import provenance

ROUNDS = 7


@dataclass(frozen=True)
class Measurement:
    """One figure, its spread over rounds, and what it may be at most."""

    what: str
    value: float
    low: float
    high: float
    at_most: float
    unit: str


def ratio(
    what: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    at_most: float,
    less: Callable[[], object] | None = None,
) -> Measurement:
    """Return the time of ours over theirs, interleaved; `less` is timed too and subtracted from both."""
    ours(), theirs()
    values = []
    for _ in range(ROUNDS):
        base = timed(less) if less else 0.0
        values.append((timed(ours) - base) / (timed(theirs) - base))
    return spread(what, values, at_most, "ratio")


def spread(what: str, values: list[float], at_most: float, unit: str) -> Measurement:
    return Measurement(what, float(np.median(values)), min(values), max(values), at_most, unit)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def report(measurements: Iterable[Measurement], path: Path) -> int:
    """Print all measurements, write them as CSV, and return the exit status: 1 if any exceeds its limit."""
    made = provenance("numpy", "scipy", folder=path.parent)
    rows, exceeded = [], False
    for each in measurements:
        verdict = "ok" if each.value <= each.at_most else "TOO MUCH"
        bounds = f"{each.low:.2f} to {each.high:.2f}; at most {each.at_most:g}"
        print(f"{each.what}: {each.value:.2f} {each.unit} ({bounds}) {verdict}", flush=True)
        cells = {name: f"{cell:.4g}" if isinstance(cell, float) else cell for name, cell in asdict(each).items()}
        rows.append(cells | made)
        exceeded |= each.value > each.at_most
    write_rows(path, rows)
    return int(exceeded)
