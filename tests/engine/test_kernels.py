"""Our own kernels, run by Triton's interpreter where there is no GPU."""

import numpy as np
import pytest
import torch
from interpreted import INTERPRETED, interpreted, passed_in_a_process_of_their_own, skip_without_loops

from alight.budgeting.thresholds import tie_range
from alight.engine.backends import Reads
from alight.engine.backends.torch.rows import kernels
from alight.engine.backends.torch.values import pack
from alight.policies.combinations import Gain, GeometricMean, Vote
from alight.policies.policy import Threshold

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="is that process")
def test_kernels_are_interpreted_in_a_process_of_their_own():
    skip_without_loops()
    assert "95 passed, 10 skipped" in passed_in_a_process_of_their_own(__file__)


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("classes", [2, 3, 100])
@pytest.mark.parametrize(
    ("column", "probability", "top"),
    [("margin", 0, 0), ("margin", 1, 5), ("max_probability", 0, 2), ("", 0, 5), ("", 1, 2)],
)
def test_one_kernel_packs_logits_as_torch_does(classes, column, probability, top):
    from alight.engine.backends.torch.kernels import pack_logits

    logits = 4 * torch.randn(9, classes + 2, generator=torch.Generator().manual_seed(3))[:, :classes]  # rows far apart
    logits[0], logits[1, 1:] = 1.0, -np.inf  # all level; all but one masked out
    logits[2, 1], logits[3, 0], logits[4] = np.nan, np.inf, -np.inf
    expected = pack(logits, Reads((column,) if column else (), bool(probability), top))
    packed = torch.empty_like(expected)
    options = {"SCORE": bool(column), "MARGIN": column == "margin", "PROBABILITY": probability}
    options["RANKS"] = min(top, classes)
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


def weights_of(generator, exits):
    """Constants and slopes of a vote: for each exit one number for each exit so far."""
    return tuple(tuple(generator.uniform(0, 3, size=index + 1).round(1).tolist()) for index in range(exits))


@interpreted
@pytest.mark.parametrize("size", [1, 9])
@pytest.mark.parametrize("exits", [1, 2, 5])
@pytest.mark.parametrize("ranks", [0, 1, 2, 5])  # none: a vote
def test_one_kernel_combines_exits_as_numpy_does_to_the_bit(size, exits, ranks):
    from alight.engine.backends.torch.kernels import combine_rows

    generator, chain = np.random.default_rng(100 * size + 10 * exits + ranks), tuple(range(exits))
    if ranks:
        kept, fresh = ((0.0, *generator.uniform(size=exits - 1)), tuple(generator.uniform(size=exits)))
        rule = GeometricMean(exits=chain, kept=kept, fresh=fresh, top=ranks)
    else:
        constants, slopes = (weights_of(generator, exits) for _ in range(2))
        rule = Vote(exits=chain, constants=constants, slopes=slopes, others=tuple(generator.uniform(size=exits)))
    memory, room = (), torch.zeros(size, 1, dtype=torch.float64)
    for index in chain:
        classes = np.argsort(generator.random((size, 6)), axis=1)[:, : ranks or 1]  # which come again at other exits
        logs = -np.sort(generator.choice([0.1, 0.7, 1 / 3, 29.99, 40.0, np.inf], (size, ranks or 1)))  # with ties
        margins = generator.choice([0.0, 0.1, 1 / 3, 0.5], size)
        columns = (classes, logs.astype(np.float16)) if ranks else (margins,)
        answers, scores, memory = rule.step(index, classes[:, 0], columns, memory)
        parts = [classes[:, :1], margins[:, None] + 7, *([classes, logs] if ranks else [margins[:, None]])]
        packed, count = torch.from_numpy(np.concatenate(parts, 1)), (ranks or 1) * (index + 1)
        numbers = torch.tensor(rule.numbers(index), dtype=torch.float64)
        made = packed.new_empty(size, 3), packed.new_empty(size, 2 * count + 1)
        given = (packed, packed.shape[1], 2, room, numbers, ranks or 1, count, *made)
        combine_rows[(size,)](*given, VOTES=not ranks, BLOCK=1 << max(1, (count - 1).bit_length()))
        expected = np.stack([answers, margins + 7, scores], 1)
        np.testing.assert_array_equal(made[0].numpy(), expected)
        np.testing.assert_array_equal(made[1][:, : 2 * count].numpy(), np.concatenate(memory[:2], 1))
        room = made[1]


def gain_of(generator, exits, columns, most):
    """A gain with all kinds of numbers: columns with fewer knots than others, classes that have a gain or none."""
    counts = generator.integers(most + 1, size=(exits, columns))
    counts[0, 0] = most
    knots = [[tuple(np.sort(generator.uniform(size=count)).tolist()) for count in each] for each in counts]
    sizes = [1 + each.sum() + columns if index == 0 else 5 + (4 + 2 * each).sum() for index, each in enumerate(counts)]
    return Gain(
        exits=tuple(range(exits)),
        columns=tuple(f"column {index}" for index in range(columns)),
        knots=tuple(map(tuple, knots)),
        weights=tuple(tuple(generator.normal(size=size).tolist()) for size in sizes),
        class_gains=tuple(tuple(generator.normal(size=generator.integers(5)).tolist()) for _ in range(exits)),
    )


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("exits", [2, 7])
@pytest.mark.parametrize(("columns", "most", "probability"), [(1, 0, False), (1, 5, True), (3, 2, True), (2, 4, False)])
def test_one_kernel_scores_gains_as_numpy_does_to_the_bit(seed, exits, columns, most, probability):
    from alight.engine.backends.torch.kernels import score_rows

    size, generator = 6, np.random.default_rng(1000 * seed + 100 * exits + 10 * columns + most)
    rule = gain_of(generator, exits, columns, most)
    memory, room, block = (), None, 1 << max(1, (exits - 1).bit_length())
    for index in range(exits):
        packed = generator.normal(size=(size, 2 + columns + probability))
        packed[:, 0] = generator.integers(6, size=size)  # some have no gain
        packed[0, 2:] = rule.knots[index][0][:1] or 0.0  # on a knot
        packed[1, 2] = np.inf if generator.random() < 0.3 else 0.0  # as a margin of logits where others are masked
        expected = packed.copy()
        classes, *given = packed[:, 0].astype(int), *packed[:, 2 : 2 + columns].T
        _, expected[:, 2], memory = rule.step(index, classes, tuple(given), memory)
        numbers, packed = torch.tensor(rule.numbers(index), dtype=torch.float64), torch.from_numpy(packed)
        made = packed.new_full(packed.shape, 5.0), packed.new_full((size, 3 * columns + 2 * (index + 1)), 5.0)
        given = packed, packed.shape[1], packed if room is None else room, numbers, index, *made
        score_rows[(size,)](*given, COLUMNS=columns, KNOTS=rule.most_knots, BLOCK=block)
        read = [0, 1, 2, *[2 + columns] * probability]
        np.testing.assert_array_equal(made[0][:, read].numpy(), expected[:, read])
        room = made[1]


ADMIT = {"sent": "*i64", "numbers": "i32", "index": "i32", "target": "*i16", "words": "i32", "control": "*i64"}
MOVE = {"source": "*i64", "rows": "*i64", "target": "*i64", "slots": "*i64", "words": "i32"}


@interpreted
@pytest.mark.parametrize(
    "threshold", [0.0, 1e-300, 0.0032, 0.3, 0.9, 1 - 1e-12, 1.0, 7.5, -0.2, -1e-9, np.inf, -np.inf]
)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_one_kernel_decides_about_ties_as_numpy_does_to_the_bit(threshold, share):
    from alight.engine.backends.torch.kernels import settle_rows

    policy = Threshold((threshold,), (share,), costs=(1.0, 2.0), salt=7 << 32 | 11)
    ends = tie_range(threshold)
    scores = np.repeat([threshold, *(np.nextafter(end, to) for end in ends for to in (-np.inf, end, np.inf))], 8)
    samples, size = (2**34 + 1) * np.arange(-40, len(scores) - 40), len(scores)  # beyond 32 bits, on either side of 0
    expected = policy.step(0, samples, scores, scores, ())[0]
    ties, rule = policy.numbers(0)
    packed = torch.from_numpy(np.stack([np.zeros(size), np.ones(size), scores], 1))
    numbers, here = torch.from_numpy(samples), torch.zeros(size, 4, dtype=torch.int64)
    after, seen, moved = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), torch.zeros_like(numbers)
    nothing, count = torch.zeros(1, dtype=torch.int64), torch.tensor([size])
    tied, rules, rows = torch.tensor(ties, dtype=torch.float64), torch.tensor(rule), torch.zeros(size, 1)
    settle_rows[(size, 1)](
        *(*[packed] * 4, 3, 3, numbers, packed, tied, rules, count, size, 0, nothing, nothing, after, seen, here, size),
        *(moved, size, *[rows] * 4, rows.clone(), 1, *[rows] * 5, 0, *[rows] * 5, 0),
        BATCHES=1,
        TENSORS=1,
        FIRST=True,
        LAST=False,
        DECIDED=False,
        PROBABILITY=False,
        ROWS=1 << (size - 1).bit_length(),
        BLOCK=8,
    )
    left = int(expected.sum())
    assert after.tolist() == seen.tolist() == [left, size - left]
    np.testing.assert_array_equal(here[:left, 0].numpy(), samples[expected])
    np.testing.assert_array_equal(moved[: size - left].numpy(), samples[~expected])


PACK = {"logits": "*bf16", "packed": "*fp64", "stride": "i32", "classes": "i32"}
POINTERS = """samples decided rules waiting answered arrived after seen answers next_samples source source_b source_c
source_d target source_2 source_2b source_2c source_2d target_2""".split()
SETTLE = dict.fromkeys("packed packed_b packed_c packed_d tied".split(), "*fp64") | dict.fromkeys(POINTERS, "*i64")
SETTLE |= dict.fromkeys("width probability size stage ring next_ring words words_2 words_3".split(), "i32")
SETTLE |= dict.fromkeys("source_3 source_3b source_3c source_3d target_3".split(), "*i8")
SETTLED = {"BATCHES": 1, "TENSORS": 3, "FIRST": True, "LAST": False, "DECIDED": False, "PROBABILITY": True}
SETTLED |= {"ROWS": 64, "BLOCK": 8}
COMBINE = dict.fromkeys("packed memory numbers combined remembered".split(), "*fp64")
COMBINE |= dict.fromkeys("width first ranks count".split(), "i32")
SCORE = dict.fromkeys("packed memory numbers combined remembered".split(), "*fp64") | {"width": "i32", "earlier": "i32"}
ON_A_GPU = {
    "admit_rows": (ADMIT, {"FIRST": True, "BLOCK": 1024}),
    "combine_rows, votes": (COMBINE, {"VOTES": True, "BLOCK": 4}),
    "combine_rows, means": (COMBINE, {"VOTES": False, "BLOCK": 32}),
    "move_rows": (MOVE, {"BLOCK": 2048}),
    "pack_logits": (PACK, {"SCORE": 1, "MARGIN": True, "PROBABILITY": 1, "RANKS": 5, "BLOCK": 128}),
    "score_rows, one column": (SCORE, {"COLUMNS": 1, "KNOTS": 0, "BLOCK": 2}),
    "score_rows, all columns": (SCORE, {"COLUMNS": 4, "KNOTS": 5, "BLOCK": 32}),
    "settle_rows": (SETTLE, SETTLED),
    "settle_rows, batches beside each other": (SETTLE, SETTLED | {"BATCHES": 4, "ROWS": 256}),
}


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled there")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")
@pytest.mark.parametrize("name", ON_A_GPU)
def test_kernels_compile_for_gpus_that_are_not_here(name):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from alight.engine.backends.torch import kernels as own

    kernel, (types, constants) = getattr(own, name.partition(",")[0]), ON_A_GPU[name]
    signature = {each: types.get(each, "constexpr") for each in kernel.arg_names}
    assert {each for each, kind in signature.items() if kind == "constexpr"} == set(constants)
    source, exact = ASTSource(kernel, signature, constants), name.startswith(("combine_rows", "score_rows"))
    options = {"enable_fp_fusion": False, "num_warps": 1} if exact else {}
    assembly = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    assert assembly["cubin"]
    if exact:
        assert "DADD" in assembly["sass"]
        assert "DFMA" not in assembly["sass"]
