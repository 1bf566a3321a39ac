"""Survivor thresholds beside the paper's marginal ones, and what slack costs, on a recording that ships with alight.

    python experiments/thresholds.py            # seconds on one core

Writes results/thresholds.csv (accuracy at equal allowed and at equal spent budget), results/slack.csv (what a margin
costs, in theory and on test images) and results/passing.csv (how far the share that passes an exit may be above plan).
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from alight import Costs, HeadOutputs, Policy, at_equal_spend, calibrate, recordings, replay, sweep
from alight.budgeting.bounds import expected_cost, overspend_probability, passing_bound, share_law
from alight.budgeting.thresholds import PROVEN_SLACK, Slack, passing_counts
from alight.files import write_rows
from alight.provenance import provenance

RESULTS = Path(__file__).parent.parent / "results"
RECORDING = "resnet18_cifar100_frozen"
SHARES = range(20, 91, 10)  # percent of the full network
Row = dict[str, str | float | int]


def thresholds() -> Iterator[Row]:
    """Yield accuracy and spend of three ways to set thresholds, at equal allowed and at equal spent budget."""
    labelled, test, costs = recordings.load(RECORDING)

    def without_labels(costs: Costs, budget: str, labelled: HeadOutputs, _: object = None) -> Policy:
        return calibrate.eero(costs, budget, labelled.unlabelled())

    methods: dict[str, calibrate.Method] = {name: calibrate.METHODS[name] for name in ("eero", "eero_marginal")}
    methods["eero, no labels"] = without_labels
    allowed = [f"{percent}%" for percent in range(15, 101, 5)]
    points = sweep(methods, costs, allowed, labelled=labelled, test=test, references=False)
    equal = at_equal_spend(points, [costs.full * percent / 100 for percent in SHARES])
    spent = {(row.method, round(100 * row.spent / costs.full)): row.accuracy for row in equal}
    for point in points:
        share = round(100 * point.budget / costs.full)
        if share in SHARES:
            yield {
                "method": point.method,
                "budget": share / 100,
                "accuracy_allowed": point.accuracy,
                "spent": point.mean_cost / point.budget,
                "accuracy_spent": spent[point.method, share],
            }


def slack() -> Iterator[Row]:
    """Yield what a margin costs at half of the FLOPs, with risks and thresholds from different samples."""
    labelled, test, costs = recordings.load(RECORDING)
    budget, cumulative = costs.budget("50%"), costs.cumulative()
    first, second = labelled.split(0.5, np.random.default_rng(0))
    margins: dict[str, Slack] = {"None": None, "paper": "paper", f"{PROVEN_SLACK:.3f}": PROVEN_SLACK, "exact": None}
    for name, padding in margins.items():  # the exact slack is in the rates already
        margin = "exact" if name == "exact" else padding
        policy = calibrate.eero(costs, budget, first, second.unlabelled(), slack=margin, delta=0.05)
        law = share_law(passing_counts(np.array(policy.exit_rates), len(second), padding), len(second))
        decisions = replay(policy, test)
        yield {
            "slack": name,
            "expected": float(expected_cost(cumulative, law) / budget),
            "overspends": float(overspend_probability(cumulative, law, budget)),
            "spent": decisions.mean_cost / budget,
            "accuracy": decisions.accuracy(test.labels),
        }


def passing(samples: int = 1000) -> Iterator[Row]:
    """Yield how far above plan the share that passes an exit may lie, and the margins that the paper adds."""
    for gone in (0.1, 0.5, 0.9):
        count = int(passing_counts(np.array([gone, 1 - gone]), samples)[0])
        mean = count / (samples + 1)
        yield {
            "gone": gone,
            "below": 1 - gone - mean,
            "deviation": float(np.sqrt(mean * (1 - mean) / (samples + 2))),
            "quantile": passing_bound(count, samples, delta=0.05) - (1 - gone),
            "paper": float(gone / np.sqrt(samples)),
            "proof": float(PROVEN_SLACK / np.sqrt(samples)),
        }


TABLES = {"thresholds": thresholds, "slack": slack, "passing": passing}


def main() -> None:
    about = provenance("numpy", folder=RESULTS)
    for name, rows in TABLES.items():
        write_rows(RESULTS / f"{name}.csv", [row | about for row in rows()])


if __name__ == "__main__":
    main()
