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
    values = rows(logits, Reads(("log_probabilities",)))
    assert np.isneginf(values.columns[0][0, 2])
    assert np.isfinite(values.largest).all()
