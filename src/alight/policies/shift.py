"""Do two tables come from one distribution? What a certificate assumes, looked at before it is relied on."""

import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from alight.errors import Mismatch
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy
from alight.policies.route import replay

LEVEL = 0.001  # how often two tables of one distribution are reported to differ, at most


class Shift(NamedTuple):
    """The largest difference between two tables, and how probable one as large is if there is none."""

    p_value: float  # times the number of comparisons (Bonferroni)
    exit_index: int
    difference: str  # in words, with its numbers
    exit_name: str

    @property
    def is_significant(self) -> bool:
        """Whether the tables differ more than those of one distribution do in one of a thousand draws."""
        return self.p_value < LEVEL

    def __str__(self) -> str:
        return f"{self.exit_name}: {self.difference} (p = {self.p_value:.2g})"


def diagnose_shift(first: HeadOutputs, second: HeadOutputs, policies: Sequence[Policy] = ()) -> Shift:
    """Return the most significant difference between two tables: in scores, accuracy, or shares that leave.

    Scores are compared at each exit by the two-sample Kolmogorov-Smirnov test, exact up to 10,000 samples; the shares
    that leave at each exit, and where both tables have labels the accuracies, which may fall though scores stay, by the
    hypergeometric law of two samples. Ties make all cautious. The tests stay
    valid for thresholds that were set at ranks of one of the tables, as all methods that plan exit rates set them;
    policies with a fitted combination are left out, since it knows the samples that it was fitted to.

    Args:
        first: A table of outputs.
        second: A table of the same network.
        policies: Whose exit shares are compared too.

    >>> from alight import recordings
    >>> labelled, test, costs = recordings.load()
    >>> diagnose_shift(labelled, test).is_significant
    False
    """
    if first.num_exits != second.num_exits or first.score != second.score:
        raise Mismatch(
            f"tables of {first.num_exits} exits with score {first.score!r} and of {second.num_exits} with"
            f" {second.score!r} cannot be compared: record both with one network and one score"
        )
    found = [*_of_scores(first, second), *_of_accuracies(first, second)]
    for policy in (each for each in policies if not each.combines):
        found += _of_shares(policy, first, second)
    least = min(found, key=lambda each: each.p_value)
    return least._replace(p_value=min(1.0, least.p_value * len(found)))


def _of_scores(first: HeadOutputs, second: HeadOutputs) -> Iterator[Shift]:
    from scipy.stats import ks_2samp  # slow to import

    for index in range(first.num_exits):
        own, other = first.scores[:, index], second.scores[:, index]
        with warnings.catch_warnings():  # where the exact law fails, for tables that are nearly alike, SciPy says so
            warnings.simplefilter("ignore", RuntimeWarning)
            statistic, p_value = ks_2samp(own, other)[:2]
        words = (
            f"distributions of the {first.score} {statistic:.3f} apart, means {own.mean():.3g} and {other.mean():.3g}"
        )
        yield Shift(float(p_value), index, words, first.exit_names[index])


def _of_accuracies(first: HeadOutputs, second: HeadOutputs) -> Iterator[Shift]:
    tables = first, second
    if any(table.labels is None or table.quality is not None for table in tables):
        return
    right = [table.correct() for table in tables]
    for index in range(first.num_exits):
        words = " and ".join(f"{each[:, index].mean():.1%}" for each in right) + " of its answers are right"
        yield Shift(_p_value(right[0][:, index], right[1][:, index]), index, words, first.exit_names[index])


def _of_shares(policy: Policy, first: HeadOutputs, second: HeadOutputs) -> Iterator[Shift]:
    exits = [replay(policy, table).exits for table in (first, second)]
    for index in policy.open_exits[: len(policy.open_exits) - 1]:  # the last takes the others
        leaving = [each == index for each in exits]
        shares = " and ".join(f"{each.mean():.1%}" for each in leaving)
        words = f"{shares} leave under {policy.method or 'the policy'}"
        yield Shift(_p_value(*leaving), index, words, first.exit_names[index])


def _p_value(first: npt.NDArray[np.bool_], second: npt.NDArray[np.bool_]) -> float:
    """Return how probable counts as different are for two samples of one distribution, given both counts together."""
    from scipy.stats import hypergeom

    count, both = int(first.sum()), int(first.sum() + second.sum())
    law = hypergeom(len(first) + len(second), both, len(first))
    return min(1.0, 2 * float(min(law.cdf(count), law.sf(count - 1))))
