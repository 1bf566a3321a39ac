"""What is told of logits on a GPU by one kernel, instead of ten that each take longer to launch than to run."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

FUSED = ("margin", "max_probability")
CLASSES = 2**13  # at most, which one program still holds


def fused(logits: Tensor, columns: Sequence[str], with_chance: bool) -> Tensor | None:
    """Class, largest logit, score and perhaps chance, side by side; None where no kernel of ours does it."""
    if not logits.is_cuda or torch.compiler.is_compiling():  # a compiler fuses better still
        return None
    if len(columns) != 1 or columns[0] not in FUSED or logits.shape[1] > CLASSES or (kernel := _kernel()) is None:
        return None
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    count, classes = logits.shape
    made = torch.empty(count, 3 + with_chance, dtype=torch.float64, device=logits.device)
    block = max(2, 1 << (classes - 1).bit_length())
    with torch.cuda.device(logits.device):
        kernel[(count,)](
            logits,
            made,
            logits.stride(0),
            classes,
            MARGIN=columns[0] == "margin",
            WIDTH=3 + with_chance,
            BLOCK=block,
            num_warps=1 if block <= 256 else 4,
        )
    return made


@cache
def _kernel() -> Any:
    """The kernel; None where there is no Triton, or no compiler for it."""
    try:
        from alight.engine.kernels import tell

        few, made = torch.zeros(1, 2, device="cuda"), torch.empty(1, 3, dtype=torch.float64, device="cuda")
        tell[(1,)](few, made, 2, 2, MARGIN=True, WIDTH=3, BLOCK=2, num_warps=1)
    except Exception:  # whatever is missing on this machine: torch's own calls do the same
        return None
    return tell
