"""The figures of docs/scale.md, drawn from results/ alone.

python experiments/capacity_figures.py --png FOLDER      # also as PNG, to look at
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from capacity import BINS, device_of
from figure_style import BLACK, BLUE, GREEN, ORANGE, RED, Look, legend_below, panels, save
from recorded_cifar100 import RESULTS, rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = RESULTS.parent / "docs" / "figures"
KINDS = {"cpu": "CPU core, ResNet-18", "h200": "H200, ResNet-50"}
LOOKS = {
    "dense": Look("plain network", BLACK, "s"),
    "stream": Look("exits, contract stream", BLUE, "o"),
    "batch": Look("exits, contract batch", GREEN, "^"),
    "plain": Look("exits, plain thresholds", RED, "v"),
}
TICKS = (10, 20, 50, 100, 200, 500, 1000, 2000)  # ms
Rows = Sequence[dict[str, str]]


def column(own: Rows, name: str) -> np.ndarray:
    """A column as numbers."""
    return np.array([float(row[name]) for row in own])


def chosen(name: str, **where: object) -> list[dict[str, str]]:
    """The rows of a result in which columns have these values."""
    found = rows(RESULTS / f"capacity_{name}.csv")
    return [row for row in found if all(row[key] == str(value) for key, value in where.items())]


def load() -> "Figure":
    """Delays of one device as its rate grows."""
    figure, [own_panels] = panels(1, 2, sharey=False)
    for panel, (kind, title) in zip(own_panels, KINDS.items(), strict=True):
        for how in ("dense", "stream"):
            own, look = chosen("load", device=kind, serving=how), LOOKS[how]
            rates = column(own, "per_second")
            panel.plot(rates, column(own, "p99_ms"), color=look.colour, marker=look.marker, label=f"{look.label}: 99 %")
            panel.plot(rates, column(own, "p50_ms"), color=look.colour, linestyle=":", label=f"{look.label}: 50 %")
        panel.axhline(1e3 * device_of(kind).target, color=ORANGE, linewidth=1, label="asked for")
        panel.set(title=title, xlabel="images a second, of one device", ylabel="answered within, ms", yscale="log")
        panel.set_yticks(TICKS, [str(tick) for tick in TICKS])
        panel.set(ylim=(10, 3000))
        panel.tick_params(axis="y", which="minor", labelleft=False)
        panel.locator_params(axis="x", nbins=5)
    legend_below(figure, own_panels[0])
    return figure


def day() -> "Figure":
    """A day of a fleet for a billion images: the load, what is spent, and how long answers take."""
    figure, [[rate, spent, delay]] = panels(1, 3, width=3.5)
    kind = "cpu"
    fleet = chosen("day", device=kind, serving="stream")[0]["devices"]
    curves = {"stream": fleet, "plain": fleet, "batch": fleet}
    curves["dense"] = max((row["devices"] for row in chosen("day", device=kind, serving="dense")), key=int)
    for how, devices in curves.items():
        own, look = chosen("day_series", device=kind, serving=how, devices=devices), LOOKS[how]
        hours = 24 * (column(own, "bin") + 0.5) / len(own)
        style = {"color": look.colour, "label": f"{look.label}, {devices} devices"}
        rate.plot(hours, column(own, "per_second") * int(devices) / 1e3, color=look.colour)
        if how != "dense":
            spent.plot(hours, 100 * column(own, "spent"), **style)
        delay.plot(hours, column(own, "p99_ms"), **style)
    for panel in (rate, spent, delay):
        panel.set(xlabel="hour of the day", xticks=range(0, 25, 6))
    rate.set(title="the fleet's load", ylabel="thousand images a second", ylim=(0, None))
    spent.set(title="spent", ylabel="% of the budget")
    delay.set(title="99 % are answered within", ylabel="ms", ylim=(0, None))
    legend_below(figure, delay, 2)
    return figure


STRAINS = {  # by part: who is shown, and the third panel's column, title and the end of what is shaded
    "burst": (("stream", "plain", "dense"), "refused", "refused", 2 / 3),
    "drift": (("stream", "plain", "batch"), "accuracy", "accuracy", 1.0),
}


def strain() -> "Figure":
    """A burst, and images that become dearer: what is spent and how long answers take, by time."""
    figure, axes = panels(2, 3, width=3.5, height=2.7)
    shown: dict[str, Any] = {}
    for (spent, delay, third), (part, (names, name, title, end)) in zip(axes, STRAINS.items(), strict=True):
        made = chosen(part, device="cpu", serving="stream")[0]
        minutes = float(made["seconds"]) / 60
        for how in names:
            own, look = chosen(f"{part}_series", device="cpu", serving=how, devices=made["devices"]), LOOKS[how]
            along = minutes * (column(own, "bin") + 0.5) / BINS
            if how != "dense":
                spent.plot(along, 100 * column(own, "spent"), color=look.colour)
            shown[look.label] = delay.plot(along, column(own, "p99_ms") / 1e3, color=look.colour)[0]
            third.plot(along, 100 * column(own, name), color=look.colour)
        for panel in (spent, delay, third):
            panel.axvspan(minutes / 3, end * minutes, color=ORANGE, alpha=0.12, linewidth=0)
            panel.set(xlabel="minutes at the day's peak")
        spent.set(title=f"{part}: spent", ylabel="% of the budget")
        delay.set(title="99 % are answered within", ylabel="seconds", ylim=(0, None))
        third.set(title=title, ylabel="% of the images")
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=2)
    return figure


FIGURES: dict[str, Callable[[], "Figure"]] = {"scale_load": load, "scale_day": day, "scale_strain": strain}


def draw(names: Sequence[str], folder: Path = FOLDER, also: Path | None = None) -> None:
    """Draw the figures of these names into a folder."""
    for name in names:
        save(FIGURES[name](), folder / f"{name}.svg", also)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", type=Path, help="a folder for the same as PNG")
    draw(list(FIGURES), also=parser.parse_args().png)
