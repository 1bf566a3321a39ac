"""Thresholds found block by block are those of the same scores in memory, bit by bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alight.budgeting import selection
from alight.budgeting.selection import block_thresholds_at_ranks, block_thresholds_for_counts, order_statistics
from alight.budgeting.thresholds import thresholds_at_ranks, thresholds_for_counts


def blocks(scores, cuts):
    return [part for part in np.split(scores, sorted(cuts)) if len(part)]


@st.composite
def tables(draw):
    samples, exits = draw(st.integers(2, 60)), draw(st.integers(2, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scores = rng.normal(scale=10.0 ** rng.integers(-3, 4), size=(samples, exits))
    digits = draw(st.sampled_from([None, 1, 0]))  # the fewer, the more scores are equal
    scores = scores if digits is None else np.round(scores, digits)
    return scores, draw(st.lists(st.integers(0, samples), max_size=5))


@pytest.mark.parametrize("kept", [0, 2**22])
@settings(max_examples=50)
@given(table=tables(), data=st.data())
def test_blocks_give_the_survivor_thresholds_of_the_whole(kept, table, data):
    scores, cuts = table
    shares = st.lists(st.integers(0, len(scores) + 1), min_size=scores.shape[1] - 1, max_size=scores.shape[1] - 1)
    counts = np.array(sorted(data.draw(shares), reverse=True))
    whole = thresholds_for_counts(scores, counts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "KEPT", kept)
        found = block_thresholds_for_counts(blocks(scores, cuts), len(scores), counts)
    assert found.values.tolist() == whole.values.tolist()
    assert found.tie_shares.tolist() == whole.tie_shares.tolist()


@settings(max_examples=50)
@given(table=tables(), data=st.data())
def test_blocks_give_the_marginal_thresholds_of_the_whole(table, data):
    scores, cuts = table
    size = scores.shape[1] - 1
    ranks = np.array(data.draw(st.lists(st.integers(0, len(scores) + 1), min_size=size, max_size=size)))
    found = block_thresholds_at_ranks(blocks(scores, cuts), len(scores), ranks)
    assert found.values.tolist() == thresholds_at_ranks(scores, ranks).values.tolist()


def test_a_few_passes_are_enough_and_little_is_kept():
    rng, passes, kept = np.random.default_rng(0), [], []
    keys = rng.integers(2**55, size=200_000, dtype=np.uint64)

    def read():
        passes.append(1)
        return np.array_split(keys, 20)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "KEPT", 100)
        gather = selection._gathered
        patch.setattr(selection, "_gathered", lambda *given: kept.append(gather(*given)) or kept[-1])
        found = order_statistics(read, [99_999, 100_000])
    assert found == np.sort(keys)[[99_999, 100_000]].tolist()
    assert len(passes) == 3
    assert sum(map(len, kept[0].values())) <= 100
