"""All methods on recorded outputs of a real network, and policies with promises: nothing here needs torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from alight import calibrate, recordings
from alight.costs import Costs
from alight.demo.chapter import Say
from alight.evaluation import Point, at_equal_spend, sweep, write_points
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy
from alight.policies.route import replay, replay_on

BUDGET, LOSS = "50%", 0.05
BATCH_SIZE = 250
RULES = {"eero": "eero", "eero_marginal": "the paper's rule", "best_single_exit": "the best single exit"}


@dataclass(frozen=True)
class Recorded:
    """Points by network, policies by what they are for, and what these did on the first network's test images."""

    networks: Mapping[str, Sequence[Point]]
    policies: Mapping[str, Policy]
    measured: Mapping[str, Mapping[str, float]]
    dearest: float  # batch, as a share of its budget
    alarm: int | None  # images after which a stream that had turned hard raised it

    @property
    def promises(self) -> list[str]:
        """What is promised about the policies, and how it turned out."""
        alarm = "not raised" if self.alarm is None else f"raised after {self.alarm} of them"
        policies = self.policies
        return [
            f"CIFAR-100, half of the plain network's FLOPs: {policies['policy'].certificate}",
            f"CIFAR-100, in every batch: {policies['batch'].certificate} Of the test images in batches of {BATCH_SIZE},"
            f" the dearest batch spent {self.dearest:.2%} of its budget.",
            f"CIFAR-100, along a stream: {policies['stream'].certificate} When the images turned hard half-way, the"
            f" alarm was {alarm}.",
            f"CIFAR-100, at most {100 * LOSS:g} points lost: {policies['careful'].certificate}",
        ]

    def rows(self) -> dict[str, str]:
        """What three methods reach at half of the first network's cost."""
        points = [point for point in self.networks[recordings.NAMES[0]] if point.method in RULES]
        told = [
            f"{RULES[each.method]} {each.accuracy:.1%}" for each in at_equal_spend(points, [points[0].full_cost / 2])
        ]
        return {"CIFAR-100": f"accuracy of a recorded ResNet-18 that spends 50%: {', '.join(told)}"}

    def values(self) -> dict[str, Any]:
        """What the policies did."""
        return {"cifar100": {**self.measured, "dearest_batch": self.dearest, "alarm_after": self.alarm}}

    def write(self, folder: Path) -> None:
        """Write the points as CSV, and the policies."""
        own = folder / "cifar100"
        own.mkdir(exist_ok=True)
        for name, points in self.networks.items():
            write_points(points, own / f"{name}.csv")
        for name, policy in self.policies.items():
            policy.save(own / f"{name}.json")


def run_recorded(say: Say, methods: Mapping[str, Any], budgets: Sequence[str], progress: bool) -> Recorded:
    """Every method at every budget on every recording, and policies for half of the first network."""
    points = {}
    for name in recordings.NAMES:
        say(f"comparing {len(methods)} methods on the recording {name}")
        labelled, test, costs = recordings.load(name)
        points[name] = sweep(methods, costs, budgets, labelled=labelled, test=test, progress=progress)
    say("calibrating with further promises: for every batch, along a stream, about accuracy")
    labelled, test, costs = recordings.load(recordings.NAMES[0])
    policies, measured = _policies(costs, labelled), {}
    for name in ("policy", "auto", "careful"):
        decisions = replay(policies[name], test)
        accuracy = decisions.accuracy(test.known_labels("the demo"))
        measured[name] = {"accuracy": accuracy, "spent": decisions.mean_cost / costs.full}
    shuffled = test.take(np.random.default_rng(0).permutation(len(test)))  # recorded class by class
    dearest, alarm = _dearest_batch(policies["batch"], shuffled), _alarm(policies["stream"], shuffled)
    return Recorded(points, policies, measured, dearest, alarm)


def _policies(costs: Costs, labelled: HeadOutputs) -> dict[str, Policy]:
    cheapest = calibrate.certified_risk(calibrate.eero, risk="excess_error", alpha=LOSS)
    return {
        "policy": calibrate.certified_probability(calibrate.eero)(costs, BUDGET, labelled),
        "batch": calibrate.certified_batch(calibrate.eero)(costs, BUDGET, labelled),
        "stream": calibrate.certified_stream(calibrate.eero)(costs, BUDGET, labelled),
        "careful": cheapest(costs, None, labelled),
        "auto": calibrate.auto(costs, BUDGET, labelled),
    }


def _dearest_batch(policy: Policy, test: HeadOutputs) -> float:
    spent = replay(policy, test, batch_size=BATCH_SIZE).spent.reshape(-1, BATCH_SIZE).mean(axis=1)
    return float(spent.max() / (policy.budget or 1.0))


def _alarm(policy: Policy, test: HeadOutputs) -> int | None:
    """After how many images the alarm comes on a stream whose second half is hard."""
    half = len(test) // 2
    scores = np.concatenate([test.scores[:half], 0.3 * test.scores[half:]])
    _, (state, *_) = replay_on(policy, replace(test, scores=scores), batch_size=50)
    return state.alarmed_at - half if state.alarmed else None
