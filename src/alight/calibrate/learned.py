"""Methods that learn from all that was seen so far, instead of looking at the score of one exit.

`learned_stopping` is optimal stopping by regression. The others are published methods, for comparison: their papers
train small networks on features inside the backbone, which recordings do not hold; here each is a ridge regression on
recorded scores, features and agreements, with the paper's target and rule, and every docstring says what differs.
RC-EENN (Jazbec et al. 2024) controls the risk of one global threshold by a test over thresholds from the safest down:
`certified_risk(global_threshold, ...)`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from alight.budgeting.bounds import largest
from alight.budgeting.rates import Floats, Integers
from alight.calibrate.crossval import Ranked, folds, halves, shared_by_budgets
from alight.calibrate.problem import AnyCosts, Budget, Problem
from alight.calibrate.published import global_threshold
from alight.calibrate.stopping import LOWEST_PRICE, cut_to, highest_price, rates_at_price
from alight.errors import BadInput
from alight.outputs import HeadOutputs
from alight.policies.combinations import Gain, clues
from alight.policies.policy import Memory, Policy, Threshold

BENDS = (0.1, 0.3, 0.5, 0.7, 0.9)  # quantiles of a score where the expectation may bend
FOLDS = 5  # of the labelled data: each is judged by regressions on the others
MOST = 20_000  # labelled samples that are fitted: more change nothing but the time
PENALTY = 300.0  # of ridge regression, on clues of variance 1
PRICES = 65  # from the highest to the lowest, evenly in their logarithm
ROUNDS, HALVINGS = 2, 10  # pairs of halves that cut the learned scores, and bisections of the price
BASELINE_PENALTY = 10.0  # of the published methods
BASELINE_PRICES = np.geomspace(10, 1e-3, 41)  # of the cost of the last exit, in accuracy

Parts = list[Integers]


class Design(NamedTuple):
    """What is known at one exit, as columns of mean 0 and variance 1 behind a constant."""

    columns: Floats  # (samples, 1 + clues + class effects)
    centre: Floats
    scale: Floats  # infinite for a clue that never changes
    knots: tuple[tuple[float, ...], ...]
    class_effects: Floats  # (effects, classes)


class _Induced(NamedTuple):
    """One backward induction per price."""

    rates: Floats  # (prices, exits)
    scores: Floats  # (samples, exits, prices): the advantage of leaving, each sample's from the other folds
    coefficients: list[Floats]  # per exit but the last, (columns, prices)


def learned_stopping(
    costs: AnyCosts,
    budget: Budget,
    labelled: HeadOutputs,
    unlabelled: HeadOutputs | None = None,
    *,
    penalty: float = PENALTY,
) -> Threshold:
    """Leave where being right now is expected to be worth more than going on, given all that was seen so far.

        V_M = right at M - price * cost_M,    leave at l if E[right at l - price * cost_l - V_(l+1) | seen] >= 0

    The expectation is a ridge regression on splines of this and earlier scores, the features recorded beside them,
    which earlier exits agree, and the predicted class (shrunk by empirical Bayes). Both regressions, of being right and
    of going on, have the same inputs and penalty, so the difference is fitted at once. From the last exit back, each
    sample's decision comes from regressions on other folds. Their inputs are not independent of its label altogether:
    class effects of the other folds, and what going on brings there, come from regressions that know it. With 1,000
    labels, permuted labels of one fold flip up to a tenth of its own decisions at one exit, and hardly change what is
    spent; `auto` compares on folds that no part of a fit has seen. The price spends the budget on these held-out
    decisions; the plan is the mean of the shares that leave by the sign of the expectation, and by the cut of its order
    that is best on held-out labels. Thresholds on the learned score meet it on the table that sets them: without
    `unlabelled` that is the table which the regressions know, so fresh samples cost a little more than under `eero`
    (1 % with 300 labels). The policy carries the regressions as knots and coefficients (its combination).

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> replay(learned_stopping(costs, "50%", labelled), test).accuracy(test.labels)
    0.4477
    """
    problem = Problem.of("learned_stopping", costs, budget, labelled, unlabelled)
    if not 0 < penalty < np.inf:
        raise BadInput(f"penalty {penalty!r} of the ridge regressions must be a positive number")
    if len(problem.costs) == 1:  # the full network
        return problem.survivor_policy(lambda _: np.ones(1))
    relative, allowed = problem.costs / problem.costs[-1], problem.budget / problem.costs[-1]
    fitted, parts, right, designs, prices, rates = _at_all_prices(labelled, tuple(relative.tolist()), penalty)
    binding, place = _place(rates @ relative, allowed)
    price = np.exp(np.interp(place, np.arange(PRICES), np.log(prices)))
    plan = np.array([np.interp(place, np.arange(PRICES), column) for column in rates.T])
    induced = _induction(designs, right, relative, np.array([price]), parts, penalty)
    if binding:
        plan = (plan + _cut_rates(replace(fitted, scores=induced.scores[..., 0]), relative, allowed)) / 2
    plan = cut_to(plan, problem.costs, problem.budget)
    learned = gain_of(fitted, designs, [each[:, 0] for each in induced.coefficients])
    seen = replace(problem, scored=learned.apply(problem.scored))
    return replace(
        seen.survivor_policy(lambda _: plan, settings={"price": float(price), "penalty": penalty}), combination=learned
    )


@shared_by_budgets
def _at_all_prices(
    labelled: HeadOutputs, costs: tuple[float, ...], penalty: float
) -> tuple[HeadOutputs, Parts, Floats, list[Design], Floats, Floats]:
    """Return the samples to learn from, their folds, where exits are right, what is known, prices and their rates."""
    fitted = labelled.take(folds(len(labelled), -(-len(labelled) // MOST))[0])
    parts = folds(len(fitted), min(FOLDS, len(fitted) // 2)) if len(fitted) > 3 else []
    right, designs, relative = fitted.correct().astype(np.float64), designs_of(fitted, parts), np.array(costs)
    prices = np.geomspace(highest_price(relative), LOWEST_PRICE, PRICES)
    return fitted, parts, right, designs, prices, _induction(designs, right, relative, prices, parts, penalty).rates


def designs_of(labelled: HeadOutputs, parts: Parts) -> list[Design]:
    """Return what is known at each exit but the last."""
    names, right = (labelled.score, *labelled.features), labelled.correct().astype(np.float64)
    memory: Memory = ()
    designs = []
    for exit_index in range(labelled.num_exits - 1):
        said = labelled.predictions[:, exit_index]
        columns = tuple(labelled.column(name)[:, exit_index] for name in names)
        knots = tuple(tuple(np.unique(np.quantile(column, BENDS)).tolist()) for column in columns)
        targets = (right[:, exit_index], right[:, -1] - right[:, exit_index])
        effects = [_class_effects(said, target, parts) for target in targets]
        raw = np.stack([*clues(knots, said, columns, memory), *(held_out for held_out, _ in effects)], axis=1)
        centre, scale = raw.mean(axis=0), raw.std(axis=0)
        scale = np.where(scale > 1e-12, scale, np.inf)
        scaled = np.concatenate([np.ones((len(raw), 1)), (raw - centre) / scale], axis=1)
        designs.append(Design(scaled, centre, scale, knots, np.stack([table for _, table in effects])))
        memory = (*memory, (said, *columns))
    return designs


def _class_effects(classes: Integers, target: Floats, parts: Parts) -> tuple[Floats, Floats]:
    """Return how far the target's mean in each sample's class, from other folds, and in each class, is from the whole.

    Shrunk by empirical Bayes: by the variance within classes over that between them, beyond sampling error.
    """
    size, deviation = int(classes.max()) + 1, target - target.mean()
    counts, sums = np.bincount(classes, minlength=size), np.bincount(classes, deviation, size)
    seen = max(int((counts > 0).sum()), 1)
    between = float((sums**2 / np.maximum(counts, 1)).sum())
    within = (float(deviation @ deviation) - between) / max(len(classes) - seen, 1)
    spread = (between - (seen - 1) * within) / max(len(classes) - (counts**2).sum() / len(classes), 1e-9)
    if spread <= 0 or not parts:  # no class differs beyond sampling error
        return np.zeros(len(classes)), np.zeros(size)
    held_out, prior = np.empty(len(classes)), max(within / spread, 1e-9)  # samples that the mean of all counts for
    for part in parts:
        fewer = counts - np.bincount(classes[part], minlength=size)
        rest = sums - np.bincount(classes[part], deviation[part], size)
        held_out[part] = (rest / (fewer + prior))[classes[part]]
    return held_out, sums / (counts + prior)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let matrix products run in this thread alone, where threadpoolctl is installed, as scikit-learn brings it.

    They are small: on a machine with other work, threads that wait for each other take several times as long.
    """
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        yield
        return
    with threadpool_limits(1, "blas"):
        yield


@one_blas_thread()
def _induction(
    designs: list[Design], right: Floats, costs: Floats, prices: Floats, parts: Parts, penalty: float
) -> _Induced:
    """Decide from the last exit back at every price; a sample's advantages come from regressions without it."""
    scores = np.zeros((*right.shape, len(prices))) if len(prices) == 1 else np.zeros((0, 0, 0))
    leaving = np.ones((right.shape[1], len(right), len(prices)), dtype=bool)
    coefficients: list[Floats] = []
    going_on = right[:, -1:] - prices * costs[-1]  # (samples, prices)
    for exit_index in reversed(range(len(designs))):
        here = right[:, exit_index, None] - prices * costs[exit_index]
        advantage, fitted = ridge(designs[exit_index].columns, here - going_on, parts, penalty)
        coefficients.insert(0, fitted)
        leaving[exit_index] = advantage >= 0
        going_on = np.where(leaving[exit_index], here, going_on)
        if scores.size:
            scores[:, exit_index] = advantage
    waiting = np.ones_like(leaving)
    waiting[1:] = np.logical_and.accumulate(~leaving[:-1], axis=0)
    return _Induced((waiting & leaving).mean(axis=1).T, scores, coefficients)


def ridge(columns: Floats, targets: Floats, parts: Parts, penalty: float) -> tuple[Floats, Floats]:
    """Return predictions, each from the other folds, and the coefficients of all samples; the constant is free."""
    shrink = penalty * np.eye(columns.shape[1])
    shrink[0, 0] = 1e-9
    squares, products = columns.T @ columns, columns.T @ targets
    coefficients = np.asarray(np.linalg.solve(squares + shrink, products), dtype=np.float64)
    predicted: Floats = columns @ coefficients
    for part in parts:
        own = columns[part]
        others = np.linalg.solve(squares - own.T @ own + shrink, products - own.T @ targets[part])
        predicted[part] = own @ others
    return predicted, coefficients


def _place(spent: Floats, allowed: float) -> tuple[bool, float]:
    """Return whether some price spends too much, and where between two neighbouring prices the budget lies."""
    exceeding = spent > allowed
    if not exceeding.any():
        return False, len(spent) - 1.0
    first = int(np.argmax(exceeding))
    if not first:
        return True, 0.0
    return True, first - 1 + (allowed - spent[first - 1]) / (spent[first] - spent[first - 1])


def _cut_rates(table: HeadOutputs, costs: Floats, allowed: float) -> Floats:
    """Return the rates within the budget when learned scores are cut where labels are best, the mean over halves."""
    ranked = [Ranked(table.take(half)) for half, _ in halves(len(table), ROUNDS)]
    high, low = np.log(highest_price(costs)), np.log(LOWEST_PRICE)
    plans = {0: np.eye(len(costs))[0]}

    def affordable(step: int) -> bool:
        price = float(np.exp(high + (low - high) * step / 2**HALVINGS))
        plans[step] = np.mean([rates_at_price(half, costs, price) for half in ranked], axis=0)
        return bool(plans[step] @ costs <= allowed)

    below = largest(0, 2**HALVINGS, affordable)
    above = min((step for step in plans if step > below), default=below)
    cheaper, costlier = plans[below], plans[above]
    extra = (costlier - cheaper) @ costs
    share = (allowed - cheaper @ costs) / extra if extra > 0 else 0.0
    return cheaper + share * (costlier - cheaper)


def gain_of(labelled: HeadOutputs, designs: list[Design], coefficients: list[Floats]) -> Gain:
    """Return the regressions as a map that scores by the advantage of leaving; at the last exit it is 0."""
    knots: list[tuple[tuple[float, ...], ...]] = [each.knots for each in designs]
    names, weights, class_gains = (labelled.score, *labelled.features), [], []
    for design, (constant, *fitted) in zip(designs, coefficients, strict=True):
        slopes, effects = np.array(fitted) / design.scale, len(design.class_effects)
        gains = slopes[-effects:] @ design.class_effects
        weights.append(tuple((-np.array([constant - slopes @ design.centre, *slopes[:-effects]])).tolist()))
        class_gains.append(tuple((-gains).tolist()) if gains.any() else ())
    knots.append(((),) * len(names))
    weights.append((0.0,) * (1 + 4 * len(names) + 4))
    exits = tuple(range(labelled.num_exits))
    return Gain(exits=exits, columns=names, knots=tuple(knots), weights=tuple(weights), class_gains=(*class_gains, ()))


def learning_to_exit(
    costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None
) -> Policy:
    """Leave where a certainty that was learned for all exits together reaches one level (BERxiT, Xin et al. 2021).

    The paper learns a linear map from the hidden state to the probability of being right, the same at all exits, by
    squared error, jointly with the network. Here it maps the recorded score and features, and the network stays: with
    the score alone it is `global_threshold`.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> replay(learning_to_exit(costs, "50%", labelled), test).accuracy(test.labels)
    0.4089
    """
    problem = Problem.of("learning_to_exit", costs, budget, labelled, unlabelled)

    def learn() -> Gain:
        names, right = (labelled.score, *labelled.features), labelled.correct().astype(np.float64)
        columns = np.stack([np.ones(right.size), *(labelled.column(name).ravel() for name in names)], axis=1)
        _, fitted = ridge(columns, right.reshape(-1, 1), [], BASELINE_PENALTY)
        constant, *slopes = (-fitted[:, 0]).tolist()
        later = [part for slope in slopes for part in (slope, 0.0, 0.0, 0.0)]  # of now, before, at best and on average
        weights = [(constant, *slopes), *[(constant, *later, *(0.0,) * 4)] * (labelled.num_exits - 1)]
        knots = (((),) * len(names),) * labelled.num_exits
        return Gain(exits=tuple(range(labelled.num_exits)), columns=names, knots=knots, weights=tuple(weights))

    return _one_level(problem, learn)


def eenet(costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None) -> Policy:
    """Leave where a learned probability of being right, given all exits so far, reaches one level (EENet, 2024).

    The paper's scheduler is a small network per exit on the probabilities, their entropy, the vote of earlier exits and
    earlier exit scores, trained together with the share that each exit should take. Here each exit's score is a ridge
    regression on the same statistics, as far as they are recorded, and one level for all exits meets the budget instead
    of learned shares.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> replay(eenet(costs, "50%", labelled), test).accuracy(test.labels)
    0.384
    """
    problem = Problem.of("eenet", costs, budget, labelled, unlabelled)
    right = labelled.correct().astype(np.float64)
    return _one_level(problem, lambda: _fitted(labelled, _all_designs(labelled), right))


def jei_dnn(costs: AnyCosts, budget: Budget, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None) -> Policy:
    """Leave where a learned gate opens, trained for the price that spends the budget (JEI-DNN, Regol et al. 2024).

    A gate is to open where no later exit has less loss plus price times cost. The paper trains gates on uncertainties
    by cross-entropy, in turns with the heads, one network per price. Here heads stay, the loss is the error, a gate is
    a ridge regression, and the level above which gates open is moved a little so that the budget is used.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> replay(jei_dnn(costs, "50%", labelled), test).accuracy(test.labels)
    0.4047
    """
    problem = Problem.of("jei_dnn", costs, budget, labelled, unlabelled)
    wrong, relative, designs = 1.0 - labelled.correct(), problem.costs / problem.costs[-1], _all_designs(labelled)

    def gain_at(index: int) -> Gain:
        losses = wrong + BASELINE_PRICES[index] * relative
        best = np.minimum.accumulate(losses[:, ::-1], axis=1)[:, ::-1]  # from this exit on
        return _fitted(labelled, designs, (losses <= best) - 0.5)

    def affordable(index: int) -> bool:
        opens = Threshold(thresholds=(0.0,) * (len(problem.costs) - 1), **problem.terms())
        return problem.spends(replace(opens, combination=gain_at(index))) <= problem.budget

    return _one_level(problem, lambda: gain_at(largest(0, len(BASELINE_PRICES) - 1, affordable)))


@shared_by_budgets
def _all_designs(labelled: HeadOutputs) -> list[Design]:
    return designs_of(labelled, [])


@one_blas_thread()
def _fitted(labelled: HeadOutputs, designs: list[Design], targets: Floats) -> Gain:
    """Return a map whose score at each exit is a ridge regression of its target on all that was seen so far."""
    pairs = zip(designs, targets.T, strict=False)  # the last exit has a target and takes everyone
    fits = [ridge(each.columns, target[:, None], [], BASELINE_PENALTY)[1][:, 0] for each, target in pairs]
    return gain_of(labelled, designs, fits)


def _one_level(problem: Problem, learn: Callable[[], Gain]) -> Policy:
    """Return the policy that leaves where the learned score reaches one level, the highest that the budget allows."""
    if len(problem.costs) == 1:  # the full network
        return problem.survivor_policy(lambda _: np.ones(1))
    learned = learn()
    scored = None if problem.scored is problem.labelled else learned.apply(problem.scored)
    policy = global_threshold(problem.network, problem.budget, learned.apply(problem.labelled), scored)
    return replace(policy, combination=learned, method=problem.method)
