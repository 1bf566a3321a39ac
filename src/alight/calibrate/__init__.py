"""Data and a budget become a policy. A method is a function; adding one is writing it and naming it in METHODS.

>>> from alight import recordings
>>> labelled, test, costs = recordings.load()
>>> policy = METHODS["geometric"](costs, "50%", labelled)
>>> policy.planned_cost <= policy.budget
True
"""

from alight.calibrate.auto import auto as auto
from alight.calibrate.combinations import COMBINE as COMBINE
from alight.calibrate.combinations import Fit as Fit
from alight.calibrate.combinations import combined as combined
from alight.calibrate.combinations import fit_agreement as fit_agreement
from alight.calibrate.combinations import fit_geometric_mean as fit_geometric_mean
from alight.calibrate.combinations import fit_temperature as fit_temperature
from alight.calibrate.combinations import fit_vote as fit_vote
from alight.calibrate.cost_guarantees import CONTRACTS as CONTRACTS
from alight.calibrate.cost_guarantees import certified_batch as certified_batch
from alight.calibrate.cost_guarantees import certified_mean as certified_mean
from alight.calibrate.cost_guarantees import certified_probability as certified_probability
from alight.calibrate.cost_guarantees import certified_stream as certified_stream
from alight.calibrate.crossval import pruned as pruned
from alight.calibrate.learned import eenet as eenet
from alight.calibrate.learned import jei_dnn as jei_dnn
from alight.calibrate.learned import learned_stopping as learned_stopping
from alight.calibrate.learned import learning_to_exit as learning_to_exit
from alight.calibrate.problem import Method as Method
from alight.calibrate.problem import Problem as Problem
from alight.calibrate.published import best_single_exit as best_single_exit
from alight.calibrate.published import eero as eero
from alight.calibrate.published import eero_marginal as eero_marginal
from alight.calibrate.published import gaussian as gaussian
from alight.calibrate.published import geometric as geometric
from alight.calibrate.published import global_threshold as global_threshold
from alight.calibrate.published import patience as patience
from alight.calibrate.published import pcee as pcee
from alight.calibrate.published import performance_control as performance_control
from alight.calibrate.published import two_exits as two_exits
from alight.calibrate.risk_guarantees import certified_risk as certified_risk
from alight.calibrate.search import choose_members as choose_members
from alight.calibrate.search import eero_conditional as eero_conditional
from alight.calibrate.search import genetic as genetic
from alight.calibrate.search import search as search
from alight.calibrate.stopping import optimal_stopping as optimal_stopping

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
