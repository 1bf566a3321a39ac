"""Was it good? Accuracy and cost with intervals, the oracle, and methods side by side.

>>> from alight import calibrate, recordings
>>> labelled, test, costs = recordings.load()
>>> points = sweep({"eero": calibrate.eero}, costs, ["40%", "60%"], labelled=labelled, test=test)
>>> sorted({point.method for point in points})
['eero', 'oracle', 'single_exit']
"""

from alight.evaluation.metrics import (
    Bootstrap,
    Classes,
    Interval,
    bootstrap,
    oracle,
    oracle_within,
    per_class,
)
from alight.evaluation.sweep import (
    ORACLE,
    SINGLE_EXIT,
    MethodComparison,
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
    "Interval",
    "MethodComparison",
    "Point",
    "at_equal_spend",
    "bootstrap",
    "oracle",
    "oracle_within",
    "per_class",
    "read_points",
    "sweep",
    "write_points",
]
