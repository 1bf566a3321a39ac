"""The method that does best on held-out labels, at this budget."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from alight.budgeting.rates import Floats
from alight.calibrate import published
from alight.calibrate.crossval import held_out
from alight.calibrate.problem import AnyCosts, Budget, Problem, Settings
from alight.calibrate.search import search
from alight.calibrate.stopping import optimal_stopping
from alight.errors import BadInput, BudgetTooSmall
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy

Candidates = Mapping[str, Callable[..., Policy]]

FOLDS = 3  # of the labelled data, each held out once
CANDIDATES: Candidates = {  # the first is kept unless another is better beyond doubt
    "optimal_stopping": optimal_stopping,
    "search": search,
    "eero": published.eero,
    **{
        f"eero at temperature {each:g}": partial(published.eero, temperature=each, spend_all=True)
        for each in (0.02, 0.04, 0.3)
    },
    "geometric": published.geometric,
    "gaussian": published.gaussian,
    "global_threshold": published.global_threshold,
    "performance_control": published.performance_control,
    "pcee": published.pcee,
    "patience": published.patience,
    "two_exits": published.two_exits,
    "best_single_exit": published.best_single_exit,
}


def auto(
    costs: AnyCosts,
    budget: Budget,
    labelled: HeadOutputs,
    unlabelled: HeadOutputs | None = None,
    *,
    candidates: Candidates = CANDIDATES,
    folds: int = FOLDS,
) -> Policy:
    """Choose the candidate that is most accurate on labels it has not seen, and fit it again on all data.

    On each fold every candidate keeps the budget, by thresholds from the fold's own scores, so accuracies compare
    at equal allowance; of equals the cheaper wins. The best of many is often only lucky: the first candidate yields
    to it only where the gain is above its standard error.

    >>> from alight import recordings
    >>> labelled, test, costs = recordings.load()
    >>> auto(costs, "50%", labelled.take(slice(0, 1000)), folds=2).settings["winner"]
    'optimal_stopping'
    """
    problem = Problem.of("auto", costs, budget, labelled, unlabelled, closes_exits=True)
    if not candidates:
        raise BadInput("auto has 0 candidates: give at least one method by name")
    tried: dict[str, tuple[Floats, float]] = {}  # per candidate: who is answered rightly, and the mean cost
    for name, method in candidates.items():
        try:
            right, spent = held_out(method, problem.network, problem.budget, labelled, folds)
        except BudgetTooSmall:  # for a method that opens every exit
            continue
        tried[name] = right, float(spent.mean())
    if not tried:
        raise BadInput(f"none of {', '.join(candidates)} affords the budget {problem.budget:g}: add best_single_exit")
    first = next(iter(tried))
    best = max(tried, key=lambda name: (tried[name][0].mean(), -tried[name][1]))
    winner = best if _beyond_doubt(tried[best][0] - tried[first][0]) else first
    policy = candidates[winner](problem.network, problem.budget, labelled, unlabelled)
    settings: Settings = {"winner": winner, "held-out accuracy": float(tried[winner][0].mean()), "best on folds": best}
    return replace(policy, method="auto", settings=settings | dict(policy.settings))


def _beyond_doubt(gains: Floats) -> bool:
    """Return whether the mean of paired differences is above its standard error."""
    return bool(gains.mean() > gains.std() / np.sqrt(len(gains)))
