"""What a policy makes of what the heads say, before it decides: a lens changes scores, answers, or both.

A lens sees each sample exit by exit, as the walk does, and remembers what it needs. The same lines serve a recorded
table (`through`) and the live walk, so a policy calibrated through a lens is run through it too.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from alight.outputs import HeadOutputs

Array = Any  # a NumPy array or a torch tensor
Memory = tuple[Any, ...]


@dataclass(frozen=True)
class Lens(ABC):
    """What every lens has: the recorded columns that it needs, the name of the score that it gives, and `see`."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[str, ...]:
        """Names of the columns that it reads: scores of the table, or "log_probabilities"."""

    @property
    @abstractmethod
    def score(self) -> str:
        """Name of the score that it gives."""

    @abstractmethod
    def see(
        self, exit_index: int, predictions: Array, columns: tuple[Array, ...], memory: Memory
    ) -> tuple[Array, Array, Memory]:
        """Answers and scores of those waiting at an exit, and what to remember of them; memory is empty at first."""

    def through(self, outputs: HeadOutputs) -> HeadOutputs:
        """The table as it looks through the lens: what it would say at every exit, had no sample left before."""
        memory: Memory = ()
        answers, scores = np.empty_like(outputs.predictions), np.empty_like(outputs.scores)
        for exit_index in range(outputs.num_exits):
            columns = tuple(outputs.column(name)[:, exit_index] for name in self.inputs)
            seen = self.see(exit_index, outputs.predictions[:, exit_index], columns, memory)
            answers[:, exit_index], scores[:, exit_index], memory = seen
        return replace(
            outputs, scores=scores, predictions=answers, score=self.score, features={}, log_probabilities=None
        )

    def to_dict(self) -> dict[str, Any]:
        """The lens as plain JSON values."""
        return {"lens": type(self).__name__} | {each.name: _plain(getattr(self, each.name)) for each in fields(self)}


LENSES: dict[str, type[Lens]] = {}


def lens_from_dict(content: Mapping[str, Any]) -> Lens:
    """The lens that `to_dict` wrote."""
    values = dict(content)
    kind = LENSES[values.pop("lens")]
    return kind(**{name: _tuples(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
