"""The main job on handwritten digits, live: a network with exits is trained, measured, held to a budget and timed."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits

from alight import calibrate
from alight.costing.measure import measure_costs
from alight.costs import Costs
from alight.data.batches import as_inputs
from alight.demo.chapter import Say
from alight.demo.pages import examples_of, measured_on
from alight.engine.predictor import Predictor
from alight.engine.prepare import threads
from alight.engine.recorder import record
from alight.evaluation import sweep
from alight.files import write_arrays
from alight.networks.multi_exit import MultiExitModel
from alight.networks.store import save_model
from alight.networks.zoo import resnet_digits
from alight.outputs import Decisions, HeadOutputs
from alight.planning.plan import Plan, plan
from alight.planning.timing import Comparison, compare
from alight.policies.policy import Policy
from alight.report import ReportedNetwork
from alight.training.training import train_heads

TRAINED, CALIBRATED = 797, 500  # of 1,797 digits; the other 500 are for the test
EPOCHS, LEARNING_RATE = 10, 3e-3
BUDGET, LOSS = "50%", 0.01
THREADS = 1  # of torch, so that times are those of one core whatever else the machine does
BATCH_SIZE = 64
TIMED = {1: 200, BATCH_SIZE: 500}  # samples to time, by batch size
FIGURES = ("batch_size", "plain_per_second", "per_second", "speedup", "low", "high")  # of a run, for programs


class Digits(NamedTuple):
    """Grey images of 8 x 8 as bytes, and what they show."""

    images: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Live:
    """A network that was trained here, and what was measured of it."""

    model: MultiExitModel
    seconds: float  # of training
    flops: Costs
    times: Costs  # milliseconds in batches of 64
    labelled: HeadOutputs
    test: HeadOutputs
    digits: Digits  # of the test
    policy: Policy
    decisions: Decisions
    runs: Sequence[Comparison]  # beside the plain network
    plan: Plan
    networks: Mapping[str, ReportedNetwork]

    @property
    def promises(self) -> list[str]:
        """What is promised about the policy, and how it turned out."""
        told = f"On {len(self.test)} test digits it spent {self.spent:.1%} of the plain network's FLOPs."
        return [f"Digits, {BUDGET} of the plain network's FLOPs: {self.policy.certificate} {told}"]

    @property
    def accuracies(self) -> list[float]:
        """Share of test digits that every exit has right."""
        return self.test.correct().mean(axis=0).tolist()

    @property
    def accuracy(self) -> float:
        """Share of test digits that are right where they left."""
        return self.decisions.accuracy(self.digits.labels)

    @property
    def spent(self) -> float:
        """FLOPs that the test took, as a share of the plain network's."""
        return self.decisions.mean_cost / self.flops.full

    def rows(self) -> dict[str, str]:
        """From the network to the plan, a line each."""
        shares = (self.flops.cumulative() / self.flops.full).tolist()
        exits = [
            f"{name} {right:.1%} at {share:.0%}"
            for name, right, share in zip(self.model.exits, self.accuracies, shares, strict=True)
        ]
        left = [f"{name} {share:.0%}" for name, share in zip(self.model.exits, self.decisions.exit_shares, strict=True)]
        return {
            "network": f"a ResNet with 4 exits, trained here on {TRAINED} digits in {self.seconds:.0f} s,"
            f" {self.flops.full / 1e6:.1f} MFLOPs, {self.times.full:.2f} ms a digit in batches of {BATCH_SIZE}",
            "exits": f"accuracy and share of the FLOPs: {', '.join(exits)}",
            "budget": f"{BUDGET} of the FLOPs. {self.policy.certificate.guarantee if self.policy.certificate else ''}",
            "spent": f"{self.spent:.1%} of the FLOPs, {self.accuracy:.1%} right; left at {', '.join(left)}",
            **{f"batch {run.batch_size}": _timed(run) for run in self.runs},
            "plan": _planned(self.plan),
        }

    def values(self) -> dict[str, Any]:
        """All that was measured."""
        exits = zip(self.model.exits, self.accuracies, self.flops.cumulative(), self.decisions.exit_shares, strict=True)
        return {
            "digits": {
                "training_seconds": self.seconds,
                "plain": {"FLOPs": self.flops.full, "ms": self.times.full, "accuracy": self.accuracies[-1]},
                "exits": {name: {"accuracy": a, "FLOPs": cost, "share": share} for name, a, cost, share in exits},
                "accuracy": self.accuracy,
                "spent": self.spent,
                "guarantee": str(self.policy.certificate),
                "runs": [{name: getattr(run, name) for name in FIGURES} for run in self.runs],
                "plan": {name: getattr(self.plan, name) for name in ("pays", "speedup", "accuracy", "reason")},
            }
        }

    def write(self, folder: Path) -> None:
        """Write the network, its costs, its tables, its policies and the test digits."""
        own = folder / "digits"
        save_model(self.model, own / "network")
        self.flops.save(own / "costs.json")
        self.labelled.save(own / "labelled.npz")
        self.test.save(own / "test_outputs.npz")
        self.policy.save(own / "policy.json")
        self.plan.policy.save(own / "planned.json")
        write_arrays(own / "test.npz", "digits", self.digits._asdict())


def run_live(say: Say, methods: Mapping[str, Any], budgets: Sequence[str], progress: bool) -> Live:
    """Everything on the processor, from bare digits to a plan, and all methods on what the exits said."""
    with threads(THREADS):
        training, calibration, test = digits_in_three()
        say(f"training a ResNet with 4 exits on {len(training.labels)} digits")
        start = time.perf_counter()
        model = _trained(training, progress)
        seconds = time.perf_counter() - start
        inputs = as_inputs(test.images, model)
        say("measuring what each stage and head costs: FLOPs, and milliseconds on this machine")
        flops, times = measure_costs(model, inputs[:1]), measure_costs(model, inputs, "ms", BATCH_SIZE)
        say(f"recording what the exits say, and calibrating for {BUDGET} of the plain network's FLOPs")
        labelled, tested = (record(model, tuple(each), progress=progress) for each in (calibration, test))
        policy = calibrate.certified_probability(calibrate.eero)(flops, BUDGET, labelled)
        decisions = Predictor(model, policy, batch_size=BATCH_SIZE)(inputs)
        say("timing it against the plain network, by turns")
        runs = [compare(model, policy, inputs[:count], size) for size, count in TIMED.items()]
        say(f"planning: which policy loses at most {100 * LOSS:g} point, and does it pay here?")
        made = plan(model, labelled, example=inputs, batch_size=BATCH_SIZE, max_accuracy_loss=LOSS)
    say(f"comparing {len(methods)} methods on the digits")
    points = sweep(methods, flops, budgets, labelled=labelled, test=tested, progress=progress)
    tables = {"labelled": labelled, "unlabelled": None, "test": tested}
    shown = examples_of(test.images, methods, flops, budgets, tables)
    page = ReportedNetwork(points, exits=model.exits, examples=shown, plan=made, note=measured_on("torch"))
    return Live(
        model, seconds, flops, times, labelled, tested, test, policy, decisions, runs, made, {"digits, live": page}
    )


def digits_in_three() -> tuple[Digits, Digits, Digits]:
    """Scikit-learn's digits, shuffled: to train on, to calibrate on, and to test on."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = np.round(found.images[order] * (255 / 16)).astype(np.uint8)
    ends = [TRAINED, TRAINED + CALIBRATED]
    training, calibration, test = map(Digits, np.split(images, ends), np.split(found.target[order], ends))
    return training, calibration, test


def _trained(training: Digits, progress: bool) -> MultiExitModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = resnet_digits()
    rate, size = LEARNING_RATE, BATCH_SIZE
    train_heads(
        model, tuple(training), mode="joint", epochs=EPOCHS, learning_rate=rate, batch_size=size, progress=progress
    )
    return model.eval()


def _timed(run: Comparison) -> str:
    verdict = "" if run.low > 1 else "exits do not pay here: "
    spread = f"{run.speedup:.2f} times as fast as the plain network ({run.low:.2f} to {run.high:.2f})"
    return f"{verdict}{spread}, {run.per_second:,.0f} digits/s instead of {run.plain_per_second:,.0f}"


def _planned(made: Plan) -> str:
    asked = f"at most {100 * LOSS:g} point lost, batches of {made.batch_size}"
    if not made.pays:
        return f"{asked}: {made.reason}"
    lost = 100 * (made.dense_accuracy - made.accuracy)
    told = f"{lost:.1f} points lost on held-out digits, at most {100 * made.largest_loss:.1f} with 95 % confidence"
    return f"{asked}: {made.speedup:.2f} times as fast, {told}"
