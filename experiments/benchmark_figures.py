"""The figure of docs/benchmark.md: methods against auto on every recording, drawn from results/benchmark.csv.

python experiments/benchmark_figures.py                    # seconds; `make benchmark` measures anew
python experiments/benchmark_figures.py --png FOLDER       # also as PNG, to look at
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from figure_style import BLACK, METHODS, ORANGE, PURPLE, SKY, Look, legend_below, panels, save
from recorded_cifar100 import RESULTS, rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE = RESULTS.parent / "docs" / "figures" / "benchmark.svg"
DRAWN = {
    "eero": METHODS["eero"],
    "eero_marginal": METHODS["eero_marginal"],
    "geometric": METHODS["geometric"],
    "global_threshold": Look("one threshold for all exits", ORANGE, "v"),
    "learned_stopping": Look("learned stopping", PURPLE, "D"),
    "eero, vote": Look("EERO on a vote", SKY, "P"),
    "eero, geometric_mean": Look("EERO on a geometric mean", BLACK, "X"),
}
LOWEST, HIGHEST = -4.0, 1.5  # points that are shown
COLUMNS = 2


def draw(panel: "Axes", recording: str, own: list[dict[str, str]]) -> None:
    """Draw how far methods are above or below auto, in points; a band is two standard errors wide each way."""
    for method, look in DRAWN.items():
        points = sorted((row for row in own if row["method"] == method), key=lambda row: float(row["budget"]))
        budget, gain, error = (
            100 * np.array([float(row[name]) for row in points])
            for name in ("budget", "difference", "difference_error")
        )
        panel.fill_between(budget, gain - 2 * error, gain + 2 * error, color=look.colour, alpha=0.12, linewidth=0)
        panel.plot(budget, gain, color=look.colour, marker=look.marker, label=look.label)
    panel.axhline(0, color=BLACK, linewidth=0.8, linestyle="--", label="auto")
    panel.set_ylim(LOWEST, HIGHEST)
    panel.set_title(recording)
    panel.set_xlabel("FLOPs spent, % of the full network")
    panel.set_ylabel("points against auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", type=Path, help="folder for the same as PNG")
    also = parser.parse_args().png
    table = rows(RESULTS / "benchmark.csv")
    names = list(dict.fromkeys(row["recording"] for row in table))
    figure, grid = panels(-(-len(names) // COLUMNS), COLUMNS, height=2.6)
    for panel, name in zip(grid.ravel(), names, strict=False):
        draw(panel, name, [row for row in table if row["recording"] == name])
    for unused in grid.ravel()[len(names) :]:
        unused.set_axis_off()
    texts = next(index for index, name in enumerate(names) if name.startswith("minilm"))  # has every method
    legend_below(figure, grid.ravel()[texts], columns=4)
    save(figure, FIGURE, also)


if __name__ == "__main__":
    main()
