"""CUDA graphs that branch on counters in device memory: conditional nodes, made by the CUDA driver.

A program is a sequence of steps: `Run` executes a captured graph, `Choose` the body whose counter lies in its range, if
there is one. Before each choice a small kernel looks at the counters, which captured graphs write.
"""

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alight.errors import AlightError

EARLIEST = (12, 4)  # CUDA version that has conditional nodes
SWITCHES = 12080  # version of the driver from which one node chooses among several bodies
ENDLESS = 2**62  # more than any counter
LOOKS = 8  # at what a graph writes, between two questions to the driver
CHOOSE = b"""
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);
extern "C" __global__ void choose(const long long* counters, const long long* branches, int count, int switches) {
  int chosen = count;  // none
  for (int i = 0; i < count; ++i) {
    const long long* branch = branches + 4 * i;  // a counter, the range that it must lie in, and a handle
    long long value = counters[branch[0]];
    if (branch[1] < value && value <= branch[2]) chosen = i;
  }
  if (switches) cudaGraphSetConditional(branches[3], chosen);
  else for (int i = 0; i < count; ++i) cudaGraphSetConditional(branches[4 * i + 3], chosen == i);
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


class Choose(NamedTuple):
    """Run the body whose condition holds; no two may."""

    branches: "Sequence[tuple[Condition, Program]]"


Program = Sequence[Run | Choose]


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
        _choose_kernel(torch.cuda.current_device())
    except (AlightError, RuntimeError, OSError) as error:
        return f"the kernel that sets conditions cannot be compiled ({str(error).partition(chr(10))[0]})"
    return ""


class Executable:
    """A program as one graph, and what must live as long as it does."""

    def __init__(self, program: Program, graphs: Mapping[Any, torch.cuda.CUDAGraph], counters: Tensor) -> None:
        from cuda.bindings import driver

        self.driver, self.counters = driver, counters
        self.graphs = {key: driver.CUgraph(init_value=int(graph.raw_cuda_graph())) for key, graph in graphs.items()}
        self.tables: list[Tensor] = []  # of branches, on the device
        self.captured = [*graphs.values()]  # own the memory that their kernels write
        self.context = _checked(driver.cuCtxGetCurrent())
        self.switches = hasattr(driver.CUgraphConditionalNodeType, "CU_GRAPH_COND_TYPE_SWITCH")
        self.switches &= _checked(driver.cuDriverGetVersion()) >= SWITCHES
        root = _checked(driver.cuGraphCreate(0))
        self._add_all(root, program)
        self.executable = _checked(driver.cuGraphInstantiate(root, 0))
        _checked(driver.cuGraphDestroy(root))
        self.streams: list[Any] = []  # the one of the last launch
        weakref.finalize(self, _destroy, driver, self.context, self.executable, self.streams)

    def launch(self) -> None:
        """Launch it on the current stream."""
        stream = _stream(torch._C._cuda_getCurrentRawStream(self.counters.device.index))  # quicker than by its object
        self.streams[:] = [stream]
        _checked(self.driver.cuGraphLaunch(self.executable, stream))

    def finish(self) -> None:
        """Wait until its last launch has ended."""
        for stream in self.streams:
            _checked(self.driver.cuStreamSynchronize(stream))

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Wait until it has written what a function looks for in memory of the host; at the latest until it ends.

        A synchronisation would come some 10 us later. Other threads run in between. The device is the one of `launch`.
        """
        (stream,), not_ready = self.streams, self.driver.CUresult.CUDA_ERROR_NOT_READY
        while not any(is_done() for _ in range(LOOKS)):
            (status,) = self.driver.cuStreamQuery(stream)
            if status != not_ready:
                _checked((status,))
                return

    def _add_all(self, graph: Any, program: Program) -> None:
        """Add the steps, one after the other."""
        last: list[Any] = []
        for step in program:
            if isinstance(step, Run):
                last = [_checked(self.driver.cuGraphAddChildGraphNode(graph, last, len(last), self.graphs[step.key]))]
            else:
                last = self._add_choice(graph, last, step.branches)

    def _add_choice(self, graph: Any, last: list[Any], branches: Sequence[tuple[Condition, Program]]) -> list[Any]:
        """Add the kernel that looks at the counters, and the bodies that it chooses from: of one node, or each its own.

        A driver that cannot switch asks about one body after the other.
        """
        switches = self.switches and len(branches) > 1
        create = partial(self.driver.cuGraphConditionalHandleCreate, graph, self.context, 0, 0)
        handles = [_checked(create()) for _ in branches[: 1 if switches else None]]
        own = handles * len(branches) if switches else handles
        rows = [[*condition, int(handle)] for (condition, _), handle in zip(branches, own, strict=True)]
        last = self._add_kernel(graph, last, torch.tensor(rows, device=self.counters.device), switches)
        bodies, size = [body for _, body in branches], len(branches) if switches else 1
        for index, handle in enumerate(handles):
            node, inside = self._add_conditional(graph, handle, "SWITCH" if switches else "IF", size, last)
            for there, body in zip(inside, bodies[index : index + size], strict=True):
                self._add_all(there, body)
            last = [node]
        return last

    def _add_conditional(self, graph: Any, handle: Any, kind: str, size: int, last: list[Any]) -> tuple[Any, list[Any]]:
        """Return a conditional node and its empty bodies."""
        driver = self.driver
        wanted = driver.CUgraphNodeParams()
        wanted.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        wanted.conditional.handle = handle
        wanted.conditional.type = getattr(driver.CUgraphConditionalNodeType, f"CU_GRAPH_COND_TYPE_{kind}")
        wanted.conditional.size = size
        wanted.conditional.ctx = self.context
        edges = [None] if _major() >= 13 else []  # edge data, which older bindings do not take
        node = _checked(driver.cuGraphAddNode(graph, last, *edges, len(last), wanted))
        return node, [*wanted.conditional.phGraph_out[:size]]

    def _add_kernel(self, graph: Any, last: list[Any], table: Tensor, switches: bool) -> list[Any]:
        """Add the kernel that chooses."""
        self.tables.append(table)
        wanted = self.driver.CUDA_KERNEL_NODE_PARAMS()
        wanted.func = _choose_kernel(self.counters.device.index)
        wanted.gridDimX = wanted.gridDimY = wanted.gridDimZ = 1
        wanted.blockDimX = wanted.blockDimY = wanted.blockDimZ = 1
        wanted.sharedMemBytes = 0
        values = (self.counters.data_ptr(), table.data_ptr(), len(table), int(switches))
        wanted.kernelParams = (values, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int))
        return [_checked(self.driver.cuGraphAddKernelNode(graph, last, len(last), wanted))]


def _destroy(driver: Any, context: Any, executable: Any, streams: list[Any]) -> None:
    """Give a graph back once it has ended, which need not be when its answers are there."""
    driver.cuCtxPushCurrent(context)
    for stream in streams:
        driver.cuStreamSynchronize(stream)
    driver.cuGraphExecDestroy(executable)
    driver.cuCtxPopCurrent()


@cache
def _stream(handle: int) -> Any:
    from cuda.bindings import driver

    return driver.CUstream(init_value=handle)


@cache
def _major() -> int:
    import cuda.bindings

    return int(cuda.bindings.__version__.partition(".")[0])


@cache
def _choose_kernel(device: int) -> Any:
    """Return the kernel that sets conditions, compiled for this device."""
    from cuda.bindings import driver, nvrtc

    torch.cuda.synchronize(device)  # the driver's context exists from here on
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=compute_{major}{minor}".encode(), b"--relocatable-device-code=true"]
    program = _checked(nvrtc.nvrtcCreateProgram(CHOOSE, b"choose.cu", 0, [], []))
    _checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
    text = b" " * _checked(nvrtc.nvrtcGetPTXSize(program))
    _checked(nvrtc.nvrtcGetPTX(program, text))
    module = _checked(driver.cuModuleLoadData(text))  # the driver brings cudaGraphSetConditional
    return _checked(driver.cuModuleGetFunction(module, b"choose"))


def _checked(result: tuple[Any, ...]) -> Any:
    """Return what a call of the driver gives, or raise what it says went wrong."""
    status, *values = result
    if int(status):
        raise AlightError(f"the CUDA driver says {status.name}")
    return values[0] if values else None
