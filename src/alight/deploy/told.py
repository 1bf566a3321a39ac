"""What a head says of each sample, from its logits, on the host."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from alight.scores import probabilities, score_of

Floats = npt.NDArray[np.float64]

LOGS = "log_probabilities"
QUICK = ((), ("margin",), ("max_probability",))  # what one sample's softmax tells at once


class Told(NamedTuple):
    """Classes, the columns that the policy reads, and chances of the class: arrays, or numbers of one sample."""

    predictions: Any
    columns: tuple[Any, ...]
    chances: Any | None


def told(logits: np.ndarray, columns: Sequence[str], with_chance: bool = False) -> Told:
    """What is told of logits, one row per sample.

    >>> told(np.array([[0.0, np.log(3.0)]]), ["margin"]).columns
    (array([0.5]),)
    """
    wide = logits.astype(np.float64)
    chances = score_of("max_probability", wide) if with_chance else None
    return Told(wide.argmax(-1), tuple(_column(name, wide) for name in columns), chances)


def told_of_one(logits: np.ndarray, columns: Sequence[str], with_chance: bool = False) -> Told | None:
    """What is told of one sample, in numbers; None where its largest logit is no number.

    The bits are those of `told`, in few calls, since each costs more than it does; a softmax's largest weight is 1.

    >>> told_of_one(np.array([[0.0, np.log(3.0)]]), ("margin",), with_chance=True)
    Told(predictions=1, columns=(0.5,), chances=0.75)
    """
    row = logits[0].astype(np.float64)
    best = int(row.argmax())
    largest = float(row[best])
    if not math.isfinite(largest):
        return None
    if not columns and not with_chance:
        return Told(best, (), None)
    if columns not in QUICK:
        made = told(row, columns, with_chance)
        chance = None if made.chances is None else float(made.chances)
        return Told(best, tuple(float(each) for each in made.columns), chance)
    weights = np.exp(row - largest)
    total = float(np.add.reduce(weights))
    first = score = 1.0 / total
    if columns == ("margin",):
        weights[best] = 0.0
        score = first - float(np.maximum.reduce(weights)) / total
    return Told(best, (score,) if columns else (), first if with_chance else None)


def unusable(logits: np.ndarray) -> npt.NDArray[np.int64]:
    """Rows whose largest logit is no number.

    >>> unusable(np.array([[1.0, 2.0], [np.nan, 0.0]]))
    array([1])
    """
    largest = logits.max(axis=-1)
    if math.isfinite(largest.sum(dtype=np.float64)):  # quick, and nearly always
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(~np.isfinite(largest))


def _column(name: str, logits: Floats) -> Any:
    if name != LOGS:
        return score_of(name, logits)
    with np.errstate(divide="ignore"):
        return np.log(probabilities(logits)).astype(np.float16)
