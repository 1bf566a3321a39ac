"""Puts the tables of results/ into docs/speed.md, each between its markers.

python benchmarks/speed_page.py
"""

from collections.abc import Callable, Sequence
from statistics import mean, median

from pages import ROOT, Row, markdown, put, rows_of

from alight.files import write_text

PAGE = ROOT / "docs" / "speed.md"


def latest(rows: Sequence[Row]) -> list[Row]:
    """The last run of everything that was run more than once, networks and batch sizes in order."""
    told = ("model", "exits", "mode", "threads", "batch_size", "mix")
    last = {tuple(row[name] for name in told): row for row in rows}
    return sorted(last.values(), key=lambda row: (row["model"], int(row["exits"]), row["mode"], int(row["batch_size"])))


def runtime(rows: Sequence[Row]) -> list[list[str]]:
    """Speed-up, what was possible and how much of it was reached."""
    lines = [["network", "exits", "leaving", "batch", "mode", "threads", "speed-up", "possible", "reached", "commit"]]
    for row in latest(rows):
        cells = [row[name] for name in ("model", "exits", "mix", "batch_size", "mode")]
        threads = row["threads"] if row["device"] == "cpu" else "–"
        reached = f"{float(row['reached']):.1%}"
        lines.append([*cells, threads, _spread(row, "speedup"), _number(row["possible"]), reached, row["commit"]])
    return lines


def asking(rows: Sequence[Row]) -> list[list[str]]:
    """What it costs to ask every head when nobody leaves, beyond the heads themselves."""
    lines = [["network", "batch", "threads", "slower than the plain network", "of it the heads", "all else", "commit"]]
    for row in (each for each in latest(rows) if each["mix"] == "never"):
        slower, heads = 1 / float(row["speedup"]) - 1, float(row["heads_share"])
        figures = [f"{slower:.1%}", f"{heads:.1%}", f"{slower - heads:.1%}"]
        lines.append([row["model"], row["batch_size"], row["threads"], *figures, row["commit"]])
    return lines


def timeline(rows: Sequence[Row]) -> list[list[str]]:
    """Where the time of a run goes that stages and heads alone would not take."""
    shares = ("alone", "moves", "pauses", "edges")
    lines = [["network", "leaving", "batch", "mode", "stages and heads", "moves", "pauses", "start and end", "commit"]]
    for row in rows:
        cells = [row[name] for name in ("model", "mix", "batch_size", "mode")]
        lines.append([*cells, *(f"{float(row[name]):.1%}" for name in shares), row["commit"]])
    return lines


def recording(rows: Sequence[Row]) -> list[list[str]]:
    """What recordings take beside the plain network."""
    lines = [["network", "batch", "kept", "times the plain network", "heads' share", "at most", "commit"]]
    for row in rows:
        bounds = [f"{float(row['heads_share']):.1%}", f"{float(row['at_most']):.3f}"]
        cells = [row["model"], row["batch_size"], row["kept"], _spread(row, "ratio", 3), *bounds, row["commit"]]
        lines.append(cells)
    return lines


def planner(rows: Sequence[Row]) -> list[list[str]]:
    """What plans foretold, and what came."""
    header = ["network", "batch", "asked", "graphs", "open exits", "over a bare loop", "over the plain network"]
    lines = [[*header, "foretold", "foretold images/s", "accuracy", "plain network's", "commit"]]
    told = ("network", "batch_size", "question", "graphs")
    rows = [{**row, "network": row["network"].rpartition("-")[0]} for row in rows]
    last = {tuple(row[name] for name in told): row for row in rows}
    for row in sorted(last.values(), key=lambda row: (row["network"], int(row["batch_size"]), row["question"])):
        name, *asked = (row[each] for each in told)
        foretold = f"{float(row['predicted']):.0f} ({float(row['predicted_over_measured']) - 1:+.0%})"
        beside = _number(row["over_plain"]) if row["over_plain"] else "–"
        accuracy = [f"{float(row[each]):.1%}" if row[each] else "–" for each in ("accuracy", "plain_accuracy")]
        figures = [row["open_exits"], _spread(row, "faster"), beside, _number(row["foretold"]), foretold]
        asked[-1] = "yes" if asked[-1] == "True" else "no"
        lines.append([name, *asked, *figures, *accuracy, row["commit"]])
    return lines


def planned_loss(rows: Sequence[Row]) -> list[list[str]]:
    """What plans lose on fresh images, by the confidence with which they were made."""
    lines = [["network", "confidence", "budget, median", "lost on fresh images", "lowest to highest", "over 0.01"]]
    for name, confidence in dict.fromkeys((row["network"], row["confidence"]) for row in rows):
        ours = [row for row in rows if (row["network"], row["confidence"]) == (name, confidence)]
        lost = [float(row["fresh_loss"]) for row in ours]
        figures = [f"{median(float(row['budget']) for row in ours):.0%}", f"{mean(lost):.2%}"]
        above = f"{sum(each > 0.01 for each in lost)} of {len(lost)}"
        lines.append([name, f"{float(confidence):.0%}", *figures, f"{min(lost):.2%} to {max(lost):.2%}", above])
    return lines


def instead(rows: Sequence[Row]) -> list[list[str]]:
    """Accuracy, latency and throughput of what a user would pick."""
    lines = [["what", "accuracy", "one image: median", "99th percentile", "in batches of 64, lowest to highest"]]
    for row in rows:
        latency = [f"{float(row[name]):.1f} ms" for name in ("p50_ms", "p99_ms")]
        rates = [f"{float(row[f'per_second{part}']):.0f}" for part in ("", "_low", "_high")]
        accuracy = f"{float(row['accuracy']):.1%}"
        lines.append([row["name"], accuracy, *latency, f"{rates[0]}/s ({rates[1]} to {rates[2]})"])
    return lines


TABLES: dict[str, tuple[str, Callable[[Sequence[Row]], list[list[str]]]]] = {  # by marker: the file and what is shown
    "cuda": ("runtime_cuda", runtime),
    "cpu": ("runtime_cpu", runtime),
    "timeline": ("timeline_cuda", timeline),
    "asking": ("runtime_cpu", asking),
    "recording cuda": ("recording_cuda", recording),
    "recording cpu": ("recording_cpu", recording),
    "planner cuda": ("planner_cuda", planner),
    "planner cpu": ("planner_cpu", planner),
    "planned loss": ("planned_loss", planned_loss),
    "instead": ("instead", instead),
}


def page(text: str) -> str:
    """The page with its tables."""
    for marker, (name, shown) in TABLES.items():
        rows = rows_of(name)
        text = put(text, marker, markdown(shown(rows)) + _made(rows))
    return text


def _made(rows: Sequence[Row]) -> str:
    row, days = rows[0], sorted({each["date"] for each in rows})
    where = row["hardware"] if row.get("device", "cpu") in ("cpu", "cuda") else row["device"]
    return f"\nRun on {' and '.join(days)}: {where}; {row['versions']}.\n"


def _spread(row: Row, name: str, digits: int = 2) -> str:
    middle, low, high = (_number(row[f"{name}{part}"], digits) for part in ("", "_low", "_high"))
    return f"{middle} ({low} to {high})"


def _number(text: str, digits: int = 2) -> str:
    return f"{float(text):.{digits}f}"


if __name__ == "__main__":
    write_text(PAGE, page(PAGE.read_text()))
