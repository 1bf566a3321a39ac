"""The one walk through the exits, and its run over a recorded table."""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from alight.errors import BadInput
from alight.outputs import Decisions, HeadOutputs
from alight.policies.policy import Array, BatchState, Memory, Policy

Recalled = tuple[Memory, Memory]  # what the policy remembers, and what its combination does
Reader = Callable[[int, Any], tuple[Array, tuple[Array, ...]]]


def route(
    policy: Policy, samples: Array, read: Reader, memory: Memory = ()
) -> Generator[tuple[int, Array, Array], None, Memory]:
    """Yield (position among the open exits, samples, predictions) of the samples that leave, exit by exit.

    `read(exit_index, staying)` gives predictions and the columns of `policy.inputs` for the samples that stayed, from a
    table or a network; `staying` selects them among those it was last asked about. Early answers are out before late
    ones are computed. `memory` is what a policy remembered of earlier batches; what it remembers now is returned.

    Args:
        policy: Decides.
        samples: Their numbers.
        read: Gives predictions and the columns of `policy.inputs` at an exit, for the samples that stayed.
        memory: What the policy remembered of earlier batches.

    >>> from alight.policies.policy import Threshold
    >>> predictions, scores = np.array([[0, 1], [2, 2], [1, 0]]), np.array([[0.9, 1.0], [0.1, 0.6], [0.8, 0.7]])
    >>> waiting = np.arange(3)
    >>> def read(exit_index, staying):
    ...     global waiting
    ...     waiting = waiting[staying]
    ...     return predictions[waiting, exit_index], (scores[waiting, exit_index],)
    >>> for open_index, samples, answers in route(Threshold(thresholds=(0.5,), costs=(1.0, 3.0)), np.arange(3), read):
    ...     print(open_index, samples, answers)
    0 [0 2] [0 1]
    1 [1] [2]
    """
    staying: Any = slice(None)
    recalled: Recalled = (memory, ())
    for open_index, exit_index in enumerate(policy.open_exits):
        predictions, columns = read(exit_index, staying)
        leaving, predictions, recalled = visit(policy, open_index, samples, predictions, columns, recalled)
        yield open_index, samples[leaving], predictions[leaving]
        staying = ~leaving
        samples, recalled = samples[staying], kept(recalled, staying)
        if not len(samples):
            break
    return recalled[0]


def visit(
    policy: Policy, open_index: int, samples: Array, predictions: Array, columns: tuple[Array, ...], recalled: Recalled
) -> tuple[Array, Array, Recalled]:
    """Return which samples leave at an open exit, the answers of all, and what is remembered of all.

    A walk is one visit after another; between two, the samples that stay may be joined by others at the same exit.
    """
    memory, seen = recalled
    if policy.reads_costs:
        columns, memory = columns[:-1], policy.charged(open_index, columns[-1], memory)
    scores = columns[0]
    if policy.combination:
        exit_index = policy.open_exits[open_index]
        predictions, scores, seen = policy.combination.combined(exit_index, predictions, columns, seen)
    if open_index == len(policy.open_exits) - 1:  # takes every sample
        return samples == samples, predictions, (memory, seen)
    leaving, memory = policy.step(open_index, samples, predictions, scores, memory)
    return leaving, predictions, (memory, seen)


def replay(policy: Policy, outputs: HeadOutputs, *, batch_size: int | None = None) -> Decisions:
    """Return what the policy decides on a recorded table, whose rows are the samples' numbers, in one batch or several.

    Args:
        policy: Decides.
        outputs: What `record` gives.
        batch_size: None: one batch.

    >>> from alight.policies.policy import Threshold
    >>> outputs = HeadOutputs(scores=[[0.2, 0.9], [0.7, 0.8]], predictions=[[1, 0], [2, 2]])
    >>> replay(Threshold(thresholds=(0.5,), costs=(1.0, 3.0)), outputs)
    Decisions(2 samples, mean cost 2, left at exit 1 50.0%, exit 2 50.0%)
    """
    return replay_on(policy, outputs, batch_size=batch_size)[0]


def replay_on(
    policy: Policy, outputs: HeadOutputs, memory: Memory = (), *, batch_size: int | None = None
) -> tuple[Decisions, Memory]:
    """Return what the policy decides, given what it remembers of earlier samples, and what it remembers then."""
    policy.check(outputs)
    if batch_size is not None and batch_size < 1:
        raise BadInput(f"batch size {batch_size}: give 1 or more, or None for one batch")
    columns = [outputs.column(name) for name in policy.inputs]
    waiting = np.empty(0, dtype=np.int64)

    def read(exit_index: int, staying: Any) -> tuple[Array, tuple[Array, ...]]:
        nonlocal waiting
        waiting = waiting[staying]
        return outputs.predictions[waiting, exit_index], tuple(each[waiting, exit_index] for each in columns)

    rows = np.arange(len(outputs))
    predictions, open_indices = np.empty_like(rows), np.empty_like(rows)
    size = batch_size or len(rows)
    for start in range(0, len(rows), size):
        waiting = rows[start : start + size]
        walk = route(policy, waiting, read, memory)
        while True:
            try:
                open_index, leaving, answers = next(walk)
            except StopIteration as end:
                memory = end.value
                break
            predictions[leaving], open_indices[leaving] = answers, open_index
        memory = tuple(part for part in memory if isinstance(part, BatchState))
    exits, paid = np.asarray(policy.open_exits)[open_indices], outputs.costs_by(policy.open_exits)
    decisions = Decisions(
        predictions=predictions,
        exits=exits,
        spent=np.asarray(policy.costs)[open_indices] if paid is None else paid[rows, open_indices],
        quality=outputs.quality_of(predictions, exits),
        num_exits=policy.num_exits,
        labels=outputs.labels,
        unit=policy.unit,
        exit_names=policy.exits or outputs.exits,
    )
    return decisions, memory


def kept(memory: Any, staying: Any) -> Any:
    """Return what is remembered of the samples that stay, selected by a mask or by their positions."""
    if isinstance(memory, BatchState):
        return memory
    return tuple(kept(part, staying) for part in memory) if isinstance(memory, tuple) else memory[staying]


def joined(memories: Sequence[Any]) -> Any:
    """Join what is remembered of several groups that now wait together."""
    first = memories[0]
    if isinstance(first, tuple):
        return tuple(joined(parts) for parts in zip(*memories, strict=True))
    return np.concatenate(memories)
