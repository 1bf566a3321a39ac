"""Puts the tables of results/cluster.csv and results/large_calibration.csv into docs/deploy.md, between their markers.

python benchmarks/cluster_page.py
"""

from collections.abc import Callable, Sequence

from pages import ROOT, Row, markdown, put, rows_of

from alight.files import write_text

PAGE = ROOT / "docs" / "deploy.md"


def cluster(rows: Sequence[Row]) -> list[list[str]]:
    """What was measured on Ray, and what was asked."""
    lines = [["network", "what", "rows", "workers", "measured", "target"]]
    for row in rows:
        value = f"{float(row['value']):,.2f}" if row["unit"] in ("times", "s") else f"{float(row['value']):,.0f}"
        size = [f"{int(row['rows']):,}", row["workers"]]
        lines.append([row["network"], row["what"], *size, f"{value} {row['unit']}", row["target"]])
    return lines


def calibration(rows: Sequence[Row]) -> list[list[str]]:
    """Calibration on a random sample beside that on all rows."""
    lines = [["rows", "recording", "calibrated on", "peak memory", "CPU time", "budget spent", "accuracy"]]
    for row in rows:
        figures = [f"{float(row[name]):,.0f} {unit}" for name, unit in (("held", "MB"), ("seconds", "s"))]
        figures += [f"{float(row[name]):.2%}" for name in ("spent", "accuracy")]
        lines.append([f"{int(row['rows']):,}", f"{float(row['megabytes']):,.0f} MB", row["way"], *figures])
    return lines


TABLES: dict[str, tuple[str, Callable[[Sequence[Row]], list[list[str]]]]] = {  # by marker: the file and what is shown
    "cluster": ("cluster", cluster),
    "large calibration": ("large_calibration", calibration),
}


def page(text: str) -> str:
    """The page with its tables."""
    for marker, (name, shown) in TABLES.items():
        rows = rows_of(name)
        made = f"\nRun on {rows[0]['date']}: {rows[0]['hardware']}; {rows[0]['versions']}.\n"
        text = put(text, marker, markdown(shown(rows)) + made)
    return text


if __name__ == "__main__":
    write_text(PAGE, page(PAGE.read_text()))
