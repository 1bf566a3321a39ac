"""A page becomes one file: the template of `assets/`, its style and scripts, and what it shows as JSON."""

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from alight.evaluation import ORACLE, SINGLE_EXIT, Point, at_equal_spend
from alight.files import PathLike, write_text
from alight.report.contents import Page, Planned, ReportedNetwork

SPENDS = range(20, 100, 10)  # columns of the table, in percent of the full network
COLUMNS = [each.name for each in fields(Point)]
SCRIPTS = ("data.js", "looks.js", "figures.js", "tables.js", "page.js")  # one after the other, in one scope


def write_report(
    shown: Sequence[Point] | ReportedNetwork | Mapping[str, Sequence[Point] | ReportedNetwork],
    path: PathLike,
    *,
    title: str = "Early exits under a budget",
    guarantees: Sequence[str] = (),
) -> Path:
    """Write one self-contained HTML page about these points, whole or not at all, and return its path.

    `shown` are the points of one network, or a `ReportedNetwork` of them, or several by name;
    `guarantees` are sentences to stand above the figures, such as a policy's certificate.

    >>> import tempfile
    >>> from alight import Point
    >>> points = [Point("eero", 4.0, accuracy=0.8, mean_cost=3.0, full_cost=6.0)]
    >>> write_report(points, f"{tempfile.mkdtemp()}/report.html").name
    'report.html'
    """
    return write_text(path, as_html(Page(title, _networks(shown), tuple(guarantees))))


def as_html(page: Page) -> str:
    """Return the page as HTML that needs no other file."""
    data = {
        "networks": [_network(network) for network in page.networks],
        "spends": [spend / 100 for spend in SPENDS],
        "columns": COLUMNS,
        "oracle": ORACLE,
        "singleExit": SINGLE_EXIT,
    }
    return Template(_asset("page.html")).substitute(
        title=html.escape(page.title),
        guarantees="\n".join(f'<p class="guarantee">{html.escape(guarantee)}</p>' for guarantee in page.guarantees),
        style=_asset("page.css"),
        data=_json_in_html(data),
        d3=_asset("d3.min.js"),
        plot=_asset("plot.umd.min.js"),
        script="\n".join(map(_asset, SCRIPTS)),
        licences=html.escape(_asset("LICENSES.txt")),
    )


def _networks(
    shown: Sequence[Point] | ReportedNetwork | Mapping[str, Sequence[Point] | ReportedNetwork],
) -> tuple[ReportedNetwork, ...]:
    named = shown if isinstance(shown, Mapping) else {"": shown}
    return tuple(
        replace(own, name=name or own.name) if isinstance(own, ReportedNetwork) else ReportedNetwork(own, name)
        for name, own in named.items()
    )


def _network(network: ReportedNetwork) -> dict[str, Any]:
    """Return one network as the page's scripts read it: points row by row, and methods at equal spent budget."""
    points, full_cost = network.points, network.full_cost
    return {
        "name": network.name,
        "unit": network.unit,
        "fullCost": full_cost,
        "exits": list(network.exits),
        "note": network.note,
        "points": [[_in_json(getattr(point, column)) for column in COLUMNS] for point in points],
        "table": _table(points, [spend / 100 * full_cost for spend in SPENDS]),
        "examples": asdict(network.examples) if network.examples else None,
        "plan": _plan(network.plan, network.exits) if network.plan else None,
    }


def _plan(plan: Planned, exits: Sequence[str]) -> dict[str, Any]:
    names = [exits[index] if exits else f"exit {index}" for index in plan.open_exits]
    return {
        "pays": plan.pays,
        "reason": plan.reason,
        "batchSize": plan.batch_size,
        "openExits": names,
        "full": {"throughput": plan.full_throughput, "accuracy": plan.full_accuracy},
        "planned": {"throughput": plan.throughput, "accuracy": plan.accuracy},
    }


def _table(points: Sequence[Point], spends: Sequence[float]) -> list[dict[str, Any]]:
    """Return a row per method: its accuracy at each spent budget, None where it never spends that."""
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
            "low": _in_json(row.accuracy_low),
            "high": _in_json(row.accuracy_high),
            "best": row.method != ORACLE and accuracy == best[row.spent],
        }
    return [{"method": method, "cells": cells} for method, cells in rows.items()]


def _in_json(value: Any) -> Any:
    """Return the value; a number that JSON does not know becomes None, "inf" or "-inf"."""
    if isinstance(value, tuple):
        return [_in_json(each) for each in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else str(value)


def _json_in_html(data: object) -> str:
    """Return JSON that no text in it can lead out of its script element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return (files("alight.report") / "assets" / name).read_text(encoding="utf-8")
