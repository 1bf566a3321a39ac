"""What a command is: what it takes, what it does, and what it has found."""

import argparse
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Found:
    """What a command has found: a text for people, values for programs."""

    text: str
    values: Any

    def as_json(self) -> str:
        """The values as JSON; what is no number is null.

        >>> print(Found("", {"cost": float("nan"), "exits": (1, 2)}).as_json())
        {
          "cost": null,
          "exits": [
            1,
            2
          ]
        }
        """
        return json.dumps(_plain(self.values), indent=2, allow_nan=False, ensure_ascii=False)


@dataclass(frozen=True)
class Command:
    """A command by its name; the first line of `run` says what it does."""

    name: str
    run: Callable[[argparse.Namespace], Found | None]
    arguments: Callable[[argparse.ArgumentParser], None]
    examples: Sequence[str]  # without the leading `alight`
    results: bool = True  # whether it prints some, so that --json and --quiet mean something

    @property
    def purpose(self) -> str:
        """What it does, in a sentence."""
        return (inspect.getdoc(self.run) or "").partition("\n")[0]


def _plain(value: Any) -> Any:
    """The value in JSON's own kinds."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
