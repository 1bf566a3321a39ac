"""Recording: one dense pass, the same numbers whatever the batches, and a table that knows its network."""

import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from digits import digits, held_out, network
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from alight.engine.recorder import Recorder, numbered_otherwise, record
from alight.engine.settings import RunSettings
from alight.errors import BadInput
from alight.networks.multi_exit import MultiExitModel
from alight.networks.store import fingerprint
from alight.outputs import HeadOutputs

IMAGES, LABELS = digits()[1][:50]


def test_a_recording_is_what_the_logits_say():
    model = network().eval()
    with torch.no_grad():
        logits = model(IMAGES)
    options = {"score": "max_probability", "features": ["margin", "negative_entropy"]}
    expected = HeadOutputs.from_logits(logits, LABELS, **options)
    table = record(model, [(IMAGES, LABELS)], progress=False, **options)
    for name in ("predictions", "labels"):
        np.testing.assert_array_equal(getattr(table, name), getattr(expected, name))
    for name in ("max_probability", "margin", "negative_entropy"):
        np.testing.assert_allclose(table.column(name), expected.column(name), rtol=1e-12, atol=1e-15)
    np.testing.assert_array_equal(table.top_classes, expected.top_classes)
    np.testing.assert_allclose(table.top_log_probabilities, expected.top_log_probabilities, rtol=1e-3)
    assert table.top_classes.shape == (50, 3, 5)
    assert table.score == "max_probability"
    assert table.fingerprint == fingerprint(model)


def test_the_batch_size_does_not_matter_but_for_rounding():
    tables = [record(network(), held_out(size), progress=False) for size in (7, 100, 397)]
    assert [len(table) for table in tables] == [397] * 3
    for table in tables[1:]:
        np.testing.assert_allclose(table.scores, tables[0].scores, atol=1e-5)
        np.testing.assert_array_equal(table.labels, digits()[1].tensors[1])


def test_a_recording_leaves_mode_weights_and_statistics_as_they_were():
    model = network(dropout=0.5).train()
    model.heads[0].eval()
    modes, weights = [each.training for each in model.modules()], [each.clone() for each in model.state_dict().values()]
    one, two = (record(model, held_out(), progress=False) for _ in range(2))
    np.testing.assert_array_equal(one.scores, two.scores)
    assert modes == [each.training for each in model.modules()]
    assert all(torch.equal(*pair) for pair in zip(weights, model.state_dict().values(), strict=True))


def test_each_head_runs_once_per_batch_without_gradient():
    model, seen = network(), []
    for head in model.heads[:2]:
        head.register_forward_hook(lambda _, __, logits: seen.append(logits.is_inference()))
    record(model.eval(), [IMAGES, IMAGES], progress=False)
    assert seen == [True] * 4


@pytest.mark.parametrize(
    "batch", [IMAGES, [IMAGES], {"pixel_values": IMAGES}, (IMAGES, LABELS), {"pixel_values": IMAGES, "label": LABELS}]
)
def test_batches_may_be_tensors_tuples_or_dicts(batch):
    table = record(network(), [batch, batch], progress=False)
    assert len(table) == 100
    assert (table.labels is not None) == (len(batch) == 2)


def test_half_precision_is_another_network():
    model = network()
    plain, half = (
        record(model, [IMAGES], settings=RunSettings(dtype=dtype), progress=False) for dtype in (None, "bf16")
    )
    assert plain.fingerprint != half.fingerprint
    np.testing.assert_allclose(plain.scores, half.scores, atol=0.05)
    assert {each.dtype for each in model.parameters()} == {torch.float32}


def test_a_recording_keeps_its_fingerprint_through_files_and_splits(tmp_path):
    table = record(network(), held_out(), progress=False)
    table.save(tmp_path / "table.npz")
    read = HeadOutputs.load(tmp_path / "table.npz")
    first, second = read.split(0.5, np.random.default_rng(0))
    assert {each.fingerprint for each in (read, first, second, read.at_exits([0, 2]))} == {table.fingerprint}


class Unsure(nn.Module):
    def forward(self, features):
        return features / (features.sum(1, keepdim=True) - 4)


def test_a_number_that_is_none_is_reported_with_its_sample():
    images = torch.rand(30, 4)
    images[23] = 1.0
    model = MultiExitModel([nn.Identity(), nn.Identity()], [nn.Identity(), Unsure()], exits=["first", "end"])
    with pytest.raises(BadInput, match="the head at end gives inf for sample 23"):
        record(model, DataLoader(TensorDataset(images), 10), progress=False)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], "no batch in the recording"),
        ([(IMAGES, LABELS), IMAGES], "batch 1 has no labels, unlike those before it"),
        ([(IMAGES, LABELS + 5)], "labels run from 5 to 14"),
    ],
)
def test_a_bad_loader_is_refused(loader, message):
    with pytest.raises(BadInput, match=message):
        record(network(), loader, progress=False)


def test_an_unknown_score_is_refused():
    with pytest.raises(BadInput, match="there is no score 'luck'"):
        record(network(), [IMAGES], score="luck", progress=False)


def test_a_network_without_exits_is_refused():
    with pytest.raises(BadInput, match="a Linear has no exits yet"):
        record(nn.Linear(3, 3), [IMAGES])


def test_progress_is_shown(capfd):
    record(network(), held_out())
    assert "record: 100%" in capfd.readouterr().err


def assert_same(table, expected):
    assert (table.score, table.fingerprint) == (expected.score, expected.fingerprint)
    assert table.rows().keys() == expected.rows().keys()
    for name, values in expected.rows().items():
        np.testing.assert_array_equal(table.rows()[name], values)
        assert table.rows()[name].dtype == values.dtype


@pytest.mark.parametrize("labelled", [True, False])
def test_a_recording_on_the_disk_is_the_one_in_memory(labelled, tmp_path):
    model, loader = network(), [(images, labels) if labelled else images for images, labels in held_out(64)]
    options = {"score": "logit_margin", "features": ["margin"], "top": 7}
    expected = record(model, loader, **options, progress=False)
    found = Recorder(model, **options).write(tmp_path / "table.npz", loader, progress=False)
    assert_same(found.load(), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["table.npz"]
    assert str(found) == f"397 samples, 3 exits, score 'logit_margin', {'' if labelled else 'un'}labelled: {found.path}"
    assert found.fingerprint == expected.fingerprint
    assert found.accuracies == (pytest.approx(tuple(1 - expected.risks())) if labelled else ())


def test_a_recording_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "table.npz"
    path.write_text("old")

    def failing():
        yield IMAGES
        raise OSError("the data are gone")

    with pytest.raises(OSError, match="the data are gone"):
        Recorder(network()).write(path, failing(), progress=False)
    with pytest.raises(BadInput, match="no batch in the recording"):
        Recorder(network()).write(path, [], progress=False)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


ENDLESS = """
import signal, sys, torch
from torch import nn
from alight.networks.multi_exit import MultiExitModel
from alight.engine.recorder import Recorder

signal.signal(signal.SIGINT, signal.default_int_handler)  # which jobs in the background of a shell ignore

def endless():
    while True:
        yield torch.zeros(10, 4)
        print("went on", flush=True)  # waits for its reader once the pipe is full

model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
Recorder(model).write(sys.argv[1], endless(), progress=False)
"""


def test_an_interrupted_recording_leaves_nothing(tmp_path):
    started = subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path / "table.npz")], stdout=-1, stderr=-1)
    for _ in range(5):
        assert started.stdout.readline() == b"went on\n"
    assert [path.name.startswith(".table.npz.") for path in tmp_path.iterdir()] == [True]
    started.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in started.communicate(timeout=60)[1]
    assert not list(tmp_path.iterdir())


PEAK = """
import resource, sys, torch
from torch import nn
from alight.networks.multi_exit import MultiExitModel
from alight.engine.recorder import Recorder

torch.set_num_threads(1)
model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 1000), nn.Linear(8, 1000)])
batches = (torch.randn(200, 4) for _ in range(int(sys.argv[2])))
Recorder(model, top=1000).write(sys.argv[1], batches, progress=False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_the_memory_of_a_recording_on_the_disk_does_not_grow_with_the_data(tmp_path):
    path = tmp_path / "table.npz"
    peaks, sizes = [], []
    for count in (15, 120):
        ran = subprocess.run([sys.executable, "-c", PEAK, str(path), str(count)], capture_output=True, check=True)
        peaks.append(int(ran.stdout) / 1e3)
        sizes.append(path.stat().st_size / 1e6)
    assert sizes[1] - sizes[0] > 150  # MB that memory does not hold
    assert peaks[1] - peaks[0] < 15


@pytest.mark.slow
def test_a_compiled_recording_says_the_same_but_for_rounding():
    model = network()
    plain, quick = (
        record(model, held_out(100), settings=RunSettings(compile=each), features=["negative_entropy"], progress=False)
        for each in (False, True)
    )
    np.testing.assert_allclose(quick.scores, plain.scores, atol=1e-5)
    np.testing.assert_allclose(quick.features["negative_entropy"], plain.features["negative_entropy"], atol=1e-5)
    assert quick.fingerprint == plain.fingerprint


def test_threads_are_as_before_once_a_recording_is_done():
    before = torch.get_num_threads()
    seen = []
    model = network()
    model.heads[0].register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    record(model, [IMAGES], settings=RunSettings(threads=before + 1), progress=False)
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("heads", [(3, 4), (1, 1)])
def test_heads_that_do_not_agree_are_refused(heads):
    model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, classes) for classes in heads])
    with pytest.raises(BadInput, match=r"the exits' logits have shapes \[\(5, \d\), \(5, \d\)\]"):
        record(model, [torch.zeros(5, 4)], progress=False)


def test_labels_that_are_numbered_otherwise_than_the_classes_are_warned_of():
    heads = [nn.Linear(8, 8, bias=False) for _ in range(2)]
    for head in heads:
        nn.init.eye_(head.weight)
    model, classes = MultiExitModel([nn.Identity(), nn.Identity()], heads), np.arange(2000) % 8
    names = np.array([*"hgfedcba"])
    alphabetical = np.searchsorted(np.sort(names), names[classes])
    samples = np.eye(8, dtype=np.float32)[classes]
    said = r"0\.0% accuracy on 2,000 labelled samples, guessing 12\.5%, and with classes in another order 100\.0%"
    with pytest.warns(UserWarning, match=said) as found:
        record(model, (samples, alphabetical), progress=False)
    assert len(found) == 1
    assert "set model.classes in the order of its logits" in str(found[0].message)
    record(model, (samples, classes), progress=False)


@pytest.mark.parametrize("num_classes", [2, 3, 10, 100])
def test_networks_that_know_nothing_are_not_taken_for_misnumbered(num_classes):
    rng = np.random.default_rng(0)
    for count in (20, 300, 3000):
        labels = rng.integers(max(2, num_classes // 3), size=count)
        answers = rng.integers(num_classes, size=count), np.full(count, num_classes - 1), np.full(count, 0)
        for predictions in answers:
            table = HeadOutputs(np.full((count, 1), 0.5), predictions[:, None], labels)
            assert numbered_otherwise(table, num_classes) == ""
    table = HeadOutputs([[0.5]] * 300, [[3]] * 300, [3] * 150 + [1] * 150)
    assert numbered_otherwise(table, None) == ""


def of_any_size():
    """A network that takes images of any size."""
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
    heads = [nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)) for _ in range(2)]
    return MultiExitModel([stage, nn.Conv2d(8, 8, 3, padding=1)], heads)


def test_a_recording_knows_the_size_of_its_images_in_memory_and_on_the_disk(tmp_path):
    small, large = torch.zeros(5, 3, 16, 16), torch.zeros(5, 3, 32, 32)
    recorder = Recorder(of_any_size())
    for batches, expected in (([small, small], (3, 16, 16)), ([large], (3, 32, 32)), ([small, large], ())):
        table = recorder.table(batches, progress=False)
        assert table.sample_shape == expected
        assert recorder.write(tmp_path / "table.npz", batches, progress=False).load().sample_shape == expected
        assert table.take(slice(2)).at_exits([1]).unlabelled().with_score("margin").sample_shape == expected


def test_the_size_of_texts_and_rows_of_numbers_is_not_recorded():
    model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    assert record(model, torch.zeros(5, 4), progress=False).sample_shape == ()
