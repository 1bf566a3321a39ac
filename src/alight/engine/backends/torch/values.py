"""Head values computed by torch where the logits are, packed into one tensor: one copy brings them to the host."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alight.engine.backends import LOGS, SOFTMAX_SCORES, HeadValues, Reads, unpack
from alight.engine.backends.torch.rows import kernels
from alight.scores import probabilities, score_of

FUSED = ("margin", "max_probability")  # scores that the Triton kernel computes
CLASSES = 2**13  # at most, which one program of the kernel still holds


def pack(logits: Tensor, reads: Reads) -> Tensor:
    """Return class, largest logit, columns and probability side by side in float64, one row per sample."""
    columns, probability = reads
    first = pack_by_kernel(logits, Reads(columns[:1], probability and len(columns) == 1))
    if first is not None and len(columns) == 1:
        return first
    exact = logits.double() if columns or probability else logits  # the largest is one of them, unchanged
    if first is None:
        largest, predictions = exact.max(-1)
        parts, others = [predictions.double(), largest], columns
    else:
        parts, others = [first], columns[1:]
    for name in others:
        parts.append(probabilities(exact).log() if name == LOGS else score_of(name, exact))
    if probability:
        parts.append(score_of("max_probability", exact))
    return torch.cat([part if part.ndim == 2 else part[:, None] for part in parts], dim=1)


def score_one(logits: Tensor, reads: Reads) -> HeadValues:
    """Return the values of a single sample on the host as numbers, equal to the bit to those of `pack`.

    It makes few calls, since each costs more than the arithmetic: one softmax in float64 and its two largest.
    """
    columns, probability = reads
    if not columns and not probability:
        largest, place = logits.max(-1)
        return HeadValues(place.item(), largest.item(), (), None)
    if columns not in SOFTMAX_SCORES:
        values = unpack(pack(logits, reads).numpy(), reads)
        top = None if values.probabilities is None else values.probabilities.item()
        numbers = tuple(column.item() for column in values.columns)
        return HeadValues(values.predictions.item(), values.largest.item(), numbers, top)
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


def gather(values: Sequence[Any]) -> HeadValues:
    """Return the values of several batches of one stage, fetched at once."""
    joined = torch.cat([each.values for each in values])
    packed = joined if values[0].packed else pack(joined, values[0].reads)
    return unpack(packed.cpu().numpy(), values[0].reads)


def pack_by_kernel(logits: Tensor, reads: Reads) -> Tensor | None:
    """Return class, largest logit, one score and perhaps the probability by one kernel instead of ten.

    Each of ten takes longer to launch than to run. None where no kernel of ours does it.
    """
    columns, probability = reads
    if not logits.is_cuda or torch.compiler.is_compiling():  # a compiler fuses better still
        return None
    if len(columns) != 1 or columns[0] not in FUSED or logits.shape[1] > CLASSES or (found := kernels()) is None:
        return None
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    count, classes = logits.shape
    packed = torch.empty(count, 3 + probability, dtype=torch.float64, device=logits.device)
    block = max(2, 1 << (classes - 1).bit_length())
    with torch.cuda.device(logits.device):
        found.pack_logits[(count,)](
            logits,
            packed,
            logits.stride(0),
            classes,
            MARGIN=columns[0] == "margin",
            WIDTH=3 + probability,
            BLOCK=block,
            num_warps=1 if block <= 256 else 4,
        )
    return packed
