"""Kernels of our own for CUDA devices; imported only where Triton is."""

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
