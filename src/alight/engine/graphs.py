"""Batches replayed as one CUDA graph: for networks whose kernels take longer to launch than to run."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from alight.engine.prepare import compiled
from alight.errors import AlightError, BadInput

Run = Callable[..., Any]

SHAPES = 8  # captured for each part of a network; batches of further ones are run as they are
WARMING = 3  # runs before a capture, in which libraries choose their kernels


class Captured(NamedTuple):
    """A graph, the tensors that it reads, and those that it writes."""

    graph: Any
    given: tuple[Tensor, ...]
    made: Any
    quick: bool  # is a replay done before the kernels would be launched one by one, be the batch ever so small?


class Graphed:
    """A part of a network whose batches are replayed: captured when the first full one of a kind comes.

    Smaller ones are replayed in the first rows of a full one, where that is quicker than to launch them. What a graph
    writes, the next replay writes over, so everything is handed on in memory of its own.
    """

    def __init__(self, open_index: int, run: Run, size: int | None, pool: Any) -> None:
        self.open_index, self.run, self.pool = open_index, run, pool
        self.size = size  # of a full batch; None is that of the first which comes
        self.captured: dict[Any, Captured] = {}

    def __call__(self, *carried: Tensor) -> Any:
        """What the part makes of these tensors."""
        count = len(carried[0])
        self.size = size = self.size or count
        kind = tuple((each.shape[1:], each.stride(), each.dtype) for each in carried)
        if kind not in self.captured and 0 < count == size and len(self.captured) < SHAPES:
            with torch.cuda.device(carried[0].device):
                self.captured[kind] = self._captured(carried)
        captured = self.captured.get(kind)
        if captured is None or count > size or (count < size and not captured.quick):
            return self.run(*carried)
        with torch.cuda.device(carried[0].device):
            for there, each in zip(captured.given, carried, strict=True):
                (there if count == size else there[:count]).copy_(each)
            captured.graph.replay()
            return tree_map_only(Tensor, partial(_of_first, count=count, size=size), captured.made)

    def _captured(self, carried: Sequence[Tensor]) -> Captured:
        given = tuple(each.clone() for each in carried)
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            launching = []
            for _ in range(WARMING):
                launching.append(_clocked(lambda: self.run(*given)))
                beside.synchronize()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                made = self.run(*given)
        except RuntimeError as error:
            raise AlightError(
                f"segment {self.open_index} cannot be captured as a CUDA graph ({str(error).splitlines()[0]}):"
                " run it with graphs=False"
            ) from error
        replaying = min(_clocked(graph.replay, torch.cuda.synchronize) for _ in range(WARMING))
        return Captured(graph, given, made, replaying < min(launching))


def _of_first(made: Tensor, count: int, size: int) -> Tensor:
    """What was made of the first so many samples of a batch, in memory of its own; each has one row, or as many."""
    return (made if count == size else made[: len(made) // size * count]).clone()


def _clocked(*work: Callable[[], Any]) -> float:
    """Seconds of some calls, one after the other."""
    start = time.perf_counter()
    for each in work:
        each()
    return time.perf_counter() - start


def quickened(
    parts: Sequence[nn.Module], device: torch.device, *, compiling: bool, graphs: bool, size: int | None = None
) -> list[Run] | None:
    """Parts of a network, compiled or replayed as graphs; None is as they are."""
    if compiling and graphs:
        raise BadInput("compiled parts are not replayed as CUDA graphs: choose one of compile and graphs")
    if graphs:
        return graphed([part.forward for part in parts], device, size)
    return compiled(parts) if compiling else None


def graphed(runs: Sequence[Run], device: torch.device, size: int | None = None) -> list[Run]:
    """Parts of a network, their batches replayed as graphs that share their memory: one runs after the other."""
    if device.type != "cuda":
        raise BadInput(f"CUDA graphs need a GPU and the network runs on {device}: leave graphs out")
    pool = torch.cuda.graph_pool_handle()
    return [Graphed(open_index, run, size, pool) for open_index, run in enumerate(runs)]
