"""The main job in a minute: digits live (`live`), and here methods and certificates on recordings, without torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from alight import calibrate, recordings
from alight.costs import Costs
from alight.display import accuracy_text
from alight.evaluation import SINGLE_EXIT, at_equal_spend, evaluate_policy, sweep, write_points
from alight.outputs import HeadOutputs
from alight.policies.policy import Policy
from alight.policies.route import replay, replay_on
from alight.report import ReportedNetwork

MAIN = "resnet18_cifar100_joint"  # trained with its exits: the one that policies are certified for
BUDGET, LOSS = "50%", 0.05
BATCH_SIZE = 250
RULES = {"eero": "with exits", "best_single_exit": "at the best single exit"}


@dataclass(frozen=True)
class RecordedDemo:
    """Points by network, policies by purpose, and what these did on the test images of the main network."""

    networks: Mapping[str, ReportedNetwork]
    policies: Mapping[str, Policy]
    measured: Mapping[str, Mapping[str, float]]
    most_expensive: float  # batch, as a share of its budget
    alarm: int | None  # number of hard images until the stream's alarm was raised

    def text(self) -> str:
        """Return the accuracy at half of the main network's cost, in a line."""
        points = [point for point in self.networks[MAIN].points if point.method in RULES]
        at_half = at_equal_spend(points, [points[0].full_cost / 2])
        accuracies = ", ".join(f"{accuracy_text(point.accuracy)} {RULES[point.method]}" for point in at_half)
        full = next(point for point in reversed(self.networks[MAIN].points) if point.method == SINGLE_EXIT)
        own = f"CIFAR-100, a recorded ResNet-18 at {BUDGET} of its FLOPs: accuracy {accuracies}"
        return f"{own}, {accuracy_text(full.accuracy)} of the full network"

    def values(self) -> dict[str, Any]:
        """Return what the policies did, for programs."""
        return {"cifar100": {**self.measured, "most_expensive_batch": self.most_expensive, "alarm_after": self.alarm}}

    def write(self, folder: Path) -> None:
        """Write the points as CSV, and the policies."""
        own = folder / "cifar100"
        own.mkdir(exist_ok=True)
        for name, network in self.networks.items():
            write_points(network.points, own / f"{name}.csv")
        for name, policy in self.policies.items():
            policy.save(own / f"{name}.json")


def run_recorded(
    say: Callable[[str], None], methods: Mapping[str, calibrate.Method], budgets: Sequence[str], progress: bool
) -> RecordedDemo:
    """Run every method at every budget on every recording, and certify policies for half of the main one."""
    points = {}
    for name in recordings.NAMES:
        say(f"comparing {len(methods)} methods on the recording {name}")
        labelled, test, costs = recordings.load(name)
        points[name] = sweep(methods, costs, budgets, labelled=labelled, test=test, progress=progress)
    say("calibrating with further guarantees: for every batch, along a stream, on accuracy")
    labelled, test, costs = recordings.load(MAIN)
    policies, measured = _policies(costs, labelled), {}
    for name in ("policy", "auto", "careful"):
        decisions = replay(policies[name], test)
        accuracy = decisions.accuracy(test.known_labels("the demo"))
        measured[name] = {"accuracy": accuracy, "spent": decisions.mean_cost / costs.full}
    shuffled = test.take(np.random.default_rng(0).permutation(len(test)))  # recorded class by class
    most_expensive, alarm = _most_expensive_batch(policies["batch"], shuffled), _alarm(policies["stream"], shuffled)
    networks = {name: ReportedNetwork(own) for name, own in points.items()}
    networks[MAIN] = ReportedNetwork(
        points[MAIN],
        chosen=evaluate_policy(policies["policy"], costs, test),
        guarantees=_guarantees(policies, most_expensive, alarm),
    )
    return RecordedDemo(networks, policies, measured, most_expensive, alarm)


def _guarantees(policies: Mapping[str, Policy], most_expensive: float, alarm: int | None) -> list[str]:
    """Return the certificates of the policies, and what was measured on the test images."""
    certificates = {name: policy.certificate for name, policy in policies.items()}
    raised = "not raised" if alarm is None else f"raised after {alarm} of them"
    return [
        f"{certificates['policy']}",
        f"Another policy, for every batch: {certificates['batch']} Of the test images in batches of {BATCH_SIZE}, the"
        f" most expensive batch spent {most_expensive:.2%} of its budget.",
        f"Another policy, along a stream: {certificates['stream']} When the images became hard half-way, the alarm was"
        f" {raised}.",
        f"Another policy, at most {100 * LOSS:g} points lost: {certificates['careful']}",
    ]


def _policies(costs: Costs, labelled: HeadOutputs) -> dict[str, Policy]:
    cheapest = calibrate.certified_risk(calibrate.eero, risk="excess_error", alpha=LOSS)
    return {
        "policy": calibrate.certified_probability(calibrate.eero)(costs, BUDGET, labelled),
        "batch": calibrate.certified_batch(calibrate.eero)(costs, BUDGET, labelled),
        "stream": calibrate.certified_stream(calibrate.eero)(costs, BUDGET, labelled),
        "careful": cheapest(costs, None, labelled),
        "auto": calibrate.auto(costs, BUDGET, labelled),
    }


def _most_expensive_batch(policy: Policy, test: HeadOutputs) -> float:
    spent = replay(policy, test, batch_size=BATCH_SIZE).spent.reshape(-1, BATCH_SIZE).mean(axis=1)
    return float(spent.max() / (policy.budget or 1.0))


def _alarm(policy: Policy, test: HeadOutputs) -> int | None:
    """Return after how many hard images the alarm is raised on a stream whose second half is hard."""
    half = len(test) // 2
    scores = np.concatenate([test.scores[:half], 0.3 * test.scores[half:]])
    _, (state, *_) = replay_on(policy, replace(test, scores=scores), batch_size=50)
    return state.alarmed_at - half if state.alarmed else None
