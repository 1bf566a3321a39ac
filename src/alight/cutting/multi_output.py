"""A network that gives several logits already, as stages and heads."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from alight.cutting.cut import CHECKED, check_carried, in_order, needed_calls, rows_of, same_bits
from alight.cutting.modes import in_mode
from alight.cutting.stages import Piece, Stage, build
from alight.cutting.tracing import Inputs, Trace, Value, refusals, trace, walk
from alight.errors import BadInput


def split_outputs(network: nn.Module, example: Any) -> tuple[list[nn.Module], list[nn.Module]]:
    """Stages and heads of a network whose forward gives several logits, in a list, tuple or dict, from early to late.

    A stage is what later outputs need too, a head what one output alone needs; so a head reads all that is carried.
    Together they give the network's outputs, bit by bit.

    >>> import torch
    >>> class Two(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.first, self.second, self.early, self.late = (nn.Linear(4, 4) for _ in range(4))
    ...     def forward(self, x):
    ...         x = self.first(x)
    ...         return [self.early(x), self.late(self.second(x))]
    >>> stages, heads = split_outputs(Two(), torch.zeros(1, 4))
    >>> [list(part.state_dict()) for part in (stages[0], heads[0])]
    [['first.weight', 'first.bias'], ['early.weight', 'early.bias']]
    >>> list(stages[1].state_dict()), heads[1]
    (['second.weight', 'second.bias', 'late.weight', 'late.bias'], Identity())
    """
    inputs = Inputs(example)
    try:
        return _split(network, inputs, with_data=False)
    except BadInput:
        return _split(network, inputs, with_data=True)


def _split(network: nn.Module, inputs: Inputs, *, with_data: bool) -> tuple[list[nn.Module], list[nn.Module]]:
    evaluation = _pieces(network, inputs, training=False, with_data=with_data)
    training: Sequence[Piece | BadInput]
    try:
        with refusals():
            training = _pieces(network, inputs, training=True, with_data=with_data)
        if len(training) != len(evaluation):
            raise BadInput(f"the network gives {len(training) // 2 + 1} outputs in training mode")
    except BadInput as error:
        training = [error] * len(evaluation)
    parts = [build(network, *both) for both in zip(evaluation, training, strict=True)]
    stages, heads = parts[0::2], [*parts[1::2], nn.Identity()]
    for part in parts:
        part.training = network.training
    for head in parts[1::2]:
        head.reads_everything = True  # type: ignore[assignment]
    _check(network, stages, heads, inputs)
    return list(stages), heads


def _pieces(network: nn.Module, inputs: Inputs, **how: bool) -> list[Piece]:
    """What each stage and head does: stage, head, stage, head, ..., stage."""
    traced = _opened(network, inputs, **how)
    outputs = _outputs(traced)
    needs = [_ancestors(traced, output) for output in outputs]
    if not how.get("training"):
        _check_order(network, inputs, traced, outputs, needs)
    stages, heads, done = [], [], set[int]()
    for index, need in enumerate(needs):
        later = set[int]().union(*needs[index + 1 :]) or need
        stages.append((need & later) - done)
        done |= stages[-1]
        heads.append(need - later)
    return _assembled(traced, inputs, outputs, stages, heads)


def _assembled(
    traced: Trace, inputs: Inputs, outputs: Sequence[Value], stages: Sequence[set[int]], heads: Sequence[set[int]]
) -> list[Piece]:
    pieces: list[Piece] = []
    incoming = [Value(-1, (index,)) for index in range(len(inputs.tensors))]
    names: Sequence[str] = inputs.names or [f"input_{index}" for index in range(len(inputs.tensors))]
    done: set[int] = {-1}
    for index, (stage, head, output) in enumerate(zip(stages, heads, outputs, strict=True)):
        last = index == len(outputs) - 1
        done |= stage
        mine = _taken(traced, head, [output])
        others = _taken(traced, set().union(*stages[index + 1 :], *heads[index + 1 :]), outputs[index + 1 :])
        carried = [value for value in [*mine, *others] if value.call in done and value in traced.tainted]
        carried = [output] if last else list(dict.fromkeys(carried))
        check_carried(traced, f"output {index}", carried)
        if any(rows_of(traced, value) != 1 for value in carried):
            raise BadInput(f"a tensor alive after output {index} has not one row for each sample: build it by hand")
        calls = needed_calls(traced, stage, incoming, carried)
        pieces.append(Piece(traced, calls, incoming, carried, last=last, input_names=names))
        if not last:
            calls = needed_calls(traced, head, carried, [output])
            pieces.append(Piece(traced, calls, carried, [output], last=True))
        incoming, names = carried, ()
    return pieces


def _taken(traced: Trace, calls: set[int], outputs: Sequence[Value]) -> list[Value]:
    """Values that calls take from elsewhere, in the order of use, and outputs."""
    taken = [value for index in sorted(calls) for value in sorted(traced.calls[index].values, key=in_order)]
    return [value for value in [*taken, *outputs] if value.call not in calls]


def _outputs(traced: Trace) -> list[Value]:
    outputs = [item for item in walk(traced.output) if isinstance(item, Value) and item in traced.tainted]
    if len(outputs) < 2:
        raise BadInput(f"the network gives {len(outputs)} outputs: give one that returns several, or attach heads")
    return outputs


def _opened(network: nn.Module, inputs: Inputs, **how: bool) -> Trace:
    """What the network does, opened wherever a module makes an output and something else at once."""
    opened: set[str] = set()
    while True:
        traced = trace(network, inputs, (), opened=opened, **how)
        outputs = set(_outputs(traced))
        used = outputs.union(*(call.values for call in traced.calls))
        mixed = {
            str(traced.calls[output.call].target)
            for output in outputs
            if isinstance(traced.calls[output.call].target, str)
            and any(value.call == output.call and value != output for value in used)
        }
        if mixed <= opened:
            return traced
        opened |= mixed


def _ancestors(traced: Trace, output: Value) -> set[int]:
    """Calls that depend on the input's content and that an output needs, writers to the same memory included."""
    found: set[int] = set()
    wanted = [(output, len(traced.calls))]
    while wanted:
        value, time = wanted.pop()
        if value.call < 0:
            continue
        memory = traced.calls[value.call].storages
        writers = {index for index in range(time) if traced.calls[index].changed & memory}
        for index in ({value.call} | writers) - found:
            if traced.calls[index].tainted:
                found.add(index)
                wanted += [(taken, index) for taken in traced.calls[index].values]
    return found


def _check(network: nn.Module, stages: Sequence[Stage], heads: Sequence[nn.Module], inputs: Inputs) -> None:
    """Raise unless stages and heads give what the network gives, bit by bit."""
    with in_mode(network, *stages, *heads, training=False):
        for size in CHECKED:
            batch = inputs.of_size(size)
            expected = [item for item in walk(inputs.run(network, batch)) if isinstance(item, Tensor)]
            carried: Any = batch
            for index, (stage, head) in enumerate(zip(stages, heads, strict=True)):
                carried = stage(*carried)
                found = head(*carried) if index < len(stages) - 1 else carried
                if not same_bits(expected[index], found):
                    raise BadInput(
                        f"at batch size {size}, output {index} of the stages is not the network's: does the network"
                        " write into tensors that several outputs share? Build MultiExitModel(stages, heads) by hand"
                    )


def _check_order(
    network: nn.Module, inputs: Inputs, traced: Trace, outputs: Sequence[Value], needs: Sequence[set[int]]
) -> None:
    """Raise if an output needs nothing beyond those before it, or costs less than one of them."""
    incoming = [Value(-1, (index,)) for index in range(len(inputs.tensors))]
    batch, totals = inputs.of_size(1), []
    for output, need in zip(outputs, needs, strict=True):
        piece = Piece(traced, needed_calls(traced, need, incoming, [output]), incoming, [output], last=True)
        alone = build(network, piece, piece)
        with in_mode(network, alone, training=False), refusals():
            totals.append(_flops(alone, batch))
    useless = [index for index in range(1, len(needs)) if needs[index] <= set[int]().union(*needs[:index])]
    if useless or totals != sorted(totals):
        found = sorted(range(len(totals)), key=totals.__getitem__)
        reason = f"output {useless[0]} needs nothing beyond what those before it need; " if useless else ""
        raise BadInput(
            f"the outputs are not ordered from early to late: {reason}alone, they cost {totals} FLOPs per sample:"
            f" return them in the order {found}, as numbered now, each once"
        )


def _flops(part: nn.Module, batch: tuple[Tensor, ...]) -> int:
    """What a part costs."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # fused kernels are not counted
        part(*batch)
    return int(counter.get_total_flops())
