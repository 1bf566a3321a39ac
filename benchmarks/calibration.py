"""How fast calibration is, as ratios in one run; about a minute on two cores.

    python benchmarks/calibration.py            # writes results/calibration_speed.csv

- `eero` on 1,000,000 x 20 scores against one `np.sort` of the same matrix along samples, and its peak memory
- a sweep of the ten published methods, `genetic` apart, over 17 budgets on 5,000 / 10,000 recorded samples
- `import alight` against `import numpy`, in fresh interpreters
"""

import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from measuring import Measurement, ratio, report, spread, timed

from alight import Costs, HeadOutputs, calibrate, recordings, sweep

RESULTS = Path(__file__).parent.parent / "results" / "calibration_speed.csv"


def measurements() -> Iterator[Measurement]:
    rng = np.random.default_rng(0)
    scores = rng.uniform(size=(1_000_000, 20))
    predictions = rng.integers(1000, size=scores.shape)
    labels = predictions[np.arange(len(scores)), rng.integers(20, size=len(scores))]
    outputs = HeadOutputs(scores, predictions, labels)
    costs = Costs.from_cumulative(np.arange(1.0, 21.0), unit="FLOPs")

    def work() -> object:
        return calibrate.eero(costs, "50%", outputs, spend_all=True)

    yield ratio("eero on 1,000,000 x 20 / np.sort of it", work, lambda: np.sort(scores, axis=0), at_most=2.5)
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1] / scores.nbytes
    tracemalloc.stop()
    yield Measurement("peak memory of eero on 1,000,000 x 20", peak, peak, peak, 3.0, "copies of the scores")

    frozen = recordings.load("resnet18_cifar100_frozen")
    trained = ("learned_stopping", "learning_to_exit", "eenet", "jei_dnn")
    beyond = (
        "genetic",
        "search",
        "optimal_stopping",
        "eero_conditional",
        "auto",
        *trained,
    )  # timed one by one in benchmarks/policies.py
    methods = {name: method for name, method in calibrate.METHODS.items() if name not in beyond}
    budgets = [f"{percent:g}%" for percent in np.linspace(20, 100, 17)]
    seconds = [
        timed(lambda: sweep(methods, frozen.costs, budgets, labelled=frozen.labelled, test=frozen.test))
        for _ in range(3)
    ]
    yield spread(f"sweep of {len(methods)} methods x 17 budgets, 5,000 / 10,000 samples", seconds, 15.0, "s")
    numpy = partial(fresh, "import numpy")
    for code in ("import alight", "from alight import calibrate, HeadOutputs, replay, sweep"):
        yield ratio(f"{code} / import numpy", partial(fresh, code), numpy, at_most=3.0, less=fresh)


def fresh(code: str = "") -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    sys.exit(report(measurements(), RESULTS))
