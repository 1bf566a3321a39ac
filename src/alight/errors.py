"""All errors of alight, as a tree. Every message says what happened, the number, and what to do.

    AlightError
    ├── BadInput            invalid value
    │   ├── BudgetTooSmall  no exit is cheap enough
    │   └── LabelsNeeded    a table without labels where labels are needed
    ├── Mismatch            two things that do not belong together (a policy and another network's table)
    ├── BadFile             a file that is damaged, not written by alight, or newer than this alight
    ├── Diverged            training diverged: the loss is NaN or infinite
    └── Unreachable         a network that another server runs gave no answer

All but the last are `ValueError`s too, so code that does not import alight can catch them. `ShiftWarning` is a warning.
"""

from os import PathLike

from alight.display import percent, quantity


class AlightError(Exception):
    """Any error that alight raises on purpose.

    >>> from alight import recordings
    >>> try:
    ...     recordings.load("resnet18")
    ... except AlightError as error:
    ...     print(error)
    there is no recording 'resnet18': choose one of resnet18_cifar100_frozen, resnet18_cifar100_joint
    """


class BadInput(AlightError, ValueError):
    """Invalid value."""


class BudgetTooSmall(BadInput):
    """No exit is cheap enough."""

    def __init__(self, budget: float, cheapest: float, unit: str = "", *, full: float | None = None, meant: str = ""):
        share = "" if full is None else f", {percent(cheapest / full)} of the full network"
        remedy = f"did you mean '{meant}'?" if meant else "raise it, or add an earlier exit or a cheaper model"
        least = f"the cheapest exit ({quantity(cheapest, unit)}{share})"
        super().__init__(f"budget {quantity(budget, unit)} per sample is below {least}: {remedy}")


class LabelsNeeded(BadInput):
    """A table without labels where labels are needed."""

    def __init__(self, what: str):
        super().__init__(f"{what} needs labels and there are none: give labelled data, or what was recorded of it")


class Mismatch(AlightError, ValueError):
    """Two things that do not belong together."""


class BadFile(AlightError, ValueError):
    """A file that is damaged, not written by alight, or newer than this alight."""

    def __init__(self, path: str | PathLike[str], problem: str, remedy: str):
        super().__init__(f"cannot read {path}: {problem}; {remedy}")


class Diverged(AlightError, ValueError):
    """Training diverged: the loss is NaN or infinite."""


class Unreachable(AlightError):
    """A network that another server runs gave no answer."""


class ShiftWarning(UserWarning):
    """Samples are not independent draws of one distribution, as tables differ or hold copies: guarantees may fail."""
