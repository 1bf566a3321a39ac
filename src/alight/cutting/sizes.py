"""Sizes that a network's code reads: numbers that remember how they were computed, so that they stay free.

While a network is traced, `x.shape` holds `TracedInt`s. Arithmetic with them gives further ones, so a stage computes
`height * width` anew for every batch. Where Python leaves arithmetic (`if height > 64`, `int(...)`, `math.sqrt`), the
outcome is recorded as a check, which a stage makes again: a batch for which the code would do something else is
refused, with the line.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from alight.errors import BadInput

ARITHMETIC = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "lshift", "rshift", "and", "or", "xor")
UNARY: dict[str, Callable[[Any], Any]] = {
    "__neg__": operator.neg,
    "__pos__": operator.pos,
    "__invert__": operator.invert,
    "__abs__": operator.abs,
    "__ceil__": math.ceil,
    "__floor__": math.floor,
}
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
Check = Callable[[Any, Any, Any, bool], None]  # called with a function, both operands, and its outcome


@dataclass(frozen=True)
class SizeOf:
    """The size of a traced tensor along one axis."""

    value: Any
    axis: int


@dataclass(frozen=True)
class NumberOf(SizeOf):
    """A whole number that a closed module returns beside tensors, as the height and width of a map."""

    axis: int = 0


@dataclass(frozen=True)
class SizeExpression:
    """A function of sizes and numbers."""

    function: Callable[..., Any]
    operands: tuple[Any, ...]


class SizeCheck(NamedTuple):
    """A comparison that the network's code makes, its outcome in the trace, how many calls were made until then."""

    function: Callable[[Any, Any], bool]
    left: Any
    right: Any
    outcome: bool
    time: int
    line: str


class FixedSizes:
    """A hook that refuses inputs of sizes at which the chain was not seen to be the network.

    `pattern` has a number for every axis of a sample that is fixed, and a name for one that is free; axes of one name
    have one size.
    """

    def __init__(self, pattern: Sequence[Sequence[int | str]], reason: str) -> None:
        self.pattern, self.reason = [list(axes) for axes in pattern], reason

    def __call__(self, stage: nn.Module, batch: tuple[Tensor, ...]) -> None:
        """Raise unless the inputs have sizes like the pattern's."""
        free: dict[str, int] = {}
        for tensor, axes in zip(batch, self.pattern, strict=True):
            sizes = tensor.shape[1:]
            pairs = zip(axes, sizes, strict=False)
            expected = [free.setdefault(axis, size) if isinstance(axis, str) else axis for axis, size in pairs]
            if len(sizes) != len(axes) or expected != list(sizes):
                raise BadInput(
                    f"an input of {tuple(sizes)} per sample, and the network was cut for {self}: {self.reason}. Give"
                    " inputs of this size, or cut with an example of the size that you need"
                )

    def __str__(self) -> str:
        return " and ".join(f"({', '.join(map(str, axes))})" for axes in self.pattern)


class _Traced:
    """A number with the expression that computed it, and where outcomes are recorded."""

    expression: Any
    check: Check

    def _fixed(self, number: Any) -> Any:
        self.check(operator.eq, self, untraced(self), True)
        return number

    def __int__(self) -> int:
        return self._fixed(int(untraced(self)))

    __trunc__ = __int__

    def __float__(self) -> float:
        return self._fixed(float(untraced(self)))

    def __round__(self, digits: Any = None) -> Any:
        return self._fixed(round(untraced(self), digits))

    def __divmod__(self: Any, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self: Any, other: Any) -> Any:
        return other // self, other % self

    def __bool__(self: Any) -> bool:
        return self != 0

    def __hash__(self) -> int:
        return hash(untraced(self))


class TracedInt(_Traced, int):
    """A traced whole number."""


class TracedFloat(_Traced, float):
    """Any other traced number."""


def traced_number(number: Any, expression: Any, check: Check) -> Any:
    """Return a number that remembers its expression; anything but an int or float unchanged."""
    kind = TracedInt if type(number) is int else TracedFloat if type(number) is float else None
    if kind is None:
        return number
    made = kind(number)
    made.expression, made.check = expression, check
    return made


def expression_of(number: Any) -> Any:
    """Return the expression of a traced number; anything else unchanged."""
    return number.expression if isinstance(number, TracedInt | TracedFloat) else number


def fixed(number: Any) -> Any:
    """Return the plain value of a traced number, which a batch must have from now on; anything else unchanged."""
    return number._fixed(untraced(number)) if isinstance(number, TracedInt | TracedFloat) else number


def functions_that_fix_sizes() -> list[tuple[Any, str, Any]]:
    """Return changes of Python's `math`, whose functions read a float's content unseen, so that they fix its size."""
    return [
        (math, name, lambda *numbers, function=function: function(*map(fixed, numbers)))
        for name, function in vars(math).items()
        if callable(function) and name not in ("ceil", "floor", "prod")  # which keep sizes free
    ]


def untraced(number: Any) -> Any:
    """Return the plain value of a traced number; anything else unchanged."""
    if isinstance(number, TracedInt):
        return int.__add__(number, 0)
    return float.__add__(number, 0.0) if isinstance(number, TracedFloat) else number


def check_size(outcome: bool, expected: bool, left: Any, right: Any, line: str) -> None:
    """Raise unless a comparison of sizes has the outcome that it had when the network was traced."""
    if bool(outcome) is not expected:  # a compiler has symbols in the place of numbers
        raise BadInput(
            f"the network's code does something else for inputs of this size than for those of the example: it compares"
            f" {left} with {right} ({line}). Give inputs of the example's size, or cut with an example of this size"
        )


def _arithmetic(function: Callable[[Any, Any], Any], *, swapped: bool) -> Callable[[Any, Any], Any]:
    def apply(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        pair = (other, self) if swapped else (self, other)
        result = function(*map(untraced, pair))
        return traced_number(result, SizeExpression(function, tuple(map(expression_of, pair))), self.check)

    return apply


def _unary(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: traced_number(
        function(untraced(self)), SizeExpression(function, (expression_of(self),)), self.check
    )


def _comparison(function: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    def compare(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        outcome = function(untraced(self), untraced(other))
        self.check(function, self, other, outcome)
        return outcome

    return compare


for _kind in (TracedInt, TracedFloat):
    for _name in ARITHMETIC:
        _function = getattr(operator, f"__{_name}__")
        setattr(_kind, f"__{_name}__", _arithmetic(_function, swapped=False))
        setattr(_kind, f"__r{_name}__", _arithmetic(_function, swapped=True))
    for _name in COMPARISONS:
        setattr(_kind, f"__{_name}__", _comparison(getattr(operator, _name)))
    for _name, _function in UNARY.items():
        setattr(_kind, _name, _unary(_function))
