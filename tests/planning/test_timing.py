"""Trials run what was planned."""

import numpy as np
import pytest
import torch
from torch import nn

from alight import HeadOutputs, cascade, replay
from alight.planning.timing import as_planned, compare, random_exits
from alight.policies.combinations import Vote
from alight.policies.policy import ExitAt, Lottery, Policy, Threshold


def shares(policy: Policy, samples: np.ndarray) -> list[int]:
    """How many of the samples leave at each exit."""
    counts = []
    for open_index in range(len(policy.open_exits) - 1):
        leaving, _ = policy.step(open_index, samples, None, None, ())
        counts.append(int(leaving.sum()))
        samples = samples[~leaving]
    return [*counts, len(samples)]


@pytest.mark.parametrize("rates", [(0.5, 0.3, 0.2), (0.02, 0.0, 0.98), (1.0, 0.0, 0.0)])
@pytest.mark.parametrize("count", [8, 40, 1000])
def test_samples_of_a_trial_leave_as_the_rates_say(rates, count):
    policy = Lottery(costs=(1.0, 2.0, 3.0), exit_rates=rates)
    samples = as_planned(policy, count)
    assert len(np.unique(samples)) == count
    assert np.abs(np.array(shares(policy, samples)) - count * np.array(rates)).max() <= 1


def test_other_policies_take_samples_as_they_come():
    assert as_planned(ExitAt(costs=(1.0,)), 10) is None


def test_a_trial_combines_answers_as_the_policy_does():
    vote = Vote(exits=(0, 1), constants=((1.0,), (2.0, 1.0)), slopes=((0.0,), (0.0, 0.0)), others=(0.0, 0.0))
    policy = Threshold((0.5,), costs=(1.0, 2.0), combination=vote)
    outputs = HeadOutputs(scores=[[0.2, 0.9]] * 5, predictions=[[3, 4]] * 5)
    assert (
        replay(random_exits(policy, (0.0, 1.0)), outputs).predictions.tolist() == [3] * 5
    )  # the first exit's, by votes


def test_a_cascade_is_timed_against_its_last_network_alone():
    small, large = nn.Linear(6, 3), nn.Linear(6, 3)
    rows = {"small": 0, "large": 0}
    small.register_forward_hook(lambda *_: rows.update(small=rows["small"] + 1))
    large.register_forward_hook(lambda *_: rows.update(large=rows["large"] + 1))
    model, first = (
        cascade([small, large], example=torch.zeros(1, 6)),
        ExitAt(costs=(1.0,), open_exits=(0,), num_exits=2),
    )
    rows.update(small=0, large=0)
    compared = compare(model, first, torch.zeros(64, 6), 64, rounds=3)
    assert rows["small"] == rows["large"]  # the full network never runs the small one
    assert set(compared.decisions.exits.tolist()) == {0}
