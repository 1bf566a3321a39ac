"""The one walk through the exits, and its run over a recorded table."""

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from alight.outputs import Decisions, HeadOutputs
from alight.policies.policy import Array, Memory, Policy, Shared

Reader = Callable[[int, Any], tuple[Array, tuple[Array, ...]]]


def route(
    policy: Policy, samples: Array, read: Reader, memory: Memory = ()
) -> Generator[tuple[int, Array, Array], None, Memory]:
    """Yield (position among the open exits, samples, predictions) of those who leave, exit by exit.

    `read(exit_index, staying)` gives predictions and the columns of `policy.inputs` for the samples that stayed, from a
    table or a network; `staying` selects them among those it was last asked about. Early answers are out before late
    ones are computed. `memory` is what a policy remembered of earlier batches; what it remembers now is returned.
    """
    staying: Any = slice(None)
    seen: Memory = ()
    last = len(policy.open_exits) - 1
    for position, exit_index in enumerate(policy.open_exits):
        predictions, columns = read(exit_index, staying)
        scores = columns[0]
        if policy.lens:
            predictions, scores, seen = policy.lens.see(exit_index, predictions, columns, seen)
        if position == last:  # takes everyone
            yield position, samples, predictions
            return memory
        leaving, memory = policy.step(position, samples, predictions, scores, memory)
        yield position, samples[leaving], predictions[leaving]
        staying = ~leaving
        samples, memory, seen = samples[staying], _kept(memory, staying), _kept(seen, staying)
        if not len(samples):
            break
    return memory


def replay(policy: Policy, outputs: HeadOutputs, *, batch_size: int | None = None) -> Decisions:
    """What the policy decides on a recorded table, whose rows are the samples' indices, in one batch or in several.

    >>> from alight.policies.policy import Threshold
    >>> outputs = HeadOutputs(scores=[[0.2, 0.9], [0.7, 0.8]], predictions=[[1, 0], [2, 2]])
    >>> replay(Threshold(thresholds=(0.5,), costs=(1.0, 3.0)), outputs)
    Decisions(2 samples, mean cost 2, left at exits 50.0%, 50.0%)
    """
    return replay_on(policy, outputs, batch_size=batch_size)[0]


def replay_on(
    policy: Policy, outputs: HeadOutputs, memory: Memory = (), *, batch_size: int | None = None
) -> tuple[Decisions, Memory]:
    """What the policy decides, given what it remembers of samples before these, and what it remembers then."""
    policy.check(outputs)
    columns = [outputs.column(name) for name in policy.inputs]
    waiting = np.empty(0, dtype=np.int64)

    def read(exit_index: int, staying: Any) -> tuple[Array, tuple[Array, ...]]:
        nonlocal waiting
        waiting = waiting[staying]
        return outputs.predictions[waiting, exit_index], tuple(each[waiting, exit_index] for each in columns)

    rows = np.arange(len(outputs))
    predictions, positions = np.empty_like(rows), np.empty_like(rows)
    size = batch_size or len(rows)
    for start in range(0, len(rows), size):
        waiting = rows[start : start + size]
        walk = route(policy, waiting, read, memory)
        while True:
            try:
                position, leaving, answers = next(walk)
            except StopIteration as end:
                memory = end.value
                break
            predictions[leaving], positions[leaving] = answers, position
        memory = tuple(part for part in memory if isinstance(part, Shared))
    decisions = Decisions(
        predictions=predictions,
        exits=np.asarray(policy.open_exits)[positions],
        spent=np.asarray(policy.costs)[positions],
        num_exits=policy.num_exits,
    )
    return decisions, memory


def _kept(memory: Memory, staying: Any) -> Memory:
    """What is remembered of those who stay."""

    def of(part: Any) -> Any:
        if isinstance(part, Shared):
            return part
        return _kept(part, staying) if isinstance(part, tuple) else part[staying]

    return tuple(of(part) for part in memory)
