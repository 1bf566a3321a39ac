"""Do contracts hold when every call has its own cost? Many calibration draws, batches and streams; minutes on one core.

    python experiments/random_costs.py

Writes results/random_costs.csv: one row per contract and distribution of costs with what was measured, what was
guaranteed, whether it holds, and on what it was run. docs/tutorial/llm.md shows the table.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

from alight import Costs, HeadOutputs, calibrate, replay
from alight.calibrate import certified_batch, certified_stream
from alight.calibrate.cost_guarantees import CostContract, certify_cost
from alight.files import write_rows
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
Floats = npt.NDArray[np.float64]
Row = dict[str, str | float | int]
PRICES = np.array([0.5, 4.0, 16.0])  # of a call of each member, on average about
BUDGET = 6.0
DELTA = 0.05
DRAWS = 2000
SAMPLES, FRESH = 300, 10_000  # of a calibration draw, and on which a policy's true mean cost is measured
STREAM, BATCH = 200, 50  # requests of a stream, and of its batches


def constant(rng: np.random.Generator, hardness: Floats) -> Floats:
    return np.ones((len(hardness), 3))


def lognormal(rng: np.random.Generator, hardness: Floats) -> Floats:
    """Hard requests are longer, for all members."""
    return np.minimum(np.exp(1.5 * (hardness - 0.5) + 0.5 * rng.normal(size=hardness.shape)), 6.0) * np.ones((1, 3))


def pareto(rng: np.random.Generator, hardness: Floats) -> Floats:
    """A tail without a variance, cut where a call ends at the latest."""
    return np.minimum(0.4 * (1 + rng.pareto(1.3, size=(len(hardness), 3))), 8.0)


def bimodal(rng: np.random.Generator, hardness: Floats) -> Floats:
    """Most calls are short, and some, of hard requests more often, run to their limit."""
    return np.where(rng.uniform(size=(len(hardness), 3)) < 0.2 * hardness, 6.0, 0.5)


DISTRIBUTIONS: dict[str, tuple[Callable[..., Floats], float]] = {  # and the most that a call can cost, of its price
    "constant": (constant, 1.0),
    "lognormal": (lognormal, 6.0),
    "pareto": (pareto, 8.0),
    "bimodal": (bimodal, 6.0),
}


def mean_costs(table: HeadOutputs) -> Costs:
    assert table.costs is not None
    return Costs(np.zeros(3), table.costs.mean(axis=0), unit="USD")


def table(name: str, seed: int, size: int) -> HeadOutputs:
    """Return a made-up log: hard requests are answered wrong by small members, which are unsure of them."""
    rng = np.random.default_rng(seed)
    hardness = rng.uniform(size=(size, 1))
    right = rng.uniform(size=(size, 3)) < np.array([1.2, 1.4, 1.7]) - hardness
    scores = 1 - hardness + 0.2 * rng.normal(size=(size, 3))
    costs = PRICES * DISTRIBUTIONS[name][0](rng, hardness)
    return HeadOutputs(scores, np.arange(3) * np.ones((size, 1), int), np.zeros(size, int), costs=costs, quality=right)


def contracts(name: str, draws: int) -> Iterator[Row]:
    """Mean and probability contracts over calibration draws of one distribution of costs."""
    caps = PRICES * DISTRIBUTIONS[name][1]
    fitting, fresh = table(name, 10**6, 1000), [table(name, 10**6 + 1 + index, FRESH) for index in range(10)]
    costs = mean_costs(fitting)
    policy = calibrate.eero(costs, BUDGET, fitting)  # the same for every draw
    contracts: tuple[Literal["mean", "probability"], ...] = ("mean", "probability")
    for contract in contracts:
        certify = partial(certify_cost, contract=CostContract(contract, DELTA, max_costs=caps))
        spent = np.empty(draws)
        for seed in range(draws):
            certified = certify(policy, costs, fitting, table(name, seed, SAMPLES))
            spent[seed] = replay(certified, fresh[seed % len(fresh)]).mean_cost
        yield judged(contract, name, spent)


def judged(contract: str, name: str, spent: Floats) -> Row:
    """Return whether the spends of policies, over calibration draws, are as the contract says."""
    row: Row = {"contract": contract, "costs": name, "samples": SAMPLES, "draws": len(spent)}
    used = f"{spent.mean() / BUDGET:.3f} of the budget spent"
    if contract == "mean":
        error = float(spent.std() / np.sqrt(len(spent))) + 10 / np.sqrt(
            10 * FRESH
        )  # of the draws, and of fresh samples
        holds = bool(spent.mean() <= BUDGET + 3 * error)
        return row | {"measured": used, "guaranteed": "at most 1 on average", "holds": str(holds)}
    failures = int((spent > BUDGET).sum())
    measured = f"{failures / len(spent):.2%} of draws overspend, {used}"
    limit = binom.ppf(0.999, len(spent), DELTA)
    return row | {"measured": measured, "guaranteed": f"at most {DELTA:.0%} of draws", "holds": str(failures <= limit)}


def accounts(name: str, draws: int) -> Iterator[Row]:
    """Batch and stream contracts, on streams in random order and with the most expensive requests first."""
    caps = PRICES * DISTRIBUTIONS[name][1]
    fitting = table(name, 10**6, 1000)
    costs = mean_costs(fitting)
    made = {
        "batch": certified_batch(calibrate.eero, max_costs=caps)(costs, BUDGET, fitting),
        "stream": certified_stream(calibrate.eero, max_costs=caps, seed=0)(costs, BUDGET, fitting),
    }
    for contract, policy in made.items():
        broken, used = 0, 0.0
        size, ahead = (BATCH, 0.0) if contract == "batch" else (1, float(caps.sum()))
        for seed in range(draws):
            stream = table(name, 10**7 + seed, STREAM)
            if seed % 2:
                stream = stream.take(np.argsort(-stream.column("costs").sum(axis=1)))
            spent = replay(policy, stream, batch_size=size).spent
            sums = spent.reshape(-1, BATCH).sum(axis=1) if contract == "batch" else np.cumsum(spent)
            allowed = BATCH * BUDGET if contract == "batch" else np.arange(1, STREAM + 1) * BUDGET + ahead
            broken += bool((sums > allowed * (1 + 1e-12)).any())
            used += spent.mean() / BUDGET / draws
        row: Row = {"contract": contract, "costs": name, "samples": STREAM, "draws": draws}
        measured = f"{broken} broken, {used:.3f} of the budget spent"
        yield row | {"measured": measured, "guaranteed": "0 broken", "holds": str(broken == 0)}


def main() -> None:
    rows = []
    for name in DISTRIBUTIONS:
        for row in (*contracts(name, DRAWS), *accounts(name, DRAWS)):
            print(*row.values(), sep=" | ", flush=True)
            rows.append(row)
    about = provenance("numpy", "scipy", folder=ROOT)
    write_rows(ROOT / "results" / "random_costs.csv", [{**row, **about} for row in rows])


if __name__ == "__main__":
    main()
