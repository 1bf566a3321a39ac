"""Full batches replayed as one CUDA graph: for networks whose kernels take longer to launch than to run."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from alight.errors import AlightError, BadInput
from alight.runtime.prepare import compiled

Run = Callable[..., Any]

SHAPES = 8  # captured for each part of a network; batches of further ones are run as they are
WARMING = 3  # runs before a capture, in which libraries choose their kernels


class Captured(NamedTuple):
    """A graph, the tensors that it reads, and those that it writes."""

    graph: Any
    given: tuple[Tensor, ...]
    made: Any


class Graphed:
    """A part of a network whose full batches are replayed: captured when the first of a shape comes, then run at once.

    What a graph writes, the next replay writes over, so everything is handed on in memory of its own.
    """

    def __init__(self, position: int, run: Run, size: int | None, pool: Any) -> None:
        self.position, self.run, self.pool = position, run, pool
        self.size = size  # of a full batch; None is that of the first which comes
        self.captured: dict[Any, Captured] = {}

    def __call__(self, *carried: Tensor) -> Any:
        """What the part makes of these tensors."""
        self.size = self.size or len(carried[0])
        if len(carried[0]) != self.size:
            return self.run(*carried)
        kind = tuple((each.shape, each.stride(), each.dtype) for each in carried)
        with torch.cuda.device(carried[0].device):
            if kind not in self.captured:
                if len(self.captured) == SHAPES:
                    return self.run(*carried)
                self.captured[kind] = self._captured(carried)
            graph, given, made = self.captured[kind]
            for there, each in zip(given, carried, strict=True):
                there.copy_(each)
            graph.replay()
            return tree_map_only(Tensor, torch.clone, made)

    def _captured(self, carried: Sequence[Tensor]) -> Captured:
        given = tuple(each.clone() for each in carried)
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(WARMING):
                self.run(*given)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                made = self.run(*given)
        except RuntimeError as error:
            raise AlightError(
                f"segment {self.position} cannot be captured as a CUDA graph ({str(error).splitlines()[0]}):"
                " run it with graphs=False"
            ) from error
        return Captured(graph, given, made)


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
    """Parts of a network, their full batches replayed as graphs that share their memory: one runs after the other."""
    if device.type != "cuda":
        raise BadInput(f"CUDA graphs need a GPU and the network runs on {device}: leave graphs out")
    pool = torch.cuda.graph_pool_handle()
    return [Graphed(position, run, size, pool) for position, run in enumerate(runs)]
