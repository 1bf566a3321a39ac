"""CUDA graphs, captured in streams that nothing else uses, and what may run concurrently in one of them."""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from alight.errors import AlightError

WARMING = 3  # runs before a capture, in which libraries choose their kernels
CAPTURING, RESERVING = Lock(), Lock()  # one thread at a time
RESERVED: set[torch.cuda.Stream] = set()  # streams that torch would hand out again, and that are in use here
POOLED, PRIORITIES = 32, (-1, -2, -3)  # streams that torch has of each priority; most users take those of 0


class Captures:
    """Captures CUDA graphs that run one after another: they share memory, and the streams of their captures."""

    def __init__(self, device: int, lanes: int = 1) -> None:
        self.memory, self.device = torch.cuda.graph_pool_handle(), device
        self.turn = Lock()  # of replays: one thread at a time
        self.last: torch.cuda.Stream | None = None  # in which graphs were replayed
        self.streams = reserve_streams(device, lanes)  # of work that runs concurrently; the first is that of captures
        weakref.finalize(self, RESERVED.difference_update, self.streams)

    def capture(self, work: Callable[[], None], keep: bool = False) -> torch.cuda.CUDAGraph:
        """Return work as a CUDA graph, after a few runs; `keep` it to be built into another."""
        graph = torch.cuda.CUDAGraph(keep_graph=True) if keep else torch.cuda.CUDAGraph()
        graph.captures = self  # type: ignore[attr-defined]  # lives as long
        device, stream = torch.cuda.current_device(), self.streams[0]
        with CAPTURING:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARMING):
                    work()
                    stream.synchronize()
            torch.cuda.current_stream().wait_stream(stream)
            try:
                with torch.cuda.graph(graph, pool=self.memory, stream=stream, capture_error_mode="thread_local"):
                    work()
            except BaseException:
                with suppress(Exception):  # older torch goes on as if it captured, and frees no memory
                    torch._C._cuda_endAllocateToPool(device, self.memory)
                raise
        if keep:
            graph.instantiate()  # or newer torch does not replay it
        return graph

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Replay graphs in one thread at a time, after what others replay in streams of their own."""
        with self.turn:
            stream = torch.cuda.current_stream(self.device)
            if self.last is not None and self.last != stream:
                stream.wait_stream(self.last)
            self.last = stream
            yield

    def run_concurrently(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run functions in a stream each, and return their results; in a capture they are branches of its graph."""
        current, made = torch.cuda.current_stream(), []
        lanes = [current, *self.streams[1 : len(works)]]
        for lane in lanes[1:]:
            lane.wait_stream(current)
        try:
            for lane, work in zip(lanes, works, strict=True):
                with torch.cuda.stream(lane):
                    made.append(work())
        except BaseException:
            with suppress(Exception):  # of a capture that is over
                self._join(current, lanes)
            raise
        self._join(current, lanes)
        return made

    def _join(self, current: torch.cuda.Stream, lanes: Sequence[torch.cuda.Stream]) -> None:
        for lane in lanes[1:]:
            current.wait_stream(lane)


def run_sequentially(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run functions one after another, and return their results."""
    return [work() for work in works]


@cache
def stream_for(purpose: str, device: int) -> torch.cuda.Stream:
    """Return the stream of this package for a purpose, which nothing else here uses."""
    return reserve_streams(device, 1)[0]


def reserve_streams(device: int, count: int) -> list[torch.cuda.Stream]:
    """Return streams that this package uses for one thing alone, until `RESERVED.difference_update` returns them.

    Matrix products need memory that torch keeps for each stream and frees with any graph that was captured there; two
    graphs that run at the same time must not share it.
    """
    with RESERVING:
        for is_last in (False, True):
            found: list[torch.cuda.Stream] = []
            for priority in PRIORITIES:
                for _ in range(POOLED if len(found) < count else 0):
                    stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
                    if len(found) < count and stream not in RESERVED:
                        RESERVED.add(stream)
                        found.append(stream)
            if len(found) == count:
                return found
            RESERVED.difference_update(found)
            if not is_last:
                gc.collect()  # graphs that nobody needs may hold some
    raise AlightError(f"{len(RESERVED)} streams are in use, which is all: drop predictors that are not needed")


class MemoryUse(NamedTuple):
    """What a run does to memory that is not made in it."""

    writes_own: bool  # no other than that of its inputs, so that runs at the same time cannot disturb each other
    outside: list[Tensor]  # that it uses and was not given: weights, and whatever else modules keep


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the operations of torch, and notes which memory they use."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = given[0].device
        self.own = _storages(given)  # memory of this run alone
        self.empty: set[int] = set()  # memory that was allocated, and that no operation has written to
        self.outside: dict[int, Tensor] = {}  # by their memory
        self.is_safe = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(zip([each.name for each in function._schema.arguments], args, strict=False)) | (kwargs or {})
        operation = function.overloadpacket.__name__
        is_empty = operation.startswith(("empty", "new_empty"))
        tensors = [each for each in tree_leaves(named) if isinstance(each, Tensor)]
        self.is_safe &= function.namespace in ("aten", "prims")  # others may write anywhere
        self.is_safe &= all(type(each) in (Tensor, Parameter) for each in tensors)
        if operation.startswith("lift"):  # a tensor that Python has made just now
            self.own |= _storages(tensors)
        for each in tensors:
            if each.device == self.device and not (place := _storages(each)) <= self.own:
                self.outside |= dict.fromkeys(place, each)
        for argument in function._schema.arguments:
            self._look_at(argument.alias_info, _storages(named.get(argument.name)), is_empty)
        if named.get("training") or named.get("use_input_stats"):  # of a norm, which writes its statistics
            self.is_safe &= _storages([named.get("running_mean"), named.get("running_var")]) <= self.own
        made = function(*args, **(kwargs or {}))
        new = _storages(made) - _storages(named)
        self.own |= new
        self.empty = self.empty | new if is_empty else self.empty - new
        return made

    def _look_at(self, alias: Any, places: set[int], is_empty: bool) -> None:
        """Note what an operation does with memory of one of its arguments; where it makes a view, it reads nothing."""
        if alias is not None and alias.is_write:
            self.is_safe &= places <= self.own
            self.empty -= places
        elif alias is None and not is_empty:
            self.is_safe &= not places & self.empty


def memory_use(run: Callable[..., Any], inputs: Sequence[Tensor]) -> MemoryUse:
    """Return what a run does to memory; raise if it cannot be watched.

    It runs twice: first as always, for some modules make in their first run what they keep, then operation by
    operation. What writes to memory without telling torch, such as a kernel of Triton or of an extension, is noticed
    where it fills memory that torch has allocated.
    """
    try:
        run(*(each.clone() for each in inputs))
        with _Watch(inputs) as seen:
            made = run(*inputs)
    except Exception as error:  # of an operation that cannot be watched
        raise AlightError(f"the memory of a stage cannot be watched: {str(error).partition(chr(10))[0]}") from error
    return MemoryUse(seen.is_safe and not _storages(made) & seen.empty, [*seen.outside.values()])


def _storages(tree: Any) -> set[int]:
    return {each.untyped_storage()._cdata for each in tree_leaves(tree) if isinstance(each, Tensor)}


class Addresses:
    """Modules, and where their tensors lie: captured graphs read them there, whatever a module holds by now."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.parts = [part for module in modules for part in module.modules()]
        self.tables: list[Any] = [each for part in self.parts for each in (part._parameters, part._buffers) if each]
        self.children: list[Any] = [part._modules for part in self.parts if part._modules]
        held = [each for table in self.tables for each in table.values() if each is not None]
        self.strange = [type(each).__name__ for each in held if is_traceable_wrapper_subclass(each)]
        self.kept = [each.untyped_storage() for each in held]  # so that no one else gets their memory
        self.others: list[tuple[dict[str, Any], tuple[Any, ...], int]] = []  # what is not registered, and the way there
        self.places = self._places()

    def _places(self) -> tuple[list[int | None], list[nn.Module | None]]:
        tensors = [None if each is None else each.data_ptr() for table in self.tables for each in table.values()]
        return tensors, [each for table in self.children for each in table.values()]

    def follow(self, used: Sequence[Tensor]) -> None:
        """Look at what captured work uses beside parameters and buffers, too; raise if no module holds it.

        Whatever else holds it may let go of it, and captured work would go on using that memory.
        """
        if self.strange:
            raise AlightError(f"a {self.strange[0]} does not say where its numbers lie: take weights of plain tensors")
        others = _storages(used) - {each._cdata for each in self.kept}
        for table in map(vars, self.parts) if others else ():
            for name, held in table.items():
                ways = [((name,), held), *(((name, key), each) for key, each in _items(held))]
                own = [(way, each) for way, each in ways if isinstance(each, Tensor) and _storages(each) <= others]
                self.others += [(table, way, each.data_ptr()) for way, each in own]
                self.kept += [each.untyped_storage() for _, each in own]
        if not others <= {each._cdata for each in self.kept}:
            raise AlightError(
                "a stage uses tensors that are no parameters or buffers of its modules: register_buffer them"
            )

    def hold(self) -> bool:
        """Return whether all of them are there still."""
        return self._places() == self.places and all(_address(table, way) == place for table, way, place in self.others)


def _items(held: Any) -> Iterable[tuple[Any, Any]]:
    """Return keys and values of a dict, positions and values of a list; nothing of what is neither."""
    return held.items() if isinstance(held, dict) else enumerate(held) if isinstance(held, list) else ()


def _address(held: Any, way: tuple[Any, ...]) -> int | None:
    """Return where the tensor lies that is held so; None if there is none."""
    for key in way:
        held = held.get(key) if isinstance(held, dict) else held[key] if key < len(held) else None
        if not isinstance(held, dict | list | Tensor):
            return None
    return held.data_ptr() if isinstance(held, Tensor) else None
