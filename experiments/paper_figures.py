"""Every figure of the paper, and those beyond it, drawn from results/ alone.

    python experiments/paper_figures.py                    # all, into docs/figures
    python experiments/paper_figures.py --png FOLDER       # also as PNG, to look at

Needs results/paper/*.csv (paper_tables.py), results/cifar100_runs.csv and results/cifar100_modes.csv
(cifar100_ship.py). `make figures` computes the first anew, then draws. Some ten seconds. FIGURES names the paper's
figure for each.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from figure_style import BLACK, BLUE, GREEN, METHODS, ORANGE, PURPLE, RED, RUNS, SKY, WIDTH, legend_below
from figure_style import panels as new_panels
from figure_style import save as save_figure
from recorded_cifar100 import MODES, NETWORKS, RESULTS, TEXTS, rows, usual
from recorded_cifar100 import RUNS as RUN_ROWS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TABLES = RESULTS / "paper"
FOLDER = RESULTS.parent / "docs" / "figures"
SPENT = "FLOPs spent, % of the full network"
ALLOWED = "FLOPs allowed, % of the full network"
ACCURACY = "test accuracy, %"
COMPARED = ("eero", "eero_marginal", "geometric", "gaussian", "patience")


def table(name: str, **where: object) -> list[dict[str, str]]:
    """The rows of a table in which columns have these values."""
    return [row for row in rows(TABLES / f"{name}.csv") if all(row[key] == str(value) for key, value in where.items())]


def percent(own: Sequence[dict[str, str]], column: str) -> np.ndarray:
    """A column as percentages."""
    return 100 * np.array([float(row[column]) for row in own])


def accuracy_budget() -> "Figure":
    """Two exits: one auxiliary head and the last, with the oracle."""
    figure, [[panel]] = new_panels(width=6.2, height=3.9)
    for head, colour, marker in ((2, BLUE, "o"), (3, GREEN, "^"), (4, RED, "s")):
        own = table("two_exits", head=head)
        spent = percent(own, "spent")
        panel.fill_between(spent, percent(own, "low"), percent(own, "high"), color=colour, alpha=0.15, linewidth=0)
        panel.plot(spent, percent(own, "accuracy"), color=colour, marker=marker, label=f"head {head} and the last")
        panel.plot(
            percent(own, "allowed"),
            percent(own, "oracle_accuracy"),
            color=colour,
            linestyle="--",
            label=f"head {head}, oracle",
        )
    plain = float(table("overthinking", network="resnet18_frozen")[-1]["accuracy"])
    panel.axhline(100 * plain, color=BLACK, linewidth=0.8, linestyle=":", label="full network")
    panel.set(xlabel=f"{SPENT} (oracle: allowed)", ylabel=ACCURACY)
    legend_below(figure, panel, 4)
    return figure


def convnext_acc() -> "Figure":
    """Accuracy against the budget on ConvNeXt with frozen heads; the same for ResNet-18."""
    return _accuracies(("convnext_frozen", "resnet18_frozen"))


def msdnet_acc() -> "Figure":
    """EERO and MSDNet's own geometric strategy on MSDNet."""
    figure, [[panel]] = new_panels(width=5.6, height=3.7)
    _curves(panel, "msdnet_joint", ("eero", "eero_marginal", "geometric"), bars=True)
    panel.set(xlabel=SPENT, ylabel=ACCURACY)
    legend_below(figure, panel, 2)
    return figure


def msdnet_budget() -> "Figure":
    """Allowed and measured budget on MSDNet."""
    return _budgets(("msdnet_joint",), ("eero", "eero_marginal", "geometric"))


def budget_check() -> "Figure":
    """Allowed and measured budget with frozen heads."""
    return _budgets(("convnext_frozen", "resnet18_frozen"), ("eero", "eero_marginal"))


def texts() -> "Figure":
    """MiniLM with an exit after every layer, on two sets of sentences."""
    figure, panels = new_panels(1, len(TEXTS))
    for panel, (network, title) in zip(panels[0], TEXTS.items(), strict=True):
        _curves(panel, network, COMPARED, of="texts")
        panel.set(title=title, xlabel=SPENT)
    panels[0][0].set_ylabel(ACCURACY)
    legend_below(figure, panels[0][0], 4)
    return figure


def _accuracies(networks: Sequence[str]) -> "Figure":
    figure, panels = new_panels(1, len(networks))
    for panel, network in zip(panels[0], networks, strict=True):
        _curves(panel, network, COMPARED)
        panel.set(title=NETWORKS[network], xlabel=SPENT)
    panels[0][0].set_ylabel(ACCURACY)
    legend_below(figure, panels[0][0], 4)
    return figure


def _curves(panel: "Axes", network: str, methods: Sequence[str], *, bars: bool = False, of: str = "sweep") -> None:
    """Curves of methods along the spent budget with their intervals, each exit alone, and the oracle."""
    for method in (*methods, "oracle"):
        look = METHODS[method]
        own = sorted(table(of, network=network, method=method), key=lambda row: float(row["spent"]))
        spent, accuracy, low, high = (percent(own, name) for name in ("spent", "accuracy", "low", "high"))
        drawn: dict[str, Any] = {
            "color": look.colour,
            "marker": look.marker,
            "linestyle": look.line,
            "label": look.label,
        }
        if bars and method != "oracle":
            panel.errorbar(spent, accuracy, [accuracy - low, high - accuracy], elinewidth=0.7, capsize=1.5, **drawn)
            continue
        if method != "oracle":
            panel.fill_between(spent, low, high, color=look.colour, alpha=0.12, linewidth=0)
        panel.plot(spent, accuracy, **drawn)
    own, look = table(of, network=network, method="single_exit"), METHODS["single_exit"]
    panel.plot(percent(own, "spent"), percent(own, "accuracy"), "x", color=look.colour, markersize=6, label=look.label)


def _budgets(networks: Sequence[str], methods: Sequence[str]) -> "Figure":
    figure, panels = new_panels(1, len(networks), width=WIDTH if len(networks) > 1 else 5.6)
    for panel, network in zip(panels[0], networks, strict=True):
        for method in methods:
            look, own = METHODS[method], table("sweep", network=network, method=method)
            allowed, spent = percent(own, "allowed"), percent(own, "spent")
            errors = [spent - percent(own, "spent_low"), percent(own, "spent_high") - spent]
            panel.errorbar(
                allowed,
                spent,
                errors,
                color=look.colour,
                marker=look.marker,
                label=look.label,
                elinewidth=0.7,
                capsize=1.5,
            )
        panel.plot(allowed, allowed, color=BLACK, linestyle=":", linewidth=1, label="all that is allowed")
        panel.set(title=NETWORKS[network], xlabel=ALLOWED)
    panels[0][0].set_ylabel("FLOPs measured, %\nof the full network")
    legend_below(figure, panels[0][0], 4 if len(networks) > 1 else 2)
    return figure


def epsilon_aggreg() -> "Figure":
    """Planned weights of EERO on ConvNeXt for the medium budget, and the shares that were observed."""
    figure, [[panel]] = new_panels(width=6.2, height=3.1)
    _bars(panel, "0.500000", {"planned": ("planned", BLUE), "observed": ("observed, survivor", SKY)} | _MARGINAL)
    panel.set(xlabel="exit", ylabel="share of the images, %")
    legend_below(figure, panel)
    return figure


_MARGINAL = {"observed_marginal": ("observed, the paper's thresholds", RED)}


def epsilon_per_budget() -> "Figure":
    """Planned weights for three budgets: EERO on the left, geometric as MSDNet on the right."""
    budgets = list(dict.fromkeys(row["budget"] for row in table("weights")))
    figure, panels = new_panels(len(budgets), 2, height=2.1, sharex=True, sharey="row")
    for pair, budget in zip(panels, budgets, strict=True):
        _bars(pair[0], budget, {"planned": ("planned", BLUE)})
        _bars(pair[1], budget, {"planned_geometric": ("planned", GREEN)})
        pair[0].set(title=f"EERO, budget {float(budget):.0%}", ylabel="share, %")
        pair[1].set(title=f"geometric, budget {float(budget):.0%}")
    for panel in panels[-1]:
        panel.set_xlabel("exit")
    return figure


def _bars(panel: "Axes", budget: str, columns: dict[str, tuple[str, str]]) -> None:
    own = table("weights", budget=budget)
    exits = np.array([int(row["exit"]) for row in own])
    width = 0.8 / len(columns)
    for index, (column, (label, colour)) in enumerate(columns.items()):
        offset = (index - (len(columns) - 1) / 2) * width
        panel.bar(exits + offset, percent(own, column), width, color=colour, label=label)
    panel.set_xticks(exits)
    panel.grid(axis="x", visible=False)


def risk() -> "Figure":
    """Risk of each exit of ConvNeXt, on calibration and on test images."""
    figure, [[panel]] = new_panels(width=6.2, height=3.0)
    own = table("overthinking", network="convnext_frozen")
    exits = np.array([int(row["exit"]) for row in own])
    for column, label, colour, offset in (
        ("calibration_accuracy", "1,000 calibration images", BLUE, -0.2),
        ("accuracy", "10,000 test images", ORANGE, 0.2),
    ):
        panel.bar(exits + offset, 100 - percent(own, column), 0.4, color=colour, label=label)
    panel.set(xlabel="exit", ylabel="risk (error of the exit alone), %", xticks=exits)
    panel.grid(axis="x", visible=False)
    legend_below(figure, panel)
    return figure


def overthinking() -> "Figure":
    """Images that an early exit gets right and the last wrong."""
    figure, panels = new_panels(1, len(NETWORKS), width=2.5, height=3.1, sharey=True)
    for panel, (network, title) in zip(panels[0], NETWORKS.items(), strict=True):
        own = table("overthinking", network=network)[:-1]
        exits = np.array([int(row["exit"]) for row in own])
        panel.bar(exits, percent(own, "right_here_wrong_last"), color=BLUE, label="right here, wrong at the end")
        panel.plot(
            exits,
            percent(own, "right_so_far_wrong_last"),
            color=RED,
            marker="s",
            label="right here or before, wrong at the end",
        )
        panel.set(title=title, xlabel="exit", xticks=exits[:: 2 if len(exits) > 8 else 1])
        panel.grid(axis="x", visible=False)
    panels[0][0].set_ylabel("share of the test images, %")
    legend_below(figure, panels[0][0])
    return figure


def all_methods() -> "Figure":
    """All methods at equal spent budget: accuracy in percent, coloured by the gain on EERO in points."""
    from matplotlib.colors import TwoSlopeNorm

    spends = np.arange(20, 101, 10)
    figure, panels = new_panels(2, 2, width=5.4, height=3.9)
    for panel, (network, title) in zip(panels.flat, NETWORKS.items(), strict=True):
        found = {method: _at_spends(network, method, spends) for method in _methods(network)}
        ordered = sorted(found, key=lambda method: -np.nanmean(found[method] - found["eero"]))
        gains = np.array([found[method] - found["eero"] for method in ordered])
        image = panel.imshow(gains, cmap="RdBu", norm=TwoSlopeNorm(0, -8, 3), aspect="auto")
        for row, method in enumerate(ordered):
            for column, value in enumerate(found[method]):
                if np.isfinite(value):
                    dark = gains[row, column] < -5 or gains[row, column] > 2
                    panel.text(
                        column, row, f"{value:.1f}", ha="center", va="center", size=7, color="w" if dark else "k"
                    )
        panel.set(title=title, xticks=range(len(spends)), yticks=range(len(ordered)))
        panel.set_xticklabels([str(spend) for spend in spends])
        panel.set_yticklabels(ordered, size=7.5)
        panel.grid(visible=False)
    for panel in panels[-1]:
        panel.set_xlabel(SPENT)
    figure.colorbar(image, ax=panels, label="gain on eero, points of accuracy", shrink=0.6)
    return figure


def _methods(network: str) -> list[str]:
    names = dict.fromkeys(row["method"] for row in table("sweep", network=network))
    return [name for name in names if name not in ("oracle", "single_exit")]


def _at_spends(network: str, method: str, spends: np.ndarray) -> np.ndarray:
    """Accuracy in percent at spent budgets, NaN where the method never spends so much or so little."""
    own = sorted(table("sweep", network=network, method=method), key=lambda row: float(row["spent"]))
    spent = percent(own, "spent")
    return np.interp(spends, spent, percent(own, "accuracy"), left=np.nan, right=np.nan)


def training_modes() -> "Figure":
    """Accuracy against FLOPs for every way to train a ResNet-18: each exit alone, and EERO on all exits."""
    figure, panels = new_panels(1, 2, width=5.0, height=4.0, sharey=True)
    runs = [row for row in usual(RUN_ROWS) if row["seed"] == "0"]
    for run, look in RUNS.items():
        if not run.startswith("resnet18"):
            continue
        own = [row for row in runs if row["run"] == run]
        panels[0][0].plot(
            percent(own, "share_alone"),
            percent(own, "test_accuracy"),
            color=look.colour,
            marker=look.marker,
            label=look.label,
        )
        modes = [row for row in usual(MODES) if (row["run"], row["seed"], row["method"]) == (run, "0", "eero")]
        panels[0][1].plot(
            percent(modes, "spent"),
            percent(modes, "accuracy"),
            color=look.colour,
            marker=look.marker,
            label=look.label,
        )
    plain = next(float(row["flops_alone"]) for row in runs if row["run"] == "resnet18_plain")
    stars = (
        ("resnet18_plain", "full ResNet-18, without exits", "*"),
        ("resnet18_longer", "the same, 60 epochs more", "p"),
    )
    for panel in panels[0]:
        for run, label, marker in (*stars, ("resnet10_plain", "ResNet-10, without exits", "h")):
            every = [row for row in usual(RUN_ROWS) if row["run"] == run]
            share = 100 * float(every[0]["flops_alone"]) / plain
            accuracies = percent(every, "test_accuracy")
            panel.plot(
                [share] * len(every), accuracies, marker, color=BLACK, fillstyle="none", markersize=8, label=label
            )
    panels[0][0].set(title="each exit alone", xlabel="FLOPs, % of the full ResNet-18", ylabel=ACCURACY, ylim=(33, 81))
    panels[0][1].set(title="EERO with survivor thresholds on all exits", xlabel="FLOPs spent, % of the full ResNet-18")
    legend_below(figure, panels[0][0], 4)
    return figure


def front() -> "Figure":
    """The first figure of README and site: one network with exits, the best without, and a smaller one."""
    figure, [[panel]] = new_panels(width=6.2, height=3.6)
    run = "resnet18_mixed_distilled"
    curve = [row for row in usual(MODES) if (row["run"], row["seed"], row["method"]) == (run, "0", "eero")]
    runs = {row["run"]: row for row in usual(RUN_ROWS) if row["seed"] == "0" and row["exit"] == "end"}
    full = runs["resnet18_longer"]  # trained as long as the one with exits
    best, smaller = (100 * float(row["test_accuracy"]) for row in (full, runs["resnet10_plain"]))
    share = 100 * float(runs["resnet10_plain"]["flops_alone"]) / float(full["flops_alone"])
    panel.axhline(best, color=BLACK, linestyle="--", linewidth=1.2)
    panel.plot([100], [best], "o", color=BLACK, markersize=7)
    panel.plot([share], [smaller], "s", color=RED, markersize=7)
    panel.plot(percent(curve, "spent"), percent(curve, "accuracy"), color=BLUE, marker="o", linewidth=2.2, markersize=5)
    words = {"fontsize": 12, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.5}}
    panel.text(99, best - 0.35, f"full ResNet-18: {best:.1f} %", ha="right", va="top", **words)
    panel.text(share + 2, smaller, f"ResNet-10, a smaller network: {smaller:.1f} %", color=RED, va="center", **words)
    last = curve[-1]
    end = 100 * float(last["spent"]), 100 * float(last["accuracy"])
    panel.text(end[0] + 2, end[1], f"with exits: up to {end[1]:.1f} %", color=BLUE, va="center", **words)
    panel.set(xlim=(10, 102), ylim=(71, 80.5), xlabel="FLOPs spent per image, % of the full network", ylabel=ACCURACY)
    panel.xaxis.label.set_size(12)
    panel.yaxis.label.set_size(12)
    panel.tick_params(labelsize=11)
    return figure


def temperature() -> "Figure":
    """The effect of the temperature at three budgets: at equal allowed and at equal spent budget."""
    figure, panels = new_panels(2, len(NETWORKS), width=2.7, height=2.5, sharex=True)
    for column, (network, title) in enumerate(NETWORKS.items()):
        for budget, colour, marker in (("0.300000", BLUE, "o"), ("0.500000", GREEN, "^"), ("0.700000", RED, "s")):
            own = table("temperature", network=network, budget=budget, spend_all="False")
            temperatures = [float(row["temperature"]) for row in own]
            label = f"budget {float(budget):.0%}"
            panels[0][column].plot(temperatures, percent(own, "accuracy"), color=colour, marker=marker, label=label)
            reached = [row for row in own if row["accuracy_at_equal_spend"]]
            panels[1][column].plot(
                [float(row["temperature"]) for row in reached],
                percent(reached, "accuracy_at_equal_spend"),
                color=colour,
                marker=marker,
            )
        for panel in panels[:, column]:
            panel.axvline(0.04, color=BLACK, linestyle=":", linewidth=0.8)
        panels[0][column].set(title=title, xscale="log")
        panels[1][column].set(xlabel="temperature β")
    panels[0][0].set_ylabel("accuracy, %,\nat equal allowed budget")
    panels[1][0].set_ylabel("accuracy, %,\nat equal spent budget")
    legend_below(figure, panels[0][0])
    return figure


def calibration_size() -> "Figure":
    """The effect of the number of calibration images at a budget of half of the FLOPs."""
    shown = {
        "eero": ("EERO, survivor", BLUE, "o"),
        "eero_marginal": ("EERO, the paper's", RED, "s"),
        "geometric": ("geometric", GREEN, "^"),
        "eero, no labels": ("EERO, no labels", PURPLE, "D"),
    }
    figure, panels = new_panels(2, len(NETWORKS), width=2.7, height=2.5, sharex=True)
    for column, (network, title) in enumerate(NETWORKS.items()):
        for method, (label, colour, marker) in shown.items():
            own = table("calibration_size", network=network, method=method)
            sizes = [int(row["calibration_images"]) for row in own]
            for panel, value in zip(panels[:, column], ("accuracy", "budget_use"), strict=True):
                middle, spread = percent(own, value), percent(own, f"{value}_deviation")
                panel.fill_between(sizes, middle - spread, middle + spread, color=colour, alpha=0.12, linewidth=0)
                panel.plot(sizes, middle, color=colour, marker=marker, label=label)
        panels[1][column].axhline(100, color=BLACK, linestyle=":", linewidth=1)
        panels[0][column].set(title=title, xscale="log")
        panels[1][column].set(xlabel="calibration images")
    panels[0][0].set_ylabel("accuracy, %")
    panels[1][0].set_ylabel("spent, % of the budget")
    legend_below(figure, panels[0][0], 3)
    return figure


def labels() -> "Figure":
    """What labels gain, at equal spent budget."""
    figure, panels = new_panels(1, len(NETWORKS), width=2.7, height=3.0, sharex=True)
    looks = {"eero": (BLUE, "o"), "optimal_stopping": (ORANGE, "v"), "search": (GREEN, "^")}
    for panel, (network, title) in zip(panels[0], NETWORKS.items(), strict=True):
        for offset, (method, (colour, marker)) in enumerate(looks.items()):
            _gain_bars(panel, table("labels", network=network, method=method), method, colour, marker, offset - 1)
        panel.set(title=title, xlabel="FLOPs spent, %")
    panels[0][0].set_ylabel("gained by labels,\npoints of accuracy")
    legend_below(figure, panels[0][0])
    return figure


def scores() -> "Figure":
    """What the margin gains on other scores, at equal spent budget."""
    figure, panels = new_panels(1, 2, height=3.1, sharey=True)
    looks = {
        "max_probability": ("on the largest probability", GREEN, "^"),
        "negative_entropy": ("on entropy", RED, "s"),
    }
    for panel, method in zip(panels[0], ("eero", "global_threshold"), strict=True):
        for offset, (score, (label, colour, marker)) in enumerate(looks.items()):
            own = table("scores", method=method, score=score)
            _gain_bars(panel, own, label, colour, marker, offset - 0.5)
        panel.set(title=f"{NETWORKS['resnet18_frozen']}, {method}", xlabel=SPENT)
    panels[0][0].set_ylabel("gained by the margin,\npoints of accuracy")
    legend_below(figure, panels[0][0])
    return figure


def eero_gains() -> "Figure":
    """What EERO gains on other published methods at equal spent budget."""
    figure, panels = new_panels(2, 2, width=4.6, height=2.7, sharex=True)
    for panel, (network, title) in zip(panels.flat, NETWORKS.items(), strict=True):
        for offset, rival in enumerate(("geometric", "gaussian", "patience")):
            look = METHODS[rival]
            _gain_bars(
                panel, table("gains", network=network, rival=rival), look.label, look.colour, look.marker, offset - 1
            )
        panel.set(title=title)
    for panel in panels[-1]:
        panel.set_xlabel(SPENT)
    for panel in panels[:, 0]:
        panel.set_ylabel("gain of EERO, points")
    legend_below(figure, panels[0][0])
    return figure


def _gain_bars(
    panel: "Axes", own: Sequence[dict[str, str]], label: str, colour: str, marker: str, offset: float
) -> None:
    """Gains in points with their intervals, moved aside a little so that none hides another."""
    gain = percent(own, "gain")
    errors = [gain - percent(own, "low"), percent(own, "high") - gain]
    panel.errorbar(
        percent(own, "spent") + 1.6 * offset,
        gain,
        errors,
        color=colour,
        marker=marker,
        linestyle="",
        elinewidth=0.9,
        capsize=1.5,
        label=label,
    )
    panel.axhline(0, color=BLACK, linewidth=0.8)


FIGURES: dict[str, tuple[Callable[[], "Figure"], str]] = {
    "accuracy_budget": (accuracy_budget, "accuracy_budget"),
    "convnext_acc": (convnext_acc, "convnext_acc"),
    "budget_check": (budget_check, "budget_check"),
    "epsilon_aggreg": (epsilon_aggreg, "epsilon_aggreg"),
    "epsilon_per_budget": (epsilon_per_budget, "epsilon_per_budget"),
    "risk": (risk, "risk"),
    "msdnet_acc": (msdnet_acc, "MSDNet_acc"),
    "msdnet_budget": (msdnet_budget, "MDSNet_budget"),
    "overthinking": (overthinking, ""),
    "eero_gains": (eero_gains, ""),
    "all_methods": (all_methods, ""),
    "training_modes": (training_modes, ""),
    "front": (front, ""),
    "temperature": (temperature, ""),
    "calibration_size": (calibration_size, ""),
    "labels": (labels, ""),
    "scores": (scores, ""),
    "texts": (texts, ""),
}


def draw(names: Sequence[str], folder: Path = FOLDER, also: Path | None = None) -> None:
    """Draw the figures of these names."""
    for name in names:
        save_figure(FIGURES[name][0](), folder / f"{name}.svg", also)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", help=f"of {', '.join(FIGURES)}; all, unless some are named")
    parser.add_argument("--png", type=Path, help="a folder for the same as PNG")
    options = parser.parse_args()
    draw(options.figures or list(FIGURES), also=options.png)
