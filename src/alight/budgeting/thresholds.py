"""Thresholds: which score lets the planned share of samples leave.

A sample leaves at the first exit whose score is above its threshold; of the samples whose score is tied with the
threshold, which is equal to it but for rounding (`tie_range`), those with `hash01(sample number, salt) < tie_share`
leave. The last exit takes every sample and has no threshold.
"""

import math
from bisect import bisect_right
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from alight.budgeting.rates import Floats, Integers, cumulative_rates
from alight.errors import BadInput

Slack = Literal["paper"] | float | None

ROUNDING = 1e-9  # of a sample: 30.9999999999 samples are 31
TIE_PRECISION = 100_000  # a score is tied with a threshold if they differ by less than one part in so many
ABSOLUTE = 0.1  # below which positive scores, such as margins, are differences whose rounding shrinks no further
CELL, SMALL_CELL = 1.98e-5, 1.9787e-6  # a cell's width: relative, and where ties are ABSOLUTE; below that of ties
PARTS = -math.inf, 0.0, 0.1037, 0.5025, 1.0, math.inf  # of all scores, each with one kind of cells
SALTS = 2**53  # so many salts there are: whole numbers that every reader of JSON keeps
PROVEN_SLACK = 2 * math.sqrt(math.pi / 2)  # the constant C of Prop. 3.5, as its proof has it


@lru_cache(maxsize=1024)
def tie_range(threshold: float) -> tuple[float, float]:
    """Return the lowest and the highest score that is tied with a threshold.

    Scores of one image differ by about 1e-7 between batch sizes and runtimes, and a threshold often lies at the score
    of many equal images: compared bit by bit, all of them would leave in one runtime and none in another. The range is
    wider than that rounding, and too narrow to hold many different images. It is relative to how far the threshold is
    from 1 and, of negative scores, from 0, where scores saturate, so that 1 - 1e-12 stays below 1 - 1e-13. C++ computes
    the same: it divides, since compilers may fuse a product with a difference, which rounds once.

    >>> tie_range(0.5), tie_range(0.0)
    ((0.499995, 0.500005), (0.0, 0.0))
    >>> tie_range(1.0), tie_range(float("inf"))
    ((1.0, 1.0), (inf, inf))
    """
    threshold = float(threshold)
    if math.isinf(threshold):
        return threshold, threshold
    if threshold <= 0:
        width = -threshold / TIE_PRECISION
        return threshold - width, threshold + width
    width = min(max(threshold, ABSOLUTE), abs(1.0 - threshold)) / TIE_PRECISION
    return max(0.0, threshold - width), threshold + width


class Thresholds(NamedTuple):
    """A threshold for each exit but the last, and the share of samples tied with it that leave."""

    values: Floats  # (exits - 1,)
    tie_shares: Floats  # (exits - 1,)

    def fields(self) -> dict[str, Any]:
        """Return them under the names that a policy has for them."""
        return {"thresholds": self.values, "tie_shares": self.tie_shares}


def padded_rates(exit_rates: Floats, num_samples: int, slack: Slack = None) -> Floats:
    """Return the share of samples to have left by each exit, with the paper's slack C / sqrt(N) on top (Eq. 9).

    C is the cumulative rate itself for `"paper"`, as in its experiments; a number is C; None adds nothing.

    >>> padded_rates(np.array([0.5, 0.5]), 100, "paper")
    array([0.55, 1.  ])
    """
    gone = cumulative_rates(exit_rates)
    if slack is None:
        return gone
    if isinstance(slack, str):
        if slack != "paper":
            raise BadInput(f"there is no slack {slack!r}: give 'paper', 'exact', a number or None")
        return np.minimum(1.0, gone + gone / math.sqrt(num_samples))
    if not (math.isfinite(slack) and slack >= 0):
        raise BadInput(f"slack {slack:g} must be a number >= 0: the paper's proof gives {PROVEN_SLACK:.3f}")
    return np.minimum(1.0, gone + slack / math.sqrt(num_samples))


def marginal_thresholds(scores: Floats, exit_rates: Floats, slack: Slack = "paper") -> Thresholds:
    """Calibrate each exit on all samples, for the share that should have left by then (Def. 3.3, Eq. 8-9).

    The threshold is the k-th smallest score, k = ceil(N (1 - padded share)): fewer than k samples lie below it.

    >>> marginal_thresholds(np.array([[0.1, 0.9], [0.4, 0.8], [0.6, 0.7]]), np.array([0.6, 0.4]), slack=None).values
    array([0.4])
    """
    return thresholds_at_ranks(scores, marginal_ranks(exit_rates, len(scores), slack))


def marginal_ranks(exit_rates: Floats, num_samples: int, slack: Slack = "paper") -> Integers:
    """Return k = ceil(N (1 - padded share)) for each exit but the last; N + 1, above all scores, for a rate of 0."""
    gone = padded_rates(exit_rates, num_samples, slack)[:-1]
    ranks = np.ceil(num_samples * (1 - gone) - ROUNDING).astype(np.int64)
    return np.where((np.asarray(exit_rates)[:-1] > 0) | (gone >= 1), ranks, num_samples + 1)


def thresholds_at_ranks(scores: Floats, ranks: Integers) -> Thresholds:
    """Return thresholds at the k-th smallest score of all samples, k the exit's rank; -inf for 0, +inf above all."""
    values = np.full(len(ranks), np.inf)
    for exit_index, rank in enumerate(ranks.tolist()):
        if rank == 0:
            values[exit_index] = -np.inf
        elif rank <= len(scores):
            values[exit_index] = np.partition(scores[:, exit_index], rank - 1)[rank - 1]
    return Thresholds(values, np.ones(len(ranks)))


def passing_counts(exit_rates: Floats, num_samples: int, slack: Slack = None) -> Integers:
    """Return k_l = floor((N + 1)(1 - share gone by exit l)) for every exit but the last.

    Of N calibration samples and one new one, exchangeable, k_l should pass exit l, so that it does so with probability
    k_l / (N + 1), at most the planned share.

    >>> passing_counts(np.array([0.5, 0.25, 0.25]), 7)
    array([4, 2])
    """
    left = 1 - padded_rates(exit_rates, num_samples, slack)[:-1]
    counts = np.floor((num_samples + 1) * left + ROUNDING).astype(np.int64)
    silent = np.asarray(exit_rates)[:-1] <= 0  # none is planned to leave here, so none does
    for exit_index in np.flatnonzero(silent):
        before = counts[exit_index - 1] if exit_index else num_samples + 1
        counts[exit_index] = before if left[exit_index] > 0 else 0
    return np.minimum.accumulate(counts) if counts.size else counts


def survivor_thresholds(scores: Floats, exit_rates: Floats, slack: Slack = None, *, salt: int = 0) -> Thresholds:
    """Calibrate each exit on the samples still waiting there, so that the share gone by it is as planned.

    The threshold lies midway between the (k - 1)-th and k-th smallest score of those waiting, with k of
    `passing_counts`: k - 1 of them pass on. Where both are in one cell (`tie_cell`), all of the cell are tied with the
    threshold, and those pass on whose rows have the largest hashes under the salt.

    >>> scores = np.array([[0.1, 0.9], [0.4, 0.8], [0.6, 0.7]])
    >>> survivor_thresholds(scores, np.array([0.5, 0.5])).values
    array([0.25])
    """
    counts = passing_counts(exit_rates, len(scores), slack)
    values, tie_shares = np.full(len(counts), np.inf), np.ones(len(counts))
    waiting: Any = slice(None)  # the samples that passed all exits so far
    before = len(scores) + 1
    for exit_index, count in enumerate(counts.tolist()):
        if count == before:  # none leaves
            continue
        if count == 0:
            values[exit_index:] = -np.inf
            break
        column = scores[waiting, exit_index]
        passing, values[exit_index], tie_shares[exit_index] = _divide(column, waiting, count, salt)
        waiting = np.flatnonzero(passing) if isinstance(waiting, slice) else waiting[passing]
        before = count
    return Thresholds(values, tie_shares)


def _divide(column: Floats, waiting: Any, count: int, salt: int) -> tuple[npt.NDArray[np.bool_], float, float]:
    """Return which samples pass on (count - 1 of them), and the threshold and tie share for it.

    Samples are ordered by cells and, inside a cell, by hashes, the largest first: an order that no score of the
    calibration has a part in, so that what lies before its k-th sample, fresh samples included, follows the exact law
    of k. The first k - 1 are those that pass on here. By the threshold no others pass but samples of lower cells, and
    of the k-th sample's cell those with larger hashes than it: fresh samples that pass do so in that order too, at this
    exit and, since the same calibration samples wait at the next, at all.
    """
    ordered = np.partition(column, sorted({max(count - 2, 0), count - 1}))
    upper = float(ordered[count - 1])
    lower = float(ordered[count - 2]) if count > 1 else -math.inf
    bottom, top = tie_cell(upper)
    passing = column < bottom
    if count == 1 or lower < bottom:
        threshold = between(lower, upper)
        if not lower < tie_range(threshold)[0] <= bottom:
            threshold = _shifted(between(lower, bottom), 0.999)
        return passing, threshold, 1.0
    tied = np.flatnonzero(~passing & (column <= top))
    hashes = hash32(tied if isinstance(waiting, slice) else waiting[tied], salt) / 2**32
    by_hash = np.argsort(hashes)
    leaving = len(tied) - (count - 1 - int(passing.sum()))  # the others pass on: those with the largest hashes
    passing[tied[by_hash[leaving:]]] = True
    last_leaving, first_staying = float(hashes[by_hash[leaving - 1]]), float(hashes[by_hash[leaving]])
    return passing, _shifted(top, -1.001), between(last_leaving, first_staying)


def tie_cell(score: float) -> tuple[float, float]:
    """Return the lowest and the highest score of a score's cell, a little narrower than the ties of a threshold.

    Cells divide all scores and are the same for all data. They are relative to what `tie_range` is relative to, and
    none ends at a round number, such as one half, at which many scores may lie but for rounding.

    >>> tie_cell(0.5) == tie_cell(0.5000001), tie_cell(1.0)
    (True, (1.0, 1.0))
    """
    if score == 1 or math.isinf(score):
        return score, score
    part = bisect_right(PARTS, score)
    start, stop = PARTS[part - 1], PARTS[part]
    end, sign = float(start >= PARTS[3]), -1.0 if stop in (0, 1) else 1.0  # distances are from 0 or 1
    distance = abs(score - end)
    number = math.floor(distance / SMALL_CELL if start == 0 else math.log(distance) / CELL - 0.3)
    numbers = np.arange(number - 1.0, number + 3)  # rounded, so that it may lie in the next cell
    edges = (SMALL_CELL * numbers).tolist() if start == 0 else [*map(math.exp, (CELL * (numbers + 0.3)).tolist())]
    above = min(bisect_right(edges, distance), 3)
    nearest, farthest = edges[above - 1], math.nextafter(edges[above], 0)
    near, far = end + sign * nearest, end + sign * farthest
    near = math.nextafter(near, sign * math.inf) if abs(near - end) < nearest else near  # rounded out of the cell
    far = math.nextafter(far, end) if abs(far - end) > farthest else far
    return max(min(near, far), start), min(max(near, far), math.nextafter(stop, -math.inf))


def _shifted(score: float, widths: float) -> float:
    """Return a score so many times as far away as ties reach: its own begin or end just below the given one."""
    lowest, highest = tie_range(score)
    return score + widths * max(score - lowest, highest - score) if highest > lowest else score


def between(lower: float, upper: float) -> float:
    """Return a number midway that still separates the two: above `lower` and at most `upper`."""
    middle = lower + (upper - lower) / 2
    return middle if lower < middle <= upper else upper


def hash01(samples: Integers, salt: int = 0, purpose: int = 0) -> Floats:
    """Return a number in [0, 1) for each sample number: a random one over salts, the same one wherever it is computed.

    >>> hash01(np.array([0, 1, 2])).round(3)
    array([0.759, 0.126, 0.998])
    """
    return hash32(samples, salt, purpose) / 2**32


def hashed_below(samples: Any, share: float, salt: int = 0, purpose: int = 0) -> Any:
    """Return where hash01 is below a share, compared exactly, for NumPy arrays, torch tensors or a number."""
    return hash32(samples, salt, purpose) < hash_limit(share)


def hash_limit(share: float) -> int:
    """Return the number below which a share of all hashes lies."""
    return math.ceil(share * 2**32)


def hash_terms(salt: int, purpose: int) -> tuple[int, int]:
    """Return what salt and purpose add to a sample's number, and what the number is mixed with then."""
    return salt + 0x9E3779B9 * (purpose + 1) & 0xFFFFFFFF, salt >> 32


def hash32(samples: Any, salt: int = 0, purpose: int = 0) -> Any:
    """Return a whole number below 2^32 for each sample number, for arrays, tensors and numbers alike.

    Every step is one to one on 32 bits, so the hash of a number is exactly uniform over the low half of the salt; the
    high half makes the hashes of two numbers independent. Each `purpose` draws anew.
    """
    if not isinstance(samples, int):
        samples = samples.astype(np.int64) if isinstance(samples, np.ndarray | np.generic) else samples.long()
    low, high = hash_terms(salt, purpose)
    mixed = ((samples & 0xFFFFFFFF) ^ (samples >> 32)) + low & 0xFFFFFFFF
    mixed = ((mixed >> 16) ^ mixed) * 0x7FEB352D & 0xFFFFFFFF  # odd and below 2^31: no overflow in 64 bits
    mixed = mixed ^ high
    mixed = ((mixed >> 16) ^ mixed) * 0x31848BAB & 0xFFFFFFFF
    return (mixed >> 15) ^ mixed
