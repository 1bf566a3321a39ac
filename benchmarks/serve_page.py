"""Puts the service's tables of results/ into docs/deploy.md, each between its markers.

python benchmarks/serve_page.py
"""

from collections.abc import Callable, Sequence

from pages import ROOT, Row, markdown, put, rows_of

from alight.files import write_text

PAGE = ROOT / "docs" / "deploy.md"
NAMES = {"dense": "dense", "early": "early exit"}


def load(rows: Sequence[Row]) -> list[list[str]]:
    """Latency, accuracy and spend of both services at every load."""
    lines = [
        ["seed", "load", "requests a second", "service", "median", "99th percentile", "accuracy", "spend", "answered"]
    ]
    for row in rows:
        latency = [f"{float(row[name]):,.0f} ms" for name in ("p50_ms", "p99_ms")]
        shares = [f"{float(row['accuracy']):.1%}", f"{float(row['spend']):.1%}"]
        answered = f"{row['answered']} of {row['requests']}"
        rate = [f"{float(row['load']):.0%}", f"{float(row['rate']):.1f}"]
        lines.append([row["seed"], *rate, NAMES[row["service"]], *latency, *shares, answered])
    return lines


def load_note(rows: Sequence[Row]) -> str:
    """What the table was made with."""
    capacities = {(NAMES[row["service"]], row["seed"]): f"{float(row['capacity']):.0f}" for row in rows}
    told = ", ".join(f"{name} {capacity} (seed {seed})" for (name, seed), capacity in capacities.items())
    first = rows[0]
    return (
        f"Images a second at most: {told}. Spend is of the plain network's FLOPs. Batches of up to"
        f" {first['batch_size']}, a wait of {first['max_wait_ms']} ms, {float(first['seconds']):.0f} seconds a load."
    )


def faults(rows: Sequence[Row]) -> list[list[str]]:
    """Statuses of malformed requests."""
    lines = [["kind", "requests", "statuses", "other than 4xx"]]
    for row in rows:
        statuses = ", ".join(f"{number} × {status}" for status, number in _pairs(row["statuses"]))
        lines.append([row["kind"], f"{int(row['requests']):,}", statuses, row["not_4xx"]])
    total = sum(int(row["requests"]) for row in rows)
    return [*lines, ["all", f"{total:,}", "", str(sum(int(row["not_4xx"]) for row in rows))]]


def faults_note(rows: Sequence[Row]) -> str:
    """What became of the service."""
    first, last = (float(rows[0][f"memory_mib_{moment}"]) for moment in ("first", "last"))
    ready = "ready" if rows[0]["ready_after"] == "True" else "not ready"
    return (
        f"Memory was {first:.1f} MiB after the first thousand and {last:.1f} MiB in the end; the service was {ready}."
    )


Shown = tuple[str, Callable[[Sequence[Row]], list[list[str]]], Callable[[Sequence[Row]], str]]
TABLES: dict[str, Shown] = {  # by marker: the file, what is shown, and what is said below
    "serve faults": ("serve_faults", faults, faults_note),
    "serve load": ("serve_load", load, load_note),
}


def page(text: str) -> str:
    """The page with its tables."""
    for marker, (name, shown, note) in TABLES.items():
        rows = rows_of(name)
        said = f"\n{note(rows)} Run on {rows[0]['date']} at {rows[0]['commit']}: {rows[0]['hardware']};"
        made = markdown(shown(rows)) + said + f" {rows[0]['versions']}.\n"
        text = put(text, marker, made)
    return text


def _pairs(statuses: str) -> list[list[str]]:
    return [part.split(":") for part in statuses.split()]


if __name__ == "__main__":
    write_text(PAGE, page(PAGE.read_text()))
