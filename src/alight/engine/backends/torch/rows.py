"""Rows of tensors, one per sample, taken and moved as raw memory whatever their layout."""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alight.engine.backends import Integers, State

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # by bytes, the widest first
BLOCK = 2048  # words that one program of the kernel moves


def take(state: State, rows: Integers) -> State:
    """Return the tensors of the samples in these rows, in new memory."""
    places = _on_device(rows, state[0])
    made = []
    for source in state:
        target = _empty(len(rows), source)
        flat, into = _flat(source), _flat(target)
        if flat is None or into is None:
            target.copy_(source[places])
        else:
            torch.index_select(flat, 0, places, out=into)
        made.append(target)
    return tuple(made)


def move(source: State, rows: Integers, target: State, slots: Integers) -> None:
    """Copy rows of some tensors into slots of others of the same kind."""
    places, there = _on_device(np.stack([rows, slots]), source[0])
    for one, other in zip(source, target, strict=True):
        flat, into = _flat(one), _flat(other)
        if flat is None or into is None or layout_of(one) != layout_of(other):
            other[there] = one[places]
        elif one.is_cuda and (found := kernels()) is not None:
            _launch_move(found.move_rows, flat, places, into, there)
        else:
            into.index_copy_(0, there, flat.index_select(0, places))


def allocate(size: int, like: State) -> State:
    """Return memory for so many samples, laid out like these."""
    return tuple(_empty(size, each) for each in like)


def _empty(size: int, like: Tensor) -> Tensor:
    shape = (size, *like.shape[1:])
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout_of(like))


def owns(made: State, given: State) -> bool:
    """Return whether tensors lie in memory of their own: neither in that of `given` nor twice in the same."""
    places = [each.untyped_storage().data_ptr() for each in made]
    others = {each.untyped_storage().data_ptr() for each in given}
    plain = all(_flat(each) is not None for each in made)
    return plain and len({*places}) == len(places) and others.isdisjoint(places)


def _on_device(rows: Integers, like: Tensor) -> Tensor:
    places = torch.from_numpy(rows)
    return places if like.device.type == "cpu" else places.pin_memory().to(like.device, non_blocking=True)


def _flat(tensor: Tensor) -> Tensor | None:
    """Return the tensor as (samples, numbers) in the order of memory, without copying; None where impossible."""
    if tensor.is_contiguous():
        return tensor.view(len(tensor), -1)
    return tensor.permute(0, 2, 3, 1).view(len(tensor), -1) if layout_of(tensor) is torch.channels_last else None


def layout_of(tensor: Tensor) -> torch.memory_format:
    """Return the order of memory of a tensor."""
    is_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last and not tensor.is_contiguous() else torch.contiguous_format


def laid_out_like(target: Tensor, sources: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in the memory layout of another."""
    return [each.contiguous(memory_format=layout_of(target)) for each in sources]


def words(*tensors: Tensor) -> list[Tensor]:
    """Return rows of tensors as the widest words that all of them consist of, (samples, words), where they lie."""
    flat = [each.contiguous().view(len(each), -1) if (found := _flat(each)) is None else found for each in tensors]
    width = next(size for size in WORDS if all(_is_made_of(each, size) for each in flat))
    return [each.view(WORDS[width]) for each in flat]


def _launch_move(kernel: Any, source: Tensor, rows: Tensor, target: Tensor, slots: Tensor) -> None:
    """Move rows by one Triton kernel, which reads and writes every number once."""
    flat, into = words(source, target)
    count = flat.shape[1]
    with torch.cuda.device(source.device):
        kernel[(len(rows), -(-count // BLOCK))](flat, rows, into, slots, count, BLOCK=BLOCK)


def _is_made_of(tensor: Tensor, width: int) -> bool:
    """Return whether every row consists of whole words of so many bytes, none smaller than its numbers."""
    size = tensor.element_size()
    return width >= size and not tensor.shape[1] * size % width and not tensor.storage_offset() * size % width


@cache
def kernels(device: str = "cuda") -> Any:
    """Return the module of Triton kernels, once each has run on the device; None without Triton.

    Where a launch fails, as for want of a compiler, one warning says why, and torch's own calls do the same.
    """
    try:
        from alight.engine.backends.torch import kernels as found
    except ImportError:
        return None
    try:
        found.run_each(device)
    except Exception as error:  # drivers, compilers and Triton itself fail in a dozen ways
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        warnings.warn(f"Triton kernels do not run here ({reason}): torch does their work, more slowly", stacklevel=2)
        return None
    return found
