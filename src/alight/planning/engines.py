"""Exported stages on the clock: what each stage and each head takes, on the engine that runs them."""

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from alight.costs import Costs
from alight.engine.backends import Reads, State
from alight.engine.backends.exported import exported_backend
from alight.engine.manifest import Manifest
from alight.engine.settings import RunSettings
from alight.export.precision import without_heads

SECONDS = 1.0  # of the measurement at least
LEAST_PASSES, RUN = 16, 5  # walks through all stages that count, with and without heads; in runs of so many


def exported_costs(folder: Path, inputs: State, batch_size: int, settings: RunSettings | None = None) -> Costs:
    """Return milliseconds per sample of every stage and head of an exported folder, at this batch size.

    A stage is timed with its head and the score, and without them, interleaved; a head's cost is the difference.
    """
    settings = settings or RunSettings()
    manifest = Manifest.load(folder)
    terms: dict[str, Any] = {"allow_mismatch": True, "allow_compiled": True}
    backend = exported_backend(folder, manifest, settings, **terms)
    margins = [Reads(("margin",))] * (len(manifest.stages) - 1)
    backend = backend.with_reads([*margins, Reads(())])
    with tempfile.TemporaryDirectory() as temporary:
        trunk_folder = without_heads(folder, Path(temporary) / "stages")
        trunks = exported_backend(trunk_folder, Manifest.load(trunk_folder), settings, **terms).stages
        rows = np.arange(batch_size) % len(inputs[0])
        given = backend.admit(tuple(each[rows] for each in inputs))
        alone = batch_size == 1
        run = backend.run_one if alone else backend.run
        whole = [partial(run, stage) for stage in range(len(trunks))]
        bare = [_states_of(trunk, alone) for trunk in trunks]
        times: dict[bool, list[list[float]]] = {True: [], False: []}
        begin = time.perf_counter()
        while len(times[False]) < LEAST_PASSES or time.perf_counter() - begin < SECONDS:
            for has_heads, stages in ((True, whole), (False, bare)):
                walks = [_walk(stages, given) for _ in range(RUN)]  # several, so that caches hold what they would
                times[has_heads] += walks[1:]
    together, without = (1e3 * np.median(times[each], axis=0) / batch_size for each in (True, False))
    without[-1] = together[-1]  # the last head is part of the full network
    return Costs(without, np.maximum(together - without, 0.0), "ms")


def _states_of(trunk: Any, alone: bool) -> Callable[[State], tuple[None, State]]:
    """Return a stage that gives states alone, called as one that gives head values, too."""
    run = getattr(trunk, "run_one", trunk) if alone else trunk

    def called(state: State) -> tuple[None, State]:
        made, others = run(state)
        return None, (made, *others)

    return called


def _walk(stages: Sequence[Callable[[State], tuple[Any, State]]], state: State) -> list[float]:
    """Return the seconds of every stage in one walk."""
    taken = []
    for stage in stages:
        start = time.perf_counter()
        _, state = stage(state)
        taken.append(time.perf_counter() - start)
    return taken
