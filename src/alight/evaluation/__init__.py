"""Was it good? Accuracy and cost with intervals, the oracle, and methods side by side."""

from alight.evaluation.metrics import Bootstrap, Classes, Interval, bootstrap, budget_use, per_class
from alight.evaluation.oracle import oracle, oracle_within
from alight.evaluation.sweep import (
    ORACLE,
    SINGLE_EXIT,
    Comparison,
    Point,
    at_equal_spend,
    read_points,
    sweep,
    write_points,
)

__all__ = [
    "ORACLE",
    "SINGLE_EXIT",
    "Bootstrap",
    "Classes",
    "Comparison",
    "Interval",
    "Point",
    "at_equal_spend",
    "bootstrap",
    "budget_use",
    "oracle",
    "oracle_within",
    "per_class",
    "read_points",
    "sweep",
    "write_points",
]
