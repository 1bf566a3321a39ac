"""Searches: over exit rates by EERO's fixed point, local search and evolution, and over the networks of a cascade."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations, permutations
from operator import index

import numpy as np

from alight.budgeting.rates import (
    Floats,
    Integers,
    Prior,
    exponential_weights,
    gaussian_rates,
    geometric_rates,
    tilted_rates,
)
from alight.calibrate.crossval import Ranked, affordable_exits, halves, ranked_halves
from alight.calibrate.problem import AnyCosts, Budget, Problem, Settings, costs_in
from alight.calibrate.published import eero, geometric, global_threshold
from alight.calibrate.stopping import cut_to
from alight.costs import as_costs
from alight.errors import BadInput, BudgetTooSmall
from alight.outputs import HeadOutputs
from alight.policies.policy import Threshold
from alight.policies.route import replay

CONDITIONAL_ROUNDS, DAMPING = 10, 0.5  # of the fixed point, and how much of the new risks each takes
FALSE_ALARM = 1e-3  # probability that scores which tell nothing change EERO's risks
LEAST_LEAVING = 10  # samples at an exit for a risk among them
TEMPERATURES = (0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 3.0)
MEMBERS, WARM = 3, (0.04, 0.3, 1.0)  # of a cascade that a first plan opens at most, and its temperatures
ROUNDS, STEPS = 2, 250  # pairs of halves, and moves tried on each half
WIDEST = 0.05  # share of samples that the first exchanges move; later ones fewer
CLOSINGS = 0.03  # share of moves that close an exit
SMALLEST = 1e-6  # rate from which an exit of rate 0 can grow again
ORDERED = 3  # networks of which all orders are tried; more are called from cheap to expensive
TOLERATED = 0.25  # standard errors of an accuracy, within which few networks, called from cheap to expensive, are taken
MOST = 10_000  # samples that choose networks: a standard error of at most half a point


@dataclass(frozen=True)
class _OpenPlan:
    """Rates of all exits, 0 where closed, and what the open ones cost."""

    rates: Floats  # (exits,)
    open_exits: tuple[int, ...]
    costs: Floats  # (open exits,), cumulative

    @property
    def planned(self) -> float:
        """Mean cost."""
        return float(self.rates[list(self.open_exits)] @ self.costs)


def eero_conditional(
    costs: AnyCosts,
    budget: Budget,
    labelled: HeadOutputs,
    unlabelled: HeadOutputs | None = None,
    *,
    temperature: float = 0.04,
    prior: Prior = "inverse_cost",
) -> Threshold:
    """Plan by exponential weights on risks of the samples that leave, iterated to a fixed point.

    EERO weighs exit l by its risk R_l over all samples, though samples leave by their scores. Let G_l be the risk of
    those that leave at l under the current thresholds, less that of the same samples where they would leave if they
    went on. The risks rho_l that the next round plans with have these differences, from the last exit back:

        rho_M = R_M,    rho_l = G_l + sum_(j > l) w_j rho_j,    w_j = e_j / sum_(k > l) e_k

    Where scores tell nothing, samples leave at random, so G_l = R_l - sum_j w_j R_j in expectation and rho = R: the
    fixed point is EERO's plan. What is measured counts as far as it differs from that beyond sampling error (positive-
    part shrinkage of the chi-square statistic), so that on such data this is `eero` exactly, up to a probability of
    about `FALSE_ALARM` per half and round. Every plan is an exponential weighting within the budget, and a mean of such
    plans keeps it too. Rounds run on halves of the labelled data, the other half chooses the round, EERO's plan among
    them, and the plans chosen are averaged. No bound on the error of the fixed point is claimed: it is measured.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> replay(eero_conditional(costs, "80%", labelled), test).accuracy(test.labels)
    0.6916
    """
    problem = Problem.of("eero_conditional", costs, budget, labelled, unlabelled)

    def weights(risks: Floats) -> Floats:
        return exponential_weights(risks, problem.costs, problem.budget, temperature=temperature, prior=prior)

    risks, plans = labelled.risks(), []
    start = weights(risks)
    for _, fitted, kept in ranked_halves(labelled, ROUNDS):
        shift, tried = np.zeros(len(risks)), [start]
        for _ in range(CONDITIONAL_ROUNDS):
            shift += DAMPING * (conditional_risks(fitted, tried[-1]) - fitted.risks - shift)
            tried.append(weights(risks + shift))
            if np.abs(tried[-1] - tried[-2]).max() < 1 / len(fitted):
                break
        plans.append(max(tried, key=kept.accuracy))
    unchanged = all(plan is start for plan in plans)
    plan = start if unchanged else cut_to(np.mean(plans, axis=0), problem.costs, problem.budget)
    settings: Settings = {"temperature": temperature, "prior": prior if isinstance(prior, str) else "given"}
    return problem.survivor_policy(lambda _: plan, settings=settings)


def conditional_risks(table: Ranked, exit_rates: Floats) -> Floats:
    """Return the risks whose differences are those of the samples that leave at each exit when rates are met.

    All risks of the table where the samples that leave differ from all samples within sampling error.
    """
    from scipy.special import chdtri  # slow to import

    risks, last, wrong = table.risks.copy(), len(exit_rates) - 1, 1.0 - table.correct
    exits, going_on = _where_they_leave(table, exit_rates)
    shares = np.zeros((last, last + 1))  # of the later exits
    random, found, squares, freedom = np.zeros(last), np.zeros(last), 0.0, 0
    for exit_index in range(last):
        later, rows = exit_rates[exit_index + 1 :].copy(), np.flatnonzero(exits == exit_index)
        later[-1] += later.sum() <= 0  # everyone has left: the last exit
        shares[exit_index, exit_index + 1 :] = later / later.sum()
        random[exit_index] = found[exit_index] = risks[exit_index] - shares[exit_index] @ risks
        if len(rows) < LEAST_LEAVING:
            continue
        gains = wrong[exit_index, rows] - wrong[going_on[exit_index, rows], rows]
        found[exit_index] = gains.mean()
        variance = max(float(gains.var()), 0.25 / len(rows)) / len(rows)
        squares, freedom = squares + (found[exit_index] - random[exit_index]) ** 2 / variance, freedom + 1
    beyond = max(0.0, 1 - float(chdtri(freedom, FALSE_ALARM)) / squares) if squares > 0 else 0.0
    for exit_index in reversed(range(last)):
        difference = random[exit_index] + beyond * (found[exit_index] - random[exit_index])
        risks[exit_index] = difference + shares[exit_index] @ risks if beyond else risks[exit_index]
    return risks


def _where_they_leave(table: Ranked, exit_rates: Floats) -> tuple[Integers, Integers]:
    """Return each sample's exit when rates are met, and where it would leave if it went on, (exits - 1, samples)."""
    last = len(exit_rates) - 1
    exits = np.where(table.reached(exit_rates), np.arange(last)[:, None], last)
    soonest = np.minimum.accumulate(np.concatenate([exits, np.full((1, len(table)), last)])[::-1], axis=0)[::-1]
    return soonest[0], soonest[1:]


def search(
    costs: AnyCosts,
    budget: Budget,
    labelled: HeadOutputs,
    unlabelled: HeadOutputs | None = None,
    *,
    seed: int = 0,
    steps: int = STEPS,
    rounds: int = ROUNDS,
) -> Threshold:
    """Find the most accurate exit rates by a local search, met by survivor thresholds.

    It starts from the best of EERO at several temperatures, geometric and Gaussian rates. A move takes samples
    from two exits to one between them, or the other way round, at no change in cost; or it closes an exit, whose
    head is then paid no more. Moves are accepted on one half of the labelled data; the plan kept is the best on
    the other. The plans of several such halves are averaged, and an exit is closed that most of them closed.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> replay(search(costs, "50%", labelled, rounds=2), test).accuracy(test.labels)
    0.4385
    """
    problem = Problem.of("search", costs, budget, labelled, unlabelled, closes_exits=True)
    opened = affordable_exits(problem.network, problem.budget)
    rng = np.random.default_rng(seed)
    starts, plans = _starts(problem, opened), []
    for _, tried, kept in ranked_halves(labelled, rounds):
        start = max(starts, key=lambda plan: tried.accuracy(plan.rates))
        plans.append(_climb(problem, start, tried, kept, steps, rng))
    plan = _average(problem, plans)
    return problem.survivor_policy(
        lambda _: plan.rates[list(plan.open_exits)],
        open_exits=plan.open_exits,
        settings={"seed": seed, "steps": steps, "halves": len(plans)},
    )


def _starts(problem: Problem, opened: tuple[int, ...]) -> list[_OpenPlan]:
    """Return the plans that other methods make."""
    costs, risks = problem.network.cumulative(opened), problem.labelled.risks()[list(opened)]
    starts = [
        exponential_weights(risks, costs, problem.budget, temperature=temperature, spend_all=spend_all)
        for temperature in TEMPERATURES
        for spend_all in (False, True)
    ]
    starts += [geometric_rates(costs, problem.budget), gaussian_rates(costs, problem.budget)]
    plans = [_opened(problem, opened, rates) for rates in starts]
    return [*plans, *_few_members(problem)] if problem.network.is_cascade else plans


def _few_members(problem: Problem) -> list[_OpenPlan]:
    """Return plans of a cascade that call up to three of its members: those left out cost nothing, so many pay."""
    plans = []
    for size in range(1, min(MEMBERS, len(problem.network)) + 1):
        for opened in combinations(range(len(problem.network)), size):
            if _affordable(problem, opened):
                costs, risks = problem.network.cumulative(opened), problem.labelled.risks()[list(opened)]
                weights = partial(exponential_weights, risks, costs, problem.budget, spend_all=True)
                rates = [geometric_rates(costs, problem.budget), *(weights(temperature=each) for each in WARM)]
                plans += [_opened(problem, opened, each) for each in rates]
    return plans


def _climb(
    problem: Problem, plan: _OpenPlan, tried: Ranked, kept: Ranked, steps: int, rng: np.random.Generator
) -> _OpenPlan:
    """Return the plan that is best on `kept` among those that a climb on `tried` passes through."""
    accuracy = tried.accuracy(plan.rates)
    best, best_accuracy = plan, kept.accuracy(plan.rates)
    for step in range(steps):
        if rng.random() < CLOSINGS:
            moved = _closed(problem, plan, rng)
        else:
            moved = _exchanged(plan, WIDEST * (1 - step / steps) * rng.normal(), rng)
        if moved is None or (now := tried.accuracy(moved.rates)) < accuracy:
            continue
        plan, accuracy = moved, now
        if (held_out := kept.accuracy(plan.rates)) > best_accuracy:
            best, best_accuracy = plan, held_out
    return best


def _exchanged(plan: _OpenPlan, amount: float, rng: np.random.Generator) -> _OpenPlan | None:
    """Move a share of samples to an exit from two around it, or away from it, so that the cost stays."""
    triples = _triples(len(plan.open_exits))
    if not triples:
        return None
    triple = triples[int(rng.integers(len(triples)))]
    first, middle, last = (plan.open_exits[position] for position in triple)
    low, cost, high = (float(plan.costs[position]) for position in triple)
    part = (high - cost) / (high - low)  # of the samples that move, this share has to do with the first exit
    before, here, after = (float(plan.rates[index]) for index in (first, middle, last))
    amount = min(max(amount, -here), before / part, after / (1 - part))
    if amount == 0:
        return None
    rates = plan.rates.copy()
    rates[first], rates[middle] = max(before - part * amount, 0.0), max(here + amount, 0.0)
    rates[last] = max(after - (1 - part) * amount, 0.0)
    return _OpenPlan(rates, plan.open_exits, plan.costs)


@cache
def _triples(count: int) -> tuple[tuple[int, int, int], ...]:
    return tuple(combinations(range(count), 3))


def _closed(problem: Problem, plan: _OpenPlan, rng: np.random.Generator) -> _OpenPlan | None:
    """Close one exit of the plan, its samples and its head's cost shared out among the others."""
    opened = np.delete(plan.open_exits, rng.integers(len(plan.open_exits))).tolist()
    return _fitted(problem, plan.rates, opened, plan.planned) if _affordable(problem, opened) else None


def _average(problem: Problem, plans: Sequence[_OpenPlan]) -> _OpenPlan:
    """Return the mean of the plans, with the exits open that at least half of them open."""
    votes = np.bincount([index for plan in plans for index in plan.open_exits], minlength=len(problem.network))
    opened = np.flatnonzero(2 * votes >= len(plans)).tolist()
    rates, planned = np.mean([plan.rates for plan in plans], axis=0), np.mean([plan.planned for plan in plans])
    return _fitted(problem, rates, opened if _affordable(problem, opened) else plans[0].open_exits, float(planned))


def _fitted(problem: Problem, rates: Floats, opened: Sequence[int], planned: float) -> _OpenPlan:
    """Return the nearest rates over these exits that cost what is planned, or a little less where it must be."""
    costs = problem.network.cumulative(opened)
    target = min(max(planned, float(costs[0])), problem.budget)
    return _opened(problem, opened, tilted_rates(np.maximum(rates[list(opened)], SMALLEST), costs, target))


def _affordable(problem: Problem, opened: Sequence[int]) -> bool:
    return bool(opened) and bool(problem.network.cumulative(opened)[0] <= problem.budget)


def _opened(problem: Problem, opened: Sequence[int], rates: Floats) -> _OpenPlan:
    """Return the plan of these rates of the open exits."""
    spread = np.zeros(len(problem.network))
    spread[list(opened)] = rates
    return _OpenPlan(spread, tuple(opened), problem.network.cumulative(opened))


POPULATION, GENERATIONS, ELITES, TOURNAMENT = 64, 60, 4, 3
BLEND, MUTATION = 0.5, 0.1  # width of the crossover beyond the parents, spread of the first mutations
ROUNDING = 1e-12  # so that a seed that spends exactly the budget is feasible


def genetic(
    costs: AnyCosts,
    budget: Budget,
    labelled: HeadOutputs,
    unlabelled: HeadOutputs | None = None,
    *,
    seed: int = 0,
    population: int = POPULATION,
    generations: int = GENERATIONS,
    progress: bool = False,
) -> Threshold:
    """Find survivor quantiles by evolution: the most accurate on the labelled data within the budget.

    An individual is the share of those waiting that leaves at each exit but the last, as in Dynamic Vision Transformer
    (Wang et al. 2021), whose search was not released.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> replay(genetic(costs, "50%", labelled, generations=2), test).accuracy(test.labels)
    0.4313
    """
    problem = Problem.of("genetic", costs, budget, labelled, unlabelled)
    seed, population, generations = index(seed), index(population), index(generations)
    if seed < 0 or population <= ELITES or generations < 0:
        raise BadInput(f"seed {seed} and {generations} generations must be >= 0, the population more than {ELITES}")
    rng = np.random.default_rng(seed)
    known = [method(costs, budget, labelled, unlabelled) for method in (eero, geometric, global_threshold)]
    seeds = np.array([quantiles_of(replay(policy, problem.scored).exit_shares) for policy in known])  # (3, exits - 1)
    genes = np.concatenate([seeds, rng.uniform(size=(max(population - len(seeds), 1), seeds.shape[1]))])
    fitness = np.array([_fitness(problem, each) for each in genes])
    from tqdm import tqdm

    for generation in tqdm(range(generations), desc="genetic", unit="generation", disable=not progress):
        elite = genes[np.argsort(-fitness, kind="stable")[:ELITES]]
        parents = genes[_tournaments(fitness, 2 * (len(genes) - ELITES), rng)]
        mothers, fathers = np.split(parents, 2)
        children = _crossed(mothers, fathers, rng)
        children += rng.normal(0, MUTATION * (1 - generation / generations), size=children.shape)
        genes = np.concatenate([elite, np.clip(children, 0, 1)])
        kept = np.sort(fitness)[::-1][:ELITES]
        fitness = np.concatenate([kept, [_fitness(problem, each) for each in genes[len(elite) :]]])
    return _policy(problem, genes[int(np.argmax(fitness))], {"seed": seed, "generations": generations})


def quantiles_of(exit_rates: Floats) -> Floats:
    """Return the share of the waiting samples that leaves at each exit but the last."""
    waiting = 1 - np.concatenate([[0.0], np.cumsum(exit_rates)[:-1]])
    return np.clip(np.divide(exit_rates, waiting, out=np.ones_like(waiting), where=waiting > 1e-12), 0, 1)[:-1]


def rates_of(quantiles: Floats) -> Floats:
    """Return exit rates when those shares of the waiting samples leave."""
    waiting = np.concatenate([[1.0], np.cumprod(1 - quantiles)])
    return waiting * np.append(quantiles, 1.0)


def _policy(problem: Problem, quantiles: Floats, settings: Settings | None = None) -> Threshold:
    return problem.survivor_policy(lambda _: rates_of(quantiles), settings=settings)


def _fitness(problem: Problem, quantiles: Floats) -> float:
    """Return the accuracy if the plan is within the budget, else minus the relative excess: the feasible win."""
    excess = float(rates_of(quantiles) @ problem.costs) / problem.budget - 1
    return problem.accuracy(_policy(problem, quantiles)) if excess <= ROUNDING else -excess


def _tournaments(fitness: Floats, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return indices of the winners of this many tournaments."""
    contestants = rng.integers(len(fitness), size=(count, TOURNAMENT))
    return contestants[np.arange(count), np.argmax(fitness[contestants], axis=1)]


def _crossed(first: Floats, second: Floats, rng: np.random.Generator) -> Floats:
    """Draw children evenly from the parents' interval, widened on both sides by BLEND of it."""
    return first + rng.uniform(-BLEND, 1 + BLEND, size=first.shape) * (second - first)


def choose_members(costs: AnyCosts, budget: Budget, outputs: HeadOutputs) -> tuple[int, ...]:
    """Return the networks of a cascade that answer best within the budget, in the order in which to call them.

    All subsets are tried from cheap to expensive, and of up to three networks all orders: six candidates in a second or
    two. Each half of the table judges plans of exit rates that the other half made. `Cascade.take` makes the cascade of
    the choice, `Cascade.take_outputs` its table, and `Costs.at_exits` its costs; calibrate these for the same amount,
    `costs.budget("30%")`, since percentages refer to the most expensive network that is left. Without labels, answers
    are right that the last network gives.

    >>> scores, labels = [[0.9, 0.1, 0.5]] * 8, [0, 1] * 4
    >>> table = HeadOutputs(scores, [[label, 1 - label, label] for label in labels], labels)
    >>> from alight import Costs
    >>> choose_members(Costs([0, 0, 0], [1, 2, 9]), 12.0, table)
    (0,)
    """
    network = as_costs(costs)
    if len({*network.members}) < len(network):
        raise BadInput("networks with exits of their own stay in one place: calibrate, which closes exits")
    amount, means = network.budget(budget), costs_in(outputs, network).alone
    if amount < means.min():
        raise BudgetTooSmall(amount, float(means.min()), network.unit, full=network.full)
    drawn = np.random.default_rng(0).permutation(len(outputs))[:MOST]
    table = outputs.take(np.sort(drawn))
    parts = [(table.take(one), Ranked(table.take(other))) for one, other in halves(len(table), ROUNDS)]
    found = {order: _accuracy(order, means, amount, parts) for order in _orders(means) if means[order[0]] <= amount}
    best = max(found.values())
    tolerated = best - TOLERATED * float(np.sqrt(best * (1 - best) / len(table)))
    usual = [(means[list(order)][1:] < means[list(order)][:-1]).any() for order in found]  # expensive before cheap
    return min(zip(usual, map(len, found), found, strict=True), key=lambda each: (found[each[2]] < tolerated, *each))[2]


def _orders(means: Floats) -> Iterator[tuple[int, ...]]:
    cheap_first = np.argsort(means, kind="stable").tolist()
    for size in range(1, len(means) + 1):
        for chosen in combinations(cheap_first, size):
            yield from permutations(chosen) if size <= ORDERED else [chosen]


def _accuracy(order: tuple[int, ...], means: Floats, amount: float, parts: list[tuple[HeadOutputs, Ranked]]) -> float:
    """Return the accuracy of the best plan that one half of a table makes on the other, on average."""
    chosen, found = [*order], []
    costs = np.cumsum(means[chosen])
    for fitted, judged in parts:
        risks = fitted.risks()[chosen]
        plans = [exponential_weights(risks, costs, amount, temperature=each, spend_all=True) for each in WARM]
        ranked = copy.copy(judged)
        ranked.order, ranked.correct = [judged.order[index] for index in chosen], judged.correct[chosen]
        found.append([ranked.accuracy(rates) for rates in (*plans, geometric_rates(costs, amount))])
    return float(np.mean(found, axis=0).max())
