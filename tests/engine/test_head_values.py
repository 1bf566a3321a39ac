"""A single sample has the values that it has in a batch, bit by bit, in NumPy and in torch."""

import math

import numpy as np
import pytest
import torch

from alight.engine import backends
from alight.engine.backends import Reads, score_rows, unpack
from alight.engine.backends.torch.values import pack
from alight.engine.backends.torch.values import score_one as torch_score_one

COLUMNS = [(), ("margin",), ("max_probability",), ("negative_entropy",), ("logit_margin",), ("margin", "logit_margin")]


def numpy_rows(logits, reads):
    return score_rows(logits.numpy(), reads)


def numpy_one(logits, reads):
    return backends.score_one(logits.numpy(), reads)


def torch_rows(logits, reads):
    return unpack(pack(logits, reads).numpy(), reads)


LIBRARIES = {"numpy": (numpy_rows, numpy_one), "torch": (torch_rows, torch_score_one)}


@pytest.fixture(params=LIBRARIES)
def library(request):
    return LIBRARIES[request.param]


@pytest.mark.parametrize("probability", [False, True])
@pytest.mark.parametrize("columns", COLUMNS)
def test_a_single_sample_has_the_values_of_a_batch_bit_by_bit(library, columns, probability):
    rows, one = library
    logits = 20 * torch.randn(80, 17, generator=torch.Generator().manual_seed(0))
    logits[0, [2, 5]] = logits[0].max() + 1  # the first of equals
    reads = Reads(columns, probability)
    batch = rows(logits, reads)
    for row, prediction in enumerate(batch.predictions.tolist()):
        values = one(logits[row : row + 1], reads)
        assert (values.predictions, values.columns) == (prediction, tuple(column[row] for column in batch.columns))
        assert values.probabilities == (batch.probabilities[row] if probability else None)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_unusable_logits_show_in_the_largest(library, columns, value):
    rows, one = library
    for place in range(3):
        logits = torch.tensor([[1.0, 3.0, 2.0]])
        logits[0, place] = value
        assert not math.isfinite(one(logits, Reads(columns)).largest)
        assert not np.isfinite(rows(logits, Reads(columns)).largest).any()


def test_a_masked_class_is_not_a_fault(library):
    rows, one = library
    logits = torch.tensor([[1.0, 3.0, -math.inf]])
    assert math.isfinite(one(logits, Reads(("margin",))).largest)
    assert one(logits, Reads(("margin",))).predictions == 1
    values = rows(logits, Reads((), top=3))
    assert values.columns[0].tolist() == [[1, 0, 2]]
    assert np.isneginf(values.columns[1][0, 2])
    assert np.isfinite(values.largest).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top", [1, 5, 40])
def test_the_likeliest_classes_are_the_same_in_numpy_and_torch(dtype, top):
    """Half of the rows have ties, which either library could break its own way."""
    logits = (4 * torch.randn(300, 17, generator=torch.Generator().manual_seed(0))).to(dtype).double()
    logits[::2] = logits[::2].round()
    logits[0, 3:] = -math.inf
    found = [rows(logits, Reads(("margin",), True, top)) for rows, _ in LIBRARIES.values()]
    for values in found:
        assert [column.shape for column in values.columns] == [(300,), (300, min(top, 17)), (300, min(top, 17))]
        assert [column.dtype for column in values.columns[1:]] == [np.int32, np.float16]
        np.testing.assert_array_equal(values.columns[1][:, 0], values.predictions)
    np.testing.assert_array_equal(found[0].columns[1], found[1].columns[1])
    np.testing.assert_array_equal(found[0].columns[2], found[1].columns[2])
