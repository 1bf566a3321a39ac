"""What a checkpoint remembers of settings: data unchanged, functions by name and a digest of what they do."""

import hashlib
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn

from alight.networks.multi_exit import digest

LIBRARIES = ("torch", "alight")  # whose functions are known by their names
DATA = (bool, int, float, str, bytes, type(None))


def identity_of(value: Any) -> Any:
    """Return a setting as JSON keeps it, a function as its name with a digest of its code, bound values and constants.

    Of networks that a function refers to only the class counts, since their weights change.

    >>> def focal(logits, labels, power=2): ...
    >>> def harder(logits, labels, power=3): ...
    >>> identity_of(focal) == identity_of(focal) != identity_of(harder)
    True
    >>> identity_of((0.5, nn.functional.cross_entropy))
    [0.5, 'torch.nn.functional.cross_entropy']
    """
    if isinstance(value, tuple | list):
        return [identity_of(each) for each in value]
    if not callable(value) or _is_known(value):
        return _name(value) if callable(value) else value
    return f"{_name(value)} {hashlib.sha256(repr([*_traits(value, set())]).encode()).hexdigest()[:16]}"


def _name(value: Any) -> str:
    named = value.func if isinstance(value, partial) else value
    named = named if hasattr(named, "__qualname__") else type(named)
    return f"{named.__module__}.{named.__qualname__}"


def _is_known(value: Any) -> bool:
    """Return whether the name says all: of a class, or of a function of a library."""
    home = (getattr(value, "__module__", None) or "").partition(".")[0]
    return isinstance(value, type) or (hasattr(value, "__qualname__") and home in LIBRARIES)


def _traits(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield texts that differ where the value does something else."""
    if isinstance(value, DATA):
        yield repr(value)
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    yield _name(value)
    for part in _parts(value):
        yield from _traits(part, seen)


def _parts(value: Any) -> list[Any]:
    """Return what a value consists of, as far as it can be known."""
    if isinstance(value, FunctionType) and not _is_known(value):
        return [value.__code__, value.__defaults__, value.__kwdefaults__, *_referred(value)]
    if isinstance(value, CodeType):
        return [value.co_code, *value.co_names, *value.co_consts]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, Tensor):
        return [digest({"": value})]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, value.tolist() if value.dtype.hasobject else value.tobytes()]
    if isinstance(value, dict):
        return [part for key in sorted(value, key=repr) for part in (key, value[key])]
    if isinstance(value, list | tuple):
        return [*value]
    return sorted(value, key=repr) if isinstance(value, set | frozenset) else _attributes(value)


def _attributes(value: Any) -> list[Any]:
    """Return the attributes of an object, unless its name says all or it is a network, whose weights change."""
    learns = isinstance(value, nn.Module) and any(True for _ in value.parameters())
    return [] if learns or isinstance(value, type) else [getattr(value, "__dict__", None)]


def _referred(function: FunctionType) -> list[Any]:
    """Return what a function takes from around it: its closure, and constants and functions of its module."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    names = [name for name in function.__code__.co_names if name in function.__globals__]
    around = [function.__globals__[name] for name in names]
    own = [each for each in around if isinstance(each, FunctionType) and each.__module__ == function.__module__]
    return [*cells, *own, *(each for each in around if isinstance(each, DATA))]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a name that is bound after the function
        return False
