"""CUDA graphs, captured in streams that nothing else uses, and what may run concurrently in one of them."""

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alight.errors import AlightError

WARMING = 3  # runs before a capture, in which libraries choose their kernels
CAPTURING, RESERVING = Lock(), Lock()  # one thread at a time
RESERVED: set[torch.cuda.Stream] = set()  # streams that torch would hand out again, and that are in use here
POOLED, PRIORITIES = 32, (-1, -2, -3)  # streams that torch has of each priority; most users take those of 0


class Captures:
    """Captures CUDA graphs that run one after another: they share memory, and the streams of their captures."""

    def __init__(self, device: int, lanes: int = 1) -> None:
        self.memory = torch.cuda.graph_pool_handle()
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
        finally:
            for lane in lanes[1:]:
                current.wait_stream(lane)
        return made


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


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the operations of torch, and notes whether two runs at the same time could disturb each other."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own = _storages(given)  # memory of this run alone
        self.empty: set[int] = set()  # memory that was allocated, and that no operation has written to
        self.is_safe = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(zip([each.name for each in function._schema.arguments], args, strict=False)) | (kwargs or {})
        is_empty = function.overloadpacket.__name__ in ("empty", "empty_like", "empty_strided", "new_empty")
        self.is_safe &= function.namespace in ("aten", "prims")  # others may write anywhere
        self.is_safe &= all(
            type(each) in (Tensor, Parameter) for each in tree_leaves(named) if isinstance(each, Tensor)
        )
        for argument in function._schema.arguments:
            self._look_at(argument.alias_info, _storages(named.get(argument.name)), is_empty)
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


def may_run_concurrently(run: Callable[..., Any], inputs: Sequence[Tensor]) -> bool:
    """Return whether runs at the same time cannot disturb each other: each writes to memory of its own alone.

    It runs once, operation by operation. What writes to memory without telling torch, such as a kernel of Triton or of
    an extension, is noticed where it fills memory that torch has allocated.
    """
    try:
        with _Writes(inputs) as seen:
            made = run(*inputs)
    except Exception:  # of an operation that cannot be watched
        return False
    return seen.is_safe and not _storages(made) & seen.empty


def _storages(tree: Any) -> set[int]:
    return {each.untyped_storage()._cdata for each in tree_leaves(tree) if isinstance(each, Tensor)}
