"""Does a plan lose more accuracy than was asked for? Many splits of recorded test images, planned on one part of each.

    python experiments/planned_loss.py                  # ten minutes on one core, of committed recordings

From results/recordings: of 10,000 test images so many are what `plan` is given, the others are fresh. As in `plan`, the
least budget is sought at which no more than 0.01 of accuracy is lost with 95 % confidence, in FLOPs, so that no clock
is needed; beside it what the rule of confidence 0.5 gives, which takes the loss on held-out images for the truth.
Writes results/planned_loss.csv, a row per split: the budget that was found, the loss on held-out images, and on fresh.
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np

from alight import Costs, HeadOutputs, calibrate, replay
from alight.calibrate.crossval import held_out
from alight.files import write_rows
from alight.planning.plan import CONFIDENCE, FOLDS, cheapest
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
NETWORKS = "msdnet_joint,resnet18_mixed_distilled"
ASKED = 0.01
Row = dict[str, str | float | int]


def planned(costs: Costs, table: HeadOutputs, labelled: int, seed: int, confidence: float) -> Row:
    """What a plan made with some images loses on the others."""
    order = np.random.default_rng(seed).permutation(len(table))
    given, fresh = table.take(order[:labelled]), table.take(order[labelled:])
    fit = calibrate.pruned(partial(calibrate.eero, spend_all=True))
    amount = cheapest(fit, costs, given, ASKED, confidence)
    found: Row = {"labelled": labelled, "seed": seed, "confidence": confidence, "budget": amount / costs.full}
    if amount >= costs.full:
        return found | {"held_out_loss": 0.0, "fresh_loss": 0.0}
    right, _ = held_out(fit, costs, amount, given, FOLDS)
    decisions = replay(fit(costs, amount, given), fresh)
    return found | {
        "held_out_loss": float(given.correct()[:, -1].mean() - right.mean()),
        "fresh_loss": float(fresh.correct()[:, -1].mean() - decisions.accuracy(fresh.truth())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=NETWORKS)
    parser.add_argument("--labelled", default="2000", help="numbers of images to plan with")
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "planned_loss.csv")
    options = parser.parse_args()
    made, rows = provenance("numpy", folder=ROOT), []
    for name in options.networks.split(","):
        folder = ROOT / "results" / "recordings" / name
        table, costs = HeadOutputs.load(folder / "test.npz"), Costs.load(folder / "costs.json")
        for labelled in map(int, options.labelled.split(",")):
            for confidence in (CONFIDENCE, 0.5):
                for seed in range(options.splits):
                    rows.append({"network": name, **planned(costs, table, labelled, seed, confidence), **made})
                    write_rows(options.output, rows)
                losses = np.array([float(row["fresh_loss"]) for row in rows[-options.splits :]])
                budgets = np.array([float(row["budget"]) for row in rows[-options.splits :]])
                print(
                    f"{name}, {labelled} labelled, confidence {confidence:g}: budget {np.median(budgets):.2f}, loses"
                    f" {losses.mean():.4f} ({losses.min():.4f} to {losses.max():.4f}), more than asked in"
                    f" {(losses > ASKED).sum()} of {len(losses)}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
