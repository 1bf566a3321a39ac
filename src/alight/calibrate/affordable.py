"""Families of policies ordered by cost: the dearest member that keeps the budget, and a mixture with the next."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from alight.budgeting.thresholds import hash01
from alight.calibrate.problem import Floats, Task
from alight.policies.policy import MIXTURE_SALT, Mixture, Policy
from alight.policies.route import replay

Rule = TypeVar("Rule", bound=Policy)


def levels_between(values: Floats) -> Floats:
    """A level below, between and above all distinct values: each tells other samples apart.

    Midway between neighbours, so that rounding in a faster dtype rarely crosses it.

    >>> levels_between(np.array([1.0, 2.0]))
    array([-inf,  1.5,  inf])
    """
    distinct = np.unique(values)
    return np.concatenate([[-np.inf], distinct[:-1] + np.diff(distinct) / 2, [np.inf]])


def highest_affordable(task: Task, levels: Sequence[float] | Floats, at: Callable[[float], Rule]) -> int:
    """Index of the highest level whose policy keeps the budget on the scored table; higher levels never cost less."""
    low, high = 0, len(levels) - 1  # the lowest level is affordable
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if task.spends(at(float(levels[middle]))) <= task.budget else (low, middle - 1)
    return low


def mixed(task: Task, cheaper: Policy, dearer: Policy) -> Mixture:
    """Both policies, with the largest share of the dearer that keeps the budget on the scored table."""
    cheap, dear = (replay(policy, task.scored).spent for policy in (cheaper, dearer))
    hashes = hash01(np.arange(len(dear)), MIXTURE_SALT)
    order = np.argsort(hashes)
    totals = cheap.sum() + np.cumsum((dear - cheap)[order])
    chosen = int(np.argmax(totals > task.budget * len(dear))) if (totals > task.budget * len(dear)).any() else len(dear)
    share = float(hashes[order[chosen]]) if chosen < len(dear) else 1.0  # those below the first one too dear
    settings = dict(cheaper.settings) | {"share of next": share}
    return Mixture(dearer, cheaper, share, **task.terms(settings=settings))
