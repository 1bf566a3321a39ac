"""What combining the answers of exits gains at equal spent budget, over the same methods without.

    python experiments/combinations.py                     # the shipped recordings and those of results/recordings
    python experiments/combinations.py --only msdnet_joint_0    # a minute; rows of the others stay

Writes results/combinations.csv. Calibration and test samples are pooled and split again 20 times; each time a method is
calibrated with and without a combination and both curves of accuracy over spent budget are read at the same spend.
`gain` is the mean difference, `low` and `high` its 95 % interval over splits (normal). All labelled samples fit the
combination and calibrate. Combinations that need log-probabilities are measured where recordings have them, and on
made-up logits of 6 exits.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from recorded_cifar100 import RESULTS as FOLDER
from recorded_cifar100 import Result, folders, rows

from alight import Costs, HeadOutputs, calibrate, recordings, replay
from alight.errors import BudgetTooSmall
from alight.files import write_rows
from alight.policies.combinations import Combination
from alight.provenance import provenance

RESULTS = FOLDER / "combinations.csv"
BUDGETS = [f"{percent}%" for percent in range(10, 101, 10)]
SPENDS = np.arange(10, 91, 10) / 100  # of the full network
SPLITS = 20
METHODS: dict[str, calibrate.Method] = {"eero": calibrate.eero, "global_threshold": calibrate.global_threshold}

Floats = npt.NDArray[np.float64]


class Pool(NamedTuple):
    """All samples of a recording, how many of them calibrate, and what exits cost."""

    samples: HeadOutputs
    labelled: int
    costs: Costs


def pool(labelled: HeadOutputs, test: HeadOutputs, costs: Costs) -> Pool:
    return Pool(HeadOutputs.joined([labelled, test]), len(labelled), costs)


def made_up(shared: float, *, samples: int = 11_000, exits: int = 6, classes: int = 20) -> Pool:
    """Exits that know more and more, and err partly together: this share of the noise is common to all of them."""
    rng = np.random.default_rng(0)
    labels = rng.integers(classes, size=samples)
    signal = np.linspace(1.5, 3.5, exits) * rng.uniform(0.4, 1.6, size=(samples, 1))
    common, own = rng.normal(size=(samples, 1, classes)), rng.normal(size=(samples, exits, classes))
    logits = np.sqrt(shared) * common + np.sqrt(1 - shared) * own
    logits[np.arange(samples), :, labels] += signal
    outputs = HeadOutputs.from_logits(2.5 * logits, labels)
    return Pool(outputs, 1000, Costs.from_cumulative(np.arange(1.0, exits + 1.0)))


def pools() -> Iterator[tuple[str, Pool]]:
    for name in recordings.NAMES:
        yield name, pool(*recordings.load(name))
    for folder in folders():
        result = Result.of(folder)
        yield folder.name, pool(result.calibration, result.test, result.costs)
    for shared in (0.5, 0.9):
        yield f"made up, {shared:.0%} of noise shared", made_up(shared)


def curve(method: calibrate.Method, costs: Costs, labelled: HeadOutputs, test: HeadOutputs) -> Floats:
    """Return the accuracy at every spent share; between two budgets lies the mixture of their policies.

    A share that no budget spends is NaN below, and above it the accuracy of the largest.
    """
    points: dict[float, float] = {}
    seen: dict[Combination | None, HeadOutputs] = {}
    for budget in BUDGETS:
        try:
            policy = method(costs, budget, labelled)
        except BudgetTooSmall:
            continue
        if policy.combination not in seen:  # one for all budgets; on its table a walk decides as in the network
            seen[policy.combination] = policy.view(test)
        decisions = replay(replace(policy, combination=None), seen[policy.combination])
        points[decisions.mean_cost / costs.full] = decisions.accuracy(test.known_labels("a comparison"))
    spent = sorted(points)
    return np.interp(SPENDS, spent, [points[each] for each in spent], left=np.nan)


def possible(given: Pool) -> dict[str, calibrate.Fit]:
    """Return the combinations whose columns the recording has."""
    needs_logs = ("geometric_mean", "temperature")
    known = given.samples.top_classes is not None
    return {name: fit for name, fit in calibrate.COMBINE.items() if known or name not in needs_logs}


def compare(
    outputs: str, given: Pool, combine_by: Mapping[str, calibrate.Fit]
) -> Iterator[dict[str, str | float | int]]:
    """Yield what each combination gains for each method at every spent share."""
    curves: dict[tuple[str, str], list[Floats]] = {}
    for seed in range(SPLITS):
        labelled, test = given.samples.split(given.labelled / len(given.samples), np.random.default_rng(seed))
        for name, method in METHODS.items():
            curves.setdefault((name, ""), []).append(curve(method, given.costs, labelled, test))
            for combine, fit in combine_by.items():
                found = curve(calibrate.combined(method, fit), given.costs, labelled, test)
                curves.setdefault((name, combine), []).append(found)
    for (name, combine), several in curves.items():
        if combine:
            plain = np.array(curves[name, ""])
            gains = np.array(several) - plain  # (splits, spends)
            errors = 1.96 * gains.std(axis=0, ddof=1) / np.sqrt(SPLITS)
            columns = zip(SPENDS.tolist(), plain.mean(axis=0), gains.mean(axis=0), errors, strict=True)
            for spend, accuracy, gain, error in columns:
                if not np.isnan(gain):
                    row: dict[str, str | float | int] = {"outputs": outputs, "method": name, "combine": combine}
                    row |= {"spent": float(spend), "without": float(accuracy), "gain": float(gain)}
                    yield row | {"low": float(gain - error), "high": float(gain + error)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="the one recording to measure")
    only = parser.parse_args().only
    made, before = provenance("numpy", "scipy", folder=FOLDER.parent), rows(RESULTS) if RESULTS.exists() else []
    found: list[Mapping[str, str | float | int]] = []
    for name, given in pools():
        if only in (None, name):
            found += [row | made for row in compare(name, given, possible(given))]
            print(name, flush=True)
        else:
            found += [row for row in before if row["outputs"] == name]
    write_rows(RESULTS, found)


if __name__ == "__main__":
    main()
