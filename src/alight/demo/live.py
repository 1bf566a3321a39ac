"""Digits, live: `alight.fit` on a small network, and all methods on what it recorded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits

from alight import calibrate
from alight.costing.measure import measure_costs
from alight.engine.backends.torch.prepare import threads
from alight.engine.recorder import record
from alight.files import write_arrays
from alight.fitting.calls import Steps
from alight.fitting.fitted import FittedPredictor
from alight.fitting.heads import SEED
from alight.fitting.steps import BATCH_SIZE, HALF, Goal, fit_to
from alight.networks.attach import attach_heads
from alight.networks.zoo import DIGITS, ResNet, resnet_digits
from alight.report import Baseline, ReportedNetwork
from alight.training.settings import TrainingSettings
from alight.training.training import train_heads

TRAINED, VALIDATED = 797, 800  # of 1,797 digits; the other 200 are for the command that is printed at the end
BUDGET = "50%"
THREADS = 1  # of torch, so that times are those of one core whatever else the machine does
AS_DIGITS: Mapping[str, Any] = {"example": torch.zeros(2, 1, 8, 8), "normalisation": DIGITS}
TRAINING = TrainingSettings(mode="joint", epochs=10, learning_rate=3e-3)


class Digits(NamedTuple):
    """Grey images of 8 x 8 as bytes, and their labels."""

    images: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class LiveDemo:
    """A network that was fitted here, digits that nothing has seen, and what the report shows."""

    predictor: FittedPredictor
    unseen: Digits
    networks: Mapping[str, ReportedNetwork]

    def text(self) -> str:
        """Return the table of the fit, with a title."""
        exits = len(self.predictor.fitted.exits)
        return f"a ResNet with {exits} exits on {TRAINED} digits, at {BUDGET} of its FLOPs\n\n{self.predictor.summary}"

    def values(self) -> dict[str, Any]:
        """Return all measurements, for programs."""
        return {"digits": self.predictor.fitted.values()}

    def write(self, folder: Path) -> None:
        """Write the network with its policy, costs and tables, and the unseen digits."""
        own = self.predictor.save(folder / "digits", force=True)
        write_arrays(own / "test.npz", "digits", self.unseen._asdict())


def run_live(say: Callable[[str], None], methods: Mapping[str, calibrate.Method], progress: bool) -> LiveDemo:
    """Fit a network to a budget on the CPU, and run all methods on its recorded outputs."""
    training, validation, unseen = split_digits()
    with threads(THREADS), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = resnet_digits()
        say(f"fitting a ResNet with {model.num_exits} exits to {BUDGET} of its FLOPs: attach, train, calibrate, time")
        goal = Goal(budget=BUDGET)
        predictor = fit_to(goal, model, tuple(training), tuple(validation), training=TRAINING, steps=Steps(progress))
        say("training a network of half the blocks, to compare with")
        smaller = train_smaller((training[0], training[1]), (validation[0], validation[1]))
    say(f"comparing {len(methods)} methods on the digits")
    points = predictor.fitted.points(methods, progress=progress)
    return LiveDemo(predictor, unseen, {"digits, live": predictor.fitted.reported(points, smaller=smaller)})


def train_smaller(training: tuple[Any, Any], validation: tuple[Any, Any]) -> Baseline:
    """Return a ResNet of half the blocks, trained as long and without exits: its accuracy and cost on the same test."""
    model = attach_heads(ResNet(10, (2, 2), widths=(32, 64), channels=1), ["layer1"], **AS_DIGITS)
    alone = replace(TRAINING, loss_weights=[0.0, 1.0])  # its end, and not the exit
    train_heads(model, training, alone, batch_size=BATCH_SIZE, progress=False)
    table = record(model, validation, progress=False)
    test = table.split(HALF, np.random.default_rng(SEED))[1]  # as `fit` draws it
    cost = measure_costs(model, AS_DIGITS["example"]).full
    return Baseline("smaller network", float(test.correct()[:, -1].mean()), cost)


def split_digits() -> tuple[Digits, Digits, Digits]:
    """Return scikit-learn's digits, shuffled, in three parts: training, validation, and unseen ones."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = np.round(data.images[order] * (255 / 16)).astype(np.uint8)
    ends = [TRAINED, TRAINED + VALIDATED]
    training, validation, unseen = map(Digits, np.split(images, ends), np.split(data.target[order], ends))
    return training, validation, unseen
