"""CUDA graphs that branch and loop on counters in device memory: conditional nodes, made by the CUDA driver.

A program is a sequence of steps. `Run` executes a captured graph, `Loop` repeats its body while a counter lies in a
range, `Choose` runs the bodies whose counters do. Captured graphs read `counters` and write `updated`; at the start,
after every `Run` and wherever a condition follows, a small kernel copies the one to the other and sets the conditions
that are looked at next.
"""

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alight.errors import AlightError

EARLIEST = (12, 4)  # CUDA version that has conditional nodes
ENDLESS = 2**62  # more than any counter
COMMIT = b"""
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);
extern "C" __global__ void commit(long long* counters, const long long* updated, int count,
                                  const long long* conditions, int conditions_set) {
  int i = threadIdx.x;
  for (int k = i; k < count; k += blockDim.x) counters[k] = updated[k];
  __syncthreads();
  if (i < conditions_set) {  // handle, counter, and the range that it must lie in
    const long long* condition = conditions + 4 * i;
    long long value = counters[condition[1]];
    cudaGraphSetConditional(condition[0], condition[2] < value && value <= condition[3]);
  }
}
"""


class Condition(NamedTuple):
    """Whether a counter lies above one number and not above another."""

    counter: int
    above: int = 0
    upto: int = ENDLESS


class Run(NamedTuple):
    """Execute the captured graph of this key."""

    key: Any


class Loop(NamedTuple):
    """Repeat the body while the condition holds, which is looked at before the body and after its first step, a run."""

    condition: Condition
    body: "Program"


class Choose(NamedTuple):
    """Run every body whose condition holds; all are looked at before the first body runs."""

    branches: "Sequence[tuple[Condition, Program]]"


Step = Run | Loop | Choose
Program = Sequence[Step]
Set = tuple[Any, Condition]  # a handle, and what it is set to


def why_not() -> str:
    """Return why this machine cannot run conditional graphs; nothing where it can."""
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        return f"torch {torch.__version__} does not hand out its CUDA graphs: torch 2.8 does"
    try:
        from cuda.bindings import driver
    except ImportError:
        return "the package cuda-bindings is not installed"
    version = _checked(driver.cuDriverGetVersion())
    if (version // 1000, version % 1000 // 10) < EARLIEST:
        return f"the driver supports CUDA {version // 1000}.{version % 1000 // 10}, and conditional graphs need 12.4"
    try:
        _commit_kernel(torch.cuda.current_device())
    except (AlightError, RuntimeError, OSError) as error:
        return f"the kernel that sets conditions cannot be compiled ({str(error).partition(chr(10))[0]})"
    return ""


def compiled(
    program: Program, graphs: Mapping[Any, torch.cuda.CUDAGraph], counters: Tensor, updated: Tensor
) -> Callable[[], None]:
    """Return a function that launches the program on the current stream, as one graph."""
    return _Executable(program, graphs, counters, updated).launch


class _Executable:
    """An instantiated graph, and what must live as long as it does."""

    def __init__(
        self, program: Program, graphs: Mapping[Any, torch.cuda.CUDAGraph], counters: Tensor, updated: Tensor
    ) -> None:
        from cuda.bindings import driver

        self.driver, self.counters, self.updated = driver, counters, updated
        self.graphs = {key: driver.CUgraph(init_value=int(graph.raw_cuda_graph())) for key, graph in graphs.items()}
        self.tables: list[Tensor] = []  # of conditions, on the device
        self.captured = [*graphs.values()]  # own the memory that their kernels write
        self.context = _checked(driver.cuCtxGetCurrent())
        root = _checked(driver.cuGraphCreate(0))
        self._add_all(root, program, [] if _branches(program[0]) else self._commit(root, [], None)[0])
        self.executable = _checked(driver.cuGraphInstantiate(root, 0))
        _checked(driver.cuGraphDestroy(root))
        weakref.finalize(self, driver.cuGraphExecDestroy, self.executable)

    def launch(self) -> None:
        """Launch it on the current stream."""
        _checked(self.driver.cuGraphLaunch(self.executable, _stream(torch.cuda.current_stream().cuda_stream)))

    def _add_all(self, graph: Any, program: Program, last: list[Any], loop: Sequence[Set] = ()) -> None:
        """Add the steps, one after the other; the first run also sets the condition of the loop that it stands in."""
        handles: list[Any] = []  # of the conditions of a step, once they are set
        for step, following in pairwise((*program, None)):
            if isinstance(step, Run):
                last = [_checked(self.driver.cuGraphAddChildGraphNode(graph, last, len(last), self.graphs[step.key]))]
                last, handles = self._commit(graph, last, following, loop)
                loop = ()
                continue
            if not handles:
                last, handles = self._commit(graph, last, step)
            kind = "WHILE" if isinstance(step, Loop) else "IF"
            for handle, (condition, body) in zip(handles, _branches(step), strict=True):
                node, inside = self._add_conditional(graph, handle, kind, last)
                self._add_all(inside, body, [], [(handle, condition)] if isinstance(step, Loop) else [])
                last = [node]
            handles = []

    def _add_conditional(self, graph: Any, handle: Any, kind: str, last: list[Any]) -> tuple[Any, Any]:
        """Return a conditional node and its empty body."""
        driver = self.driver
        wanted = driver.CUgraphNodeParams()
        wanted.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        wanted.conditional.handle = handle
        wanted.conditional.type = getattr(driver.CUgraphConditionalNodeType, f"CU_GRAPH_COND_TYPE_{kind}")
        wanted.conditional.size = 1
        wanted.conditional.ctx = self.context
        edges = [None] if _major() >= 13 else []  # edge data, which older bindings do not take
        node = _checked(driver.cuGraphAddNode(graph, last, *edges, len(last), wanted))
        return node, wanted.conditional.phGraph_out[0]

    def _commit(
        self, graph: Any, last: list[Any], step: Step | None, loop: Sequence[Set] = ()
    ) -> tuple[list[Any], list[Any]]:
        """Add the kernel that copies counters and sets the conditions of a step; return it, and their handles."""
        create = partial(self.driver.cuGraphConditionalHandleCreate, graph, self.context, 0, 0)
        own = [(_checked(create()), condition) for condition, _ in _branches(step)]
        conditions = [*own, *loop]
        rows = [[int(handle), *condition] for handle, condition in conditions] or [[0] * 4]
        table = torch.tensor(rows, dtype=torch.int64, device=self.counters.device)
        self.tables.append(table)
        values = (self.counters.data_ptr(), self.updated.data_ptr(), len(self.counters), table.data_ptr())
        kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
        wanted = self.driver.CUDA_KERNEL_NODE_PARAMS()
        wanted.func = _commit_kernel(self.counters.device.index)
        wanted.gridDimX = wanted.gridDimY = wanted.gridDimZ = 1
        wanted.blockDimX, wanted.blockDimY, wanted.blockDimZ = 32, 1, 1
        wanted.sharedMemBytes = 0
        wanted.kernelParams = ((*values, len(conditions)), kinds)
        node = _checked(self.driver.cuGraphAddKernelNode(graph, last, len(last), wanted))
        return [node], [handle for handle, _ in own]


def _branches(step: Step | None) -> Sequence[tuple[Condition, Program]]:
    if isinstance(step, Loop):
        return [step]
    return step.branches if isinstance(step, Choose) else []


@cache
def _stream(handle: int) -> Any:
    from cuda.bindings import driver

    return driver.CUstream(init_value=handle)


@cache
def _major() -> int:
    import cuda.bindings

    return int(cuda.bindings.__version__.partition(".")[0])


@cache
def _commit_kernel(device: int) -> Any:
    """Return the kernel that sets conditions, compiled for this device."""
    from cuda.bindings import driver, nvrtc

    torch.cuda.synchronize(device)  # the driver's context exists from here on
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=compute_{major}{minor}".encode(), b"--relocatable-device-code=true"]
    program = _checked(nvrtc.nvrtcCreateProgram(COMMIT, b"commit.cu", 0, [], []))
    _checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
    text = b" " * _checked(nvrtc.nvrtcGetPTXSize(program))
    _checked(nvrtc.nvrtcGetPTX(program, text))
    module = _checked(driver.cuModuleLoadData(text))  # the driver brings cudaGraphSetConditional
    return _checked(driver.cuModuleGetFunction(module, b"commit"))


def _checked(result: tuple[Any, ...]) -> Any:
    """Return what a call of the driver gives, or raise what it says went wrong."""
    status, *values = result
    if int(status):
        raise AlightError(f"the CUDA driver says {status.name}")
    return values[0] if values else None
