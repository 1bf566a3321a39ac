"""The predictor beside the plain network on the same inputs: samples per second, and milliseconds of one alone."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from alight.models.multi_exit import Carried, MultiExitModel
from alight.outputs import Decisions
from alight.policies.policy import ExitAt, Policy
from alight.runtime.predictor import Predictor

ROUNDS = 5


@dataclass(frozen=True)
class Comparison:
    """Both at one batch size, medians of runs taken by turns."""

    batch_size: int
    plain_per_second: float
    per_second: float
    speedup: float
    low: float  # of the speed-up, a quarter of the runs are below
    high: float
    plain_latency: tuple[float, float]  # milliseconds of a batch, median and 99th percentile
    latency: tuple[float, float]
    decisions: Decisions

    def __str__(self) -> str:
        plain, ours = self.plain_latency, self.latency
        return (
            f"batch {self.batch_size}: {self.plain_per_second:,.0f} samples/s plain, {self.per_second:,.0f} with exits,"
            f" {self.speedup:.2f} times as fast ({self.low:.2f} to {self.high:.2f}); a batch takes {plain[0]:.2f} ms"
            f" plain (99 %: {plain[1]:.2f}), {ours[0]:.2f} with exits (99 %: {ours[1]:.2f})"
        )


def compare(
    model: MultiExitModel, policy: Policy, inputs: Any, batch_size: int, *, rounds: int = ROUNDS, **settings: Any
) -> Comparison:
    """The predictor and the plain network on these inputs, in batches of this size; `settings` go to both."""
    last = model.num_exits - 1
    alone = ExitAt(costs=(1.0,), open_exits=(last,), num_exits=model.num_exits)
    plain, early = (Predictor(model, each, batch_size=batch_size, **settings) for each in (alone, policy))
    placed = early.place(early.admit(inputs), len(early.admit(inputs)[0]))
    decisions = early(placed)
    plain(placed)
    runs = np.array([[_seconds(each, placed) for each in (plain, early)] for _ in range(rounds)])
    ratios = np.quantile(runs[:, 0] / runs[:, 1], [0.25, 0.5, 0.75])
    rates = len(decisions) / np.median(runs, axis=0)
    latencies = [_latency(each, placed, batch_size) for each in (plain, early)]
    low, middle, high = ratios.tolist()
    return Comparison(
        batch_size, float(rates[0]), float(rates[1]), middle, low, high, latencies[0], latencies[1], decisions
    )


def _seconds(run: Callable[[Carried], Any], inputs: Carried) -> float:
    start = time.perf_counter()
    run(inputs)  # its answers are on the host, so all work is done
    return time.perf_counter() - start


def _latency(predictor: Predictor, inputs: Carried, batch_size: int) -> tuple[float, float]:
    """Milliseconds of single batches, each waited for: median and 99th percentile."""
    starts = range(0, min(len(inputs[0]), 200 * batch_size), batch_size)
    with torch.inference_mode():
        seconds = [_seconds(predictor, tuple(each[at : at + batch_size] for each in inputs)) for at in starts]
    return 1e3 * float(np.median(seconds)), 1e3 * float(np.quantile(seconds, 0.99))
