"""What can go wrong, as a tree. Every message says what happened, the number, and what to do.

    AlightError
    ├── BadInput            a value that cannot be used as it stands
    │   ├── BudgetTooSmall  no exit is cheap enough
    │   └── LabelsNeeded    a table without labels where the truth is asked for
    ├── Mismatch            two things that do not belong together (a policy and another network's table)
    ├── BadFile             a file that is damaged, foreign, or newer than this alight
    └── Diverged            a training whose loss is no number any more

All of them are `ValueError`s too, so code that knows nothing of alight can catch them.
"""

from os import PathLike


class AlightError(Exception):
    """Any error that alight raises on purpose.

    >>> from alight import Costs
    >>> try:
    ...     Costs([1.0, 2.0], [0.1, 0.1]).budget("much")
    ... except AlightError as error:
    ...     print(error)
    budget 'much' is no number, percentage or quantity: write '50%', '2.5 GFLOPs', '3 ms'
    """


class BadInput(AlightError, ValueError):
    """A value that cannot be used as it stands."""


class BudgetTooSmall(BadInput):
    """No exit is cheap enough."""

    def __init__(self, budget: float, cheapest: float, unit: str = ""):
        super().__init__(
            f"budget {budget:g}{unit and ' ' + unit} is below the cheapest exit ({cheapest:g}{unit and ' ' + unit}):"
            " raise it or attach an earlier head"
        )


class LabelsNeeded(BadInput):
    """A table without labels where the truth is asked for."""

    def __init__(self, what: str):
        super().__init__(f"{what} needs labels and this table has none: record it from labelled data")


class Mismatch(AlightError, ValueError):
    """Two things that do not belong together."""


class BadFile(AlightError, ValueError):
    """A file that is damaged, foreign, or newer than this alight."""

    def __init__(self, path: str | PathLike[str], problem: str, remedy: str):
        super().__init__(f"cannot read {path}: {problem}; {remedy}")


class Diverged(AlightError, ValueError):
    """A training whose loss is no number any more."""
