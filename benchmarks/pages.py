"""Tables of results/ on pages of docs/, each between its markers: <!-- name --> and <!-- end of name -->."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
Row = dict[str, str]


def rows_of(name: str) -> list[Row]:
    """The rows of a file in results/."""
    return list(csv.DictReader(io.StringIO((ROOT / f"results/{name}.csv").read_text())))


def put(text: str, marker: str, content: str) -> str:
    """The page's text with this between the markers."""
    start, end = f"<!-- {marker} -->\n", f"<!-- end of {marker} -->"
    before, found, rest = text.partition(start)
    if not found or end not in rest:
        raise SystemExit(f"the page has no place {start.strip()} ... {end}: make one")
    return before + start + content + end + rest.partition(end)[2]


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table, its first line the head."""
    head, *body = lines
    rows = [head, ["---"] * len(head), *body]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)
