"""Does early exit pay here? Times of this network on this machine, the exits and the policy for them, a trial run."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np

from alight.calibrate.crossval import held_out, pruned
from alight.calibrate.published import eero
from alight.costing.measure import time_stages
from alight.costs import Costs
from alight.display import html_table
from alight.engine.backends.torch.prepare import prepared, threads
from alight.engine.predictor import Predictor
from alight.engine.settings import RunSettings
from alight.errors import BadInput
from alight.networks.multi_exit import MultiExitModel
from alight.outputs import HeadOutputs
from alight.planning.timing import (
    full_network,
    inputs_for_duration,
    interleaved_timings,
    random_exits,
    stage_seconds,
)
from alight.planning.tune import Tuned, tune_speed
from alight.policies.policy import Policy, Threshold, aligned
from alight.policies.route import replay

Method = Callable[..., Policy]

LOSS = 0.01  # of accuracy, where neither a budget nor a loss is given
FOLDS = 3  # of the labelled data, each held out once
HALVINGS = 6  # of the range of budgets: to a sixtieth of the full network
BATCHES, ROUNDS = 8, 7  # of the trial: batches of a run at least, and runs
CONFIDENCE = 0.95  # that no more accuracy is lost than was said
WORTH = 1.01  # times as fast as the full network at least, in three of four runs, or it does not pay
FULL = "full network"


@dataclass(frozen=True)
class Plan:
    """What to run on this machine at this batch size, and what to expect of it.

    >>> from torch import nn
    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> made = Plan(full_network(model), False, 900.0, 900.0, 0.8, 0.8, Costs([1.0, 1.0], [0.1, 0.1], "ms"), 64, model)
    >>> made.speedup, made.open_exits
    (1.0, (1,))
    """

    policy: Policy
    pays: bool  # is it faster than the full network?
    throughput: float  # samples per second in the trial
    full_throughput: float
    accuracy: float  # on labelled samples that it was not fitted to
    full_accuracy: float
    costs: Costs  # milliseconds per sample, as measured
    batch_size: int
    model: MultiExitModel = field(repr=False)
    largest_loss: float = 0.0  # of accuracy, with 95 % confidence
    settings: RunSettings = field(default_factory=RunSettings)
    reason: str = ""
    tuned: Tuned | None = field(default=None, repr=False)  # how the settings were chosen, where they were

    @property
    def open_exits(self) -> tuple[int, ...]:
        """Exits that are evaluated."""
        return self.policy.open_exits

    @property
    def speedup(self) -> float:
        """How many times as fast as the full network."""
        return self.throughput / self.full_throughput

    def predictor(self, *, probabilities: bool = False, allow_mismatch: bool = False) -> Predictor:
        """Return the planned predictor."""
        terms: dict[str, Any] = {"probabilities": probabilities, "allow_mismatch": allow_mismatch}
        return Predictor(self.model, self.policy, settings=self.settings, batch_size=self.batch_size, **terms)

    def _title(self) -> str:
        names = ", ".join(self.model.exits[index] for index in self.open_exits)
        return f"batches of {self.batch_size}; open exits: {names}"

    def _columns(self) -> list[list[str]]:
        return [
            ["", FULL, "planned"],
            ["samples/s", f"{self.full_throughput:,.0f}", f"{self.throughput:,.0f}"],
            ["speed-up", "1", f"{self.speedup:.2f}"],
            ["accuracy", f"{self.full_accuracy:.1%}", f"{self.accuracy:.1%}"],
        ]

    def _repr_html_(self) -> str:
        return html_table(self._title(), self._columns(), [self.reason, self.tuned.reason if self.tuned else ""])

    def __str__(self) -> str:
        lines = [self._title(), *aligned(self._columns()), self.reason]
        return "\n".join(lines if self.tuned is None else [str(self.tuned), "", *lines])


def plan(
    model: MultiExitModel,
    labelled: HeadOutputs,
    *,
    example: Any,
    batch_size: int,
    budget: float | str | None = None,
    max_accuracy_loss: float | None = None,
    method: Method | None = None,
    speed: str | None = None,
    settings: RunSettings | None = None,
) -> Plan:
    """Return the policy that pays on this machine at this batch size, or the full network where none does.

    Stages and heads are timed. With a `budget` ("60%" of the full network's time, "0.2 ms") the policy keeps to it;
    with `max_accuracy_loss`, or without either (0.01), it is the cheapest that loses no more with 95 % confidence,
    judged by held-out samples: the more are labelled, the cheaper it may be. Then it is tried against the full network,
    samples leaving at random as often as planned: if it is not faster, the full network is the plan. With speed="auto"
    the `settings` are tuned by measuring the full network (`tune_speed`), compiled too if they ask for it.

    >>> import torch
    >>> from torch import nn
    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> labelled = HeadOutputs.from_logits(np.zeros((60, 2, 3)), np.arange(60) % 3)
    >>> settings = RunSettings(threads=1)
    >>> planned = plan(model, labelled, example=torch.zeros(1, 4), batch_size=256, settings=settings)
    >>> planned.pays == (planned.policy.method != "full network")
    True
    """
    _check(model, labelled, budget, max_accuracy_loss, speed)
    fit: Method = method or partial(pruned(eero), spend_all=True)
    settings, tuned = settings or RunSettings(), None
    if speed:
        tuned = tune_speed(model, batch_size=batch_size, example=example, settings=settings)
        settings = tuned.settings
    costs = walking_costs(model, example, batch_size, settings)
    loss = LOSS if max_accuracy_loss is None else max_accuracy_loss
    amount = cheapest(fit, costs, labelled, loss) if budget is None else costs.budget(budget)
    throughputs = partial(_throughputs, model, example, batch_size, settings)
    alone = replace(full_network(model), costs=(costs.full,), unit=costs.unit, method=FULL)
    right = float(labelled.correct()[:, -1].mean())
    terms: dict[str, Any] = {"settings": settings, "tuned": tuned}
    full = Plan(alone, False, 0.0, 0.0, right, right, costs, batch_size, model, **terms)
    if amount >= costs.full and budget is None:
        sure = f"{CONFIDENCE:.0%} confidence from {len(labelled)} labelled samples"
        reason = f"No cheaper policy loses at most {loss:.2%} with {sure}: use the full network."
        return _at(full, throughputs(alone, alone)[0], reason)
    policy = fit(costs, amount, labelled)
    correct = held_out(fit, costs, amount, labelled, FOLDS)[0]
    lost = largest_loss(labelled.correct()[:, -1], correct)
    shares = replay(policy, labelled).exit_shares[list(policy.open_exits)].tolist()
    ours, theirs, ratios = throughputs(random_exits(policy, shares), alone)
    if np.quantile(ratios, 0.25) < WORTH:
        median = f"{np.median(ratios):.2f}x median, slower in {(ratios < 1).mean():.0%} of runs"
        return _at(full, theirs, f"Early exit is not worth it here: {median}. Use the full network.")
    reason = f"Early exit pays; it loses at most {lost:.1%} of accuracy, with {CONFIDENCE:.0%} confidence."
    paying = replace(_at(full, theirs, reason), policy=policy, pays=True, throughput=ours)
    return replace(paying, accuracy=float(correct.mean()), largest_loss=lost)


def _check(
    model: MultiExitModel, labelled: HeadOutputs, budget: object, max_accuracy_loss: float | None, speed: str | None
) -> None:
    if budget is not None and max_accuracy_loss is not None:
        raise BadInput("a budget and a largest loss are two questions: give one of them")
    if max_accuracy_loss is not None and not 0 <= max_accuracy_loss < 1:
        raise BadInput(f"max_accuracy_loss {max_accuracy_loss:g} must lie in [0, 1): 0.01 is one point")
    if labelled.num_exits != model.num_exits:
        raise BadInput(f"a table of {labelled.num_exits} exits for a network of {model.num_exits}: record this network")
    if speed not in (None, "auto"):
        raise BadInput(f"speed {speed!r}: give 'auto', or settings such as RunSettings(channels_last=True)")


def _at(full: Plan, throughput: float, reason: str) -> Plan:
    """Return the plan of the full network with its measured throughput."""
    return replace(full, throughput=throughput, full_throughput=throughput, reason=reason)


def walking_costs(model: MultiExitModel, example: Any, batch_size: int, settings: RunSettings) -> Costs:
    """Return milliseconds per sample of stages and heads, and in the heads what the walk itself takes at an exit."""
    with threads(settings.threads):
        times = time_stages(prepared(model, settings), example, batch_size).costs()
    if model.num_exits == 1:
        return times
    nobody = Threshold((np.inf,) * (model.num_exits - 1), costs=tuple(times.cumulative().tolist()))
    walk = Predictor(model, nobody, settings=settings, batch_size=batch_size)
    inputs, taken = inputs_for_duration(walk, example, batch_size, BATCHES)
    if settings.compile or settings.graphs:
        whole = 1e3 * stage_seconds(walk, tuple(each[:batch_size] for each in inputs)) / batch_size
        heads = times.heads / (times.stages + times.heads)  # both run as one: shared as when they run apart
        times = Costs(whole * (1 - heads), whole * heads, "ms")
    walked = min(taken, float(np.median(interleaved_timings([walk], inputs, ROUNDS)))) / len(inputs[0])
    beside = max(0.0, 1e3 * walked - float(times.cumulative()[-1])) / (model.num_exits - 1)
    return Costs(times.stages, times.heads + beside * (np.arange(len(times)) < len(times) - 1), "ms")


def cheapest(fit: Method, costs: Costs, labelled: HeadOutputs, loss: float, confidence: float = CONFIDENCE) -> float:
    """Return the least budget, to a sixtieth of the network, at which no more accuracy is lost."""
    full = labelled.correct()[:, -1]
    low, high = float(costs.cumulative()[0]), costs.full
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        correct = held_out(fit, costs, middle, labelled, FOLDS)[0]
        low, high = (low, middle) if largest_loss(full, correct, confidence) <= loss else (middle, high)
    return high


def largest_loss(before: np.ndarray, after: np.ndarray, confidence: float = CONFIDENCE) -> float:
    """Return how much accuracy is lost at most between two answers to every sample, each correct or not.

    The upper end of the interval for matched pairs by Agresti and Min (2005): half a sample is added to each of the
    four cells (correct or not before, correct or not after), so that few samples do not look like certainty.

    >>> round(largest_loss(np.ones(100), np.arange(100) > 1), 3)
    0.047
    """
    lost, won = ((before > after).sum() + 0.5, (before < after).sum() + 0.5)
    count = len(before) + 2
    spread = np.sqrt(lost + won - (lost - won) ** 2 / count)
    return float(max(0.0, (lost - won + NormalDist().inv_cdf(confidence) * spread) / count))


def _throughputs(
    model: MultiExitModel, example: Any, batch_size: int, settings: RunSettings, ours: Policy, theirs: Policy
) -> tuple[float, float, np.ndarray]:
    """Return samples per second of two policies, interleaved, and the ratio in each round."""
    pair = [Predictor(model, each, settings=settings, batch_size=batch_size) for each in (ours, theirs)]
    inputs, _ = inputs_for_duration(pair[1], example, batch_size, BATCHES)  # the slower one, as a rule
    rounds = interleaved_timings(pair, inputs, ROUNDS)
    rates = (len(inputs[0]) / np.median(rounds, axis=0)).tolist()
    return rates[0], rates[1], rounds[:, 1] / rounds[:, 0]
