"""Stages: calls of a network as modules of their own, which share its parameters, buffers and submodules.

Stages are also plain data, so that a saved model is loaded without tracing its network again. Only data is read: a
graph is a list of nodes that can name tensor functions, methods and attributes of a fixed list, and modules and
parameters that the network has. Anything else is refused, so a file cannot name code to run.
"""

import copy
import keyword
import linecache
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.overrides import get_overridable_functions

from alight.cutting.calls import AutocastState, Call, ConstantTensor, StateName, Value, check_outcome
from alight.cutting.sizes import FixedSizes, NumberOf, SizeCheck, SizeExpression, SizeOf, check_size
from alight.cutting.tracing import BATCHES, SCALARS, BatchMultiple, Layout, NetworkDtype, Trace
from alight.errors import BadInput

CONSTANTS = "_constants"  # the submodule of a stage for what has no name in the network
LITERALS = (*SCALARS, torch.layout, torch.memory_format, type(...))  # what can be written into code
SOURCE_NUMBERS = count()
DISPATCH = """
def forward(self, *carried):
    return self._in_training(*carried) if self.training else self._in_evaluation(*carried)
"""
NAMESPACES = (torch, torch.functional, torch.nn.functional, torch.linalg, torch.fft, torch.special)
FACTORIES = {  # functions of torch that make a tensor of no other
    "arange", "as_tensor", "empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "randperm", "range", "scalar_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros",
}  # fmt: skip
OPERATORS = {
    "abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "iadd", "iand", "ifloordiv", "ilshift", "imod",
    "imul", "invert", "ior", "ipow", "irshift", "isub", "itruediv", "ixor", "le", "lshift", "lt", "matmul", "mod",
    "mul", "ne", "neg", "or_", "pos", "pow", "rshift", "setitem", "sub", "truediv", "xor",
}  # fmt: skip
ATTRIBUTES = {"H", "T", "data", "device", "dtype", "imag", "layout", "mH", "mT", "ndim", "real", "shape"}
METHODS = {  # of tensors, besides those that torch lets others override
    "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "unflatten",
    "__radd__", "__rand__", "__rfloordiv__", "__rlshift__", "__rmatmul__", "__rmod__", "__rmul__", "__ror__",
    "__rdiv__", "__rpow__", "__rrshift__", "__rsub__", "__rtruediv__", "__rxor__", "__reversed__",
}  # fmt: skip
NOT_METHODS = {  # of tensors that return something else than tensors, take functions, or change more than the tensor
    "apply_", "backward", "data_ptr", "is_shared", "item", "map2_", "map_", "module_load", "numpy", "pin_memory",
    "record_stream", "register_hook", "register_post_accumulate_grad_hook", "set_", "share_memory_", "storage",
    "storage_type", "tolist", "untyped_storage",
}  # fmt: skip
POWERS: dict[Any, str] = {Tensor.__pow__: "__pow__", Tensor.__ipow__: "__ipow__"}  # with names of others
TORCH_KINDS = (torch.dtype, torch.layout, torch.memory_format)
TORCH_VALUES = {str(value): value for value in vars(torch).values() if isinstance(value, TORCH_KINDS)}
ARGUMENTS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {  # that JSON has not: type, to, from
    "tuple": (tuple, list, tuple),
    "dict": (dict, lambda item: list(map(list, item.items())), dict),
    "slice": (slice, lambda item: [item.start, item.stop, item.step], lambda parts: slice(*parts)),
    "device": (torch.device, str, torch.device),
    "torch": (TORCH_KINDS, str, TORCH_VALUES.__getitem__),
    "float": (float, lambda item: repr(float(item)), float),
    "ellipsis": (type(...), lambda _: None, lambda _: ...),
}


class StageGraphs(NamedTuple):
    """What a stage runs in evaluation mode, and in training mode or why it cannot run there."""

    evaluation: fx.Graph
    training: fx.Graph | str


class Stage(nn.Module):
    """Consecutive calls of a network: takes what is carried, one argument each, and returns what is carried further.

    Parameters and buffers have the names that they have in the network. `_source` is what the stage runs, as
    Python. These names are private, as a network may have a module `source`.
    """

    _source: str
    _graphs: StageGraphs
    _shared: Mapping[int, str] | None = None  # where it returns tensors that are one for all samples, and their lines

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


class StagePlan(NamedTuple):
    """What a stage is made of: calls of a trace, values that come in, and values that go out.

    A size among these is a tensor of bytes, (samples, size), that is carried for its shape alone.
    """

    trace: Trace
    calls: Sequence[int]
    incoming: Sequence[Value | SizeOf]
    outgoing: Sequence[Value | SizeOf]
    last: bool  # returns one tensor instead of a tuple
    input_names: Sequence[str] = ()
    shared: Mapping[int, str] = {}  # places among what goes out of tensors that are one for all samples, and lines
    carried_sizes: Mapping[SizeOf, Any] = {}  # how sizes of earlier tensors are computed from what comes in
    checks: Sequence[SizeCheck] = ()  # of sizes, in the order of their times

    def has_size(self, size: SizeOf) -> bool:
        """Check whether the tensor of this size is made here or comes in."""
        return size.value in self.incoming or size.value.call in self.calls


class NotPlainData(BadInput):
    """Stages that cannot be written as plain data; the network is cut again when they are loaded."""


def build(model: nn.Module, evaluation: StagePlan, training: StagePlan | BadInput) -> Stage:
    """Return the stage that runs one plan in evaluation mode and another in training mode, or refuses to train."""
    constants: dict[str, Any] = {}
    graph = _GraphBuilder(evaluation, constants).graph()
    other = str(training) if isinstance(training, BadInput) else _GraphBuilder(training, constants).graph()
    stage = stage_of(model, StageGraphs(graph, other), constants)
    stage._shared = evaluation.shared
    return stage


def stage_of(model: nn.Module, graphs: StageGraphs, constants: Mapping[str, Any]) -> Stage:
    """Return the stage that runs these graphs on the network's parameters, buffers and modules, and on constants."""
    kind: Any = type("Stage", (Stage,), {})  # torch.compile counts recompilations by code, not by module
    stage: Stage = kind()
    if constants:
        kept = nn.Module()
        stage.add_module(CONSTANTS, kept)
        for name, value in constants.items():
            if isinstance(value, Tensor):
                kept.register_buffer(name, value.detach(), persistent=False)
            else:
                setattr(kept, name, value)
    for node in (node for graph in graphs if isinstance(graph, fx.Graph) for node in graph.nodes):
        if node.op in ("call_module", "get_attr") and not str(node.target).startswith(f"{CONSTANTS}."):
            share(stage, model, str(node.target))
    evaluation = graphs.evaluation.python_code("self")
    training = None if isinstance(graphs.training, str) else graphs.training.python_code("self")
    kind._graphs, kind._source = graphs, evaluation.src
    kind.forward = _compiled(evaluation.src, evaluation.globals)
    if training is None or training.src != evaluation.src:
        kind.forward, kind._in_evaluation = _compiled(DISPATCH, {}), kind.forward
        kind._in_training = _compiled(training.src, training.globals) if training else _refusing(graphs.training)
        kind._source += training.src if training else ""
    return stage


def refuse_training(stage: nn.Module, reason: str) -> None:
    """Let a stage refuse to run in training mode; one that a cutter made by a hook, as its code is not ours."""
    if not isinstance(stage, Stage):
        stage.register_forward_pre_hook(RefusedTraining(reason))
        return
    kind: Any = type(stage)
    if not hasattr(kind, "_in_training"):
        kind.forward, kind._in_evaluation = _compiled(DISPATCH, {}), kind.forward
    kind._in_training = _refusing(reason)
    kind._graphs = StageGraphs(kind._graphs.evaluation, reason)


class RefusedTraining:
    """A hook that refuses to run a stage in training mode."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __call__(self, stage: nn.Module, carried: tuple[Tensor, ...]) -> None:
        """Raise if the stage is in training mode."""
        if stage.training:
            _refusing(self.reason)(stage)


HOOKS: dict[str, Callable[..., Any]] = {"sizes": FixedSizes, "refused": RefusedTraining}  # that are saved


def constants_of(stage: Stage) -> dict[str, Any]:
    """Return what a stage keeps that has no name in the network, by name."""
    if CONSTANTS not in stage._modules:
        return {}
    kept = stage.get_submodule(CONSTANTS)
    return {name: value for name, value in (kept.__dict__ | kept._buffers).items() if name.startswith("constant_")}


def share(stage: nn.Module, model: nn.Module, name: str) -> None:
    """Put a module, parameter or buffer of the network into the stage, under its name there."""
    ours, theirs = stage, model
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


def _refusing(reason: Any) -> Callable[..., Any]:
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
        self.sizes: dict[SizeOf, Any] = {}

    def graph(self) -> fx.Graph:
        """Return the graph: inputs restored to the network's layout, calls, outputs with the batch first."""
        plan = self.plan
        names = plan.input_names or [f"carried_{index}" for index in range(len(plan.incoming))]
        inputs = [self.nodes.placeholder(name) for name in names]
        self.inputs = list(zip(inputs, plan.incoming, strict=True))
        for node, item in self.inputs:
            if isinstance(item, SizeOf):
                self.sizes[item] = self._size_along(node, 1)
            else:
                self.made[item] = self._restored(node, item)
        checks = list(plan.checks)
        for index in plan.calls:
            while checks and checks[0].time <= index:
                self._check(checks.pop(0))
            call = plan.trace.calls[index]
            self.made[Value(index)] = self._detached(Value(index), self._cast(self._emitted(call), call.autocast))
        for check in checks:
            self._check(check)
        outgoing = [
            self._sized(item) if isinstance(item, SizeOf) else self._batch_first(self._node(item), item)
            for item in plan.outgoing
        ]
        self.nodes.output(outgoing[0] if plan.last else tuple(outgoing))
        return self.nodes

    def _layout(self, value: Value) -> Layout:
        return self.plan.trace.layout(value) or Layout()

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
        args, kwargs = map_aggregate((call.args, call.kwargs), self._argument)
        if isinstance(call.target, str):
            return self.nodes.call_module(call.target, args, kwargs)
        name = str(POWERS.get(call.target) or getattr(call.target, "__name__", ""))
        if name == "__get__":
            return self.nodes.call_function(getattr, (args[0], call.target.__self__.__name__))
        if name == "__set__":
            raise BadInput(f"an attribute of a tensor is set at {call.line}: cut elsewhere, or use register_cutter")
        if name.startswith("__") and hasattr(operator, name) and not kwargs:
            return self.nodes.call_function(getattr(operator, name), args)
        if getattr(torch.Tensor, name, None) == call.target:
            return self.nodes.call_method(name, args, kwargs)
        if name == "apply":  # of a torch.autograd.Function
            return self.nodes.call_function(operator.call, (self._fetched(self._constant(call.target)), *args), kwargs)
        return self.nodes.call_function(call.target, args, kwargs)

    def _cast(self, node: fx.Node, states: tuple[AutocastState, ...]) -> fx.Node:
        """Return a call that runs under torch.autocast as the network's code says; attributes need not."""
        if not states or node.target in (getattr, check_outcome):
            return node
        args, kwargs, function = node.args, node.kwargs, node.target
        self.nodes.erase_node(node)
        if node.op == "call_module":
            args, function = (self._fetched(str(node.target)), *args), operator.call
        elif node.op == "call_method":
            function = getattr(Tensor, str(node.target))
        return self.nodes.call_function(under_autocast(function, states), args, kwargs)

    def _check(self, check: SizeCheck) -> None:
        numbers = self._argument(check.left), self._argument(check.right)
        outcome = self.nodes.call_function(check.function, numbers)
        self.nodes.call_function(check_size, (outcome, check.outcome, *numbers, check.line))

    def _argument(self, item: Any) -> Any:
        match item:
            case Value():
                return self._node(item)
            case StateName():
                return self._fetched(item.name)
            case ConstantTensor():
                return self._fetched(self._constant(item.tensor))
            case SizeOf():
                return self._size(item)
            case SizeExpression():
                return self.nodes.call_function(item.function, tuple(map(self._argument, item.operands)))
            case BatchMultiple():
                return self._batch_multiple(item)
            case NetworkDtype():
                return self._property("dtype") or item.recorded
            case torch.device() if item == self.plan.trace.device:
                return self._property("device")
        return item if isinstance(item, LITERALS) else self._fetched(self._constant(item))

    def _node(self, value: Value) -> fx.Node:
        if value not in self.made:
            *path, key = value.path
            inner = self._node(Value(value.call, tuple(path)))
            self.made[value] = self._detached(value, self.nodes.call_function(operator.getitem, (inner, key)))
        return self.made[value]

    def _size(self, size: SizeOf) -> Any:
        if size not in self.sizes:
            if self.plan.trace.sizes(size) == BATCHES:
                self.sizes[size] = self._property("shape")
            elif size in self.plan.carried_sizes:
                self.sizes[size] = self._argument(self.plan.carried_sizes[size])
            elif isinstance(size, NumberOf):
                self.sizes[size] = self._node(size.value)
            else:
                self.sizes[size] = self._size_along(self._node(size.value), size.axis)
        return self.sizes[size]

    def _size_along(self, node: fx.Node, axis: int) -> fx.Node:
        shape = self.nodes.call_function(getattr, (node, "shape"))
        return self.nodes.call_function(operator.getitem, (shape, axis))

    def _sized(self, size: SizeOf) -> fx.Node:
        """Return a tensor of this size along its second axis."""
        shape = self._property("shape"), self._size(size)
        terms: dict[str, Any] = {"dtype": torch.uint8, "device": self._property("device")}
        return self.nodes.call_function(torch.zeros, (shape,), terms)

    def _detached(self, value: Value, node: fx.Node) -> fx.Node:
        """Return a tensor without a gradient if the network computes it without one."""
        trace = self.plan.trace
        detached = trace.training and value in trace.shapes and not trace.calls[value.call].has_gradients
        return self.nodes.call_method("detach", (node,)) if detached else node

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


@cache
def under_autocast(function: Any, states: tuple[AutocastState, ...]) -> Any:
    """Return a function that runs another one with torch.autocast as stated for each kind of device."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            return inner(*args, **kwargs)

    (device, dtype, enabled), *further = states
    inner = under_autocast(function, tuple(further)) if further else function
    run.function, run.states = function, states  # type: ignore[attr-defined]
    return run


def cut_data(stages: Sequence[nn.Module]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return stages of one network as plain data and constant tensors; raise NotPlainData if that cannot be."""
    traced = [stage for stage in stages if isinstance(stage, Stage)]
    if len(traced) < len(stages):
        raise NotPlainData("a registered cutter made the stages")
    tensors: dict[str, Tensor] = {}
    for index, stage in enumerate(traced):
        for name, value in constants_of(stage).items():
            if not isinstance(value, Tensor):
                raise NotPlainData(f"the network is called with a {type(value).__name__}")
            tensors[f"{index}.{name}"] = value
    return {"stages": [_stage_data(stage) for stage in traced]}, tensors


def stages_from_data(network: nn.Module, data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[nn.Module]:
    """Return the stages that `cut_data` described, on the modules and parameters of the network; nothing is run."""
    stages: list[nn.Module] = []
    for index, described in enumerate(data["stages"]):
        prefix = f"{index}."
        constants = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        evaluation = _graph(described["evaluation"], constants)
        training = described.get("training", described["evaluation"])
        graphs = StageGraphs(evaluation, training if isinstance(training, str) else _graph(training, constants))
        stage = stage_of(network, graphs, constants)
        for name in HOOKS.keys() & described.keys():
            stage.register_forward_pre_hook(HOOKS[name](**described[name]))
        stages.append(stage)
    return stages


def _stage_data(stage: Stage) -> dict[str, Any]:
    """Return a stage as data: "training" only where it differs, or says why the stage cannot be trained."""
    evaluation, training = stage._graphs
    data: dict[str, Any] = {"evaluation": _nodes(evaluation)}
    other = training if isinstance(training, str) else _nodes(training)
    if other != data["evaluation"]:
        data["training"] = other
    return data | _hooks(stage)


def _hooks(stage: nn.Module) -> dict[str, Any]:
    names = {kind: name for name, kind in HOOKS.items()}
    return {names[type(hook)]: vars(hook) for hook in stage._forward_pre_hooks.values() if type(hook) in names}


def _nodes(graph: fx.Graph) -> list[list[Any]]:
    """Return a graph as a list of [operation, target, arguments, keyword arguments]."""
    numbers = {node: index for index, node in enumerate(graph.nodes)}
    data = []
    for node in graph.nodes:
        target = _function_name(node.target) if callable(node.target) else node.target
        keywords = {name: _encoded(item, numbers) for name, item in node.kwargs.items()}
        data.append([node.op, target, _encoded(list(node.args), numbers), keywords])
    return data


def _graph(nodes: Sequence[Any], constants: Mapping[str, Tensor]) -> fx.Graph:
    """Return the graph of a list of nodes, each of which was checked against the lists above."""
    graph, made = fx.Graph(), list[fx.Node]()
    for op, target, args, kwargs in nodes:
        checked = _checked_target(op, target, args, constants)
        if not all(map(_is_name, kwargs)):
            raise BadInput(f"the graph names arguments {sorted(kwargs)}: some are not names")
        keywords = {name: _decoded(item, made) for name, item in kwargs.items()}
        made.append(graph.create_node(op, checked, tuple(_decoded(item, made) for item in args), keywords))
    return graph


@cache
def _functions() -> dict[str, Callable[..., Any]]:
    """Return the functions that a graph may name: what torch lets others override, factories and operators."""
    overridable = {function for functions in get_overridable_functions().values() for function in functions}
    found: dict[str, Callable[..., Any]] = {
        f"{namespace.__name__}.{name}": function
        for namespace in NAMESPACES
        for name, function in vars(namespace).items()
        if not name.startswith("_") and getattr(function, "__hash__", None) and function in overridable
    }
    in_place = [f"{name}_" for name in vars(torch) if f"torch.{name}" in found and hasattr(torch, f"{name}_")]
    found |= {f"torch.{name}": getattr(torch, name) for name in (*FACTORIES, *in_place)}
    found |= {f"operator.{name}": getattr(operator, name) for name in OPERATORS}
    own: dict[str, Callable[..., Any]] = {"alight.check_outcome": check_outcome, "alight.check_size": check_size}
    return found | own | {"math.ceil": math.ceil, "math.floor": math.floor}


@cache
def _methods() -> set[str]:
    """Return the methods of tensors that a graph may name."""
    overridable = set(get_overridable_functions()[torch.Tensor])
    named = {name for name in dir(Tensor) if not name.startswith("_") and getattr(Tensor, name) in overridable}
    return (named | METHODS) - NOT_METHODS


def _function_name(function: Any) -> str:
    if function is getattr:
        return "getattr"
    if states := getattr(function, "states", ()):
        return " under ".join([_cast_name(function.function), *(f"{name} {dtype} {on}" for name, dtype, on in states)])
    for name, known in _functions().items():
        if known == function:
            return name
    raise NotPlainData(f"the network calls {getattr(function, '__qualname__', function)!s}")


def _cast_name(function: Any) -> str:
    """Return the name of what runs under torch.autocast: a call of a module, a method of tensors, or a function."""
    if function is operator.call:
        return "module"
    name = str(getattr(function, "__name__", ""))
    is_method = name in _methods() and getattr(Tensor, name) == function
    return f".{name}" if is_method else _function_name(function)


def _cast_function(target: str) -> Any:
    """Return what `_function_name` wrote of a function that runs under torch.autocast."""
    name, *states = target.split(" under ")
    known = {"module": operator.call, **_functions(), **{f".{each}": getattr(Tensor, each) for each in _methods()}}
    described = [state.split(" ") for state in states]
    if name not in known or any(len(each) != 3 or each[1] not in TORCH_VALUES for each in described):
        raise BadInput(f"the graph calls {target!r}, which is not a tensor function that alight knows")
    parsed = tuple((kind, TORCH_VALUES[dtype], on == "True") for kind, dtype, on in described)
    return under_autocast(known[name], parsed)


def _checked_target(op: str, target: Any, args: Sequence[Any], constants: Mapping[str, Tensor]) -> Any:
    """Return the target of a node if it is one that a graph may have."""
    match op:
        case "call_function" if target == "getattr":
            if len(args) != 2 or args[1] not in ATTRIBUTES:
                raise BadInput(f"the graph reads the attribute {args[1:]!r}, which is not one of {sorted(ATTRIBUTES)}")
            return getattr
        case "call_function" if target in _functions():
            return _functions()[target]
        case "call_function" if " under " in str(target):
            return _cast_function(target)
        case "call_method" if target in _methods():
            return target
        case "get_attr" if str(target).startswith(f"{CONSTANTS}.") and target.partition(".")[2] not in constants:
            raise BadInput(f"the graph uses {target!r}, and there is no such constant")
        case "call_module" | "get_attr":
            return str(target)  # which is looked up in the network before code is made of it
        case "placeholder" if _is_name(target):
            return target
        case "output":
            return "output"
    raise BadInput(f"the graph has a {op} of {target!r}, which is not a tensor function or name that alight knows")


def _is_name(text: Any) -> bool:
    return isinstance(text, str) and text.isidentifier() and not keyword.iskeyword(text)


def _encoded(item: Any, numbers: Mapping[fx.Node, int]) -> Any:
    """Return an argument as JSON has it: what JSON does not know is an object with one key, its kind."""
    match item:
        case fx.Node():
            return {"node": numbers[item]}
        case list():
            return [_encoded(part, numbers) for part in item]
        case float() if math.isfinite(item):
            return float(item)
        case None | bool() | int() | str():
            return item
    for kind, (types, content, _) in ARGUMENTS.items():
        if isinstance(item, types):
            return {kind: _encoded(content(item), numbers)}
    raise NotPlainData(f"the network is called with a {type(item).__name__}")


def _decoded(item: Any, made: Sequence[fx.Node]) -> Any:
    """Return the argument that `_encoded` wrote."""
    if isinstance(item, list):
        return [_decoded(part, made) for part in item]
    if not isinstance(item, dict):
        return item
    ((kind, content),) = item.items()
    if kind == "node":
        return made[content]
    if kind not in ARGUMENTS:
        raise BadInput(f"the graph holds a {kind!r}, which alight does not know")
    return ARGUMENTS[kind][2](_decoded(content, made))
