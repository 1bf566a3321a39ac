"""Our own kernels, run by Triton's interpreter where there is no GPU."""

import numpy as np
import pytest
import torch
from interpreted import INTERPRETED, interpreted, passed_in_a_process_of_their_own

from alight.engine.backends import Reads
from alight.engine.backends.torch.rows import kernels
from alight.engine.backends.torch.values import pack

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="is that process")
def test_kernels_are_interpreted_in_a_process_of_their_own():
    assert "13 passed, 5 skipped" in passed_in_a_process_of_their_own(__file__)


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("classes", [2, 3, 100])
@pytest.mark.parametrize(
    ("column", "probability", "top"), [("margin", 0, 0), ("margin", 1, 5), ("max_probability", 0, 2)]
)
def test_one_kernel_packs_logits_as_torch_does(classes, column, probability, top):
    from alight.engine.backends.torch.kernels import pack_logits

    logits = 4 * torch.randn(9, classes + 2, generator=torch.Generator().manual_seed(3))[:, :classes]  # rows far apart
    logits[0], logits[1, 1:] = 1.0, -np.inf  # all level; all but one masked out
    logits[2, 1], logits[3, 0], logits[4] = np.nan, np.inf, -np.inf
    expected = pack(logits, Reads((column,), bool(probability), top))
    packed = torch.empty_like(expected)
    options = {"MARGIN": column == "margin", "PROBABILITY": probability, "RANKS": min(top, classes)}
    pack_logits[(9,)](logits, packed, logits.stride(0), classes, **options, BLOCK=1 << (classes - 1).bit_length())
    assert not packed[2:5, 1].isfinite().any()
    usable = [0, 1, 5, 6, 7, 8]
    torch.testing.assert_close(packed[usable], expected[usable], rtol=1e-12, atol=1e-14)


@interpreted
def test_rows_are_moved_and_nothing_else():
    from alight.engine.backends.torch.kernels import move_rows

    source, target = torch.arange(30).reshape(6, 5), -torch.ones(4, 5, dtype=torch.int64)
    move_rows[(2, 2)](source, torch.tensor([5, 1]), target, torch.tensor([0, 3]), 5, BLOCK=4)
    assert target.tolist() == [[25, 26, 27, 28, 29], [-1] * 5, [-1] * 5, [5, 6, 7, 8, 9]]


@interpreted
def test_kernels_that_run_on_the_device_are_taken():
    assert kernels("cpu").__name__ == "alight.engine.backends.torch.kernels"


@interpreted
def test_kernels_whose_launch_fails_are_left_out_with_a_warning_that_says_why():
    with pytest.warns(UserWarning, match=r"kernels do not run here \(.*nowhere.*\): torch does their work"):
        assert kernels("nowhere") is None


@interpreted
def test_the_launches_that_look_for_a_compiler_have_the_arguments_of_their_kernels():
    from alight.engine.backends.torch.kernels import run_each

    assert run_each("cpu").tolist() == [[0.0, 0.0, 0.0]]  # class, largest logit and margin of two equal logits


ADMIT = {"sent": "*i64", "numbers": "i32", "index": "i32", "target": "*i16", "words": "i32", "control": "*i64"}
MOVE = {"source": "*i64", "rows": "*i64", "target": "*i64", "slots": "*i64", "words": "i32"}
PACK = {"logits": "*bf16", "packed": "*fp64", "stride": "i32", "classes": "i32"}
POINTERS = "samples decided rules waiting answered arrived after seen answers next_samples source target".split()
SETTLE = {"packed": "*fp64", "threshold": "*fp64"} | dict.fromkeys(POINTERS, "*i64")
SETTLE |= dict.fromkeys("width probability size stage ring next_ring words".split(), "i32")
DECIDES = {"LAST": False, "DECIDED": False}
ON_A_GPU = {
    "admit_rows": (ADMIT, {"FIRST": True, "BLOCK": 1024}),
    "move_rows": (MOVE, {"BLOCK": 2048}),
    "pack_logits": (PACK, {"MARGIN": True, "PROBABILITY": 1, "RANKS": 5, "BLOCK": 128}),
    "settle_rows": (
        SETTLE,
        {"FIRST": True, "LAST": False, "DECIDED": False, "PROBABILITY": True, "ROWS": 64, "BLOCK": 8},
    ),
}


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled there")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")
@pytest.mark.parametrize("name", ON_A_GPU)
def test_kernels_compile_for_gpus_that_are_not_here(name):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from alight.engine.backends.torch import kernels as own

    kernel, (types, constants) = getattr(own, name), ON_A_GPU[name]
    signature = {each: types.get(each, "constexpr") for each in kernel.arg_names}
    assert {each for each, kind in signature.items() if kind == "constexpr"} == set(constants)
    source = ASTSource(kernel, signature, constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
