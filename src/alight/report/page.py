"""One HTML page: three numbers, samples by the exit they left at, accuracy against cost, and what is behind them."""

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Protocol

from alight.errors import BadInput, Mismatch
from alight.evaluation import ORACLE, SINGLE_EXIT, Point, area_under_curve, at_equal_spend
from alight.files import PathLike, write_text
from alight.report.samples import Examples

TITLE = "Early exits under a budget"
SPENDS = range(20, 100, 10)  # columns of the table, in percent of the full network
COLUMNS = [each.name for each in fields(Point)]
SCRIPTS = ("data.js", "looks.js", "opening.js", "figures.js", "tables.js", "page.js")  # in this order, in one scope


@dataclass(frozen=True)
class MeasuredSpeed:
    """How many times as fast as the full network the chosen policy runs on this machine.

    >>> MeasuredSpeed(1.8, low=1.7, high=1.9, batch_size=64).speedup
    1.8
    """

    speedup: float
    low: float = math.nan  # a quarter of the runs are below
    high: float = math.nan  # a quarter of the runs are above
    batch_size: int = 0  # 0 where it is not known
    latency: float = math.nan  # milliseconds of one sample alone, with exits
    full_latency: float = math.nan  # and of the full network


@dataclass(frozen=True)
class Baseline:
    """A smaller network, which reaches this accuracy at this cost without exits."""

    name: str
    accuracy: float
    cost: float  # per sample, in the unit of the points


class Planned(Protocol):
    """A plan (`alight.plan`) as far as a page shows it: read only, so that nothing here needs torch."""

    @property
    def pays(self) -> bool: ...  # noqa: D102
    @property
    def throughput(self) -> float: ...  # noqa: D102
    @property
    def full_throughput(self) -> float: ...  # noqa: D102
    @property
    def accuracy(self) -> float: ...  # noqa: D102
    @property
    def full_accuracy(self) -> float: ...  # noqa: D102
    @property
    def batch_size(self) -> int: ...  # noqa: D102
    @property
    def open_exits(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def reason(self) -> str: ...  # noqa: D102


@dataclass(frozen=True)
class ReportedNetwork:
    """What a page shows of one network.

    >>> ReportedNetwork(points=(Point("eero", budget=4.0, accuracy=0.8, mean_cost=3.0, full_cost=8.0),)).num_exits
    0
    """

    points: Sequence[Point]
    name: str = ""
    exits: Sequence[str] = ()  # their names, where they have some
    examples: Examples | None = None
    plan: Planned | None = None
    note: str = ""  # where and how it was measured
    chosen: Point | None = None  # of the policy that is run, on test data: the page opens at its budget and marks it
    speed: MeasuredSpeed | None = None  # of the chosen policy
    smaller: Baseline | None = None  # a network to compare with
    guarantees: Sequence[str] = ()  # of the chosen policy: the page folds each behind its first sentence
    caution: str = ""  # why the numbers say little: the page opens with it
    verdict: str = ""  # whether the chosen policy pays, and what is lost

    def __post_init__(self) -> None:
        mine = f" of {self.name}" if self.name else ""
        if not self.points:
            raise BadInput(f"there are no points{mine} to report: sweep at least one method at one budget")
        cost, unit = self.full_cost, self.unit
        if not (math.isfinite(cost) and cost > 0):
            raise BadInput(f"the points{mine} give {cost} as full_cost: give what the full network costs per sample")
        for point in self._all_points:
            if (point.full_cost, point.unit) != (cost, unit):
                raise Mismatch(
                    f"the points{mine} are not of one network (full networks of {cost:g} {unit} and"
                    f" {point.full_cost:g} {point.unit}): give a mapping from each network's name to its points"
                )
        if self.exits and self.num_exits not in (0, len(self.exits)):
            raise Mismatch(f"{len(self.exits)} names for {self.num_exits} exits{mine}: give one each")
        if self.speed and not self.chosen:
            raise BadInput(f"a speed{mine}, but not whose: give the point of the policy that was timed as `chosen`")

    @property
    def _all_points(self) -> list[Point]:
        return [*self.points, *([self.chosen] if self.chosen else [])]

    @property
    def full_cost(self) -> float:
        """What the full network costs per sample."""
        return self.points[0].full_cost

    @property
    def unit(self) -> str:
        """The unit of all costs and budgets."""
        return self.points[0].unit

    @property
    def num_exits(self) -> int:
        """How many exits the points know of."""
        return max(len(point.exit_shares) for point in self._all_points)


Shown = Sequence[Point] | ReportedNetwork  # of one network


def write_report(
    shown: Shown | Mapping[str, Shown], path: PathLike, *, title: str = TITLE, guarantees: Sequence[str] = ()
) -> Path:
    """Write one self-contained HTML page about these points, whole or not at all, and return its path.

    Args:
        shown: Points of one network, a `ReportedNetwork` of them, or several by name.
        path: The file to write.
        title: Of the page.
        guarantees: That hold for all of them, such as a certificate.

    >>> import tempfile
    >>> points = [Point("eero", 4.0, accuracy=0.8, mean_cost=3.0, full_cost=6.0)]
    >>> write_report(points, f"{tempfile.mkdtemp()}/report.html").name
    'report.html'
    """
    return write_text(path, as_html(shown, title=title, guarantees=guarantees))


def as_html(shown: Shown | Mapping[str, Shown], *, title: str = TITLE, guarantees: Sequence[str] = ()) -> str:
    """Return the page of `write_report` as HTML that needs no other file."""
    networks = [
        replace(own, name=name or own.name) if isinstance(own, ReportedNetwork) else ReportedNetwork(own, name)
        for name, own in (shown if isinstance(shown, Mapping) else {"": shown}).items()
    ]
    if not networks:
        raise BadInput("there are no networks to report: give at least one, with its points")
    data = {
        "networks": [_network(network) for network in networks],
        "spends": [spend / 100 for spend in SPENDS],
        "columns": COLUMNS,
        "guarantees": list(guarantees),
        "oracle": ORACLE,
        "singleExit": SINGLE_EXIT,
    }
    return Template(_asset("page.html")).substitute(
        title=html.escape(title),
        style=_asset("page.css"),
        data=_json_in_html(data),
        d3=_asset("d3.min.js"),
        plot=_asset("plot.umd.min.js"),
        script="\n".join(map(_asset, SCRIPTS)),
        licences=html.escape(_asset("LICENSES.txt")),
    )


def _network(network: ReportedNetwork) -> dict[str, Any]:
    """Return one network as the page's scripts read it: points row by row, and methods at equal spent budget."""
    return {
        "name": network.name,
        "unit": network.unit,
        "fullCost": network.full_cost,
        "exits": list(network.exits),
        "note": network.note,
        "points": [_row(point) for point in network.points],
        "chosen": _row(network.chosen) if network.chosen else None,
        "speed": {name: _in_json(value) for name, value in asdict(network.speed).items()} if network.speed else None,
        "smaller": asdict(network.smaller) if network.smaller else None,
        "guarantees": list(network.guarantees),
        "caution": network.caution,
        "verdict": network.verdict,
        "table": _table(network.points, [spend / 100 * network.full_cost for spend in SPENDS]),
        "examples": asdict(network.examples) if network.examples else None,
        "plan": _plan(network.plan, network.exits) if network.plan else None,
    }


def _row(point: Point) -> list[Any]:
    return [_in_json(getattr(point, column)) for column in COLUMNS]


def _plan(plan: Planned, exits: Sequence[str]) -> dict[str, Any]:
    return {
        "pays": plan.pays,
        "reason": plan.reason,
        "batchSize": plan.batch_size,
        "openExits": [exits[index] if exits else f"exit {index}" for index in plan.open_exits],
        "full": {"throughput": plan.full_throughput, "accuracy": plan.full_accuracy},
        "planned": {"throughput": plan.throughput, "accuracy": plan.accuracy},
    }


def _table(points: Sequence[Point], spends: Sequence[float]) -> list[dict[str, Any]]:
    """Return a row per method: its area, and its accuracy at each spent budget, None where it never spends that."""
    alone = {point.mean_cost for point in points if point.method == SINGLE_EXIT}
    areas = area_under_curve(points) if len(alone) > 1 else {}
    compared = at_equal_spend(points, spends)
    rivals = [row for row in compared if row.method != ORACLE]
    best = {row.spent: max(round(each.accuracy, 3) for each in rivals if each.spent == row.spent) for row in rivals}
    methods = dict.fromkeys(point.method for point in points if point.method != SINGLE_EXIT)
    rows: dict[str, list[dict[str, Any] | None]] = {method: [None] * len(spends) for method in methods}
    for row in compared:
        accuracy = round(row.accuracy, 3)  # as the page shows it, so that equal figures are equally bold
        rows[row.method][spends.index(row.spent)] = {
            "accuracy": accuracy,
            "low": _in_json(row.accuracy_low),
            "high": _in_json(row.accuracy_high),
            "best": row.method != ORACLE and accuracy == best[row.spent],
        }
    return [{"method": method, "area": areas.get(method), "cells": cells} for method, cells in rows.items()]


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
