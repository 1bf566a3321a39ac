"""Stages: calls of a network as modules of their own, which share its parameters, buffers and submodules."""

import copy
import linecache
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from alight.cutting.tracing import (
    BATCHES,
    SCALARS,
    BatchMultiple,
    Call,
    ConstantTensor,
    NetworkDtype,
    StateName,
    Trace,
    Value,
)
from alight.errors import BadInput

CONSTANTS = "_constants"  # the submodule of a stage for what has no name in the network
LITERALS = (*SCALARS, torch.layout, torch.memory_format, type(...))  # what can be written into code
SOURCE_NUMBERS = count()
DISPATCH = """
def forward(self, *carried):
    return self._in_training(*carried) if self.training else self._in_evaluation(*carried)
"""


class StageGraphs(NamedTuple):
    """What a stage runs in evaluation mode, and in training mode or why it cannot run there."""

    evaluation: fx.Graph
    training: fx.Graph | str


class Stage(nn.Module):
    """Consecutive calls of a network: takes what is carried, one argument each, and returns what is carried further.

    Parameters and buffers have the names that they have in the network. `source` is what the stage runs, as Python.
    """

    source: str
    graphs: StageGraphs

    def __deepcopy__(self, memo: dict[int, Any]) -> "Stage":
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __copy__(self) -> "Stage":
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, whatever the protocol."""
        raise BadInput(
            "a stage cannot be pickled, as its code was made in this process: save a model with save_model and load"
            " it with load_model, or pickle the network and cut it again"
        )


@dataclass(frozen=True)
class Layout:
    """How the batch lies in a tensor: along which axis, and how many rows of it each sample has; 0: one for all."""

    axis: int = 0
    rows: int = 1


class StagePlan(NamedTuple):
    """What a stage is made of: calls of a trace, values that come in, and values that go out."""

    trace: Trace
    calls: Sequence[int]
    incoming: Sequence[Value]
    outgoing: Sequence[Value]
    last: bool  # returns one tensor instead of a tuple
    input_names: Sequence[str] = ()


def layout_of(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> Layout | None:
    """Return where the batch lies in a tensor of these shapes at both batch sizes; None if neither there nor constant.

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


def build(model: nn.Module, evaluation: StagePlan, training: StagePlan | BadInput) -> Stage:
    """Return the stage that runs one plan in evaluation mode and another in training mode, or refuses to train."""
    constants: dict[str, Any] = {}
    graph = _GraphBuilder(evaluation, constants).graph()
    other = str(training) if isinstance(training, BadInput) else _GraphBuilder(training, constants).graph()
    return stage_of(model, StageGraphs(graph, other), constants)


def stage_of(model: nn.Module, graphs: StageGraphs, constants: Mapping[str, Any]) -> Stage:
    """Return the stage that runs these graphs on the network's parameters, buffers and modules, and on constants."""
    kind: type[Stage] = type("Stage", (Stage,), {})  # torch.compile counts recompilations by code, not by module
    stage = kind()
    if constants:
        _add_constants(stage, constants)
    for node in (node for graph in graphs if isinstance(graph, fx.Graph) for node in graph.nodes):
        if node.op in ("call_module", "get_attr") and not str(node.target).startswith(f"{CONSTANTS}."):
            _share(stage, model, str(node.target))
    code = graphs.evaluation.python_code("self")
    other = None if isinstance(graphs.training, str) else graphs.training.python_code("self")
    if other is not None and other.src == code.src:
        programs = {"forward": _compiled(code.src, code.globals)}
    else:
        programs = {
            "forward": _compiled(DISPATCH, {}),
            "_in_evaluation": _compiled(code.src, code.globals),
            "_in_training": _compiled(other.src, other.globals) if other else _refusing(str(graphs.training)),
        }
    for name, program in programs.items():
        setattr(kind, name, program)
    kind.source = code.src if len(programs) == 1 or other is None else code.src + other.src
    kind.graphs = graphs
    return stage


def constants_of(stage: Stage) -> dict[str, Any]:
    """Return what a stage keeps that has no name in the network, by name."""
    if CONSTANTS not in stage._modules:
        return {}
    kept = stage.get_submodule(CONSTANTS)
    return {name: value for name, value in (kept.__dict__ | kept._buffers).items() if name.startswith("constant_")}


def _add_constants(stage: Stage, constants: Mapping[str, Any]) -> None:
    kept = nn.Module()
    for name, value in constants.items():
        if isinstance(value, Tensor):
            kept.register_buffer(name, value.detach(), persistent=False)
        else:
            setattr(kept, name, value)
    stage.add_module(CONSTANTS, kept)


def _share(stage: Stage, model: nn.Module, name: str) -> None:
    """Put a module, parameter or buffer of the network into the stage, under its name there."""
    ours: nn.Module = stage
    theirs = model
    *path, last = name.split(".")
    for part in path:
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
    elif last in theirs._modules:
        ours.add_module(last, theirs._modules[last])
    else:
        raise BadInput(f"the network has no {name!r}: give the network that was cut")


def _compiled(source: str, names: dict[str, Any]) -> Callable[..., Any]:
    """Return the function that the source defines; tracebacks through it show its lines."""
    file = f"<alight stage {next(SOURCE_NUMBERS)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space = dict(names)
    exec(compile(source, file, "exec"), space)
    return space["forward"]


def _refusing(reason: str) -> Callable[..., Any]:
    def refuse(self: nn.Module, *carried: Tensor) -> Any:
        raise BadInput(f"this stage cannot run in training mode ({reason}); it can in evaluation mode")

    return refuse


class _GraphBuilder:
    """Turns a plan into a graph; what has no name in the network is put among the constants."""

    def __init__(self, plan: StagePlan, constants: dict[str, Any]) -> None:
        self.plan, self.constants = plan, constants
        self.nodes = fx.Graph()
        self.made: dict[Value, fx.Node] = {}
        self.fetched: dict[str, fx.Node] = {}
        self.properties: dict[str, fx.Node] = {}  # of what comes in

    def graph(self) -> fx.Graph:
        """Return the graph: inputs restored to the network's layout, calls, outputs with the batch first."""
        plan = self.plan
        names = plan.input_names or [f"carried_{index}" for index in range(len(plan.incoming))]
        inputs = [self.nodes.placeholder(name) for name in names]
        self.inputs = list(zip(inputs, plan.incoming, strict=True))
        self.made |= zip(plan.incoming, map(self._restored, inputs, plan.incoming), strict=True)
        for index in plan.calls:
            self.made[Value(index)] = self._emitted(plan.trace.calls[index])
        outgoing = [self._batch_first(self._node(value), value) for value in plan.outgoing]
        self.nodes.output(outgoing[0] if plan.last else tuple(outgoing))
        return self.nodes

    def _layout(self, value: Value) -> Layout:
        return layout_of(self.plan.trace.shapes[value]) or Layout()

    def _restored(self, node: fx.Node, value: Value) -> fx.Node:
        layout = self._layout(value)
        if not layout.rows:
            return self.nodes.call_function(operator.getitem, (node, 0))
        if layout.rows > 1:
            return self.nodes.call_method("flatten", (node, 0, 1))
        return self.nodes.call_method("movedim", (node, 0, layout.axis)) if layout.axis else node

    def _batch_first(self, node: fx.Node, value: Value) -> fx.Node:
        layout = self._layout(value)
        if not layout.rows:
            same = [-1] * len(self.plan.trace.shapes[value][0])
            return self.nodes.call_method("expand", (node, self._property("shape"), *same))
        if layout.rows > 1:
            return self.nodes.call_method("unflatten", (node, 0, (-1, layout.rows)))
        return self.nodes.call_method("movedim", (node, layout.axis, 0)) if layout.axis else node

    def _emitted(self, call: Call) -> fx.Node:
        args, kwargs = self._argument(call.args), self._argument(call.kwargs)
        if isinstance(call.target, str):
            return self.nodes.call_module(call.target, args, kwargs)
        name = getattr(call.target, "__name__", "")
        if name == "__get__":
            return self.nodes.call_function(getattr, (args[0], call.target.__self__.__name__))
        if name == "__set__":
            raise BadInput(f"an attribute of a tensor is set at {call.line}: cut elsewhere, or use register_cutter")
        if name.startswith("__") and hasattr(operator, name) and not kwargs:
            return self.nodes.call_function(getattr(operator, name), args)
        if getattr(torch.Tensor, name, None) == call.target:
            return self.nodes.call_method(name, args, kwargs)
        return self.nodes.call_function(call.target, args, kwargs)

    def _argument(self, item: Any) -> Any:
        match item:
            case Value():
                return self._node(item)
            case StateName():
                return self._fetched(item.name)
            case ConstantTensor():
                return self._fetched(self._constant(item.tensor))
            case BatchMultiple():
                return self._batch_multiple(item)
            case NetworkDtype():
                return self._property("dtype") or item.recorded
            case torch.device() if item == self.plan.trace.device:
                return self._property("device")
            case dict():
                return {key: self._argument(part) for key, part in item.items()}
            case list() | tuple():
                return type(item)(map(self._argument, item))
            case slice():
                return slice(*map(self._argument, (item.start, item.stop, item.step)))
            case _:
                return item if isinstance(item, LITERALS) else self._fetched(self._constant(item))

    def _node(self, value: Value) -> fx.Node:
        if value not in self.made:
            *path, key = value.path
            inner = self._node(value._replace(path=tuple(path)))
            self.made[value] = self.nodes.call_function(operator.getitem, (inner, key))
        return self.made[value]

    def _batch_multiple(self, item: BatchMultiple) -> Any:
        size = self._property("shape")
        size = size if item.times == 1 else self.nodes.call_function(operator.mul, (size, item.times))
        return self.nodes.call_function(operator.add, (size, item.plus)) if item.plus else size

    def _property(self, name: str) -> fx.Node | None:
        """Return the device, dtype or first size of what comes in; None if nothing there has the network's dtype."""
        if name not in self.properties:
            follows = self.plan.trace.follows_dtype
            nodes = [node for node, value in self.inputs if value in follows or name != "dtype"]
            if not nodes:
                return None
            node = self.nodes.call_function(getattr, (nodes[0], name))
            self.properties[name] = self.nodes.call_function(operator.getitem, (node, 0)) if name == "shape" else node
        return self.properties[name]

    def _fetched(self, name: str) -> fx.Node:
        if name not in self.fetched:
            self.fetched[name] = self.nodes.get_attr(name)
        return self.fetched[name]

    def _constant(self, item: Any) -> str:
        """Return the name under which the stage keeps a constant."""
        name = next((name for name, old in self.constants.items() if old is item), f"constant_{len(self.constants)}")
        self.constants[name] = item
        return f"{CONSTANTS}.{name}"
