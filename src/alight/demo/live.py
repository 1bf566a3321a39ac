"""Digits, live: train a network with exits, measure its costs, calibrate it to a budget, and time it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits

from alight import calibrate
from alight.costing.measure import measure_costs
from alight.costs import Costs
from alight.data.batches import as_inputs, as_tensor
from alight.engine.backends.torch.prepare import threads
from alight.engine.predictor import Predictor
from alight.engine.recorder import record
from alight.evaluation import evaluate_policy, sweep
from alight.files import write_arrays
from alight.networks.multi_exit import MultiExitModel
from alight.networks.store import save_model
from alight.networks.zoo import resnet_digits
from alight.outputs import Decisions, HeadOutputs
from alight.planning.plan import Plan, plan
from alight.planning.timing import SpeedComparison, compare
from alight.policies.policy import Policy
from alight.provenance import measured_on
from alight.report import MeasuredSpeed, ReportedNetwork, examples
from alight.training.settings import TrainingSettings
from alight.training.training import train_heads

TRAINED, CALIBRATED = 797, 500  # of 1,797 digits; the other 500 are the test set
EPOCHS, LEARNING_RATE = 10, 3e-3
BUDGET, LOSS = "50%", 0.05
THREADS = 1  # of torch, so that times are those of one core whatever else the machine does
BATCH_SIZE = 64
TIMED = {1: 200, BATCH_SIZE: 500}  # number of samples by batch size
TIMINGS = ("batch_size", "full_per_second", "per_second", "speedup", "low", "high")  # of a comparison, in JSON


class Digits(NamedTuple):
    """Grey images of 8 x 8 as bytes, and their labels."""

    images: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class LiveDemo:
    """A network that was trained here, and what was measured."""

    model: MultiExitModel
    seconds: float  # of training
    flops: Costs
    times: Costs  # milliseconds in batches of 64
    labelled: HeadOutputs
    test: HeadOutputs
    digits: Digits  # of the test set
    policy: Policy
    decisions: Decisions
    runs: Sequence[SpeedComparison]  # with the full network
    plan: Plan
    networks: Mapping[str, ReportedNetwork]

    @property
    def accuracies(self) -> list[float]:
        """Test accuracy of each exit."""
        return self.test.correct().mean(axis=0).tolist()

    @property
    def accuracy(self) -> float:
        """Test accuracy under the policy."""
        return self.decisions.accuracy(self.digits.labels)

    @property
    def spent(self) -> float:
        """FLOPs spent on the test set, as a share of the full network's."""
        return self.decisions.mean_cost / self.flops.full

    def lines(self) -> dict[str, str]:
        """Return one line per result, by name."""
        names, shares = self.model.exits, self.flops.shares()
        exits = [
            f"{n} {_percent(a)} at {_percent(s, 0)}" for n, a, s in zip(names, self.accuracies, shares, strict=True)
        ]
        left = [f"{n} {_percent(s, 0)}" for n, s in zip(names, self.decisions.exit_shares, strict=True)]
        guarantee = self.policy.certificate.guarantee if self.policy.certificate else ""
        return {
            "full network": f"{self.flops.full / 1e6:.1f} MFLOPs per sample, {_percent(self.accuracies[-1])} accuracy,"
            f" {self.times.full:.2f} ms per digit in batches of {BATCH_SIZE};"
            f" a ResNet with {len(names)} exits, trained on {TRAINED} digits in {self.seconds:.0f} s",
            "exits": f"accuracy at share of the FLOPs: {', '.join(exits)}",
            "budget": f"{BUDGET[:-1]} % of the FLOPs. {guarantee}",
            "spent": f"{_percent(self.spent)} of the FLOPs, {_percent(self.accuracy)} accuracy; share of samples that"
            f" leave at each exit: {', '.join(left)}",
            **{f"batch {run.batch_size}": _timed(run) for run in self.runs},
            "plan": _planned(self.plan),
        }

    def values(self) -> dict[str, Any]:
        """Return all measurements, for programs."""
        exits = zip(self.model.exits, self.accuracies, self.flops.cumulative(), self.decisions.exit_shares, strict=True)
        return {
            "digits": {
                "training_seconds": self.seconds,
                "full_network": {"FLOPs": self.flops.full, "ms": self.times.full, "accuracy": self.accuracies[-1]},
                "exits": {name: {"accuracy": a, "FLOPs": cost, "share": share} for name, a, cost, share in exits},
                "accuracy": self.accuracy,
                "spent": self.spent,
                "guarantee": str(self.policy.certificate),
                "runs": [{name: getattr(run, name) for name in TIMINGS} for run in self.runs],
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


def run_live(
    say: Callable[[str], None], methods: Mapping[str, calibrate.Method], budgets: Sequence[str], progress: bool
) -> LiveDemo:
    """Train, measure, calibrate, time and plan on the CPU, and run all methods on the recorded outputs."""
    with threads(THREADS):
        training, calibration, test = split_digits()
        say(f"training a ResNet with 4 exits on {len(training.labels)} digits")
        start = time.perf_counter()
        model = _train(training, progress)
        seconds = time.perf_counter() - start
        (inputs,) = map(as_tensor, as_inputs(test.images, model.input_spec))
        say("measuring the cost of each stage and head: FLOPs, and milliseconds on this machine")
        flops = measure_costs(model, inputs[:1])
        times = measure_costs(model, inputs, "ms", BATCH_SIZE, progress=progress)
        say(f"recording the outputs of all exits, and calibrating for {BUDGET} of the full network's FLOPs")
        labelled, tested = (record(model, tuple(each), progress=progress) for each in (calibration, test))
        policy = calibrate.certified_probability(calibrate.eero)(flops, BUDGET, labelled)
        decisions = Predictor(model, policy, batch_size=BATCH_SIZE)(inputs)
        say("timing it against the full network, interleaved")
        runs = [compare(model, policy, inputs[:count], size) for size, count in TIMED.items()]
        say(f"planning: which policy loses at most {100 * LOSS:g} points, and does it pay here?")
        goal: dict[str, Any] = {"batch_size": BATCH_SIZE, "max_accuracy_loss": LOSS, "progress": progress}
        planned = plan(model, labelled, example=inputs, **goal)
    say(f"comparing {len(methods)} methods on the digits")
    points = sweep(methods, flops, budgets, labelled=labelled, test=tested, progress=progress)
    chosen = evaluate_policy(policy, flops, tested)
    spent = f"The {len(tested)} test digits spent {_percent(chosen.mean_cost / flops.full)}."
    others = [calibrate.eero(flops, budget, labelled) for budget in budgets]
    page = ReportedNetwork(
        points,
        exits=model.exits,
        examples=examples(test.images, others, tested, chosen=policy),
        plan=planned,
        note=measured_on("torch"),
        chosen=chosen,
        speed=_measured_speed(*runs),
        guarantees=[f"{policy.certificate} {spent}"],
    )
    return LiveDemo(
        model, seconds, flops, times, labelled, tested, test, policy, decisions, runs, planned, {"digits, live": page}
    )


def split_digits() -> tuple[Digits, Digits, Digits]:
    """Return scikit-learn's digits, shuffled, in three parts: training, calibration and test."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = np.round(data.images[order] * (255 / 16)).astype(np.uint8)
    ends = [TRAINED, TRAINED + CALIBRATED]
    training, calibration, test = map(Digits, np.split(images, ends), np.split(data.target[order], ends))
    return training, calibration, test


def _train(training: Digits, progress: bool) -> MultiExitModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = resnet_digits()
    settings = TrainingSettings(mode="joint", epochs=EPOCHS, learning_rate=LEARNING_RATE)
    train_heads(model, tuple(training), settings, batch_size=BATCH_SIZE, progress=progress)
    return model.eval()


def _measured_speed(alone: SpeedComparison, batched: SpeedComparison) -> MeasuredSpeed:
    """Return the speed-up in batches, and the latency of single samples."""
    latencies = {"latency": alone.latency[0], "full_latency": alone.full_latency[0]}
    return MeasuredSpeed(batched.speedup, batched.low, batched.high, batched.batch_size, **latencies)


def _timed(run: SpeedComparison) -> str:
    verdict = "" if run.low > 1 else "early exit is not worth it here: "
    speedup = f"{run.speedup:.2f}x as fast as the full network (quartiles {run.low:.2f}x to {run.high:.2f}x)"
    return f"{verdict}{speedup}, {run.per_second:,.0f} digits/s instead of {run.full_per_second:,.0f}"


def _planned(planned: Plan) -> str:
    limit = f"at most {100 * LOSS:g} points of accuracy lost, batches of {planned.batch_size}"
    if not planned.pays:
        return f"{limit}: {planned.reason}"
    lost = 100 * (planned.full_accuracy - planned.accuracy)
    loss = f"{lost:.1f} points lost on held-out digits, at most {100 * planned.largest_loss:.1f} with 95 % confidence"
    return f"{limit}: {planned.speedup:.2f}x as fast, {loss}"


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"
