"""Early-exit inference under a budget.

Names are loaded when first used, so that importing alight stays as quick as importing NumPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alight import calibrate, deploy, evaluation, recordings
    from alight.costing.measure import head_overhead, measure_costs, time_stages
    from alight.costs import Costs
    from alight.cutting.cut import cut, register_cutter
    from alight.cutting.placement import suggest_exits
    from alight.engine.predictor import Predictor
    from alight.engine.recorder import Recorded, record, record_to
    from alight.errors import AlightError
    from alight.evaluation.sweep import Point, at_equal_spend, read_points, sweep, write_points
    from alight.export.exporting import export_model
    from alight.export.packages import load_compiled
    from alight.networks import zoo
    from alight.networks.attach import attach_heads, from_outputs
    from alight.networks.cascade import cascade
    from alight.networks.libraries import from_timm, from_torchvision, from_transformers
    from alight.networks.multi_exit import MultiExitModel, Normalisation
    from alight.networks.store import fingerprint, load_model, save_model
    from alight.outputs import Decisions, HeadOutputs
    from alight.planning.plan import Plan, plan
    from alight.planning.tune import Tuned, tune_speed
    from alight.policies.policy import Policy
    from alight.policies.route import replay, route
    from alight.policies.saved import load_policy
    from alight.report import write_report
    from alight.training.settings import TrainingSettings
    from alight.training.training import train_heads

__version__ = "0.1.0"

__all__ = [
    "AlightError",
    "Costs",
    "Decisions",
    "HeadOutputs",
    "MultiExitModel",
    "Normalisation",
    "Plan",
    "Point",
    "Policy",
    "Predictor",
    "Recorded",
    "TrainingSettings",
    "Tuned",
    "at_equal_spend",
    "attach_heads",
    "calibrate",
    "cascade",
    "cut",
    "deploy",
    "evaluation",
    "export_model",
    "fingerprint",
    "from_outputs",
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
    "register_cutter",
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
    "MultiExitModel": "alight.networks.multi_exit",
    "Normalisation": "alight.networks.multi_exit",
    "Plan": "alight.planning.plan",
    "Point": "alight.evaluation.sweep",
    "Policy": "alight.policies.policy",
    "Predictor": "alight.engine.predictor",
    "Recorded": "alight.engine.recorder",
    "TrainingSettings": "alight.training.settings",
    "Tuned": "alight.planning.tune",
    "at_equal_spend": "alight.evaluation.sweep",
    "attach_heads": "alight.networks.attach",
    "cascade": "alight.networks.cascade",
    "cut": "alight.cutting.cut",
    "export_model": "alight.export.exporting",
    "RunSettings": "alight.engine.settings",
    "Threshold": "alight.policies.policy",
    "fingerprint": "alight.networks.store",
    "from_outputs": "alight.networks.attach",
    "from_timm": "alight.networks.libraries",
    "from_torchvision": "alight.networks.libraries",
    "from_transformers": "alight.networks.libraries",
    "head_overhead": "alight.costing.measure",
    "load_model": "alight.networks.store",
    "load_policy": "alight.policies.saved",
    "measure_costs": "alight.costing.measure",
    "plan": "alight.planning.plan",
    "read_points": "alight.evaluation.sweep",
    "record": "alight.engine.recorder",
    "record_to": "alight.engine.recorder",
    "register_cutter": "alight.cutting.cut",
    "replay": "alight.policies.route",
    "route": "alight.policies.route",
    "save_model": "alight.networks.store",
    "suggest_exits": "alight.cutting.placement",
    "sweep": "alight.evaluation.sweep",
    "time_stages": "alight.costing.measure",
    "train_heads": "alight.training.training",
    "tune_speed": "alight.planning.tune",
    "write_points": "alight.evaluation.sweep",
    "write_report": "alight.report",
}
_ROOMS = {"zoo": "alight.networks.zoo"}  # the others stand at the top


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in __all__:
        return import_module(_ROOMS.get(name, f"alight.{name}"))
    raise AttributeError(f"module 'alight' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
