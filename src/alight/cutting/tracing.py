"""One run of a network, written down: every torch function its own code calls, and every module that stays closed.

Tensors are known by identity, so any Python is allowed in between, as long as it never asks for their content.
"""

import copy
import dataclasses
import linecache
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from alight.cutting.modes import in_mode
from alight.errors import BadInput

READING = {  # what turns the content of a tensor into a number
    "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "__array__",
    "item", "tolist", "numpy", "equal", "allclose", "is_nonzero",
}  # fmt: skip
DICE = ("rand", "bernoulli", "dropout", "normal", "uniform", "multinomial", "poisson", "exponential_")


class Value(NamedTuple):
    """A tensor by where it was made: a call (-1: the inputs) and the way to it inside the call's result."""

    call: int
    path: tuple[Any, ...] = ()


class State(NamedTuple):
    """A parameter, buffer or module of the network, by name."""

    name: str


class Fixed(NamedTuple):
    """A tensor that is neither computed nor named: a constant."""

    tensor: Tensor


class Sized(NamedTuple):
    """A number that follows the batch size: `times` of it, and `plus`."""

    times: int
    plus: int


class Typed(NamedTuple):
    """A dtype that follows the network's; `now` is what it was."""

    now: torch.dtype


@dataclass
class Call:
    """One call: a submodule by name, or a torch function; arguments hold the marks above."""

    target: Any
    args: Any
    kwargs: Any
    line: str
    tainted: bool  # does the content of the input, or chance, have a part in it?
    values: set[Value] = field(default_factory=set)  # that it takes
    storages: set[int] = field(default_factory=set)  # of its results
    changed: set[int] = field(default_factory=set)  # storages that it writes to
    changes_state: bool = False  # of the network


class End(NamedTuple):
    """Where a module was left: the number of calls until then, and its result."""

    time: int
    result: Any


@dataclass
class Record:
    """One run of a network."""

    calls: list[Call]
    ends: dict[str, list[End]]
    output: Any
    shapes: dict[Value, tuple[int, ...]]
    dtypes: dict[Value, torch.dtype]
    tainted: set[Value]


Opened = Callable[[str], bool]  # is the module of this name opened?


class Closed(Exception):
    """More must be opened to see where a tensor comes from, or whether the input has a part in it."""


def record(
    model: nn.Module,
    run: Callable[[nn.Module, tuple[Tensor, ...]], Any],
    batch: tuple[Tensor, ...],
    watched: Collection[str],
    opened: Opened,
) -> Record:
    """One run of the network, written down, with the ends of watched modules."""
    recorder = _Recorder(model, batch, watched, opened)
    with torch.no_grad(), _fixed_masks(), without_caches(model), recorder.calls_noted(), recorder:
        result = run(model, batch)
    output = recorder.encoded(result)
    shapes, dtypes = recorder.shapes, recorder.dtypes
    return Record(recorder.calls, recorder.ends, output, shapes, dtypes, recorder.all_tainted())


@contextmanager
def _fixed_masks() -> Iterator[None]:
    """While this lasts, transformers builds attention masks as it does for export: without a look at what they hide."""
    masks: Any = sys.modules.get("transformers.masking_utils")  # only of use if someone imported it
    plain = getattr(masks, "is_tracing", None)
    if plain is None:
        yield
        return
    masks.is_tracing = lambda *_, **__: True
    try:
        yield
    finally:
        masks.is_tracing = plain


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Switch off the caches of text decoders: a classifier reads each text once, and a cache copies keys and values.

    The copies have another memory layout, so on some CPUs the same network differs from itself in the last bits.
    """
    configs: dict[int, Any] = {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }
    caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module, tensors: tuple[Tensor, ...], watched: Collection[str], opened: Opened) -> None:
        super().__init__()
        self.modules = {id(module): name for name, module in reversed([*model.named_modules(remove_duplicate=False)])}
        state = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self.state = {id(tensor): name for name, tensor in reversed(state)}
        self.state_storages = {_storage(tensor) for _, tensor in state}
        self.watched, self.opened = set(watched), opened
        self.calls: list[Call] = []
        self.ends: dict[str, list[End]] = {name: [] for name in watched}
        self.values: dict[int, Value] = {}
        self.shapes: dict[Value, tuple[int, ...]] = {}
        self.dtypes: dict[Value, torch.dtype] = {}
        self.tainted: set[Value] = set()
        self.tainted_storages: set[int] = set()
        self.fixed: dict[int, Tensor] = {}
        self.kept: list[Any] = []  # so that no identity is given out twice
        self.closed = 0  # how deep inside closed modules
        for index, tensor in enumerate(tensors):
            self._know(tensor, Value(-1, (index,)), tainted=True)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.closed:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__iter__":
            return iter(self._noted(Tensor.unbind, (*args, 0), {}, lambda: args[0].unbind(0)))
        return self._noted(func, args, kwargs, lambda: func(*args, **kwargs))

    @contextmanager
    def calls_noted(self) -> Iterator[None]:
        """While this lasts, calls of modules are noted too."""
        plain = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self.modules.get(id(module))
            if self.closed or name is None:
                return plain(module, *args, **kwargs)
            if self.opened(name):
                result = plain(module, *args, **kwargs)
            else:
                result = self._noted(name, args, kwargs, lambda: plain(module, *args, **kwargs))
            if name in self.watched:
                with self._unseen():
                    self.ends[name].append(End(len(self.calls), self.encoded(result)))
            return result

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = plain  # type: ignore[method-assign]

    def _noted(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """The result of a call, once it is written down; tensors in it that were known get a new identity."""
        with self._unseen():
            return self._written_down(target, args, kwargs, run)

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        self.closed += 1
        try:
            yield
        finally:
            self.closed -= 1

    def _written_down(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        taken = [item for item in walk((args, kwargs)) if isinstance(item, Tensor)]
        tainted = any(map(self._is_tainted, taken))
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        if tainted and name in READING and not isinstance(target, str):
            raise Closed(f"the network asks for the content of a tensor ({name}) at {_line()}")
        versions = [_version(tensor) for tensor in taken]
        encoded = None if name == "__get__" else (self.encoded(args), self.encoded(kwargs))
        result = run()
        written = {_storage(tensor) for tensor, old in zip(taken, versions, strict=True) if _version(tensor) != old}
        if not written and not any(isinstance(item, Tensor) for item in walk(result)):
            return result
        tainted = tainted or (not isinstance(target, str) and any(word in name for word in DICE))
        values = {self.values[id(tensor)] for tensor in taken if id(tensor) in self.values}
        encoded = encoded or (self.encoded(args), self.encoded(kwargs))
        call = Call(target, *encoded, line=_line(), tainted=tainted, values=values, changed=written)
        call.changes_state = bool(written & self.state_storages)
        index = len(self.calls)
        self.calls.append(call)
        if tainted:
            self.tainted_storages |= written
        result = self._renewed(result, Value(index), tainted)
        call.storages = {_storage(item) for item in walk(result) if isinstance(item, Tensor)}
        return result

    def _renewed(self, result: Any, value: Value, tainted: bool) -> Any:
        """The result, every tensor of it known as a value of its own."""
        if isinstance(result, Tensor):
            if id(result) in self.values or id(result) in self.state or id(result) in self.fixed:
                result = result.view_as(result)
            self._know(result, value, tainted)
            return result
        return _rebuilt(result, lambda key, item: self._renewed(item, value._replace(path=(*value.path, key)), tainted))

    def _know(self, tensor: Tensor, value: Value, tainted: bool) -> None:
        self.kept.append(tensor)
        self.values[id(tensor)] = value
        self.shapes[value], self.dtypes[value] = tuple(tensor.shape), tensor.dtype
        if tainted:
            self.tainted.add(value)

    def all_tainted(self) -> set[Value]:
        """Values that the content of the input has a part in, at once or later."""
        later = {self.values[id(tensor)] for tensor in self.kept if _storage(tensor) in self.tainted_storages}
        return self.tainted | later

    def _is_tainted(self, tensor: Tensor) -> bool:
        value = self.values.get(id(tensor))
        return value is not None and (value in self.tainted or _storage(tensor) in self.tainted_storages)

    def encoded(self, item: Any) -> Any:
        """Arguments or results with tensors and modules replaced by what they are to the network."""
        if isinstance(item, Tensor):
            if id(item) in self.values:
                return self.values[id(item)]
            if id(item) in self.state:
                return State(self.state[id(item)])
            self.fixed[id(item)] = item
            return Fixed(item)
        if isinstance(item, nn.Module) and id(item) in self.modules:
            return State(self.modules[id(item)])
        if isinstance(item, slice):
            return slice(*map(self.encoded, (item.start, item.stop, item.step)))
        if _hides_tensors(item) and not isinstance(item, Mapping):
            raise Closed(f"a {type(item).__name__} with tensors inside is used at {_line()}")
        if isinstance(item, Mapping):
            return {key: self.encoded(part) for key, part in item.items()}
        if isinstance(item, list | tuple):
            return (list if isinstance(item, list) else tuple)(map(self.encoded, item))
        return item


def _rebuilt(item: Any, change: Callable[[Any, Any], Any]) -> Any:
    """A container with its parts changed; anything else as it is."""
    if isinstance(item, Mapping):
        parts = {key: change(key, part) for key, part in item.items()}
        return parts if type(item) is dict else _like(item, parts)
    if isinstance(item, list | tuple):
        changed = [change(index, part) for index, part in enumerate(item)]
        return type(item)(*changed) if hasattr(item, "_fields") else type(item)(changed)  # a namedtuple or not
    return item


def _like(item: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    return type(item)(**parts) if dataclasses.is_dataclass(item) else type(item)(parts)  # type: ignore[call-arg]


MARKS = (Value, State, Fixed, Sized, Typed)


def walk(item: Any) -> Iterator[Any]:
    """All that is inside nested containers, and what is not in any."""
    if isinstance(item, Mapping):
        for part in item.values():
            yield from walk(part)
    elif isinstance(item, list | tuple) and not isinstance(item, MARKS):
        for part in item:
            yield from walk(part)
    elif isinstance(item, slice):
        yield from (item.start, item.stop, item.step)
    else:
        yield item


def _hides_tensors(item: Any) -> bool:
    if isinstance(item, nn.Module) or not hasattr(item, "__dict__") or callable(item):
        return False
    return any(isinstance(part, Tensor) for part in walk(vars(item)))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _storage(tensor: Tensor) -> int:
    return id(tensor) if tensor.layout != torch.strided else tensor.untyped_storage()._cdata


def _line() -> str:
    """The line of the network's own code that is being run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_own(frame):
            return _shown(frame, frame.f_lineno)
        frame = frame.f_back
    return "an unknown line"


def line_of(error: BaseException) -> str:
    """The line of the network's own code at which an error was raised."""
    frames = [(frame, number) for frame, number in walk_tb(error.__traceback__) if _is_own(frame)]
    return _shown(*frames[-1]) if frames else "an unknown line"


def _is_own(frame: FrameType) -> bool:
    path = Path(frame.f_code.co_filename)
    ours = Path(__file__).parent, Path(torch.__file__).parent
    return not any(folder in path.parents for folder in ours) and path.name != "contextlib.py"


def _shown(frame: FrameType, number: int) -> str:
    path = frame.f_code.co_filename
    return f"{path}:{number} in {frame.f_code.co_name}: {linecache.getline(path, number).strip()}"


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
    with in_mode(model, training=training), refusals():
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
