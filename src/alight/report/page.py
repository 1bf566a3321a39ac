"""Points become one page: the template of `assets/`, its style and scripts, and the data as JSON."""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.resources import files
from math import isfinite
from pathlib import Path
from string import Template
from typing import Any

from alight.errors import BadInput, Mismatch
from alight.evaluation.sweep import ORACLE, SINGLE_EXIT, Point, at_equal_spend
from alight.files import PathLike, write_text

SPENDS = range(20, 100, 10)  # columns of the table, in percent of the plain network
COLUMNS = [each.name for each in fields(Point)]


def write_report(
    points: Sequence[Point] | Mapping[str, Sequence[Point]],
    path: PathLike,
    *,
    title: str = "Early exits under a budget",
    promises: Sequence[str] = (),
) -> Path:
    """The path of one self-contained HTML page about these points, written whole or not at all.

    `points` are those of one network, or those of several by name; `promises` are sentences to stand above the figures,
    such as a policy's certificate.
    """
    named = points if isinstance(points, Mapping) else {"": points}
    if not named:
        raise BadInput("there are no networks to report: give at least one, with its points")
    data = {
        "networks": [_network(name, own) for name, own in named.items()],
        "spends": [spend / 100 for spend in SPENDS],
        "columns": COLUMNS,
        "oracle": ORACLE,
        "singleExit": SINGLE_EXIT,
    }
    page = Template(_asset("page.html")).substitute(
        title=html.escape(title),
        promises="\n".join(f'<p class="promise">{html.escape(promise)}</p>' for promise in promises),
        style=_asset("page.css"),
        data=_json_in_html(data),
        d3=_asset("d3.min.js"),
        plot=_asset("plot.umd.min.js"),
        script=_asset("page.js"),
        licences=html.escape(_asset("LICENSES.txt")),
    )
    return write_text(path, page)


def _network(name: str, points: Sequence[Point]) -> dict[str, Any]:
    """One network as the page's script reads it: its points, and its methods at equal spent budget."""
    of_whom = f" of {name}" if name else ""
    if not points:
        raise BadInput(f"there are no points{of_whom} to report: sweep at least one method at one budget")
    plain, unit = points[0].plain_cost, points[0].unit
    if not (isfinite(plain) and plain > 0):
        raise BadInput(f"the points{of_whom} give {plain} as plain_cost: give what the plain network costs per sample")
    strangers = [point for point in points if (point.plain_cost, point.unit) != (plain, unit)]
    if strangers:
        raise Mismatch(
            f"the points{of_whom} are not of one network (plain costs {plain:g} {unit} and"
            f" {strangers[0].plain_cost:g} {strangers[0].unit}): give a mapping from each network's name to its points"
        )
    return {
        "name": name,
        "unit": unit,
        "plainCost": plain,
        "points": [{column: _finite(getattr(point, column)) for column in COLUMNS} for point in points],
        "table": _table(points, [spend / 100 * plain for spend in SPENDS]),
    }


def _table(points: Sequence[Point], spends: Sequence[float]) -> list[dict[str, Any]]:
    """A row per method: its accuracy at each spent budget, None where it never spends that."""
    compared = at_equal_spend(points, spends)
    rivals = [row for row in compared if row.method != ORACLE]
    best = {row.spent: max(round(each.accuracy, 3) for each in rivals if each.spent == row.spent) for row in rivals}
    rows: dict[str, list[dict[str, Any] | None]] = {
        point.method: [None] * len(spends) for point in points if point.method != SINGLE_EXIT
    }
    for row in compared:
        accuracy = round(row.accuracy, 3)  # as the page shows it, so that equal figures are equally bold
        rows[row.method][spends.index(row.spent)] = {
            "accuracy": accuracy,
            "low": _finite(row.accuracy_low),
            "high": _finite(row.accuracy_high),
            "best": row.method != ORACLE and accuracy == best[row.spent],
        }
    return [{"method": method, "cells": cells} for method, cells in rows.items()]


def _finite(value: Any) -> Any:
    """The value, or None where it is a number that JSON does not know."""
    return None if isinstance(value, float) and not isfinite(value) else value


def _json_in_html(data: object) -> str:
    """JSON that no text in it can lead out of its script element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return (files("alight.report") / "assets" / name).read_text(encoding="utf-8")
