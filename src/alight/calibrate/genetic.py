"""A genetic search over survivor quantiles, as the Dynamic Vision Transformer paper describes it."""

from operator import index

import numpy as np

from alight.calibrate.levels import global_threshold
from alight.calibrate.planned_rates import eero, geometric
from alight.calibrate.problem import AnyCosts, Budget, Floats, Problem, Settings
from alight.errors import BadInput
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy, Threshold
from alight.policies.route import replay

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

    An individual is the share of those waiting that leaves at each exit but the last.

    >>> from alight import recordings, replay
    >>> labelled, test, costs = recordings.load()
    >>> decisions = replay(genetic(costs, "50%", labelled, generations=2), test)
    >>> f"{decisions.accuracy(test.labels):.1%} accuracy at {decisions.mean_cost / costs.full:.1%} of the cost"
    '43.1% accuracy at 49.3% of the cost'
    """
    problem = Problem.of("genetic", costs, budget, labelled, unlabelled)
    seed, population, generations = index(seed), index(population), index(generations)
    if seed < 0 or population <= ELITES or generations < 0:
        raise BadInput(f"seed {seed} and {generations} generations must be >= 0, the population more than {ELITES}")
    rng = np.random.default_rng(seed)
    known = [method(costs, budget, labelled, unlabelled) for method in (eero, geometric, global_threshold)]
    seeds = np.array([quantiles_of(_shares(policy, problem)) for policy in known])  # (3, exits - 1)
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


def _shares(policy: Policy, problem: Problem) -> Floats:
    return replay(policy, problem.scored).exit_shares


def _tournaments(fitness: Floats, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return indices of the winners of this many tournaments."""
    contestants = rng.integers(len(fitness), size=(count, TOURNAMENT))
    return contestants[np.arange(count), np.argmax(fitness[contestants], axis=1)]


def _crossed(first: Floats, second: Floats, rng: np.random.Generator) -> Floats:
    """Draw children evenly from the parents' interval, widened on both sides by BLEND of it."""
    return first + rng.uniform(-BLEND, 1 + BLEND, size=first.shape) * (second - first)
