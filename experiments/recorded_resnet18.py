"""All methods on the shipped recordings of a ResNet-18 on CIFAR-100: 8 exits, 15 to 100 % of the full network.

    python experiments/recorded_resnet18.py             # sweeps, then draws: 5 minutes, most of it genetic and auto
    python experiments/recorded_resnet18.py --draw      # draws from results/ alone: seconds

Writes results/recorded_resnet18_{frozen,joint}.csv, results/recorded_resnet18.json (how they were made),
results/recorded_resnet18_equal_spend.csv (the tables of docs/benchmark.md) and docs/figures/recorded_resnet18.svg.

Measured (see the JSON for hardware, versions, date and commit): with frozen heads, at half of the FLOPs, EERO with
survivor thresholds reaches 43.1 %, the paper's rule 29.2 % because it spends only 35.5 %, the best single exit 24.3 %;
the full network has 75.1 %. At equal spent budget EERO and the paper's rule differ by less than two points.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from alight import Point, at_equal_spend, calibrate, read_points, recordings, sweep, write_points
from alight.evaluation import ORACLE, SINGLE_EXIT
from alight.files import write_rows, write_text
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
RESULTS = {
    "frozen": ROOT / "results/recorded_resnet18_frozen.csv",
    "joint": ROOT / "results/recorded_resnet18_joint.csv",
}
EQUAL_SPEND = ROOT / "results/recorded_resnet18_equal_spend.csv"
FIGURE = ROOT / "docs/figures/recorded_resnet18.svg"
BUDGETS = [f"{percent}%" for percent in range(15, 101, 5)]
SPENT = [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]  # of the full network: the columns of the tables
SEED = 0  # of the bootstrap
DRAWN = {  # colours of Okabe and Ito, distinct without colour too
    "eero": ("#0072B2", "o", "EERO, survivor thresholds"),
    "eero_marginal": ("#D55E00", "s", "EERO, the paper's thresholds"),
    "geometric": ("#009E73", "^", "geometric"),
    "patience": ("#CC79A7", "D", "patience"),
}


def run() -> None:
    for name, path in RESULTS.items():
        recording = recordings.load(f"resnet18_cifar100_{name}")
        points = sweep(
            calibrate.METHODS,
            recording.costs,
            BUDGETS,
            labelled=recording.labelled,
            test=recording.test,
            seed=SEED,
            progress=True,
        )
        write_points(points, path)
    made = provenance("numpy", "scipy", folder=ROOT) | {"seed": SEED}
    write_text(ROOT / "results/recorded_resnet18.json", json.dumps(made, indent=2) + "\n")


def equal_spend(heads: str, points: Sequence[Point]) -> list[dict[str, str]]:
    """Return accuracies at equal spent budget, by mean accuracy; last the methods that do not spend it all."""
    plain = points[0].full_cost
    rows = at_equal_spend([point for point in points if point.method != ORACLE], [share * plain for share in SPENT])
    totals = {each.method: sum(row.accuracy for row in rows if row.method == each.method) for each in rows}
    rows = sorted(rows, key=lambda row: -totals[row.method])
    digits = [(row.method, f"{row.spent / plain:.6f}", f"{row.accuracy:.6f}") for row in rows]
    return [{"heads": heads, "method": method, "spent": spent, "accuracy": right} for method, spent, right in digits]


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {"svg.hashsalt": "alight", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    captions = {"frozen": "heads on a frozen backbone", "joint": "heads and backbone trained together"}
    for panel, (name, path) in zip(panels, RESULTS.items(), strict=True):
        points = read_points(path)
        for method, (colour, marker, label) in DRAWN.items():
            spent, accuracy, low, high = _curve(points, method)
            panel.fill_between(spent, low, high, color=colour, alpha=0.15, linewidth=0)
            panel.plot(spent, accuracy, color=colour, marker=marker, markersize=3, linewidth=1.2, label=label)
        spent, accuracy, _, _ = _curve(points, ORACLE)
        panel.plot(spent, accuracy, color="black", linestyle="--", linewidth=1, label="oracle (knows the labels)")
        spent, accuracy, _, _ = _curve(points, SINGLE_EXIT)
        panel.plot(spent, accuracy, "x", color="black", markersize=5, label="each exit alone")
        panel.set(title=captions[name], xlabel="FLOPs spent, % of the full network", xlim=(10, 103))
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("test accuracy, %")
    panels[1].legend(loc="lower right", frameon=False)
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, metadata={"Date": None})


def _curve(points: Sequence[Point], method: str) -> tuple[list[float], ...]:
    """Spent, accuracy and its interval of one method, in percent, along the spent budget."""
    own = sorted((point for point in points if point.method == method), key=lambda point: point.mean_cost)
    return (
        [100 * point.mean_cost / point.full_cost for point in own],
        [100 * point.accuracy for point in own],
        [100 * point.accuracy_low for point in own],
        [100 * point.accuracy_high for point in own],
    )


if __name__ == "__main__":
    if "--draw" not in sys.argv[1:]:
        run()
    draw()
    write_rows(EQUAL_SPEND, [row for name, path in RESULTS.items() for row in equal_spend(name, read_points(path))])
