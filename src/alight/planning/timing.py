"""Predictors on the clock: enough inputs, runs by turns, so that whatever else the machine does hits all alike."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from alight.engine.predictor import Predictor
from alight.networks.multi_exit import Carried, MultiExitModel
from alight.outputs import Decisions
from alight.policies.policy import ExitAt, Lottery, Policy

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

SECONDS = 0.3  # of a run at least, or the clock and the machine's moods say more than the network
DRAWN = 50  # times as many samples as are needed, of which those are taken that leave as planned
SHORT = 0.03  # of a run of one segment, which is repeated


def inputs_for_duration(predictor: Predictor, example: Any, batch_size: int, batches: int) -> tuple[Carried, float]:
    """The example, repeated until a run takes a while, at least so many batches of it, and what the run took."""
    count = batches * batch_size
    while True:
        inputs = predictor.place(predictor.admit(example), count)
        seconds(predictor, inputs)
        taken = seconds(predictor, inputs)
        if taken >= SECONDS:
            return inputs, taken
        count = max(2 * count, int(count * SECONDS / max(taken, 1e-3)) // batch_size * batch_size)


def interleaved_timings(predictors: Sequence[Predictor], inputs: Carried, rounds: int) -> Floats:
    """Seconds of every predictor in every round, (rounds, predictors), after one that warms up."""
    drawn = [as_planned(each.policy, len(inputs[0])) for each in predictors]
    pairs = [*zip(predictors, drawn, strict=True)]
    return np.array([[seconds(each, inputs, samples) for each, samples in pairs] for _ in range(rounds + 1)])[1:]


def seconds(predictor: Predictor, inputs: Carried, samples: Integers | None = None) -> float:
    """What a run takes."""
    return _clocked(partial(predictor, inputs, samples))  # its answers are on the host, so all work is done


def segment_seconds(predictor: Predictor, inputs: Carried) -> Floats:
    """What every segment takes for these inputs at once, compiled if the predictor is."""
    engine, carried = predictor.engine, inputs
    taken = []
    with torch.inference_mode():
        for run in engine.runs or engine.segments:
            carried_on, _ = run(*carried)
            again = partial(_again, partial(run, *carried), inputs[0].device)
            count = max(3, int(SHORT / max(_clocked(partial(again, 1)), 1e-6)))
            taken.append(float(np.median([_clocked(partial(again, count)) for _ in range(3)])) / count)
            carried = carried_on
    return np.array(taken)


def random_exits(policy: Policy, exit_rates: Sequence[float]) -> Policy:
    """A lottery in which so many leave at the policy's open exits, for inputs whose scores mean nothing."""
    if len(policy.open_exits) == 1:
        return policy
    terms: dict[str, Any] = {"open_exits": policy.open_exits, "num_exits": policy.num_exits}
    return Lottery(costs=policy.costs, exit_rates=tuple(exit_rates), **terms)


def as_planned(policy: Policy, count: int) -> Integers | None:
    """So many samples whose lots fall as the rates say, to a sample: few would leave by chance, and not as planned."""
    if not isinstance(policy, Lottery):
        return None
    samples = np.arange(DRAWN * count)
    left = np.full(len(samples), len(policy.open_exits) - 1)
    for open_index in reversed(range(len(policy.open_exits) - 1)):
        left[policy.step(open_index, samples, None, None, ())[0]] = open_index  # the first at which it would leave
    ends = np.rint(count * np.cumsum(policy.exit_rates)).astype(int)
    wanted = np.diff([0, *ends[:-1], count])
    chosen = np.concatenate([np.flatnonzero(left == index)[:number] for index, number in enumerate(wanted)])
    others = np.setdiff1d(samples, chosen)[: count - len(chosen)]  # where an exit is too rare to be drawn so often
    return np.sort(np.concatenate([chosen, others]))


def _again(run: Callable[[], object], device: torch.device, count: int) -> None:
    for _ in range(count):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _clocked(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


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
