"""Show me: the points of a sweep as one HTML page that opens from disk and asks nothing of any network.

    write_report(points, "report.html", title="ResNet-18 on CIFAR-100")
    small = ReportedNetwork(points, exits=model.exits, examples=examples(images, policies, test))
    write_report({"small": small, "large": others}, "report.html")

The page shows three numbers, samples by the exit they left at, accuracy against cost, and what is behind them. It is
drawn in the browser by d3 and Observable Plot, which it carries along (`assets/`).
"""

import base64
import html
import json
import math
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from alight.errors import BadFile, BadInput, Mismatch
from alight.evaluation import ORACLE, SINGLE_EXIT, Point, area_under_curve, at_equal_spend
from alight.files import PathLike, write_text
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy
from alight.policies.route import replay

Pixels = npt.NDArray[np.uint8]

SIDE = 64  # pixels of an image at most, so that a hundred of them stay under a megabyte
LETTERS = 160  # of a text at most, as many as fit below an exit
COUNT = 60
GREY, COLOUR = 0, 2  # as PNG calls them
TITLE = "Early exits under a budget"
SPENDS = range(20, 100, 10)  # columns of the table, in percent of the full network
COLUMNS = [each.name for each in fields(Point)]
SCRIPTS = ("data.js", "looks.js", "opening.js", "figures.js", "tables.js", "page.js")  # in this order, in one scope


@dataclass(frozen=True)
class SampleWalk:
    """Where each example left under one policy, and what it was answered there."""

    method: str
    budget: float  # allowed per sample, in the network's unit
    exits: tuple[int, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Examples:
    """Samples as images or as texts, and where they left under some policies.

    >>> walk = SampleWalk("eero", budget=2.0, exits=(0,), answers=("positive",))
    >>> len(Examples((), labels=("positive",), walks=(walk,), texts=("A delight from start to end.",)))
    1
    """

    images: tuple[str, ...]  # PNG files as data: addresses, () where the samples are texts
    labels: tuple[str, ...]  # their classes, () where these are not known
    walks: tuple[SampleWalk, ...]
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.images and self.texts:
            raise BadInput(f"{len(self.images)} images and {len(self.texts)} texts: give samples of one kind")
        if not self.walks:
            raise BadInput("there are no walks: give where the samples left under at least one policy")
        counts = {len(own) for walk in self.walks for own in (walk.exits, walk.answers)} | {len(self)}
        if len(counts | ({len(self.labels)} if self.labels else set())) > 1:
            kind = "texts" if self.texts else "images"
            raise BadInput(f"{len(self)} {kind}, but labels or walks of others: give one entry for each sample")

    def __len__(self) -> int:
        return len(self.images or self.texts)


def examples(
    samples: Any,
    policies: Sequence[Policy],
    outputs: HeadOutputs,
    *,
    chosen: Policy | None = None,
    classes: Sequence[str] = (),
    count: int = COUNT,
) -> Examples:
    """Choose some of these samples, and return where they leave under each of the policies.

    `samples` are texts or images in the order of the table `outputs`; images are grey or RGB, channels first or last,
    of bytes or of floats. Shown are the first to leave at each exit under the `chosen` policy (without one, the policy
    in the middle), an equal number of each as far as there are.

    >>> from alight.policies.policy import Threshold
    >>> policy = Threshold(thresholds=(0.5,), costs=(1.0, 3.0), budget=2.0, method="by hand")
    >>> outputs = HeadOutputs(scores=[[0.2, 0.9], [0.7, 0.8]], predictions=[[1, 0], [2, 2]])
    >>> examples(np.zeros((2, 8, 8)), [policy], outputs).walks
    (SampleWalk(method='by hand', budget=2.0, exits=(1, 0), answers=('0', '2')),)
    >>> examples(["Not  bad,\\nnot good.", "A delight."], [policy], outputs).texts
    ('Not bad, not good.', 'A delight.')
    """
    policies = [*policies, *([] if chosen is None else [chosen])]
    if len(samples) != len(outputs):
        raise BadInput(f"{len(samples)} samples for a table of {len(outputs)}: give those that were recorded")
    if not policies or count < 1:
        raise BadInput(f"{len(policies)} policies and {count} examples: give at least one of each")
    decided = [replay(policy, outputs) for policy in policies]
    rows = _first_of_each(decided[len(decided) // 2 if chosen is None else -1].exits, count)

    walks = {}  # of the chosen policy where another one has its method and budget
    for policy, each in zip(policies, decided, strict=True):
        budget = each.mean_cost if policy.budget is None else float(policy.budget)
        exits, answers = tuple(each.exits[rows].tolist()), _names(each.predictions[rows], classes)
        walks[policy.method, budget] = SampleWalk(policy.method, budget, exits, answers)
    labels = () if outputs.labels is None else _names(outputs.labels[rows], classes)
    taken = [samples[row] for row in rows.tolist()]
    if all(isinstance(each, str) for each in taken):
        return Examples((), labels, tuple(walks.values()), texts=tuple(map(shortened, taken)))
    pixels = as_pixels([np.asarray(each) for each in taken])
    return Examples(tuple(map(data_address, pixels)), labels, tuple(walks.values()))


def _names(indices: npt.NDArray[np.int64], classes: Sequence[str]) -> tuple[str, ...]:
    return tuple(classes[index] if index < len(classes) else str(index) for index in indices.tolist())


def shortened(text: str) -> str:
    """Return the text in one line, cut after a word where it is too long.

    >>> len(shortened("word " * 100)) <= LETTERS, shortened("word " * 100)[-6:]
    (True, 'word …')
    """
    line = " ".join(text.split())
    if len(line) <= LETTERS:
        return line
    return f"{line[: LETTERS - 1].rpartition(' ')[0] or line[: LETTERS - 2]} …"


def read_images(path: PathLike) -> np.ndarray:
    """Read the array `images` of an .npz file; pickled ones are refused, since they could run code."""
    remedy = "save np.savez(path, images=...), in the order in which they were recorded"
    try:
        with np.load(path, allow_pickle=False) as file:
            return np.asarray(file["images"])
    except (ValueError, KeyError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise BadFile(path, f"it holds no images ({error})", remedy) from error


def as_pixels(images: Sequence[np.ndarray]) -> list[Pixels]:
    """Return images as bytes, (height, width[, 3]), shrunk to `SIDE`; floats beyond [0, 1] are stretched."""
    shaped = [_channels_last(image) for image in images]
    if all(image.dtype == np.uint8 for image in shaped):
        low, high = 0.0, 255.0
    else:
        low, high = min(0.0, *(float(image.min()) for image in shaped)), max(float(image.max()) for image in shaped)
        high = 1.0 if low == 0 and high <= 1 else high
    scale = 255 / (high - low)
    return [np.round((_shrunk(image) - low) * scale).clip(0, 255).astype(np.uint8) for image in shaped]


def data_address(pixels: Pixels) -> str:
    """Return the image as a PNG file in a data: address."""
    height, width = pixels.shape[:2]
    lines = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))  # each begins with a zero: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, GREY if pixels.ndim == 2 else COLOUR, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n"
    for kind, content in {b"IHDR": header, b"IDAT": zlib.compress(lines.tobytes(), 9), b"IEND": b""}.items():
        file += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return "data:image/png;base64," + base64.b64encode(file).decode()


def _first_of_each(exits: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Return rows in their order, `count` in all, as evenly over the exits as the samples that left there allow."""
    ranks = np.empty_like(exits)  # the first to leave at its exit is 0
    for index in np.unique(exits):
        ranks[exits == index] = np.arange((exits == index).sum())
    return np.sort(np.lexsort((exits, ranks))[:count])


def _channels_last(image: np.ndarray) -> np.ndarray:
    """Return the image as (height, width) or (height, width, 3)."""
    if image.ndim == 3 and image.shape[0] in (1, 3) and image.shape[2] not in (1, 3):
        image = np.moveaxis(image, 0, -1)
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[..., 0]
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != 3):
        raise BadInput(f"an image of shape {image.shape}: give (height, width) with 1 or 3 channels, first or last")
    return image


def _shrunk(image: np.ndarray) -> npt.NDArray[np.float64]:
    """Return the image with each block of pixels made one, so that no side is longer than `SIDE`."""
    step = -(-max(image.shape[:2]) // SIDE)
    height, width = (side // step * step for side in image.shape[:2])
    blocks = image[:height, :width].astype(np.float64).reshape(height // step, step, width // step, step, -1)
    return blocks.mean(axis=(1, 3)).reshape(height // step, width // step, *image.shape[2:])


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
    classes: Sequence[str] = ()  # their names, where they have some
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
        "classes": _named_classes(network),
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


def _named_classes(network: ReportedNetwork) -> dict[str, str]:
    """Return the names of those classes that points speak of, by their indices."""
    spoken_of = {point.worst_class for point in network._all_points}
    return {str(index): name for index, name in enumerate(network.classes) if str(index) in spoken_of}


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
