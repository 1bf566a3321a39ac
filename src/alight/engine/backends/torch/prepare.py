"""A network made ready to run: on its device, in its dtype and memory layout; inputs placed for it."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from alight.data.batches import as_tensor
from alight.engine.backends import State
from alight.engine.settings import RunSettings
from alight.errors import BadInput
from alight.networks.multi_exit import MultiExitModel

LAST = torch.channels_last


def prepared(model: MultiExitModel, settings: RunSettings) -> MultiExitModel:
    """Return the network in evaluation mode as it will run; a copy, unless only its mode has to change."""
    device, dtype = device_of(model, settings.device), dtype_of(settings)
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


def device_of(model: nn.Module, device: Any = None) -> torch.device:
    """Return the device asked for, or the network's own."""
    own = next((each.device for each in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    wanted = own if device is None else torch.device(device)
    if wanted.type == "cuda":
        if not torch.cuda.is_available():
            raise BadInput("device 'cuda' was asked for and there is none: choose device='cpu'")
        wanted = torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)
    return wanted


def dtype_of(settings: RunSettings) -> torch.dtype | None:
    """Return the dtype of the settings; None leaves the network's own."""
    return None if settings.dtype is None else getattr(torch, settings.dtype)


def placed(inputs: State, device: torch.device, settings: RunSettings) -> State:
    """Return inputs as the prepared network takes them; only floating point numbers change their dtype."""
    dtype = dtype_of(settings)

    def moved(tensor: Tensor) -> Tensor:
        tensor = tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)
        last = settings.channels_last and tensor.dim() == 4 and tensor.is_floating_point()
        return tensor.contiguous(memory_format=LAST) if last else tensor

    return tuple(moved(as_tensor(each)) for each in inputs)


def pinned(inputs: State, device: torch.device) -> State:
    """Return inputs in memory from which a GPU copies while it works; unchanged for other devices."""
    tensors = tuple(map(as_tensor, inputs))
    if device.type != "cuda":
        return tensors
    return tuple(each if each.is_cuda or each.is_pinned() else each.pin_memory() for each in tensors)


def threads(count: int | None) -> AbstractContextManager[None]:
    """Return a context with so many threads of torch on the host; None leaves them unchanged."""
    return nullcontext() if count is None else _threads(count)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
