"""Follow the samples of a batch through the functions that a network calls: which join samples before the logits?

The batch has a prime number of samples, so whatever has rows for all of them has a multiple of as many elements, and
what is computed from them and has another number of elements is made of several samples together.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from traceback import walk_stack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from alight.cutting.calls import CONTENT_READS, OF_SIZES, SIZED_BY_CONTENT, quick_result, walk
from alight.cutting.running import own_line

RANKINGS = {"argsort", "cummax", "cumprod", "cumsum", "kthvalue", "msort", "sort", "topk"}  # functions of an axis
REDUCTIONS = {
    "all",
    "amax",
    "amin",
    "any",
    "max",
    "mean",
    "median",
    "min",
    "norm",
    "std",
    "sum",
    "var",
}  # of all or some
PLACES = {"argsort", "cumsum"}  # of these, functions that give samples numbers
SLICES = {"__getitem__", "chunk", "narrow", "select", "split", "split_with_sizes", "tensor_split", "unbind"}
MOVES = {  # functions whose results are rows of what they are given, or as many as its content says
    "_pack_padded_sequence", "_pad_packed_sequence", "gather", "index_select", "pad", "repeat_interleave",
    "scatter", "take",
}  # fmt: skip
RECURRENT = {"gru", "lstm", "rnn_relu", "rnn_tanh"}
LIKE = {"expand_as", "reshape_as", "to", "type_as", "view_as"}  # functions that take no content of a second tensor
TOGETHER = {"cat", "concat", "concatenate", "stack", "vstack"}
COMPARISONS = {"__lt__", "__le__", "__gt__", "__ge__", "lt", "le", "gt", "ge", "less", "less_equal", "greater"}
CONTENT, COUNTED, RANKED, LIMITED, JOINED = range(5)  # what a tensor depends on
REASONS = {
    LIMITED: "the logits of a sample depend on the other samples of its batch, of which a limited number is taken",
    JOINED: "the logits of a sample depend on the other samples of its batch, which a function joins",
}


class Mark(NamedTuple):
    """What a tensor depends on, and the line of the network's code since when."""

    level: int = CONTENT
    line: str = ""


class ForcedRead(NamedTuple):
    """A line at which the network's code reads content, and what it is made to read there."""

    line: str
    change: Callable[[Any], Any]


class SampleWatch(TorchFunctionMode):
    """Marks what is computed from a batch, and notes where the network's code ranks, counts or reads samples."""

    def __init__(self, batch: Sequence[Tensor], forced: ForcedRead | None = None) -> None:
        super().__init__()
        self.rows, self.forced = len(batch[0]), forced
        self.marks: Any = WeakTensorKeyDictionary()
        self.quantified: Any = WeakTensorKeyDictionary()  # what `any` and `all` of several samples gave: whether any
        self.branches: dict[str, Any] = {}  # lines at which a number that is computed from several samples is read
        self.is_suspicious = False
        for each in batch:
            self.marks[each] = Mark()

    def problem(self, outputs: Sequence[Tensor]) -> str:
        """Return how samples are joined in these outputs; "" if no function is seen to join any."""
        level, line = max((self.marks.get(each, Mark()) for each in outputs), default=Mark())
        return f"{REASONS[level]} at {line}" if level in REASONS else ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        self.is_suspicious |= _may_join_samples(name, args, kwargs)
        quick = quick_result(func, args)
        result = func(*args, **kwargs) if quick is None else quick
        taken = args[:1] if name in LIKE else (args, kwargs)
        marked = [each for each in walk(taken) if isinstance(each, Tensor) and each in self.marks]
        if not marked or name in OF_SIZES:
            return result
        if name in CONTENT_READS:
            return self._read(name, marked, result)
        for made in (args[0],) if name == "__setitem__" else walk(result):
            if isinstance(made, Tensor):
                self._note(made, self._mark(name, args, kwargs, marked, made))
        return result

    def _note(self, made: Tensor, mark: Mark) -> None:
        self.marks[made] = mark
        if made._base is not None and mark > self.marks.get(made._base, Mark()):
            self.marks[made._base] = mark

    def _is_whole(self, tensor: Tensor, samples: int = 1) -> bool:
        """Check for rows of all samples, or of pairs of them."""
        return tensor.numel() > 0 and tensor.numel() % self.rows**samples == 0

    def _mark(self, name: str, args: Any, kwargs: Any, marked: Sequence[Tensor], made: Tensor) -> Mark:
        """Return what the result of a function depends on."""
        mark = max(self.marks[each] for each in marked)
        if mark.level >= LIMITED:
            is_healed = mark.level == LIMITED and name in TOGETHER
            return Mark() if is_healed and self._is_whole(made) else mark
        if name in COMPARISONS and _is_limit(mark.level, args):
            return Mark(LIMITED, _line())
        whole = [*filter(self._is_whole, marked)]
        if not whole or not made.numel():
            return mark
        if not self._is_whole(made):
            return max(mark, self._mark_of_part(name, args, kwargs, whole[0], made))
        if self._makes_pairs(whole, made):
            return Mark(JOINED, _line())
        return Mark(RANKED, _line()) if name in PLACES and self._ranks(name, args, kwargs) else mark

    def _makes_pairs(self, whole: Sequence[Tensor], made: Tensor) -> bool:
        is_new = self._is_whole(made, 2) and not any(self._is_whole(each, 2) for each in whole)
        return is_new and made.is_floating_point()

    def _mark_of_part(self, name: str, args: Any, kwargs: Any, whole: Tensor, made: Tensor) -> Mark:
        """Return the mark of what has no rows for all samples, though it is computed from something that has."""
        by_content = any(isinstance(each, Tensor) for each in walk(args[1:]))
        if name in SLICES and not by_content:
            return self._mark_of_slice(whole, made)
        if name in SLICES | MOVES | TOGETHER or SIZED_BY_CONTENT.fullmatch(name) or _is_packed(name, args):
            return Mark()
        if name in ("any", "all"):
            self.quantified[made] = name == "any"
        if name in ("sum", "count_nonzero") and not made.is_floating_point():
            return Mark(COUNTED, _line())
        joins = made.is_floating_point() or self._ranks(name, args, kwargs)
        return Mark(JOINED, _line()) if joins else Mark()

    def _mark_of_slice(self, whole: Tensor, made: Tensor) -> Mark:
        several = made.ndim == whole.ndim > 0 and made.shape[0] > 1 and whole.shape[0] % self.rows == 0
        return Mark(LIMITED, _line()) if several else Mark()

    def _ranks(self, name: str, args: Any, kwargs: Any) -> bool:
        """Check whether a function ranks samples."""
        axis = axis_of(name, args, kwargs)
        return name in RANKINGS and (not isinstance(axis, int) or args[0].shape[axis] % self.rows == 0)

    def _read(self, name: str, marked: Sequence[Tensor], result: Any) -> Any:
        """Return what is read, or what is to be read there; note the line if it is made of several samples."""
        if not isinstance(result, bool | int | float):
            return result
        level = max(self.marks[each] for each in marked).level
        found = self.quantified.get(marked[0], False if name in ("equal", "allclose") else None)
        if level < LIMITED and (found is None or found is bool(result)):  # one more sample cannot turn it round
            return result
        line = _line()
        self.branches.setdefault(line, result)
        is_forced = self.forced is not None and self.forced.line == line
        return type(result)(self.forced.change(result)) if self.forced and is_forced else result


def _is_packed(name: str, args: Sequence[Any]) -> bool:
    """Check for a recurrent layer on packed sequences, whose steps are rows of one sample each."""
    return name in RECURRENT and isinstance(args[1], Tensor) and not args[1].is_floating_point()


def _is_limit(level: int, operands: Sequence[Any]) -> bool:
    """Check whether ranks are compared with a number, or counts with one above 1: "more than none" is not a limit."""
    numbers = [each for each in operands[:2] if isinstance(each, int | float)]
    return (level == RANKED and bool(numbers)) or (level == COUNTED and any(each > 1 for each in numbers))


def axis_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the axis for which a function that ranks is called; by default it is the last."""
    place = 2 if name in ("topk", "kthvalue") else 1
    return 0 if name == "msort" else kwargs.get("dim", args[place] if len(args) > place else -1)


def _may_join_samples(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Check whether a function ranks samples, reads the content of tensors, or makes sizes of it."""
    if name in RANKINGS:
        axis = axis_of(name, args, kwargs)
        return not isinstance(axis, int) or axis % max(1, args[0].ndim) == 0
    if name in ("__getitem__", "__setitem__"):
        return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in walk(args[1]))
    if name in REDUCTIONS or name == "where":  # without an axis or another tensor
        return len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].ndim > 0
    return name in CONTENT_READS or SIZED_BY_CONTENT.fullmatch(name) is not None


def _line() -> str:
    return own_line(walk_stack(sys._getframe()))
