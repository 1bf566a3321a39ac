"""Cut a network into stages whose chain is the network, bit by bit: after named modules, or after each output."""

import difflib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn

from alight.cutting.calls import (
    OF_SIZES,
    ModuleEnd,
    NeedsTooMuchMemory,
    Value,
    WritesParameters,
    logits_in,
    sizes_in,
    walk,
)
from alight.cutting.flops import count_flops
from alight.cutting.mixing import SamplesMixed
from alight.cutting.proof import prove
from alight.cutting.running import Inputs, in_mode, pick_logits, refusals
from alight.cutting.sizes import NumberOf, SizeCheck, SizeOf
from alight.cutting.skeleton import is_describable
from alight.cutting.stages import StagePlan, build
from alight.cutting.tracing import BATCHES, BatchMultiple, DependsOnBatchSize, Layout, Trace, trace
from alight.errors import BadInput

Made = TypeVar("Made")
Cutter = Callable[[nn.Module, Sequence[str], Any], Sequence[nn.Module]]
CUTTERS: list[tuple[Callable[[nn.Module], bool], Cutter]] = []  # that users registered; the latest is tried first


def cut(model: nn.Module, after: Sequence[str], example: Any) -> list[nn.Module]:
    """Return stages that end after the named modules, the last with the logits; their chain is the network, bit by bit.

    `example` is a batch as the network takes it: a tensor, several in a tuple, or a dict of them by name; or `Inputs`,
    which say which output is the logits of a network that gives several. Each stage
    takes and returns what is carried: first the output of the named module, then all else that is needed later, each
    with the batch as its first dimension. Of a module that returns several tensors, the features for a head are the
    first that has one row per sample and is used later. Where the example has an `attention_mask` and the output is
    tokens, the mask is carried second, so that a head can tell them from padding. Parameters, buffers and submodules
    are those of the network.

    Args:
        model: The network.
        after: Names of modules, in the order in which they run.
        example: A batch as the network takes it: a tensor, several in a tuple, a dict, or `Inputs`.

    >>> import torch
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> first, last = cut(network, after=["1"], example=torch.zeros(1, 4))
    >>> batch = torch.ones(5, 4)
    >>> torch.equal(last(*first(batch)), network(batch)), list(last.state_dict())
    (True, ['2.weight', '2.bias'])
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise BadInput("a TorchScript network has no Python code to cut: give the network that was scripted or traced")
    names, inputs = _checked_names(model, after), inputs_of(example)
    inputs.find_vocabularies(model)
    cutter = next((cutter for recognises, cutter in reversed(CUTTERS) if recognises(model)), None)
    if cutter is not None:
        stages = list(cutter(model, names, inputs.example))
        if len(stages) != len(names) + 1:
            raise BadInput(f"the cutter made {len(stages)} stages for {len(names)} exits: make one more than exits")
        return prove(model, stages, inputs)
    return _cut_by_trace(model, names, inputs)


def cut_into_layers(model: nn.Module, after: Sequence[str], inputs: Inputs) -> list[nn.Module]:
    """Return stages as `cut` makes them, with the calls inside the modules for which `is_describable` is False.

    So they run no code of the network's own: all that is left are functions and layers of torch.
    """
    inputs.find_vocabularies(model)
    opened = [
        name for name, module in model.named_modules(remove_duplicate=False) if name and not is_describable(module)
    ]
    return _cut_by_trace(model, after, inputs, opened)


def inputs_of(example: Any) -> Inputs:
    """Return an example as inputs of a network whose output is the logits, or holds them."""
    return example if isinstance(example, Inputs) else Inputs(example, pick_logits)


def register_cutter(kind: type[nn.Module] | Callable[[nn.Module], bool]) -> Callable[[Cutter], Cutter]:
    """Teach `cut` a kind of network: a class, or a function that recognises it; decorates `(model, after, example)`.

    Args:
        kind: A class, or a function that says whether it can cut a network.

    >>> import torch
    >>> class Twice(nn.Linear):
    ...     def forward(self, x):
    ...         return super().forward(super().forward(x))
    >>> @register_cutter(Twice)
    ... def cut_twice(model, after, example):
    ...     return [model]
    >>> cut(Twice(4, 4), after=[], example=torch.zeros(1, 4))
    [Twice(in_features=4, out_features=4, bias=True)]
    """
    recognises = (lambda model: isinstance(model, kind)) if isinstance(kind, type) else kind

    def register(cutter: Cutter) -> Cutter:
        CUTTERS.append((recognises, cutter))
        return cutter

    return register


def _cut_by_trace(
    model: nn.Module, after: Sequence[str], inputs: Inputs, opened: Sequence[str] = ()
) -> list[nn.Module]:
    """Return proven stages made from a trace of the network, with the calls in opened modules."""

    def proven(with_data: bool) -> list[nn.Module]:
        return prove(model, _built(model, partial(_module_plans, model, after, inputs, with_data, opened)), inputs)

    return _without_or_with_data(proven)


def _without_or_with_data(made: Callable[[bool], Made]) -> Made:
    """Return what is made from a trace without data, or from one with data where that is refused."""
    try:
        return made(False)
    except (DependsOnBatchSize, NeedsTooMuchMemory, SamplesMixed, WritesParameters):
        raise
    except BadInput:
        return made(True)


def split_outputs(network: nn.Module, example: Any) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return stages and heads of a network whose forward returns several logits, from early to late.

    A stage is what later outputs need too, a head what one output alone needs; so a head reads all that is carried.
    Together they give the network's outputs, bit by bit.
    """
    inputs = Inputs(example)
    inputs.find_vocabularies(network)

    def proven(with_data: bool) -> tuple[list[nn.Module], list[nn.Module]]:
        built = _built(network, partial(_output_plans, network, inputs, with_data))
        heads = [*map(as_head, built[1::2]), nn.Identity()]
        return prove(network, built[0::2], inputs, heads), heads

    return _without_or_with_data(proven)


def as_head(stage: nn.Module) -> nn.Module:
    """Return a stage as a head that reads all that is carried."""
    stage.reads_everything = True  # type: ignore[assignment]
    return stage


def _built(model: nn.Module, plans: Callable[[bool], list[StagePlan]]) -> list[nn.Module]:
    """Return stages built of plans for evaluation, and of those for training, or why there are none."""
    evaluation = plans(False)
    training: Sequence[StagePlan | BadInput]
    try:
        with refusals():
            training = plans(True)
        if len(training) != len(evaluation):
            raise BadInput(f"the network gives {len(training) // 2 + 1} outputs in training mode")
    except BadInput as error:
        training = [error] * len(evaluation)
    return [build(model, *both) for both in zip(evaluation, training, strict=True)]


def _module_plans(
    model: nn.Module, after: Sequence[str], inputs: Inputs, with_data: bool, opened: Sequence[str], training: bool
) -> list[StagePlan]:
    """Return what each stage does that ends after a named module, and the last."""
    traced = trace(model, inputs, after, opened=opened, training=training, with_data=with_data)
    ends = _ends(traced, after)
    features = [_feature(traced, name, end) for name, end in zip(after, ends, strict=True)]
    logits = logits_in(traced.output, Value)
    mask = None if inputs.mask is None else traced.inputs[inputs.mask]
    crossings = []
    for index, (name, end) in enumerate(zip(after, ends, strict=True)):
        crossings.append(_carried(traced, name, end.time, features[index:], logits, mask))
    times = [0, *(end.time for end in ends), len(traced.calls)]
    plans: list[StagePlan] = []
    incoming, names = traced.inputs, inputs.arguments
    for calls, leaving in zip(pairwise(times), [*crossings, [logits]], strict=True):
        plans.append(_plan(traced, range(*calls), incoming, leaving, last=len(plans) == len(after), names=names))
        incoming, names = leaving, ()
    return _with_sizes(plans, range(-1, len(after)))


def alive_after(traced: Trace, name: str) -> list[Value]:
    """Return what would be carried if the network were cut after this module alone; raise if it cannot be."""
    (end,) = _ends(traced, [name])
    return _carried(traced, name, end.time, [_feature(traced, name, end)], logits_in(traced.output, Value))


def _plan(
    traced: Trace,
    calls: Iterable[int],
    incoming: Sequence[Value],
    outgoing: Sequence[Value],
    *,
    last: bool,
    names: Sequence[str] = (),
) -> StagePlan:
    """Return a plan of these calls without unused constant ones, and with all constant ones that they use."""
    own = set(calls)
    chosen = {index for index in own if traced.calls[index].tainted or traced.calls[index].changes_state}
    wanted = [*outgoing, *(value for index in chosen for value in _taken_by(traced, index))]
    while wanted:
        value = wanted.pop()
        if value in incoming or value.call in chosen or value.call < 0:
            continue
        for index in ({value.call} | _writers(traced, value, max(own, default=-1))) - chosen:
            chosen.add(index)
            wanted += _taken_by(traced, index)
    shared = {index: traced.calls[value.call].line for index, value in enumerate(outgoing) if _is_shared(traced, value)}
    return StagePlan(traced, sorted(chosen), incoming, outgoing, last, names, {} if last else shared)


def _writers(traced: Trace, value: Value, last: int) -> set[int]:
    """Return constant calls, up to the last one, that write to the memory of a value."""
    memory, calls = traced.calls[value.call].storages, enumerate(traced.calls[: last + 1])
    return {index for index, call in calls if memory & call.changed and not call.tainted}


def _taken_by(traced: Trace, index: int) -> set[Value]:
    """Return values that a call takes, and constant ones of which it takes the size."""
    call = traced.calls[index]
    return call.values | {size.value for size in call.sizes if size.value not in traced.tainted}


def _with_sizes(plans: list[StagePlan], parents: Sequence[int]) -> list[StagePlan]:
    """Return plans in which every size is computed from what comes in; `parents` are the plans that each follows.

    The size of a tensor that is not carried is that of a tensor that is, if they were the same in the trace, which the
    plan before checks; or else a tensor of that size is carried too.
    """
    _place_checks(plans)
    lines = [_lines_of_missing_sizes(plan) for plan in plans]
    for index in range(len(plans) - 1, 0, -1):
        missing, before = lines[index], plans[parents[index]]
        same = {size: _carried_size(plans[index], size) for size in sorted(missing, key=str)}
        plans[index] = plans[index]._replace(carried_sizes={size: each for size, each in same.items() if each != size})
        plans[parents[index]] = _with_sizes_of_next(before, missing, same)
        further = {size: missing[size] for size, each in same.items() if each != BatchMultiple(1, 0)}
        lines[parents[index]] |= {size: line for size, line in further.items() if not before.has_size(size)}
    for index in range(1, len(plans)):
        plans[index] = plans[index]._replace(incoming=plans[parents[index]].outgoing)
    return plans


def _place_checks(plans: list[StagePlan]) -> None:
    """Give every check of the trace to the first plan that has the sizes."""
    for check in plans[0].trace.checks:
        latest = max(sizes_in(check[1:3]), key=lambda size: size.value.call)
        index = next((index for index, plan in enumerate(plans) if plan.has_size(latest)), None)
        if index is not None:  # else nothing that was computed from it is used
            plans[index] = plans[index]._replace(checks=[*plans[index].checks, check])


def _with_sizes_of_next(plan: StagePlan, lines: Mapping[SizeOf, str], same: Mapping[SizeOf, Any]) -> StagePlan:
    """Return a plan that checks the sizes which the next one takes to be the same, and carries those of no tensor."""
    time = plan.calls[-1] + 1 if plan.calls else 0
    checks = [
        SizeCheck(operator.eq, size, each, True, time, lines[size])
        for size, each in same.items()
        if each not in (size, BatchMultiple(1, 0))
    ]
    carried = [size for size, each in same.items() if each == size and size not in plan.outgoing]
    outgoing = [*plan.outgoing, *carried]
    shared = {outgoing.index(size): lines[size] for size in carried if isinstance(size, NumberOf)}
    return plan._replace(checks=[*plan.checks, *checks], outgoing=outgoing, shared={**plan.shared, **shared})


def _lines_of_missing_sizes(plan: StagePlan) -> dict[SizeOf, str]:
    """Return sizes that a plan uses of tensors that it does not have, with the lines of the network's code."""
    used = [(size, call.line) for call in map(plan.trace.calls.__getitem__, plan.calls) for size in call.sizes]
    used += [(size, check.line) for check in plan.checks for size in sizes_in(check[1:3])]
    return {size: line for size, line in reversed(used) if not plan.has_size(size)}


def _carried_size(plan: StagePlan, size: SizeOf) -> Any:
    """Return what an earlier tensor's size is computed from: the batch, a size of what comes in, or a tensor for it."""
    first, second = sizes = plan.trace.sizes(size)
    if sizes != BATCHES:
        tensors = [value for value in plan.incoming if not isinstance(value, SizeOf)]
        incoming = [SizeOf(value, axis) for value in tensors for axis in range(len(plan.trace.shapes[value][0]))]
        same = [each for each in incoming if plan.trace.sizes(each) == sizes]
        if same:
            return min(same, key=lambda each: each.axis != size.axis)
    times = (second - first) // (BATCHES[1] - BATCHES[0])
    return BatchMultiple(times, first - times * BATCHES[0]) if times else size


def _ends(traced: Trace, after: Sequence[str]) -> list[ModuleEnd]:
    """Return where modules end; raise unless each is called once, in this order, with something computed between."""
    for name in after:
        number = len(traced.ends[name])
        if not number:
            raise BadInput(f"module {name!r} is never called in a forward pass: cut after one that is")
        if number > 1:
            raise BadInput(f"module {name!r} is called {number} times in a forward pass: cut after one called once")
    ends = [traced.ends[name][0] for name in after]
    times = [end.time for end in ends]
    if times != sorted(times):
        order = sorted(after, key=lambda name: traced.ends[name][0].time)
        raise BadInput(f"exits {list(after)} are out of order: the network runs them as {order}")
    for name, other, calls in zip(
        after, [*after, "the network"][1:], pairwise([*times, len(traced.calls)]), strict=True
    ):
        if not any(call.tainted for call in traced.calls[slice(*calls)]):
            raise BadInput(
                f"nothing is computed between the end of {name!r} and that of {other!r}: keep one of the two exits"
            )
    return ends


def _feature(traced: Trace, name: str, end: ModuleEnd) -> Value:
    """Return what a head reads: of several tensors the first with one row per sample and a later use."""
    made = [item for item in walk(end.result) if isinstance(item, Value) and item in traced.tainted]
    if not made:
        raise BadInput(f"module {name!r} returns nothing that depends on the input: cut after one that does")
    used = {value for call in traced.calls[end.time :] for value in call.values} | {logits_in(traced.output, Value)}
    suitable = [
        value
        for value in made
        if value in used
        and traced.layout(value) == Layout()
        and (value in traced.follows_dtype or not traced.follows_dtype)  # features, neither indices nor masks
    ]
    return (suitable or made)[0]


def _carried(
    traced: Trace, name: str, time: int, features: Sequence[Value], logits: Value, mask: Value | None = None
) -> list[Value]:
    """Return values alive after a module: the feature of the exit there first, then what later calls and exits use."""
    used = {value for call in traced.calls[time:] for value in call.values} | {*features[1:], logits}
    first = [features[0], mask] if mask and _masks(traced, mask, features[0]) else features[:1]
    alive = {value for value in used if value.call < time and value in traced.tainted} - {*first}
    carried = [*first, *sorted(alive, key=_by_time)]
    _rows_per_sample(traced, name, carried)
    return carried


def _masks(traced: Trace, mask: Value, feature: Value) -> bool:
    """Check whether this mask says which of the feature's tokens are read, once the batch comes first."""
    layout = traced.layout(feature)
    if layout is None or layout.rows != 1:
        return False
    axis = layout.axis
    carried = [(tokens[axis], *tokens[:axis], *tokens[axis + 1 :]) for tokens in traced.shapes[feature]]
    shapes = zip(traced.shapes[mask], carried, strict=True)
    return all(len(tokens) == 3 and shape == tokens[:2] for shape, tokens in shapes)


def _by_time(value: Value) -> tuple[int, str]:
    return value.call, str(value.path)


def _rows_per_sample(traced: Trace, name: str, values: Iterable[Value]) -> list[int]:
    """Return how many rows each sample has in values that cross a cut (0: one for all); raise if one has no batch."""
    rows = []
    for value in values:
        layout = traced.layout(value)
        if layout is None:
            first, second = traced.shapes[value]
            raise BadInput(
                f"a tensor of shape {first} at batch size {BATCHES[0]} and {second} at {BATCHES[1]} is alive after"
                f" {name!r} and holds no batch (made at {traced.calls[value.call].line}): cut at another place"
            )
        rows.append(layout.rows)
    return rows


def _is_shared(traced: Trace, value: Value) -> bool:
    """Check whether a tensor is one for all samples of a batch, and not computed from sizes alone."""
    layout = traced.layout(value)
    if layout is None or layout.rows:
        return False
    wanted, seen = [value], set[int]()
    while wanted:
        index = wanted.pop().call
        if index < 0:
            return True
        memory = traced.calls[index].storages
        for each in ({index} | {other for other, call in enumerate(traced.calls) if call.changed & memory}) - seen:
            seen.add(each)
            if getattr(traced.calls[each].target, "__name__", "") not in OF_SIZES:
                wanted += traced.calls[each].values
    return False


def _output_plans(network: nn.Module, inputs: Inputs, with_data: bool, training: bool) -> list[StagePlan]:
    """Return what each stage and head does: stage, head, stage, head, ..., stage."""
    traced = _opened_trace(network, inputs, training=training, with_data=with_data)
    outputs = _outputs(traced)
    needs = [_ancestors(traced, output) for output in outputs]
    if not training:
        _check_costs(network, inputs, traced, outputs, needs)
    calls = _shared_and_own(needs)
    plans: list[StagePlan] = []
    incoming, names = traced.inputs, inputs.arguments
    done = {-1}
    for index, (output, (stage, head)) in enumerate(zip(outputs, calls, strict=True)):
        last = index == len(outputs) - 1
        done |= stage
        later = set[int]().union(*(both for each in calls[index + 1 :] for both in each))
        taken = [*_taken(traced, head, [output]), *_taken(traced, later, outputs[index + 1 :])]
        carried = [value for value in taken if value.call in done and value in traced.tainted]
        carried = [output] if last else list(dict.fromkeys(carried))
        if any(rows != 1 for rows in _rows_per_sample(traced, f"output {index}", carried)):
            raise BadInput(f"a tensor alive after output {index} has not one row for each sample: build it by hand")
        plans.append(_plan(traced, stage, incoming, carried, last=last, names=names))
        if not last:
            plans.append(_plan(traced, head, carried, [output], last=True))
        incoming, names = carried, ()
    return _with_sizes(plans, [index - 1 - (index % 2 == 0) for index in range(len(plans))])


def _shared_and_own(needs: Sequence[set[int]]) -> list[tuple[set[int], set[int]]]:
    """Return the calls of each output that later outputs need too, each once, and those that it alone needs."""
    calls, done = [], set[int]()
    for index, need in enumerate(needs):
        later = set[int]().union(*needs[index + 1 :]) or need
        calls.append(((need & later) - done, need - later))
        done |= need & later
    return calls


def _taken(traced: Trace, calls: set[int], outputs: Sequence[Value]) -> list[Value]:
    """Return values that calls take from elsewhere, in the order of use, and outputs."""
    taken = [value for index in sorted(calls) for value in sorted(traced.calls[index].values, key=_by_time)]
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


def _check_costs(
    network: nn.Module, inputs: Inputs, traced: Trace, outputs: Sequence[Value], needs: Sequence[set[int]]
) -> None:
    """Raise if an output needs nothing beyond those before it, or costs less than one of them."""
    totals = []
    for output, need in zip(outputs, needs, strict=True):
        plan = _plan(traced, need, traced.inputs, [output], last=True)
        alone = build(network, plan, plan)
        with in_mode(network, alone, training=False), refusals():
            totals.append(count_flops(alone, *inputs.of_size(1)))
    useless = [index for index in range(1, len(needs)) if needs[index] <= set[int]().union(*needs[:index])]
    if useless or totals != sorted(totals):
        order = sorted(range(len(totals)), key=totals.__getitem__)
        reason = f"output {useless[0]} needs nothing beyond what those before it need; " if useless else ""
        raise BadInput(
            f"the outputs are not ordered from early to late: {reason}alone, they cost {totals} FLOPs per sample:"
            f" return them in the order {order}, as numbered now, each once"
        )


def _checked_names(model: nn.Module, after: Sequence[str]) -> list[str]:
    """Return the names if there are such modules and none is named twice."""
    if isinstance(after, str):
        raise BadInput(f"after={after!r} is one text: give a list of names, as in after=[{after!r}]")
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for name in after:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.4) or known[:3]
            raise BadInput(f"no module is called {name!r}: the nearest names are {', '.join(map(repr, near))}")
    twice = sorted({name for name in after if list(after).count(name) > 1})
    if twice:
        raise BadInput(f"{', '.join(map(repr, twice))} is named more than once: name each exit once")
    return list(after)
