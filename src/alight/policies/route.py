"""The one walk through the exits, and its run over a recorded table."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from alight.outputs import Decisions, HeadOutputs
from alight.policies.policy import Array, Memory, Policy

Reader = Callable[[int, Any], tuple[Array, Array]]


def route(policy: Policy, samples: Array, read: Reader) -> Iterator[tuple[int, Array, Array]]:
    """Yield (position among the open exits, samples, predictions) of those who leave, exit by exit.

    `read(exit_index, staying)` gives predictions and scores of the samples that stayed, from a table or a network;
    `staying` selects them among those it was last asked about. Early answers are out before late ones are computed.
    """
    memory: Memory = ()
    staying: Any = slice(None)
    last = len(policy.open_exits) - 1
    for position, exit_index in enumerate(policy.open_exits):
        predictions, scores = read(exit_index, staying)
        if position == last:  # takes everyone
            yield position, samples, predictions
            return
        leaving, memory = policy.step(position, samples, predictions, scores, memory)
        yield position, samples[leaving], predictions[leaving]
        staying = ~leaving
        samples, memory = samples[staying], _kept(memory, staying)
        if not len(samples):
            return


def replay(policy: Policy, outputs: HeadOutputs) -> Decisions:
    """What the policy decides on a recorded table, whose rows are the samples' indices.

    >>> from alight.policies.policy import Threshold
    >>> outputs = HeadOutputs(scores=[[0.2, 0.9], [0.7, 0.8]], predictions=[[1, 0], [2, 2]])
    >>> replay(Threshold(thresholds=(0.5,), costs=(1.0, 3.0)), outputs)
    Decisions(2 samples, mean cost 2, left at exits 50.0%, 50.0%)
    """
    policy.check(outputs)
    rows = np.arange(len(outputs))
    waiting = rows

    def read(exit_index: int, staying: Any) -> tuple[Array, Array]:
        nonlocal waiting
        waiting = waiting[staying]
        return outputs.predictions[waiting, exit_index], outputs.scores[waiting, exit_index]

    predictions, positions = np.empty_like(rows), np.empty_like(rows)
    for position, leaving, answers in route(policy, rows, read):
        predictions[leaving], positions[leaving] = answers, position
    return Decisions(
        predictions=predictions,
        exits=np.asarray(policy.open_exits)[positions],
        spent=np.asarray(policy.costs)[positions],
        num_exits=policy.num_exits,
    )


def _kept(memory: Memory, staying: Any) -> Memory:
    return tuple(_kept(part, staying) if isinstance(part, tuple) else part[staying] for part in memory)
