"""What a command is, which arguments it takes, what it returns, and with which status it exits."""

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from enum import IntEnum
from functools import partial
from operator import methodcaller
from typing import Any

Argument = Callable[[argparse.ArgumentParser], object]

argument = partial(methodcaller, "add_argument")  # an Argument, of what `ArgumentParser.add_argument` takes


class ExitStatus(IntEnum):
    """Exit status of a command."""

    SUCCESS = 0
    FAILURE = 1
    INVALID_ARGUMENTS = 2
    INTERNAL_ERROR = 3
    INTERRUPTED = 130
    BROKEN_PIPE = 141


MEANINGS = {
    ExitStatus.SUCCESS: "success",
    ExitStatus.FAILURE: "failure: the data, the budget, a file or a missing library; stderr says what to do",
    ExitStatus.INVALID_ARGUMENTS: "invalid arguments",
    ExitStatus.INTERNAL_ERROR: "internal error of alight or of a library; --debug shows where",
    ExitStatus.INTERRUPTED: "interrupted (Ctrl-C); no partial file is left",
    ExitStatus.BROKEN_PIPE: "the reader of the output has closed it, as in `alight sweep ... | head -1`",
}


@dataclass(frozen=True)
class CommandResult:
    """Result of a command: a text for people, values for programs."""

    text: str
    values: Any

    def as_json(self) -> str:
        """Return the values as JSON; NaN and infinity become null.

        >>> print(CommandResult("", {"cost": float("nan"), "exits": (1, 2)}).as_json())
        {
          "cost": null,
          "exits": [
            1,
            2
          ]
        }
        """
        return json.dumps(_json_value(self.values), indent=2, allow_nan=False, ensure_ascii=False)


@dataclass(frozen=True)
class Command:
    """A command; `run_NAME` names it, and its first line says what it does."""

    run: Callable[[argparse.Namespace], CommandResult | None]
    arguments: Sequence[Argument]
    examples: Sequence[str]  # without the leading `alight`
    results: bool = True  # whether it prints some, so that --json and --quiet mean something

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return self.run.__name__.removeprefix("run_")

    @property
    def purpose(self) -> str:
        """What it does, in a sentence."""
        return (self.run.__doc__ or "").partition("\n")[0]


def _json_value(value: Any) -> Any:
    """Return the value in JSON's own types."""
    if is_dataclass(value) and not isinstance(value, type):
        return _json_value(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): _json_value(each) for name, each in value.items()}
    if hasattr(value, "tolist"):  # of NumPy
        return _json_value(value.tolist())
    if isinstance(value, list | tuple):
        return [_json_value(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
