"""A cascade is a network whose exits are whole networks: each reads the sample in its own way."""

import json
import warnings
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from cascades import (
    BARE,
    CLASSES,
    COSTS,
    SHARED,
    chain,
    convolutions,
    onnx_file,
    outputs,
    pixels,
    remote_model,
    with_an_exit,
    write_litert,
    write_onnx,
)
from torch import nn
from torch.nn import functional

from alight import Cascade, Member, Normalisation, Predictor, RunSettings, calibrate, cascade, record, replay
from alight.calibrate.crossval import on_exits
from alight.engine.backends.members import OneStage, litert_member
from alight.engine.predictor import load_network
from alight.errors import AlightError, BadFile, BadInput, Mismatch
from alight.policies.limits import meter
from alight.policies.policy import ExitAt, Threshold

LITERT = "LiteRT: pip install ai-edge-litert"


def assert_replayed(decisions, expected):
    np.testing.assert_array_equal(decisions.exits, expected.exits)
    np.testing.assert_array_equal(decisions.predictions, expected.predictions)


def test_every_network_sees_the_sample_as_it_would_alone():
    """The large network takes the pixels at their size: bit by bit what it gives for them alone."""
    model, said = chain(), outputs()
    assert model.input_spec.image_shape == (3, 16, 16)
    assert model.exits == ("tiny", "middle: 0", "middle: end", "large")
    images = torch.from_numpy(pixels()).float() / 255
    with torch.inference_mode():
        alone = model.members[2].network.network(images)
        resized = functional.interpolate(images * 255, (12, 12), mode="bilinear", antialias=True) / 255
        mean, std = (torch.tensor(each)[:, None, None] for each in (SHARED.mean, SHARED.std))
        middle = with_an_exit().network((resized - mean) / std)
    np.testing.assert_array_equal(said.top_classes[:, 3, :4], torch.topk(alone, 4).indices.numpy())
    np.testing.assert_allclose(
        said.top_log_probabilities[:, 2, 0].astype(float), middle.log_softmax(1).amax(1).numpy(), atol=2e-3
    )


@pytest.mark.parametrize("opened", [(0, 1, 2, 3), (0, 3), (1, 2), (2,), (0, 2, 3)])
def test_a_predictor_equals_the_replay_of_the_recording_for_any_open_exits(opened):
    policy = on_exits(calibrate.eero, opened)(COSTS, "70%", outputs())
    assert set(policy.open_exits) <= set(opened)
    for size in (1, 7, 256):
        found = Predictor(chain(), policy, batch_size=size, settings=RunSettings(threads=1))
        assert_replayed(found(pixels()), replay(policy, outputs()))


def test_a_network_without_an_open_exit_is_never_run(monkeypatch):
    policy = on_exits(calibrate.eero, (0, 3))(COSTS, "70%", outputs())
    backend = Predictor(chain(), policy).backend
    assert sorted(backend.backends) == [0, 2]


def test_a_cascade_is_saved_whole_and_loaded_without_code(tmp_path):
    model = chain()
    folder = model.save(tmp_path / "cascade")
    again = load_network(folder)
    assert isinstance(again, Cascade)
    assert (again.fingerprint, again.exits) == (model.fingerprint, model.exits)
    policy = calibrate.eero(COSTS, "70%", outputs())
    assert_replayed(Predictor(again, policy)(pixels()), replay(policy, outputs()))
    with pytest.raises(BadFile, match="without a policy"):
        Predictor.load(folder)
    policy.save(folder / "policy.json")
    assert_replayed(Predictor.load(folder)(pixels()), replay(policy, outputs()))
    write_onnx(folder / "member_0.onnx", size=8, softmax=True)
    with pytest.raises(BadFile, match="a file of it was changed"):
        Cascade.load(folder)


@pytest.mark.parametrize(
    "damage", [{"members": None}, {"members": [{"name": "x"}]}, {"members": [{"network": "../x"}]}]
)
def test_a_damaged_description_is_refused(tmp_path, damage):
    folder = chain().save(tmp_path / "cascade")
    document = json.loads((folder / "cascade.json").read_text())
    (folder / "cascade.json").write_text(json.dumps({**document, **damage}))
    with pytest.raises(BadFile, match="its content is not usable"):
        Cascade.load(folder)


def test_networks_that_take_the_same_get_it_unchanged_though_one_writes_to_it():
    class Overwrites(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            return self.linear(functional.relu(x, inplace=True))

    torch.manual_seed(0)
    last = nn.Linear(4, 3)
    rows = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    before = rows.copy()
    said = record(cascade([Overwrites(), last], example=torch.zeros(2, 4)), rows, progress=False)
    np.testing.assert_array_equal(rows, before)
    with torch.inference_mode():
        np.testing.assert_array_equal(said.predictions[:, 1], last(torch.from_numpy(before)).argmax(1).numpy())


def test_a_network_in_another_dtype_is_another_recording():
    settings = RunSettings(dtype="bf16")
    half = cascade([Member(convolutions(16, 2), "large", image_size=16, normalisation=BARE, settings=settings)])
    whole = cascade([Member(convolutions(16, 2), "large", image_size=16, normalisation=BARE)])
    assert half.fingerprint != whole.fingerprint
    assert whole.fingerprint_with(settings) == half.fingerprint
    one, other = (record(each, pixels(), progress=False) for each in (half, whole))
    assert np.abs(one.scores - other.scores).max() > 1e-5
    policy = ExitAt(costs=(1.0,), fingerprint=whole.fingerprint)
    with pytest.raises(Mismatch, match="dtype or preprocessing differ"):
        Predictor(half, policy)


def test_how_a_network_reads_its_samples_is_part_of_the_fingerprint():
    made = [
        cascade([Member(onnx_file(), "tiny", normalisation=BARE, **terms)], image_size=16).fingerprint
        for terms in ({}, {"crop": 0.9}, {"bicubic": True}, {"probabilities": True}, {"probabilities": False})
    ]
    assert len({*made}) == 5


def test_probabilities_become_logits_and_a_background_is_left_out(tmp_path):
    said = []
    for name, terms, skip in (("plain", {}, 0), ("softmax", {"softmax": True}, 0), ("more", {"classes": 5}, 1)):
        path = write_onnx(tmp_path / f"{name}.onnx", **terms)
        model = cascade([Member(path, normalisation=BARE, skip_classes=skip)], image_size=16)
        assert model.num_classes == CLASSES
        said.append(record(model, pixels(), progress=False))
    np.testing.assert_array_equal(said[0].predictions, said[1].predictions)
    np.testing.assert_allclose(said[0].scores, said[1].scores, atol=1e-5)
    with pytest.raises(BadInput, match=r"different numbers of classes \(plain 4, more 5\)"):
        cascade([Member(tmp_path / f"{each}.onnx", normalisation=BARE) for each in ("plain", "more")])


def test_a_file_for_one_sample_at_a_time_answers_batches(tmp_path):
    one, any_number = write_onnx(tmp_path / "one.onnx", batch=1), write_onnx(tmp_path / "any.onnx")
    said = [
        record(cascade([Member(each, normalisation=BARE)]), pixels()[:, :, :8, :8], progress=False)
        for each in (one, any_number)
    ]
    np.testing.assert_allclose(said[0].scores, said[1].scores, atol=1e-6)
    with pytest.raises(BadFile, match="it takes batches of 4 alone"):
        cascade([write_onnx(tmp_path / "four.onnx", batch=4)])


def test_texts_are_cut_into_tokens_by_each_network():
    """Networks with other vocabularies read the same text; tokens are numbers of letters here."""

    def letters(step):
        def tokenizer(texts, **_):
            width = max(map(len, texts))
            ids = np.array([[ord(letter) // step % 7 for letter in text.ljust(width)] for text in texts])
            mask = np.array([np.arange(width) < len(text) for text in texts]).astype(np.int64)
            return {"input_ids": ids, "attention_mask": mask}

        tokenizer.model_max_length, tokenizer.pad_token_id, tokenizer.padding_side = 512, 0, "right"
        return tokenizer

    class Bag(nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(7, 3)

        def forward(self, input_ids, attention_mask):
            return (self.embedding(input_ids) * attention_mask[..., None]).sum(1)

    ids = torch.ones(2, 5, dtype=torch.int64)
    members = []
    for seed in (1, 2):
        model = chain_of_text(Bag(seed), {"input_ids": ids, "attention_mask": ids})
        model.tokenizer = letters(seed)
        members.append(model)
    model = cascade(members, ["one", "two"])
    texts = ["hello", "a longer text", "naïve café", "x"] * 5
    said = record(model, texts, batch_size=6, progress=False)
    for place, member in enumerate(members):
        with torch.inference_mode():
            alone = [member(member_inputs(member, [text]))[-1].argmax(1).item() for text in texts]
        assert said.predictions[:, place].tolist() == alone
    policy = Threshold(thresholds=(float(np.median(said.scores[:, 0])) + 1e-9,), costs=(1.0, 3.0))
    assert_replayed(Predictor(model, policy, batch_size=3)(texts), replay(policy, said))


def chain_of_text(network, example):
    from alight import attach_heads

    return attach_heads(network, (), example=example, mask={"attention_mask": "tokens"})


def member_inputs(member, texts):
    from alight.data.tokens import texts_for

    return {name: torch.from_numpy(each) for name, each in texts_for(member.input_spec)(texts).items()}


def test_a_remote_model_is_asked_about_survivors_alone():
    rng = np.random.default_rng(0)
    weights, rows = rng.normal(size=(4, 3)).astype(np.float32), rng.normal(size=(60, 4)).astype(np.float32)
    small = nn.Linear(4, 3)
    with remote_model(weights) as (url, sizes):
        model = cascade(
            [Member(small, "small", price=0.1), Member(url, "remote", price=2.0)], example=torch.zeros(1, 4)
        )
        said = record(model, rows, progress=False)
        np.testing.assert_array_equal(said.predictions[:, 1], (rows @ weights).argmax(1))
        policy = Threshold(thresholds=(float(np.median(said.scores[:, 0])) + 1e-9,), costs=(0.1, 2.1), unit="USD")
        sizes.clear()
        decisions = Predictor(model, policy)(rows)
        assert sum(sizes) == (decisions.exits == 1).sum() == 30
        assert decisions.spent.sum() == pytest.approx(30 * 0.1 + 30 * 2.1)
        assert_replayed(decisions, replay(policy, said))


def test_a_remote_model_is_asked_again_once_and_then_named(tmp_path, monkeypatch):
    monkeypatch.setattr("alight.engine.backends.members.PAUSE", 0.0)
    rows = np.zeros((2, 4), np.float32)
    with remote_model(np.ones((4, 3), np.float32), failures=1) as (url, _):
        assert len(record(cascade([url], ["remote"]), rows, progress=False)) == 2
        saved = cascade([Member(url, "remote", price=1.0)]).save(tmp_path / "cascade")
        assert Cascade.load(saved).members[0].member.price == 1.0
    with (
        remote_model(np.ones((4, 3), np.float32), failures=3) as (url, _),
        pytest.raises(AlightError, match=r"gave no answer \(HTTP Error 503.*is it running"),
    ):
        record(cascade([url], ["remote"]), rows, progress=False)
    with pytest.raises(AlightError, match="gave no answer"):
        cascade([url], ["remote"])


def test_litert_runs_a_quantised_network(tmp_path):
    pytest.importorskip("ai_edge_litert", reason=LITERT)
    weights = write_litert(tmp_path / "tiny.tflite", np.random.default_rng(0))
    member = Member(tmp_path / "tiny.tflite", "tiny", settings=RunSettings(threads=1))
    model = cascade([member, Member(convolutions(16, 2), "large", image_size=16, normalisation=BARE)])
    said = record(model, pixels(), progress=False)
    small = model.views[0]((pixels(),))[0]
    assert small.dtype == np.uint8
    logits = small.mean(axis=(2, 3)) / 255 @ weights.T  # in floats: 8 bits round by a tenth of a logit
    ordered = np.sort(logits, axis=1)
    clear = ordered[:, -1] - ordered[:, -2] > 0.3
    assert clear.sum() > 20
    np.testing.assert_array_equal(said.predictions[clear, 0], logits.argmax(axis=1)[clear])
    shares = np.exp(ordered - ordered.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(said.scores[:, 0], shares[:, -1] - shares[:, -2], atol=0.08)
    loaded = Cascade.load(model.save(tmp_path / "cascade"))
    np.testing.assert_array_equal(record(loaded, pixels(), progress=False).scores, said.scores)
    (tmp_path / "broken.tflite").write_bytes(b"nothing of the kind")
    with pytest.raises(BadFile, match="LiteRT cannot load it"):
        litert_member(tmp_path / "broken.tflite")


def test_a_quantised_network_gets_its_images_normalised_where_its_member_says_so(tmp_path):
    pytest.importorskip("ai_edge_litert", reason=LITERT)
    weights = write_litert(tmp_path / "tiny.tflite", np.random.default_rng(0))  # takes 0..1 in 8 bits
    darker = Normalisation(mean=(0.1, 0.0, -0.1), std=(4.0, 8.0, 3.0))
    model = cascade([Member(tmp_path / "tiny.tflite", normalisation=darker), Member(tmp_path / "tiny.tflite", "bytes")])
    drawn = np.random.default_rng(1).integers(60, 256, (80, 3, 8, 8), dtype=np.uint8)  # no number below 0
    said = record(model, drawn, progress=False)
    mean, std = darker.by_channel
    for exit_index, given in enumerate(((drawn / 255 - mean) / std, drawn / 255)):
        likely = np.sort(functional.softmax(torch.from_numpy(given.mean(axis=(2, 3)) @ weights.T), 1).numpy(), axis=1)
        np.testing.assert_allclose(said.scores[:, exit_index], likely[:, -1] - likely[:, -2], atol=0.08)
    assert np.abs(said.scores[:, 0] - said.scores[:, 1]).min() > 0.16  # the two are not taken for each other
    loaded = Cascade.load(model.save(tmp_path / "cascade"))
    np.testing.assert_array_equal(record(loaded, drawn, progress=False).scores, said.scores)


def test_bytes_that_a_network_normalises_itself_are_not_normalised_again(tmp_path):
    kinds = onnx.TensorProto
    nodes = [onnx.helper.make_node("Cast", ["x"], ["a"], to=kinds.FLOAT)]
    nodes += [onnx.helper.make_node("GlobalAveragePool", ["a"], ["b"]), onnx.helper.make_node("Flatten", ["b"], ["y"])]
    given = onnx.helper.make_tensor_value_info("x", kinds.UINT8, ["samples", 3, 8, 8])
    made = onnx.helper.make_tensor_value_info("y", kinds.FLOAT, ["samples", 3])
    graph = onnx.helper.make_graph(nodes, "bytes", [given], [made])
    opset = onnx.helper.make_opsetid("", 17)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8), tmp_path / "bytes.onnx")
    assert cascade([tmp_path / "bytes.onnx"]).input_spec.tensors[0].dtype == "uint8"
    with pytest.raises(BadInput, match=r"bytes takes bytes, and its member says Normalisation.*leave it out"):
        cascade([Member(tmp_path / "bytes.onnx", normalisation=BARE)])


@pytest.mark.parametrize(
    ("networks", "terms", "message"),
    [
        ("small.onnx", {}, r"a str instead of networks: give a list, \[small, large\]"),
        (nn.Linear(4, 3), {}, "a Linear instead of networks"),
        ([], {}, "a cascade without networks"),
        ([nn.Linear(4, 3)], {}, "does not say what it takes"),
        ([nn.Linear(4, 3)] * 2, {"names": ["a"], "example": torch.zeros(1, 4)}, "1 names for 2 networks"),
        ([nn.Linear(4, 3)] * 2, {"names": ["a", "a"], "example": torch.zeros(1, 4)}, "a name of its own"),
        ([print], {}, "is not a network"),
        ([nn.Linear(4, 3), nn.Linear(4, 5)], {"example": torch.zeros(1, 4)}, "different numbers of classes"),
    ],
)
def test_what_is_not_a_cascade_is_refused(networks, terms, message):
    with pytest.raises(BadInput, match=message):
        cascade(networks, **terms)


def test_what_does_not_fit_together_is_refused():
    known, unknown = Member(onnx_file(), "one", normalisation=BARE), Member(onnx_file(), "two")
    with pytest.raises(BadInput, match=r"take different inputs .* normalisation of every network"):
        cascade([known, unknown])
    with pytest.raises(BadInput, match="leave image_size out"):
        cascade([Member(onnx_file(), normalisation=BARE, image_size=9)])
    with pytest.raises(BadInput, match="and its member says Normalisation"):
        cascade([Member(with_an_exit(), normalisation=BARE)])
    with pytest.raises(BadInput, match="crop 2"):
        Member(onnx_file(), crop=2.0)
    for terms in ({"skip_classes": -1}, {"image_size": 0}):
        with pytest.raises(
            BadInput, match="give 0 or more classes to leave out before the others, and 1 or more pixel"
        ):
            Member(onnx_file(), **terms)
    with pytest.raises(BadInput, match="for files and URLs"):
        cascade([Member(with_an_exit(), skip_classes=1)])
    with pytest.raises(FileNotFoundError, match="there is no nowhere"):
        cascade(["nowhere"])
    own = OneStage("own", lambda state: (state[0], ()), chain().members[0].spec, "0")
    with pytest.raises(BadInput, match="is a OneStage, which has no file"):
        cascade([own]).save("never")
    other = replace(outputs(), fingerprint="deadbeef")
    with pytest.raises(Mismatch, match="the recording is of deadbeef"):
        chain().take_outputs((0, 2), other)


def test_members_are_taken_in_any_order_with_their_recording():
    model, order = chain(), (2, 0)
    smaller, said = model.take(order), model.take_outputs(order, outputs())
    assert smaller.exits == said.exits == ("large", "tiny")
    assert said.fingerprint == smaller.fingerprint
    again = record(smaller, pixels(), progress=False)
    np.testing.assert_array_equal(again.predictions, said.predictions)
    assert again.fingerprint == said.fingerprint


def test_the_host_decides():
    policy = calibrate.eero(COSTS, "70%", outputs())
    assert Predictor(chain(), policy).decided_by == "the host decides"
    with pytest.raises(BadInput, match="the host decides which network of a cascade is next"):
        Predictor(chain(), policy, settings=RunSettings(decide="device"))


def test_a_metered_policy_is_for_a_router():
    policy = meter(Threshold(thresholds=(0.5,), costs=(1.0, 3.0), budget=2.0), [1.0, 2.0])
    with pytest.raises(BadInput, match=r"counts what every call really costs.*give it to alight.Router"):
        Predictor(cascade([nn.Linear(4, 3)] * 2, example=torch.zeros(1, 4)), policy)


def test_pictures_of_any_size_are_brought_to_the_size_that_is_kept(tmp_path):
    from PIL import Image

    pictures = [Image.fromarray(each.transpose(1, 2, 0)) for each in pixels()[:3]]
    policy = calibrate.eero(COSTS, "70%", outputs())
    found = Predictor(chain(), policy)
    assert_replayed(found(pictures), found(pixels()[:3], samples=np.arange(3)))
    large = [picture.resize((40, 32)) for picture in pictures]
    assert len(found(large)) == 3


def test_normalisation_is_that_of_the_network_alone():
    """What a network gets in a cascade is, to the bit, what it gets alone from pixels of its size."""
    alone = Predictor(with_an_exit(), ExitAt(costs=(1.0,), open_exits=(1,), num_exits=2))
    model = cascade([Member(with_an_exit(), "middle")], image_size=12)
    small = np.ascontiguousarray(pixels()[:, :, :12, :12])
    state = model.views[0]((small,))
    np.testing.assert_array_equal(state[0], alone.backend.admit(as_inputs_of(alone, small))[0].numpy())
    assert Normalisation((0.5,), (0.5,)).mean == (0.5,)


def as_inputs_of(predictor, batch):
    from alight.data.batches import as_inputs

    return as_inputs(batch, predictor.backend.inputs)


def recorded(url: str, rows: int = 4):
    return record(cascade([url], ["remote"]), np.eye(4, dtype=np.float32)[np.arange(rows) % 4], progress=False)


def test_an_output_of_a_remote_model_is_known_by_its_name():
    other = {"name": "x", "shape": [4, 3], "data": [9.0, 0.0, 0.0] * 4}
    with remote_model(np.eye(4, 3, k=-1, dtype=np.float32), outputs=lambda right: [other, *right]) as (url, _):
        assert recorded(url).predictions[:, 0].tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shape": [3, 4]}, r"numbers of shape \(3, 4\) for 4 samples, not one for each of 3 classes"),
        ({"shape": [4, 4], "data": [1.0] * 16}, r"shape \(4, 4\) for 4 samples, not one for each of 3 classes"),
        ({"data": ["a"] * 12}, "gave no 'y' of numbers"),
        ({"name": "z"}, "gave no 'y' of numbers"),
    ],
)
def test_answers_of_a_remote_model_that_do_not_fit_are_not_used(changed, message):
    wrong = {"outputs": lambda right: [right[0] | changed]}
    with remote_model(np.eye(4, 3, dtype=np.float32), **wrong) as (url, _), pytest.raises(AlightError, match=message):
        recorded(url)


def test_probabilities_of_a_remote_model_are_not_taken_for_logits():
    weights = np.array([[0.7, 0.2, 0.1]] * 4, np.float32)
    with remote_model(weights) as (url, _):
        with pytest.raises(
            BadInput, match=r"gives probabilities, not logits: say so, Member\(url, probabilities=True\)"
        ):
            recorded(url, 16)
        said = record(
            cascade([Member(url, probabilities=True)], ["remote"]), np.eye(4, dtype=np.float32), progress=False
        )
    assert said.scores[:, 0] == pytest.approx(0.5)


def test_one_number_for_a_sample_is_not_a_classifier(tmp_path):
    alone = write_onnx(tmp_path / "sigmoid.onnx", classes=1)
    with pytest.raises(BadInput, match=r"sigmoid.onnx gives numbers of shape \(16, 1\)"):
        cascade([alone])
    model = cascade([Member(alone, "alone", normalisation=BARE, probabilities=False)])
    with pytest.raises(BadInput, match=r"sigmoid.onnx gives numbers of shape \(3, 1\)"):
        record(model, pixels()[:3, :, :8, :8], progress=False)
    with remote_model(np.ones((4, 1), np.float32)) as (url, _), pytest.raises(BadInput, match="not a number for every"):
        cascade([url], ["remote"])


def test_a_file_of_free_sizes_is_tried_at_the_size_that_its_member_says(tmp_path):
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 20 * 20, CLASSES), nn.Softmax(-1))
    free = {"x": {0: "n", 2: "h", 3: "w"}, "y": {0: "n"}}
    terms = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": free, "dynamo": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network, (torch.zeros(2, 3, 20, 20),), str(tmp_path / "free.onnx"), **terms)
    with pytest.raises(
        BadInput, match=r"no random inputs of \(16, 3, 32, 32\).*Member\(network, probabilities=False\)"
    ):
        cascade([tmp_path / "free.onnx"])
    model = cascade([Member(tmp_path / "free.onnx", image_size=20, normalisation=BARE)], image_size=20)
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 20, 20), dtype=np.uint8)
    expected = network(torch.from_numpy(images).float() / 255).detach().sort().values
    said = record(model, images, progress=False)
    np.testing.assert_allclose(said.scores[:, 0], (expected[:, -1] - expected[:, -2]).numpy(), atol=1e-5)


def test_a_folder_with_other_files_is_not_replaced_by_a_cascade(tmp_path):
    model = cascade([Member(onnx_file(), "tiny", normalisation=BARE)])
    model.save(model.save(tmp_path / "cascade"))
    (tmp_path / "cascade" / "notes.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "cascade"):
        with pytest.raises(BadInput, match="holds other files, such as"):
            model.save(folder)
    assert (tmp_path / "cascade" / "notes.txt").read_text() == "mine"


def test_logits_are_not_taken_for_probabilities_though_a_member_says_so(tmp_path):
    path = write_onnx(tmp_path / "small.onnx")
    model = cascade([Member(path, normalisation=BARE, probabilities=True)])
    with pytest.raises(BadInput, match=r"small\.onnx gives numbers from -.* which are not probabilities"):
        record(model, pixels()[:4, :, :8, :8], progress=False)
    soft = cascade([Member(write_onnx(tmp_path / "soft.onnx", softmax=True), normalisation=BARE, probabilities=True)])
    assert len(record(soft, pixels()[:4, :, :8, :8], progress=False)) == 4


@pytest.mark.parametrize("name", ["lost.onnx", "lost.tflite", "lost"])
def test_a_network_that_is_not_there_is_named(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=f"there is no .*{name}: give a network of torch"):
        cascade([tmp_path / name])
