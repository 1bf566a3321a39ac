"""Stages: pieces of a network as modules of their own, which share its parameters, buffers and submodules."""

import copy
import linecache
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from alight.cutting.tracing import BATCHES, PLAIN, Call, Fixed, Sized, State, Trace, Typed, Value
from alight.errors import BadInput

CONSTANTS = "_constants"  # where a stage keeps what has no name in the network
FILES = count()
DISPATCH = """
def forward(self, *carried):
    return self._in_training(*carried) if self.training else self._in_evaluation(*carried)
"""


class Stage(nn.Module):
    """A piece of a network: takes what is carried, one argument each, and gives what is carried further.

    Names of parameters and buffers are those that they have in the network. `source` is what it runs, as Python.
    """

    source: str

    def __deepcopy__(self, memo: dict[int, Any]) -> "Stage":
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __copy__(self) -> "Stage":
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be pickled, whatever the protocol."""
        raise BadInput(
            "a stage cannot be pickled, as its code was made in this process: save a model with save_model and load"
            " it with load_model, or pickle the network and cut it again"
        )


@dataclass(frozen=True)
class Layout:
    """How the batch lies in a tensor: along which axis, and how many rows of it each sample has; 0: one for all."""

    axis: int = 0
    rows: int = 1


class Piece(NamedTuple):
    """What a stage is made of: calls of a trace, values that come in, and values that go out."""

    trace: Trace
    calls: Sequence[int]
    incoming: Sequence[Value]
    outgoing: Sequence[Value]
    last: bool  # gives one tensor instead of a tuple
    input_names: Sequence[str] = ()


def layout_of(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> Layout | None:
    """Where the batch lies in a tensor of these shapes at both batch sizes; None if neither there nor one for all.

    >>> layout_of(((2, 7), (3, 7))), layout_of(((7, 2), (7, 3))), layout_of(((8, 7), (12, 7)))
    (Layout(axis=0, rows=1), Layout(axis=1, rows=1), Layout(axis=0, rows=4))
    >>> layout_of(((1, 7), (1, 7))), layout_of(((4, 7), (9, 7)))
    (Layout(axis=0, rows=0), None)
    """
    if shapes[0] == shapes[1]:
        return Layout(rows=0)
    if len(shapes[0]) != len(shapes[1]):
        return None
    sizes = list(zip(*shapes, strict=True))
    axes = [axis for axis, pair in enumerate(sizes) if pair == BATCHES]
    if axes and (axes[0] == 0 or len(axes) == 1):
        return Layout(axes[0])
    varying = [axis for axis, (one, other) in enumerate(sizes) if one != other]
    rows = sizes[0][0] // BATCHES[0] if varying == [0] else 0
    return Layout(0, rows) if rows and sizes[0] == (rows * BATCHES[0], rows * BATCHES[1]) else None


def build(model: nn.Module, evaluation: Piece, training: Piece | BadInput) -> Stage:
    """The stage that runs one piece in evaluation mode and another in training mode, or says why it cannot."""
    stage = _fresh()
    code = _Draft(stage, model, evaluation).code()
    other = None if isinstance(training, BadInput) else _Draft(stage, model, training).code()
    if other is not None and other.src == code.src:
        programs = {"forward": _compiled(code.src, code.globals)}
    else:
        programs = {
            "forward": _compiled(DISPATCH, {}),
            "_in_evaluation": _compiled(code.src, code.globals),
            "_in_training": _compiled(other.src, other.globals) if other else _refusing(str(training)),
        }
    for name, program in programs.items():
        setattr(type(stage), name, program)
    type(stage).source = code.src if len(programs) == 1 or other is None else code.src + other.src
    return stage


def _fresh() -> Stage:
    """An empty stage with a class of its own: torch.compile counts its recompilations by code, not by module."""

    class Piece(Stage):
        pass

    Piece.__name__ = Piece.__qualname__ = "Stage"
    return Piece()


def _compiled(source: str, names: dict[str, Any]) -> Callable[..., Any]:
    """The function that the source defines; tracebacks through it show its lines."""
    file = f"<alight stage {next(FILES)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space = dict(names)
    exec(compile(source, file, "exec"), space)
    return space["forward"]


def _refusing(reason: str) -> Callable[..., Any]:
    def refuse(self: nn.Module, *carried: Tensor) -> Any:
        raise BadInput(f"this stage cannot run in training mode ({reason}); it can in evaluation mode")

    return refuse


class _Draft:
    """A piece on its way to Python code, its parameters and modules put into the stage."""

    def __init__(self, stage: Stage, model: nn.Module, piece: Piece) -> None:
        self.stage, self.model, self.piece = stage, model, piece
        self.graph = fx.Graph()
        self.made: dict[Value, fx.Node] = {}
        self.fetched: dict[str, fx.Node] = {}
        self.seen: dict[str, fx.Node] = {}  # of what comes in

    def code(self) -> Any:
        """The piece as Python code."""
        piece = self.piece
        names = piece.input_names or [f"carried_{index}" for index in range(len(piece.incoming))]
        inputs = [self.graph.placeholder(name) for name in names]
        self.inputs = list(zip(inputs, piece.incoming, strict=True))
        self.made |= zip(piece.incoming, map(self._restored, inputs, piece.incoming), strict=True)
        for index in piece.calls:
            self.made[Value(index)] = self._emitted(piece.trace.calls[index])
        outgoing = [self._batch_first(self._node(value), value) for value in piece.outgoing]
        self.graph.output(outgoing[0] if piece.last else tuple(outgoing))
        return self.graph.python_code("self")

    def _layout(self, value: Value) -> Layout:
        return layout_of(self.piece.trace.shapes[value]) or Layout()

    def _restored(self, node: fx.Node, value: Value) -> fx.Node:
        layout = self._layout(value)
        if not layout.rows:
            return self.graph.call_function(operator.getitem, (node, 0))
        if layout.rows > 1:
            return self.graph.call_method("flatten", (node, 0, 1))
        return self.graph.call_method("movedim", (node, 0, layout.axis)) if layout.axis else node

    def _batch_first(self, node: fx.Node, value: Value) -> fx.Node:
        layout = self._layout(value)
        if not layout.rows:
            same = [-1] * len(self.piece.trace.shapes[value][0])
            return self.graph.call_method("expand", (node, self._about("shape"), *same))
        if layout.rows > 1:
            return self.graph.call_method("unflatten", (node, 0, (-1, layout.rows)))
        return self.graph.call_method("movedim", (node, layout.axis, 0)) if layout.axis else node

    def _emitted(self, call: Call) -> fx.Node:
        args, kwargs = self._argument(call.args), self._argument(call.kwargs)
        if isinstance(call.target, str):
            self._hold(call.target)
            return self.graph.call_module(call.target, args, kwargs)
        name = getattr(call.target, "__name__", "")
        if name == "__get__":
            return self.graph.call_function(getattr, (args[0], call.target.__self__.__name__))
        if name == "__set__":
            raise BadInput(f"an attribute of a tensor is set at {call.line}: cut elsewhere, or use register_cutter")
        if name.startswith("__") and hasattr(operator, name) and not kwargs:
            return self.graph.call_function(getattr(operator, name), args)
        if getattr(torch.Tensor, name, None) == call.target:
            return self.graph.call_method(name, args, kwargs)
        return self.graph.call_function(call.target, args, kwargs)

    def _argument(self, item: Any) -> Any:
        if isinstance(item, Value):
            return self._node(item)
        if isinstance(item, State):
            return self._fetched(item.name)
        if isinstance(item, Fixed):
            return self._fetched(self._kept(item.tensor))
        if isinstance(item, Sized):
            return self._sized(item)
        if isinstance(item, torch.device) and item == self.piece.trace.device:
            return self._about("device")
        if isinstance(item, Typed):
            return self._about("dtype") or item.now
        if isinstance(item, dict):
            return {key: self._argument(part) for key, part in item.items()}
        if isinstance(item, list | tuple):
            return type(item)(map(self._argument, item))
        if isinstance(item, slice):
            return slice(*map(self._argument, (item.start, item.stop, item.step)))
        return item if isinstance(item, WRITTEN) else self._fetched(self._kept(item))

    def _node(self, value: Value) -> fx.Node:
        if value not in self.made:
            *way, key = value.path
            inner = self._node(value._replace(path=tuple(way)))
            self.made[value] = self.graph.call_function(operator.getitem, (inner, key))
        return self.made[value]

    def _sized(self, item: Sized) -> Any:
        size = self._about("shape")
        size = size if item.times == 1 else self.graph.call_function(operator.mul, (size, item.times))
        return self.graph.call_function(operator.add, (size, item.plus)) if item.plus else size

    def _about(self, what: str) -> fx.Node | None:
        """The device, dtype or first size of what comes in; None if nothing that comes in has the network's dtype."""
        if what not in self.seen:
            typed = [node for node, value in self.inputs if value in self.piece.trace.typed or what != "dtype"]
            if not typed:
                return None
            node = self.graph.call_function(getattr, (typed[0], what))
            self.seen[what] = self.graph.call_function(operator.getitem, (node, 0)) if what == "shape" else node
        return self.seen[what]

    def _fetched(self, name: str) -> fx.Node:
        if name not in self.fetched:
            self._hold(name)
            self.fetched[name] = self.graph.get_attr(name)
        return self.fetched[name]

    def _kept(self, item: Any) -> str:
        """The name under which the stage keeps a constant."""
        if not hasattr(self.stage, CONSTANTS):
            self.stage.add_module(CONSTANTS, nn.Module())
        constants = self.stage.get_submodule(CONSTANTS)
        kept = {**constants.__dict__, **constants._buffers}
        for name, old in kept.items():
            if old is item:
                return f"{CONSTANTS}.{name}"
        name = f"constant_{len(kept)}"
        if isinstance(item, Tensor):
            constants.register_buffer(name, item.detach(), persistent=False)
        else:
            setattr(constants, name, item)
        return f"{CONSTANTS}.{name}"

    def _hold(self, name: str) -> None:
        """Put a module, parameter or buffer of the network into the stage, under its name there."""
        if name.startswith(CONSTANTS):
            return
        ours: nn.Module = self.stage
        theirs = self.model
        *way, last = name.split(".")
        for part in way:
            theirs = theirs.get_submodule(part)
            if part not in ours._modules:
                ours.add_module(part, nn.Module())
            ours = ours.get_submodule(part)
        if ours is theirs:
            return  # a module of the network is there already, with all that is in it
        if last in theirs._parameters:
            ours.register_parameter(last, theirs._parameters[last])
        elif last in theirs._buffers:
            ours._buffers = theirs._buffers  # one dict for both: moved together, never apart
            ours._non_persistent_buffers_set = theirs._non_persistent_buffers_set
        else:
            ours.add_module(last, theirs._modules[last])


WRITTEN = (*PLAIN, torch.layout, torch.memory_format, type(...))  # what can be written into code as it is
