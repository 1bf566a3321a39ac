"""Callbacks see the state of a training, may stop it, and are where they were when it resumes."""

import numpy as np
import pytest
import torch
from digits import held_out, loader, network
from short_training import FEW, quick, same, state

from alight import Callback, TrainingState
from alight.errors import BadInput
from alight.training.checkpoints import Checkpoint

BATCHES = len(loader(FEW))


class Recorder(Callback):
    """Writes down when it is called, and with what."""

    def __init__(self):
        self.steps, self.epochs = [], []

    def on_step_end(self, state: TrainingState) -> None:
        losses = {name: loss.item() for name, loss in state.losses.items()}
        self.steps.append((state.epoch, state.step, state.optimizer.param_groups[0]["lr"], losses))

    def on_epoch_end(self, state: TrainingState) -> None:
        self.epochs.append((state.epoch, state.step, state.metrics))


def test_callbacks_see_every_step_and_every_epoch_and_change_nothing():
    recorder, alone, watched = Recorder(), network(), network()
    epochs = []
    options = {"mode": "joint", "validation": held_out()}
    history = quick(watched, callbacks=[recorder, lambda state: epochs.append(state.epoch)], **options)
    assert history == quick(alone, **options)
    assert same(state(alone), state(watched))
    assert [(epoch, step) for epoch, step, *_ in recorder.steps] == [(n // BATCHES, n + 1) for n in range(2 * BATCHES)]
    assert epochs == [0, 1]
    rates = [rate for _, _, rate, _ in recorder.steps]
    assert rates == sorted(rates, reverse=True)
    first = np.mean([losses["exit 1"] for *_, losses in recorder.steps[:BATCHES]])
    assert first == pytest.approx(history.epochs[0].losses[0])  # batches of one size
    for (epoch, step, metrics), row in zip(recorder.epochs, history.epochs, strict=True):
        assert step == (epoch + 1) * BATCHES
        assert metrics["loss/exit 3"] == row.losses[2]
        assert metrics["validation_accuracy/exit 1"] == row.validation_accuracies[0]


@pytest.mark.filterwarnings("ignore:the last exit has")
def test_the_losses_of_a_step_are_those_of_all_its_batches():
    one, several = Recorder(), Recorder()
    options = {"mode": "frozen", "learning_rate": 1e-9, "epochs": 1}
    for recorder, batch_size, accumulate in ((one, 200, 1), (several, 40, 5)):
        data = loader(200, batch_size, shuffle=False)
        quick(network(), data, callbacks=[recorder], accumulate=accumulate, **options)
    assert len(one.steps) == len(several.steps) == 1
    assert one.steps[0][3] == pytest.approx(several.steps[0][3])


@pytest.mark.parametrize("stop", [True, np.bool_(True), torch.tensor(True)], ids=["Python", "NumPy", "torch"])
def test_a_callback_that_returns_true_stops_after_the_epoch(stop, tmp_path):
    model, path = network(), tmp_path / "last"
    options = {"mode": "joint", "epochs": 5, "callbacks": [lambda state: stop if state.epoch == 1 else "go on"]}
    history = quick(model, checkpoint=path, checkpoint_every=3, **options)
    assert len(history.epochs) == Checkpoint.load(path).epochs_done == 2
    again = network()
    assert quick(again, checkpoint=path, **{**options, "callbacks": []}) == history  # finished: not a step more
    assert same(state(model), state(again))


class StopAtStep(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, state):
        return state.step >= self.step


def test_a_callback_that_stops_a_step_ends_the_epoch_there_and_it_is_validated():
    model = network()
    history = quick(model, mode="mixed", epochs=4, validation=held_out(), callbacks=[StopAtStep(2 + BATCHES)])
    assert len(history.epochs) == 2
    assert history.epochs[1].losses[0] is None  # still in the first phase, and the second never starts
    assert len(history.epochs[1].validation_accuracies) == 3


def test_a_stopped_training_ends_with_the_average_of_its_weights():
    stopped, whole = network(), network()
    options = {"mode": "joint", "ema": 0.9, "schedule": None}
    quick(stopped, epochs=5, callbacks=[lambda state: True], **options)
    quick(whole, epochs=1, **options)
    assert same(state(stopped), state(whole))


def test_a_callback_sees_the_weights_that_were_validated():
    seen, ends = [], network()
    quick(ends, mode="joint", ema=0.9, callbacks=[lambda now: seen.append(state(now.model))])
    assert same(seen[-1], state(ends))
    assert not same(seen[0], seen[1])


class Counting(Callback):
    """Remembers how often it was called, and stops when that is enough."""

    def __init__(self, enough=3):
        self.calls, self.enough = 0, enough

    def on_epoch_end(self, state):
        self.calls += 1
        return self.calls == self.enough

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


@pytest.mark.filterwarnings("ignore:the last exit has")
def test_a_resumed_training_gives_callbacks_their_states_back(tmp_path):
    path, options = tmp_path / "last", {"epochs": 6, "schedule": None, "checkpoint_every": 1}
    model, whole = network(), network()
    with pytest.raises(KeyboardInterrupt):
        quick(network(), callbacks=[Counting(), Counting(9), interrupt], checkpoint=path, **options)
    callbacks = [Counting(), Counting(9)]
    history = quick(model, callbacks=callbacks, checkpoint=path, **options)
    assert history == quick(whole, callbacks=[Counting()], **options)
    assert same(state(model), state(whole))
    assert [each.calls for each in callbacks] == [3, 3]


def interrupt(state):
    if state.epoch == 1:
        raise KeyboardInterrupt


class Unsaved(Callback):
    def state_dict(self):
        return {"weights": torch.zeros(3)}


class Misspelt(Callback):
    def on_epoch_ends(self, state):
        pass


def test_a_callback_that_would_never_be_called_or_cannot_be_saved_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"Misspelt has on_epoch_ends, which .* it calls on_step_end and on_epoch_end"):
        quick(network(), callbacks=[Misspelt()])
    with pytest.raises(BadInput, match="the state of callback Unsaved 0 does not fit into a checkpoint"):
        quick(network(), mode="joint", callbacks=[Unsaved()], checkpoint=tmp_path / "last")


def test_tensorboard_shows_every_exit_epoch_by_epoch(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:

        def log(state):
            for name, value in state.metrics.items():
                writer.add_scalar(name, value, state.epoch)

        history = quick(network(), mode="joint", validation=held_out(), callbacks=[log])
    events = EventAccumulator(str(tmp_path)).Reload()
    assert len(events.Tags()["scalars"]) == 3 * 4
    shown = [(event.step, event.value) for event in events.Scalars("validation_accuracy/exit 2")]
    expected = [(index, epoch.validation_accuracies[1]) for index, epoch in enumerate(history.epochs)]
    np.testing.assert_allclose(shown, expected, rtol=1e-6)


@pytest.mark.slow
def test_mlflow_keeps_every_exit_epoch_by_epoch(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny brings no data base
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    def log(state):
        mlflow.log_metrics(state.metrics, step=state.epoch)

    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        history = quick(network(), mode="joint", validation=held_out(), callbacks=[log])
    kept = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss/exit 3")
    expected = [(index, epoch.losses[2]) for index, epoch in enumerate(history.epochs)]
    assert [(each.step, each.value) for each in kept] == expected
