"""Does a plan lose more accuracy than was asked for? Many splits of recorded test images, planned on one part of each.

    python experiments/planned_loss.py                  # fifteen minutes on one core, of committed recordings

From results/recordings: of 10,000 test images so many are what `plan` is given, the others are fresh. As in `plan`, one
third of those given fits policies for lower and lower budgets, and the others test that they lose no more than asked
with 95 % confidence; budgets are in FLOPs, so that no clock is needed.
Writes results/planned_loss.csv, a row per split: the budget that was found, the loss on the images that tested it, the
loss on fresh ones, and the largest loss that is said of a plan for half of the FLOPs, beside its loss on fresh images.
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np

from alight import Costs, HeadOutputs, Policy, calibrate, replay
from alight.calibrate.risk_guarantees import largest_loss
from alight.files import write_rows
from alight.planning.plan import FITTED, cheapest
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
NETWORKS = "msdnet_joint,resnet18_mixed_distilled"
ASKED = 0.01
HALF = "50%"
Row = dict[str, str | float | int]


def planned(costs: Costs, table: HeadOutputs, labelled: int, seed: int) -> Row:
    """What a plan made with some images loses on the others."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(table))
    given, fresh = table.take(order[:labelled]), table.take(order[labelled:])
    fitting, testing = given.split(FITTED, rng)
    fit = calibrate.pruned(partial(calibrate.eero, spend_all=True))
    policy = cheapest(fit, costs, fitting, testing, ASKED)
    half = fit(costs, HALF, fitting)
    return {
        "labelled": labelled,
        "seed": seed,
        "budget": 1.0 if policy is None or policy.budget is None else policy.budget / costs.full,
        "held_out_loss": _loss(policy, testing),
        "fresh_loss": _loss(policy, fresh),
        "half_said": largest_loss(testing.correct()[:, -1], _right(half, testing)),
        "half_fresh_loss": _loss(half, fresh),
    }


def _right(policy: Policy, table: HeadOutputs) -> np.ndarray:
    return replay(policy, table).predictions == table.truth()


def _loss(policy: Policy | None, table: HeadOutputs) -> float:
    return 0.0 if policy is None else float(table.correct()[:, -1].mean() - _right(policy, table).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=NETWORKS)
    parser.add_argument("--labelled", default="2000", help="numbers of images to plan with")
    parser.add_argument("--splits", type=int, default=300)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "planned_loss.csv")
    options = parser.parse_args()
    made, rows = provenance("numpy", folder=ROOT), []
    for name in options.networks.split(","):
        folder = ROOT / "results" / "recordings" / name
        table, costs = HeadOutputs.load(folder / "test.npz"), Costs.load(folder / "costs.json")
        for labelled in map(int, options.labelled.split(",")):
            for seed in range(options.splits):
                rows.append({"network": name, **planned(costs, table, labelled, seed), **made})
            write_rows(options.output, rows)
            own = rows[-options.splits :]
            losses, said, half, budgets = (
                np.array([float(row[column]) for row in own])
                for column in ("fresh_loss", "half_said", "half_fresh_loss", "budget")
            )
            print(
                f"{name}, {labelled} labelled: budget {np.median(budgets):.2f}, loses {losses.mean():.4f}"
                f" ({losses.min():.4f} to {losses.max():.4f}), more than asked in {(losses > ASKED).sum()}"
                f" and more than said in {(half > said).sum()} of {len(own)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
