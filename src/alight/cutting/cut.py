"""Cut a network into stages whose chain is the network, bit by bit."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from alight.cutting.encoders import cut_text_encoder, is_text_encoder
from alight.cutting.modes import in_mode
from alight.cutting.stages import Layout, StagePlan, build, layout_of
from alight.cutting.tracing import BATCHES, Inputs, ModuleEnd, Trace, Value, refusals, trace, walk, without_caches
from alight.errors import BadInput

Item = TypeVar("Item", Value, Tensor)
Cutter = Callable[[nn.Module, Sequence[str], Any], Sequence[nn.Module]]
CUTTERS: list[tuple[Callable[[nn.Module], bool], Cutter]] = [  # the latest is tried first
    (is_text_encoder, cut_text_encoder)
]
MASK = "attention_mask"  # the name of the input that says which tokens are read
CHECKED = (1, 5)  # batch sizes at which the chain is compared with the network, other than those of the trace


def cut(model: nn.Module, after: Sequence[str], example: Any) -> list[nn.Module]:
    """Return stages that end after the named modules, the last with the logits; their chain is the network, bit by bit.

    `example` is a batch as the network takes it: a tensor, several in a tuple, or a dict of them by name. Each stage
    takes and returns what is carried: first the output of the named module, then all else that is needed later, each
    with the batch as its first dimension. Of a module that returns several tensors, the features for a head are the
    first that has one row per sample and is used later. Where the example has an `attention_mask` and the output is
    tokens, the mask is carried second, so that a head can tell them from padding. Parameters, buffers and submodules
    are those of the network.

    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> first, last = cut(network, after=["1"], example=torch.zeros(1, 4))
    >>> batch = torch.ones(5, 4)
    >>> torch.equal(last(*first(batch)), network(batch)), list(last.state_dict())
    (True, ['2.weight', '2.bias'])
    """
    names = _checked_names(model, after)
    cutter = next((cutter for recognises, cutter in reversed(CUTTERS) if recognises(model)), None)
    if cutter is None:
        return cut_by_trace(model, names, example)
    stages = list(cutter(model, names, example))
    if len(stages) != len(names) + 1:
        raise BadInput(f"the cutter made {len(stages)} stages for {len(names)} exits: make one more than exits")
    return _checked(model, stages, Inputs(example))


def register_cutter(kind: type[nn.Module] | Callable[[nn.Module], bool]) -> Callable[[Cutter], Cutter]:
    """Teach `cut` a kind of network: a class, or a function that recognises it; decorates `(model, after, example)`.

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


def cut_by_trace(model: nn.Module, after: Sequence[str], example: Any) -> list[nn.Module]:
    """Return stages made from a trace of the network: without data if that is enough, else with."""
    inputs = Inputs(example)
    try:
        stages = _checked(model, _stages(model, after, inputs, with_data=False), inputs)
    except BadInput:
        stages = _checked(model, _stages(model, after, inputs, with_data=True), inputs)
    _fix_length(model, stages, inputs)
    return stages


def _stages(model: nn.Module, after: Sequence[str], inputs: Inputs, *, with_data: bool) -> list[nn.Module]:
    plans = stage_plans(trace(model, inputs, after, with_data=with_data), after, inputs)
    training: Sequence[StagePlan | BadInput]
    try:
        with refusals():
            training = stage_plans(trace(model, inputs, after, training=True, with_data=with_data), after, inputs)
    except BadInput as error:
        training = [error] * len(plans)
    stages: list[nn.Module] = [build(model, *both) for both in zip(plans, training, strict=True)]
    for name, plan, cut_here in zip(after, plans, range(1, len(stages)), strict=False):
        rows = [rows_per_sample(plan.trace, value) for value in plan.outgoing]
        with refusals():
            if 0 in rows:
                _check_shared(model, name, plan, stages[:cut_here], inputs)
            if max(rows) > 1:
                _check_side_by_side(model, name, stages[:cut_here], stages[cut_here:], inputs)
    return stages


def rows_per_sample(traced: Trace, value: Value) -> int:
    """Return how many rows each sample has in a value; 0 if there is one for all samples."""
    layout = layout_of(traced.shapes[value])
    return layout.rows if layout else 1


def _check_shared(model: nn.Module, name: str, plan: StagePlan, before: Sequence[nn.Module], inputs: Inputs) -> None:
    """Raise unless what is carried once for all samples is the same for every batch, as tables of positions are."""
    batch = [tensor.clone() for tensor in inputs.of_size(CHECKED[-1])]
    for tensor in batch:
        if _is_text(tensor):
            tensor[1::2, -1] = 0  # a text that is padded among others
    with in_mode(model, *before, training=False):
        each = [chain(before, tuple(tensor[row : row + 1] for tensor in batch)) for row in range(CHECKED[-1])]
    for index, value in enumerate(plan.outgoing):
        if not rows_per_sample(plan.trace, value) and not all(same_bits(each[0][index], one[index]) for one in each):
            raise _without_batch(plan.trace, name, value)


def _check_side_by_side(
    model: nn.Module, name: str, before: Sequence[nn.Module], behind: Sequence[nn.Module], inputs: Inputs
) -> None:
    """Raise unless the rows of a sample lie side by side: samples reversed at the cut come out reversed."""
    with in_mode(model, *before, *behind, training=False):
        carried = chain(before, inputs.of_size(CHECKED[-1]))
        logits, reversed_logits = chain(behind, carried), chain(behind, tuple(tensor.flip(0) for tensor in carried))
    if (reversed_logits.flip(0) - logits).abs().max() > 1e-3 * logits.abs().max():
        raise BadInput(
            f"a tensor that is alive after {name!r} holds several rows for each sample, not side by side:"
            " cut at another place"
        )


def stage_plans(traced: Trace, after: Sequence[str], inputs: Inputs) -> list[StagePlan]:
    """Return what each stage does."""
    ends = [_end(traced, name) for name in after]
    _check_order(traced, after, ends)
    features = [_feature(traced, name, end) for name, end in zip(after, ends, strict=True)]
    logits = logits_in(traced.output, Value)
    mask = Value(-1, (inputs.names.index(MASK),)) if MASK in inputs.names else None
    crossings = [_carried(traced, end.time, features[index:], logits, mask) for index, end in enumerate(ends)]
    for name, values in zip(after, crossings, strict=True):
        check_carried(traced, name, values)
    entering = [inputs.values, *crossings]
    times = [0, *(end.time for end in ends), len(traced.calls)]
    return [
        StagePlan(
            traced,
            needed_calls(traced, range(times[index], times[index + 1]), entering[index], leaving),
            entering[index],
            leaving,
            last=index == len(after),
            input_names=() if index else inputs.arguments,
        )
        for index, leaving in enumerate([*crossings, [logits]])
    ]


def alive_after(traced: Trace, name: str) -> list[Value]:
    """Return what would be carried if the network were cut after this module alone; raise if it cannot be."""
    end = _end(traced, name)
    _check_order(traced, [name], [end])
    values = _carried(traced, end.time, [_feature(traced, name, end)], logits_in(traced.output, Value))
    check_carried(traced, name, values)
    return values


def needed_calls(
    traced: Trace, calls: Iterable[int], incoming: Sequence[Value], outgoing: Sequence[Value]
) -> list[int]:
    """Return these calls without unused constant ones, and with all constant ones that they use, however early."""
    own = set(calls)
    chosen = {index for index in own if traced.calls[index].tainted or traced.calls[index].changes_state}
    wanted = [*outgoing, *(value for index in chosen for value in traced.calls[index].values)]
    while wanted:
        value = wanted.pop()
        if value in incoming or value.call in chosen or value.call < 0:
            continue
        made = traced.calls[value.call]
        writers = {  # of the same memory
            index
            for index in range(max(own, default=-1) + 1)
            if made.storages & traced.calls[index].changed and not traced.calls[index].tainted
        }
        for index in ({value.call} | writers) - chosen:
            chosen.add(index)
            wanted += traced.calls[index].values
    return sorted(chosen)


def _end(traced: Trace, name: str) -> ModuleEnd:
    ends = traced.ends[name]
    if not ends:
        raise BadInput(f"module {name!r} is never called in a forward pass: cut after one that is")
    if len(ends) > 1:
        raise BadInput(f"module {name!r} is called {len(ends)} times in a forward pass: cut after one called once")
    return ends[0]


def _check_order(traced: Trace, after: Sequence[str], ends: Sequence[ModuleEnd]) -> None:
    times = [end.time for end in ends]
    if times != sorted(times):
        order = [after[index] for index in sorted(range(len(after)), key=times.__getitem__)]
        raise BadInput(f"exits {list(after)} are out of order: the network runs them as {order}")
    for name, other, start, stop in zip(after, [*after[1:], ""], times, [*times[1:], len(traced.calls)], strict=True):
        if not any(traced.calls[index].tainted for index in range(start, stop)):
            raise BadInput(
                f"nothing is computed between the end of {name!r} and that of {other or 'the network'!r}:"
                " keep one of the two exits"
            )


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
        and layout_of(traced.shapes[value]) == Layout()
        and (value in traced.follows_dtype or not traced.follows_dtype)  # features, neither indices nor masks
    ]
    return (suitable or made)[0]


def logits_in(output: Any, kind: type[Item]) -> Item:
    """Return the logits in a network's output: the tensor or value, the one of that name, or the first."""
    named = output.get("logits", output) if isinstance(output, Mapping) else output
    for item in walk(named):
        if isinstance(item, kind):
            return item
    raise BadInput("the network's output holds no tensor that it computed: give a network that returns logits")


def _carried(
    traced: Trace, time: int, features: Sequence[Value], logits: Value, mask: Value | None = None
) -> list[Value]:
    """Return values alive at a time: the feature of the exit there first, then what later calls and exits use."""
    used = {value for call in traced.calls[time:] for value in call.values} | {*features[1:], logits}
    first = [features[0], mask] if mask and _masks(traced, mask, features[0]) else features[:1]
    alive = {value for value in used if value.call < time and value in traced.tainted} - {*first}
    return [*first, *sorted(alive, key=by_time)]


def _masks(traced: Trace, mask: Value, feature: Value) -> bool:
    """Check whether this mask says which of the feature's tokens are read, once the batch comes first."""
    layout = layout_of(traced.shapes[feature])
    if layout is None or layout.rows != 1:
        return False
    for shape, tokens in zip(traced.shapes[mask], traced.shapes[feature], strict=True):
        carried = (tokens[layout.axis], *tokens[: layout.axis], *tokens[layout.axis + 1 :])
        if len(carried) != 3 or shape != carried[:2]:
            return False
    return True


def by_time(value: Value) -> tuple[int, str]:
    """Return the key that sorts values by when they were made."""
    return value.call, str(value.path)


def check_carried(traced: Trace, name: str, values: Iterable[Value]) -> None:
    """Raise unless every value that crosses the cut has the batch somewhere, or perhaps is one for all samples."""
    for value in values:
        if layout_of(traced.shapes[value]) is None:
            raise _without_batch(traced, name, value)


def _without_batch(traced: Trace, name: str, value: Value) -> BadInput:
    return BadInput(
        f"a tensor of shape {traced.shapes[value][0]} at batch size {BATCHES[0]} and {traced.shapes[value][1]}"
        f" at {BATCHES[1]} is alive after {name!r} and holds no batch (made at {traced.calls[value.call].line}):"
        " cut at another place"
    )


def _checked(model: nn.Module, stages: list[nn.Module], inputs: Inputs) -> list[nn.Module]:
    """Return the stages if their chain is the network, bit by bit, at batch sizes that the trace has not seen."""
    for stage in stages:
        stage.training = model.training
    for size in CHECKED:
        with refusals():
            equal = is_chain_of(model, stages, inputs, inputs.of_size(size))
        if not equal:
            raise BadInput(
                f"at batch size {size} the stages do not give what the network gives: is it random in evaluation"
                " mode, or does it branch on the batch size or on content? Cut elsewhere, or teach alight this"
                " network with register_cutter"
            )
    return stages


def is_chain_of(model: nn.Module, stages: Sequence[nn.Module], inputs: Inputs, batch: tuple[Tensor, ...]) -> bool:
    """Check whether stages in a row give the logits that the network gives for a batch in evaluation, bit by bit."""
    with in_mode(model, *stages, training=False), without_caches(model):
        return same_bits(logits_in(inputs.run(model, batch), Tensor), chain(stages, batch))


class FixedLength:
    """A hook that refuses texts of another length than those that the network was cut for."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, stage: nn.Module, batch: tuple[Tensor, ...]) -> None:
        """Raise unless every text has the length."""
        lengths = [tensor.shape[1] for tensor in batch if _is_text(tensor)]
        if any(length != self.length for length in lengths):
            raise BadInput(
                f"texts of {lengths[0]} tokens, and the network was cut for {self.length}, which its code fixes:"
                f" pad every batch to {self.length}, or cut with an example of the length that you need"
            )


def _fix_length(model: nn.Module, stages: Sequence[nn.Module], inputs: Inputs) -> None:
    """Let the first stage refuse texts of another length, if with one the chain is not the network."""
    lengths = {tensor.shape[1] for tensor in inputs.tensors if _is_text(tensor)}
    if len(lengths) != 1 or lengths <= {0, 1}:
        return
    batch = tuple(tensor[:, :-1] if _is_text(tensor) else tensor for tensor in inputs.of_size(CHECKED[-1]))
    try:
        is_free = is_chain_of(model, stages, inputs, batch)
    except Exception:  # whatever fails where a number in the code is of another length
        is_free = False
    if not is_free:
        stages[0].register_forward_pre_hook(FixedLength(*lengths))


def _is_text(tensor: Tensor) -> bool:
    """Check for whole numbers, one per token."""
    return tensor.ndim == 2 and not tensor.is_floating_point()


def chain(stages: Iterable[nn.Module], batch: tuple[Tensor, ...]) -> Any:
    """Return what comes out when stages run one after the other."""
    carried = batch
    for stage in stages:
        carried = stage(*carried)
    return carried


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Check whether two tensors are the same, bit by bit."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other, 0, 0, equal_nan=True)


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
