"""Which networks of a cascade are called, and in which order, is found on the recording."""

import time

import numpy as np
import pytest

from alight import Costs, HeadOutputs, calibrate, replay
from alight.calibrate import choose_members
from alight.errors import BadInput, BudgetTooSmall


def candidates(seed: int, accuracies, size: int = 1500) -> HeadOutputs:
    """Networks of these accuracies on samples of different hardness, surer where they are right."""
    rng = np.random.default_rng(seed)
    labels, hardness = rng.integers(6, size=size), rng.uniform(size=(size, 1))
    right = hardness + 0.15 * rng.normal(size=(size, len(accuracies))) < np.array(accuracies)
    scores = 1 / (1 + np.exp(-4 * (np.array(accuracies) - hardness) - 0.5 * rng.normal(size=right.shape)))
    return HeadOutputs(scores, np.where(right, labels[:, None], (labels[:, None] + 1) % 6), labels)


def costs_of(*alone: float) -> Costs:
    return Costs([0.0] * len(alone), alone, "ms", range(len(alone)))


def accuracy(order, costs, budget, labelled, test) -> float:
    own = Costs([0.0] * len(order), costs.heads[[*order]], costs.unit, range(len(order)))
    policy = calibrate.eero(own, min(budget, own.cumulative()[-1]), labelled.at_exits(order), spend_all=True)
    return replay(policy, test.at_exits(order)).accuracy()


def test_the_choice_of_six_candidates_is_among_the_best_subsets_and_takes_seconds():
    accuracies, costs = (0.5, 0.7, 0.55, 0.8, 0.78, 0.9), costs_of(1.0, 2.0, 6.0, 7.0, 15.0, 20.0)
    labelled, test = candidates(0, accuracies), candidates(1, accuracies, 6000)
    start = time.process_time()
    order = choose_members(costs, 8.0, labelled)
    assert time.process_time() - start < 10
    assert 2 not in order  # less accurate than one that costs a third
    assert 4 not in order
    found = accuracy(order, costs, 8.0, labelled, test)
    every = [accuracy(pair, costs, 8.0, labelled, test) for pair in ((0, 3), (0, 5), (1, 3), (1, 5), (3, 5))]
    assert found > max(every) - 0.01
    assert found > max(test.correct()[:, index].mean() for index in (0, 1, 2, 3)) + 0.02  # the best alone that fits


def test_without_labels_what_the_last_network_says_is_right():
    accuracies, costs = (0.5, 0.7, 0.9), costs_of(1.0, 2.0, 20.0)
    order = choose_members(costs, 10.0, candidates(0, accuracies).unlabelled())
    assert order[-1] == 2
    assert len(order) > 1


def test_one_network_is_enough_where_a_cheap_one_is_the_best():
    assert choose_members(costs_of(1.0, 5.0), 5.0, candidates(0, (0.9, 0.6))) == (0,)


def test_budgets_below_every_network_and_exits_of_networks_are_refused():
    with pytest.raises(BudgetTooSmall):
        choose_members(costs_of(2.0, 5.0), "10%", candidates(0, (0.6, 0.9)))
    with pytest.raises(BadInput, match="networks with exits of their own stay in one place"):
        choose_members(Costs([1.0, 1.0, 9.0], [0.1] * 3, "ms", [0, 0, 1]), 5.0, candidates(0, (0.6, 0.7, 0.9)))
