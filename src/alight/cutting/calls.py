"""Record one run of a network: every torch function that its own code calls, and every module that stays closed.

Tensors are known by identity, so any Python is allowed in between, as long as it never reads their content.
"""

import ast
import dataclasses
import linecache
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from traceback import walk_stack
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from alight.cutting.flops import like_input
from alight.cutting.running import Inputs, own_line, replaced, without_shortcuts
from alight.cutting.sizes import (
    NumberOf,
    SizeCheck,
    SizeExpression,
    SizeOf,
    TracedFloat,
    TracedInt,
    expression_of,
    functions_that_fix_sizes,
    traced_number,
    untraced,
)
from alight.errors import BadInput

CONTENT_READS = {  # functions that turn the content of a tensor into a number
    "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "__array__",
    "item", "tolist", "numpy", "equal", "allclose", "is_nonzero",
}  # fmt: skip
OF_SIZES = {  # functions of a tensor that read its sizes, dtype and device alone
    "empty_like", "full_like", "ones_like", "zeros_like",
    "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros",
}  # fmt: skip
RANDOM = re.compile("rand|bernoulli|dropout|normal|uniform|multinomial|poisson|exponential_")
SIZED_BY_CONTENT = re.compile("nonzero|argwhere|where|unique.*|masked_select|bincount")  # results of such functions
IsOpened = Callable[[str], bool]  # is the module of this name opened?
AutocastState = tuple[str, torch.dtype, bool]  # kind of device, dtype, and whether torch.autocast is on


@dataclass(frozen=True)
class Value:
    """A tensor, identified by the call that made it (-1: the inputs) and the path to it inside the call's result."""

    call: int
    path: tuple[Any, ...] = ()


@dataclass(frozen=True)
class StateName:
    """A parameter, buffer or module of the network, by name."""

    name: str


@dataclass(frozen=True)
class ConstantTensor:
    """A tensor that is neither computed nor named."""

    tensor: Tensor


Item = TypeVar("Item", Value, Tensor)


@dataclass
class Call:
    """One call of a submodule, by name, or of a torch function; arguments hold symbols in the place of tensors."""

    target: Any
    args: Any
    kwargs: Any
    line: str
    tainted: bool  # depends on the content of the input, or on random numbers
    values: set[Value]  # that it takes
    sizes: set[SizeOf]  # that its arguments are computed from
    changed: set[int]  # storages that it writes to
    changes_state: bool  # of the network
    has_gradients: bool  # whether gradients are computed there
    autocast: tuple[AutocastState, ...]  # what the network's code has said for devices, the innermost for each
    storages: set[int] = field(default_factory=set)  # of its results


class ModuleEnd(NamedTuple):
    """Where a module returned: the number of calls until then, and its result."""

    time: int
    result: Any


class WritesParameters(BadInput):
    """A network that changes its own parameters when it is run in evaluation."""


class NeedsTooMuchMemory(BadInput):
    """A network of which a run with data cannot be kept in memory."""


class Untraceable(Exception):
    """More modules must be opened to see where a tensor comes from, or whether it depends on the input."""


def record_calls(
    model: nn.Module, inputs: Inputs, batch: tuple[Tensor, ...], watched: Collection[str], is_opened: IsOpened
) -> "CallRecorder":
    """Run the network once and record its calls, with the ends of watched modules."""
    recorder = CallRecorder(model, batch, watched, is_opened)
    contexts = fixed_masks(), without_shortcuts(model), replaced(functions_that_fix_sizes())
    versions = {name: each._version for name, each in model.named_parameters()}
    watched_calls = recorder.module_calls_recorded(), recorder.autocast_noted()
    with torch.enable_grad(), contexts[0], contexts[1], contexts[2], watched_calls[0], watched_calls[1], recorder:
        result = inputs.run(model, batch)
    _check_no_parameter_is_written(model, versions)
    recorder.closed = 1  # the network may have kept sizes, which later runs compare
    recorder.output = recorder.encoded(result)
    return recorder


def _check_no_parameter_is_written(model: nn.Module, versions: Mapping[str, int]) -> None:
    """Raise if a run has changed parameters, but those of embeddings with a largest norm, whose rows it scales."""
    for name, each in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if each._version != versions[name] and getattr(owner, "max_norm", None) is None and not model.training:
            raise WritesParameters(
                f"the network writes to its parameter {name!r} in evaluation mode, as layers do that set themselves by"
                " their first batch: run it once on your data before heads are attached, or make it a buffer"
            )


def fixed_masks() -> AbstractContextManager[None]:
    """Let transformers build attention masks as it does for export, without a look at what they hide."""
    masks = sys.modules.get("transformers.masking_utils")  # of no use unless something has imported it
    return replaced([(masks, "is_tracing", lambda *_, **__: True)] if hasattr(masks, "is_tracing") else [])


class CallRecorder(TorchFunctionMode):
    """Records the calls of one run."""

    output: Any

    def __init__(
        self, model: nn.Module, tensors: tuple[Tensor, ...], watched: Collection[str], is_opened: IsOpened
    ) -> None:
        super().__init__()
        self.modules = {id(module): name for name, module in reversed([*model.named_modules(remove_duplicate=False)])}
        state = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self.state = {id(tensor): name for name, tensor in reversed(state)}
        self.state_storages = {_storage(tensor) for _, tensor in state}
        self.watched, self.is_opened = set(watched), is_opened
        self.calls: list[Call] = []
        self.ends: dict[str, list[ModuleEnd]] = {name: [] for name in watched}
        self.values: dict[int, Value] = {}
        self.shapes: dict[Value, tuple[int, ...]] = {}
        self.numbers: dict[Value, int] = {}
        self.dtypes: dict[Value, torch.dtype] = {}
        self.tainted: set[Value] = set()
        self.tainted_storages: set[int] = set()
        self.constants: dict[int, Tensor] = {}
        self.alive: list[Any] = []  # so that no identity is used twice
        self.weighted: set[int] = set()  # identities of tensors computed from the network's weights
        self.sized_by_content: set[int] = set()
        self.closed = 0  # how deep inside closed modules
        self.largest = 0  # bytes of a tensor with data
        self.kept: set[int] = set()  # storages that are kept alive
        self.free = 2**62 if tensors[0].is_meta else _memory() // 4  # bytes for them; gradients keep as much again
        self.autocast: list[AutocastState] = []  # that the network's code has entered and not left
        self.running: Any = None  # what was called last of all that is recorded
        self.inside: set[tuple[Any, str]] = set()  # closed modules, and names of functions that they call
        self.checks: dict[Any, tuple[SizeCheck, tuple[Any, Any]]] = {}  # comparisons of sizes, with the numbers
        self.inputs = [Value(-1, (index,)) for index in range(len(tensors))]
        for tensor, value in zip(tensors, self.inputs, strict=True):
            self._register(tensor, value, tainted=True)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.closed:
            self.inside.add((self.running, getattr(func, "__name__", "")))
            quick = quick_result(func, args)
            result = func(*args, **kwargs) if quick is None else quick
            self._note_memory(result)
            return result
        if getattr(func, "__name__", "") == "__iter__":
            return iter(self._recorded(Tensor.unbind, Tensor.unbind, (*args, 0), {}))
        return self._recorded(func, func, args, kwargs)

    def _note_memory(self, result: Any) -> None:
        if type(result) is Tensor and not result.is_meta:
            self.largest = max(self.largest, result.untyped_storage().nbytes())

    def module_calls_recorded(self) -> AbstractContextManager[None]:
        """Record calls of modules too."""
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self.modules.get(id(module))
            if self.closed or name is None:
                return original(module, *args, **kwargs)
            if self.is_opened(name):
                result = original(module, *args, **kwargs)
            else:
                result = self._recorded(name, partial(original, module), args, kwargs)
            if name in self.watched:
                with self._unrecorded():
                    self.ends[name].append(ModuleEnd(len(self.calls), self.encoded(result)))
            return result

        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:  # with a gradient of its own
            run = own_apply.__get__(None, function)
            return run(*args, **kwargs) if self.closed else self._recorded(run, run, args, kwargs)

        def write(module: nn.Module, attribute: str, value: Any) -> None:
            name = self.modules.get(id(module))
            if not self.closed and name is not None and not self.is_opened(name) and attribute != "training":
                with self._unrecorded():
                    line = _line()
                raise Untraceable(f"the network writes {attribute!r} into module {name!r}, which reads it, at {line}")
            own_write(module, attribute, value)

        own_apply, own_write = vars(torch.autograd.Function)["apply"], nn.Module.__setattr__
        changes = (nn.Module, "__call__", call), (torch.autograd.Function, "apply", classmethod(apply))
        return replaced([*changes, (nn.Module, "__setattr__", write)])

    def autocast_noted(self) -> AbstractContextManager[None]:
        """Note what the network's code says to torch.autocast."""

        def enter(context: torch.autocast) -> Any:
            if not self.closed:
                self.autocast.append((context.device, context.fast_dtype or torch.float32, context._enabled))
            return own_enter(context)

        def leave(context: torch.autocast, *error: Any) -> Any:
            if not self.closed:
                self.autocast.pop()
            return own_leave(context, *error)

        own_enter: Any = torch.autocast.__enter__
        own_leave: Any = torch.autocast.__exit__
        return replaced([(torch.autocast, "__enter__", enter), (torch.autocast, "__exit__", leave)])

    def _unrecorded(self) -> AbstractContextManager[None]:
        return replaced([(self, "closed", self.closed + 1)])

    def _recorded(self, target: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call, record it, and return its result; tensors in it that were known get a new identity."""
        with self._unrecorded():
            taken = _tensors_in((args, kwargs))
            function = "" if isinstance(target, str) else getattr(target, "__name__", str(target))
            if function in CONTENT_READS and (read := self._content_in(taken)):
                if len(read) == 1 and isinstance(outcome := _asserted(run, args, kwargs), bool):
                    return self._checked(outcome, read[0])
                self._check_reads_no_content(function, read)
            versions = [_version(tensor) for tensor in taken]
            encoded = () if function == "__get__" else self.encoded((args, kwargs))  # most attributes are no tensors
            self.running = target if isinstance(target, str) else None
            result = run(*args, **kwargs)
            self.running = None
            changed = {_storage(tensor) for tensor, old in zip(taken, versions, strict=True) if _version(tensor) != old}
            if not changed and not _tensors_in(result):
                return self._with_sizes(function, args, kwargs, result)
            call = self._call(target, function, taken, encoded or self.encoded((args, kwargs)), changed)
            self.calls.append(call)
            result = self._renewed(result, Value(len(self.calls) - 1), call.tainted)
            self._mark(call, function, taken, _tensors_in(result))
            return result

    def _mark(self, call: Call, function: str, taken: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Note whether tensors that a call has made come from weights, and whether their sizes come from content."""
        call.storages = set(map(_storage, made))
        if not function or any(map(self._is_weighted, taken)):
            self.weighted.update(map(id, made))
        if call.tainted and (SIZED_BY_CONTENT.fullmatch(function) or self._is_masked(function, taken)):
            self.sized_by_content.update(map(id, made))

    def _content_in(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors that depend on the content of the input or of weights."""
        return [each for each in tensors if self._is_tainted(each) or self._is_weighted(each)]

    def _checked(self, outcome: bool, condition: Tensor) -> bool:
        """Return what an assertion has read, and record that it has to be the same in every batch."""
        arguments = *self.encoded((condition, outcome)), _line_without_folder()
        call = self._call(check_outcome, "check_outcome", [condition], (arguments, {}), set())
        call.tainted = True
        self.calls.append(call)
        return outcome

    def _check_reads_no_content(self, function: str, taken: Sequence[Tensor]) -> None:
        for is_read, content in ((self._is_tainted, "a tensor"), (self._is_weighted, "its weights")):
            if any(map(is_read, taken)):
                raise Untraceable(f"the network asks for the content of {content} ({function}) at {_line()}")

    def _call(self, target: Any, function: str, taken: Sequence[Tensor], encoded: Any, changed: set[int]) -> Call:
        """Return the call of these arguments, which writes to the changed storages."""
        tainted = bool(RANDOM.search(function)) or any(map(self._is_tainted, taken))
        if tainted:
            self.tainted_storages |= changed
        inputs, keywords = encoded
        return Call(
            target,
            inputs,
            keywords,
            line=_line(),
            tainted=tainted,
            values={self.values[id(tensor)] for tensor in taken if id(tensor) in self.values},
            sizes=set(sizes_in(encoded)),
            changed=changed,
            changes_state=bool(changed & self.state_storages),
            has_gradients=torch.is_grad_enabled(),
            autocast=tuple({state[0]: state for state in self.autocast}.values()),
        )

    def _with_sizes(self, function: str, args: Any, kwargs: Any, result: Any) -> Any:
        """Return sizes that were read of a tensor as numbers that remember it; any other result unchanged."""
        value = self.values.get(id(args[0])) if args else None
        if value is None:
            return result
        if id(args[0]) in self.sized_by_content and function in ("__get__", "size", "numel", "nelement", "__len__"):
            raise Untraceable(f"the network asks for a size that follows the content of a tensor at {_line()}")

        def size(axis: int) -> Any:
            return traced_number(args[0].shape[axis], SizeOf(value, axis), self.check)

        if isinstance(result, torch.Size):
            return torch.Size(map(size, range(len(result))))
        if function == "size":
            return size((kwargs["dim"] if kwargs else args[1]) % args[0].ndim)
        return math.prod(map(size, range(args[0].ndim))) if function in ("numel", "nelement") else result

    def check(self, function: Any, left: Any, right: Any, outcome: bool) -> None:
        """Record the outcome of a comparison of sizes, on which the network's code may depend."""
        key = function, expression_of(left), expression_of(right)
        if not self.closed and key not in self.checks:
            check = SizeCheck(*key, outcome, len(self.calls), _line_without_folder())
            self.checks[key] = check, (untraced(left), untraced(right))

    def _renewed(self, result: Any, value: Value, tainted: bool) -> Any:
        """Return the result with every tensor in it registered as a value of its own."""

        def renewed(key: Any, part: Any) -> Any:
            return self._renewed(part, Value(value.call, (*value.path, key)), tainted)

        match result:
            case Tensor():
                if id(result) in self.values or id(result) in self.state or id(result) in self.constants:
                    result = result.view_as(result)
                self._note_memory(result)
                self._register(result, value, tainted)
            case Mapping():
                items = {key: renewed(key, part) for key, part in result.items()}
                kind: Any = type(result)
                return kind(**items) if dataclasses.is_dataclass(result) else kind(items)
            case list() | tuple():
                parts = [renewed(index, part) for index, part in enumerate(result)]
                return (
                    type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
                )  # a namedtuple or not
            case int() if not isinstance(result, bool) and isinstance(self.calls[value.call].target, str):
                self.numbers[value] = untraced(result)
                if tainted:
                    self.tainted.add(value)
                return traced_number(untraced(result), NumberOf(value), self.check)
        return result

    def _register(self, tensor: Tensor, value: Value, tainted: bool) -> None:
        self.alive.append(tensor)
        if tensor.device.type == "cpu" and (storage := _storage(tensor)) not in self.kept:
            self.kept.add(storage)
            self.free -= tensor.nbytes
        if self.free < 0:
            raise NeedsTooMuchMemory(
                f"the network cannot be recorded: a run of {len(self.alive[0])} samples keeps more than"
                f" {_memory() / 2**32:.1f} GB, a quarter of the memory: give a smaller example, of smaller images or"
                " shorter texts, take a larger machine, or teach alight this network with register_cutter"
            )
        self.values[id(tensor)] = value
        self.shapes[value], self.dtypes[value] = tuple(tensor.shape), tensor.dtype
        if tainted:
            self.tainted.add(value)

    def all_tainted(self) -> set[Value]:
        """Return values that depend on the content of the input, from the start or since a later write."""
        return self.tainted | {self.values[id(tensor)] for tensor in self.alive if self._is_tainted(tensor)}

    def _is_weighted(self, tensor: Tensor) -> bool:
        return id(tensor) in self.state or id(tensor) in self.weighted

    def _is_masked(self, function: str, taken: Sequence[Tensor]) -> bool:
        """Check for a tensor indexed by a mask, or by something of a size that follows content."""
        by_content = [each.dtype == torch.bool or id(each) in self.sized_by_content for each in taken[1:]]
        return function == "__getitem__" and any(by_content)

    def _is_tainted(self, tensor: Tensor) -> bool:
        value = self.values.get(id(tensor))
        return value is not None and (value in self.tainted or _storage(tensor) in self.tainted_storages)

    def encoded(self, item: Any) -> Any:
        """Return arguments or results with tensors and modules replaced by symbols."""
        if isinstance(item, Tensor):
            if id(item) in self.values:
                return self.values[id(item)]
            if id(item) in self.state:
                return StateName(self.state[id(item)])
            self.constants[id(item)] = item
            return ConstantTensor(item)
        if isinstance(item, nn.Module) and id(item) in self.modules:
            return StateName(self.modules[id(item)])
        if isinstance(item, TracedInt | TracedFloat):
            return expression_of(item)
        if isinstance(item, np.generic):
            return item.item()
        if isinstance(item, slice):
            return slice(*map(self.encoded, (item.start, item.stop, item.step)))
        if isinstance(item, Mapping):
            return {key: self.encoded(part) for key, part in item.items()}
        if _hides_tensors(item) or isinstance(item, PackedSequence):
            raise Untraceable(f"a {type(item).__name__} with tensors inside is used at {_line()}")
        if isinstance(item, list | tuple):
            return (list if isinstance(item, list) else tuple)(map(self.encoded, item))
        return item


def check_outcome(condition: Tensor, expected: bool, line: str) -> None:
    """Raise unless a condition that the network's code asserts is what it was in the trace; not in compiled code."""
    if condition.is_meta or torch.compiler.is_compiling():
        return
    if condition.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if bool(condition) is not expected:
        raise BadInput(f"an assertion of the network's code fails for this batch ({line}): give it what it asks for")


def logits_in(output: Any, kind: type[Item]) -> Item:
    """Return the logits of what was picked from a network's output, as a tensor or value."""
    for item in walk(output):
        if isinstance(item, kind):
            return item
    raise BadInput("the network's output holds no tensor that it computed: give a network that returns logits")


def walk(item: Any) -> Iterator[Any]:
    """Yield everything inside nested containers, or the item itself."""
    parts: Iterable[Any]
    match item:
        case Mapping():
            parts = item.values()
        case list() | tuple():
            parts = item
        case slice():
            parts = (item.start, item.stop, item.step)
        case _:
            yield item
            return
    for part in parts:
        yield from walk(part)


def sizes_in(item: Any) -> Iterator[SizeOf]:
    """Yield the sizes of tensors that arguments are computed from."""
    for part in walk(item):
        if isinstance(part, SizeOf):
            yield part
        elif isinstance(part, SizeExpression):
            yield from sizes_in(part.operands)


def _tensors_in(item: Any) -> list[Tensor]:
    return [part for part in walk(item) if isinstance(part, Tensor)]


def _hides_tensors(item: Any) -> bool:
    if isinstance(item, nn.Module) or not hasattr(item, "__dict__") or callable(item):
        return False
    return bool(_tensors_in(vars(item)))


def _memory() -> int:
    """Return the bytes of this machine's memory; where it does not say, as many as are never used up."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows
        return 2**62


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _storage(tensor: Tensor) -> int:
    return id(tensor) if tensor.layout != torch.strided else tensor.untyped_storage()._cdata


def quick_result(func: Any, args: Sequence[Any]) -> Tensor | None:
    """Return the result of a call without data where its shape is known: torch takes milliseconds to find it out."""
    if func is nn.functional.linear and len(args) > 1 and args[1].ndim == 2:
        width = args[1].shape[0]
    elif func is nn.functional.scaled_dot_product_attention and len(args) > 2:
        width = args[2].shape[-1]
    else:
        return like_input(func, args)
    is_known = args[0].is_meta and args[0].dtype == args[1].dtype
    return args[0].new_empty((*args[0].shape[:-1], width)) if is_known else None


def _line() -> str:
    """Return the line of the network's own code that is being run."""
    return own_line(walk_stack(sys._getframe()))


def _line_without_folder() -> str:
    folder, _, line = _line().partition(".py:")
    return f"{Path(folder).name}.py:{line}"


def _asserted(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return what is read in a line of the network's own code that does nothing but raise; None in other lines."""
    path, _, rest = _line().partition(".py:")
    number = int(rest.partition(" ")[0] or 0)
    asserts = any(first <= number <= last for first, last in _assertions(f"{path}.py"))
    return run(*args, **kwargs) if asserts else None


@cache
def _assertions(path: str) -> list[tuple[int, int]]:
    """Return the first and last lines of conditions in a file upon which code does nothing but raise."""
    try:
        nodes = [*ast.walk(ast.parse("".join(linecache.getlines(path))))]
    except SyntaxError:  # as of cells of a notebook
        return []
    conditions: list[Any] = [each for each in nodes if isinstance(each, ast.Assert)]
    for each in nodes:
        if isinstance(each, ast.If) and not each.orelse and all(isinstance(line, ast.Raise) for line in each.body):
            conditions.append(each.test)
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "torch._assert":
            conditions.append(each)
    return [(each.lineno, each.end_lineno) for each in conditions]
