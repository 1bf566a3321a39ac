"""What a page shows, as data: networks, their points, examples of where samples left, and a plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

from alight.errors import BadInput, Mismatch
from alight.evaluation.sweep import Point


@dataclass(frozen=True)
class Walk:
    """Where each example left under one policy, and what it was answered there."""

    method: str
    budget: float  # allowed per sample, in the network's unit
    exits: tuple[int, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Examples:
    """Some samples as images, and where they left under some policies."""

    images: tuple[str, ...]  # PNG files as data: addresses
    labels: tuple[str, ...]  # their classes, () where these are not known
    walks: tuple[Walk, ...]

    def __post_init__(self) -> None:
        counts = {len(own) for walk in self.walks for own in (walk.exits, walk.answers)} | {len(self.images)}
        if len(counts | ({len(self.labels)} if self.labels else set())) > 1:
            raise BadInput(f"{len(self.images)} images, but labels or walks of others: give one entry for each image")


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

    def __post_init__(self) -> None:
        of_name = f" of {self.name}" if self.name else ""
        if not self.points:
            raise BadInput(f"there are no points{of_name} to report: sweep at least one method at one budget")
        full_cost, unit = self.full_cost, self.unit
        if not (isfinite(full_cost) and full_cost > 0):
            raise BadInput(
                f"the points{of_name} give {full_cost} as full_cost: give what the full network costs per sample"
            )
        others = [point for point in self.points if (point.full_cost, point.unit) != (full_cost, unit)]
        if others:
            raise Mismatch(
                f"the points{of_name} are not of one network (full networks of {full_cost:g} {unit} and"
                f" {others[0].full_cost:g} {others[0].unit}): give a mapping from each network's name to its"
                " points"
            )
        if self.exits and self.num_exits not in (0, len(self.exits)):
            raise Mismatch(f"{len(self.exits)} names for {self.num_exits} exits{of_name}: give one each")

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
        return max(len(point.exit_shares) for point in self.points)


@dataclass(frozen=True)
class Page:
    """One report."""

    title: str
    networks: Sequence[ReportedNetwork]
    guarantees: Sequence[str] = ()  # sentences to stand above the figures

    def __post_init__(self) -> None:
        if not self.networks:
            raise BadInput("there are no networks to report: give at least one, with its points")
