"""Trace a network: two runs at different batch sizes are merged into one trace that holds for any batch size."""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from alight.cutting.calls import (
    RANDOM,
    Call,
    CallRecorder,
    ConstantTensor,
    IsOpened,
    ModuleEnd,
    StateName,
    Untraceable,
    Value,
    WritesParameters,
    record_calls,
    sizes_in,
    walk,
)
from alight.cutting.running import Inputs, in_mode, refusals
from alight.cutting.sizes import NumberOf, SizeCheck, SizeExpression, SizeOf
from alight.errors import BadInput

BATCHES = (2, 3)  # not 1: code that squeezes or broadcasts behaves differently there
MANY = {"meta": 4099, "data": 33}  # samples of a third batch, in which code that works in parts of a batch shows
FEW = 7  # of that batch at least, whatever the memory
MEMORY = 2**29  # bytes of a tensor with data that the network makes of that batch
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
SYMBOLS = (Value, StateName, ConstantTensor, SizeOf, SizeExpression)  # what stands for tensors, modules and sizes


@dataclass(frozen=True)
class BatchMultiple:
    """A whole number that follows the batch size: `times` of it, and `plus`."""

    times: int
    plus: int


@dataclass(frozen=True)
class NetworkDtype:
    """A dtype that follows the network's; `recorded` is what it was in the trace."""

    recorded: torch.dtype


@dataclass(frozen=True)
class Layout:
    """How the batch lies in a tensor: along which axis, and how many rows of it each sample has; 0: one for all."""

    axis: int = 0
    rows: int = 1


@dataclass
class Trace:
    """What a network does, for any batch size."""

    calls: list[Call]
    ends: dict[str, list[ModuleEnd]]
    inputs: list[Value]
    output: Any
    shapes: dict[Value, tuple[tuple[int, ...], tuple[int, ...]]]  # at both batch sizes
    numbers: dict[Value, tuple[int, int]]  # that closed modules return, at both batch sizes
    tainted: set[Value]
    follows_dtype: set[Value]  # tensors in the network's dtype
    device: torch.device  # of the traced run
    checks: list[SizeCheck]  # of sizes that do not follow the batch
    training: bool

    def layout(self, value: Value) -> Layout | None:
        """Return where the batch lies in a tensor; None if it is nowhere, and the tensor is not the same for all."""
        return layout_of(*self.shapes[value])

    def sizes(self, size: SizeOf) -> tuple[int, int]:
        """Return a size at both batch sizes."""
        if isinstance(size, NumberOf):
            return self.numbers[size.value]
        first, second = self.shapes[size.value]
        return first[size.axis], second[size.axis]


class DependsOnBatchSize(BadInput):
    """A network whose code does something else for large batches than for small ones."""


def layout_of(first: tuple[int, ...], second: tuple[int, ...]) -> Layout | None:
    """Return where the batch lies in a tensor of these shapes at both batch sizes; None if neither there nor constant.

    >>> layout_of((2, 7), (3, 7)), layout_of((7, 2), (7, 3)), layout_of((8, 7), (12, 7))
    (Layout(axis=0, rows=1), Layout(axis=1, rows=1), Layout(axis=0, rows=4))
    >>> layout_of((1, 7), (1, 7)), layout_of((4, 7), (9, 7))
    (Layout(axis=0, rows=0), None)
    """
    if first == second:
        return Layout(rows=0)
    if len(first) != len(second):
        return None
    sizes = list(zip(first, second, strict=True))
    axes = [axis for axis, pair in enumerate(sizes) if pair == BATCHES]
    if axes and (axes[0] == 0 or len(axes) == 1):
        return Layout(axes[0])
    rows = first[0] // BATCHES[0] if first[1:] == second[1:] else 0
    return Layout(0, rows) if rows and sizes[0] == (rows * BATCHES[0], rows * BATCHES[1]) else None


def trace(
    model: nn.Module,
    inputs: Inputs,
    watched: Collection[str],
    *,
    opened: Collection[str] = (),
    training: bool = False,
    with_data: bool = False,
) -> Trace:
    """Return what the network does, with the ends of watched modules.

    The modules around the watched ones are opened, and those named besides; all are if tensors hide in closed ones.
    """
    names = [*watched, *(f"{name}." for name in opened)]
    around = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."} | {""}
    kinds = {name: type(module) for name, module in model.named_modules(remove_duplicate=False)}
    openings: list[IsOpened] = [
        around.__contains__,
        lambda name: name in around or kinds[name] in CONTAINERS or not kinds[name].__module__.startswith("torch.nn."),
    ]
    for dtype in () if with_data else (torch.float64, None):
        try:
            copies = on_meta(model), on_meta(model, dtype)
            batches = [inputs.of_size(size, "meta", dtype if index else None) for index, size in enumerate(BATCHES)]
            return _trace_twice(copies, batches, inputs, watched, openings, training)
        except (DependsOnBatchSize, WritesParameters):
            raise
        except Exception:  # whatever a network does that cannot be done without data
            continue
    with in_mode(model, training=training), refusals():
        batches = [inputs.of_size(size) for size in BATCHES]
        return _trace_twice((model, model), batches, inputs, watched, openings, training)


def on_meta(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of the network on the meta device (shapes without data), perhaps in another dtype."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): _without_data(tensor, dtype) for tensor in tensors})


def _without_data(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", dtype=dtype if tensor.is_floating_point() else None)
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def _trace_twice(
    models: tuple[nn.Module, nn.Module],
    batches: Sequence[tuple[Tensor, ...]],
    inputs: Inputs,
    watched: Collection[str],
    openings: Sequence[IsOpened],
    training: bool,
) -> Trace:
    """Return what a network does in two runs, with the first choice of opened modules in which no tensor hides."""
    for is_opened in openings:
        try:
            first, second = (
                record_calls(model.train(training), inputs, batch, watched, is_opened)
                for model, batch in zip(models, batches, strict=True)
            )
            traced = _aligned(first, second, batches[0][0].device, training)
            if not training:
                many = _many(inputs, batches[0], first.largest)
                large = record_calls(models[0], inputs, many, watched, is_opened)
                _check_large_batch(traced, large, first.shapes.keys() ^ second.shapes.keys(), len(many[0]))
                if first.inside != large.inside:  # perhaps only what a first run keeps for later ones
                    first = record_calls(models[0], inputs, batches[0], watched, is_opened)
                _check_closed_modules(first, large, len(many[0]))
            _forget_unused(traced)
            return traced
        except Untraceable as error:
            problem = error
    raise BadInput(
        f"{problem}, so it has no fixed graph: cut after modules that do not lie around this line, put the line into a"
        " module of its own, or teach alight this network with register_cutter"
    )


def _aligned(first: CallRecorder, second: CallRecorder, device: torch.device, training: bool) -> Trace:
    """Return two runs at different batch sizes as one trace."""
    for one, other in zip(first.calls, second.calls, strict=False):
        if one.target != other.target:
            raise BadInput(
                f"the network calls other functions at batch size {BATCHES[1]} than at {BATCHES[0]} ({one.line}),"
                " so it has no fixed graph: cut after modules that do not lie around this line,"
                " or teach alight this network with register_cutter"
            )
        one.args = _merged(one.args, other.args, one.line)
        one.kwargs = _merged(one.kwargs, other.kwargs, one.line)
    if len(first.calls) != len(second.calls):
        line = max(first.calls, second.calls, key=len)[min(len(first.calls), len(second.calls))].line
        raise BadInput(
            f"the network makes {len(first.calls)} calls at batch size {BATCHES[0]} and {len(second.calls)} at"
            f" {BATCHES[1]} (first more: {line}): teach alight this network with register_cutter"
        )
    ends = {
        name: [ModuleEnd(one.time, _merged(one.result, other.result, name)) for one, other in zip(ends, other_ends)]  # noqa: B905
        for (name, ends), other_ends in zip(first.ends.items(), second.ends.values(), strict=True)
    }
    shapes = {value: (shape, second.shapes[value]) for value, shape in first.shapes.items() if value in second.shapes}
    numbers = {value: (one, second.numbers[value]) for value, one in first.numbers.items() if value in second.numbers}
    output = _merged(first.output, second.output, "the output")
    follows_dtype = {value for value in shapes if first.dtypes[value] != second.dtypes[value]}
    tainted, checks = first.all_tainted(), _size_checks(first, second)
    return Trace(
        first.calls, ends, first.inputs, output, shapes, numbers, tainted, follows_dtype, device, checks, training
    )


def _forget_unused(traced: Trace) -> None:
    """Forget functions whose results nothing reads, such as a loss that the network computes beside its logits.

    Modules, what writes into memory, draws random numbers, or checks sizes and conditions, stays.
    """
    kept = [traced.output, *(end.result for ends in traced.ends.values() for end in ends)]
    used = {item.call for item in walk(kept) if isinstance(item, Value)}
    used |= {size.value.call for check in traced.checks for size in sizes_in(check[1:3])}
    for index in range(len(traced.calls) - 1, -1, -1):
        call = traced.calls[index]
        name = "" if isinstance(call.target, str) else getattr(call.target, "__name__", "")
        stays = name in ("", "apply", "check_outcome") or call.changed or RANDOM.search(name)
        if stays or index in used:
            used |= {value.call for value in call.values} | {size.value.call for size in call.sizes}
        else:
            call.tainted, call.values, call.sizes = False, set(), set()


def _many(inputs: Inputs, batch: tuple[Tensor, ...], largest: int) -> tuple[Tensor, ...]:
    """Return a large batch like a small one, with data or without; `largest` are bytes that it made with data."""
    fitting = MEMORY * len(batch[0]) // (largest + 1)
    if batch[0].is_meta:
        size = min(MANY["meta"], max(MANY["data"], fitting))
        return tuple(each.new_empty((size, *each.shape[1:])) for each in batch)
    return inputs.of_size(min(MANY["data"], max(FEW, fitting)))


def _check_large_batch(traced: Trace, large: CallRecorder, per_sample: set[Value], size: int) -> None:
    """Raise if the network's code does something else for a large batch than a trace of small ones says.

    Calls with a value for each sample give more of them, as they do in small batches.
    """
    made = {value.call for value in traced.shapes.keys() ^ large.shapes.keys()} - {each.call for each in per_sample}
    for index, (one, other) in enumerate(zip(traced.calls, large.calls, strict=False)):
        if one.target != other.target or index in made or not _holds_at((one.args, one.kwargs), other, size):
            line = other.line
            break
    else:
        if len(traced.calls) == len(large.calls):
            return
        line = max(traced.calls, large.calls, key=len)[min(len(traced.calls), len(large.calls))].line
    raise DependsOnBatchSize(
        f"the network does something else for a batch of {size} samples than for {BATCHES[0]} ({line}), as code that"
        " works in parts of a batch does: let it treat a batch as a whole, or cut after modules that do not lie around"
        " this line"
    )


def _check_closed_modules(small: CallRecorder, large: CallRecorder, size: int) -> None:
    """Raise if a closed module calls other functions for a large batch than for a small one."""
    other = sorted({name for name, _ in small.inside ^ large.inside if name and "_orig_mod" not in name.split(".")})
    if other:  # of compiled modules the compiler's own calls differ
        raise DependsOnBatchSize(
            f"module {other[0]!r} calls other functions for a batch of {size} samples than for {BATCHES[0]}: let it"
            " treat a batch as a whole"
        )


def _holds_at(merged: Any, call: Call, size: int) -> bool:
    """Check whether the arguments of a trace are those of a call in a batch of this size."""
    pairs = zip(walk(merged), walk((call.args, call.kwargs)), strict=False)
    return all(_is_at(one, other, size) for one, other in pairs) and _count(merged) == _count((call.args, call.kwargs))


def _is_at(one: Any, other: Any, size: int) -> bool:
    if isinstance(one, BatchMultiple):
        return not isinstance(other, int) or other == one.times * size + one.plus
    if isinstance(one, SizeExpression) and isinstance(other, SizeExpression):
        pairs = zip(one.operands, other.operands, strict=True)
        return one.function is other.function and all(_is_at(*pair, size) for pair in pairs)
    if isinstance(one, (ConstantTensor, NetworkDtype)) or isinstance(other, ConstantTensor):
        return True  # compared at two batch sizes
    return type(one) is type(other) and (not isinstance(one, (*SCALARS, Value, StateName, SizeOf)) or one == other)


def _count(item: Any) -> int:
    return sum(1 for _ in walk(item))


def _size_checks(first: CallRecorder, second: CallRecorder) -> list[SizeCheck]:
    """Return comparisons of sizes that do not follow the batch; for the batch, the chain is run at several sizes."""
    per_sample = {value.call for value in second.shapes.keys() - first.shapes.keys()}  # calls with a result for each
    return [
        check
        for key, (check, numbers) in first.checks.items()
        if key in second.checks
        and second.checks[key][1] == numbers
        and not any(size.value.call in per_sample for size in sizes_in(key))
    ]


def _merged(one: Any, other: Any, line: str) -> Any:
    """Return one argument for all batch sizes, of what it was at two of them."""
    if isinstance(one, SYMBOLS):
        return _merged_symbol(one, other, line)
    match one, other:
        case Mapping(), Mapping() if one.keys() == other.keys():
            return {key: _merged(part, other[key], line) for key, part in one.items()}
        case ((list() | tuple()), (list() | tuple())) if len(one) == len(other):
            return type(one)(_merged(*pair, line) for pair in zip(one, other, strict=True))
        case slice(), slice():
            return slice(*_merged((one.start, one.stop, one.step), (other.start, other.stop, other.step), line))
        case torch.dtype(), torch.dtype() if one != other:
            return NetworkDtype(one)
        case int(), int() if one != other and not isinstance(one, bool):
            times = (other - one) // (BATCHES[1] - BATCHES[0])
            return BatchMultiple(times, one - times * BATCHES[0])
    if type(one) is not type(other) or (isinstance(one, SCALARS) and one != other):
        raise BadInput(
            f"{one!r} at batch size {BATCHES[0]} is {other!r} at {BATCHES[1]} ({line}): only whole numbers may follow"
            " the batch size; cut after modules that do not lie around this line, or use register_cutter"
        )
    return one


def _merged_symbol(one: Any, other: Any, line: str) -> Any:
    if isinstance(one, ConstantTensor):
        if one.tensor.is_meta or not isinstance(other, ConstantTensor) or not _is_same(one.tensor, other.tensor):
            raise Untraceable(f"a tensor of unknown origin is used at {line}")
    elif isinstance(one, SizeExpression) and isinstance(other, SizeExpression) and one.function is other.function:
        return SizeExpression(one.function, _merged(one.operands, other.operands, line))
    elif one != other:
        raise Untraceable(f"another tensor is used at each batch size at {line}")
    return one


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other))
