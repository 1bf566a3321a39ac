"""Thresholds of more scores than memory holds: the same as in memory, bit by bit, found in a few passes.

The k-th smallest number is found by counting: how many share their leading 16 bits with it, then their next 16, until
those that are left fit into memory. Who still waits at an exit is not kept but found again in every pass, from the
thresholds before it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from alight.budgeting.thresholds import Floats, Integers, Thresholds, between, hash32, hashed_below

Keys = npt.NDArray[np.uint64]

DIGIT = 16  # bits that are told apart in a pass: four passes at most, and half a megabyte of counts
KEPT = 2**22  # numbers that may be in memory at once, 32 MiB of them
SIGN = np.uint64(1 << 63)


Blocks = Iterable[Floats]  # scores of all samples in their order, (samples, exits) at a time, as often as asked for


def block_thresholds_at_ranks(scores: Blocks, num_samples: int, ranks: Integers) -> Thresholds:
    """What `thresholds_at_ranks` gives for the same scores in memory.

    >>> blocks = [np.array([[0.1, 0.9], [0.4, 0.8]]), np.array([[0.6, 0.7]])]
    >>> block_thresholds_at_ranks(blocks, 3, np.array([2])).values
    array([0.4])
    """
    values = np.full(len(ranks), np.inf)
    for exit_index, rank in enumerate(ranks.tolist()):
        if rank == 0:
            values[exit_index] = -np.inf
        elif rank <= num_samples:
            values[exit_index] = _at_ranks(_columns(scores, exit_index), [rank - 1])[0]
    return Thresholds(values, np.ones(len(ranks)))


def block_thresholds_for_counts(scores: Blocks, num_samples: int, counts: Integers) -> Thresholds:
    """What `thresholds_for_counts` gives for the same scores in memory.

    >>> blocks = [np.array([[0.1, 0.9]]), np.array([[0.4, 0.8], [0.6, 0.7]])]
    >>> block_thresholds_for_counts(blocks, 3, np.array([2])).values
    array([0.25])
    """
    found = Thresholds(np.full(len(counts), np.inf), np.ones(len(counts)))
    before = num_samples + 1
    for exit_index, count in enumerate(counts.tolist()):
        if count == before:  # nobody leaves
            continue
        if count == 0:
            found.values[exit_index:] = -np.inf
            break
        found.values[exit_index], found.tie_shares[exit_index] = _divide(_waiting(scores, found, exit_index), count)
        before = count
    return found


def order_statistics(keys: Callable[[], Iterable[Keys]], ranks: Sequence[int]) -> list[int]:
    """The keys at these ranks, counted from 0, of all that `keys` gives, each time anew and the same.

    >>> order_statistics(lambda: [np.array([5, 1], dtype=np.uint64), np.array([9], dtype=np.uint64)], [0, 2])
    [1, 9]
    """
    leading, within = dict.fromkeys(ranks, 0), {rank: rank for rank in ranks}  # what is known of each, and what is not
    for shift in range(64 - DIGIT, -1, -DIGIT):
        counts = _counted(keys, set(leading.values()), shift)
        sizes: dict[int, int] = {}
        for rank in leading:
            up_to = np.cumsum(counts[leading[rank]])
            digit = int(np.searchsorted(up_to, within[rank], side="right"))
            within[rank] -= int(up_to[digit - 1]) if digit else 0
            size = int(counts[leading[rank]][digit])
            leading[rank] = leading[rank] << DIGIT | digit
            sizes[leading[rank]] = size
        if shift and sum(sizes.values()) <= KEPT:
            kept = _gathered(keys, sizes, shift)
            return [int(np.partition(kept[leading[rank]], within[rank])[within[rank]]) for rank in ranks]
    return [leading[rank] for rank in ranks]


def _counted(keys: Callable[[], Iterable[Keys]], leading: set[int], shift: int) -> dict[int, Integers]:
    """Of the keys that begin so, how many have each next digit."""
    counts = {each: np.zeros(2**DIGIT, dtype=np.int64) for each in leading}
    for block in keys():
        digits = (block >> np.uint64(shift)) & np.uint64(2**DIGIT - 1)
        for each, count in counts.items():
            chosen = digits if shift == 64 - DIGIT else digits[_begin(block, each, shift + DIGIT)]
            count += np.bincount(chosen.astype(np.int64), minlength=2**DIGIT)
    return counts


def _gathered(keys: Callable[[], Iterable[Keys]], leading: Iterable[int], shift: int) -> dict[int, Keys]:
    """The keys that begin so."""
    found: dict[int, list[Keys]] = {each: [] for each in leading}
    for block in keys():
        for each, parts in found.items():
            parts.append(block[_begin(block, each, shift)])
    return {each: np.concatenate(parts) for each, parts in found.items()}


def _begin(block: Keys, leading: int, shift: int) -> npt.NDArray[np.bool_]:
    return (block >> np.uint64(shift)) == np.uint64(leading)


Columns = Callable[[], Iterator[tuple[Floats, Integers]]]  # the scores at an exit, and whose they are


def _columns(scores: Blocks, exit_index: int) -> Columns:
    return _waiting(scores, Thresholds(np.empty(0), np.empty(0)), exit_index)


def _waiting(scores: Blocks, found: Thresholds, exit_index: int) -> Columns:
    """Those who pass all exits before this one, as far as thresholds were found there."""
    before = list(zip(found.values[:exit_index].tolist(), found.tie_shares.tolist(), strict=False))

    def columns() -> Iterator[tuple[Floats, Integers]]:
        start = 0
        for block in scores:
            samples = np.arange(start, start + len(block))
            stays = np.ones(len(block), dtype=bool)
            for earlier, (threshold, tie_share) in enumerate(before):
                column = block[:, earlier]
                tied = column == threshold
                stays &= (column < threshold) | tied
                if tied.any():
                    stays[tied] &= ~hashed_below(samples[tied], tie_share)
            yield block[stays, exit_index], samples[stays]
            start += len(block)

    return columns


def _divide(columns: Columns, count: int) -> tuple[float, float]:
    """The threshold and tie share with which count - 1 pass on."""
    lower, upper = _at_ranks(columns, [max(count - 2, 0), count - 1])
    if count == 1:
        return upper, 1.0
    if lower < upper:
        return between(lower, upper), 1.0
    below, tied = 0, 0
    for column, _ in columns():
        below, tied = below + int((column < upper).sum()), tied + int((column == upper).sum())
    leaving = tied - (count - 1 - below)  # of the tied ones the smallest hashes

    def hashes() -> Iterator[Keys]:
        return (hash32(samples[column == upper]).astype(np.uint64) for column, samples in columns())

    last_leaving, first_staying = order_statistics(hashes, [leaving - 1, leaving])
    return upper, between(last_leaving / 2**32, first_staying / 2**32)


def _at_ranks(columns: Columns, ranks: Sequence[int]) -> list[float]:
    """The scores at these ranks, counted from 0."""
    found = np.array(order_statistics(lambda: (_keys(column) for column, _ in columns()), ranks), dtype=np.uint64)
    return np.where(found & SIGN, found ^ SIGN, ~found).view(np.float64).tolist()


def _keys(scores: Floats) -> Keys:
    """Whole numbers in the order of the scores."""
    bits = (scores + 0.0).view(np.uint64)  # of the two zeros one
    return np.where(bits & SIGN, ~bits, bits | SIGN)
