"""Puts short tables of results/ into README.md, docs/index.md and docs/does_not_pay.md, each between its markers.

python experiments/short_tables.py
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from alight.files import write_text

ROOT = Path(__file__).parent.parent
Row = dict[str, str]
PAGES = {
    "README.md": ("instead",),
    "docs/index.md": ("instead",),
    "docs/does_not_pay.md": ("asking", "possible", "tail"),
}
SHOWN = {  # by the name in results/instead.csv: the name on the page
    "ResNet-18": "plain ResNet-18",
    "ResNet-10": "plain ResNet-10, half of the FLOPs",
    "earlyon, half of the FLOPs": "ResNet-18 with exits: earlyon, half of the FLOPs",
    "alight, half of the FLOPs": "ResNet-18 with exits: alight, half of the FLOPs",
    "alight, planned to lose 0.01": "ResNet-18 with exits: alight, as `plan` says",
}
DEVICES = {"cpu": "two cores", "cuda": "H200"}


def instead() -> str:
    """What is saved at which loss, on the clock."""
    rows = {row["name"]: row for row in read("instead")}
    plain = float(rows["ResNet-18"]["per_second"])
    lines = [["", "accuracy", "images/s in batches of 64", "speed-up", "one image, median"]]
    for name, told in SHOWN.items():
        row = rows[name]
        rate = float(row["per_second"])
        cells = [
            f"{float(row['accuracy']):.1%}",
            f"{rate:.0f}",
            f"{rate / plain:.1f}x",
            f"{float(row['p50_ms']):.1f} ms",
        ]
        lines.append([told, *cells])
    return markdown(lines) + made(rows["ResNet-18"])


def tail() -> str:
    """Median and 99th percentile of single images."""
    rows = {row["name"]: row for row in read("instead")}
    lines = [["", "median", "99th percentile"]]
    for name in ("ResNet-18", "ResNet-10", "alight, half of the FLOPs", "alight, planned to lose 0.01"):
        lines.append([SHOWN[name], *(f"{float(rows[name][each]):.1f} ms" for each in ("p50_ms", "p99_ms"))])
    return markdown(lines) + made(rows["ResNet-18"])


def asking() -> str:
    """How much slower than the plain network it is if all heads are asked and nobody leaves."""
    lines = [["network", "on", "batch", "slower if nobody leaves"]]
    for device, row in measured("never"):
        lines.append([row["model"], DEVICES[device], row["batch_size"], f"{1 / float(row['speedup']) - 1:.0%}"])
    return markdown(lines)


def possible() -> str:
    """How much faster four exits could make it if as many samples left at each as at the end."""
    lines = [["network", "on", "batch", "at most", "reached"]]
    for device, row in measured("uniform"):
        cells = [row["model"], DEVICES[device], row["batch_size"]]
        lines.append([*cells, f"{float(row['possible']):.2f}x", f"{float(row['speedup']):.2f}x"])
    return markdown(lines)


def measured(mix: str) -> list[tuple[str, Row]]:
    """The latest run of every network, device and batch size with four exits, not compiled, on all cores."""
    latest = {
        (device, row["model"], int(row["batch_size"])): row
        for device in DEVICES
        for row in read(f"runtime_{device}")
        if (row["mix"], row["mode"], row["exits"]) == (mix, "eager", "4") and row["threads"] != "1"
    }
    return [(device, latest[device, model, size]) for device, model, size in sorted(latest)]


def read(name: str) -> list[Row]:
    """The rows of a result."""
    return list(csv.DictReader(io.StringIO((ROOT / f"results/{name}.csv").read_text(encoding="utf-8"))))


def page(text: str, markers: Sequence[str]) -> str:
    """The page with its tables."""
    for marker in markers:
        start, end = f"<!-- {marker} -->\n", f"<!-- end of {marker} -->"
        before, found, rest = text.partition(start)
        if not found or end not in rest:
            raise SystemExit(f"there is no place {start.strip()} ... {end} on the page: make one")
        text = before + start + TABLES[marker]() + end + rest.partition(end)[2]
    return text


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Rows as a table."""
    head, *body = lines
    return "".join("| " + " | ".join(row) + " |\n" for row in [head, ["---"] * len(head), *body])


def made(row: Row) -> str:
    """On what it was measured."""
    return f"\nMeasured on {row['date']}: {row['hardware']}; {row['versions']}.\n"


TABLES = {"instead": instead, "tail": tail, "asking": asking, "possible": possible}

if __name__ == "__main__":
    for name, markers in PAGES.items():
        write_text(ROOT / name, page((ROOT / name).read_text(encoding="utf-8"), markers))
