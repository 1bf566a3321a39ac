"""Predictors on the clock: runs long enough, interleaved, so that whatever else the machine does hits all alike."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from alight.data.batches import as_inputs
from alight.display import aligned, quantity
from alight.engine.backends import Integers, State
from alight.engine.backends.cascade import Cascade
from alight.engine.predictor import Predictor
from alight.engine.settings import RunSettings
from alight.networks.multi_exit import MultiExitModel
from alight.outputs import Decisions
from alight.policies.policy import ExitAt, Lottery, Policy

Floats = npt.NDArray[np.float64]

SECONDS = 0.3  # of a run at least, or the clock and other work on the machine count for more than the network
DRAWN = 50  # times as many samples as are needed, of which those are taken that leave as planned
SHORT = 0.03  # seconds of a run of one stage, which is repeated
ROUNDS, FEWEST = 5, 3
LONGEST = 60.0  # seconds of rounds: no more than the fewest are run beyond that


Network = MultiExitModel | Cascade


def full_network(model: Network, exit_index: int = -1) -> Policy:
    """Return the policy under which every sample leaves at the last exit, or at another, and no other is open."""
    opened = (exit_index % model.num_exits,)
    return ExitAt(costs=(1.0,), open_exits=opened, num_exits=model.num_exits, exits=model.exits)


def inputs_for_duration(predictor: Predictor, example: Any, batch_size: int, batches: int) -> tuple[State, float]:
    """Return the example repeated until a run takes a while, at least `batches` batches, and the seconds it took."""
    count = batches * batch_size
    while True:
        inputs = predictor.place(example, count)
        seconds(predictor, inputs)
        taken = seconds(predictor, inputs)
        if taken >= SECONDS:
            return inputs, taken
        count = max(2 * count, int(count * SECONDS / max(taken, 1e-3)) // batch_size * batch_size)


def interleaved_timings(predictors: Sequence[Predictor], inputs: State, rounds: int) -> Floats:
    """Return the seconds of every predictor in every round, (rounds, predictors), after one that warms up."""
    pairs = [(each, as_planned(each.policy, len(inputs[0]))) for each in predictors]
    return np.array([[seconds(each, inputs, samples) for each, samples in pairs] for _ in range(rounds + 1)])[1:]


def seconds(predictor: Predictor, inputs: State, samples: Integers | None = None) -> float:
    """Return the seconds of one run."""
    return _clocked(partial(predictor, inputs, samples))  # its answers are on the host, so all work is done


def stage_seconds(predictor: Predictor, state: State) -> Floats:
    """Return the seconds of every stage between open exits for these inputs, as the predictor runs them.

    Compiled if it is; decisions included where the device decides.
    """
    backend, found = predictor.backend, []
    deciding: Any = getattr(backend, "deciding", None)
    decided = deciding.replays(len(state[0])) if deciding else nullcontext([])
    with backend.running(), decided as replays:
        for stage in range(len(predictor.policy.open_exits)):
            run, batches = replays[stage] if replays else (partial(backend.run, stage, state), 1)
            again = partial(_again, run)
            count = max(3, int(SHORT / max(_clocked(partial(again, 1)), 1e-6)))
            found.append(float(np.median([_clocked(partial(again, count)) for _ in range(3)])) / (count * batches))
            if not replays:
                _, state = backend.run(stage, state)
    return np.array(found)


def random_exits(policy: Policy, exit_rates: Sequence[float]) -> Policy:
    """Return a policy by which so many samples leave at random at each open exit, for inputs without meaning.

    It combines answers as the policy does, which takes time too.
    """
    if len(policy.open_exits) == 1:
        return policy
    terms = {name: policy.terms()[name] for name in ("costs", "open_exits", "num_exits", "combination")}
    return Lottery(exit_rates=tuple(exit_rates), **terms)


def as_planned(policy: Policy, count: int) -> Integers | None:
    """Return sample numbers of which exactly the planned shares leave at each exit; None for other policies."""
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


def _again(run: Callable[[], object], count: int) -> None:
    for _ in range(count):
        run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _clocked(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@dataclass(frozen=True)
class SpeedComparison:
    """A predictor beside the full network at one batch size, medians of interleaved runs."""

    batch_size: int
    full_per_second: float
    per_second: float
    speedup: float
    low: float  # of the speed-up, a quarter of the runs are below
    high: float
    full_latency: tuple[float, float]  # milliseconds of a batch, median and 99th percentile
    latency: tuple[float, float]
    decisions: Decisions
    full_decisions: Decisions

    def columns(self) -> list[list[str]]:
        """Return columns of text: the full network, and the policy below it."""
        pairs = (self.full_latency, self.latency)
        spread = f"{self.speedup:.2f}x ({self.low:.2f} to {self.high:.2f})"
        return [
            [f"batches of {self.batch_size}", "full network", "with exits"],
            ["samples/s", f"{self.full_per_second:,.0f}", f"{self.per_second:,.0f}"],
            ["speed-up", "1.00x", spread],
            ["latency, median", *(quantity(pair[0], "ms") for pair in pairs)],
            ["99th percentile", *(quantity(pair[1], "ms") for pair in pairs)],
        ]

    def __str__(self) -> str:
        return "\n".join(aligned(self.columns()))


def compare(
    model: Network,
    policy: Policy,
    inputs: Any,
    batch_size: int,
    *,
    settings: RunSettings | None = None,
    rebatch: bool = True,
    allow_mismatch: bool = False,
    rounds: int = ROUNDS,
    progress: bool = False,
) -> SpeedComparison:
    """Return the predictor beside the full network on these inputs, in batches of this size."""
    full, early = (
        Predictor(model, each, settings=settings, batch_size=batch_size, rebatch=rebatch, allow_mismatch=allow_mismatch)
        for each in (full_network(model), policy)
    )
    state = early.place(inputs, len(as_inputs(inputs, early.backend.inputs)[0]))
    decisions, full_decisions = early(state), full(state)
    runs = _rounds((full, early), state, rounds, f"time, batches of {batch_size}", progress)
    low, middle, high = np.quantile(runs[:, 0] / runs[:, 1], [0.25, 0.5, 0.75]).tolist()
    rate = len(decisions) / float(np.median(runs[:, 0]))
    latencies = [_latency(each, state, batch_size) for each in (full, early)]
    times = (rate, rate * middle, middle, low, high, latencies[0], latencies[1])
    return SpeedComparison(batch_size, *times, decisions, full_decisions)


def _rounds(predictors: Sequence[Predictor], state: State, rounds: int, title: str, progress: bool) -> Floats:
    """Return the seconds of each predictor, interleaved, (rounds, predictors): fewer rounds where they take long."""
    runs: list[list[float]] = []
    with tqdm(total=rounds, desc=title, unit="round", disable=not progress) as bar:
        while len(runs) < rounds and (len(runs) < FEWEST or np.sum(runs) < LONGEST):
            runs.append([seconds(each, state) for each in predictors])
            bar.update()
    return np.array(runs)


def _latency(predictor: Predictor, state: State, batch_size: int) -> tuple[float, float]:
    """Return milliseconds of single batches, each waited for: median and 99th percentile."""
    starts = range(0, min(len(state[0]), 200 * batch_size), batch_size)
    with torch.inference_mode():
        taken = [seconds(predictor, tuple(each[at : at + batch_size] for each in state)) for at in starts]
    return 1e3 * float(np.median(taken)), 1e3 * float(np.quantile(taken, 0.99))
