"""A network is exported whole or not at all, and no file is kept that differs from it."""

import errno
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from digits import digits
from digits import network as digits_network
from exported import folder, images, network, older_exporter, policy
from PIL import Image
from torch import nn
from transformers import BertConfig

from alight import (
    MultiExitModel,
    Normalisation,
    Predictor,
    RunSettings,
    TrainingSettings,
    export_model,
    from_transformers,
    train_heads,
)
from alight.engine.manifest import Manifest
from alight.errors import AlightError, BadInput, Mismatch
from alight.export import exporting
from alight.policies.policy import ExitAt, Threshold


def tiny(seed=0):
    torch.manual_seed(seed)
    return MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)]).eval()


EXAMPLE = torch.zeros(1, 4)
BOTH, FIRST = Threshold((0.3,), costs=(1.0, 3.0)), ExitAt(costs=(1.0,), open_exits=(0,), num_exits=2)


@pytest.fixture
def quick():
    with older_exporter() as refuse:
        yield refuse


def left_over(path):
    return sorted(each.name for each in path.iterdir())


def test_what_comes_after_the_last_open_exit_is_not_exported(tmp_path, quick):
    export_model(tiny(), FIRST, tmp_path / "exported", example=EXAMPLE)
    assert left_over(tmp_path / "exported") == ["manifest.json", "policy.json", "stage_0.onnx"]
    assert Predictor.load(tmp_path / "exported")(np.ones((3, 4))).exits.tolist() == [0, 0, 0]
    assert Manifest.load(tmp_path / "exported").stages[0].carries == ()


def test_a_new_export_takes_the_place_of_an_old_one_and_of_nothing_else(tmp_path, quick):
    export_model(tiny(), FIRST, tmp_path / "exported", example=EXAMPLE)
    before = Manifest.load(tmp_path / "exported")
    export_model(tiny(seed=1), FIRST, tmp_path / "exported", example=EXAMPLE)
    assert Manifest.load(tmp_path / "exported").fingerprint != before.fingerprint
    (tmp_path / "exported" / "thesis.tex").touch()
    with pytest.raises(BadInput, match=r"holds thesis\.tex, which would be lost"):
        export_model(tiny(), FIRST, tmp_path / "exported", example=EXAMPLE)
    assert left_over(tmp_path) == ["exported"]


def test_a_file_that_differs_from_the_network_is_not_kept(tmp_path, quick, monkeypatch):
    export_model(tiny(), FIRST, tmp_path / "exported", example=EXAMPLE)
    before = (tmp_path / "exported" / "manifest.json").read_text()
    other = (tmp_path / "exported" / "stage_0.onnx").read_bytes()  # another network's

    def wrong(job):
        job.path.write_bytes(other)

    monkeypatch.setitem(exporting.WRITERS["onnx"], "export", wrong)
    monkeypatch.setitem(exporting.WRITERS["onnx"], "trace", wrong)
    with pytest.raises(AlightError, match=r"stage_0\.onnx differs from the network by"):
        export_model(tiny(seed=1), FIRST, tmp_path / "exported", example=EXAMPLE)
    assert (tmp_path / "exported" / "manifest.json").read_text() == before
    assert left_over(tmp_path) == ["exported"]


def test_small_numbers_are_compared_as_strictly_as_large_ones(tmp_path, quick, monkeypatch):
    faint = tiny()
    faint.heads[0].weight.data *= 1e-4
    faint.heads[0].bias.data *= 1e-4
    export_model(faint, FIRST, tmp_path / "exported", example=EXAMPLE)
    other = (tmp_path / "exported" / "stage_0.onnx").read_bytes()
    faint.heads[0].bias.data += 1e-5

    def wrong(job):
        job.path.write_bytes(other)

    monkeypatch.setitem(exporting.WRITERS["onnx"], "trace", wrong)
    with pytest.raises(AlightError, match="cannot be exported"):
        export_model(faint, FIRST, tmp_path / "exported", example=EXAMPLE)


class First(nn.Module):
    """A stage that hands on a mask of infinities, as of attention."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, numbers):
        features = self.linear(numbers)
        return features, torch.zeros_like(features).masked_fill(features < features.mean(), -torch.inf)


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, features, mask):
        return self.linear((features + mask).softmax(dim=1))


@pytest.mark.parametrize("place", [0, 2])
def test_numbers_that_are_none_and_those_beside_infinity_are_compared(place, tmp_path, quick, monkeypatch):
    model = MultiExitModel([First(), Second()], tiny().heads).eval()
    export_model(model, BOTH, tmp_path / "exported", example=EXAMPLE)
    written = exporting._runner

    def wrong(path, kind):
        run = written(path, kind)

        def ran(state):
            logits, others = run(state)
            made = [logits, *others]
            if len(made) > place:
                made[place] = np.where(np.isinf(made[place]), made[place], 1 if place else np.nan)
            return made[0], made[1:]

        return ran

    monkeypatch.setattr(exporting, "_runner", wrong)
    monkeypatch.setitem(exporting.WRITERS["onnx"], "export", exporting.WRITERS["onnx"]["trace"])
    with pytest.raises(AlightError, match=r"stage_0\.onnx differs from the network by"):
        export_model(model, BOTH, tmp_path / "other", example=EXAMPLE)


class Logarithm(nn.Module):
    def forward(self, numbers):
        return numbers.log()


@pytest.mark.parametrize(
    ("stages", "heads", "message"),
    [
        ([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 5)], r"open exits give \[3, 5\] logits"),
        ([nn.Linear(4, 8)], [nn.Linear(8, 1)], "one logit, and a softmax over one class is always 1"),
        ([nn.Linear(4, 8)], [nn.Unflatten(1, (2, 4))], r"a tensor of shape \(3, 2, 4\), not \(samples, classes\)"),
        ([Logarithm()], [nn.Linear(4, 3)], "the head at exit 1 gives NaN or infinite logits"),
        (
            [nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Flatten(0, 1)), nn.Linear(2, 2)],
            [nn.Sequential(nn.Unflatten(0, (-1, 2)), nn.Flatten(1), nn.Linear(4, 3)) for _ in range(2)],
            r"stage_0_1 has shape \(6, 2\) for 3 samples: every tensor must have one row per sample",
        ),
    ],
    ids=["classes", "one_logit", "axes", "not_finite", "rows"],
)
def test_what_gives_no_row_of_logits_per_sample_is_refused(stages, heads, message, tmp_path, quick):
    policy = BOTH if len(stages) > 1 else ExitAt(costs=(1.0,))
    with pytest.raises(BadInput, match=message):
        export_model(MultiExitModel(stages, heads).eval(), policy, tmp_path / "exported", example=EXAMPLE)
    assert not left_over(tmp_path)


def test_the_older_exporter_is_taken_where_the_newer_cannot(tmp_path, quick, monkeypatch):
    model, numbers = tiny(), np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    export_model(model, BOTH, tmp_path / "exported", example=EXAMPLE)
    found, expected = Predictor.load(tmp_path / "exported")(numbers), Predictor(model, BOTH)(numbers)
    assert (found.predictions == expected.predictions).all()
    assert (found.exits == expected.exits).all()
    assert Manifest.load(tmp_path / "exported").made_with["captured by"] == "trace, trace"
    monkeypatch.setitem(exporting.WRITERS["onnx"], "trace", quick)
    with pytest.raises(
        AlightError, match=r"stage that ends at exit 1 cannot be exported \(RuntimeError: no such operator\)"
    ):
        export_model(model, BOTH, tmp_path / "exported", example=EXAMPLE)


def test_a_full_disk_is_not_laid_on_the_network(tmp_path, monkeypatch):
    def write_to_a_full_disk(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(exporting.WRITERS["onnx"], next(iter(exporting.WRITERS["onnx"])), write_to_a_full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        export_model(tiny(), BOTH, tmp_path / "exported", example=EXAMPLE)
    assert not left_over(tmp_path)


class Forked(nn.Module):
    """A stage that takes another way for large numbers, which no example has."""

    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Linear(4, 8), nn.Linear(4, 8)

    def forward(self, numbers):
        return self.small(numbers) if numbers.abs().max() < 100 else self.large(numbers)


class Eigenvalues(nn.Module):
    """A stage with something that ONNX does not have."""

    def forward(self, numbers):
        return torch.linalg.eigvalsh(numbers[:, :, None] * numbers[:, None, :])


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        (Forked(), r"it branches on its data, .*test_exporting\.py:[0-9]+: return self\.small"),
        (Eigenvalues(), "linalg_eigh"),
    ],
)
def test_a_stage_that_no_file_can_hold_is_refused_by_what_it_does(stage, reason, tmp_path):
    width = 8 if isinstance(stage, Forked) else 4
    model = MultiExitModel([stage], [nn.Linear(width, 3)]).eval()
    with pytest.raises(AlightError, match=rf"exit 1 cannot be exported \(.*{reason}.*\): rewrite what it names"):
        export_model(model, ExitAt(costs=(1.0,)), tmp_path / "exported", example=EXAMPLE)
    assert not left_over(tmp_path)


def test_what_does_not_belong_together_is_refused_before_any_work(tmp_path):
    with pytest.raises(Mismatch, match="for 1 exits and the network has 2"):
        export_model(tiny(), ExitAt(costs=(1.0,)), tmp_path / "exported", example=EXAMPLE)
    foreign = ExitAt(costs=(1.0,), open_exits=(1,), num_exits=2, fingerprint="0123")
    with pytest.raises(Mismatch, match="network 0123 and this is"):
        export_model(tiny(), foreign, tmp_path / "exported", example=EXAMPLE)
    with pytest.raises(BadInput, match=r"weights are torch\.bfloat16: export it in float32"):
        export_model(tiny().bfloat16(), FIRST, tmp_path / "exported", example=EXAMPLE)
    with pytest.raises(BadInput, match="no format 'gif'"):
        export_model(tiny(), FIRST, tmp_path / "exported", example=EXAMPLE, format="gif")
    with pytest.raises(BadInput, match="does not say what it takes"):
        export_model(tiny(), FIRST, tmp_path / "exported")
    assert not left_over(tmp_path)


def test_the_network_itself_is_left_as_it_was(tmp_path, quick):
    model = tiny().train()
    export_model(model, FIRST, tmp_path / "exported", example=EXAMPLE)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_texts_of_any_length_with_masks_get_the_answers_that_torch_gives(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
    model = from_transformers(BertConfig(vocab_size=50, **sizes), num_classes=3, after=["bert.encoder.layer.0"])
    rule = Threshold((0.05,), costs=(1.0, 2.0))
    export_model(model, rule, tmp_path / "exported")
    deployed, predictor = (make(rule, tmp_path, model) for make in (_deployed, _predictor))
    everywhere = [deployed, *([_openvino(rule, tmp_path, model)] if find_spec("openvino") else [])]
    rng = np.random.default_rng(0)
    for count, tokens in ((1, 3), (20, 5), (20, 23)):
        lengths = rng.integers(1, tokens + 1, size=count)
        batch = {
            "input_ids": rng.integers(0, 50, size=(count, tokens)),
            "attention_mask": (np.arange(tokens) < lengths[:, None]).astype(np.int64),
        }
        expected = predictor(batch)
        for each in everywhere:
            found = each(batch)
            assert (found.predictions == expected.predictions).all()
            assert (found.exits == expected.exits).all()
            np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=1e-5)
            longer = np.ones((count, tokens + 3), int)
            with pytest.raises(BadInput, match=f"input_ids has {tokens} tokens and attention_mask {tokens + 3}: give"):
                each({**batch, "attention_mask": longer})
            again = each(batch)  # of OpenVINO the former answers came back from then on
            assert (again.predictions == expected.predictions).all()
    for each, reason in zip(
        everywhere, ("tokens that the network does not know", "the index 50, .* has 50 rows"), strict=False
    ):
        for count in (1, 3):
            with pytest.raises(BadInput, match=reason):
                each({"input_ids": np.full((count, 4), 50), "attention_mask": np.ones((count, 4), int)})
    with pytest.raises(BadInput, match="the batch has 'position_ids', and the network was cut with"):
        deployed({name: np.ones((1, 4), int) for name in ("input_ids", "attention_mask", "position_ids")})
    with pytest.raises(BadInput, match="texts of 600 tokens, and the exported network was seen"):
        deployed({"input_ids": np.ones((1, 600), int), "attention_mask": np.ones((1, 600), int)})


def _deployed(rule, tmp_path, _):
    return Predictor.load(tmp_path / "exported", rule, settings=RunSettings(threads=1), probabilities=True)


def _openvino(rule, tmp_path, _):
    settings = RunSettings(threads=1, runtime="openvino")
    return Predictor.load(tmp_path / "exported", rule, settings=settings, probabilities=True)


def _predictor(rule, _, model):
    return Predictor(model, rule, probabilities=True)


class Positions(nn.Module):
    """A stage that counts positions from tokens that are no padding, as RoBERTa does, and knows 40 of them."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(9, 8), nn.Embedding(40, 8)

    def forward(self, input_ids, attention_mask):
        places = (input_ids != 1).long().cumsum(dim=1)
        return ((self.tokens(input_ids) + self.positions(places)) * attention_mask[..., None]).mean(dim=1)


def test_texts_are_no_longer_than_the_positions_of_full_ones(tmp_path, quick):
    torch.manual_seed(0)
    names = ("input_ids", "attention_mask")
    model = MultiExitModel([Positions(), nn.Linear(8, 8)], tiny().heads, input_names=names).eval()
    example = dict.fromkeys(names, torch.ones(2, 5, dtype=torch.int64))
    export_model(model, BOTH, tmp_path / "exported", example=example)
    assert Manifest.load(tmp_path / "exported").lengths == (1, 32)


def test_scores_agree_with_torch_to_five_digits():
    theirs = Predictor(network(), policy(), probabilities=True)(torch.from_numpy(images()))
    ours = Predictor.load(folder(), probabilities=True)(images())
    assert np.abs(ours.probabilities - theirs.probabilities).max() < 1e-5


def test_a_network_of_own_floats_answers_bytes_only_once_its_normalisation_is_stated(tmp_path, quick):
    own = Normalisation((0.3,), (0.05,))  # far from 0 and 1: raw pixels give another answer
    model, (train, test) = digits_network(), (each.tensors for each in digits())
    floats = [((images - 0.3) / 0.05, labels) for images, labels in (train, test)]
    train_heads(model, floats[0], TrainingSettings(mode="joint", epochs=2), progress=False)
    last, example = ExitAt(costs=(1.0,), open_exits=(2,)), floats[0][0][:2]
    pixels, labels = np.round(255 * test[0][:, 0].numpy()).astype(np.uint8), test[1].numpy()
    export_model(model, last, tmp_path / "unknown", example=example)
    export_model(model, last, tmp_path / "stated", example=example, normalisation=own)
    export_model(model, last, tmp_path / "raw", example=example, normalisation=Normalisation((0,), (1,)))
    unknown, stated, raw = (Predictor.load(tmp_path / name) for name in ("unknown", "stated", "raw"))

    right = unknown(floats[1][0].numpy()).accuracy(labels)
    assert right > 0.8
    assert abs(stated(pixels).accuracy(labels) - right) < 0.01
    assert raw(pixels).accuracy(labels) < right - 0.1  # what bytes got before, in silence
    for given in (pixels, torch.from_numpy(pixels), [*map(Image.fromarray, pixels[:3])]):
        with pytest.raises(BadInput, match=r"how the network normalises them is unknown.*export_model"):
            unknown(given)
    assert Manifest.load(tmp_path / "unknown").normalisation is None
    assert Manifest.load(tmp_path / "stated").normalisation == own


def test_a_normalisation_that_contradicts_the_networks_own_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"mean=\(0\.0, .* and the network has .*mean=\(0\.5, .* leave it out"):
        export_model(network(), policy(), tmp_path / "new", normalisation=Normalisation((0,) * 3, (1,) * 3))


def test_a_missing_compiler_is_reported_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(AlightError, match="no C\\+\\+ compiler: install one"):
        export_model(network(), policy(), tmp_path / "exported", format="aoti")
    assert not (tmp_path / "exported").exists()
