"""A network made ready to run: on its device, in its dtype and memory layout, compiled, or as CUDA graphs."""

import copy
import itertools
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from alight.data.batches import as_tensor
from alight.engine.backends import State
from alight.engine.backends.torch.captures import WARMING, Addresses, Captures, memory_use
from alight.engine.settings import RunSettings
from alight.errors import AlightError, BadInput
from alight.networks.multi_exit import MultiExitModel, all_close, exit_logits

LAST = torch.channels_last
PROVEN_ROWS = 4  # samples of the first batch on which a network that was cast is compared with its original
SAME_LOGITS = 0.01  # as a share of the largest; ResNet-18, MiniLM and ViT differ by 1e-6 at most with channels last
SAME_IN_HALF = 0.1  # where they differ by 0.012 in bfloat16 and by 0.0015 in float16


def prepared(model: MultiExitModel, settings: RunSettings) -> MultiExitModel:
    """Return the network in evaluation mode as it will run; a copy, unless only its mode has to change."""
    device, dtype = device_of(model, settings.device), settings.dtype and getattr(torch, settings.dtype)
    tensors = [*model.parameters(), *model.buffers()]
    move = any(each.device != device for each in tensors)
    cast = dtype is not None and any(each.dtype != dtype for each in tensors if each.is_floating_point())
    last = settings.channels_last
    turn = last and not all(each.is_contiguous(memory_format=LAST) for each in tensors if each.dim() == 4)
    if move or cast or turn:
        model = copy.deepcopy(model).to(device=device, dtype=dtype)
        if last:
            model = model.to(memory_format=LAST)
    elif model.training:
        model = copy.deepcopy(model, {id(each): each for each in tensors})  # its own mode, the same weights
    return model.eval()


def check_prepared(
    model: MultiExitModel, ready: MultiExitModel, inputs: State, settings: RunSettings, open_exits: Sequence[int]
) -> None:
    """Raise if a network in another dtype or memory layout gives other logits at open exits, for a few samples."""
    own = next((each for each in model.parameters() if each.is_floating_point()), torch.empty(0))
    rows = tuple(as_tensor(each)[:PROVEN_ROWS] for each in inputs)
    try:
        expected = exit_logits(
            model, tuple(each.to(own.device, own.dtype if each.is_floating_point() else None) for each in rows)
        )
        made = exit_logits(ready, placed(rows, device_of(ready), settings))
    except Exception:  # of inputs that it does not take, which running says, or of a dtype that its device lacks
        return
    for index in open_exits:
        finite = expected[index].isfinite().all(1)
        one, other = made[index].to(expected[index])[finite], expected[index][finite]
        if not all_close([one], [other], SAME_IN_HALF if made[index].element_size() == 2 else SAME_LOGITS):
            changes = [str(made[index].dtype).removeprefix("torch."), *["channels_last"] * settings.channels_last]
            raise AlightError(
                f"in {' and '.join(changes)} the logits at {model.exits[index]!r} differ from the network's own by"
                f" {float((one - other).abs().max() / other.abs().max()):.2g} of the largest: run it in float32, with"
                " dtype=None and channels_last=False"
            )


def device_of(model: nn.Module, device: Any = None) -> torch.device:
    """Return the device asked for, or the network's own."""
    own = next((each.device for each in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    wanted = own if device is None else torch.device(device)
    if wanted.type == "cuda":
        if not torch.cuda.is_available():
            raise BadInput("device 'cuda' was asked for and there is none: choose device='cpu'")
        wanted = torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)
    return wanted


def placed(inputs: State, device: torch.device, settings: RunSettings) -> State:
    """Return inputs as the prepared network takes them; only floating point numbers change their dtype."""
    dtype, made = settings.dtype and getattr(torch, settings.dtype), []
    for each in inputs:
        tensor = as_tensor(each)
        floating = tensor.is_floating_point()
        tensor = tensor.to(device, dtype if floating else None, non_blocking=True)
        last = settings.channels_last and floating and tensor.dim() == 4
        made.append(tensor.contiguous(memory_format=LAST) if last else tensor)
    return tuple(made)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Give torch so many threads on the host for a while; None leaves them unchanged."""
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)


def running(count: int | None) -> AbstractContextManager[Any]:
    """Return the context in which stages run: inference mode, and so many threads; None leaves them unchanged."""
    if count is None:  # quick, for single samples
        return nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode()
    stack = ExitStack()
    stack.enter_context(torch.inference_mode())
    stack.enter_context(threads(count))
    return stack


Run = Callable[..., Any]

SHAPES = 8  # captured for each stage; batches of further shapes are launched kernel by kernel
COMPILED = itertools.count()  # stages so far
FILTERS = hasattr(torch.compiler, "keep_tensor_guards_unsafe")  # can this torch leave guards out?


def compiled_stage(index: int, stage: nn.Module) -> Run:
    """Return one stage compiled as a whole for any batch size; where compilation gives up, that is an error.

    Its code has a name of its own: the compiler counts recompilations by code, and by name it remembers which numbers
    have changed. Torch 2.6 could not branch on what is read once that was another number for an earlier network.
    """

    def run(*state: Tensor) -> Any:
        return stage(*state)

    own = types.FunctionType(
        run.__code__.replace(co_name=f"stage_{index}_{next(COMPILED)}"), run.__globals__, "run", None, run.__closure__
    )
    options: dict[str, Any] | None = {"guard_filter_fn": _kept_guards} if FILTERS else None
    fast = torch.compile(own, fullgraph=True, dynamic=None, options=options)

    compared: set[Any] = set()  # sizes of samples for which the compiled stage was compared with itself

    def checked(*state: Tensor) -> Any:
        for each in state:
            if len(each) > 1:  # a single sample is compiled for itself
                torch._dynamo.maybe_mark_dynamic(each, 0)
        try:
            sizes = tuple([each.shape[1:] for each in state])
            if sizes in compared:
                return fast(*state)
            expected = stage(*(each.clone() for each in state))
            made = fast(*state)
            numbers = _numbers(expected)
            in_half = any(each.is_floating_point() and each.element_size() == 2 for each in (*state, *numbers))
            if not all_close(_numbers(made), numbers, SAME_IN_HALF if in_half else None):
                raise AlightError(f"stage {index} gives other numbers once compiled: run it with compile=False")
            compared.add(sizes)
            return made
        except torch._dynamo.exc.TorchDynamoException as error:
            raise AlightError(
                f"compiling stage {index} gave up ({type(error).__name__}: {str(error).splitlines()[0]}):"
                " run it with compile=False"
            ) from error

    return checked


def _numbers(made: Any) -> list[Tensor]:
    """Return what a stage hands on, and the values of its head without the class."""
    state, values = made
    return [*(each for each in state if isinstance(each, Tensor)), values[:, 1:]]


def _kept_guards(guards: Sequence[Any]) -> list[bool]:
    """Return which guards are checked before every call: those on inputs, and of the stage not every layer.

    Its first tensor and its first mode are enough to notice that all of it has moved, or was set to training.
    """
    kept: dict[bool, str] = {}
    for each in guards:
        is_tensor = each.guard_type == "TENSOR_MATCH"
        if "stage" in each.name and (is_tensor or each.name.endswith(".training")):
            kept.setdefault(is_tensor, each.name)
    return ["stage" not in each.name or each.name in kept.values() for each in guards]


def graphed(
    runs: Sequence[Run], device: torch.device, batch_size: int | None = None, modules: Sequence[nn.Module] = ()
) -> list[Run]:
    """Return stages whose full batches are replayed as CUDA graphs that share their memory: they run in turn.

    Those of `modules` are captured again once their weights lie elsewhere.
    """
    if device.type != "cuda":
        raise BadInput(f"CUDA graphs need a GPU and the network runs on {device}: leave graphs out")
    captures = Captures(torch.cuda.current_device() if device.index is None else device.index)
    own: Sequence[nn.Module | None] = modules or [None] * len(runs)
    made: list[Graphed] = []
    for index, each in enumerate(zip(runs, own, strict=True)):
        made.append(Graphed(index, *each, batch_size, captures, made))
    return [*made]


class Captured(NamedTuple):
    """A graph, the tensors that it reads, and those that it writes."""

    graph: Any
    given: tuple[Tensor, ...]
    made: Any
    fast: bool  # is a replay done before the kernels would be launched one by one, even for the smallest batch?


class Graphed:
    """A stage whose batches are replayed: captured when the first full one of a shape comes.

    Smaller ones are replayed in the first rows of a full one, where that is faster than launching them. The next replay
    overwrites what a graph writes, so everything is handed on in memory of its own.
    """

    def __init__(
        self,
        index: int,
        run: Run,
        module: nn.Module | None,
        size: int | None,
        captures: Captures,
        every: "Sequence[Graphed]",
    ) -> None:
        self.index, self.run, self.captures = index, run, captures
        self.every = every  # stage of the network: their graphs share memory, and end together
        self.modules = [] if module is None else [module]
        self.addresses = Addresses(self.modules)
        self.size = size  # of a full batch; None is that of the first which comes
        self.captured: dict[Any, Captured] = {}

    def __call__(self, *state: Tensor) -> Any:
        """Return what the stage makes of these tensors."""
        if not torch.is_autocast_enabled(state[0].device.type):  # of which graphs know nothing
            with self.captures.in_turn():  # stages share memory, and all threads have one graph
                if (captured := self._graph_for(state)) is not None:
                    return self._replayed(captured, state)
        return self.run(*state)

    def _graph_for(self, state: Sequence[Tensor]) -> Captured | None:
        """Return what replays such a batch, captured now if need be; None where it is launched kernel by kernel."""
        count = len(state[0])
        self.size = size = self.size or count
        if not self.addresses.hold():
            self.addresses = Addresses(self.modules)
            for stage in self.every:
                stage.captured.clear()
        shape = tuple((each.shape[1:], each.stride(), each.dtype) for each in state)
        if shape not in self.captured and 0 < count == size and len(self.captured) < SHAPES:
            with torch.cuda.device(state[0].device):
                self.captured[shape] = self._captured(state)
        captured = self.captured.get(shape)
        return None if captured is None or count > size or (count < size and not captured.fast) else captured

    def _replayed(self, captured: Captured, state: Sequence[Tensor]) -> Any:
        count, size = len(state[0]), len(captured.given[0])
        with torch.cuda.device(state[0].device):
            for there, each in zip(captured.given, state, strict=True):
                (there if count == size else there[:count]).copy_(each)
            captured.graph.replay()
            return tree_map_only(Tensor, partial(_first_rows, count=count, size=size), captured.made)

    def _captured(self, state: Sequence[Tensor]) -> Captured:
        given, launching, made = tuple(each.clone() for each in state), [], [None]

        def run() -> None:
            start = time.perf_counter()
            made[0] = self.run(*given)
            launching.append(time.perf_counter() - start)

        try:
            graph = self.captures.capture(run)
            for module in self.modules:
                self.addresses.follow(memory_use(getattr(module, "logits", module), given).outside)
        except (RuntimeError, AlightError) as error:
            raise AlightError(
                f"stage {self.index} cannot be captured as a CUDA graph ({str(error).splitlines()[0]}):"
                " run it with graphs=False"
            ) from error
        replaying = min(_seconds(graph.replay, torch.cuda.synchronize) for _ in range(WARMING))
        return Captured(graph, given, made[0], replaying < min(launching[:WARMING]))


def _first_rows(made: Tensor, count: int, size: int) -> Tensor:
    """Return what was made of the first `count` samples of a batch, in memory of its own."""
    return (made if count == size else made[: len(made) // size * count]).clone()


def _seconds(*work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for each in work:
        each()
    return time.perf_counter() - start
