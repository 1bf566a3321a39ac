"""What the networks of a cascade cost, each alone: from the kept sample to the values that decide.

A network without exits is timed whole, whatever its engine: preprocessing, inference, scores. One with exits is timed
stage by stage. FLOPs are counted for networks of torch and taken from `Member.flops` of others.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tqdm import tqdm

from alight.costs import Costs, Floats
from alight.data.batches import as_inputs
from alight.engine.backends import Reads, State
from alight.engine.backends.cascade import Cascade, CascadeBackend, OpenMember
from alight.engine.settings import RunSettings
from alight.errors import BadInput

TEXT = "a few words to measure with, about as many as people write when they ask for something"
SCORED = Reads(("margin",))


def example_inputs(network: Cascade) -> Any:
    """Return one sample as the cascade takes it: black, or a sentence."""
    spec = network.input_spec
    if spec.takes_texts and spec.tokenizer is not None:
        return [TEXT]
    if not spec.tensors or any(None in each.shape[1:] for each in spec.tensors):
        raise BadInput("the networks of the cascade do not say what they take: give an example, a batch of inputs")
    zeros = tuple(np.zeros([size or 1 for size in each.shape], each.dtype) for each in spec.tensors)
    return zeros[0] if len(zeros) == 1 else dict(zip(spec.names, zeros, strict=True)) if spec.names else zeros


def time_members(
    network: Cascade,
    example: Any,
    batch_size: int,
    *,
    repeats: int,
    warmup: int,
    settings: RunSettings | None = None,
    progress: bool = True,
) -> Floats:
    """Return milliseconds of a batch for every stage, (passes, exits): from one exit of a network to its next.

    The first stage of each network begins with its preprocessing. Networks are interleaved, so that whatever else the
    machine does hits all alike.
    """
    backend = network.backend(range(network.num_exits), settings, batch_size).with_reads([SCORED] * network.num_exits)
    with backend.running():
        state = backend.admit(as_inputs(example, network.input_spec))
        kept = backend.take(state, np.arange(batch_size) % len(state[0]))
        for _ in range(warmup):
            _timed_pass(backend, kept)
        return np.array(
            [_timed_pass(backend, kept) for _ in tqdm(range(repeats), "time members", disable=not progress)]
        )


def _timed_pass(backend: CascadeBackend, kept: State) -> list[float]:
    state, taken = kept, []
    for stage in range(len(backend.open_exits)):
        start = time.perf_counter()
        values, state = backend.run(stage, state)
        if backend.in_flight:
            values.send()  # type: ignore[union-attr]
            values.get()  # type: ignore[union-attr]
        taken.append(1e3 * (time.perf_counter() - start))
    return taken


def member_costs(network: Cascade, unit: str, count: Callable[[Any, str], Costs]) -> Costs:
    """Return FLOPs, MACs or USD of every network, per sample; `count` counts those of torch."""
    parts = [_counted(each, unit, count) for each in network.members]
    stages, heads = (np.concatenate([getattr(part, name) for part in parts]) for name in ("stages", "heads"))
    return Costs(stages, heads, unit, network.members_of_exits)


def _counted(opened: OpenMember, unit: str, count: Callable[[Any, str], Costs]) -> Costs:
    """Return the costs of one network; those of one without exits are its head's, which is closed with it."""
    if unit == "USD":
        if opened.member.price is None or len(opened.exits) > 1:
            raise BadInput(f"{opened.name} has no price: give Member(network, price=...) in USD per sample for each")
        return Costs([0.0], [opened.member.price], unit)
    if opened.member.flops is not None and len(opened.exits) == 1:
        return Costs([0.0], [opened.member.flops / (2 if unit == "MACs" else 1)], unit)
    if not opened.is_torch:
        raise BadInput(
            f"the FLOPs of {opened.name} cannot be counted: measure unit='ms', or give Member(network, flops=...)"
        )
    costs = count(opened.network, unit)
    return costs if len(costs) > 1 else Costs([0.0], [costs.full], unit)
