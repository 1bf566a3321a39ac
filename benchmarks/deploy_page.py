"""Puts the tables of results/deploy_cpu.csv and results/same_decisions.csv into docs/deploy.md, between their markers.

python benchmarks/deploy_page.py
"""

from collections.abc import Callable, Sequence

from pages import ROOT, Row, markdown, put, rows_of

from alight.files import write_text

PAGE = ROOT / "docs" / "deploy.md"


def same(rows: Sequence[Row]) -> list[list[str]]:
    """How many decisions differ."""
    counts = ("samples", "exits_taken", "other_labels", "other_exits", "near", "different")
    gaps = ("score_gap", "probability_gap")
    names = ("data", "engine", *counts, *gaps)
    head = ["data", "by", "samples", "exits taken", "other labels", "other exits", "of them near", "not near"]
    return [[*head, "score gap", "probability gap"], *([row[name] or "–" for name in names] for row in rows)]


def speed(rows: Sequence[Row]) -> list[list[str]]:
    """Speed-up, what was possible and how much of it was reached."""
    lines = [["network", "exits", "leaving", "batch", "plain", "early exit", "speed-up", "possible", "reached"]]
    for row in rows:
        cells = [row[name] for name in ("model", "exits", "mix", "batch_size")]
        rates = [f"{float(row[name]):.0f}/s" for name in ("dense_per_second", "per_second")]
        spread = " to ".join(f"{float(row[f'speedup_{part}']):.2f}" for part in ("low", "high"))
        reached = " to ".join(f"{float(row[f'reached_{part}']):.0%}" for part in ("low", "high"))
        figures = [
            f"{float(row['speedup']):.2f} ({spread})",
            f"{float(row['possible']):.2f}",
            f"{float(row['reached']):.1%} ({reached})",
        ]
        lines.append([*cells, *rates, *figures])
    return lines


TABLES: dict[str, tuple[str, Callable[[Sequence[Row]], list[list[str]]]]] = {  # by marker: the file and what is shown
    "same decisions": ("same_decisions", same),
    "deploy cpu": ("deploy_cpu", speed),
}


def page(text: str) -> str:
    """The page with its tables."""
    for marker, (name, shown) in TABLES.items():
        rows = rows_of(name)
        first = rows[0]
        where = first["hardware"] + (f", {first['threads']} threads" if "threads" in first else "")
        said = f"\nRun on {first['date']} at {first['commit']}: {where}; {first['versions']}.\n"
        text = put(text, marker, markdown(shown(rows)) + said)
    return text


if __name__ == "__main__":
    write_text(PAGE, page(PAGE.read_text()))
