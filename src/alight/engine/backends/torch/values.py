"""Head values computed by torch where the logits are, packed into one tensor: one copy brings them to the host."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from alight.engine.backends import SOFTMAX_SCORES, HeadValues, Reads, unpack
from alight.engine.backends.torch.rows import kernels
from alight.scores import score_of, top_classes

FUSED = ("margin", "max_probability")  # scores that the Triton kernel computes
CLASSES = 2**13  # at most, which one program of the kernel still holds
RANKS = 8  # likeliest classes at most that the kernel finds, one after the other


def pack(logits: Tensor, reads: Reads) -> Tensor:
    """Return class, largest logit, scores, probability and top side by side in float64, one row per sample.

    The top are the likeliest classes and, beside all of them, their log-probabilities.
    """
    columns, probability, top = reads
    packed = pack_by_kernel(logits, Reads(columns[:1], probability, top)) if columns or top else None
    if packed is not None and len(columns) <= 1:
        return packed
    exact = logits.double() if any(reads) else logits  # the largest is one of them, unchanged
    if packed is not None:
        parts = [packed[:, :3], *(score_of(name, exact) for name in columns[1:]), packed[:, 3:]]
    else:
        largest, predictions = exact.max(-1)
        parts = [predictions.double(), largest, *(score_of(name, exact) for name in columns)]
        parts += [score_of("max_probability", exact)] if probability else []
        parts += top_classes(exact, top) if top else ()
    return torch.cat([part if part.ndim == 2 else part[:, None] for part in parts], dim=1)


def is_fused(reads: Reads) -> bool:
    """Return whether one kernel computes everything that is read, unless there are very many classes."""
    return len(reads.columns) <= 1 and {*reads.columns} <= {*FUSED} and reads.top <= RANKS


def columns_of(packed: Tensor, reads: Reads) -> tuple[Tensor, ...]:
    """Return what a policy reads of packed values: scores, then likeliest classes and their logs, as `unpack` does."""
    scores = 2 + len(reads.columns)
    columns = packed[:, 2:scores].unbind(1)
    if not reads.top:
        return columns
    classes, logs = packed[:, scores + reads.probability :].chunk(2, 1)
    return (*columns, classes.int(), half(logs))


def half(numbers: Tensor) -> Tensor:
    """Return float64 numbers in half precision, rounded once, as NumPy does: torch rounds to float32 in between.

    >>> half(torch.tensor([1.00048828125 + 1e-9], dtype=torch.float64)).item()
    1.0009765625
    """
    between = numbers.float()
    bits = between.view(torch.int32)
    bits = bits - (between.double().abs() > numbers.abs()).int()  # towards zero
    inexact = between.view(torch.int32).copy_(bits).view(torch.float32).double() != numbers
    return (bits | inexact.int()).view(torch.float32).half()  # a last bit that says there is more breaks ties


def score_one(logits: Tensor, reads: Reads) -> HeadValues:
    """Return the values of a single sample on the host as numbers, equal to the bit to those of `pack`.

    It makes few calls, since each costs more than the arithmetic: one softmax in float64 and its two largest.
    """
    columns, probability, _ = reads
    if not any(reads):
        largest, place = logits.max(-1)
        return HeadValues(place.item(), largest.item(), (), None)
    if reads.top or columns not in SOFTMAX_SCORES:
        values = unpack(pack(logits, reads).numpy(), reads)
        top = None if values.probabilities is None else values.probabilities.item()
        return HeadValues(
            values.predictions.item(), values.largest.item(), tuple(each[0] for each in values.columns), top
        )
    two, places = logits.softmax(-1, dtype=torch.float64).topk(2)
    first, second = two.tolist()[0]
    prediction = (places if first > second else logits.argmax(-1, keepdim=True)).tolist()[0][0]
    score = first - second if columns == ("margin",) else first
    largest_logit = 0.0 if score == score else logits.amax().item()  # NaN where the logits are unusable
    return HeadValues(prediction, largest_logit, (score,) if columns else (), first if probability else None)


class OnDevice:
    """Head values of a batch on a GPU: packed, or the logits of the last exit, which are packed when fetched."""

    def __init__(self, values: Tensor, reads: Reads, packed: bool) -> None:
        self.values, self.reads, self.packed = values, reads, packed
        self.nbytes = values.nbytes
        self.arrived: Any = None

    def send(self) -> None:
        """Start the copy to the host."""
        values = self.values if self.packed else pack(self.values, self.reads)
        self.packed = True
        if not values.is_cuda:
            self.values = values.cpu()
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self.values = host.copy_(values, non_blocking=True)
        self.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.arrived.record()

    def get(self) -> HeadValues:
        """Return the values once they have arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return unpack(self.values.numpy(), self.reads)

    def gather(self, others: Sequence[Self]) -> HeadValues:
        """Return the values of these and of further batches of the stage, fetched at once."""
        joined = torch.cat([self.values, *(each.values for each in others)])
        return unpack((joined if self.packed else pack(joined, self.reads)).cpu().numpy(), self.reads)


def pack_by_kernel(logits: Tensor, reads: Reads) -> Tensor | None:
    """Return class, largest logit, perhaps one score, the probability and the top by one kernel instead of ten.

    Each of ten takes longer to launch than to run. None where no kernel of ours does it.
    """
    columns, probability, top = reads
    if not logits.is_cuda or torch.compiler.is_compiling():  # a compiler fuses better still
        return None
    if not is_fused(reads) or logits.shape[1] > CLASSES:
        return None
    if (found := kernels()) is None:
        return None
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    count, classes = logits.shape
    ranks = min(top, classes)
    packed = torch.empty(count, 2 + len(columns) + probability + 2 * ranks, dtype=torch.float64, device=logits.device)
    block = max(2, 1 << (classes - 1).bit_length())
    with torch.cuda.device(logits.device):
        found.pack_logits[(count,)](
            logits,
            packed,
            logits.stride(0),
            classes,
            SCORE=len(columns),
            MARGIN=columns == ("margin",),
            PROBABILITY=probability,
            RANKS=ranks,
            BLOCK=block,
            num_warps=1 if block <= 256 else 4,
        )
    return packed
