"""The best epoch is that of the validation data; its weights are kept, and training stops when none is better."""

import numpy as np
import pytest
from digits import digits, held_out, network
from short_training import quick, same, state
from torch import nn

from alight.errors import BadInput
from alight.networks.multi_exit import MultiExitModel
from alight.training.checkpoints import BestEpoch
from alight.training.metrics import Epoch
from alight.training.settings import TrainingSettings

EXITS = ("first", "second", "end")


def validated(*rows: tuple[float, ...]) -> list[Epoch]:
    """Epochs with these validation accuracies; losses are twice as high."""
    return [Epoch((), (), tuple(2 * value for value in row), row) for row in rows]


def best_of(epochs, start=0, **options):
    best = BestEpoch(TrainingSettings(**{"keep_best": True, **options}).resolve(3), EXITS, start)
    best.restore(epochs, {})
    return best.index


ROWS = validated((0.5, 0.2, 0.9), (0.4, 0.5, 0.9), (0.6, 0.1, 0.8), (0.4, 0.5, 0.9))


@pytest.mark.parametrize(
    ("options", "index"),
    [
        ({}, 1),  # the mean, and of equal ones the first
        ({"monitor": "loss"}, 2),
        ({"monitor_exit": "first"}, 2),
        ({"monitor_exit": "end"}, 0),
        ({"monitor_exit": "end", "monitor": "loss"}, 2),
        ({"loss_weights": [1, 0, 0]}, 2),
        ({"loss_weights": [1, 0, 1]}, 0),
        ({"start": 2}, 3),
    ],
)
def test_the_best_epoch_is_that_of_the_monitored_exit_or_of_the_mean_by_loss_weights(options, index):
    assert best_of(ROWS, **options) == index


def test_a_loss_that_is_not_a_number_is_never_the_best():
    epochs = validated((np.nan, 0.1, 0.1), (0.3, 0.3, 0.3), (np.inf, 0.1, 0.1))
    assert best_of(epochs, monitor="loss") == 1
    assert best_of(epochs[:1], monitor="loss") is None


def keeps_worsening(epochs: int = 6):
    """A training whose learning rate is so high that later epochs are worse."""
    return {"mode": "joint", "optimizer": "sgd", "learning_rate": 1.2, "schedule": None, "epochs": epochs}


def test_the_weights_of_the_best_epoch_are_kept():
    model, seen = network(), []
    options = keeps_worsening() | {"validation": held_out(), "callbacks": [lambda now: seen.append(state(now.model))]}
    history = quick(model, **options, keep_best=True)
    means = [np.mean(epoch.validation_accuracies) for epoch in history.epochs]
    assert history.best == np.argmax(means) < len(means) - 1
    assert same(state(model), seen[history.best])
    assert history.accuracies == history.epochs[history.best].validation_accuracies
    assert str(history).startswith(f"epoch {history.best + 1} of 6, the best")
    assert [len(line) for line in str(history).splitlines()] == [len(str(history).splitlines()[0])] * 4
    ends = network()
    assert quick(ends, **options).epochs == history.epochs
    assert same(state(ends), seen[-1])


def test_training_stops_once_patience_is_exhausted(tmp_path):
    options = keeps_worsening(30) | {"validation": held_out(), "patience": 2, "monitor_exit": "exit 3"}
    model = network()
    history = quick(model, checkpoint=tmp_path / "last", **options)
    accuracies = [epoch.validation_accuracies[2] for epoch in history.epochs]
    assert len(accuracies) == np.argmax(accuracies) + 3 < 30
    assert history.best is None  # patience alone keeps the last
    again = network()
    assert quick(again, checkpoint=tmp_path / "last", **options) == history
    assert same(state(model), state(again))


def test_patience_waits_for_the_second_phase_of_a_mixed_training():
    stages = [nn.Sequential(nn.Flatten(), nn.Linear(64, 32)), nn.Linear(32, 10)]
    model = MultiExitModel(stages, [nn.Linear(32, 10), nn.Identity()])
    options = {"mode": "mixed", "epochs": 9, "backbone_epochs": 4, "patience": 1, "learning_rate": 1e-12}
    history = quick(model, validation=held_out(), **options)
    assert len(history.epochs) == 4 + 2  # nothing changes: the first epoch of the second phase stays the best


def test_validation_without_labels_has_a_loss_alone():
    images = digits()[1][:50][0]
    with pytest.raises(BadInput, match=r"validation data have no labels.* set monitor='loss'"):
        quick(network(), mode="joint", keep_best=True, validation=[images])
    history = quick(network(), mode="joint", keep_best=True, monitor="loss", validation=[images])
    assert history.best is not None
