"""What `fit` does, said twice: lines of progress for people, and Python to go on with by hand."""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alight.costs import Costs

if TYPE_CHECKING:
    from alight.training.settings import TrainingSettings


GIVEN = ("network", "train", "validation", "training", "preprocess")  # arguments of `fit` that calls may name


class Steps:
    """Lines of progress, and the calls that were made, as Python."""

    def __init__(self, progress: bool, command: str = "fit", sources: Mapping[str, str] | None = None) -> None:
        self.command, self.sources = command, sources or {}  # sources: arguments as Python, where they came from files
        self.progress, self.imports, self.calls = progress, {"import alight", "import numpy as np"}, list[str]()

    def say(self, text: str) -> None:
        """Print a line of progress."""
        if self.progress:
            print(f"{self.command}: {text}", file=sys.stderr, flush=True)

    def call(self, *lines: str, imports: Sequence[str] = ()) -> None:
        """Note calls that were made, and what they import."""
        self.calls += lines
        self.imports |= {*imports}

    def __str__(self) -> str:
        own = sorted(self.imports, key=lambda line: (line.startswith("from"), line))
        unmade = [name for name in GIVEN if not any(call.startswith(f"{name} = ") for call in self.calls)]
        named = [name for name in unmade if any(re.search(rf"\b{name}\b(?! ?=|['.:])", call) for call in self.calls)]
        note = [f"# {', '.join(named)}: as given to fit"] if named else []
        return "\n".join([*own, "", *note, *self.calls])


def example_literal(example: Any) -> str:
    """Return an example as Python: zeros where it holds floats, its own numbers where it holds others."""
    if isinstance(example, Mapping):
        return "{" + ", ".join(f"{name!r}: {example_literal(part)}" for name, part in example.items()) + "}"
    if isinstance(example, tuple):
        return "(" + ", ".join(map(example_literal, example)) + ")"
    place = "" if example.device.type == "cpu" else f", device={str(example.device)!r}"
    dtype = "" if str(example.dtype) in ("torch.float32", "torch.int64") else f", dtype={example.dtype}"
    if example.is_floating_point():
        return f"torch.zeros({', '.join(map(str, example.shape))}{dtype}{place})"
    return f"torch.tensor({example.tolist()}{dtype}{place})"


def settings_literal(settings: "TrainingSettings") -> str:
    """Return settings as Python, without those that have their default; their name where one is a function."""
    defaults = type(settings)()
    changed = {name: value for name, value in vars(settings).items() if value != getattr(defaults, name)}
    parts = [part for value in changed.values() for part in (value if isinstance(value, tuple) else (value,))]
    if not all(part is None or isinstance(part, str | float | int) for part in parts):
        return "training"
    return f"alight.TrainingSettings({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


def costs_literal(costs: Costs) -> str:
    """Return costs as Python."""
    if costs.heads.any():
        return f"alight.Costs({costs.stages.tolist()}, {costs.heads.tolist()}, {costs.unit!r})"
    return f"alight.Costs.from_cumulative({costs.cumulative().tolist()}, {costs.unit!r})"


def data_literal(name: str, value: Any) -> str:
    """Return the data as Python: a path as text, all else by the name of the argument."""
    return repr(str(value)) if isinstance(value, str | Path) else name
