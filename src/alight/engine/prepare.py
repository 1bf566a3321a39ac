"""A network made ready to run: on its device, in its dtype and memory layout, perhaps compiled."""

import copy
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from alight.errors import AlightError, BadInput
from alight.networks.multi_exit import Carried, MultiExitModel

LAST = torch.channels_last
DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
FILTERS = hasattr(torch.compiler, "keep_tensor_guards_unsafe")  # can this torch leave guards out?


def prepared(
    model: MultiExitModel,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    channels_last: bool = False,
) -> MultiExitModel:
    """The network in evaluation mode as it will run; a copy, unless nothing but its mode has to change."""
    place, kind = device_of(model, device), as_dtype(dtype)
    tensors = [*model.parameters(), *model.buffers()]
    moved = any(each.device != place for each in tensors)
    cast = kind is not None and any(each.dtype != kind for each in tensors if each.is_floating_point())
    turned = channels_last and not all(each.is_contiguous(memory_format=LAST) for each in tensors if each.dim() == 4)
    if moved or cast or turned:
        model = copy.deepcopy(model).to(device=place, dtype=kind)
        if channels_last:
            model = model.to(memory_format=LAST)
    elif model.training:
        model = copy.deepcopy(model, {id(each): each for each in tensors})  # its own mode, the same weights
    return model.eval()


def device_of(model: nn.Module, device: str | torch.device | None = None) -> torch.device:
    """The device asked for, or the network's own."""
    own = next((each.device for each in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    wanted = own if device is None else torch.device(device)
    if wanted.type == "cuda":
        if not torch.cuda.is_available():
            raise BadInput("device 'cuda' was asked for and there is none: choose device='cpu'")
        wanted = torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)
    return wanted


def as_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype by its name, "bf16", "fp16" or "fp32"."""
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise BadInput(f"there is no dtype {dtype!r} here: choose bf16, fp16 or fp32")
        return DTYPES[dtype]
    return dtype


def placed(carried: Carried, device: torch.device, dtype: torch.dtype | None, channels_last: bool) -> Carried:
    """Inputs as the prepared network takes them; only floating point numbers change their dtype."""

    def moved(tensor: Tensor) -> Tensor:
        tensor = tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)
        last = channels_last and tensor.dim() == 4 and tensor.is_floating_point()
        return tensor.contiguous(memory_format=LAST) if last else tensor

    return tuple(moved(each) for each in carried)


def pinned(carried: Carried, device: torch.device) -> Carried:
    """Inputs in memory from which a GPU can copy while it works; as they are where the network does not run on one."""
    if device.type != "cuda":
        return carried
    return tuple(each if each.is_cuda or each.is_pinned() else each.pin_memory() for each in carried)


def compiled(segments: Sequence[nn.Module]) -> list[Callable[..., Any]]:
    """The segments, each compiled as a whole for batches of any size; where compilation gives up, that is an error."""
    return [_compiled(open_index, segment) for open_index, segment in enumerate(segments)]


def _compiled(open_index: int, segment: nn.Module) -> Callable[..., Any]:
    """One segment, compiled under code of its own: the compiler counts recompilations by code, not by network."""

    def run(*carried: Tensor) -> Any:
        return segment(*carried)

    own = types.FunctionType(
        run.__code__.replace(co_name=f"segment_{open_index}"), run.__globals__, "run", None, run.__closure__
    )
    options: dict[str, Any] | None = {"guard_filter_fn": _kept_guards} if FILTERS else None
    quick = torch.compile(own, fullgraph=True, dynamic=None, options=options)

    def checked(*carried: Tensor) -> Any:
        for each in carried:
            if len(each) > 1:  # one alone is compiled for itself
                torch._dynamo.maybe_mark_dynamic(each, 0)
        try:
            return quick(*carried)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise AlightError(
                f"compiling segment {open_index} gave up ({type(error).__name__}: {str(error).splitlines()[0]}):"
                " run it with compile=False"
            ) from error

    return checked


def _kept_guards(guards: Sequence[Any]) -> list[bool]:
    """What is looked at before every call: what is given, and of the segment not every layer.

    Its first tensor and its first mode are enough to notice that all of it has moved, or been set to training.
    """
    kept: dict[bool, str] = {}
    for each in guards:
        is_tensor = each.guard_type == "TENSOR_MATCH"
        if "segment" in each.name and (is_tensor or each.name.endswith(".training")):
            kept.setdefault(is_tensor, each.name)
    return ["segment" not in each.name or each.name in kept.values() for each in guards]


def threads(count: int | None) -> AbstractContextManager[None]:
    """So many threads of torch on the host while it lasts; None leaves them as they are."""
    if count is not None and count < 1:
        raise BadInput(f"{count} threads: give 1 or more")
    return nullcontext() if count is None else _threads(count)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
