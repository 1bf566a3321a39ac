"""Early-exit inference under a budget.

Names are loaded when first used, so that importing alight stays as quick as importing NumPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alight import calibrate, evaluation, recordings
    from alight.costs import Costs
    from alight.errors import AlightError
    from alight.evaluation.sweep import Point, at_equal_spend, read_points, sweep, write_points
    from alight.outputs import Decisions, HeadOutputs
    from alight.policies.policy import Policy
    from alight.policies.route import replay, route
    from alight.policies.saved import load_policy
    from alight.report import write_report

__version__ = "0.1.0"

__all__ = [
    "AlightError",
    "Costs",
    "Decisions",
    "HeadOutputs",
    "Point",
    "Policy",
    "at_equal_spend",
    "calibrate",
    "evaluation",
    "load_policy",
    "read_points",
    "recordings",
    "replay",
    "route",
    "sweep",
    "write_points",
    "write_report",
]

_HOMES = {
    "AlightError": "alight.errors",
    "Costs": "alight.costs",
    "Decisions": "alight.outputs",
    "HeadOutputs": "alight.outputs",
    "Point": "alight.evaluation.sweep",
    "Policy": "alight.policies.policy",
    "at_equal_spend": "alight.evaluation.sweep",
    "load_policy": "alight.policies.saved",
    "read_points": "alight.evaluation.sweep",
    "replay": "alight.policies.route",
    "route": "alight.policies.route",
    "sweep": "alight.evaluation.sweep",
    "write_points": "alight.evaluation.sweep",
    "write_report": "alight.report",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in __all__:
        return import_module(f"alight.{name}")
    raise AttributeError(f"module 'alight' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
