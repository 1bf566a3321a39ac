"""What executes stages: PyTorch, ONNX Runtime, AOTInductor. The engine above knows no framework.

A stage here is what lies between two open exits: the network's own stages up to an open exit, and its head.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from alight.data.spec import InputSpec
from alight.engine.head_values import HeadValues, Reads

Integers = npt.NDArray[np.int64]
State = tuple[Any, ...]  # what crosses a cut: arrays or tensors with one row per sample


class DeviceValues(Protocol):
    """Head values of a batch that are still on a device."""

    nbytes: int

    def send(self) -> None:
        """Start the copy to the host."""

    def get(self) -> HeadValues:
        """Return the values once they have arrived."""


class Backend(Protocol):
    """Executes the stages between open exits: `admit`, `run` and `take`, and rows for re-batching.

    `in_flight` is the number of batches that may run before their values are read: 0 on the host, where `run` returns
    `HeadValues`; else it returns `DeviceValues`.
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

    def gather(self, values: Sequence[DeviceValues]) -> HeadValues:
        """Fetch the values of several batches of the last stage at once."""

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
