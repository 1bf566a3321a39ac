"""A cascade runs without PyTorch, in the decisions of the original: exported, and inside Triton."""

import re
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
from cascades import COSTS, chain, outputs, pixels
from exported import older_exporter

from alight import Predictor, calibrate, deploy, export_model, load_policy, replay
from alight.calibrate import combined
from alight.calibrate.crossval import on_exits
from alight.engine.backends.cascade import Cascade
from alight.errors import BadInput, Mismatch
from alight.export.triton import write_triton


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    policy = calibrate.eero(COSTS, "70%", outputs())
    with older_exporter():
        return policy, export_model(chain(), policy, tmp_path_factory.mktemp("export") / "cascade", progress=False)


def test_an_exported_cascade_decides_as_the_recording_does(exported):
    policy, folder = exported
    found, expected = Predictor.load(folder)(pixels()), replay(policy, outputs())
    np.testing.assert_array_equal(found.exits, expected.exits)
    np.testing.assert_array_equal(found.predictions, expected.predictions)
    assert not any(each.is_torch for each in Cascade.load(folder).members)


def test_a_network_without_an_open_exit_is_left_out_and_exits_are_numbered_without_it(tmp_path):
    policy = on_exits(combined(calibrate.eero, "agreement"), (0, 3))(COSTS, "70%", outputs())
    with older_exporter():
        folder = export_model(chain(), policy, tmp_path / "cascade", progress=False)
    assert load_policy(folder / "policy.json").exits == Cascade.load(folder).exits == ("tiny", "large")
    found, expected = Predictor.load(folder)(pixels()), replay(policy, outputs())
    np.testing.assert_array_equal(found.predictions, expected.predictions)
    np.testing.assert_array_equal(found.exits == 1, expected.exits == 3)
    np.testing.assert_allclose(found.spent, expected.spent)


def test_a_foreign_policy_and_a_full_folder_are_refused(exported, tmp_path):
    from dataclasses import replace

    policy, _ = exported
    with pytest.raises(Mismatch, match="deadbeef"):
        export_model(chain(), replace(policy, fingerprint="deadbeef"), tmp_path / "cascade")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    with pytest.raises(BadInput, match="holds other files"):
        export_model(chain(), policy, tmp_path / "full")


def on_gpu():
    raise RuntimeError("Tensor is stored in GPU and cannot be converted to NumPy.")


class Utils:
    """What Triton gives to a Python model: it runs the models of the repository by ONNX Runtime, as Triton does.

    The server has a GPU, on which the outputs of models stay that were not asked for on the host.
    """

    TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_GPU = "cpu", "gpu"

    def __init__(self, repository):
        self.repository, self.asked = repository, []

        class InferenceRequest:
            def __init__(self, model_name, requested_output_names, inputs, preferred_memory=("gpu", 0)):
                self.model, self.names, self.inputs = model_name, requested_output_names, inputs
                self.memory = preferred_memory[0]

            def exec(request):  # noqa: N805
                return self.executed(request)

        self.InferenceRequest = InferenceRequest

    @staticmethod
    def PreferredMemory(kind, number):  # noqa: N802
        return kind, number

    @staticmethod
    def Tensor(name, values):  # noqa: N802
        return SimpleNamespace(name=name, as_numpy=lambda: values)

    @staticmethod
    def InferenceResponse(tensors=(), error=None):  # noqa: N802
        return SimpleNamespace(tensors=tensors, has_error=lambda: error is not None, error=lambda: error)

    @staticmethod
    def TritonError(message):  # noqa: N802
        return SimpleNamespace(message=lambda: message)

    def executed(self, request):
        given = {each.name: each.as_numpy() for each in request.inputs}
        config = (self.repository / request.model / "config.pbtxt").read_text()
        largest = int(re.search(r"max_batch_size: (\d+)", config)[1])
        assert all(f'name: "{name}"' in config for name in (*given, *request.names))
        rows = len(next(iter(given.values())))
        assert 0 < rows <= largest
        self.asked.append((request.model, rows))
        session = onnxruntime.InferenceSession(self.repository / request.model / "1" / "model.onnx")
        made = zip(request.names, session.run(request.names, given), strict=True)
        tensors = [self.Tensor(*each) for each in made]
        if request.memory != self.TRITONSERVER_MEMORY_CPU:
            tensors = [SimpleNamespace(name=each.name, as_numpy=on_gpu) for each in tensors]
        return self.InferenceResponse(tensors)

    @staticmethod
    def get_input_tensor_by_name(request, name):
        return SimpleNamespace(as_numpy=lambda: request[name])

    @staticmethod
    def get_output_tensor_by_name(response, name):
        return next(each for each in response.tensors if each.name == name)


def test_a_model_of_triton_runs_the_stages_for_survivors_alone(exported, tmp_path, monkeypatch):
    policy, folder = exported
    repository = write_triton(folder, tmp_path / "repository")
    config = (repository / "alight" / "config.pbtxt").read_text()
    assert 'name: "images", data_type: TYPE_UINT8, dims: [-1, 3, 16, 16]' in config
    utils = Utils(repository)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    model = runpy.run_path(repository / "alight" / "1" / "model.py")["TritonPythonModel"]()
    model.initialize({"model_repository": str(repository / "alight"), "model_version": "1"})
    assert not utils.asked  # Triton executes no model while another is loaded
    (answer,) = model.execute([{"images": pixels()}])
    expected = replay(policy, outputs())
    for name in ("predictions", "exits", "spent"):
        values = utils.get_output_tensor_by_name(answer, name).as_numpy()
        np.testing.assert_array_equal(values, getattr(expected, name))
    last = sum(rows for name, rows in utils.asked if name.startswith("alight_member_2"))
    assert last == (expected.exits == 3).sum() < len(pixels())
    wrong, right = model.execute([{"images": pixels()[:, :2]}, {"images": pixels()[:2]}])
    assert wrong.has_error()
    assert not right.has_error()
    with pytest.raises(BadInput, match="exists: give a new folder"):
        write_triton(folder, repository)
    with pytest.raises(BadInput, match="is not an exported network"):
        write_triton(tmp_path, tmp_path / "other")
    with pytest.raises(BadInput, match=r"name '\.\./alight' of a model of Triton"):
        write_triton(folder, tmp_path / "other", "../alight")


def test_configurations_of_triton_are_what_its_own_parser_takes(exported, tmp_path):
    described = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason='pip install "tritonclient[grpc]"')
    text_format = pytest.importorskip("google.protobuf.text_format")
    repository = write_triton(exported[1], tmp_path / "repository")
    found = {}
    for path in repository.glob("*/config.pbtxt"):
        config = text_format.Parse(path.read_text(), described.ModelConfig())
        assert config.name == path.parent.name
        found[config.name] = config
    assert found["alight"].backend == "python"
    assert [each.name for each in found["alight"].output] == ["predictions", "exits", "spent"]
    stages = [config for name, config in found.items() if name != "alight"]
    assert stages
    assert {(each.backend, each.max_batch_size > 0) for each in stages} == {("onnxruntime", True)}


def test_a_cascade_is_not_deployed_in_lower_precision_as_one(tmp_path):
    with pytest.raises(BadInput, match=r"Cascade is not a network with exits: .* the ONNX files of its networks"):
        deploy(chain(), (pixels()[:40], [0] * 40), tmp_path / "int8", budget="50%")
