"""A network of lower precision: what is quantised, and that no policy of the original is taken for it."""

import copy
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from exported import folder, images, network, older_exporter, policy, table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from alight import (
    HeadOutputs,
    MultiExitModel,
    Predictor,
    RunSettings,
    calibrate,
    deploy,
    export_model,
    from_timm,
    record,
    replay,
)
from alight.costs import Costs
from alight.engine.backends import Reads, score_one
from alight.engine.backends.exported import exported_backend
from alight.engine.backends.onnx import OnnxBackend
from alight.engine.backends.openvino import PassedExits, quantised_stage
from alight.engine.manifest import Manifest
from alight.errors import BadFile, BadInput, LabelsNeeded, Mismatch
from alight.export.precision import FLOAT_HEAD, lower, put_policy
from alight.fitting import steps
from alight.fitting.deploying import Deployment, check_exits_kept, check_is_for, within_loss
from alight.fitting.steps import Goal
from alight.networks.heads import PooledLinear
from alight.networks.store import save_model
from alight.policies.policy import ExitAt, Threshold

ONE = RunSettings(threads=1)
OPENED = (0, 1, 3)


@pytest.fixture(scope="module")
def int8(tmp_path_factory):
    """The network of the other tests, quantised."""
    return lower(folder(), tmp_path_factory.mktemp("int8") / "int8", "int8", [(images()[:64],)])


@pytest.fixture
def quick():
    with older_exporter():
        yield


def graphs(place):
    return [onnx.load(place / stage.file).graph for stage in Manifest.load(place).stages]


def backend(place, settings=ONE, batch_size=None):
    return exported_backend(place, Manifest.load(place), settings, batch_size=batch_size)


def test_states_cross_as_bytes_with_channels_last_and_logits_stay_floats(int8):
    carried = [[(each.shape, each.dtype) for each in stage.carries] for stage in Manifest.load(int8).stages]
    assert carried[0] == [((None, 6, 7, 6), "uint8")]
    for graph in graphs(int8):
        makers = {name: node for node in graph.node for name in node.output}
        assert makers["logits"].op_type == "Gemm"
        kinds = [node.op_type for node in graph.node]
        assert kinds.count("Conv") >= 1
        assert all(
            makers[name].op_type == "DequantizeLinear"
            for node in graph.node
            if node.op_type == "Conv"
            for name in node.input[:2]
        )


def test_a_quantised_network_says_nearly_what_the_original_says(int8):
    found, expected = record(backend(int8), images(), progress=False), table().at_exits(OPENED)
    assert found.exits == tuple(network().exits[index] for index in OPENED)
    assert (found.predictions == expected.predictions).mean(axis=0).min() > 0.9
    assert 1e-4 < np.abs(found.scores - expected.scores).max() < 0.3


def test_no_policy_of_the_original_runs_on_the_quantised_network(int8):
    with pytest.raises(Mismatch, match="calibrated on outputs of the network"):
        Predictor.load(int8, settings=ONE)
    with pytest.raises(Mismatch, match="calibrated on outputs of the network"):
        put_policy(int8, policy())


def test_another_runtime_rounds_otherwise_and_is_refused(int8):
    pytest.importorskip("openvino")
    with pytest.raises(Mismatch, match="calibrated with onnxruntime in int8, and openvino rounds otherwise"):
        Predictor.load(int8, settings=RunSettings(runtime="openvino"))
    assert Predictor.load(folder(), settings=RunSettings(runtime="openvino", threads=1)).backend.name == "OpenVINO"


def logits_of(place, inputs, size):
    """Logits of all exits, the inputs run in batches of this size."""
    stages, found = backend(place, ONE, size).stages, []
    for start in range(0, len(inputs), size):
        state, rows = (inputs[start : start + size],), []
        for stage in stages:
            logits, state = getattr(stage, "run_one", stage)(state) if size == 1 else stage(state)
            rows.append(np.array(logits))
        found.append(np.stack(rows, axis=1))
    return np.concatenate(found)


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_every_sample_of_a_batch_gets_the_logits_that_it_gets_alone(runtime, tmp_path, quick):
    pytest.importorskip(runtime)
    torch.manual_seed(0)
    first, second = (nn.Sequential(nn.Conv2d(count, 8, 3, padding=1), nn.ReLU()) for count in (3, 8))
    model = MultiExitModel([first, second], [PooledLinear((8, 6, 7), 5) for _ in range(2)]).eval()
    pixels = np.random.default_rng(0).integers(0, 256, size=images().shape)
    pixels[0].flat[:2] = 0, 255
    inputs = (4 / 255 * pixels - 2).astype(np.float32)  # each lies in the middle between two bytes of the range
    example = torch.from_numpy(inputs[:2])
    source = export_model(model, Threshold((0.5,), costs=(1.0, 2.0)), tmp_path / "float", example=example)
    place = lower(source, tmp_path / "int8", "int8", [(inputs[:32],)], runtime=runtime)
    alone = logits_of(place, inputs, 1)
    assert np.abs(logits_of(source, inputs, 1) - alone).max() < 0.2 * np.abs(alone).max()
    for size in (7, 40, len(inputs)):
        assert (logits_of(place, inputs, size) == alone).all()


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_single_samples_get_the_same_from_memory_that_is_used_again(precision, runtime, tmp_path):
    pytest.importorskip(runtime)
    place = lower(folder(), tmp_path / "lower", precision, [(images()[:32],)], runtime=runtime)
    predictor = Predictor.load(place, settings=ONE, probabilities=True, allow_mismatch=True)
    inputs = images()[:60]
    numbers = np.arange(len(inputs))

    def answers(given):
        found = [predictor(one, [number]) for number, one in zip(numbers, given, strict=True)]
        return [(each.predictions[0], each.exits[0], each.probabilities[0]) for each in found]

    expected = answers(inputs[row : row + 1].copy() for row in numbers)
    assert len({left for _, left, _ in expected}) == len(OPENED)
    same = np.empty_like(inputs[:1])

    def written_over():
        for row in numbers:
            same[:] = inputs[row]
            yield same

    assert answers(written_over()) == expected
    turned = np.ascontiguousarray(inputs.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    assert answers(turned[row : row + 1] for row in numbers) == expected
    with ThreadPoolExecutor(3) as pool:
        assert all(each == expected for each in pool.map(lambda _: answers(inputs[:, None]), range(3)))
    with pytest.raises(BadInput, match="NaN"):
        predictor(np.full_like(same, np.nan))
    assert answers(inputs[:, None]) == expected


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_images_that_cannot_be_written_are_taken(runtime, tmp_path):
    pytest.importorskip(runtime)
    found = Predictor.load(folder(), settings=RunSettings(threads=1, runtime=runtime))
    expected = found(images())
    np.save(tmp_path / "images.npy", images())
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    assert (found(mapped).predictions == expected.predictions).all()
    assert found(mapped[3:4]).predictions[0] == expected.predictions[3]


def test_openvino_runs_a_transformer_in_int8_one_by_one_and_in_batches(tmp_path):
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    model = from_timm("test_vit", num_classes=5, count=1)
    pictures = np.random.default_rng(0).normal(size=(12, *model.input_spec.image_shape)).astype(np.float32)
    never = Threshold((np.inf,), costs=(1.0, 2.0), open_exits=(0, 1))
    source = export_model(model, never, tmp_path / "float", progress=False)
    place = lower(source, tmp_path / "int8", "int8", [(pictures,)], runtime="openvino")
    alone = logits_of(place, pictures, 1)
    for size in (4, 5):
        assert np.abs(logits_of(place, pictures, size) - alone).max() < 0.05 * np.abs(alone).max()


class Beside(nn.Module):
    """A convolution, and then what OpenVINO 2026.4 computes otherwise than its quantised graph says."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.convolution = kind, nn.Conv2d(3, 6, 3)
        self.convolution.bias.data = torch.linspace(-2, 2, 6)
        self.token, self.further = nn.Parameter(torch.randn(1, 1, 6)), nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, images):
        features = self.convolution(images)
        if self.kind == "token":
            tokens = torch.cat([self.token.expand(features.shape[0], -1, -1), features.flatten(2).transpose(1, 2)], 1)
            return tokens.transpose(1, 2)[..., None]
        if self.kind == "pool":
            return self.further(nn.functional.avg_pool2d(features, 3, 1, 1))
        return self.further(features) + nn.functional.pad(features[:, :3], (0, 0, 0, 0, 1, 2))


@pytest.mark.parametrize("kind", ["token", "pool", "shortcut"])
def test_a_stage_that_openvino_computes_otherwise_than_it_is_quantised_stays_in_float(kind, tmp_path, quick):
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    stages = [Beside(kind), nn.Sequential(nn.Conv2d(6, 6, 1), nn.ReLU())]
    model = MultiExitModel(stages, [PooledLinear((6, 4, 5), 5) for _ in range(2)]).eval()
    example = torch.from_numpy(images()[:2])
    source = export_model(model, Threshold((0.5,), costs=(1.0, 2.0)), tmp_path / "float", example=example)
    place = lower(source, tmp_path / "int8", "int8", [(images()[:64],)], runtime="openvino")
    assert [stage.precision for stage in Manifest.load(place).stages] == ["float32", "int8"]
    expected = logits_of(source, images(), 50)
    for size in (1, 50):
        assert np.abs(logits_of(place, images(), size) - expected).max() < 0.05 * np.abs(expected).max()


class Codes(nn.Module):
    """A stage with one table for two columns of codes, as of tabular data."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, codes):
        return self.table(codes + torch.tensor([0, 5])).flatten(1)


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_a_code_whose_row_the_table_lacks_is_refused_alone_and_in_a_batch(runtime, tmp_path, quick):
    pytest.importorskip(runtime)
    model = MultiExitModel([Codes(), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)]).eval()
    example = torch.zeros(2, 2, dtype=torch.int64)
    place = export_model(model, Threshold((0.1,), costs=(1.0, 2.0)), tmp_path / "float", example=example)
    predictor = Predictor.load(place, settings=RunSettings(threads=1, runtime=runtime))
    codes = np.arange(5)[:, None].repeat(2, axis=1)
    expected = predictor(codes)
    for size in (1, 5):
        with pytest.raises(
            BadInput, match=r"indices element out of data bounds|the index 12, and the network's table has"
        ):
            predictor(np.full((size, 2), 7))
        assert (predictor(codes).predictions == expected.predictions).all()


class Backwards(nn.Module):
    """A stage that counts a position back from another, as tokens that are padded on the left are counted."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 8)

    def forward(self, codes):
        places = 1 + codes[:, 0] - codes[:, 1]
        return torch.embedding(self.table.weight, codes[:, 0]) + self.table(places)


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("exporter", [nullcontext, older_exporter])
def test_a_computed_index_below_zero_is_refused_as_the_network_refuses_it(exporter, runtime, tmp_path):
    pytest.importorskip(runtime)
    model = MultiExitModel([Backwards(), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)]).eval()
    example = torch.zeros(2, 2, dtype=torch.int64)
    with exporter():
        place = export_model(model, Threshold((0.1,), costs=(1.0, 2.0)), tmp_path / "float", example=example)
    predictor = Predictor.load(place, settings=RunSettings(threads=1, runtime=runtime))
    with pytest.raises(IndexError):
        model(torch.tensor([[1, 3]]))
    for size in (1, 3):
        with pytest.raises(BadInput, match=r"indices element out of data bounds|an input leads to the index 10"):
            predictor(np.array([[1, 3]]).repeat(size, axis=0))
    kept = np.array([[9, 1], [3, 4]])
    assert (predictor(kept).predictions == Predictor(model, predictor.policy)(kept).predictions).all()


def test_a_run_that_fails_in_openvino_raises_instead_of_giving_the_answers_of_the_last_one():
    pytest.importorskip("openvino")
    takes, tensor = ("left", "right"), onnx.helper.make_tensor_value_info
    inputs, made = [tensor(name, 1, [None, None]) for name in takes], tensor("logits", 1, [None, None])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", takes, ["logits"])], "sum", inputs, [made])
    opset = onnx.helper.make_opsetid("", 18)
    content = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=9).SerializeToString()
    stage = quantised_stage(content, "sum", takes)
    ones = np.ones((2, 3), np.float32)
    assert (stage((ones, ones))[0] == 2).all()
    with pytest.raises(BadInput, match=r"cannot take these 2 samples \(\[CPU\] Add node with name 'logits'"):
        stage((ones, np.ones((2, 5), np.float32)))
    assert (stage((ones, 5 * ones))[0] == 6).all()


class Passing(nn.Module):
    """A stage that hands two of its inputs on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, numbers, counts, scale):
        return self.linear(numbers) * scale, counts, scale


def test_openvino_takes_what_a_stage_does_not_read(tmp_path):
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    names = ("numbers", "counts", "scale")
    example = dict(zip(names, (torch.randn(40, 8), torch.arange(40)[:, None], torch.rand(40, 1) + 1), strict=True))
    model = MultiExitModel([Passing(), Passing()], [nn.Linear(8, 3), nn.Linear(8, 3)], input_names=names).eval()
    place = export_model(model, Threshold((0.1,), costs=(1.0, 2.0)), tmp_path / "float", example=example)
    inputs = {name: each.numpy() for name, each in example.items()}
    settings = [RunSettings(threads=1, runtime=each) for each in ("onnxruntime", "openvino")]
    one, other = (Predictor.load(place, settings=each)(inputs) for each in settings)
    assert (one.predictions == other.predictions).all()
    assert {*other.exits.tolist()} == {0, 1}
    again = Predictor.load(place, settings=settings[1])(inputs | {"counts": inputs["counts"].astype(np.longlong)})
    assert (again.exits == other.exits).all()  # ONNX Runtime gives such arrays


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_bytes_of_clipped_activations_range_over_what_is_left_of_them(runtime, tmp_path, quick):
    pytest.importorskip(runtime)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(count, 8, 3, padding=1), nn.ReLU6()) for count in (3, 8, 8)]
    for layer in layers:
        layer[0].weight.data *= 20  # most numbers are clipped
    model = MultiExitModel(
        [layers[0], nn.Sequential(*layers[1:])], [PooledLinear((8, 6, 7), 5) for _ in range(2)]
    ).eval()
    never = Threshold((np.inf,), costs=(1.0, 2.0))
    source = export_model(model, never, tmp_path / "float", example=torch.from_numpy(images()[:2]))
    place = lower(source, tmp_path / "int8", "int8", [(images()[:32],)], runtime=runtime)
    assert not {node.op_type for graph in graphs(place) for node in graph.node} & {"Clip", "Relu"}
    exact, found = logits_of(source, images(), 40), logits_of(place, images(), 40)
    assert np.abs(found - exact).max() < 0.05 * np.abs(exact).max()


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, features):
        return torch.relu(self.other(torch.relu(self.one(features))) + features)


class Rows(nn.Module):
    """A product with every row of an image: no convolution made what it gives."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, features):
        return self.linear(features) + features


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_openvino_hands_images_of_convolutions_on_with_channels_last(precision, tmp_path, quick):
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
    stages = [first, Residual(), nn.Sequential(Residual(), Rows()), Residual()]
    model = MultiExitModel(stages, [PooledLinear((8, 6, 7), 5) for _ in stages]).eval()
    never = Threshold((np.inf,) * 3, costs=(1.0, 2.0, 3.0, 4.0))
    source = export_model(model, never, tmp_path / "float", example=torch.from_numpy(images()[:2]))
    places = [
        lower(source, tmp_path / runtime, precision, [(images()[:32],)], runtime=runtime)
        for runtime in ("onnxruntime", "openvino")
    ]
    shapes, state = [], (images()[:1],)
    openvino = backend(places[1])
    for index in range(len(stages) - 1):
        state = openvino.run_one(index, state)[1]
        shapes.append(tuple(state[0].shape))
    last = (1, 8, 6, 7) if precision == "float32" else (1, 6, 7, 8)  # as it is made, or as bytes
    assert shapes == [(1, 6, 7, 8), (1, 6, 7, 8), last]
    expected, found = (logits_of(place, images(), 1) for place in places)
    assert np.abs(found - expected).max() < (1e-5 if precision == "float32" else 0.1) * np.abs(expected).max()
    if precision == "float32":
        exact = torch.stack(model(torch.from_numpy(images())), dim=1).detach().numpy()
        assert np.abs(found - exact).max() < 1e-5 * np.abs(exact).max()
    for size in (16, 7):
        assert np.abs(logits_of(places[1], images(), size) - found).max() < 1e-5 * np.abs(found).max()


@pytest.fixture(scope="module", params=["float32", "int8"])
def four_exits(request, tmp_path_factory):
    """Four stages of convolutions for OpenVINO, and what its exits give for every image alone."""
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    first, place = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()), tmp_path_factory.mktemp("ahead")
    model = MultiExitModel([first, *(Residual() for _ in range(3))], [PooledLinear((8, 6, 7), 5) for _ in range(4)])
    never = Threshold((np.inf,) * 3, costs=(1.0, 2.0, 3.0, 4.0))
    with older_exporter():
        source = export_model(model.eval(), never, place / "float", example=torch.from_numpy(images()[:2]))
    lowered = lower(source, place / "lower", request.param, [(images()[:32],)], runtime="openvino")
    return lowered, logits_of(lowered, images(), 1)


def between(scores):
    """The middle of the widest gap among the larger scores: no rounding crosses it."""
    largest = np.sort(scores)[-30:-5]
    place = np.diff(largest).argmax()
    return float(largest[place : place + 2].mean())


@pytest.mark.parametrize("score", ["margin", "max_probability"])
@pytest.mark.parametrize("wrongly", [None, -np.inf, np.inf])
def test_single_samples_that_openvino_runs_ahead_are_decided_as_stage_by_stage(four_exits, score, wrongly):
    place, logits = four_exits
    values = [[score_one(row[None], Reads((score,))) for row in each] for each in logits]
    scores = np.array([[each.columns[0] for each in row] for row in values])
    rule = Threshold(tuple(map(between, scores.T[:3])), costs=(1.0, 2.0, 3.0, 4.0), score=score)
    decided = replay(rule, HeadOutputs(scores, logits.argmax(-1), score=score))
    assert len({*decided.exits}) == 4
    predictor = Predictor(backend(place), rule)
    if wrongly is not None:
        predictor.backend.expect([wrongly] * 3)
    for row, sample in enumerate(np.split(images(), len(images()))):
        found = predictor(sample, [row])
        assert (found.exits, found.predictions) == (decided.exits[row], decided.predictions[row])
        one, state = predictor.backend.run_one(0, (sample,))
        passed = {None: decided.exits[row] + 1, -np.inf: 1, np.inf: 4}[wrongly]
        assert len(state[0].logits) == passed
        largest = [one.largest]
        for stage in range(1, 4):
            one, state = predictor.backend.run_one(stage, state)
            largest.append(one.largest)
        assert largest == logits[row].max(-1).tolist()  # to the bit


@pytest.mark.parametrize("why", ["other logits", "refused"])
def test_samples_do_not_run_ahead_where_the_joined_model_is_refused_or_gives_other_logits(four_exits, why, monkeypatch):
    import alight.engine.backends.openvino as engine

    def refuse(logits):
        raise RuntimeError("no such operation")

    place, logits = four_exits
    if why == "refused":
        monkeypatch.setitem(engine.SCORES, "margin", refuse)
    else:
        monkeypatch.setattr(engine, "relative_gap", lambda found, wanted: np.nan)
    ran = backend(place).with_reads([Reads(("margin",))] * 4)
    ran.expect([np.inf] * 3)
    state = (images()[:1],)
    for stage in range(4):
        one, state = ran.run_one(stage, state)
        assert one.largest == logits[0, stage].max()
        assert not any(isinstance(each, PassedExits) for each in state)


def test_stages_that_compute_otherwise_than_where_they_were_exported_are_refused(int8, tmp_path):
    shutil.copytree(int8, tmp_path / "copied")
    path = tmp_path / "copied" / "manifest.json"
    content = json.loads(path.read_text())
    content["stages"][1]["probe"][0] += 1.0
    path.write_text(json.dumps(content))
    with pytest.raises(
        Mismatch, match=r"other logits here than where it was exported \(by .* at exit 1, 0.05 allowed\)"
    ):
        backend(tmp_path / "copied")


class MaskedClass(nn.Module):
    """A head that can never give its last class."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, -1e9]))

    def forward(self, features):
        return self.layer(features) + self.mask


def test_logits_beside_a_masked_class_are_compared_where_they_run(tmp_path):
    model = MultiExitModel([nn.Linear(5, 6), nn.Linear(6, 6)], [MaskedClass(), MaskedClass()]).eval()
    rule = Threshold((0.5,), costs=(1.0, 2.0))
    with older_exporter():
        place = export_model(model, rule, tmp_path / "masked", example=torch.randn(2, 5), progress=False)
    Predictor.load(place, settings=ONE)
    path = place / "manifest.json"
    content = json.loads(path.read_text())
    content["stages"][0]["probe"][0] += 1.0
    path.write_text(json.dumps(content))
    with pytest.raises(Mismatch, match="other logits here than where it was exported"):
        Predictor.load(place, settings=ONE)


def test_weights_of_16_bits_halve_the_files_and_keep_the_scores(tmp_path):
    place = lower(folder(), tmp_path / "half", "float16", [])
    found = record(backend(place), images(), progress=False)
    assert np.abs(found.scores - table().at_exits(OPENED).scores).max() < 5e-3
    names = [each.name for each in graphs(place)[2].initializer if each.data_type == onnx.TensorProto.FLOAT16]
    assert names
    assert Manifest.load(place).fingerprint != Manifest.load(folder()).fingerprint


def test_a_weight_that_16_bits_cannot_hold_is_refused(tmp_path, quick):
    model = MultiExitModel([nn.Linear(4, 128)], [nn.Linear(128, 3)]).eval()
    model.stages[0].weight.data[0, 0] = 1e6
    place = export_model(model, ExitAt(costs=(1.0,)), tmp_path / "float", example=torch.zeros(1, 4))
    with pytest.raises(BadInput, match="a weight of 1e\\+06 is too large for float16"):
        lower(place, tmp_path / "half", "float16", [])
    assert not (tmp_path / "half").exists()


def test_bf16_is_for_openvino(tmp_path):
    with pytest.raises(BadInput, match="onnxruntime has no bf16 arithmetic on processors: choose runtime='openvino'"):
        lower(folder(), tmp_path / "bf16", "bfloat16", [])
    openvino = pytest.importorskip("openvino")
    if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this processor has no bf16")
    place = lower(folder(), tmp_path / "bf16", "bfloat16", [], runtime="openvino")
    gaps = np.abs(record(backend(place), images(), progress=False).scores - table().at_exits(OPENED).scores)
    assert 1e-5 < gaps.max() < 0.1
    assert (logits_of(place, images(), 1) == logits_of(place, images(), 16)).all()


def test_ranges_are_those_of_what_the_network_takes(tmp_path):
    pixels = np.zeros((20, 3, 6, 7), np.uint8)
    with pytest.raises(BadInput, match=r"samples of uint8, and the network takes input_0 .* give them normalised"):
        lower(folder(), tmp_path / "int8", "int8", [(pixels,)])
    assert not (tmp_path / "int8").exists()


def test_a_precision_that_is_not_known_is_refused(tmp_path):
    with pytest.raises(BadInput, match="there is no precision 'int3': choose float32, int8"):
        lower(folder(), tmp_path / "int3", "int3", [])


# deploy


def labelled():
    """Images and the classes that the whole network gives them, so that accuracy means something."""
    return images(), table().predictions[:, -1]


def calibrated(contract=calibrate.certified_probability):
    costs = Costs([1.0, 1.5, 0.5, 3.0], [0.0, 0.0, 0.0, 0.0], unit="FLOPs")
    fitted = contract(calibrate.eero)(costs.at_exits(OPENED), "80%", table().at_exits(OPENED))
    return fitted.renumbered(OPENED, num_exits=4, exits=network().exits, full_cost=costs.full)


def test_a_policy_is_calibrated_again_on_what_was_quantised(tmp_path, quick):
    before = calibrated()
    made = deploy(network(), labelled(), tmp_path / "int8", policy=before, settings=ONE, progress=False)
    predictor = made.predictor(settings=ONE)
    own = predictor.policy
    assert (own.open_exits, own.method, own.certificate.contract) == (OPENED, "eero", "probability")
    assert own.fingerprint == Manifest.load(tmp_path / "int8").fingerprint != before.fingerprint
    assert own.thresholds != before.thresholds
    assert own.budget / own.full_cost == pytest.approx(0.8)
    assert made.levels == ("int8",) * 3
    assert len(made.before) == len(made.after) == len(made.times) == 3
    assert "accuracy, float32" in str(made)
    assert "Guaranteed with 95 % confidence" in str(made)
    assert f"accuracies are of all {len(images())} labelled samples, which chose and calibrated this" in str(made)

    recorded = record(predictor.backend, images(), progress=False)
    walked = replay(Threshold(own.thresholds, own.tie_shares, costs=own.costs, salt=own.salt), recorded)
    decided = predictor(images(), np.arange(len(images())))
    assert (np.array(OPENED)[walked.exits] == decided.exits).all()
    assert (walked.predictions == decided.predictions).all()


class Wide(nn.Module):
    """A stage whose numbers bytes cannot hold: what matters is a millionth of its largest number."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, numbers):
        made = self.linear(numbers)
        return torch.cat([made, 1e6 * made[:, :1].abs()], dim=1)


def test_a_stage_that_loses_too_much_stays_in_float(tmp_path, quick):
    torch.manual_seed(0)
    last = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 8))
    heads = [nn.Linear(9, 3), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))]
    recipe = {"source": "stages", "example": {"shape": [2, 8], "dtype": "float32"}}
    model = MultiExitModel([Wide(), last], heads, recipe=recipe).eval()
    with torch.no_grad():
        heads[0].weight[:, 8] = 0.0
        last[0].weight[:, 8] = 0.0
        numbers = torch.randn(240, 8)
        for layer, logits in zip((heads[0], heads[1][2]), model(numbers), strict=True):
            layer.bias -= logits.mean(dim=0)  # so that every class is answered
        classes = model(numbers)[-1].argmax(-1)
    made = deploy(model, (numbers, classes), tmp_path / "mixed", budget="95%", settings=ONE, progress=False)
    assert "float32" in made.levels
    assert made.before[-1] - made.after[-1] < 0.05
    assert FLOAT_HEAD not in made.levels[-1:]  # the last stage has no head of its own


def test_what_cannot_be_repeated_or_is_not_labelled_is_refused(tmp_path, quick):
    by_hand = Threshold((0.5, 0.5), costs=(1.0, 2.0, 3.0), open_exits=OPENED, num_exits=4, unit="FLOPs")
    with pytest.raises(BadInput, match="fitted by hand, which is not a method that can be repeated"):
        deploy(network(), labelled(), tmp_path / "int8", policy=by_hand, settings=ONE, progress=False)
    with pytest.raises(LabelsNeeded):
        deploy(network(), images(), tmp_path / "int8", budget="80%", settings=ONE, progress=False)
    with pytest.raises(BadInput, match="a policy has its own budget"):
        deploy(network(), labelled(), tmp_path / "int8", policy=by_hand, budget="80%", progress=False)
    assert not (tmp_path / "int8").exists()


@pytest.mark.parametrize("budget", ["0.1%", "1 FLOP", "half"])
def test_a_budget_that_no_exit_keeps_is_refused_before_anything_is_written(budget, tmp_path, capsys):
    with pytest.raises(BadInput, match=r"below the cheapest exit \(|is not a number, percentage or quantity"):
        deploy(network(), labelled(), tmp_path / "int8", budget=budget, settings=ONE)
    assert "deploy:" not in "".join(capsys.readouterr())


def test_providers_are_those_of_the_installed_runtime(int8):
    with pytest.raises(BadInput, match=r"this onnxruntime has no provider 'tensorrt': choose among .*cpu"):
        backend(folder(), RunSettings(providers=("tensorrt",)))
    assert len(backend(folder(), RunSettings(threads=1, providers=("cpu",))).stages) == 3
    assert len(backend(int8, RunSettings(threads=1, providers=("CPUExecutionProvider",))).stages) == 3
    with pytest.raises(BadInput, match="this onnxruntime has no provider 'foo': choose among "):
        backend(int8, RunSettings(providers=("foo",)))
    for wrong in ("cpu", (("cuda", {"device_id": 0}),)):
        with pytest.raises(BadInput, match=r"providers .*: give their names, as \('cuda',\)"):
            RunSettings(providers=wrong)


def test_a_policy_of_lower_precision_holds_for_its_providers_alone(tmp_path):
    other = next((each for each in onnxruntime.get_available_providers() if not each.startswith("CPU")), None)
    if other is None:
        pytest.skip("needs a provider beside the CPU")
    name = other.removesuffix("ExecutionProvider").lower()
    place = lower(folder(), tmp_path / "half", "float16", [], providers=[name])
    assert backend(place).settings.providers == (name,)
    with pytest.raises(Mismatch, match=f"calibrated by {name}, cpu, and cpu rounds otherwise"):
        backend(place, RunSettings(providers=("cpu",)))


def test_data_that_change_when_they_are_read_again_are_refused(tmp_path, quick):
    inputs, classes = (torch.as_tensor(each) for each in labelled())
    shuffled = DataLoader(TensorDataset(inputs, classes), 50, shuffle=True)
    terms = {"budget": "80%", "settings": ONE, "progress": False}
    with pytest.raises(BadInput, match=r"another order .* give a loader that does not shuffle"):
        deploy(network(), shuffled, tmp_path / "int8", **terms)
    with pytest.raises(BadInput, match="can be read only once"):
        deploy(network(), iter([(inputs, classes)]), tmp_path / "int8", **terms)
    with pytest.raises(BadInput, match="runs without PyTorch: choose runtime='onnxruntime'"):
        deploy(network(), labelled(), tmp_path / "int8", **terms | {"settings": RunSettings(runtime="torch")})
    assert not (tmp_path / "int8").exists()


def test_an_engine_that_answers_otherwise_in_batches_is_refused(tmp_path, quick, monkeypatch):
    run = OnnxBackend.run

    def last_row_is_wrong(self, stage, state):
        values, others = run(self, stage, state)
        values.largest[16:] *= 3
        return values, others

    monkeypatch.setattr(OnnxBackend, "run", last_row_is_wrong)
    with pytest.raises(Mismatch, match=r"onnxruntime in int8 gives a sample .* alone and .* in a batch"):
        deploy(network(), labelled(), tmp_path / "int8", budget="80%", settings=ONE, progress=False)


def test_a_damaged_stage_is_refused_by_openvino_too(tmp_path):
    pytest.importorskip("openvino")
    shutil.copytree(folder(), tmp_path / "copied")
    (tmp_path / "copied" / "stage_1.onnx").write_bytes(b"nonsense")
    with pytest.raises(BadFile, match="changed or damaged"):
        backend(tmp_path / "copied", RunSettings(runtime="openvino"))


DROPPED = """
import signal, subprocess, sys, threading
from pathlib import Path
from alight import RunSettings
from alight.engine.backends.exported import exported_backend
from alight.engine.backends.onnx import OnnxBackend
from alight.engine.backends.openvino import quantised_stage
from alight.engine.manifest import Manifest

place = Path(sys.argv[1])
kept = [exported_backend(place, Manifest.load(place), RunSettings(threads=1, runtime="openvino"))]
kept[0].run(0, kept[0].admit((__import__("numpy").load(sys.argv[2]),)))
dropping = threading.Thread(target=kept.clear)
dropping.start()
dropping.join()
signal.signal(signal.SIGCHLD, lambda *_: None)  # as PyTorch's loaders do
subprocess.run([sys.executable, "-c", ""])
"""


def test_a_network_of_openvino_that_another_thread_drops_leaves_the_process_alive(tmp_path):
    pytest.importorskip("openvino")
    np.save(tmp_path / "images.npy", images()[:2])
    command = [sys.executable, "-X", "faulthandler", "-c", DROPPED, folder(), tmp_path / "images.npy"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_ends_before_the_last_exit_is_compared_with_the_full_network_in_one_piece(tmp_path, quick):
    costs = Costs([1.0, 1.5, 0.5, 3.0], [0.0, 0.0, 0.0, 0.0], unit="FLOPs")
    fitted = calibrate.eero(costs.at_exits((0, 1)), 2.0, table().at_exits((0, 1)))
    early = fitted.renumbered((0, 1), num_exits=4, exits=network().exits, full_cost=costs.full)
    work = Deployment(network(), labelled(), "int8", ONE, 1, tmp_path, progress=False)
    made = work.deployed(tmp_path / "early", early)
    place, said = work.made[(3,)]
    assert (len(Manifest.load(place).stages), Manifest.load(place).open_exits) == (1, (3,))
    alone = Predictor.load(place, settings=ONE, allow_mismatch=True)(images())
    assert made.full_accuracy == (alone.predictions == labelled()[1]).mean() == said.correct().mean()
    assert made.full_accuracy > made.decisions.accuracy() + 0.1
    assert f"full network in this precision: {100 * made.full_accuracy:.1f} %, " in str(made)
    assert made.float_time > 0
    slower = replace(made, clocked=np.array([[1.0, 2.0, 1e-9]]))
    assert "Lower precision is not worth it here: the full network in float32 is faster; deploy that." in str(slower)
    assert "points of accuracy are lost at this budget: raise it, or ask for max_accuracy_loss" in str(made)


def test_an_early_exit_that_is_as_good_as_the_last_is_opened_for_a_largest_loss():
    rng = np.random.default_rng(0)
    truth = rng.integers(5, size=600)
    right = np.where(rng.random(600) < 0.95, truth, (truth + 1) % 5)
    predictions = np.stack([rng.integers(5, size=600), right, right, right], axis=1)
    outputs = HeadOutputs(rng.random((600, 4)), predictions, truth, exits=network().exits)
    costs = Costs([1.0, 1.0, 1.0, 3.0], [0.1] * 4, "ms")
    chosen = within_loss(costs, 0.02, outputs, network().exits)
    assert chosen.open_exits[-1] == 3  # with which accuracy is compared
    assert replay(chosen, outputs).mean_cost < 0.6 * costs.full
    assert chosen.certificate.numbers["alpha"] == 0.02


def test_samples_that_certify_a_risk_do_not_also_close_exits_of_what_is_exported():
    """Once more for each exit that is closed: what should fail in 2 % of calibrations failed in 4 %."""
    rng, costs = np.random.default_rng(0), Costs([2.0] * 6, [0.05] * 6, unit="FLOPs")
    right = rng.random((600, 6)) >= [0.3, 0.3, 0.3, 0.3, 0.3, 0.02]
    outputs = HeadOutputs(rng.random((600, 6)), 1 - right, np.zeros(600, int))
    error, cost = calibrate.certified_risk, calibrate.certified_probability
    made = error(calibrate.two_exits, risk="error", alpha=0.12)(costs, None, outputs)
    assert len(made.open_exits) == 2
    with pytest.raises(BadInput, match=r"two_exits opens 2 of 6 exits by the samples that certify its error, so that"):
        check_exits_kept(made, tuple(range(6)))
    check_exits_kept(cost(calibrate.two_exits)(costs, "60%", outputs), tuple(range(6)))  # which others chose
    check_exits_kept(error(calibrate.best_single_exit, risk="error", alpha=0.06)(costs, None, outputs), (0, 5))


def test_as_many_samples_as_calibrate_choose_the_method(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(steps, "LEAST_LABELS", round(0.6 * len(images())))  # more than those that choose exits
    work = Deployment(network(), labelled(), "int8", ONE, 1, tmp_path, progress=False)
    used = []
    monkeypatch.setitem(
        calibrate.METHODS, "auto", lambda *given, **own: used.append(1) or calibrate.eero(*given, **own)
    )
    work.chosen(Goal("80%"))
    assert used == [1]


def test_too_few_samples_are_said_as_they_were_given(tmp_path, quick):
    few = tuple(each[:5] for each in labelled())
    with pytest.raises(BadInput, match=r"5 labelled samples, of which .* give at least 12, better 1,000"):
        deploy(network(), few, tmp_path / "int8", budget="80%", settings=ONE, progress=False)
    few = tuple(each[:40] for each in labelled())
    with pytest.warns(UserWarning, match="40 labelled samples, of which a third choose .*: accuracies are rough"):
        Deployment(network(), few, "int8", ONE, 1, tmp_path, progress=False)


def test_labels_numbered_otherwise_are_said_once_before_anything_is_exported(tmp_path, quick):
    truth = table().predictions[:, -1]
    with pytest.warns(UserWarning, match="and with classes in another order 100.0%") as found:
        Deployment(network(), (images(), (truth + 1) % network().num_classes), "int8", ONE, 1, tmp_path, progress=False)
    assert len(found) == 1


def test_names_of_labels_become_those_of_the_deployed_network(tmp_path, quick):
    model = copy.deepcopy(network())
    model.classes = ()
    names = np.array([f"class {chr(97 + index)}" for index in range(model.num_classes)])
    data = images(), [*names[table().predictions[:, -1]]]
    assert {*data[1]} == {*names}
    made = deploy(model, data, tmp_path / "named", budget="90%", precision="float16", settings=ONE, progress=False)
    assert Manifest.load(made.folder).classes == tuple(names)
    assert model.classes == ()


@pytest.mark.parametrize("given", ["network", "thesis.tex"])
def test_a_folder_that_holds_something_else_is_not_replaced(given, tmp_path, quick):
    (tmp_path / "mine").mkdir()
    if given == "network":
        save_model(network(), tmp_path / "mine")
    else:
        (tmp_path / "mine" / given).write_text("chapter one")
    before = {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()}
    with pytest.raises(BadInput, match=r"mine holds .*, which would be lost: give a new folder"):
        deploy(network(), labelled(), tmp_path / "mine", budget="80%", settings=ONE, progress=False)
    with pytest.raises(BadInput, match=r"mine holds .*, which would be lost: give a new folder"):
        lower(folder(), tmp_path / "mine", "float16", [])
    assert {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()} == before


def test_settings_and_weights_that_exports_do_not_have_are_refused_before_any_work(tmp_path):
    terms = {"budget": "80%", "progress": False}
    with pytest.raises(BadInput, match="a deployed network is exported, and compile is for networks that were not"):
        deploy(network(), labelled(), tmp_path / "int8", settings=RunSettings(compile=True), **terms)
    half = copy.deepcopy(network()).half()
    with pytest.raises(BadInput, match=r"weights are torch\.float16: export it in float32, as model\.float\(\)"):
        deploy(half, labelled(), tmp_path / "int8", settings=ONE, **terms)
    with pytest.raises(BadInput, match="batch size 0: give 1 or more"):
        deploy(network(), labelled(), tmp_path / "int8", batch_size=0, settings=ONE, **terms)


class Deconvolution(nn.Module):
    """Transposed convolutions in groups, of which ONNX Runtime's quantiser knows none."""

    def __init__(self, channels):
        super().__init__()
        self.layer = nn.ConvTranspose2d(channels, 6, 3, padding=1, groups=3)

    def forward(self, values):
        return torch.relu(self.layer(values))


def test_transposed_convolutions_in_groups_stay_in_float(tmp_path, quick):
    torch.manual_seed(0)
    model = MultiExitModel([Deconvolution(3), Deconvolution(6)], [PooledLinear((6, 6, 7), 5) for _ in range(2)]).eval()
    example = torch.from_numpy(images()[:2])
    source = export_model(model, Threshold((0.5,), costs=(1.0, 2.0)), tmp_path / "float", example=example)
    place = lower(source, tmp_path / "int8", "int8", [(images()[:32],)])
    found, expected = logits_of(place, images(), 16), logits_of(source, images(), 16)
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"samples": []}, "the ranges of int8 are those of samples, and there are none"),
        ({"samples": [(images()[:8] * np.float32("nan"),)]}, "a sample holds NaN, infinity or a negative index"),
        ({"samples": [(images()[:8, :, :, :3],)]}, r"an array of shape \(8, 3, 6, 3\), and the network takes"),
        ({"levels": ["int8"]}, "1 levels for 3 stages: give each stage one of int8; int8, head float32; float32"),
        ({"levels": ["int8", "int4", "int8"]}, "there is no level 'int4'"),
        ({"runtime": "tflite"}, "'tflite' does not run exported stages: choose onnxruntime or openvino"),
    ],
)
def test_what_cannot_be_quantised_is_refused_with_a_sentence(given, message, tmp_path):
    with pytest.raises(BadInput, match=message):
        lower(
            **{
                "source": folder(),
                "folder": tmp_path / "int8",
                "precision": "int8",
                "samples": [(images()[:8],)],
                **given,
            }
        )
    assert not (tmp_path / "int8").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(providers=True),
        lambda content: content.update(providers=[3]),
        lambda content: content["stages"][1].update(probe=[]),
    ],
)
def test_a_damaged_manifest_is_refused_with_its_name(change, tmp_path):
    shutil.copytree(folder(), tmp_path / "copied")
    path = tmp_path / "copied" / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(BadFile, match=r"manifest.json: its content is not usable .*; export the network again"):
        Predictor.load(tmp_path / "copied", settings=ONE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "feedbeef"}, "outputs of the network feedbeef and this is"),
        ({"exits": ("w", "x", "y", "z")}, "the policy is for exits w, x, y, z and the network has "),
        ({"num_exits": 5}, "the policy is for 5 exits and the network has 4"),
    ],
)
def test_the_policy_of_another_network_is_refused_before_anything_runs(change, message, tmp_path, monkeypatch):
    terms = {"costs": (1.0, 2.0, 4.0), "open_exits": OPENED, "num_exits": 4, "method": "eero", "budget": 2.0}
    monkeypatch.setattr("alight.fitting.deploying.record", None)
    policy = Threshold((0.5, 0.5), **terms | change)
    with pytest.raises(Mismatch, match=message) as refused:
        deploy(network(), labelled(), tmp_path / "int8", policy=policy, settings=ONE)
    if "num_exits" not in change:
        assert "as dataclasses.replace(policy, exits=(), fingerprint='') (--allow-mismatch)" in str(refused.value)
        check_is_for(replace(policy, exits=(), fingerprint=""), network())  # as the sentence says
