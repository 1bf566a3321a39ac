"""The one walk equals a loop over samples that follows each rule's definition, for arrays and tensors."""

import numpy as np
import pytest
from conftest import made_up
from hypothesis import given
from hypothesis import strategies as st

from alight import HeadOutputs, replay, route
from alight.budgeting.thresholds import hash01, tie_range
from alight.errors import BadInput
from alight.policies.policy import MIXING, ExitAt, Mixture, Patience, Streak, Threshold


def leaves(policy, open_index, sample, predictions, scores):
    """Whether one sample leaves, given all it has seen so far; written from the definitions, sample by sample."""
    match policy:
        case Threshold():
            score, (lowest, highest) = scores[-1], tie_range(policy.thresholds[open_index])
            return score > highest or (
                score >= lowest and hash01(np.array(sample), policy.salt) < policy.tie_shares[open_index]
            )
        case Streak():
            recent = scores[-policy.patience :]
            return len(recent) == policy.patience and all(score >= tie_range(policy.threshold)[0] for score in recent)
        case Patience():
            recent = predictions[-policy.patience - 1 :]
            return len(recent) == policy.patience + 1 and len(set(recent)) == 1
        case Mixture():
            part = policy.first if hash01(np.array(sample), policy.salt, MIXING) < policy.share else policy.second
            return leaves(part, open_index, sample, predictions, scores)
        case ExitAt():
            return True


def naive(policy, outputs):
    decided = []
    for sample in range(len(outputs)):
        for open_index, exit_index in enumerate(policy.open_exits):
            seen = list(policy.open_exits[: open_index + 1])
            last = open_index == len(policy.open_exits) - 1
            if last or leaves(
                policy, open_index, sample, outputs.predictions[sample, seen], outputs.scores[sample, seen]
            ):
                decided.append((outputs.predictions[sample, exit_index], exit_index, policy.costs[open_index]))
                break
    return tuple(np.array(column) for column in zip(*decided, strict=True))


@st.composite
def cases(draw):
    exits = draw(st.integers(1, 6))
    outputs = made_up(draw(st.integers(0, 10**6)), draw(st.integers(1, 60)), exits, classes=3, ties=draw(st.booleans()))
    opened = sorted(draw(st.sets(st.integers(0, exits - 1), min_size=1)))
    common = {"costs": np.cumsum(np.ones(len(opened))), "open_exits": tuple(opened), "num_exits": exits}
    level = st.sampled_from([-np.inf, 0.0, 0.3, 0.5, 0.6, 0.8, 1.1, np.inf])

    def rule(kind):
        if kind == "threshold":
            size = len(opened) - 1
            levels = draw(st.lists(level, min_size=size, max_size=size))
            return Threshold(
                tuple(levels), tuple(draw(st.lists(st.floats(0, 1), min_size=size, max_size=size))), **common
            )
        if kind == "streak":
            return Streak(draw(level), draw(st.integers(1, 4)), **common)
        if kind == "patience":
            return Patience(draw(st.integers(0, 4)), **common)
        if kind == "mixture":
            parts = [rule(draw(st.sampled_from(["threshold", "streak", "patience", "mixture"]))) for _ in range(2)]
            return Mixture(*parts, draw(st.floats(0, 1)), **common)
        return ExitAt(costs=(2.0,), open_exits=(opened[0],), num_exits=exits)

    return rule(draw(st.sampled_from(["threshold", "streak", "patience", "mixture", "exit at"]))), outputs


@given(cases())
def test_the_walk_equals_a_loop_over_samples(case):
    policy, outputs = case
    decisions = replay(policy, outputs)
    predictions, exits, spent = naive(policy, outputs)
    np.testing.assert_array_equal(decisions.exits, exits)
    np.testing.assert_array_equal(decisions.predictions, predictions)
    np.testing.assert_array_equal(decisions.spent, spent)
    assert decisions.num_exits == outputs.num_exits


def walked(policy, outputs, as_array):
    """Samples, exits and predictions in the order in which the walk gives them, over arrays of any library."""
    waiting = as_array(np.arange(len(outputs)))
    predictions, scores = as_array(outputs.predictions), as_array(outputs.scores)

    def read(exit_index, staying):
        nonlocal waiting
        waiting = waiting[staying]
        return predictions[waiting, exit_index], (scores[waiting, exit_index],)

    steps = list(route(policy, as_array(np.arange(len(outputs))), read))
    return [
        (open_index, np.asarray(samples).tolist(), np.asarray(answers).tolist())
        for open_index, samples, answers in steps
    ]


@given(cases())
def test_arrays_and_tensors_take_the_same_steps(case):
    torch = pytest.importorskip("torch")
    policy, outputs = case
    assert walked(policy, outputs, torch.tensor) == walked(policy, outputs, np.asarray)


def test_the_walk_answers_early_samples_before_it_reads_later_exits():
    outputs = HeadOutputs(np.array([[1.0, 1.0], [0.0, 1.0]]), np.array([[3, 4], [3, 4]]))
    read = []

    def reader(exit_index, staying):
        read.append(exit_index)
        rows = np.arange(2)[staying]
        return outputs.predictions[rows, exit_index], (outputs.scores[rows, exit_index],)

    steps = route(Threshold((0.5,), costs=(1.0, 2.0)), np.arange(2), reader)
    assert [part.tolist() for part in next(steps)[1:]] == [[0], [3]]
    assert read == [0]
    assert [part.tolist() for part in next(steps)[1:]] == [[1], [4]]
    assert read == [0, 1]


def test_the_walk_stops_when_everyone_has_left():
    outputs = made_up(0, 10, 4)
    policy = Threshold((-np.inf, 0.5, 0.5), costs=(1.0, 2.0, 3.0, 4.0))
    assert [open_index for open_index, _, _ in walked(policy, outputs, np.asarray)] == [0]


@pytest.mark.parametrize("batch_size", [0, -1])
def test_batches_of_no_sample_are_refused(batch_size):
    with pytest.raises(BadInput, match=f"batch size {batch_size}: give 1 or more"):
        replay(Patience(1, costs=(1.0, 2.0)), made_up(0, 10, 2), batch_size=batch_size)


def test_closed_exits_are_never_read():
    outputs = made_up(0, 10, 4)
    read = []

    def reader(exit_index, staying):
        read.append(exit_index)
        rows = np.arange(10)[staying]
        return outputs.predictions[rows, exit_index], (outputs.scores[rows, exit_index],)

    list(route(Threshold((np.inf,), costs=(1.0, 4.0), open_exits=(1, 3), num_exits=4), np.arange(10), reader))
    assert read == [1, 3]
