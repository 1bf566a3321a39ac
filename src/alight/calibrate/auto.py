"""The method that does best on held-out labels, at this budget."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from alight.budgeting.rates import Floats
from alight.calibrate import published
from alight.calibrate.combinations import LEAST_SAMPLES, combined, has_several_truths
from alight.calibrate.crossval import folds as folds_of
from alight.calibrate.crossval import held_out_tables
from alight.calibrate.learned import learned_stopping
from alight.calibrate.problem import AnyCosts, Budget, Problem, Settings, check_uncertified
from alight.calibrate.search import eero_conditional, search
from alight.costs import as_costs
from alight.errors import BadInput, BudgetTooSmall
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy
from alight.policies.route import replay

Candidates = Mapping[str, Callable[..., Policy]]

FOLDS = 4  # of the labelled data, each held out once
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
    most 1.5 standard errors behind the best, if there are any. The best of many is often only lucky, so what counts is
    the gain over the first candidate that is to be expected: the mean of the paired differences on all folds, shrunk
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
    gains = {
        name: expected_gain(right - tried[first][0]) if name != first else 0.0 for name, (right, _) in tried.items()
    }
    winner, *others = sorted(tried, key=lambda name: (-gains[name], tried[name][1]))
    policy = candidates[winner](problem.network, problem.budget, labelled, unlabelled)
    check_uncertified(policy, "auto")
    settings: Settings = {
        "winner": winner,
        "compared accuracy": float(tried[winner][0].mean()),
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


def _tried(
    candidates: Candidates, problem: Problem, labelled: HeadOutputs, count: int
) -> dict[str, tuple[Floats, float]]:
    """Return which held-out samples each candidate answers correctly, in the order of the folds, and the mean cost.

    Candidates that are clearly behind after the first fold are left out, but never the first.
    """
    right: dict[str, list[Floats]] = {name: [] for name in candidates}
    spent: dict[str, list[Floats]] = {name: [] for name in candidates}
    for number, (fitting, fold) in enumerate(held_out_tables(labelled, count)):
        truth, hidden = fold.truth(), fold.unlabelled()
        for name in list(right):
            try:
                policy = candidates[name](problem.network, problem.budget, fitting, hidden)
            except BudgetTooSmall:  # for a method that opens every exit
                del right[name]
                continue
            decisions = replay(policy, fold)
            right[name].append(decisions.correct(truth).astype(np.float64))
            spent[name].append(decisions.spent)
        if not number and right:
            right = _near_the_best(right)
        if len(right) == 1:  # nothing is left to compare
            break
    return {name: (np.concatenate(parts), float(np.concatenate(spent[name]).mean())) for name, parts in right.items()}


def _near_the_best(right: dict[str, list[Floats]]) -> dict[str, list[Floats]]:
    """Return the first candidate, and those that are not clearly behind the best on the first fold."""
    first, best = next(iter(right)), max((parts[0] for parts in right.values()), key=np.mean)
    return {name: parts for name, parts in right.items() if name == first or not _clearly_above(best, parts[0])}


def _clearly_above(best: Floats, other: Floats) -> bool:
    """Return whether the mean of paired differences is above `BEHIND` standard errors."""
    gains = best - other
    return bool(gains.mean() > BEHIND * gains.std() / np.sqrt(len(gains)))


def _choice(winner: str, others: Sequence[str], tried: Mapping[str, tuple[Floats, float]]) -> str:
    """Return in one line what won, and by how much over the best of the others."""
    chosen = f"{winner}: {tried[winner][0].mean():.1%} accuracy in the comparison that chose it"
    if not others:
        return f"{chosen}, all others clearly behind on the first fold"
    gains = 100 * (tried[winner][0] - tried[others[0]][0])
    error = gains.std() / np.sqrt(len(gains))
    return f"{chosen}, {gains.mean():+.1f} points (standard error {error:.1f}) on {others[0]}"
