"""A labelled table sorted once, so that plans of exit rates are tried out fast."""

import numpy as np
import numpy.typing as npt

from alight.budgeting.thresholds import hash01, passing_counts
from alight.calibrate.task import Floats
from alight.outputs import HeadOutputs

Integers = npt.NDArray[np.int64]


class Ranked:
    """A table whose samples are ordered at every exit, least sure first; equal scores as survivor thresholds do."""

    def __init__(self, outputs: HeadOutputs):
        hashes = hash01(np.arange(len(outputs)))
        self.order = [np.lexsort((-hashes, column)) for column in outputs.scores.T]  # per exit, (samples,)
        self.correct = np.ascontiguousarray(outputs.correct().T)  # (exits, samples)

    def __len__(self) -> int:
        return self.correct.shape[1]

    def accuracy(self, exit_rates: Floats) -> float:
        """Accuracy when these shares leave, met by survivor thresholds on this very table.

        What `replay` of such a policy would give, without the policy: only who waits is kept.
        """
        waiting, right = np.ones(len(self), dtype=bool), 0
        for exit_index, count in enumerate(passing_counts(exit_rates, len(self)).tolist()):
            if exit_rates[exit_index] <= 0 and count:  # nobody leaves
                continue
            order = self.order[exit_index]
            leaving = order.compress(waiting.take(order))[max(count - 1, 0) :]
            right += int(np.count_nonzero(self.correct[exit_index].take(leaving)))
            waiting[leaving] = False
            if count <= 1:  # nobody passes
                return right / len(self)
        return (right + np.count_nonzero(self.correct[-1] & waiting)) / len(self)


def folds(num_samples: int, count: int, salt: int = 0) -> list[Integers]:
    """Samples dealt into so many folds of nearly equal size by the hash of their index: no dice, no order.

    >>> [fold.tolist() for fold in folds(5, 2)]
    [[1, 3, 4], [0, 2]]
    """
    order = np.argsort(hash01(np.arange(num_samples), salt))
    return [np.sort(fold) for fold in np.array_split(order, count)]


def halves(num_samples: int, rounds: int) -> list[tuple[Integers, Integers]]:
    """Both ways round, so many times: half of the samples and the other half; everyone twice where they are few."""
    if num_samples < 4:  # halves of one sample say nothing
        return [(np.arange(num_samples), np.arange(num_samples))]
    pairs = [folds(num_samples, 2, salt) for salt in range(rounds)]
    return [pair for one, other in pairs for pair in ((one, other), (other, one))]
