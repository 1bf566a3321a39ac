"""Triton kernels for CUDA devices; imported only where Triton is."""

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
def pack_logits(logits, packed, stride, classes, MARGIN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Write class, largest logit, score and perhaps probability of every row of logits, in float64."""
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
    there = packed + row * WIDTH
    tl.store(there, best.to(tl.float64))
    tl.store(there + 1, tl.where(total == total, largest, total))
    tl.store(there + 2, score)
    if WIDTH == 4:
        tl.store(there + 3, top)
