"""What one part of the demo has to show: lines, values, files, and its place in the report."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from alight.evaluation import Point
from alight.report import ReportedNetwork

Say = Callable[[str], None]  # what is done next


class Chapter(Protocol):
    """One part of the demo, done."""

    @property
    def networks(self) -> Mapping[str, ReportedNetwork | Sequence[Point]]:
        """What the report shows, by name."""

    @property
    def promises(self) -> Sequence[str]:
        """What stands above the report's figures."""

    def rows(self) -> dict[str, str]:
        """What was found, a line each, by what it is about."""

    def values(self) -> dict[str, Any]:
        """What was found, for programs."""

    def write(self, folder: Path) -> None:
        """Write what the other commands read."""
