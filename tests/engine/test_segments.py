"""What the host is told of a head, of a batch and of one sample alone."""

import math

import pytest
import torch

from alight.engine.segments import apart, told_of_one, wide

COLUMNS = [(), ("margin",), ("max_probability",), ("logit_margin",), ("margin", "negative_entropy")]


@pytest.mark.parametrize("with_chance", [False, True])
@pytest.mark.parametrize("columns", COLUMNS)
def test_one_sample_alone_is_told_as_in_a_batch_bit_by_bit(columns, with_chance):
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0)) * 20
    logits[0, [2, 5]] = logits[0].max() + 1  # the first of equals
    batch = apart(wide(logits, columns, with_chance).numpy(), columns, with_chance)
    for row, prediction in enumerate(batch.predictions.tolist()):
        one = told_of_one(logits[row : row + 1], columns, with_chance)
        assert (one.predictions, one.columns) == (prediction, tuple(column[row].item() for column in batch.columns))
        assert one.chances == (batch.chances[row].item() if with_chance else None)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_sample_alone_of_unusable_logits_is_told_so(columns, value):
    for place in range(3):
        logits = torch.tensor([[1.0, 3.0, 2.0]])
        logits[0, place] = value
        assert not math.isfinite(told_of_one(logits, columns).largest)
    assert math.isfinite(told_of_one(torch.tensor([[1.0, 3.0, -math.inf]]), columns).largest)
