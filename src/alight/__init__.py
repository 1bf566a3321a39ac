"""Early-exit inference under a budget.

Names are loaded when first used, so that importing alight stays as quick as importing NumPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alight import calibrate, deploy, evaluation, recordings
    from alight.costs import Costs
    from alight.errors import AlightError
    from alight.evaluation.sweep import Point, at_equal_spend, read_points, sweep, write_points
    from alight.export.exporting import export_model
    from alight.export.packages import load_compiled
    from alight.models import zoo
    from alight.models.attach import attach_heads
    from alight.models.cut import cut
    from alight.models.fingerprint import fingerprint
    from alight.models.folder import load_model, save_model
    from alight.models.measure import head_overhead, measure_costs, time_stages
    from alight.models.multi_exit import MultiExitModel, Normalisation
    from alight.models.places import suggest_exits
    from alight.models.sources import from_timm, from_torchvision, from_transformers
    from alight.models.training import train_heads
    from alight.outputs import Decisions, HeadOutputs
    from alight.partitioned import PartitionedOutputs
    from alight.policies.policy import Policy
    from alight.policies.route import replay, route
    from alight.policies.saved import load_policy
    from alight.report import write_report
    from alight.runtime.plan import Plan, plan
    from alight.runtime.predictor import Predictor
    from alight.runtime.recorder import Recorded, record, record_to
    from alight.runtime.tune import Tuned, tune_speed

__version__ = "0.1.0"

__all__ = [
    "AlightError",
    "Costs",
    "Decisions",
    "HeadOutputs",
    "MultiExitModel",
    "Normalisation",
    "PartitionedOutputs",
    "Plan",
    "Point",
    "Policy",
    "Predictor",
    "Recorded",
    "Tuned",
    "at_equal_spend",
    "attach_heads",
    "calibrate",
    "cut",
    "deploy",
    "evaluation",
    "export_model",
    "fingerprint",
    "from_timm",
    "from_torchvision",
    "from_transformers",
    "head_overhead",
    "load_compiled",
    "load_model",
    "load_policy",
    "measure_costs",
    "plan",
    "read_points",
    "record",
    "record_to",
    "recordings",
    "replay",
    "route",
    "save_model",
    "suggest_exits",
    "sweep",
    "time_stages",
    "train_heads",
    "tune_speed",
    "write_points",
    "write_report",
    "zoo",
]

_HOMES = {
    "AlightError": "alight.errors",
    "Costs": "alight.costs",
    "Decisions": "alight.outputs",
    "HeadOutputs": "alight.outputs",
    "MultiExitModel": "alight.models.multi_exit",
    "Normalisation": "alight.models.multi_exit",
    "PartitionedOutputs": "alight.partitioned",
    "Plan": "alight.runtime.plan",
    "Point": "alight.evaluation.sweep",
    "Policy": "alight.policies.policy",
    "Predictor": "alight.runtime.predictor",
    "Recorded": "alight.runtime.recorder",
    "Tuned": "alight.runtime.tune",
    "at_equal_spend": "alight.evaluation.sweep",
    "attach_heads": "alight.models.attach",
    "cut": "alight.models.cut",
    "export_model": "alight.export.exporting",
    "fingerprint": "alight.models.fingerprint",
    "from_timm": "alight.models.sources",
    "from_torchvision": "alight.models.sources",
    "from_transformers": "alight.models.sources",
    "head_overhead": "alight.models.measure",
    "load_compiled": "alight.export.packages",
    "load_model": "alight.models.folder",
    "load_policy": "alight.policies.saved",
    "measure_costs": "alight.models.measure",
    "plan": "alight.runtime.plan",
    "read_points": "alight.evaluation.sweep",
    "record": "alight.runtime.recorder",
    "record_to": "alight.runtime.recorder",
    "replay": "alight.policies.route",
    "route": "alight.policies.route",
    "save_model": "alight.models.folder",
    "suggest_exits": "alight.models.places",
    "sweep": "alight.evaluation.sweep",
    "time_stages": "alight.models.measure",
    "train_heads": "alight.models.training",
    "tune_speed": "alight.runtime.tune",
    "write_points": "alight.evaluation.sweep",
    "write_report": "alight.report",
}
_ROOMS = {"zoo": "alight.models.zoo"}  # the others stand at the top


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in __all__:
        return import_module(_ROOMS.get(name, f"alight.{name}"))
    raise AttributeError(f"module 'alight' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
