"""How often is a budget exceeded, by how much, and what does a guarantee cost? Many calibrations on recorded outputs.

    python experiments/guaranteed_budgets.py            # a quarter of an hour on one core

Of the recordings that ship with alight, 5,000 held-out and 10,000 test samples are shuffled together; so many calibrate
a policy, the others are new samples on which it spends. A budget is exceeded where new samples cost more on average.
Without a contract every sample calibrates; with contract "probability" one half fits and the other certifies.
Writes results/guaranteed_budgets.csv: one row per recording, method, number of samples, budget and contract.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from alight import HeadOutputs, calibrate, recordings, replay
from alight.calibrate import Method
from alight.files import write_rows
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
CASES = [  # method, calibrations, samples of each, budget; auto fits a dozen methods each time
    ("eero", 100, 500, "50%"),
    ("eero", 100, 2000, "30%"),
    ("eero", 100, 2000, "50%"),
    ("eero", 100, 2000, "70%"),
    ("auto", 10, 2000, "50%"),
]
Row = dict[str, str | float | int]


def rows() -> Iterator[Row]:
    """Yield what many calibrations spend, case by case."""
    for name in recordings.NAMES:
        labelled, test, costs = recordings.load(name)
        table = HeadOutputs.joined([labelled, test])
        for method, draws, samples, budget in CASES:
            for contract in ("none", "probability"):
                calibrated = partial(one, table, costs, budget, method, contract, samples)
                spent, accuracy = np.array([calibrated(seed) for seed in range(draws)]).T
                over = spent > 1
                yield {
                    "recording": name,
                    "method": method,
                    "samples": samples,
                    "budget": budget,
                    "contract": contract,
                    "draws": draws,
                    "exceeded": float(over.mean()),
                    "exceeded_by": float((spent[over] - 1).mean()) if over.any() else 0.0,
                    "spent": float(spent.mean()),
                    "accuracy": float(accuracy.mean()),
                }


def one(
    table: HeadOutputs, costs: object, budget: str, method: str, contract: str, samples: int, seed: int
) -> tuple[float, float]:
    """Return what one calibration spends on new samples, as a share of its budget, and its accuracy there."""
    calibrating, new = table.split(samples / len(table), np.random.default_rng(seed))
    fit: Method = calibrate.METHODS[method]
    if contract == "probability":
        fit = calibrate.certified_probability(fit, seed=seed)
    policy = fit(costs, budget, calibrating)
    decisions = replay(policy, new)
    assert policy.budget is not None
    return decisions.mean_cost / policy.budget, decisions.accuracy(new.truth())


if __name__ == "__main__":
    made = provenance("numpy", "scipy")
    found = []
    for row in rows():
        print(row, flush=True)
        found.append({**row, **made})
        write_rows(ROOT / "results" / "guaranteed_budgets.csv", found)
