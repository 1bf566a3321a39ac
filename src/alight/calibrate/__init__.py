"""Data and a budget become a policy. A method is a function; adding one is writing it and naming it in METHODS.

>>> from alight import recordings
>>> labelled, test, costs = recordings.load()
>>> policy = METHODS["geometric"](costs, "50%", labelled)
>>> policy.planned_cost <= policy.budget
True
"""

from alight.calibrate.auto import auto
from alight.calibrate.combinations import (
    COMBINE,
    Fit,
    combined,
    fit_agreement,
    fit_geometric_mean,
    fit_temperature,
    fit_vote,
)
from alight.calibrate.cost_guarantees import (
    CONTRACTS,
    certified_batch,
    certified_mean,
    certified_probability,
    certified_stream,
)
from alight.calibrate.crossval import pruned
from alight.calibrate.learned import eenet, jei_dnn, learned_stopping, learning_to_exit
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
from alight.calibrate.search import choose_members, eero_conditional, genetic, search
from alight.calibrate.stopping import optimal_stopping

__all__ = [
    "COMBINE",
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
    "choose_members",
    "combined",
    "eenet",
    "eero",
    "eero_conditional",
    "eero_marginal",
    "fit_agreement",
    "fit_geometric_mean",
    "fit_temperature",
    "fit_vote",
    "gaussian",
    "genetic",
    "geometric",
    "global_threshold",
    "jei_dnn",
    "learned_stopping",
    "learning_to_exit",
    "optimal_stopping",
    "patience",
    "pcee",
    "performance_control",
    "pruned",
    "search",
    "two_exits",
]

METHODS: dict[str, Method] = {
    method.__name__: method
    for method in (
        eero,
        eero_marginal,
        eero_conditional,
        two_exits,
        geometric,
        gaussian,
        global_threshold,
        patience,
        pcee,
        performance_control,
        learning_to_exit,
        eenet,
        jei_dnn,
        genetic,
        best_single_exit,
        search,
        optimal_stopping,
        learned_stopping,
        auto,
    )
}
