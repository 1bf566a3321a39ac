"""Families of policies that differ in one level alone, from everyone leaving at once to nobody leaving early."""

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np

from alight.calibrate.problem import Floats
from alight.errors import BadInput
from alight.policies.policy import ExitAt, Mixture, Patience, Policy, Streak, Threshold


def lowered(policy: Policy, level: float, scores: Floats) -> Policy:
    """The policy with all its thresholds moved together: 1 lets everyone leave at once, 0 is the policy, -1 nobody.

    A threshold moves along the scores of its exit in a table: a level of 0.1 takes a tenth off the share of samples
    below it. Costs are nested: no sample leaves later at a higher level.
    """
    if level == 0 or isinstance(policy, ExitAt):
        return policy
    if isinstance(policy, Threshold):
        columns = [scores[:, exit_index] for exit_index in policy.open_exits]
        moved = [_moved(value, column, level) for value, column in zip(policy.thresholds, columns, strict=False)]
        ties = [
            share if value == old else 1.0
            for share, value, old in zip(policy.tie_shares, moved, policy.thresholds, strict=True)
        ]
        return replace(policy, thresholds=tuple(moved), tie_shares=tuple(ties), exit_rates=())
    if isinstance(policy, Streak):
        if level >= 1:
            return replace(policy, threshold=-math.inf, patience=1)
        pooled = scores[:, list(policy.open_exits)].ravel()
        return replace(policy, threshold=_moved(policy.threshold, pooled, level))
    if isinstance(policy, Patience):
        return _patience(policy, _towards(policy.patience, level, len(policy.costs)))
    if isinstance(policy, Mixture):
        first, second = policy.first, policy.second
        if isinstance(first, Patience) and isinstance(second, Patience):
            length = policy.share * first.patience + (1 - policy.share) * second.patience
            return _patience(first, _towards(length, level, len(policy.costs)))
        return replace(policy, first=lowered(first, level, scores), second=lowered(second, level, scores))
    raise BadInput(f"a {type(policy).__name__} has no thresholds to lower: certify another method")


def carried(policy: Policy) -> dict[str, Any]:
    """What a policy carries beside its rule."""
    return {each.name: getattr(policy, each.name) for each in fields(Policy)}


def _towards(value: float, level: float, most: float) -> float:
    return value * (1 - level) if level > 0 else value - level * (most - value)


def _moved(threshold: float, column: Floats, level: float) -> float:
    """The threshold below which that much less, or more, of the column lies."""
    below = _towards(float((column < threshold).mean()), level, 1.0)
    rank = math.floor(below * len(column) + 1e-9)
    if level >= 1 or rank <= 0:
        return -math.inf
    return math.inf if rank >= len(column) else float(np.partition(column, rank)[rank])


def _patience(policy: Patience, length: float) -> Policy:
    """Patience of any length: a mixture of the two whole ones beside it."""
    whole, part = math.floor(length), length - math.floor(length)
    longer, shorter = replace(policy, patience=whole + 1), replace(policy, patience=whole)
    terms = carried(policy) | {"settings": {"patience": whole, "share of next": part}}
    return Mixture(longer, shorter, part, **terms)
