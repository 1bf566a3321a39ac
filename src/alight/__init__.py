"""Early-exit inference under a budget.

Names are loaded when first used, so that importing alight is as quick as importing NumPy.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The one list of public names: type checkers and editors follow these imports, `__getattr__` makes them when needed.
# isort: off
if TYPE_CHECKING:
    from alight import calibrate as calibrate, evaluation as evaluation, recordings as recordings
    from alight.costing.measure import head_overhead as head_overhead, measure_costs as measure_costs
    from alight.costing.measure import time_stages as time_stages
    from alight.costs import Costs as Costs
    from alight.cutting.cut import cut as cut, register_cutter as register_cutter
    from alight.cutting.placement import suggest_exits as suggest_exits
    from alight.data.preprocess import Normalisation as Normalisation
    from alight.engine.backends.cascade import Cascade as Cascade, Member as Member, cascade as cascade
    from alight.engine.predictor import Predictor as Predictor
    from alight.engine.recorder import Recorded as Recorded, Recorder as Recorder, record as record
    from alight.engine.settings import RunSettings as RunSettings
    from alight.errors import AlightError as AlightError
    from alight.evaluation import Point as Point, at_equal_spend as at_equal_spend, read_points as read_points
    from alight.evaluation import sweep as sweep, write_points as write_points
    from alight.export.exporting import export_model as export_model
    from alight.fitting.deploying import Deployed as Deployed, deploy as deploy
    from alight.fitting.fitted import FittedPredictor as FittedPredictor
    from alight.fitting.steps import fit as fit
    from alight.networks import zoo as zoo
    from alight.networks.attach import attach_heads as attach_heads, from_outputs as from_outputs
    from alight.networks.libraries import from_timm as from_timm, from_torchvision as from_torchvision
    from alight.networks.libraries import from_transformers as from_transformers
    from alight.networks.multi_exit import MultiExitModel as MultiExitModel, TwoLogits as TwoLogits
    from alight.networks.store import fingerprint as fingerprint, load_model as load_model, save_model as save_model
    from alight.outputs import Decisions as Decisions, HeadOutputs as HeadOutputs
    from alight.planning.engines import RuntimeComparison as RuntimeComparison, compare_runtimes as compare_runtimes
    from alight.planning.plan import Plan as Plan, plan as plan
    from alight.planning.tune import Tuned as Tuned, tune_speed as tune_speed
    from alight.policies.policy import Policy as Policy, Threshold as Threshold
    from alight.policies.route import replay as replay, route as route
    from alight.policies.shift import diagnose_shift as diagnose_shift
    from alight.policies import load_policy as load_policy
    from alight.report import write_report as write_report
    from alight.routing.logs import read_log as read_log
    from alight.routing.router import Router as Router
    from alight.training.callbacks import Callback as Callback, TrainingState as TrainingState
    from alight.training.metrics import exit_losses as exit_losses
    from alight.training.settings import TrainingSettings as TrainingSettings
    from alight.training.training import train_heads as train_heads
# isort: on
else:

    @cache
    def _homes() -> dict[str, str]:
        """Return the module of each public name, as the imports above say."""
        import ast

        imports = [n for n in ast.walk(ast.parse(__loader__.get_source(__name__))) if isinstance(n, ast.ImportFrom)]
        return {alias.name: node.module for node in imports for alias in node.names if alias.asname == alias.name}

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return sorted(_homes())
        if name not in _homes():
            raise AttributeError(f"module 'alight' has no attribute {name!r}")
        home = _homes()[name]
        return vars(import_module(home)).get(name) or import_module(f"{home}.{name}")

    def __dir__() -> list[str]:
        return [*sorted(_homes()), "__version__"]
