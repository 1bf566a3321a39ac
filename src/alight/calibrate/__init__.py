"""Data and a budget become a policy. A method is a function; adding one is writing it and naming it in METHODS.

>>> from alight import recordings
>>> labelled, test, costs = recordings.load()
>>> policy = METHODS["geometric"](costs, "50%", labelled)
>>> policy.planned_cost <= policy.budget
True
"""

from alight.calibrate.agreement import patience, pcee
from alight.calibrate.auto import auto
from alight.calibrate.certify.cost import (
    CONTRACTS,
    certified_batch,
    certified_mean,
    certified_probability,
    certified_stream,
)
from alight.calibrate.certify.risk import certified_risk
from alight.calibrate.confidence import global_threshold, performance_control
from alight.calibrate.crossval import pruned
from alight.calibrate.distributions import gaussian, geometric
from alight.calibrate.eero import eero, eero_marginal, two_exits
from alight.calibrate.genetic import genetic
from alight.calibrate.lenses import Fit, fit_ensemble, fit_gain, fit_recall, with_lens
from alight.calibrate.problem import Method
from alight.calibrate.search import search
from alight.calibrate.single import best_single_exit
from alight.calibrate.stopping import optimal_stopping

__all__ = [
    "CONTRACTS",
    "METHODS",
    "Fit",
    "Method",
    "auto",
    "best_single_exit",
    "certified_batch",
    "certified_mean",
    "certified_probability",
    "certified_risk",
    "certified_stream",
    "eero",
    "eero_marginal",
    "fit_ensemble",
    "fit_gain",
    "fit_recall",
    "gaussian",
    "genetic",
    "geometric",
    "global_threshold",
    "optimal_stopping",
    "patience",
    "pcee",
    "performance_control",
    "pruned",
    "search",
    "two_exits",
    "with_lens",
]

METHODS: dict[str, Method] = {
    "eero": eero,
    "eero_marginal": eero_marginal,
    "two_exits": two_exits,
    "geometric": geometric,
    "gaussian": gaussian,
    "global_threshold": global_threshold,
    "patience": patience,
    "pcee": pcee,
    "performance_control": performance_control,
    "genetic": genetic,
    "best_single_exit": best_single_exit,
    "search": search,
    "optimal_stopping": optimal_stopping,
    "auto": auto,
}
