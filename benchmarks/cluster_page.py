"""Puts the tables of results/cluster.csv and results/large_calibration.csv into docs/deploy.md, between their markers.

python benchmarks/cluster_page.py
"""

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from alight.files import write_text

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "deploy.md"
Row = dict[str, str]


def cluster(rows: Sequence[Row]) -> list[list[str]]:
    """What was measured on Ray, and what was asked."""
    lines = [["network", "what", "rows", "workers", "measured", "target"]]
    for row in rows:
        value = f"{float(row['value']):,.2f}" if row["unit"] in ("times", "s") else f"{float(row['value']):,.0f}"
        size = [f"{int(row['rows']):,}", row["workers"]]
        lines.append([row["network"], row["what"], *size, f"{value} {row['unit']}", row["target"]])
    return lines


def calibration(rows: Sequence[Row]) -> list[list[str]]:
    """Calibration part by part beside that in memory."""
    lines = [["rows", "recording", "read", "peak memory", "time", "same policy"]]
    for row in rows:
        figures = [f"{float(row[name]):,.0f} {unit}" for name, unit in (("held", "MB"), ("seconds", "s"))]
        same = "yes" if row["same_policy"] == "True" else "no"
        lines.append([f"{int(row['rows']):,}", f"{float(row['megabytes']):,.0f} MB", row["way"], *figures, same])
    return lines


TABLES: dict[str, tuple[str, Callable[[Sequence[Row]], list[list[str]]]]] = {  # by marker: the file and what is shown
    "cluster": ("cluster", cluster),
    "large calibration": ("large_calibration", calibration),
}


def page(text: str) -> str:
    """The page with its tables."""
    for marker, (name, shown) in TABLES.items():
        rows = list(csv.DictReader(io.StringIO((ROOT / f"results/{name}.csv").read_text())))
        start, end = f"<!-- {marker} -->\n", f"<!-- end of {marker} -->"
        before, found, rest = text.partition(start)
        if not found or end not in rest:
            raise SystemExit(f"{PAGE.name} has no place {start.strip()} ... {end}: make one")
        head, *body = shown(rows)
        table = "".join("| " + " | ".join(cells) + " |\n" for cells in (head, ["---"] * len(head), *body))
        made = f"\nRun on {rows[0]['date']}: {rows[0]['hardware']}; {rows[0]['versions']}.\n"
        text = before + start + table + made + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    write_text(PAGE, page(PAGE.read_text()))
