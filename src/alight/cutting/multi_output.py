"""A network that returns several logits, split into stages and heads."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from alight.cutting.cut import CHECKED, by_time, check_carried, needed_calls, rows_per_sample, same_bits
from alight.cutting.flops import count_flops
from alight.cutting.modes import in_mode
from alight.cutting.stages import StagePlan, build
from alight.cutting.tracing import Inputs, Trace, Value, refusals, trace, walk
from alight.errors import BadInput


def split_outputs(network: nn.Module, example: Any) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return stages and heads of a network whose forward returns several logits, from early to late.

    The logits come in a list, tuple or dict. A stage is what later outputs need too, a head what one output alone
    needs; so a head reads all that is carried. Together they give the network's outputs, bit by bit.

    >>> import torch
    >>> class TwoOutputs(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.first, self.second, self.early, self.late = (nn.Linear(4, 4) for _ in range(4))
    ...     def forward(self, x):
    ...         x = self.first(x)
    ...         return [self.early(x), self.late(self.second(x))]
    >>> stages, heads = split_outputs(TwoOutputs(), torch.zeros(1, 4))
    >>> [list(module.state_dict()) for module in (stages[0], heads[0])]
    [['first.weight', 'first.bias'], ['early.weight', 'early.bias']]
    >>> list(stages[1].state_dict()), heads[1]
    (['second.weight', 'second.bias', 'late.weight', 'late.bias'], Identity())
    """
    inputs = Inputs(example)
    try:
        return _split(network, inputs, with_data=False)
    except BadInput:
        return _split(network, inputs, with_data=True)


def is_split_of(
    network: nn.Module, stages: Sequence[nn.Module], heads: Sequence[nn.Module], inputs: Inputs, batch: Any
) -> bool:
    """Check whether stages and heads give what the network gives for a batch in evaluation, bit by bit."""
    with in_mode(network, *stages, *heads, training=False):
        expected = [item for item in walk(inputs.run(network, batch)) if isinstance(item, Tensor)]
        carried = batch
        for index, (stage, head) in enumerate(zip(stages, heads, strict=True)):
            carried = stage(*carried)
            if not same_bits(expected[index], head(*carried) if index < len(stages) - 1 else carried):
                return False
    return True


def _split(network: nn.Module, inputs: Inputs, *, with_data: bool) -> tuple[list[nn.Module], list[nn.Module]]:
    evaluation = _plans(network, inputs, training=False, with_data=with_data)
    training: Sequence[StagePlan | BadInput]
    try:
        with refusals():
            training = _plans(network, inputs, training=True, with_data=with_data)
        if len(training) != len(evaluation):
            raise BadInput(f"the network gives {len(training) // 2 + 1} outputs in training mode")
    except BadInput as error:
        training = [error] * len(evaluation)
    built = [build(network, *both) for both in zip(evaluation, training, strict=True)]
    for stage in built:
        stage.training = network.training
    stages: list[nn.Module] = [*built[0::2]]
    heads: list[nn.Module] = [*map(as_head, built[1::2]), nn.Identity()]
    for size in CHECKED:
        if not is_split_of(network, stages, heads, inputs, inputs.of_size(size)):
            raise BadInput(
                f"at batch size {size} the outputs of the stages are not the network's: does the network write into"
                " tensors that several outputs share? Build MultiExitModel(stages, heads) by hand"
            )
    return stages, heads


def as_head(stage: nn.Module) -> nn.Module:
    """Return a stage as a head that reads all that is carried."""
    stage.reads_everything = True  # type: ignore[assignment]
    return stage


def _plans(network: nn.Module, inputs: Inputs, *, training: bool, with_data: bool) -> list[StagePlan]:
    """Return what each stage and head does: stage, head, stage, head, ..., stage."""
    traced = _opened_trace(network, inputs, training=training, with_data=with_data)
    outputs = _outputs(traced)
    needs = [_ancestors(traced, output) for output in outputs]
    if not training:
        _check_order(network, inputs, traced, outputs, needs)
    calls, done = [], set[int]()  # that later outputs need too, and that one output alone needs
    for index, need in enumerate(needs):
        later = set[int]().union(*needs[index + 1 :]) or need
        calls.append(((need & later) - done, need - later))
        done |= need & later
    return _assembled(traced, inputs, outputs, calls)


def _assembled(
    traced: Trace, inputs: Inputs, outputs: Sequence[Value], calls: Sequence[tuple[set[int], set[int]]]
) -> list[StagePlan]:
    plans: list[StagePlan] = []
    incoming: Sequence[Value] = inputs.values
    names = inputs.arguments
    done: set[int] = {-1}
    for index, (output, (stage, head)) in enumerate(zip(outputs, calls, strict=True)):
        last = index == len(outputs) - 1
        done |= stage
        later = set[int]().union(*(both for each in calls[index + 1 :] for both in each))
        taken = [*_taken(traced, head, [output]), *_taken(traced, later, outputs[index + 1 :])]
        carried = [value for value in taken if value.call in done and value in traced.tainted]
        carried = [output] if last else list(dict.fromkeys(carried))
        check_carried(traced, f"output {index}", carried)
        if any(rows_per_sample(traced, value) != 1 for value in carried):
            raise BadInput(f"a tensor alive after output {index} has not one row for each sample: build it by hand")
        needed = needed_calls(traced, stage, incoming, carried)
        plans.append(StagePlan(traced, needed, incoming, carried, last=last, input_names=names))
        if not last:
            needed = needed_calls(traced, head, carried, [output])
            plans.append(StagePlan(traced, needed, carried, [output], last=True))
        incoming, names = carried, ()
    return plans


def _taken(traced: Trace, calls: set[int], outputs: Sequence[Value]) -> list[Value]:
    """Return values that calls take from elsewhere, in the order of use, and outputs."""
    taken = [value for index in sorted(calls) for value in sorted(traced.calls[index].values, key=by_time)]
    return [value for value in [*taken, *outputs] if value.call not in calls]


def _outputs(traced: Trace) -> list[Value]:
    outputs = [item for item in walk(traced.output) if isinstance(item, Value) and item in traced.tainted]
    if len(outputs) < 2:
        raise BadInput(f"the network gives {len(outputs)} outputs: give one that returns several, or attach heads")
    return outputs


def _opened_trace(network: nn.Module, inputs: Inputs, *, training: bool, with_data: bool) -> Trace:
    """Return what the network does, opened wherever a module makes an output and something else at once."""
    opened: set[str] = set()
    while True:
        traced = trace(network, inputs, (), opened=opened, training=training, with_data=with_data)
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
    """Return calls that depend on the input's content and that an output needs, writers to the same memory included."""
    needed: set[int] = set()
    wanted = [(output, len(traced.calls))]
    while wanted:
        value, time = wanted.pop()
        if value.call < 0:
            continue
        memory = traced.calls[value.call].storages
        writers = {index for index in range(time) if traced.calls[index].changed & memory}
        for index in ({value.call} | writers) - needed:
            if traced.calls[index].tainted:
                needed.add(index)
                wanted += [(taken, index) for taken in traced.calls[index].values]
    return needed


def _check_order(
    network: nn.Module, inputs: Inputs, traced: Trace, outputs: Sequence[Value], needs: Sequence[set[int]]
) -> None:
    """Raise if an output needs nothing beyond those before it, or costs less than one of them."""
    incoming, batch, totals = inputs.values, inputs.of_size(1), []
    for output, need in zip(outputs, needs, strict=True):
        plan = StagePlan(traced, needed_calls(traced, need, incoming, [output]), incoming, [output], last=True)
        alone = build(network, plan, plan)
        with in_mode(network, alone, training=False), refusals():
            totals.append(count_flops(alone, *batch))
    useless = [index for index in range(1, len(needs)) if needs[index] <= set[int]().union(*needs[:index])]
    if useless or totals != sorted(totals):
        order = sorted(range(len(totals)), key=totals.__getitem__)
        reason = f"output {useless[0]} needs nothing beyond what those before it need; " if useless else ""
        raise BadInput(
            f"the outputs are not ordered from early to late: {reason}alone, they cost {totals} FLOPs per sample:"
            f" return them in the order {order}, as numbered now, each once"
        )
