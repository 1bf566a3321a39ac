"""Data and a budget become a policy. A method is a function; adding one is writing it and naming it in METHODS.

>>> from alight import recordings
>>> labelled, test, costs = recordings.load()
>>> policy = METHODS["geometric"](costs, "50%", labelled)
>>> policy.planned_cost <= policy.budget
True
"""

from alight.calibrate.auto import auto
from alight.calibrate.cost_guarantees import (
    CONTRACTS,
    certified_batch,
    certified_mean,
    certified_probability,
    certified_stream,
)
from alight.calibrate.crossval import pruned
from alight.calibrate.lenses import Fit, fit_ensemble, fit_gain, fit_recall, with_lens
from alight.calibrate.problem import Method, Problem
from alight.calibrate.published import (
    best_single_exit,
    eero,
    eero_marginal,
    gaussian,
    geometric,
    global_threshold,
    patience,
    pcee,
    performance_control,
    two_exits,
)
from alight.calibrate.risk_guarantees import certified_risk
from alight.calibrate.search import genetic, search
from alight.calibrate.stopping import optimal_stopping

__all__ = [
    "CONTRACTS",
    "METHODS",
    "Fit",
    "Method",
    "Problem",
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
    method.__name__: method
    for method in (
        eero,
        eero_marginal,
        two_exits,
        geometric,
        gaussian,
        global_threshold,
        patience,
        pcee,
        performance_control,
        genetic,
        best_single_exit,
        search,
        optimal_stopping,
        auto,
    )
}
