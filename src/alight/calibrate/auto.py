"""The method that does best on held-out labels, at this budget."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from alight.budgeting.rates import Floats
from alight.calibrate import published
from alight.calibrate.combinations import LEAST_SAMPLES, combined, has_several_truths
from alight.calibrate.crossval import folds as folds_of
from alight.calibrate.crossval import held_out_tables
from alight.calibrate.learned import learned_stopping
from alight.calibrate.problem import AnyCosts, Budget, Problem, Settings, check_uncertified
from alight.calibrate.search import eero_conditional, search
from alight.costs import Costs, as_costs
from alight.errors import BadInput, BudgetTooSmall
from alight.outputs import Decisions, HeadOutputs
from alight.policies.policy import Policy
from alight.policies.route import replay

Candidates = Mapping[str, Callable[..., Policy]]

FOLDS = 4  # of the labelled data, each held out once
NEARBY = (0.7, 1.0, 1.4)  # of the budget: methods differ alike there, and all three together tell it with less noise
MANY = 2500  # labelled samples from which on the budget alone is looked at: less noise, and three take more time
MOST_TRIED = 10_000  # labelled samples on which candidates are compared: a standard error below 0.5 points
BEHIND = 1.5  # standard errors behind the best of the first fold, beyond which a candidate is tried no more
EXPECTED_GAIN, GAIN_DEVIATION = -0.002, 0.01  # of a candidate over the first, before any label is looked at
MUCH = 0.1  # of the full network's cost, that all other heads take together
LEAST_TO_COMBINE = 4 * LEAST_SAMPLES  # labelled samples from which on folds are large enough to fit a combination

CANDIDATES: Candidates = {  # where nothing is combined; gains are measured against the first
    "eero": published.eero,
    "learned_stopping": learned_stopping,
    "global_threshold": published.global_threshold,
    "best_single_exit": published.best_single_exit,
}
ALONE = ("learned_stopping", "best_single_exit")  # of them, tried beside combined answers
FEW = 1000  # labelled samples below which all of them are
CLOSING: Candidates = {"search": partial(search, rounds=1)}  # tried where closed heads save much
COMBINED: Candidates = {  # tried on combined answers; the first is `eero` where scores tell it no more
    "eero_conditional": eero_conditional,
    "global_threshold": published.global_threshold,
}


class Trial(NamedTuple):
    """What a candidate does on samples held out, in the order of the folds."""

    right: Floats  # (samples,): whether the answer at the budget is right
    nearby: Floats  # (samples,): for which share of the budgets nearby it is
    spent: float  # mean cost at the budget


def candidates_for(labelled: HeadOutputs, costs: AnyCosts) -> Candidates:
    """Return the candidates that `auto` tries on this table.

    These are the methods of `COMBINED` with exits that answer together, by the mean of their log-probabilities where
    recorded, else by a vote, and those of `ALONE`: from 1,000 labels on, `eero` and one threshold on single answers
    are next to never the best, and often lucky. With fewer they are tried as well; where labels are too few to combine,
    only `CANDIDATES` are. Where heads take a tenth of the cost or more, as in a cascade, so is a method that closes
    exits.

    >>> from alight import recordings
    >>> labelled, test, costs = recordings.load()
    >>> [*candidates_for(labelled, costs)][:2]
    ['eero_conditional, vote', 'global_threshold, vote']
    """
    network = as_costs(costs)
    closing = CLOSING if network.cumulative()[-1] >= (1 + MUCH) * network.full else {}
    if len(labelled) < LEAST_TO_COMBINE or has_several_truths(labelled):
        return {**CANDIDATES, **closing}
    votes = labelled.top_classes is None or labelled.quality is not None  # a mean may answer what nothing grades
    combine = "vote" if votes else "geometric_mean"
    together = {f"{name}, {combine}": combined(method, combine) for name, method in COMBINED.items()}
    single = CANDIDATES if len(labelled) < FEW else {name: CANDIDATES[name] for name in ALONE}
    return {**together, **single, **closing}


def auto(
    costs: AnyCosts,
    budget: Budget,
    labelled: HeadOutputs,
    unlabelled: HeadOutputs | None = None,
    *,
    candidates: Candidates | None = None,
    folds: int = FOLDS,
) -> Policy:
    """Choose the candidate that is expected to be most accurate on new samples, and fit it again on all data.

    On each fold every candidate keeps the budget, by thresholds from the fold's own scores, so accuracies compare
    at equal allowance. All candidates are tried on the first fold; on the others only the first candidate and those at
    most 1.5 standard errors behind the best, if there are any. Between those that are not further behind on all folds,
    with fewer than 2,500 labels, accuracies at 0.7 and at 1.4 of the budget count as well: which candidate is best
    changes slowly with the budget, and the mean of three has less noise. The best of many is often only lucky, so what
    counts is the gain over the first candidate that is to be expected: the mean of the paired differences, shrunk
    towards -0.2 points by its standard error against a prior deviation of one point. With few labels the first
    candidate is seldom left, with many the best one wins; of equals the cheaper. The setting `choice` says in one line
    what won, and by how much over the next; both figures are of the samples that chose it, so a little optimistic.

    `candidates` are methods by name, by default those of `candidates_for`.

    >>> from alight import recordings
    >>> labelled, test, costs = recordings.load()
    >>> auto(costs, "50%", labelled.take(slice(0, 1000)), folds=2).settings["winner"]
    'learned_stopping'
    """
    problem = Problem.of("auto", costs, budget, labelled, unlabelled, closes_exits=True)
    if candidates is None:
        candidates = candidates_for(labelled, problem.network)
    if folds < 2:
        raise BadInput(f"{folds} folds hold no samples out to compare candidates on: give 2 or more")
    if not candidates:
        raise BadInput("auto has 0 candidates: give at least one method by name")
    compared = labelled.take(folds_of(len(labelled), -(-len(labelled) // MOST_TRIED))[0])
    tried = _tried(candidates, problem, compared, folds)
    if not tried:
        raise BadInput(f"none of {', '.join(candidates)} affords the budget {problem.budget:g}: add best_single_exit")
    first = next(iter(tried))  # of the candidates, unless it cannot afford the budget
    near = _near_the_best({name: trial.right for name, trial in tried.items()})
    gains = {name: expected_gain(tried[name].nearby - tried[first].nearby) if name != first else 0.0 for name in near}
    winner, *others = sorted(near, key=lambda name: (-gains[name], tried[name].spent))
    policy = candidates[winner](problem.network, problem.budget, labelled, unlabelled)
    check_uncertified(policy, "auto")
    settings: Settings = {
        "winner": winner,
        "compared accuracy": float(tried[winner].right.mean()),
        "choice": _choice(winner, others, tried),
    }
    return replace(policy, method="auto", settings=settings | dict(policy.settings))


def expected_gain(differences: Floats) -> float:
    """Return the gain to expect on new samples from the paired differences on these: their mean, shrunk.

    It is the mean of a normal prior and the observed mean, each weighted by one over its variance.

    >>> lucky = np.array([1.0, 0.0, 0.0, 0.0])
    >>> [round(expected_gain(np.tile(lucky, times)), 4) for times in (10, 1000)]  # 40 samples, and 4,000
    [0.0033, 0.1696]
    """
    variance, prior = float(differences.var()) / len(differences), GAIN_DEVIATION**2
    return (float(differences.mean()) * prior + EXPECTED_GAIN * variance) / (prior + variance)


def nearby_budgets(budget: float, network: Costs) -> list[float]:
    """Return the budget, then those nearby that make a difference: from the cost of the first exit to that of the last.

    >>> nearby_budgets(2.0, as_costs(np.array([1.0, 2.0, 2.5])))
    [2.0, 1.4, 2.5]
    """
    costs = network.cumulative()
    lowest, highest = min(float(costs[0]), budget), max(float(costs[-1]), budget)
    nearby = (min(max(factor * budget, lowest), highest) for factor in NEARBY)
    return [budget, *(each for each in nearby if each != budget)]


def _tried(candidates: Candidates, problem: Problem, labelled: HeadOutputs, count: int) -> dict[str, Trial]:
    """Return what each candidate that affords the budget does on the samples of all folds.

    Candidates that are clearly behind after the first fold are left out, but never the first.
    """
    budgets = nearby_budgets(problem.budget, problem.network) if len(labelled) < MANY else [problem.budget]
    trials: dict[str, list[Trial]] = {name: [] for name in candidates}
    for number, (fitting, fold) in enumerate(held_out_tables(labelled, count)):
        made = _on_fold({name: candidates[name] for name in trials}, problem.network, budgets, fitting, fold)
        trials = {name: [*trials[name], trial] for name, trial in made.items()}
        if not number and trials:
            kept = {next(iter(trials)), *_near_the_best({name: trial.right for name, trial in made.items()})}
            trials = {name: parts for name, parts in trials.items() if name in kept}
        if len(trials) == 1:  # nothing is left to compare
            break
    return {name: _joined(parts) for name, parts in trials.items()}


def _on_fold(
    candidates: Candidates, network: Costs, budgets: Sequence[float], fitting: HeadOutputs, fold: HeadOutputs
) -> dict[str, Trial]:
    """Return what the candidates that afford the first budget do on a fold; others count where all afford them."""
    truth, hidden = fold.truth(), fold.unlabelled()
    left = dict(candidates)
    found: list[dict[str, Decisions]] = []  # for each budget
    for budget in budgets:
        decisions = {}
        for name, method in left.items():
            with suppress(BudgetTooSmall):  # for a method that opens every exit
                decisions[name] = replay(method(network, budget, fitting, hidden), fold)
        if not found:
            left = {name: left[name] for name in decisions}
        if len(decisions) == len(left):
            found.append(decisions)
    trials = {}
    for name in left:
        right = np.array([decisions[name].correct(truth) for decisions in found], dtype=np.float64)
        trials[name] = Trial(right[0], right.mean(axis=0), found[0][name].mean_cost)
    return trials


def _joined(parts: Sequence[Trial]) -> Trial:
    """Return the trials of several folds as one."""
    right, nearby = (np.concatenate(each) for each in zip(*((part.right, part.nearby) for part in parts), strict=True))
    return Trial(right, nearby, float(np.mean([part.spent for part in parts])))


def _near_the_best(right: Mapping[str, Floats]) -> list[str]:
    """Return the candidates that are not clearly behind the best of them."""
    best = max(right.values(), key=np.mean)
    return [name for name, own in right.items() if not _clearly_above(best, own)]


def _clearly_above(best: Floats, other: Floats) -> bool:
    """Return whether the mean of paired differences is above `BEHIND` standard errors."""
    gains = best - other
    return bool(gains.mean() > BEHIND * gains.std() / np.sqrt(len(gains)))


def _choice(winner: str, others: Sequence[str], tried: Mapping[str, Trial]) -> str:
    """Return in one line what won, and by how much over the best of the others."""
    chosen = f"{winner}: {tried[winner].right.mean():.1%} right in the comparison that chose it"
    if not others:
        return f"{chosen}, all others clearly behind"
    gains = 100 * (tried[winner].nearby - tried[others[0]].nearby)
    error = gains.std() / np.sqrt(len(gains))
    return f"{chosen}, {gains.mean():+.1f} points (standard error {error:.1f}) on {others[0]} around this budget"
