"""Training: every exit learns, what is frozen stays, and what was interrupted resumes as if it had not been."""

import copy
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from digits import digits, held_out, loader, network
from short_training import FEW, quick, same, state
from timm.optim import Lamb
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from alight.errors import BadFile, BadInput, Diverged, Mismatch
from alight.networks.multi_exit import MultiExitModel
from alight.training.callbacks import Callback
from alight.training.checkpoints import Checkpoint
from alight.training.metrics import exit_losses
from alight.training.settings import TrainingSettings, rescale_gradients, scheduled_factor
from alight.training.training import train_heads


@pytest.fixture(scope="module")
def trained() -> MultiExitModel:
    """A network whose last exit knows the digits and whose heads know nothing."""
    model = network()
    train_heads(model, loader(), TrainingSettings(mode="joint", loss_weights=[0, 0, 1], epochs=4), progress=False)
    return model


@pytest.mark.parametrize("mode", ["frozen", "joint", "mixed"])
def test_every_exit_learns_the_digits(mode, trained):
    model = copy.deepcopy(trained) if mode == "frozen" else network()
    optimizer = {"optimizer": "sgd", "learning_rate": 0.1} if mode == "joint" else {"learning_rate": 5e-3}
    history = quick(model, loader(), mode=mode, epochs=12, validation=held_out(), **optimizer)
    assert min(history.epochs[-1].validation_accuracies) > 0.9
    assert history.epochs[-1].losses[0] < 0.6
    assert "validation accuracy" in str(history)


def test_frozen_means_frozen(trained):
    model = copy.deepcopy(trained).train()
    model.stages[1].requires_grad_(False)
    model.heads[0].eval()
    weights, modes = state(model), [module.training for module in model.modules()]
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    quick(model)
    after = state(model)
    stages = [name for name in weights if name.startswith("stages.")]
    assert any("running_mean" in name for name in stages)
    assert all(torch.equal(weights[name], after[name]) for name in stages)
    assert not any(torch.equal(weights[name], after[name]) for name in weights if name.startswith("heads."))
    assert modes == [module.training for module in model.modules()]
    assert wanted == [parameter.requires_grad for parameter in model.parameters()]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("mode", ["joint", "mixed"])
def test_statistics_of_a_stage_that_needs_no_gradient_stay_in_joint_training(mode):
    model = network().train()
    model.stages[0].append(nn.BatchNorm2d(16, affine=False))  # has nothing to freeze
    model.stages[0].requires_grad_(False)
    model.stages[1][1][1].requires_grad_(False)  # one batch norm alone
    before = state(model)
    quick(model, mode=mode)
    after = state(model)
    statistics = [name for name in before if "running_mean" in name or "num_batches_tracked" in name]
    moved = [name for name in statistics if not torch.equal(before[name], after[name])]
    assert moved == ["stages.2.1.1.running_mean", "stages.2.1.1.num_batches_tracked"]
    assert all(module.training for module in model.modules())  # as before


def test_a_frozen_backbone_runs_once_per_batch_without_gradient_and_without_dropout(trained):
    model, seen = copy.deepcopy(trained), []
    model.stages[0].register_forward_hook(
        lambda module, _, features: seen.append((module.training, features.requires_grad))
    )
    quick(model, epochs=1)
    assert seen == [(False, False)] * len(loader(FEW))


def test_joint_training_moves_everything():
    model = network()
    before = state(model)
    quick(model, mode="joint")
    after = state(model)
    assert not any(torch.equal(before[name], after[name]) for name in before)


def test_an_exit_that_weighs_nothing_is_left_alone():
    model = network()
    before = state(model)
    quick(model, mode="joint", loss_weights=[0, 1, 1])
    after = state(model)
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("heads.0."))
    assert not torch.equal(before["heads.1.1.weight"], after["heads.1.1.weight"])


def test_mixed_training_starts_with_the_backbone_alone():
    model = network()
    before = state(model)
    history = quick(model, mode="mixed", epochs=3, backbone_epochs=1)
    assert history.epochs[0].losses[:2] == (None, None)
    assert None not in history.epochs[1].losses
    assert "–" in str(history)
    again = network()
    quick(again, mode="mixed", epochs=2, backbone_epochs=1)
    assert not same(before, state(again))


@pytest.mark.filterwarnings("ignore:the last exit has")
def test_heads_of_a_network_built_with_exits_are_all_trained():
    model = MultiExitModel([nn.Flatten(), nn.Identity()], [nn.Linear(64, 10), nn.Linear(64, 10)])
    before = state(model)
    quick(model)
    assert not any(torch.equal(tensor, before[name]) for name, tensor in state(model).items())


def test_images_are_trained_with_channels_first_on_a_cpu():
    model = network()
    layouts = []
    for convolution in (part for part in model.modules() if isinstance(part, nn.Conv2d)):
        convolution.register_forward_pre_hook(
            lambda part, given: layouts.extend(each.is_contiguous() for each in (given[0], part.weight))
        )
    quick(model, mode="joint", channels_last=True)
    assert layouts
    assert all(layouts)


def test_one_seed_gives_one_training_and_restores_all_random_generators():
    results = []
    for _ in range(2):
        model = network(dropout=0.3)
        torch.manual_seed(5), random.seed(5), np.random.seed(5)  # noqa: NPY002
        expected = torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
        torch.manual_seed(5), random.seed(5), np.random.seed(5)  # noqa: NPY002
        history = quick(model, mode="joint", seed=len(results) // 2)
        assert (torch.rand(1), random.random(), np.random.rand()) == expected  # noqa: NPY002
        results.append((history, state(model)))
        torch.rand(7)  # what happens outside does not matter
    (history, weights), (again, weights_again) = results
    assert history == again
    assert same(weights, weights_again)
    other = network(dropout=0.3)
    assert quick(other, mode="joint", seed=3) != history


def smoothed(logits, labels):
    return nn.functional.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")


RESUMED = {
    "frozen": {"mode": "frozen", "optimizer": "adamw"},
    "joint with everything": {
        "mode": "joint",
        "optimizer": "sgd",
        "learning_rate": 0.05,
        "nesterov": True,
        "schedule": "onecycle",
        "rescale_gradients": True,
        "distill": 0.5,
        "temperature": 2.0,
        "clip": 1.0,
        "ema": 0.9,
    },
    "mixed": {"mode": "mixed", "ema": 0.9},
    "half precision": {"mode": "joint", "amp": "fp16", "learning_rate": 1e-4},
    "a loader's own generator": {"mode": "joint", "generator": True},
    "best epoch and patience": {"mode": "joint", "learning_rate": 0.05, "keep_best": True, "patience": 3, "ema": 0.5},
    "best epoch of the second phase": {"mode": "mixed", "keep_best": True, "monitor": "loss"},
    "steps of several batches": {"mode": "joint", "accumulate": 3, "warm_up": 1.5, "decay_norms": False},
    "own optimizer, schedule and loss": {
        "optimizer": partial(Lamb, lr=0.01),  # counts its steps in the group
        "schedule": lambda done: (1 - done) ** 0.9,
        "loss": smoothed,
    },
}


class Interrupted(Exception):
    pass


@pytest.mark.filterwarnings("ignore:the last exit has")
@pytest.mark.parametrize(
    ("case", "stop"),
    [*((case, 2) for case in RESUMED), ("frozen", 1), ("mixed", 1), ("mixed", 3), ("best epoch and patience", 3)],
)
def test_a_resumed_training_equals_an_uninterrupted_one_bit_for_bit(case, stop, tmp_path, monkeypatch):
    options = {"epochs": 4, "validation": [digits()[1][:50]], **RESUMED[case]}
    own = options.pop("generator", False)

    def data():
        images, labels = digits()[0][:200]
        return DataLoader(TensorDataset(images, labels), 64, shuffle=True, generator=torch.Generator() if own else None)

    whole = network(dropout=0.2)
    expected = quick(whole, data(), **options)
    save = Checkpoint.save

    def saved(checkpoint, path):
        save(checkpoint, path)
        if checkpoint.epochs_done == stop:
            raise Interrupted

    monkeypatch.setattr(Checkpoint, "save", saved)
    with pytest.raises(Interrupted):
        quick(network(dropout=0.2), data(), checkpoint=tmp_path / "last.safetensors", **options)
    monkeypatch.undo()
    model = network(dropout=0.2)
    torch.rand(stop)
    history = quick(model, data(), checkpoint=tmp_path / "last.safetensors", **options)
    assert history == expected
    assert same(state(model), state(whole))


@pytest.mark.filterwarnings("ignore:the last exit has")
def test_a_finished_training_is_not_repeated(tmp_path):
    first, second = network(), network()
    expected = quick(first, checkpoint=tmp_path / "last")
    assert quick(second, checkpoint=tmp_path / "last") == expected
    assert same(state(first), state(second))


def test_a_checkpoint_every_few_epochs_is_there_at_the_end_of_each_phase(tmp_path, monkeypatch):
    written, save = [], Checkpoint.save

    def saved(checkpoint, path):
        save(checkpoint, path)
        written.append(checkpoint.epochs_done)

    monkeypatch.setattr(Checkpoint, "save", saved)
    options = {"mode": "mixed", "epochs": 8, "backbone_epochs": 4, "checkpoint_every": 3}
    quick(network(), loader(64), checkpoint=tmp_path / "last", **options)
    assert written == [3, 4, 6, 8]


@pytest.mark.filterwarnings("ignore:the last exit has")
@pytest.mark.parametrize("options", [{}, {"ema": 0.9}, {"keep_best": True, "validation": held_out(), "mode": "joint"}])
def test_a_training_without_a_schedule_may_be_extended(options, tmp_path):
    model, whole = network(), network()
    quick(model, checkpoint=tmp_path / "last", epochs=2, schedule=None, **options)
    history = quick(model, checkpoint=tmp_path / "last", epochs=3, schedule=None, **options)
    assert history == quick(whole, epochs=3, schedule=None, **options)
    assert same(state(model), state(whole))
    assert quick(model, checkpoint=tmp_path / "last", epochs=1, schedule=None, **options) == history


@pytest.mark.filterwarnings("ignore:the last exit has")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.5}, "learning_rate was 0.001, now 0.5"),
        ({"epochs": 5}, "epochs was 2, now 5"),
        ({"schedule": lambda done: 1 - done}, "schedule was 'cosine', now 'test_training.<lambda> [0-9a-f]+'"),
        ({"loss": smoothed}, r"loss was \['alight.training.metrics.cross_entropy', .* now \['test_training.smoothed "),
        ({"mode": "joint"}, "mode was 'frozen', now 'joint'"),
        ({"data": 192}, "batches was 4, now 3"),
        ({"model": 1}, "backbone was"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(change, message, tmp_path):
    quick(network(), checkpoint=tmp_path / "last")
    options = dict(change)
    data, model = loader(options.pop("data", FEW)), network(options.pop("model", 0))
    with pytest.raises(Mismatch, match=message):
        quick(model, data, checkpoint=tmp_path / "last", **options)


@pytest.mark.filterwarnings("ignore:the last exit has")
@pytest.mark.parametrize("damage", ["cut", "foreign", "text"])
def test_a_damaged_or_foreign_checkpoint_is_refused(damage, tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "last"
    quick(network(), checkpoint=path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "foreign":
        save_file({"weight": torch.zeros(3)}, path)
    else:
        path.write_text("no checkpoint")
    with pytest.raises(BadFile, match=str(path)):
        quick(network(), checkpoint=path)


@pytest.mark.filterwarnings("ignore:the last exit has")
def test_a_full_disk_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last"
    quick(network(), checkpoint=path, epochs=1, schedule=None)
    before = path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("alight.files.os.fsync", full)
    with pytest.raises(OSError, match="the previous checkpoint is kept") as error:
        quick(network(), checkpoint=path, epochs=2, schedule=None)
    assert error.value.errno == errno.ENOSPC
    assert error.value.filename == str(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    assert len(quick(network(), checkpoint=path, epochs=2, schedule=None).epochs) == 2


def run_python(code: str, *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """What a script that knows the digits does in a process of its own."""
    script = Path(arguments[0]).parent / "script.py"
    script.write_text("import sys\nimport torch\n" + textwrap.dedent(code))
    paths = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    return subprocess.run(
        [sys.executable, *launcher, str(script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="processes cannot be killed at once here")
def test_a_kill_while_saving_keeps_the_old_checkpoint(tmp_path):
    path = tmp_path / "last"
    code = """
        import os, signal
        from alight import files
        from alight.training.settings import TrainingSettings
        from alight.training.training import train_heads
        from digits import loader, network

        saves = []
        def flushed(_):
            saves.append(1)
            if len(saves) == 2:
                os.kill(os.getpid(), signal.SIGKILL)  # the second one lies half-way between memory and its place
        files.os.fsync = flushed
        settings = TrainingSettings(mode="joint", epochs=3)
        train_heads(network(), loader(256), settings, checkpoint=sys.argv[1], progress=False)
    """
    assert run_python(code, path).returncode == -signal.SIGKILL
    assert Checkpoint.load(path).epochs_done == 1
    model, whole = network(), network()
    assert quick(model, mode="joint", epochs=3, checkpoint=path) == quick(whole, mode="joint", epochs=3)
    assert same(state(model), state(whole))


@pytest.mark.slow
def test_two_processes_in_frozen_mode_give_the_loss_curve_of_one(tmp_path):
    code = """
        import json, os
        from dataclasses import asdict
        from alight.training.callbacks import Callback
        from alight.training.settings import TrainingSettings
        from alight.training.training import train_heads
        from digits import held_out, loader, network

        class StopAfter(Callback):
            def __init__(self, steps):
                self.steps = steps

            def on_step_end(self, state):
                return state.step == self.steps

        def write(name, steps=None, **options):
            model, settings = network(), TrainingSettings(**{"epochs": 3, **options})
            call = {"checkpoint": f"{sys.argv[1]}.{name}", "validation": held_out(), "progress": False}
            if os.environ["RANK"] == "0":
                call["callbacks"] = [StopAfter(steps)] if steps else []
            history = train_heads(model, loader(321, 64), settings, **call)
            if os.environ["RANK"] == "0":
                weights = [tensor.tolist() for tensor in model.heads.state_dict().values()]
                epochs = [asdict(each) for each in history.epochs]
                open(f"{sys.argv[1]}.{name}.json", "w").write(json.dumps([epochs, weights]))

        write("frozen")
        write("mixed", mode="mixed", clip=1.0)
        write("stopped", steps=8, epochs=9, accumulate=2, keep_best=True, patience=5, decay_norms=False)
    """
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = run_python(code, tmp_path / "two", launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("UserWarning") == done.stderr.count("the last exit has") == 1
    model = network()
    with pytest.warns(UserWarning, match="the last exit has"):
        history = quick(model, loader(321, 64), epochs=3, validation=held_out())  # a last batch of one sample
    compare_with_saved(history, model, tmp_path / "two.frozen.json")
    assert Checkpoint.load(tmp_path / "two.frozen").epochs_done == 3
    epochs, _ = json.loads((tmp_path / "two.mixed.json").read_text())
    assert epochs[2]["losses"][2] < epochs[0]["losses"][2]
    model, options = network(), {"accumulate": 2, "keep_best": True, "patience": 5, "decay_norms": False}
    with pytest.warns(UserWarning, match="the last exit has"):
        history = quick(model, loader(321, 64), epochs=9, validation=held_out(), callbacks=[StopAfter(8)], **options)
    assert len(history.epochs) == 3
    compare_with_saved(history, model, tmp_path / "two.stopped.json")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["return", "raise", "destroy"])
def test_the_group_and_its_threads_are_gone_before_the_interpreter_ends(end, tmp_path):
    """A thread of the group that frees a tensor later aborts the process: terminate called without an exception."""
    code = """
        import atexit, os, weakref
        from alight.training.distributed import join_processes
        from alight.training.settings import TrainingSettings
        from alight.training.training import train_heads
        from digits import loader, network

        def fail(epoch):
            raise ValueError("on purpose")

        atexit.register(lambda: print("kept" if group() else "left", flush=True))  # runs last
        join_processes(torch.device("cpu"))
        group = weakref.ref(torch.distributed.group.WORLD)
        callbacks = [fail] if sys.argv[2] == "raise" and os.environ["RANK"] == "0" else []
        train_heads(network(), loader(64), TrainingSettings(epochs=2), callbacks=callbacks, progress=False)
        if sys.argv[2] == "destroy":
            torch.distributed.destroy_process_group()
    """
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = run_python(code, tmp_path / "two", end, launcher=launcher)
    assert done.returncode == (end == "raise"), done.stderr
    assert ("ValueError: on purpose" in done.stderr) == (end == "raise")
    assert "Exception ignored" not in done.stderr
    assert "kept" not in done.stdout
    assert done.stdout.count("left") >= (1 if end == "raise" else 2)  # torchrun may kill the one that did not raise


class StopAfter(Callback):
    """Stops in the middle of an epoch."""

    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, state):
        return state.step == self.steps


def compare_with_saved(history, model, path):
    epochs, weights = json.loads(path.read_text())
    for one, two in zip(history.epochs, epochs, strict=True):
        for name, values in asdict(one).items():
            np.testing.assert_allclose(two[name], values, atol=1e-5, rtol=0)
    for one, two in zip(model.heads.state_dict().values(), weights, strict=True):
        np.testing.assert_allclose(two, one, atol=1e-4, rtol=0)


def test_distillation_needs_no_labels_and_brings_heads_close_to_the_last_exit(trained):
    model = copy.deepcopy(trained)
    images = digits()[0].tensors[0]
    unlabelled = DataLoader(TensorDataset(images), 64, shuffle=True)
    teaching = {"distill": 1.0, "temperature": 2.0}
    history = quick(model, unlabelled, epochs=10, learning_rate=1e-2, validation=held_out(), **teaching)
    assert history.epochs[-1].losses[0] < history.epochs[0].losses[0]
    assert history.epochs[-1].accuracies == ()
    assert min(history.epochs[-1].validation_accuracies) > 0.9


def test_the_distillation_loss_is_zero_only_where_an_exit_equals_the_last_one():
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    same_as_last, other, last = exit_losses([logits + 3.0, -logits, logits], None, temperature=3.0)
    torch.testing.assert_close(same_as_last, torch.zeros(5), atol=1e-6, rtol=0)
    assert (other > 0).all()
    assert not last.any()


def test_a_share_of_distillation_lies_between_labels_and_teacher():
    generator = torch.Generator().manual_seed(1)
    logits, labels = [torch.randn(5, 4, generator=generator) for _ in range(2)], torch.tensor([0, 1, 2, 3, 0])
    (hard, last), (soft, _), (half, last_again) = (exit_losses(logits, labels, distill=share) for share in (0, 1, 0.5))
    torch.testing.assert_close(half, (hard + soft) / 2)
    assert torch.equal(last, last_again)
    torch.testing.assert_close(hard, nn.functional.cross_entropy(logits[0], labels, reduction="none"))


def test_rescaled_gradients_are_the_average_over_the_exits_behind():
    feature = torch.ones(1, requires_grad=True)
    carried, exits = (feature,), 4
    pulls = torch.tensor([3.0, -1.0, 5.0, 2.0])
    total = torch.zeros(())
    for index in range(exits):
        share = 1 / (exits - index)
        total = total + pulls[index] * rescale_gradients(carried, share)[0].sum()
        carried = rescale_gradients(carried, 1 - share)
    total.backward()
    torch.testing.assert_close(feature.grad, pulls.mean()[None])


def test_rescaling_leaves_logits_alone_and_changes_gradients_of_the_first_stage():
    plain, rescaled = network(), network()
    one = quick(plain, mode="joint", epochs=1, optimizer="sgd", momentum=0.0)
    two = quick(rescaled, mode="joint", epochs=1, optimizer="sgd", momentum=0.0, rescale_gradients=True)
    assert one != two
    assert one.epochs[0].losses == pytest.approx(two.epochs[0].losses, rel=0.5)


def test_the_learning_rate_climbs_and_falls_in_one_cycle():
    factors = [scheduled_factor("onecycle", done) for done in np.linspace(0, 1, 101)]
    assert max(factors) == pytest.approx(1)
    assert np.argmax(factors) == 30
    assert factors[0] == pytest.approx(1 / 25)
    assert factors[-1] < 1e-5
    assert all(np.diff(factors[:31]) > 0)
    assert all(np.diff(factors[30:]) < 0)
    assert scheduled_factor(None, 0.7) == 1


def test_channels_last_and_bf16_train_and_leave_the_model_as_it_was():
    model = network()
    history = quick(model, mode="joint", channels_last=True, amp="bf16")
    assert all(tensor.is_contiguous() for tensor in model.state_dict().values())
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
    assert history.epochs[1].losses[2] < history.epochs[0].losses[2]


def test_the_average_of_weights_lies_behind_the_weights():
    plain, averaged = network(), network()
    quick(plain, mode="joint", schedule=None)
    quick(averaged, mode="joint", schedule=None, ema=0.99)
    start = network().heads[0][1].weight
    moved = [(model.heads[0][1].weight - start).norm() for model in (plain, averaged)]
    assert 0 < moved[1] < moved[0]


@pytest.mark.filterwarnings("ignore:the last exit has")
def test_loaders_may_give_dicts_tuples_and_several_inputs(trained):
    images, labels = digits()[0][:64]
    expected = quick(copy.deepcopy(trained), [(images, labels)])
    assert quick(copy.deepcopy(trained), [{"pixel_values": images, "labels": labels}]) == expected
    assert quick(copy.deepcopy(trained), [[images.numpy(), labels.int().numpy()]]) == expected

    class Sum(nn.Module):
        def forward(self, one, other):
            return (one + other).flatten(1)

    def model(names):
        torch.manual_seed(0)
        return MultiExitModel([Sum(), nn.Linear(64, 10)], [nn.Linear(64, 10), nn.Identity()], input_names=names)

    pair = quick(model(()), [(images, images, labels)])
    assert quick(model(("left", "right")), [{"left": images, "right": images, "label": labels}]) == pair


def test_an_untrained_backbone_raises_a_warning(trained):
    with pytest.warns(UserWarning, match=r"near the 10\.0% of guessing: heads on an untrained backbone"):
        quick(network(), loader())
    quick(copy.deepcopy(trained), loader())  # warnings are errors


def test_progress_shows_the_accuracy_of_every_exit(capfd):
    train_heads(network(), loader(FEW), TrainingSettings(mode="joint", epochs=1))
    assert re.search(r"epoch 1/1, accuracy by exit \d+ \d+ \d+ %", capfd.readouterr().err)


def test_progress_names_the_epoch_that_runs(capfd):
    train_heads(network(), loader(FEW), TrainingSettings(mode="joint", epochs=2))
    bars = [each for each in capfd.readouterr().err.split("\r") if "epoch" in each]
    batches = len(loader(FEW))
    shown = {int(re.search(r"(\d+)/", each)[1]): each for each in bars}
    late = [place for place, each in shown.items() if place > batches + 1 and "epoch 2/2" not in each]
    assert late == []
    assert any(place > batches + 1 for place in shown)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(digits()[0])


def test_loaders_without_a_length_are_accepted():
    history = quick(network(), DataLoader(Stream(), 128), mode="joint")
    assert history.epochs[1].losses[2] < history.epochs[0].losses[2]


def nan_after(steps: int):
    images, labels = digits()[0][:64]
    return [(images, labels)] * steps + [(torch.full_like(images, torch.nan), labels)]


@pytest.mark.filterwarnings("ignore:the last exit has")
def test_a_nan_loss_stops_training_and_keeps_the_last_good_checkpoint(tmp_path):
    path = tmp_path / "last"
    model = network()
    quick(model, nan_after(3)[:3], epochs=1, schedule=None, checkpoint=path)
    good = path.read_bytes()
    with pytest.raises(
        Diverged, match=rf"the loss of exit 1 is nan at step 3 of epoch 2: .*{path} holds the last good"
    ):
        quick(network(), nan_after(2), epochs=2, schedule=None, checkpoint=path)
    assert path.read_bytes() == good


def test_shares_of_one_class_each_train_like_the_classes():
    one, other = network(), network()
    other.load_state_dict(one.state_dict())
    hard = [(images, labels) for images, labels in loader(FEW)]
    soft = [{"images": images, "labels": nn.functional.one_hot(labels, 10).double()} for images, labels in hard]
    given = {"mode": "joint", "optimizer": "sgd", "learning_rate": 0.1}
    histories = [quick(model, data, **given) for model, data in ((one, hard), (other, soft))]
    assert histories[0].epochs[-1].accuracies == histories[1].epochs[-1].accuracies
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name], atol=1e-5, rtol=1e-4)


def test_the_loss_of_shares_is_that_of_the_classes_by_their_shares():
    logits = [torch.randn(4, 3), torch.randn(4, 3)]
    first, second = torch.tensor([0, 1, 2, 0]), torch.tensor([1, 1, 0, 2])
    shares = 0.7 * nn.functional.one_hot(first, 3) + 0.3 * nn.functional.one_hot(second, 3)
    expected = [0.7 * a + 0.3 * b for a, b in zip(exit_losses(logits, first), exit_losses(logits, second), strict=True)]
    for found, loss in zip(exit_losses(logits, shares), expected, strict=True):
        torch.testing.assert_close(found, loss)


@pytest.mark.slow
@pytest.mark.slow
def test_a_compiled_training_equals_an_eager_one():
    one, other = network(), network()
    other.load_state_dict(one.state_dict())
    plain = quick(one, mode="joint", seed=3)
    compiled = quick(other, mode="joint", seed=3, compile=True)
    assert compiled.epochs[-1].losses == pytest.approx(plain.epochs[-1].losses, rel=1e-3)
    assert one.state_dict().keys() == other.state_dict().keys()


def test_the_exit_whose_loss_is_not_finite_is_named():
    class Infinite(nn.Module):
        def forward(self, features):
            return features.flatten(1)[:, :10] / 0

    model = network()
    model.heads[1] = Infinite()
    message = r"training diverged: the loss of exit 2 is (nan|inf) at step 1 of epoch 1: lower"
    with pytest.raises(Diverged, match=message):
        quick(model, mode="joint")


IMAGES, LABELS = torch.zeros(8, 1, 8, 8), torch.arange(8)
BAD_BATCHES = {
    "a label too high": ([(IMAGES, LABELS + 3)], "labels run from 3 to 10, but the network has 10 classes, 0 to 9"),
    "a negative label": ([(IMAGES, LABELS - 100)], "labels run from -100 to -93"),
    "labels of floats": ([(IMAGES, LABELS.float())], "labels are torch.float32, not class indices"),
    "too few labels": ([(IMAGES, LABELS[:5])], r"labels have shape \(5,\) for 8 samples"),
    "one-hot labels": ([{"x": IMAGES, "labels": torch.eye(8).long()}], r"shape \(8, 8\) for 8 samples"),
    "several labels per sample": (
        [{"x": IMAGES, "labels": torch.ones(8, 10).triu()}],
        r"the labels of 8 of 8 samples are not shares .* lie in \[1, 1\] and sum to 10\).* several labels per sample",
    ),
    "several labels as whole numbers": (
        [{"x": IMAGES, "labels": torch.ones(8, 10).triu().long()}],
        r"labels have shape \(8, 10\) .* several labels per sample need",
    ),
    "targets of a regression": (
        [{"x": IMAGES, "labels": torch.randn(8, 10)}],
        "not shares .* a regression needs classes",
    ),
    "one target each": ([{"x": IMAGES, "labels": torch.rand(8, 1)}], "among 1 classes, but .* a regression needs"),
    "shares below 0": (
        [{"x": IMAGES, "labels": torch.eye(8, 10) + torch.tensor([0.5, -0.5] + [0] * 8)}],
        r"the labels of 7 of 8 samples are not shares .* lie in \[-0.5, 1.5\] and sum to 1",
    ),
    "shares of NaN": ([{"x": IMAGES, "labels": torch.full((8, 10), torch.nan)}], "8 of 8 samples are not shares"),
    "no labels": ([IMAGES], "the training data have no labels"),
    "an empty loader": ([], "no batch in epoch 1"),
    "an empty batch": ([(IMAGES[:0], LABELS[:0])], "the first axis is the samples, at least 1"),
    "an iterator": (iter([(IMAGES, LABELS)]), "no batch in epoch 2: an iterator is spent after one pass"),
    "text": ([("a picture", LABELS)], "the network does not take text: give tensors"),
    "nothing": ([{}], "a batch holds no tensor"),
    "shares of too few classes": (
        [{"x": IMAGES, "labels": torch.eye(8)}],
        "labels share each sample among 8 classes, but the network has 10",
    ),
}


@pytest.mark.filterwarnings("ignore:the last exit has")
@pytest.mark.parametrize("case", BAD_BATCHES)
def test_a_bad_loader_gets_an_error_that_says_what_to_do(case):
    batches, message = BAD_BATCHES[case]
    if case == "an iterator":
        batches = iter([(IMAGES, LABELS)])
    with pytest.raises(BadInput, match=message):
        quick(network(), batches)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "both"}, "mode 'both' is none of 'frozen', 'joint', 'mixed'"),
        ({"optimizer": "lion"}, "optimizer 'lion'"),
        ({"schedule": "steps"}, "schedule 'steps'"),
        ({"amp": "fp8"}, "amp 'fp8'"),
        ({"epochs": 0}, "epochs 0 is out of bounds: give a whole number, at least 1"),
        ({"epochs": 1.5}, "epochs 1.5 is out of bounds"),
        ({"patience": 0}, "patience 0 is out of bounds: give a number of epochs, or None"),
        ({"patience": 2}, "keep_best and patience judge epochs by validation data: give some"),
        ({"monitor": "f1"}, "monitor 'f1' is none of 'accuracy', 'loss'"),
        ({"monitor": "loss"}, "monitor says which epoch is best: set keep_best or patience too"),
        ({"keep_best": True, "monitor_exit": 7, "validation": [1]}, "monitor_exit '7' is none of the exits 'exit 1', "),
        ({"accumulate": 0}, "accumulate 0 is out of bounds"),
        ({"warm_up": -1}, "warm_up -1 is out of bounds"),
        ({"warm_up": 2}, "warm_up 2 is out of bounds: give fewer epochs than are trained, 2"),
        ({"warm_up": 1, "mode": "mixed"}, "warm_up 1 is out of bounds: give fewer epochs than are trained, 1"),
        ({"warm_up": 1, "schedule": "onecycle"}, "schedule 'onecycle' warms up by itself"),
        ({"optimizer": torch.optim.SGD, "momentum": 0.9}, "bind them to your optimizer with partial"),
        ({"optimizer": lambda groups: groups}, "the optimizer function gave a list: return an Optimizer"),
        ({"schedule": lambda done: -1}, r"the schedule gave -1.0 at 0.0% of the training: give a factor"),
        ({"loss": "focal"}, r"loss 'focal' is not a function of \(logits, labels\): give one, or one per exit"),
        ({"loss": 3}, "loss 3 is not a function"),
        ({"loss": [smoothed]}, "1 losses for 3 exits: give one per exit"),
        ({"loss": nn.CrossEntropyLoss()}, r"gave shape \(\) for 64 samples: return one loss per sample, as .*'none'"),
        ({"callbacks": [3]}, "a int is not a callback: give an object of a subclass of alight.Callback, or a function"),
        ({"callbacks": [StopAfter]}, "the class StopAfter is not a callback"),
        ({"learning_rate": -1.0}, "learning_rate -1.0 is out of bounds: give above 0"),
        ({"distill": 2.0}, "distill 2.0 .* a share from 0 to 1"),
        ({"ema": 1.0}, "ema 1.0"),
        ({"clip": 0.0}, "clip 0.0"),
        ({"loss_weights": [1.0]}, "1 loss weights for 3 exits"),
        ({"loss_weights": [0.0, 0.0, 0.0]}, "loss_weights"),
        ({"loss_weights": [0.0, 0.0, 1.0]}, "leave no head to train"),
        ({"mode": "mixed", "loss_weights": [1.0, 1.0, 0.0]}, "starts with the last exit, whose loss weight is 0"),
        ({"nesterov": True}, "nesterov is a kind of SGD's momentum"),
        ({"nesterov": True, "optimizer": "sgd", "momentum": 0.0}, "nesterov is a kind of SGD's momentum"),
        ({"checkpoint_every": 0}, "checkpoint_every 0 is out of bounds"),
        ({"rescale_gradients": True}, "rescale_gradients changes nothing in a frozen backbone"),
        ({"mode": "mixed", "backbone_epochs": 2}, "backbone_epochs 2 .* below epochs, 2"),
    ],
)
def test_a_setting_out_of_bounds_is_refused(options, message):
    with pytest.raises(BadInput, match=message):
        quick(network(), **options)


def test_defaults_that_depend_on_others_follow_them():
    settings = TrainingSettings(mode="mixed", epochs=5, loss_weights=[1, 0, 2])
    resolved = settings.resolve(3)
    assert (resolved.learning_rate, resolved.backbone_epochs, resolved.loss_weights) == (1e-3, 2, (1.0, 0.0, 2.0))
    assert replace(settings, optimizer="sgd").resolve(3).learning_rate == 3e-2
    assert replace(settings, mode="joint", loss_weights=None).resolve(2).loss_weights == (1.0, 1.0)
    assert settings == TrainingSettings(mode="mixed", epochs=5, loss_weights=(1.0, 0.0, 2.0))


def test_a_network_without_exits_is_refused():
    with pytest.raises(BadInput, match="a Linear has no exits yet"):
        quick(nn.Linear(3, 3))


class Repeated(nn.Module):
    def forward(self, rows):
        return rows.expand(-1, 8, -1)


ZEROS = (torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64))


def test_heads_without_weights_are_refused():
    with pytest.raises(BadInput, match="nothing can be trained"):
        quick(MultiExitModel([nn.Linear(64, 10)], [nn.Identity()]))


def test_a_network_of_one_logit_is_not_trained():
    with pytest.raises(BadInput, match=r"gives one logit.* alight.TwoLogits\(network\)"):
        quick(MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 1)], [nn.Linear(8, 1), nn.Identity()]), [ZEROS])
    with pytest.raises(BadInput, match=r"shape \(4, 8, 3\), not \(samples, classes\).* detection, segmentation"):
        quick(MultiExitModel([nn.Unflatten(1, (1, 4))], [nn.Sequential(nn.Linear(4, 3), Repeated())]), [ZEROS])


def test_exits_with_different_numbers_of_classes_are_refused():
    model = network()
    model.heads[0][1] = nn.Linear(256, 7)
    with pytest.raises(BadInput, match=r"logits have \[7, 10, 10\] classes"):
        quick(model)


def test_label_free_training_is_for_frozen_backbones():
    with pytest.raises(BadInput, match="the training data have no labels"):
        quick(network(), [IMAGES], mode="joint", distill=1.0)
