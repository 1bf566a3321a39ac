"""Points to draw: of every kind that a page must cope with."""

import math
from typing import Any

from alight.evaluation import ORACLE, SINGLE_EXIT, Point

HOSTILE = "</script><script>alert('method')</script><img src=x onerror=alert(1)> & \"quoted\""
FULL = 1.2e9
STEPS = [0.2, 0.4, 0.6, 0.8, 1.0]
PAID = (0.2, 0.55, 1.125)  # to leave at each exit, with the heads before it
ALONE = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]


def made_point(method: str, budget: float, spent: float, accuracy: float, **others: Any) -> Point:
    """A point with intervals; budget and spent as shares of the full network."""
    return Point(
        method,
        budget=budget * FULL,
        accuracy=accuracy,
        mean_cost=spent * FULL,
        accuracy_low=accuracy - 0.01,
        accuracy_high=accuracy + 0.01,
        mean_cost_low=(spent - 0.01) * FULL,
        mean_cost_high=(spent + 0.01) * FULL,
        full_cost=FULL,
        unit="FLOPs",
        **others,
    )


def made_points() -> list[Point]:
    """Three methods, one of which plans its rates, and both references, on a network of three exits."""
    shares = [(1 - step, 0.0, step) for step in STEPS]
    both = list(zip(STEPS, shares, strict=True))
    return [
        *(made_point("eero", step, step - 0.01, 0.5 + 0.3 * step, **_described(step, share)) for step, share in both),
        *(made_point("patience", step, step, 0.4 + 0.4 * step, exit_shares=share) for step, share in both),
        *(made_point(HOSTILE, step, 0.3 + 0.1 * step, 0.9 * step) for step in STEPS),
        *(made_point(ORACLE, step, step, 0.6 + 0.35 * step, exit_shares=share) for step, share in both),
        *(
            made_point(SINGLE_EXIT, cost, cost, accuracy, exit_shares=here, calibration_error=0.1 * cost)
            for cost, accuracy, here in zip((0.2, 0.5, 1.0), (0.5, 0.65, 0.8), ALONE, strict=True)
        ),
        Point("bare", budget=0.5 * FULL, accuracy=0.55, mean_cost=0.45 * FULL, full_cost=FULL, unit="FLOPs"),
    ]


def _described(step: float, share: tuple[float, ...]) -> dict[str, Any]:
    return {
        "exit_rates": share,
        "exit_shares": share,
        "exit_costs": tuple(paid * FULL for paid in PAID),
        "thresholds": (step / 2 + 0.25, math.inf, -math.inf),
        "rule": "leave at the first score that reaches its threshold, on the margin",
        "guarantee": f"Keeps to {step:.0%}, with luck.",
        "worst_class": "7",
        "worst_class_loss": 0.4 - 0.3 * step,
        "worst_class_cost": 0.9 * step * FULL,
    }
