"""How many CPU seconds the methods that search take for one budget; about a minute on two cores.

    python benchmarks/policies.py            # writes results/policies_speed.csv

- `search`, both stopping methods, `eero_conditional`, pruned `eero`, and `auto` on 5,000 x 8 recorded outputs at half
  the network; `auto` on 5,000 x 18, too
- how their time grows from 5,000 to 20,000 samples: 4 is linear
- `genetic` for comparison
"""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from measuring import Measurement, report, spread

from alight import HeadOutputs, calibrate, recordings
from alight.policies.policy import Policy

RESULTS = Path(__file__).parent.parent / "results" / "policies_speed.csv"
ROUNDS = 3
SECONDS: dict[str, tuple[Callable[..., Policy], float]] = {  # each with what it may take
    "search": (calibrate.search, 5.0),
    "optimal_stopping": (calibrate.optimal_stopping, 5.0),
    "learned_stopping": (calibrate.learned_stopping, 2.0),
    "eero_conditional": (calibrate.eero_conditional, 2.0),
    "pruned eero": (calibrate.pruned(calibrate.eero), 5.0),
    "auto": (calibrate.auto, 3.0),
    "genetic": (calibrate.genetic, 30.0),
}


def timed(work: Callable[[], object]) -> float:
    """Return the CPU seconds of the work, so that other work on the machine does not count."""
    start = time.process_time()
    work()
    return time.process_time() - start


def shuffled(table: HeadOutputs) -> Iterator[HeadOutputs]:
    """Yield the table in other orders, so that no round finds what another has computed and kept."""
    for seed in np.random.default_rng().integers(2**32, size=ROUNDS):
        yield table.take(np.random.default_rng(seed).permutation(len(table)))


def measurements() -> Iterator[Measurement]:
    labelled, _, costs = recordings.load("resnet18_cifar100_frozen")
    for name, (method, at_most) in SECONDS.items():
        seconds = [timed(partial(method, costs, "50%", each)) for each in shuffled(labelled)]
        yield spread(f"{name} for one budget, 5,000 x 8", seconds, at_most, "s")
    larger = labelled.take(np.random.default_rng(0).integers(len(labelled), size=4 * len(labelled)))
    wider, stage = labelled.at_exits([index * 8 // 18 for index in range(18)]), np.arange(1.0, 19.0)
    seconds = [timed(partial(calibrate.auto, stage, "50%", each)) for each in shuffled(wider)]
    yield spread("auto for one budget, 5,000 x 18", seconds, 3.0, "s")
    for name in ("search", "optimal_stopping"):
        method = SECONDS[name][0]
        growth = [
            timed(partial(method, costs, "50%", much)) / timed(partial(method, costs, "50%", little))
            for much, little in zip(shuffled(larger), shuffled(labelled), strict=True)
        ]
        yield spread(f"{name}, 20,000 / 5,000 samples", growth, 6.0, "ratio")


if __name__ == "__main__":
    sys.exit(report(measurements(), RESULTS))
