"""Tables on pages, rendered from results/*.csv when the site is built.

A directive is a comment with the path of a CSV file, alone on its lines. `<!-- table: results/NAME.csv -->` shows every
column that has a value. Options follow as YAML:

    <!-- table: results/runtime_cpu.csv
    where: {mix: never, threads: [1, 2]}
    latest: [model, batch_size, threads]
    sort: [model, batch_size]
    columns:
      network: model
      heads: heads_share:.1%
      speed-up: "{speedup:.2f} ({speedup_low:.2f} to {speedup_high:.2f})"
    -->

- `where`: columns and their values, one or a list; a list of such mappings keeps the rows that match any of them.
- `latest`: of the rows that agree on these columns only the last one.
- `group`: rows that agree on these columns become one row, which shows all values, reduces (`mean:.1%`) or counts them
  (`count`).
- `sort`: columns to sort by, numbers as numbers.
- `columns`: headings, each with a column, a column and its format, or text with fields in braces; or a list of columns.
- `across` and `cell`: one more table column for each value of `across`, filled with `cell`; `columns` name the rows.
- `names`: what values are called in the table; True is "yes" and False is "no".
- `measured`: a JSON file with date, hardware, versions and commit, for a CSV file that has no such columns.

A format is one of Python's (`.1%`, `,.0f`), or ends with `p`: a hundred times the value, for percentages and points.
Below the table stands on what and when its rows were measured. A missing file, row or column fails the build.
"""

import csv
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import yaml
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DIRECTIVE = re.compile(r"^([ \t]*)<!-- table: (\S+)\s(.*?)-->$", re.DOTALL | re.MULTILINE)
OPTIONS = {"where", "latest", "group", "sort", "columns", "across", "cell", "names", "measured"}
PROVENANCE = ("date", "commit", "hardware", "versions")
REDUCTIONS: dict[str, Callable[..., float]] = {"mean": mean, "median": median, "min": min, "max": max, "sum": sum}
NOTHING = "–"
ANSWERS = {"True": "yes", "False": "no"}


class Cell(tuple[str, ...]):
    """The values that a row has in a column: one, or several in a group."""

    def __format__(self, spec: str) -> str:
        """Format each value, or what they reduce to."""
        reduction, found, rest = spec.partition(":")
        if reduction == "count":
            return str(len(self))
        if found:
            return _formatted(REDUCTIONS[reduction](map(float, self)), rest)
        texts = [_formatted(value, spec) for value in self]
        return texts[0] if len(set(texts)) == 1 else " ".join(texts)


class Row(dict[str, Cell]):
    """The cells of a row by column."""

    def __missing__(self, column: str) -> Cell:
        raise KeyError(f"there is no column {column!r} among {', '.join(self)}")

    def key(self, columns: Sequence[str]) -> tuple[Cell, ...]:
        """Return the cells of these columns."""
        return tuple(self[name] for name in columns)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return the page with a table in the place of every directive."""

    def table(found: re.Match[str]) -> str:
        indent, path, options = found.groups()
        try:
            return "\n".join(indent + line if line else "" for line in render(path, options))
        except (AttributeError, KeyError, OSError, TypeError, ValueError, yaml.YAMLError) as error:
            reason = error.args[0] if isinstance(error, KeyError) else error
            raise PluginError(f"{page.file.src_uri}: the table of {path} cannot be rendered: {reason}") from error

    rendered = DIRECTIVE.sub(table, markdown)
    if left := re.search(r"<!--\s*table\b.*", rendered):
        raise PluginError(
            f"{page.file.src_uri}: {left[0]!r} is not a directive: write <!-- table: FILE -->, alone on its lines"
        )
    return rendered


def render(path: str, text: str = "") -> list[str]:
    """Return the lines of the table that options, given as YAML, make of a CSV file."""
    options: dict[str, Any] = yaml.load(text, yaml.BaseLoader) or {}
    if strange := sorted(set(options) - OPTIONS):
        raise KeyError(f"there is no option {strange[0]!r}: choose from {', '.join(sorted(OPTIONS))}")
    rows = chosen(read(ROOT / path), options)
    shown = options.get("columns", [name for name in rows[0] if name not in PROVENANCE and _has_values(rows, name)])
    fields = {heading: _field(each) for heading, each in _named(shown).items()}
    named = [renamed(row, ANSWERS | options.get("names", {})) for row in rows]
    if "across" in options:
        lines = pivoted(named, fields, _field(options["across"]), _field(options["cell"]))
    else:
        lines = [[*fields], *([each.format_map(row) for each in fields.values()] for row in named)]
    lines = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    lines.insert(1, ["---"] * len(lines[0]))
    return ["| " + " | ".join(line) + " |" for line in lines] + measured(rows, options.get("measured"))


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return [Row((name, Cell([value])) for name, value in row.items()) for row in csv.DictReader(file)]


def chosen(rows: list[Row], options: dict[str, Any]) -> list[Row]:
    """Return the rows that are left once they are filtered, grouped and sorted."""
    where = options.get("where", {})
    rows = [row for row in rows if any(_matches(row, each) for each in ([where] if isinstance(where, dict) else where))]
    if "latest" in options:
        rows = list({row.key(options["latest"]): row for row in rows}.values())
    if "group" in options:
        groups: dict[tuple[Cell, ...], list[Row]] = {}
        for row in rows:
            groups.setdefault(row.key(options["group"]), []).append(row)
        rows = [Row((name, Cell(row[name][0] for row in group)) for name in group[0]) for group in groups.values()]
    if not rows:
        raise ValueError("no row is left")
    return sorted(rows, key=lambda row: [_order(cell[0]) for cell in row.key(options.get("sort", []))])


def renamed(row: Row, names: dict[str, str]) -> Row:
    """Return the row with other names for its values."""
    return Row((name, Cell(names.get(value, value) for value in cell)) for name, cell in row.items())


def pivoted(rows: list[Row], fields: dict[str, str], across: str, cell: str) -> list[list[str]]:
    """Return one line for all rows that agree on the fields, with a cell for every value of `across`."""
    headings = list(dict.fromkeys(across.format_map(row) for row in rows))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        named = tuple(field.format_map(row) for field in fields.values())
        line = lines.setdefault(named, {})
        if (heading := across.format_map(row)) in line:
            raise ValueError(f"two rows are {', '.join(named)} at {heading}: filter them, or name more columns")
        line[heading] = cell.format_map(row)
    body = [[*named, *(line.get(heading, NOTHING) for heading in headings)] for named, line in lines.items()]
    return [[*fields, *headings], *body]


def measured(rows: list[Row], path: str | None = None) -> list[str]:
    """Return a line that says when, at which commit and on what the rows were measured, if they or a file know."""
    if path:
        made = json.loads((ROOT / path).read_text(encoding="utf-8"))
        rows = [Row((name, Cell([str(made[name])])) for name in PROVENANCE)]
    if not set(PROVENANCE) <= set(rows[0]):
        return []
    found = {name: sorted({value for row in rows for value in row[name]} - {""}) for name in PROVENANCE}
    # A device with a name of its own, such as NVIDIA H200, is hardware too; "cpu" and "cuda" are kinds.
    devices = sorted({value for row in rows for value in row.get("device", ()) if " " in value})
    commits = f" at commit {', '.join(found['commit'])}" if found["commit"] else ""
    on = "; ".join(filter(None, [", ".join([*devices, *found["hardware"]]), *found["versions"]]))
    return ["", f"Measured on {' and '.join(found['date'])}{commits}: {on}."]


def _matches(row: Row, where: dict[str, Any]) -> bool:
    asked = {name: [each] if isinstance(each, str) else each for name, each in where.items()}
    return all(any(_order(row[name][0]) == _order(each) for each in values) for name, values in asked.items())


def _has_values(rows: list[Row], column: str) -> bool:
    return any(value for row in rows for value in row[column])


def _order(text: str) -> tuple[bool, float, str]:
    """Numbers by value, before all else."""
    try:
        return False, float(text), ""
    except ValueError:
        return True, 0.0, text


def _named(columns: list[str] | dict[str, str]) -> dict[str, str]:
    return columns if isinstance(columns, dict) else {name: name for name in columns}


def _field(text: str) -> str:
    return text if "{" in text else f"{{{text}}}"


def _formatted(value: str | float, spec: str) -> str:
    if value == "" or not spec:
        return str(value) or NOTHING
    if spec.endswith("p"):
        return f"{100 * float(value):{spec[:-1]}f}"
    return f"{float(value):{spec}}"
