"""The modules of stages as plain data, so that a network is loaded without the code that it was written in.

Stages that call nothing but modules of `torch.nn` are described completely by their graphs, by the class and the
settings of these modules, and by the tensors. Only data is read: a class is looked up among those of `torch.nn`, and
settings are numbers, texts and tuples of them.
"""

import pkgutil
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from alight.cutting.stages import CONSTANTS, NotPlainData, Stage, share
from alight.cutting.tracing import CONTAINERS
from alight.errors import BadInput

PACKAGE = "torch.nn.modules"
STATE = frozenset(nn.Module().__dict__)  # what every module has
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
Described = dict[str, Any]


def is_describable(module: nn.Module) -> bool:
    """Return whether a module is one of torch's own with plain settings, and all modules in it are.

    >>> is_describable(nn.Conv2d(3, 8, 3)), is_describable(nn.Sequential(nn.ReLU())), is_describable(nn.LSTM(2, 2))
    (True, False, False)
    """
    try:
        _described(module)
    except NotPlainData:
        return False
    return True


def modules_data(stages: Sequence[nn.Module]) -> list[dict[str, Described]]:
    """Return the modules that each stage calls, by name; raise NotPlainData if one is not torch's own."""
    described = []
    for stage in stages:
        if not isinstance(stage, Stage):
            raise NotPlainData("a registered cutter made the stages")
        graphs = [graph for graph in stage._graphs if isinstance(graph, fx.Graph)]
        known = {name for name, _ in stage.named_modules(remove_duplicate=False)}
        fetched = {str(node.target) for graph in graphs for node in graph.nodes if node.op == "get_attr"}
        called = {str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_module"}
        called |= fetched & known  # to be called under torch.autocast
        described.append({name: _described(stage.get_submodule(name)) for name in sorted(called)})
    return described


def buffers_data(stages: Sequence[nn.Module]) -> tuple[list[list[str]], dict[str, Tensor]]:
    """Return names of the buffers that each stage saves, and by stage and name those that it has without saving."""
    saved: list[list[str]] = []
    others: dict[str, Tensor] = {}
    for index, stage in enumerate(stages):
        state = stage.state_dict()
        buffers = {name: each for name, each in stage.named_buffers(remove_duplicate=False) if each is not None}
        saved.append([name for name in buffers if name in state])
        kept = {name: each for name, each in buffers.items() if name not in state}
        others |= {f"{index}.{name}": each for name, each in kept.items() if not name.startswith(f"{CONSTANTS}.")}
    return saved, others


def skeleton(
    modules: Sequence[Mapping[str, Described]], buffers: Sequence[Sequence[str]], state: Mapping[str, Tensor],
    others: Mapping[str, Tensor],
) -> nn.Module:  # fmt: skip
    """Return modules, parameters and buffers under the names that they had in the network; it cannot run by itself.

    `state` and `others` have tensors by stage and name, as in "0.layer1.weight"; `others` are not saved. A tensor that
    has several names is one tensor.
    """
    root = nn.Module()
    made: dict[int, nn.Parameter] = {}
    for described in modules:
        for name, each in described.items():
            owner, last = _owner(root, name)
            if last not in owner._modules:
                owner.add_module(last, _module(each))
    for names, persistent in ((state, True), (others, False)):
        for place, tensor in names.items():
            index, _, name = place.partition(".")
            owner, last = _owner(root, name)
            if not persistent or name in buffers[int(index)]:
                owner.register_buffer(last, tensor, persistent=persistent)
            else:
                floating = tensor.is_floating_point() or tensor.is_complex()
                same = made.setdefault(id(tensor), nn.Parameter(tensor, requires_grad=floating))
                owner.register_parameter(last, same)
    return root


def complete(stages: Sequence[nn.Module], network: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give each stage what its network has under its name, too, although the stage does not use it."""
    for index, stage in enumerate(stages):
        prefix, own = f"{index}.", stage.state_dict()
        names = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]
        for name in names:
            if name not in own:
                share(stage, network, name)


@cache
def _classes() -> dict[str, type[nn.Module]]:
    """Return torch's own modules by their full name."""
    found: dict[str, type[nn.Module]] = {}
    for each in pkgutil.iter_modules(nn.modules.__path__, f"{PACKAGE}."):
        for value in vars(sys.modules[each.name]).values() if each.name in sys.modules else ():
            if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == each.name:
                found[f"{each.name}.{value.__name__}"] = value
    return found


def _described(module: nn.Module) -> Described:
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if _classes().get(name) is not kind or isinstance(module, CONTAINERS):
        raise NotPlainData(f"{kind.__name__} is not a layer of torch.nn")
    if any(getattr(module, hooks, None) for hooks in HOOKS):
        raise NotPlainData(f"a {kind.__name__} has hooks")
    settings = {key: _plain(value, kind) for key, value in vars(module).items() if key not in STATE}
    absent = [key for key, value in (module._parameters | module._buffers).items() if value is None]
    children = {key: _described(child) for key, child in module._modules.items() if child is not None}
    return {"class": name, "settings": settings, "absent": absent, "modules": children}


def _plain(value: Any, kind: type) -> Any:
    """Return a setting as JSON has it: tuples are marked."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) is tuple:
        return {"tuple": [_plain(each, kind) for each in value]}
    if type(value) is list:
        return [_plain(each, kind) for each in value]
    raise NotPlainData(f"a {kind.__name__} has a {type(value).__name__}")


def _setting(value: Any) -> Any:
    """Return the setting that `_plain` wrote."""
    if isinstance(value, dict):
        return tuple(_setting(each) for each in value["tuple"])
    return [_setting(each) for each in value] if isinstance(value, list) else value


def _module(described: Described) -> nn.Module:
    """Return a module of torch with these settings, without tensors; its own constructor is not run."""
    if described["class"] not in _classes():
        raise BadInput(f"torch {torch.__version__} has no module {described['class']!r}")
    kind = _classes()[described["class"]]
    made: nn.Module = kind.__new__(kind)
    nn.Module.__init__(made)
    for name, value in described["settings"].items():
        if name in STATE or not name.isidentifier():
            raise BadInput(f"a module cannot have the setting {name!r}")
        made.__dict__[name] = _setting(value)
    for name in described["absent"]:
        made.register_parameter(name, None)
    for name, child in described["modules"].items():
        made.add_module(name, _module(child))
    return made


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that has this name's last part, made if need be, and that part."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root, last
