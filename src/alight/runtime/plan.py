"""Does it pay here? Times of this network on this machine, the exits and the policy for them, and a trial run."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from alight.calibrate.eero import eero
from alight.calibrate.prune import held_out
from alight.costs import Costs
from alight.errors import BadInput
from alight.models.measure import time_stages
from alight.models.multi_exit import Carried, MultiExitModel
from alight.outputs import HeadOutputs
from alight.policies.policy import ExitAt, Lottery, Policy, Threshold, aligned
from alight.policies.route import replay
from alight.runtime.predictor import Predictor
from alight.runtime.prepare import prepared

Method = Callable[..., Policy]

LOSS = 0.01  # of accuracy, where neither a budget nor a loss is given
FOLDS = 3  # of the labelled data, each held out once
HALVINGS = 6  # of the range of budgets: to a sixtieth of the plain network
BATCHES, SECONDS, ROUNDS = 8, 0.3, 7  # of the trial: batches and seconds of a run at least, and runs
WORTH = 1.01  # times as fast as the plain network at least, in three of four runs, or it does not pay


@dataclass(frozen=True)
class Plan:
    """What to run on this machine at this batch size, and what to expect of it."""

    policy: Policy
    pays: bool  # is it faster than the plain network?
    throughput: float  # samples per second in the trial
    dense_throughput: float
    accuracy: float  # on labelled samples that it was not fitted to
    dense_accuracy: float
    costs: Costs  # milliseconds per sample, as measured
    batch_size: int
    model: MultiExitModel = field(repr=False)
    settings: dict[str, Any] = field(default_factory=dict)  # of the predictor
    reason: str = ""

    @property
    def open_exits(self) -> tuple[int, ...]:
        """Exits that are evaluated."""
        return self.policy.open_exits

    @property
    def speedup(self) -> float:
        """How many times as fast as the plain network."""
        return self.throughput / self.dense_throughput

    def predictor(self, **settings: Any) -> Predictor:
        """The planned predictor."""
        return Predictor(self.model, self.policy, batch_size=self.batch_size, **self.settings | settings)

    def __str__(self) -> str:
        names = ", ".join(self.model.exits[index] for index in self.open_exits)
        columns = [
            ["", "plain network", "planned"],
            ["samples/s", f"{self.dense_throughput:,.0f}", f"{self.throughput:,.0f}"],
            ["speed-up", "1", f"{self.speedup:.2f}"],
            ["accuracy", f"{self.dense_accuracy:.1%}", f"{self.accuracy:.1%}"],
        ]
        return "\n".join([f"batches of {self.batch_size}; open exits: {names}", *aligned(columns), self.reason])


def plan(
    model: MultiExitModel,
    labelled: HeadOutputs,
    *,
    example: Any,
    batch_size: int,
    device: str | torch.device | None = None,
    budget: float | str | None = None,
    max_accuracy_loss: float | None = None,
    method: Method | None = None,
    **settings: Any,
) -> Plan:
    """The policy that pays on this device at this batch size, or the plain network where none does.

    Stages and heads are timed. With a `budget` ("60%" of the plain network's time, "0.2 ms") the policy keeps to it;
    with `max_accuracy_loss`, or without either (0.01), it is the cheapest that loses no more on held-out samples. Then
    it is tried against the plain network, samples leaving by lot as often as planned: if it is not faster, the plain
    network is the plan. `settings` go to the predictor: dtype, channels_last, compile.
    """
    if budget is not None and max_accuracy_loss is not None:
        raise BadInput("a budget and a largest loss are two questions: give one of them")
    if max_accuracy_loss is not None and not 0 <= max_accuracy_loss < 1:
        raise BadInput(f"max_accuracy_loss {max_accuracy_loss:g} must lie in [0, 1): 0.01 is one point")
    if labelled.num_exits != model.num_exits:
        raise BadInput(f"a table of {labelled.num_exits} exits for a network of {model.num_exits}: record this network")
    fit: Method = method or partial(eero, spend_all=True, prune=True)
    settings = {"device": device, **settings}
    costs = walking_costs(model, example, batch_size, settings)
    loss = LOSS if max_accuracy_loss is None else max_accuracy_loss
    amount = _cheapest(fit, costs, labelled, loss) if budget is None else costs.budget(budget)
    dense = _dense(costs)
    dense_accuracy = float(labelled.correct()[:, -1].mean())
    terms: dict[str, Any] = {"costs": costs, "batch_size": batch_size, "model": model, "settings": settings}

    def plain(throughput: float, reason: str) -> Plan:
        figures = (throughput, throughput, dense_accuracy, dense_accuracy)
        return Plan(dense, False, *figures, reason=f"{reason}: run the plain network.", **terms)

    if amount >= costs.plain and budget is None:
        alone = _throughputs(model, dense, dense, example, batch_size, settings)[0]
        return plain(alone, f"No cheaper policy loses at most {loss:.2%}")
    policy = fit(costs, amount, labelled)
    accuracy = float(held_out(fit, costs, amount, labelled, FOLDS)[0].mean())
    ours, theirs, ratios = _throughputs(model, _by_lot(policy, labelled), dense, example, batch_size, settings)
    if np.quantile(ratios, 0.25) < WORTH:
        return plain(theirs, f"Exits do not pay here ({np.median(ratios):.2f} times as fast)")
    return Plan(policy, True, ours, theirs, accuracy, dense_accuracy, reason="Exits pay.", **terms)


def walking_costs(model: MultiExitModel, example: Any, batch_size: int, settings: dict[str, Any]) -> Costs:
    """Milliseconds per sample of stages and heads, and in the heads what the walk itself takes at an exit."""
    chosen = {name: value for name, value in settings.items() if name in ("device", "dtype", "channels_last")}
    ready = prepared(model, **chosen)
    times = time_stages(ready, example, batch_size).costs()
    if model.num_exits == 1:
        return times
    nobody = Threshold((np.inf,) * (model.num_exits - 1), costs=tuple(times.cumulative().tolist()))
    walked = _seconds_per_sample(Predictor(model, nobody, batch_size=batch_size, **settings), example, batch_size)
    beside = max(0.0, 1e3 * walked - float(times.cumulative()[-1])) / (model.num_exits - 1)
    return Costs(times.stages, times.heads + beside * (np.arange(len(times)) < len(times) - 1), "ms")


def _cheapest(fit: Method, costs: Costs, labelled: HeadOutputs, loss: float) -> float:
    """The least budget, to a sixtieth of the network, at which held-out accuracy loses at most so much."""
    wanted = float(labelled.correct()[:, -1].mean()) - loss
    low, high = float(costs.cumulative()[0]), costs.plain
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = held_out(fit, costs, middle, labelled, FOLDS)[0].mean() >= wanted
        low, high = (low, middle) if enough else (middle, high)
    return high


def _dense(costs: Costs) -> Policy:
    last = len(costs) - 1
    return ExitAt(
        costs=(costs.plain,), open_exits=(last,), num_exits=len(costs), unit=costs.unit, method="plain network"
    )


def _by_lot(policy: Policy, labelled: HeadOutputs) -> Policy:
    """A lottery in which as many leave at each exit as by the policy, for inputs whose scores mean nothing."""
    if len(policy.open_exits) == 1:
        return policy
    shares = replay(policy, labelled).exit_shares[list(policy.open_exits)]
    return Lottery(
        costs=policy.costs, open_exits=policy.open_exits, num_exits=policy.num_exits, exit_rates=tuple(shares.tolist())
    )


def _throughputs(
    model: MultiExitModel, ours: Policy, theirs: Policy, example: Any, batch_size: int, settings: dict[str, Any]
) -> tuple[float, float, np.ndarray]:
    """Samples per second of two policies, run by turns, and the ratio in each round."""
    pair = [Predictor(model, each, batch_size=batch_size, **settings) for each in (ours, theirs)]
    inputs, _ = _inputs(pair[1], example, batch_size)  # the slower one, as a rule
    rounds = np.array([[_timed(each, inputs) for each in pair] for _ in range(ROUNDS + 1)])[1:]  # the first warms up
    rates = len(inputs[0]) / np.median(rounds, axis=0)
    return float(rates[0]), float(rates[1]), rounds[:, 1] / rounds[:, 0]


def _seconds_per_sample(predictor: Predictor, example: Any, batch_size: int) -> float:
    inputs, seconds = _inputs(predictor, example, batch_size)
    return min(seconds, float(np.median([_timed(predictor, inputs) for _ in range(ROUNDS)]))) / len(inputs[0])


def _inputs(predictor: Predictor, example: Any, batch_size: int) -> tuple[Carried, float]:
    """The example, repeated until a run takes a while, and what the run took."""
    count = BATCHES * batch_size
    while True:
        inputs = predictor.place(predictor.admit(example), count)
        _timed(predictor, inputs)
        seconds = _timed(predictor, inputs)
        if seconds >= SECONDS:
            return inputs, seconds
        count = max(2 * count, int(count * SECONDS / max(seconds, 1e-3)) // batch_size * batch_size)


def _timed(predictor: Predictor, inputs: Carried) -> float:
    start = time.perf_counter()
    predictor(inputs)  # its answers are on the host, so all work is done
    return time.perf_counter() - start
