"""The trainings on CIFAR-100: every run trains, resumes where it was stopped, and loads as what was recorded."""

import importlib
import json
import re
import sys
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from alight import Costs, HeadOutputs, fingerprint, measure_costs, record
from alight.networks.zoo import CIFAR, ResNet, msdnet_cifar
from alight.training.checkpoints import Checkpoint

EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def scripts():
    """The scripts, by name; their networks narrow."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(EXPERIMENTS))
        found = {name: importlib.import_module(f"cifar100_{name}") for name in ("data", "train", "pack", "all")}
        backbones, widths = found["train"].BACKBONES, (4, 8, 8, 16)
        patched.setitem(backbones, "resnet18", partial(ResNet, 100, widths=widths))
        patched.setitem(backbones, "resnet10", partial(ResNet, 100, blocks=(1, 1, 1, 1), widths=widths))
        patched.setitem(backbones, "convnext", partial(found["train"].convnext, widths, 2))
        patched.setitem(found["train"].WITH_EXITS, "msdnet", partial(msdnet_cifar, blocks=3, channels=4, growth=2))
        yield found


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Made-up pictures, sorted by class as the real ones are."""
    folder, dice = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, count in (("train", 200), ("test", 100)):
        labels = np.sort(np.arange(count) % 100)
        np.savez(folder / f"{name}.npz", images=dice.integers(0, 256, (count, 32, 32, 3), np.uint8), labels=labels)
    return folder


def test_a_split_is_shuffled_by_its_seed_and_shares_nothing(scripts, data):
    split = scripts["data"].read(data, seed=1, calibration=50)
    again = scripts["data"].read(data, seed=1, calibration=50)
    other = scripts["data"].read(data, seed=2, calibration=50)
    assert [len(part) for part in (split.train, split.calibration, split.test)] == [150, 50, 100]
    assert torch.equal(split.train.pixels, again.train.pixels)
    assert not torch.equal(split.train.labels, other.train.labels)
    assert len(split.calibration.labels.unique()) > 30
    seen = {picture.tobytes() for picture in split.train.pixels.numpy()}
    assert len(seen) == 150
    assert not any(picture.tobytes() in seen for picture in split.calibration.pixels.numpy())


def test_batches_to_judge_by_are_the_pictures_normalised(scripts, data):
    test = scripts["data"].read(data, seed=0, calibration=50).test
    loader = scripts["data"].Batches(test, CIFAR, 32)
    images, labels = (torch.cat(part) for part in zip(*loader, strict=True))
    back = images * torch.tensor(CIFAR.std)[:, None, None] + torch.tensor(CIFAR.mean)[:, None, None]
    torch.testing.assert_close(back, test.pixels.permute(0, 3, 1, 2) / 255)
    assert torch.equal(labels, test.labels)
    assert len(loader) == 4


def test_batches_to_train_on_are_moved_mirrored_and_cut_by_torchs_dice(scripts, data):
    pictures = scripts["data"].Pictures(torch.full((10, 32, 32, 3), 255, dtype=torch.uint8), torch.arange(10))
    epochs = []
    loader = scripts["data"].Batches(pictures, CIFAR, 4, training=True, on_epoch=epochs.append)
    loader.set_epoch(3)
    torch.manual_seed(0)
    first = list(loader)
    torch.manual_seed(0)
    again = list(loader)
    assert epochs == [3]
    assert len(first) == len(loader) == 2  # two pictures wait for another epoch
    assert all(torch.equal(one, other) for (one, _), (other, _) in zip(first, again, strict=True))
    images, labels = (torch.cat(part) for part in zip(*first, strict=True))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert len(labels.unique()) == 8
    white = (torch.ones(3) - torch.tensor(CIFAR.mean)) / torch.tensor(CIFAR.std)
    kept = torch.isclose(images, white[:, None, None]).all(1).sum((1, 2))
    gone = (images == 0).all(1).sum((1, 2))  # what cutout takes is the mean
    assert ((gone >= 16) & (gone <= 64)).all()
    assert (kept >= 28 * 28 - 64).all()
    rising = torch.arange(32, dtype=torch.uint8)[:, None].expand(2, 32, 32, 3)
    loader = scripts["data"].Batches(scripts["data"].Pictures(rising, torch.arange(2)), CIFAR, 2, training=True)
    steps = torch.cat([torch.diff(images[:, 0, 16], dim=-1)[:, 12:20] for _ in range(8) for images, _ in loader])
    assert steps.max() > 0 > steps.min()  # left to right, or mirrored


def test_mixed_pictures_have_the_classes_of_both_by_what_is_seen_of_them(scripts):
    dark, light = torch.zeros(8, 32, 32, 3, dtype=torch.uint8), torch.full((8, 32, 32, 3), 255, dtype=torch.uint8)
    pictures = scripts["data"].Pictures(torch.cat([dark, light]), torch.arange(16) // 8)
    plain = scripts["data"].Batches(pictures, CIFAR, 16, training=True)
    torch.manual_seed(0)
    mixed = scripts["data"].Batches(pictures, CIFAR, 16, training=True, mixing=1.0, num_classes=2)
    [batch] = list(mixed)
    assert batch["labels"].shape == (16, 2)
    torch.testing.assert_close(batch["labels"].sum(1), torch.ones(16))
    assert ((batch["labels"] > 0.01) & (batch["labels"] < 0.99)).any()
    images, labels = mixed._mixed(plain._images(pictures.pixels), pictures.labels)
    lightness = (images * torch.tensor(CIFAR.std)[:, None, None] + torch.tensor(CIFAR.mean)[:, None, None]).mean(
        (1, 2, 3)
    )
    torch.testing.assert_close(lightness, labels[:, 1], atol=1e-5, rtol=0)  # as much of class 1 as is light
    smooth = scripts["data"].Batches(pictures, CIFAR, 16, training=True, smoothing=0.1, num_classes=2)
    assert next(iter(smooth))["labels"].unique().tolist() == pytest.approx([0.05, 0.95])


def test_larger_batches_and_fewer_epochs_stand_in_the_settings(scripts):
    train = scripts["train"]
    run = train.Sizes(epochs=7, batch_size=2048).of(train.RUNS["msdnet_joint"])
    assert run.training.epochs == 7
    assert run.batch_size == 2048
    assert run.training.learning_rate == pytest.approx(2 * train.MSDNET.learning_rate)
    assert train.Sizes().of(train.RUNS["msdnet_joint"]) == train.RUNS["msdnet_joint"]


class Stopped(Exception):
    pass


def trained(scripts, name, data, state):
    train = scripts["train"]
    epochs = 3 if name == "convnext_plain-0" else 2  # one more than the first checkpoint has
    return train.train(train.Job.named(name), data, state, CPU, train.Sizes(limit=16, epochs=epochs))


@pytest.fixture(scope="module")
def state(scripts, data, tmp_path_factory):
    """The results of all runs, after two or three epochs on a few pictures; one was stopped after its second."""
    folder, save, threads = tmp_path_factory.mktemp("state"), Checkpoint.save, torch.get_num_threads()

    def stopping(checkpoint, path):
        save(checkpoint, path)
        raise Stopped

    torch.set_num_threads(1)
    patched = pytest.MonkeyPatch()
    patched.setattr(Checkpoint, "save", stopping)
    with pytest.raises(Stopped):
        trained(scripts, "convnext_plain-0", data, folder)
    patched.undo()
    for run in scripts["train"].RUNS:
        trained(scripts, f"{run}-0", data, folder)
    torch.set_num_threads(threads)
    return folder


pytestmark = pytest.mark.filterwarnings("ignore:the last exit has")


@pytest.mark.slow
def test_every_run_leaves_tables_costs_a_history_and_how_it_was_made(scripts, state):
    for run, settings in scripts["train"].RUNS.items():
        result = state / f"{run}-0" / "result"
        about = json.loads((result / "run.json").read_text())
        tables = {part: HeadOutputs.load(result / f"{part}.npz") for part in ("calibration", "test")}
        costs = Costs.load(result / "costs.json")
        assert len(costs) == len(about["exits"]) == tables["test"].num_exits
        assert about["images"] == {"train": 16, "calibration": 16, "test": 16}
        epochs = about["settings"]["training"]["epochs"]
        assert tables["test"].fingerprint == about["fingerprint"]
        assert about["test_accuracy"] == pytest.approx(1 - tables["test"].risks(), abs=1e-6)
        assert set(tables["test"].features) == (set(scripts["train"].SCORES) if settings.all_scores else set())
        assert len((result / "history.csv").read_text().splitlines()) == 1 + epochs * len(costs)
        assert {"hardware", "versions", "date", "commit", "seconds"} <= about.keys()
        assert not (result.parent / "checkpoint.safetensors").exists()


@pytest.mark.slow
def test_a_training_that_was_stopped_resumes_as_if_it_had_not_been(scripts, data, state, tmp_path):
    whole = trained(scripts, "convnext_plain-0", data, tmp_path)
    begun = scripts["train"].Progress.read(state / "convnext_plain-0/progress.csv")
    assert [[epoch for epoch, _ in rows] for rows in begun] == [[0, 1], [2, 3]]  # the last is the end
    for name in ("stages-0.safetensors", "history.csv"):
        assert (whole / name).read_bytes() == (state / "convnext_plain-0/result" / name).read_bytes()


@pytest.mark.slow
def test_the_network_that_is_saved_is_the_one_that_was_recorded(scripts, data, state):
    train = scripts["train"]
    split = scripts["data"].read(data, 0, train.CALIBRATION, limit=16)
    for run in ("resnet18_mixed_distilled", "resnet18_frozen", "msdnet_joint", "resnet10_plain"):
        model = train.load_result(train.Job(run), state)
        outputs = record(model, scripts["data"].Batches(split.test, CIFAR, 16), progress=False)
        recorded = HeadOutputs.load(state / f"{run}-0" / "result" / "test.npz")
        assert fingerprint(model) == recorded.fingerprint == outputs.fingerprint
        np.testing.assert_allclose(outputs.scores, recorded.scores, atol=1e-6)
        assert (
            measure_costs(model, torch.zeros(1, 3, 32, 32)).full
            == Costs.load(state / f"{run}-0" / "result" / "costs.json").full
        )


@pytest.mark.slow
def test_a_frozen_backbone_is_that_of_the_run_before(scripts, state):
    train = scripts["train"]
    backbone = train.load_result(train.Job("resnet18_plain"), state).stages[0].state_dict()
    frozen = train.load_result(train.Job("resnet18_frozen"), state).state_dict()
    stages = {name.split(".", 2)[2]: tensor for name, tensor in frozen.items() if name.startswith("stages.")}
    assert stages.keys() == backbone.keys()
    assert all(torch.equal(stages[name], tensor) for name, tensor in backbone.items())


@pytest.mark.slow
def test_archives_are_small_hold_tables_first_and_come_back_as_they_were(scripts, state, tmp_path, monkeypatch):
    pack, jobs = scripts["pack"], [scripts["train"].Job(run) for run in scripts["train"].RUNS]
    monkeypatch.setattr(pack, "LARGEST", 1_300_000)
    monkeypatch.setattr(pack, "MOST", 2)
    archives = pack.pack(jobs, state, tmp_path)
    assert len(archives) == pack.MOST
    assert [archive.name for archive in archives] == ["tables-0.tar", "weights-0.tar"]
    assert all(archive.stat().st_size <= pack.LARGEST for archive in archives)
    kept = [name for archive in archives for name in pack.names(archive)]
    tables = {f"{job.name}/result/{part}.npz" for job in jobs for part in ("calibration", "test")}
    assert tables <= set(kept)
    later = [name for archive in pack.pack(jobs, state, tmp_path) for name in pack.names(archive)]
    weights = [name for name in kept + later if name.endswith(".safetensors")]
    assert len(weights) == len(set(weights))
    assert not any("resnet18_frozen-0" in name for name in weights)
    assert any("resnet18_frozen_separable-0/result/heads" in name for name in weights)
    monkeypatch.undo()
    pack.unpack(pack.pack(jobs, state, tmp_path / "..", again=True), tmp_path / "back")
    run = scripts["train"].Job("resnet18_frozen_separable")
    there, back = (scripts["train"].load_result(run, folder) for folder in (state, tmp_path / "back"))
    assert fingerprint(there) == fingerprint(back)


def test_a_job_is_named_by_run_seed_and_calibration_images(scripts):
    named = scripts["train"].Job.named
    assert named("resnet18_frozen-2-5000").start.name == "resnet18_plain-2-5000"
    assert named("resnet18_plain-0").start is None
    for name in ("resnet18_plain", "resnet99-0", "resnet18_plain-x"):
        with pytest.raises(SystemExit, match="is not RUN-SEED"):
            named(name)


@pytest.mark.slow
def test_the_driver_waits_for_a_backbone_stops_in_time_and_resumes(scripts, data, tmp_path, monkeypatch, capfd):
    arguments = [data, tmp_path / "state", tmp_path / "out", "--limit=4", "--epochs=1", "--device=cpu"]
    command = ["cifar100_all.py", *map(str, arguments)]
    jobs = ["--jobs", "convnext_frozen-0", "convnext_plain-0", "--parallel", "2"]
    printed = []
    for seconds in (16, 115):
        monkeypatch.setattr(sys, "argv", [*command, *jobs, f"--seconds={seconds}"])
        scripts["all"].main()
        printed.append(capfd.readouterr().out)
    stopped, done = printed
    assert "convnext_plain-0 is stopped" in stopped
    assert re.search(r"\b0\.\d s  convnext_plain-0 begins", done)
    assert done.index("convnext_plain-0 begins") < done.index("convnext_frozen-0 begins")
    assert "convnext_frozen-0: test accuracy" in done
    with tarfile.open(tmp_path / "out" / "tables-0.tar") as file:
        assert "convnext_frozen-0/result/test.npz" in file.getnames()
