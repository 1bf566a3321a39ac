"""All methods on the shipped recordings of a ResNet-18 on CIFAR-100: 8 exits, 15 to 100 % of the plain network.

    python experiments/recorded_resnet18.py             # sweeps, then draws: 5 minutes, most of it genetic and auto
    python experiments/recorded_resnet18.py --draw      # draws from results/ alone: seconds

Writes results/recorded_resnet18_{frozen,joint}.csv, results/recorded_resnet18.json (how they were made) and
docs/figures/recorded_resnet18.svg, and prints the tables of docs/comparison.md.

Measured (see the JSON for hardware, versions, date and commit): with frozen heads, at half of the FLOPs, EERO with
survivor thresholds reaches 43.1 %, the paper's rule 29.2 % because it spends only 35.5 %, the best single exit 24.3 %;
the plain network has 75.1 %. At equal spent budget EERO and the paper's rule differ by less than two points.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from alight import Point, at_equal_spend, calibrate, read_points, recordings, sweep, write_points
from alight.evaluation import ORACLE, SINGLE_EXIT
from alight.files import write_text
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
RESULTS = {
    "frozen": ROOT / "results/recorded_resnet18_frozen.csv",
    "joint": ROOT / "results/recorded_resnet18_joint.csv",
}
FIGURE = ROOT / "docs/figures/recorded_resnet18.svg"
BUDGETS = [f"{percent}%" for percent in range(15, 101, 5)]
SPENT = [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]  # of the plain network: the columns of the tables
SEED = 0  # of the bootstrap
DRAWN = {  # colours of Okabe and Ito, told apart without colour too
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


def table(points: Sequence[Point], spends: Sequence[float] = SPENT) -> str:
    """Accuracy at equal spent budget as Markdown, by mean accuracy; last those that do not spend it all."""
    plain = points[0].full_cost
    rows = at_equal_spend(points, [share * plain for share in spends])
    cells = {(row.method, round(row.spent / plain, 6)): 100 * row.accuracy for row in rows}
    methods = dict.fromkeys(row.method for row in rows if row.method != ORACLE)
    ordered = sorted(methods, key=lambda method: -sum(cells.get((method, share), 0.0) for share in spends))
    lines = [
        "| spent | " + " | ".join(f"{share:.0%}" for share in spends) + " |",
        "|---|" + "---|" * len(spends),
    ]
    for method in ordered:
        values = [f"{cells[method, share]:.1f}" if (method, share) in cells else "–" for share in spends]
        lines.append(f"| `{method}` | " + " | ".join(values) + " |")
    return "\n".join(lines)


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {"svg.hashsalt": "alight", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    titles = {"frozen": "heads on a frozen backbone", "joint": "heads and backbone trained together"}
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
        panel.set(title=titles[name], xlabel="FLOPs spent, % of the plain network", xlim=(10, 103))
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
    for name, path in RESULTS.items():
        print(f"\n{name}\n\n{table(read_points(path))}")
