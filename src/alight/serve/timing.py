"""How long it takes to get to an exit, so that a deadline can choose one."""

import math
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from alight.policies.limits import capped
from alight.policies.policy import Policy, Threshold
from alight.serve.network import Network, Runner, Sample

ROUNDS = 3  # of which the quickest counts: what lies above it is the machine's own noise
WEIGHT = 0.1  # of the latest batch in what is known of the machine's slowness


class Timing:
    """Seconds that a batch needs at most to get to each open exit: measured, and corrected while it runs.

    >>> timing = Timing([0.001, 0.004], growth=2.0, most=11)
    >>> timing.seconds(1, open_index=1), timing.seconds(6, open_index=0)
    (0.004, 0.0015)
    >>> timing.deepest(1, within=0.002)
    0
    """

    def __init__(self, alone: Sequence[float], growth: float, most: int) -> None:
        self._alone, self._growth, self._most = list(alone), growth, most
        self.slowness = 1.0  # how many times longer it takes now than when it was measured
        self.per_sample = alone[-1] * growth / most  # seconds, of late

    def seconds(self, count: int, open_index: int) -> float:
        """What so many samples need to get there, if nobody leaves before."""
        larger = (count - 1) / max(self._most - 1, 1)
        return self._alone[open_index] * (1 + (self._growth - 1) * larger) * self.slowness

    def deepest(self, count: int, within: float) -> int | None:
        """The last position to which so many samples get in time; None if not even to the first."""
        reached = [open_index for open_index in range(len(self._alone)) if self.seconds(count, open_index) <= within]
        return reached[-1] if reached else None

    def learn(self, count: int, open_index: int, seconds: float) -> None:
        """Take note of what a batch took that went no further than to this position."""
        ratio = seconds / self.seconds(count, open_index) * self.slowness
        self.slowness = max(1.0, (1 - WEIGHT) * self.slowness + WEIGHT * ratio)
        self.per_sample = (1 - WEIGHT) * self.per_sample + WEIGHT * seconds / count


def timings(network: Network, sample: Sample, most: int) -> dict[str, Timing]:
    """How long exits take under every policy; those that open the same ones share it."""
    batch, alone = network.joined([sample] * most), network.joined([sample])
    found: dict[tuple[int, ...], Timing] = {}
    for runner in network.runners.values():
        if runner.policy.open_exits not in found:
            found[runner.policy.open_exits] = _measured(runner, batch, alone, most)
    return {name: found[runner.policy.open_exits] for name, runner in network.runners.items()}


def _measured(runner: Runner, batch: Any, alone: Any, most: int) -> Timing:
    patient = _patient(runner.policy)
    exits = range(len(patient.costs))
    single = [_seconds(runner, capped(patient, {0: open_index}), alone, 1) for open_index in exits]
    whole = _seconds(runner, patient, batch, most)
    return Timing(np.maximum.accumulate(single).tolist(), max(1.0, whole / single[-1]), most)


def _patient(policy: Policy) -> Policy:
    """A policy that reads what this one reads, and lets nobody leave before the last exit."""
    carried: dict[str, Any] = {each.name: getattr(policy, each.name) for each in fields(Policy)}
    return Threshold(thresholds=(math.inf,) * (len(policy.costs) - 1), **carried)


def _seconds(runner: Runner, policy: Policy, inputs: Any, count: int) -> float:
    patient, taken = runner.with_policy(policy), []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        patient(inputs, np.arange(count))
        taken.append(time.perf_counter() - start)
    return min(taken)
