"""A capped sample leaves at its limit at the latest, others as before, and no budget is lost sight of."""

import numpy as np
import pytest
from conftest import made_up

from alight import calibrate, replay
from alight.errors import BadInput
from alight.policies.limits import capped
from alight.policies.paced import Pace
from alight.policies.policy import Patience, Threshold
from alight.policies.route import replay_on

COSTS = (1.0, 2.0, 4.0, 6.0)


@pytest.fixture(scope="module")
def outputs():
    return made_up(3, 600, 4)


@pytest.mark.parametrize("policy", [Threshold(thresholds=(0.8,) * 3, costs=COSTS), Patience(patience=1, costs=COSTS)])
def test_limits_move_samples_that_have_one_and_no_others(policy, outputs):
    free = replay(policy, outputs)
    limits = {sample: sample % 4 for sample in range(0, 600, 2)}
    bound = replay(capped(policy, limits), outputs)
    latest = np.array([limits.get(sample, 3) for sample in range(600)])
    assert (bound.exits == np.minimum(free.exits, latest)).all()
    assert (bound.exits < free.exits).any()
    rows = np.arange(600)
    assert (bound.predictions == outputs.predictions[rows, bound.exits]).all()


def test_one_sample_in_numbers_meets_its_limit_too():
    policy = capped(Threshold(thresholds=(0.8,) * 3, costs=COSTS), {5: 1})
    assert [policy.step(open_index, 5, 0, 0.1, ())[0] for open_index in range(3)] == [False, True, True]
    assert not policy.step(2, 6, 0, 0.1, ())[0]


def test_a_paced_stream_counts_what_capped_samples_cost(frozen):
    policy = calibrate.certified_stream(calibrate.eero, seed=0)(frozen.costs, "50%", frozen.labelled, spend_all=True)
    rng, memory, spent = np.random.default_rng(0), (), 0.0
    for size in (1, 30, 64, 200) * 20:
        batch = frozen.test.take(rng.integers(len(frozen.test), size=size))
        limits = {sample: int(rng.integers(len(policy.costs))) for sample in range(size) if rng.random() < 0.5}
        decisions, memory = replay_on(capped(policy, limits), batch, memory)
        spent += decisions.spent.sum()
        pace = memory[0]
        assert pace.spent == pytest.approx(spent, rel=1e-12)
        assert spent <= pace.admitted * policy.budget + policy.costs[-1]
    assert spent > 0.9 * pace.admitted * policy.budget  # what some do not take, others may


def test_what_nobody_knows_of_is_owed_as_far_as_the_bound_lets_it(frozen):
    policy = calibrate.certified_stream(calibrate.eero, seed=0)(frozen.costs, "50%", frozen.labelled)
    saved = Pace(admitted=1000, spent=900 * policy.budget)
    most = policy.costs[-1]
    assert policy.owing(saved, 0).spent == saved.spent
    assert policy.owing(saved, 1).spent == pytest.approx(saved.spent + most - policy.budget)
    assert policy.owing(saved, 10**6).spent == pytest.approx(1000 * policy.budget + most)
    ahead = Pace(admitted=10, spent=10 * policy.budget + 3 * most)  # owed from another policy
    assert policy.owing(ahead, 5).spent == pytest.approx(ahead.spent)


def test_a_limit_beyond_the_exits_is_refused():
    with pytest.raises(BadInput, match=r"limits \[4\]: give positions among 4 exits"):
        capped(Threshold(thresholds=(0.8,) * 3, costs=COSTS), {0: 4})
