"""Stages as plain data, so that a saved model is loaded without tracing its network again.

Only data is read: a graph is a list of nodes that can name tensor functions, methods and attributes of a fixed list,
and modules and parameters that the network has. Anything else is refused, so a file cannot name code to run.
"""

import keyword
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import get_overridable_functions

from alight.cutting.cut import FixedLength
from alight.cutting.encoders import EncoderStage, cut_text_encoder
from alight.cutting.stages import CONSTANTS, Stage, StageGraphs, constants_of, stage_of
from alight.errors import BadInput

NAMESPACES = {
    "torch": torch,
    "torch.functional": torch.functional,
    "torch.nn.functional": torch.nn.functional,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.special": torch.special,
}
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
    "__rpow__", "__rrshift__", "__rsub__", "__rtruediv__", "__rxor__", "__reversed__",
}  # fmt: skip
NOT_METHODS = {  # of tensors that return something else than tensors, take functions, or change more than the tensor
    "apply_", "backward", "data_ptr", "is_shared", "item", "map2_", "map_", "module_load", "numpy", "pin_memory",
    "record_stream", "register_hook", "register_post_accumulate_grad_hook", "set_", "share_memory_", "storage",
    "storage_type", "tolist", "untyped_storage",
}  # fmt: skip
TORCH_KINDS = (torch.dtype, torch.layout, torch.memory_format)
TORCH_VALUES = {str(value): value for value in vars(torch).values() if isinstance(value, TORCH_KINDS)}


class NotPlainData(BadInput):
    """Stages that cannot be written as plain data; the network is cut again when they are loaded."""


def cut_data(stages: Sequence[nn.Module]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return stages of one network as plain data and constant tensors; raise NotPlainData if that cannot be."""
    if all(isinstance(stage, EncoderStage) for stage in stages):
        return {"kind": "encoder", "direct": bool(stages[0].direct)}, {}
    traced = [stage for stage in stages if isinstance(stage, Stage)]
    if len(traced) < len(stages):
        raise NotPlainData("a registered cutter made the stages")
    tensors: dict[str, Tensor] = {}
    for index, stage in enumerate(traced):
        for name, value in constants_of(stage).items():
            if not isinstance(value, Tensor):
                raise NotPlainData(f"the network is called with a {type(value).__name__}")
            tensors[f"{index}.{name}"] = value
    return {"kind": "traced", "stages": [_stage_data(stage) for stage in traced]}, tensors


def stages_from_data(
    network: nn.Module, data: Mapping[str, Any], tensors: Mapping[str, Tensor], after: Sequence[str], example: Any
) -> list[nn.Module]:
    """Return the stages that `cut_data` described, on the modules and parameters of the network; nothing is run."""
    if data["kind"] == "encoder":
        return [*cut_text_encoder(network, after, example, direct=bool(data["direct"]))]
    stages: list[nn.Module] = []
    for index, described in enumerate(data["stages"]):
        prefix = f"{index}."
        constants = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        evaluation = _graph(described["evaluation"], constants)
        training = described.get("training", described["evaluation"])
        graphs = StageGraphs(evaluation, training if isinstance(training, str) else _graph(training, constants))
        stage = stage_of(network, graphs, constants)
        if "length" in described:
            stage.register_forward_pre_hook(FixedLength(int(described["length"])))
        stages.append(stage)
    return stages


def _stage_data(stage: Stage) -> dict[str, Any]:
    """Return a stage as data: "training" only where it differs, or says why the stage cannot be trained."""
    evaluation, training = stage.graphs
    data: dict[str, Any] = {"evaluation": _nodes(evaluation)}
    other = training if isinstance(training, str) else _nodes(training)
    if other != data["evaluation"]:
        data["training"] = other
    for hook in stage._forward_pre_hooks.values():
        if isinstance(hook, FixedLength):
            data["length"] = hook.length
    return data


def _nodes(graph: fx.Graph) -> list[list[Any]]:
    """Return a graph as a list of [operation, target, arguments, keyword arguments]."""
    numbers = {node: index for index, node in enumerate(graph.nodes)}
    return [
        [
            node.op,
            _function_name(node.target) if callable(node.target) else node.target,
            [_encoded(item, numbers) for item in node.args],
            {name: _encoded(item, numbers) for name, item in node.kwargs.items()},
        ]
        for node in graph.nodes
    ]


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
        f"{prefix}.{name}": function
        for prefix, namespace in NAMESPACES.items()
        for name, function in vars(namespace).items()
        if not name.startswith("_") and getattr(function, "__hash__", None) and function in overridable
    }
    in_place = [f"{name}_" for name in vars(torch) if f"torch.{name}" in found and hasattr(torch, f"{name}_")]
    found |= {f"torch.{name}": getattr(torch, name) for name in (*FACTORIES, *in_place)}
    return found | {f"operator.{name}": getattr(operator, name) for name in OPERATORS}


@cache
def _methods() -> set[str]:
    """Return the methods of tensors that a graph may name."""
    overridable = set(get_overridable_functions()[torch.Tensor])
    named = {name for name in dir(Tensor) if not name.startswith("_") and getattr(Tensor, name) in overridable}
    return (named | METHODS) - NOT_METHODS


def _function_name(function: Any) -> str:
    if function is getattr:
        return "getattr"
    for name, known in _functions().items():
        if known == function:
            return name
    raise NotPlainData(f"the network calls {getattr(function, '__qualname__', function)!s}")


def _checked_target(op: str, target: Any, args: Sequence[Any], constants: Mapping[str, Tensor]) -> Any:
    """Return the target of a node if it is one that a graph may have."""
    match op:
        case "call_function" if target == "getattr":
            if len(args) != 2 or args[1] not in ATTRIBUTES:
                raise BadInput(f"the graph reads the attribute {args[1:]!r}, which is not one of {sorted(ATTRIBUTES)}")
            return getattr
        case "call_function" if target in _functions():
            return _functions()[target]
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

    def several(items: Iterable[Any]) -> list[Any]:
        return [_encoded(part, numbers) for part in items]

    match item:
        case fx.Node():
            return {"node": numbers[item]}
        case list():
            return several(item)
        case tuple():
            return {"tuple": several(item)}
        case dict():
            return {"dict": [several(pair) for pair in item.items()]}
        case slice():
            return {"slice": several((item.start, item.stop, item.step))}
        case torch.device():
            return {"device": str(item)}
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {"torch": str(item)}
        case float():
            return float(item) if math.isfinite(item) else {"float": repr(float(item))}
        case None | bool() | int() | str():
            return item
    if item is ...:
        return {"ellipsis": None}
    raise NotPlainData(f"the network is called with a {type(item).__name__}")


def _decoded(item: Any, made: Sequence[fx.Node]) -> Any:
    """Return the argument that `_encoded` wrote."""
    if isinstance(item, list):
        return [_decoded(part, made) for part in item]
    if not isinstance(item, dict):
        return item
    ((kind, content),) = item.items()
    match kind:
        case "node":
            return made[content]
        case "tuple":
            return tuple(_decoded(part, made) for part in content)
        case "dict":
            return {_decoded(key, made): _decoded(part, made) for key, part in content}
        case "slice":
            return slice(*(_decoded(part, made) for part in content))
        case "float":
            return float(content)
        case "device":
            return torch.device(content)
        case "torch":
            return TORCH_VALUES[content]
        case "ellipsis":
            return ...
    raise BadInput(f"the graph holds a {kind!r}, which alight does not know")
