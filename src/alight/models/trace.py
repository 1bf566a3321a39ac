"""What a network does, for any batch size.

The network runs at two batch sizes and both runs are written down. A number that is the same in both is a constant; one
that differs is a multiple of the batch size plus a constant. Where possible it runs on the meta device, without data,
once in its own dtype and once in another: so a dtype or device that follows the network is told from one that is fixed.
"""

import copy
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from alight.errors import BadInput
from alight.models.recording import (
    Call,
    Closed,
    End,
    Fixed,
    Opened,
    Record,
    Sized,
    State,
    Typed,
    Value,
    line_of,
    record,
)

BATCHES = (2, 3)  # not 1: code that squeezes or broadcasts takes another way there
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass
class Trace:
    """What a network does, for any batch size."""

    calls: list[Call]
    ends: dict[str, list[End]]
    output: Any
    shapes: dict[Value, tuple[tuple[int, ...], tuple[int, ...]]]  # at both batch sizes
    tainted: set[Value]
    typed: set[Value]  # whose dtype is the network's
    device: torch.device  # on which it was seen


class Inputs:
    """An example of what the network takes, to be made into batches of any size."""

    def __init__(self, example: Any) -> None:
        self.names: tuple[str, ...] = tuple(example) if isinstance(example, Mapping) else ()
        several = list(example.values()) if self.names else example
        tensors = list(several) if isinstance(several, list | tuple) else [several]
        wrong = [type(tensor).__name__ for tensor in tensors if not isinstance(tensor, Tensor)]
        if wrong or not tensors:
            raise BadInput(f"the example holds {wrong or 'nothing'}: give tensors as the network takes them")
        sizes = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
        if len(sizes) > 1 or 0 in sizes:
            raise BadInput(f"the example's tensors hold {sorted(sizes)} samples: give the same batch in each")
        self.tensors: tuple[Tensor, ...] = tuple(tensors)

    def of_size(self, size: int, device: Any = None, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """A batch of samples like those of the example, no two alike."""
        batch = [_varied(tensor, size) for tensor in self.tensors]
        return tuple(tensor.to(device, dtype if tensor.is_floating_point() else None) for tensor in batch)

    def run(self, model: nn.Module, tensors: tuple[Tensor, ...]) -> Any:
        """What the network makes of a batch."""
        return model(**dict(zip(self.names, tensors, strict=True))) if self.names else model(*tensors)


def trace(
    model: nn.Module,
    inputs: Inputs,
    watched: Collection[str],
    *,
    opened: Collection[str] = (),
    training: bool = False,
    with_data: bool = False,
) -> Trace:
    """What the network does, with the ends of watched modules.

    The modules around the watched ones are opened, and those named besides; all are if tensors hide in closed ones.
    """
    names = [*watched, *(f"{name}." for name in opened)]
    around = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."} | {""}
    kinds = {name: type(module) for name, module in model.named_modules(remove_duplicate=False)}
    ways: list[Opened] = [
        around.__contains__,
        lambda name: name in around or kinds[name] in CONTAINERS or not kinds[name].__module__.startswith("torch.nn."),
    ]
    for dtype in () if with_data else (torch.float64, None):
        try:
            bare = on_meta(model), on_meta(model, dtype)
            batches = [inputs.of_size(size, "meta", dtype if index else None) for index, size in enumerate(BATCHES)]
            return _seen(bare, batches, inputs, watched, ways, training)
        except Exception:  # whatever a network does that cannot be done without data
            continue
    with in_mode(model, training), refusals():
        return _seen((model, model), [inputs.of_size(size) for size in BATCHES], inputs, watched, ways, training)


@contextmanager
def refusals() -> Iterator[None]:
    """While this lasts, whatever a network raises is raised as bad input, with the line."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        said = next(iter(str(error).splitlines()), "")
        raise BadInput(
            f"the network fails on the example with {type(error).__name__}: {said} (at {line_of(error)}): give an"
            " example as the network takes it, cut elsewhere, or teach alight this network with register_cutter"
        ) from error


def _seen(
    models: tuple[nn.Module, nn.Module],
    batches: Sequence[tuple[Tensor, ...]],
    inputs: Inputs,
    watched: Collection[str],
    ways: Sequence[Opened],
    training: bool,
) -> Trace:
    """What a network does in two runs, opened in the first way in which no tensor hides."""
    for way in ways:
        try:
            first, second = (
                record(model.train(training), inputs.run, batch, watched, way)
                for model, batch in zip(models, batches, strict=True)
            )
            return _aligned(first, second, batches[0][0].device)
        except Closed as error:
            problem = error
    raise BadInput(
        f"{problem}, so it has no fixed graph: cut after modules that do not lie around this line, or teach alight this"
        " network with register_cutter"
    )


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """While this lasts the network is in training or evaluation mode; statistics, modes and dice are put back."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()] if training else []
    devices = {tensor.device for tensor in itertools.chain(model.parameters(), model.buffers())}
    with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        model.train(training)
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            with torch.no_grad():
                for buffer, old in buffers:
                    buffer.copy_(old)


def on_meta(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of the network that knows shapes and holds no data, perhaps in another dtype."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): _bare(tensor, dtype) for tensor in tensors})


def _bare(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", dtype=dtype if tensor.is_floating_point() else None)
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def _varied(tensor: Tensor, size: int) -> Tensor:
    rows = [tensor[index % len(tensor)] for index in range(size)]
    if tensor.is_floating_point():
        dice = torch.Generator().manual_seed(0)
        noise = [torch.randn(row.shape, generator=dice).to(row) / 8 for row in rows]
        return torch.stack([row + part for row, part in zip(rows, noise, strict=True)])
    return torch.stack([row.roll(index, -1) if row.ndim else row for index, row in enumerate(rows)])


def _aligned(first: Record, second: Record, device: torch.device) -> Trace:
    """Two runs at different batch sizes as one."""
    for one, other in zip(first.calls, second.calls, strict=False):
        if one.target != other.target:
            raise BadInput(
                f"the network does something else at batch size {BATCHES[1]} than at {BATCHES[0]} ({one.line}),"
                " so it has no fixed graph: cut after modules that do not lie around this line,"
                " or teach alight this network with register_cutter"
            )
        one.args = _merged(one.args, other.args, one.line)
        one.kwargs = _merged(one.kwargs, other.kwargs, one.line)
    if len(first.calls) != len(second.calls):
        line = max(first.calls, second.calls, key=len)[min(len(first.calls), len(second.calls))].line
        raise BadInput(
            f"the network makes {len(first.calls)} steps at batch size {BATCHES[0]} and {len(second.calls)} at"
            f" {BATCHES[1]} (first more: {line}): teach alight this network with register_cutter"
        )
    ends = {
        name: [End(one.time, _merged(one.result, other.result, name)) for one, other in zip(ends, second.ends[name])]  # noqa: B905
        for name, ends in first.ends.items()
    }
    shapes = {value: (shape, second.shapes[value]) for value, shape in first.shapes.items() if value in second.shapes}
    output = _merged(first.output, second.output, "the output")
    typed = {value for value in shapes if first.dtypes[value] != second.dtypes[value]}
    return Trace(first.calls, ends, output, shapes, first.tainted, typed, device)


def _merged(one: Any, other: Any, line: str) -> Any:
    """The same argument at both batch sizes as one for all."""
    if isinstance(one, Fixed):
        if one.tensor.is_meta or not isinstance(other, Fixed) or not _same(one.tensor, other.tensor):
            raise Closed(f"a tensor of unknown origin is used at {line}")
        return one
    if isinstance(one, torch.dtype) and isinstance(other, torch.dtype) and one != other:
        return Typed(one)
    if isinstance(one, Value | State):
        if one != other:
            raise Closed(f"another tensor is used at each batch size at {line}")
        return one
    if type(one) is int and type(other) is int and one != other:
        times = (other - one) // (BATCHES[1] - BATCHES[0])
        return Sized(times, one - times * BATCHES[0])
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        return {key: _merged(part, other[key], line) for key, part in one.items()}
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return type(one)(_merged(part, twin, line) for part, twin in zip(one, other, strict=True))
    if isinstance(one, slice) and isinstance(other, slice):
        ends = zip((one.start, one.stop, one.step), (other.start, other.stop, other.step), strict=True)
        return slice(*(_merged(a, b, line) for a, b in ends))
    if type(one) is not type(other) or (isinstance(one, PLAIN) and one != other):
        raise BadInput(
            f"{one!r} at batch size {BATCHES[0]} is {other!r} at {BATCHES[1]} ({line}): only whole numbers may follow"
            " the batch size; cut after modules that do not lie around this line, or use register_cutter"
        )
    return one


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other))
