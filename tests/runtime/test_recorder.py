"""Recording: one dense pass, the same numbers whatever the batches, and a table that knows its network."""

import numpy as np
import pytest
import torch
from digits import digits, held_out, network
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from alight.errors import BadInput
from alight.models.fingerprint import fingerprint
from alight.models.multi_exit import MultiExitModel
from alight.outputs import HeadOutputs
from alight.runtime.recorder import record

IMAGES, LABELS = digits()[1][:50]


def test_a_recording_is_what_the_logits_say():
    model = network().eval()
    with torch.no_grad():
        logits = model(IMAGES)
    options = {"score": "max_probability", "features": ["margin", "negative_entropy"]}
    expected = HeadOutputs.from_logits(logits, LABELS, keep_log_probabilities=True, **options)
    table = record(model, [(IMAGES, LABELS)], log_probabilities=True, progress=False, **options)
    for name in ("scores", "predictions", "labels", "log_probabilities"):
        np.testing.assert_array_equal(getattr(table, name), getattr(expected, name))
    for name, values in expected.features.items():
        np.testing.assert_array_equal(table.features[name], values)
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
    plain, half = (record(model, [IMAGES], dtype=dtype, progress=False) for dtype in (None, "bf16"))
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
    with pytest.raises(BadInput, match=r"exit 1 \(end\) gives inf for sample 23"):
        record(model, DataLoader(TensorDataset(images), 10), progress=False)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], "no batch in the recording"),
        ([(IMAGES, LABELS), IMAGES], "1 of 2 batches have no labels"),
        ([(IMAGES, LABELS + 5)], "labels hold class 14"),
    ],
)
def test_a_bad_loader_is_refused(loader, message):
    with pytest.raises(BadInput, match=message):
        record(network(), loader, progress=False)


def test_an_unknown_score_is_refused():
    with pytest.raises(BadInput, match="there is no score 'luck'"):
        record(network(), [IMAGES], score="luck", progress=False)


def test_a_plain_network_is_refused():
    with pytest.raises(BadInput, match="a Linear has no exits yet"):
        record(nn.Linear(3, 3), [IMAGES])


def test_progress_is_shown(capfd):
    record(network(), held_out())
    assert "record: 100%" in capfd.readouterr().err
