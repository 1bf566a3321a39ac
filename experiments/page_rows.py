"""Rows of results/paper as cells and tables of a page."""

from collections.abc import Iterable, Sequence

import numpy as np
from recorded_cifar100 import RESULTS, rows

TABLES = RESULTS / "paper"

Rows = Sequence[dict[str, str]]


def table(name: str, **where: object) -> Rows:
    """The rows of a table in which columns have these values."""
    return [row for row in rows(TABLES / f"{name}.csv") if all(row[key] == str(value) for key, value in where.items())]


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(
        ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        + ["| " + " | ".join(line) + " |" for line in lines]
    )


def values(own: Rows, column: str) -> np.ndarray:
    """A column as numbers."""
    return np.array([float(row[column]) for row in own])


def percents(own: Rows, column: str, digits: int = 1) -> str:
    """A column as percentages, one after another."""
    return " ".join(f"{100 * value:.{digits}f}" for value in values(own, column))


def gain_cell(row: dict[str, str] | None) -> str:
    """A gain in points with its interval, bold where EERO loses beyond it."""
    if row is None:
        return "–"
    gain, low, high = (100 * float(row[name]) for name in ("gain", "low", "high"))
    text = f"{gain:+.1f} [{low:+.1f}, {high:+.1f}]"
    return f"**{text}**" if high < 0 else text
