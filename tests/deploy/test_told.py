"""One sample alone is told the same as in a table, to the last bit."""

import numpy as np
import pytest

from alight.deploy.told import QUICK, told, told_of_one, unusable


@pytest.mark.parametrize("columns", [*QUICK, ("negative_entropy",), ("margin", "logit_margin")])
@pytest.mark.parametrize("with_chance", [False, True])
def test_one_sample_is_told_as_in_a_table(columns, with_chance):
    logits = np.random.default_rng(0).normal(scale=4, size=(200, 17)).astype(np.float32)
    logits[3, 4] = logits[3, 9] = 20.0  # a tie
    table = told(logits, columns, with_chance)
    for row in range(len(logits)):
        one = told_of_one(logits[row : row + 1], columns, with_chance)
        assert one.predictions == table.predictions[row]
        assert one.columns == tuple(each[row] for each in table.columns)
        assert one.chances == (table.chances[row] if with_chance else None)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_found(bad):
    logits = np.zeros((3, 4), dtype=np.float32)
    logits[1, 2] = bad
    assert unusable(logits).tolist() == [1]
    assert told_of_one(logits[1:2], ("margin",)) is None


def test_a_class_that_was_masked_out_is_no_fault():
    logits = np.array([[1.0, -np.inf, 0.0]], dtype=np.float32)
    assert not len(unusable(logits))
    assert told_of_one(logits, ("margin",)).predictions == 0
    assert np.isneginf(told(logits, ("log_probabilities",)).columns[0][0, 1])
