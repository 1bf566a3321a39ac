"""Cut a network into stages whose chain is the network, bit by bit."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alight.cutting.encoders import cut_text_encoder, is_text_encoder
from alight.cutting.modes import in_mode
from alight.cutting.stages import Layout, Piece, build, layout_of
from alight.cutting.tracing import BATCHES, End, Inputs, Trace, Value, refusals, trace, walk, without_caches
from alight.errors import BadInput

Cutter = Callable[[nn.Module, Sequence[str], Any], Sequence[nn.Module]]
CUTTERS: list[tuple[Callable[[nn.Module], bool], Cutter]] = [  # the latest is asked first
    (is_text_encoder, cut_text_encoder)
]
MASK = "attention_mask"  # the name of the input that says which tokens are read
CHECKED = (1, 5)  # batch sizes at which the chain is compared with the network, other than those of the trace


def cut(model: nn.Module, after: Sequence[str], example: Any) -> list[nn.Module]:
    """Stages that end after the named modules, the last with the logits; their chain is the network, bit by bit.

    `example` is a batch as the network takes it: a tensor, several in a tuple, or a dict of them by name. Each stage
    takes and gives what is carried: first the output of the named module, then all else that is needed later, each with
    the batch as its first dimension. Of a module that gives several tensors, the features for a head are the first that
    has one row per sample and is used later. Where the example has an `attention_mask` and the output is tokens, the
    mask is carried second, so that a head can tell them from padding. Parameters, buffers and submodules are those of
    the network.

    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> first, last = cut(network, after=["1"], example=torch.zeros(1, 4))
    >>> batch = torch.ones(5, 4)
    >>> torch.equal(last(*first(batch)), network(batch)), list(last.state_dict())
    (True, ['2.weight', '2.bias'])
    """
    names = _checked_names(model, after)
    cutter = next((cutter for known, cutter in reversed(CUTTERS) if known(model)), None)
    if cutter is None:
        return cut_by_trace(model, names, example)
    stages = list(cutter(model, names, example))
    if len(stages) != len(names) + 1:
        raise BadInput(f"the cutter made {len(stages)} stages for {len(names)} exits: make one more than exits")
    return _checked(model, stages, Inputs(example))


def register_cutter(known: type[nn.Module] | Callable[[nn.Module], bool]) -> Callable[[Cutter], Cutter]:
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
    recognise = (lambda model: isinstance(model, known)) if isinstance(known, type) else known

    def register(cutter: Cutter) -> Cutter:
        CUTTERS.append((recognise, cutter))
        return cutter

    return register


def cut_by_trace(model: nn.Module, after: Sequence[str], example: Any) -> list[nn.Module]:
    """Stages made from what the network was seen to do: without data if that is enough, else with."""
    inputs = Inputs(example)
    try:
        stages = _checked(model, _stages(model, after, inputs, with_data=False), inputs)
    except BadInput:
        stages = _checked(model, _stages(model, after, inputs, with_data=True), inputs)
    _fix_length(model, stages, inputs)
    return stages


def _stages(model: nn.Module, after: Sequence[str], inputs: Inputs, *, with_data: bool) -> list[nn.Module]:
    pieces = pieces_of(trace(model, inputs, after, with_data=with_data), after, inputs)
    training: Sequence[Piece | BadInput]
    try:
        with refusals():
            training = pieces_of(trace(model, inputs, after, training=True, with_data=with_data), after, inputs)
    except BadInput as error:
        training = [error] * len(pieces)
    stages: list[nn.Module] = [build(model, *both) for both in zip(pieces, training, strict=True)]
    for name, piece, cut_here in zip(after, pieces, range(1, len(stages)), strict=False):
        rows = [rows_of(piece.trace, value) for value in piece.outgoing]
        with refusals():
            if 0 in rows:
                _check_shared(model, name, piece, stages[:cut_here], inputs)
            if max(rows) > 1:
                _check_apart(model, name, stages[:cut_here], stages[cut_here:], inputs)
    return stages


def rows_of(traced: Trace, value: Value) -> int:
    """How many rows each sample has in a value; 0 if there is one for all samples."""
    layout = layout_of(traced.shapes[value])
    return layout.rows if layout else 1


def _check_shared(model: nn.Module, name: str, piece: Piece, before: Sequence[nn.Module], inputs: Inputs) -> None:
    """Raise unless what is carried once for all samples is the same whatever they are, as tables of positions are."""
    batch = [tensor.clone() for tensor in inputs.of_size(CHECKED[-1])]
    for tensor in batch:
        if _is_text(tensor):
            tensor[1::2, -1] = 0  # a text that is padded among others
    with in_mode(model, *before, training=False):
        each = [chain(before, tuple(tensor[row : row + 1] for tensor in batch)) for row in range(CHECKED[-1])]
    for index, value in enumerate(piece.outgoing):
        if not rows_of(piece.trace, value) and not all(same_bits(each[0][index], one[index]) for one in each):
            raise _without_batch(piece.trace, name, value)


def _check_apart(
    model: nn.Module, name: str, before: Sequence[nn.Module], behind: Sequence[nn.Module], inputs: Inputs
) -> None:
    """Raise unless samples keep apart where each has several rows: turned round at the cut, they come out turned."""
    with in_mode(model, *before, *behind, training=False):
        carried = chain(before, inputs.of_size(CHECKED[-1]))
        plain, turned = chain(behind, carried), chain(behind, tuple(tensor.flip(0) for tensor in carried))
    if (turned.flip(0) - plain).abs().max() > 1e-3 * plain.abs().max():
        raise BadInput(
            f"a tensor that is alive after {name!r} holds several rows for each sample, not side by side:"
            " cut at another place"
        )


def pieces_of(traced: Trace, after: Sequence[str], inputs: Inputs) -> list[Piece]:
    """What each stage does."""
    ends = [_end(traced, name) for name in after]
    _check_order(traced, after, ends)
    features = [_feature(traced, name, end) for name, end in zip(after, ends, strict=True)]
    logits = logits_in(traced.output)
    mask = Value(-1, (inputs.names.index(MASK),)) if MASK in inputs.names else None
    crossings = [_carried(traced, end.time, features[index:], logits, mask) for index, end in enumerate(ends)]
    for name, values in zip(after, crossings, strict=True):
        check_carried(traced, name, values)
    entering = [[Value(-1, (index,)) for index in range(len(inputs.tensors))], *crossings]
    times = [0, *(end.time for end in ends), len(traced.calls)]
    names = inputs.names or ([f"input_{index}" for index in range(len(inputs.tensors))])
    return [
        Piece(
            traced,
            needed_calls(traced, range(times[index], times[index + 1]), entering[index], leaving),
            entering[index],
            leaving,
            last=index == len(after),
            input_names=() if index else names,
        )
        for index, leaving in enumerate([*crossings, [logits]])
    ]


def alive_after(traced: Trace, name: str) -> list[Value]:
    """What would be carried if the network were cut after this module alone; an error if it cannot be."""
    end = _end(traced, name)
    _check_order(traced, [name], [end])
    values = _carried(traced, end.time, [_feature(traced, name, end)], logits_in(traced.output))
    check_carried(traced, name, values)
    return values


def needed_calls(
    traced: Trace, calls: Iterable[int], incoming: Sequence[Value], outgoing: Sequence[Value]
) -> list[int]:
    """These calls, less what is constant and unused, with all that is constant and used, whenever it was made."""
    own = set(calls)
    chosen = {index for index in own if _must_run(traced, index)}
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


def _must_run(traced: Trace, index: int) -> bool:
    call = traced.calls[index]
    return call.tainted or call.changes_state


def _end(traced: Trace, name: str) -> End:
    ends = traced.ends[name]
    if not ends:
        raise BadInput(f"module {name!r} is never called in a forward pass: cut after one that is")
    if len(ends) > 1:
        raise BadInput(f"module {name!r} is called {len(ends)} times in a forward pass: cut after one called once")
    return ends[0]


def _check_order(traced: Trace, after: Sequence[str], ends: Sequence[End]) -> None:
    times = [end.time for end in ends]
    if times != sorted(times):
        found = [after[index] for index in sorted(range(len(after)), key=times.__getitem__)]
        raise BadInput(f"exits {list(after)} are out of order: the network runs them as {found}")
    for name, other, start, stop in zip(after, [*after[1:], ""], times, [*times[1:], len(traced.calls)], strict=True):
        if not any(traced.calls[index].tainted for index in range(start, stop)):
            raise BadInput(
                f"nothing is computed between the end of {name!r} and that of {other or 'the network'!r}:"
                " keep one of the two exits"
            )


def _feature(traced: Trace, name: str, end: End) -> Value:
    """What a head reads of a module's output: of several tensors the first with one row per sample and a later use."""
    made = [item for item in walk(end.result) if isinstance(item, Value) and item in traced.tainted]
    if not made:
        raise BadInput(f"module {name!r} gives nothing that depends on the input: cut after one that does")
    used = {value for call in traced.calls[end.time :] for value in call.values} | {logits_in(traced.output)}
    fit = [
        value
        for value in made
        if value in used
        and layout_of(traced.shapes[value]) == Layout()
        and (value in traced.typed or not traced.typed)  # features, neither indices nor masks
    ]
    return (fit or made)[0]


def logits_in(output: Any) -> Value:
    """The logits in what a network gives: the tensor, the one of that name, or the first."""
    named = output.get("logits", output) if isinstance(output, Mapping) else output
    for item in walk(named):
        if isinstance(item, Value):
            return item
    raise BadInput("the network's output holds no tensor that it computed: give a network that returns logits")


def _carried(
    traced: Trace, time: int, features: Sequence[Value], logits: Value, mask: Value | None = None
) -> list[Value]:
    """Values alive at a time: the feature of the exit there first, then what later calls and exits use."""
    used = {value for call in traced.calls[time:] for value in call.values} | {*features[1:], logits}
    first = [features[0], mask] if mask and _masks(traced, mask, features[0]) else features[:1]
    alive = {value for value in used if value.call < time and value in traced.tainted} - {*first}
    return [*first, *sorted(alive, key=in_order)]


def _masks(traced: Trace, mask: Value, feature: Value) -> bool:
    """Does this mask say which of the feature's tokens are read, once the batch comes first?"""
    layout = layout_of(traced.shapes[feature])
    if layout is None or layout.rows != 1:
        return False
    for shape, tokens in zip(traced.shapes[mask], traced.shapes[feature], strict=True):
        carried = (tokens[layout.axis], *tokens[: layout.axis], *tokens[layout.axis + 1 :])
        if len(carried) != 3 or shape != carried[:2]:
            return False
    return True


def in_order(value: Value) -> tuple[int, str]:
    """What values are sorted by: when they were made."""
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
    """The stages, if their chain is the network, bit by bit, at batch sizes that the trace has not seen."""
    for stage in stages:
        stage.training = model.training
    with in_mode(model, *stages, training=False), without_caches(model), refusals():
        for size in CHECKED:
            batch = inputs.of_size(size)
            expected, found = logits_of(inputs.run(model, batch)), chain(stages, batch)
            if not same_bits(expected, found):
                raise BadInput(
                    f"at batch size {size} the stages do not give what the network gives: is it random in evaluation"
                    " mode, or does it branch on the batch size or on content? Cut elsewhere, or teach alight this"
                    " network with register_cutter"
                )
    return stages


class _Length:
    """Refuses texts of another length than those that the network was cut for."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, stage: nn.Module, batch: tuple[Tensor, ...]) -> None:
        found = [tensor.shape[1] for tensor in batch if _is_text(tensor)]
        if any(length != self.length for length in found):
            raise BadInput(
                f"texts of {found[0]} tokens, and the network was cut for {self.length}, which its code fixes:"
                f" pad every batch to {self.length}, or cut with an example of the length that you need"
            )


def _fix_length(model: nn.Module, stages: Sequence[nn.Module], inputs: Inputs) -> None:
    """Let the first stage refuse texts of another length, if with one the chain is not the network."""
    lengths = {tensor.shape[1] for tensor in inputs.tensors if _is_text(tensor)}
    if len(lengths) != 1 or lengths <= {0, 1}:
        return
    batch = tuple(tensor[:, :-1] if _is_text(tensor) else tensor for tensor in inputs.of_size(CHECKED[-1]))
    with in_mode(model, *stages, training=False), without_caches(model):
        try:
            free = same_bits(logits_of(inputs.run(model, batch)), chain(stages, batch))
        except Exception:  # whatever goes wrong where a number in the code is of another length
            free = False
    if not free:
        stages[0].register_forward_pre_hook(_Length(*lengths))


def _is_text(tensor: Tensor) -> bool:
    """Whole numbers for each token?"""
    return tensor.ndim == 2 and not tensor.is_floating_point()


def chain(stages: Iterable[nn.Module], batch: tuple[Tensor, ...]) -> Any:
    """What comes out when stages run one after the other."""
    carried = batch
    for stage in stages:
        carried = stage(*carried)
    return carried


def logits_of(output: Any) -> Tensor:
    """The logits in what a network gave."""
    named = output.get("logits", output) if isinstance(output, Mapping) else output
    return next(item for item in walk(named) if isinstance(item, Tensor))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Are two tensors the same, bit by bit?"""
    return one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other, 0, 0, equal_nan=True)


def _checked_names(model: nn.Module, after: Sequence[str]) -> list[str]:
    """The names, if there are such modules and none is named twice."""
    if isinstance(after, str):
        raise BadInput(f"after={after!r} is one text: give a list of names, as in after=[{after!r}]")
    real = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for name in after:
        if name not in real:
            near = difflib.get_close_matches(str(name), real, n=3, cutoff=0.4) or real[:3]
            raise BadInput(f"no module is called {name!r}: the nearest names are {', '.join(map(repr, near))}")
    twice = sorted({name for name in after if list(after).count(name) > 1})
    if twice:
        raise BadInput(f"{', '.join(map(repr, twice))} is named more than once: name each exit once")
    return list(after)
