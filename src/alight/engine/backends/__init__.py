"""What executes stages: PyTorch, ONNX Runtime, AOTInductor. The engine above knows no framework.

A stage here is what lies between two open exits: the network's own stages up to an open exit, and its head. What the
policy reads of a head is class, scores and probability of each sample, computed from logits in float64.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from alight.data.preprocess import InputSpec
from alight.outputs import half
from alight.scores import score_of, top_classes

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
State = tuple[Any, ...]  # what crosses a cut: arrays or tensors with one row per sample

SOFTMAX_SCORES = ((), ("margin",), ("max_probability",))  # columns that the softmax of one sample gives directly


class HeadValues(NamedTuple):
    """What the host reads of a head: arrays with one entry per sample, or numbers of a single sample."""

    predictions: Any  # class with the largest logit
    largest: Any  # that logit; NaN or infinite where the logits are unusable
    columns: tuple[Any, ...]  # what the policy reads, by its `inputs`: scores, then likeliest classes and their logs
    probabilities: Any | None  # of the class, where asked for


class Reads(NamedTuple):
    """What is computed from the logits of one stage."""

    columns: tuple[str, ...]  # scores
    probability: bool = False  # of the class, too
    top: int = 0  # likeliest classes whose indices and log-probabilities are given, too

    @property
    def is_packed(self) -> bool:
        """Whether a stage gives packed values; else its logits, of which the host takes the class."""
        return bool(self.columns or self.top)


class DeviceValues(Protocol):
    """Head values of a batch that are still on a device."""

    nbytes: int

    def send(self) -> None:
        """Start the copy to the host."""

    def get(self) -> HeadValues:
        """Return the values once they have arrived."""

    def gather(self, others: Sequence[Self]) -> HeadValues:
        """Fetch the values of these and of further batches of the last stage at once."""


class Backend(Protocol):
    """Executes the stages between open exits: `admit`, `run` and `take`, and rows for re-batching.

    `in_flight` is the number of batches that may run before their values are read: 0 on the host, where `run` returns
    `HeadValues`; else it returns `DeviceValues`. One whose device can decide itself also has `deciding`, whose method
    `answers` takes many batches at once; one that runs single samples through several exits at once has `expect`.
    """

    name: str
    inputs: InputSpec  # what the first stage takes
    exits: tuple[str, ...]  # names of all exits of the network
    open_exits: tuple[int, ...]  # those that have a stage here
    in_flight: int
    supports_single_sample: bool  # is there `run_one`?

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the network."""

    def admit(self, inputs: State) -> State:
        """Place inputs where the stages run."""

    def run(self, stage: int, state: State) -> tuple[HeadValues | DeviceValues, State]:
        """Run one stage; the state of the last one is empty."""

    def take(self, state: State, rows: Integers) -> State:
        """Return the rows of survivors, compacted into new memory."""

    def run_one(self, stage: int, state: State) -> tuple[HeadValues, State]:
        """Run one stage for a single sample; the values are numbers."""

    def allocate(self, size: int, like: State) -> State:
        """Return memory for so many samples, laid out like the state."""

    def move(self, source: State, rows: Integers, target: State, slots: Integers) -> None:
        """Copy rows of one state into slots of another."""

    def owns(self, made: State, given: State) -> bool:
        """Return whether what a stage made may be written to: memory of its own, not that of its input."""

    def pin(self, inputs: State) -> State:
        """Return inputs in memory from which the device copies while it works."""

    def first_unusable(self, state: State) -> int | None:
        """Return the first row of admitted inputs that would be answered although it is not a valid input."""

    def running(self) -> AbstractContextManager[Any]:
        """Return the context in which stages run: threads, no gradients."""

    def with_reads(self, reads: Sequence[Reads]) -> Self:
        """Return the same stages with other values computed from their logits."""


def score_rows(logits: np.ndarray, reads: Reads) -> HeadValues:
    """Return the values of logits with one row per sample.

    >>> score_rows(np.array([[0.0, np.log(3.0)]]), Reads(("margin",))).columns
    (array([0.5]),)
    """
    exact = logits.astype(np.float64)
    predictions = exact.argmax(-1)
    largest = np.take_along_axis(exact, predictions[..., None], -1)[..., 0]  # NaN where a row has one
    with np.errstate(invalid="ignore"):  # of unusable rows, which `largest` shows
        columns = tuple(score_of(name, exact) for name in reads.columns)
        of_class = score_of("max_probability", exact) if reads.probability else None
        if reads.top:
            classes, logs = top_classes(exact, reads.top)
            columns = (*columns, classes.astype(np.int32), half(logs))
    return HeadValues(predictions, largest, columns, of_class)


def score_one(logits: np.ndarray, reads: Reads) -> HeadValues:
    """Return the values of a single sample as numbers, equal to the bit to those of `score_rows`.

    It makes few calls, since each costs more than the arithmetic; the largest weight of a softmax is 1.

    >>> score_one(np.array([[0.0, np.log(3.0)]]), Reads(("margin",), probability=True))
    HeadValues(predictions=1, largest=1.0986122886681098, columns=(0.5,), probabilities=0.75)
    """
    row = logits[0].astype(np.float64)
    best = int(row.argmax())
    largest = float(row[best])
    if not math.isfinite(largest) or not any(reads):
        return HeadValues(best, largest, (), None)
    if reads.top or reads.columns not in SOFTMAX_SCORES:
        values = score_rows(row[None], reads)
        top = None if values.probabilities is None else values.probabilities.item()
        return HeadValues(best, largest, tuple(column[0] for column in values.columns), top)
    weights = np.exp(row - largest)
    total = float(np.add.reduce(weights))
    first = score = 1.0 / total
    if reads.columns == ("margin",):
        weights[best] = 0.0
        score = first - float(np.maximum.reduce(weights)) / total
    return HeadValues(best, largest, (score,) if reads.columns else (), first if reads.probability else None)


def unpack(packed: Floats, reads: Reads) -> HeadValues:
    """Return the values of one array as a device hands it over: class, largest logit, scores, probability, top."""
    scores = 2 + len(reads.columns)
    columns, of_class = tuple(packed[:, 2:scores].T), packed[:, scores] if reads.probability else None
    if reads.top:
        classes, logs = np.split(packed[:, scores + reads.probability :], 2, axis=1)
        columns = (*columns, classes.astype(np.int32), half(logs))
    return HeadValues(packed[:, 0].astype(np.int64), packed[:, 1], columns, of_class)
