"""Puts tables of exported networks from results/ into docs/deploy.md, each between its markers.

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


def coverage(rows: Sequence[Row]) -> list[list[str]]:
    """Which networks are exported, and how far they are from torch."""
    lines = [["network", "exported", "captured by", "size of a sample", "largest difference"]]
    for row in rows:
        ways = " and ".join(sorted({*row["captured_by"].split(", ")})) or "–"
        lines.append([row["network"], row["problem"] or "yes", ways, row["sizes"], row["largest_difference"]])
    return lines


def compiled(rows: Sequence[Row]) -> list[list[str]]:
    """What compiled stages take to make, and their speed beside eager torch."""
    lines = [["network", "format", "stages", "export", "size", "other labels", "other exits", "batch", "eager", "ours"]]
    lines[0].append("speed-up")
    for row in rows:
        made = [f"{float(row['export_seconds']):.0f} s", f"{float(row['mib']):.0f} MiB"]
        same = [f"{row[name]} of {row['samples']}" for name in ("other_labels", "other_exits")]
        rates = [f"{float(row[name]):.0f}/s" for name in ("eager_per_second", "per_second")]
        spread = " to ".join(f"{float(row[f'speedup_{part}']):.2f}" for part in ("low", "high"))
        cells = [row[name] for name in ("network", "format", "stages")]
        lines.append([*cells, *made, *same, row["batch_size"], *rates, f"{float(row['speedup']):.2f} ({spread})"])
    return lines


TABLES: dict[str, tuple[str, Callable[[Sequence[Row]], list[list[str]]]]] = {  # by marker: the file and what is shown
    "same decisions": ("same_decisions", same),
    "deploy cpu": ("deploy_cpu", speed),
    "export coverage": ("export_coverage", coverage),
    "compiled cpu": ("compiled_cpu", compiled),
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
