"""Triton kernels for CUDA devices; imported only where Triton is."""

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def move_rows(source, rows, target, slots, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Copy row `rows[i]` of the source into row `slots[i]` of the target, `words` numbers each."""
    pair = tl.program_id(0)
    places = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < words
    numbers = tl.load(source + tl.load(rows + pair) * words + places, mask=inside)
    tl.store(target + tl.load(slots + pair) * words + places, numbers, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def pack_logits(  # type: ignore[no-untyped-def]
    logits,
    packed,
    stride,
    classes,
    MARGIN: tl.constexpr,  # noqa: N803
    PROBABILITY: tl.constexpr,  # noqa: N803
    RANKS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Write class, largest logit, score, perhaps probability, and top of every row of logits, in float64.

    The top are the RANKS likeliest classes, then their log-probabilities.
    """
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + places, mask=places < classes, other=-float("inf")).to(tl.float64)
    largest, best = tl.max(values, 0, return_indices=True)
    weights = tl.exp(values - largest)
    total = tl.sum(weights, 0)
    top = 1.0 / total
    score = top
    if MARGIN:
        score = top - tl.max(tl.where(places == best, 0.0, weights), 0) / total
    there = packed + row * (3 + PROBABILITY + 2 * RANKS)
    tl.store(there, best.to(tl.float64))
    tl.store(there + 1, tl.where(total == total, largest, total))
    tl.store(there + 2, score)
    if PROBABILITY:
        tl.store(there + 3, top)
    there += 3 + PROBABILITY
    lowest = -1.7e308  # stands for the logits of masked classes, which are found before a class is found again
    waiting = tl.where(places < classes, tl.maximum(values, lowest), values)
    for rank in tl.static_range(RANKS):
        value, place = tl.max(waiting, 0, return_indices=True)
        tl.store(there + rank, place.to(tl.float64))
        tl.store(there + RANKS + rank, tl.where(value > lowest, value - largest - tl.log(total), -float("inf")))
        waiting = tl.where(places == place, -float("inf"), waiting)


def run_each(device: str) -> torch.Tensor:
    """Launch every kernel once on a device, so that what is missing there is known; return what the last one wrote."""
    words, place = (torch.zeros(count, dtype=torch.int64, device=device) for count in (8, 1))
    move_rows[(1, 1)](words, place, words, place, 8, BLOCK=8)
    logits, packed = torch.zeros(1, 2, device=device), torch.empty(1, 3, dtype=torch.float64, device=device)
    pack_logits[(1,)](logits, packed, 2, 2, MARGIN=True, PROBABILITY=0, RANKS=0, BLOCK=2)
    return packed
