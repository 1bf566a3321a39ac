"""An exported folder is what was exported, or it is refused."""

import importlib.util
import json
import shutil

import numpy as np
import pytest
from exported import folder, policy

from alight import Predictor, RunSettings
from alight.engine.manifest import Manifest, checksum
from alight.errors import BadFile
from alight.files import MANIFEST


@pytest.fixture
def copied(tmp_path):
    return shutil.copytree(folder(), tmp_path / "copied")


def changed(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_it_describes_inputs_and_stages():
    manifest = Manifest.load(folder())
    assert [stage.file for stage in manifest.stages] == ["stage_0.onnx", "stage_1.onnx", "stage_2.onnx"]
    assert manifest.open_exits == (0, 1, 3)  # the closed one has no file
    assert [str(each) for each in manifest.inputs] == ["input_0 of shape (samples, 3, 6, 7), float32"]
    assert [len(stage.carries) for stage in manifest.stages] == [1, 2, 0]
    assert manifest.input_spec.image_shape == (3, 6, 7)
    assert manifest.fingerprint == policy().fingerprint
    assert float(manifest.made_with["largest difference"]) < 1e-5


@pytest.mark.parametrize("file", ["stage_1.onnx", "policy.json"])
def test_a_changed_file_is_refused_with_both_checksums(file, copied):
    content = bytearray((copied / file).read_bytes())
    content[len(content) // 2] ^= 1
    (copied / file).write_bytes(content)
    with pytest.raises(
        BadFile, match=rf"{file}: it was changed.*SHA-256 [0-9a-f]{{64}}, the manifest says [0-9a-f]{{64}}"
    ):
        Predictor.load(copied)


def test_a_missing_file_is_named(copied):
    (copied / "stage_2.onnx").unlink()
    with pytest.raises(BadFile, match=r"its manifest names stage_2\.onnx, which is not there"):
        Predictor.load(copied)


def test_a_folder_in_place_of_a_stage_is_named(copied):
    (copied / "stage_2.onnx").unlink()
    (copied / "stage_2.onnx").mkdir()
    with pytest.raises(BadFile, match=r"stage_2\.onnx: it cannot be read \(Is a directory\)"):
        Predictor.load(copied)


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(BadFile, match=r"it has no manifest\.json; give a folder that `alight export` wrote"):
        Predictor.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        Predictor.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schema": 99}, "its schema is 99"),
        ({"alight": "Policy"}, "it is a Policy"),
        ({"format": "magic"}, "format 'magic'"),
        ({"stages": []}, "0 stages"),
        ({"stages": [{"file": "../model.onnx", "checksum": "", "exit": 0, "carries": []}]}, r"\.\./model\.onnx"),
        ({"stages": [{"file": "..", "checksum": "", "exit": 0, "carries": []}]}, r"a stage in '\.\.'"),
        ({"stages": [{"file": "policy.json", "checksum": "", "exit": 0, "carries": []}]}, r"a stage in 'policy\.json'"),
        ({"further": {"tokenizer/../../secret": ""}}, "outside its folder"),
        ({"further": {"/etc/passwd": ""}}, "outside its folder"),
        ({"stages": [{"file": "a.onnx", "checksum": "", "exit": 7, "carries": []}]}, r"exits \(7,\) of 4"),
        ({"inputs": [{"name": "images", "shape": [None, 0], "dtype": "float32"}]}, "a tensor of shape"),
        ({"inputs": [{"name": "images", "shape": [None], "dtype": "nonsense"}]}, "not usable"),
        ({"inputs": [{"name": "images", "shape": [None], "dtype": "object"}]}, "a tensor of object"),
        ({"normalisation": {"mean": [0.0], "std": [0.0]}}, "normalisation by mean"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(values, message, copied):
    changed(copied / MANIFEST, **values)
    with pytest.raises(BadFile, match=message):
        Predictor.load(copied)


def test_a_stage_that_onnxruntime_cannot_read_is_named(copied):
    content = b"no graph"
    (copied / "stage_0.onnx").write_bytes(content)
    manifest = json.loads((copied / MANIFEST).read_text())
    manifest["stages"][0]["checksum"] = checksum(content)
    (copied / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BadFile, match=r"stage_0\.onnx: onnxruntime .* cannot load it"):
        Predictor.load(copied)


def test_a_stage_whose_weights_lie_in_another_file_is_refused(copied, tmp_path, monkeypatch):
    onnx = pytest.importorskip("onnx")
    stage = onnx.load(copied / "stage_0.onnx")
    weights = next(each for each in stage.graph.initializer if each.raw_data)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.bin").write_bytes(weights.raw_data)  # in the working folder, where onnxruntime would find it
    weights.ClearField("raw_data")
    weights.data_location = onnx.TensorProto.EXTERNAL
    weights.external_data.add(key="location", value="weights.bin")
    content = stage.SerializeToString()
    longer = [b"\x0a\x88\x80\x00", b"\x8a\x00\x08", b"\x8a\x80\x80\x80\x10\x08"]  # the same field, written at length
    for each in (content, *(content.replace(b"\x0a\x08location", field + b"location") for field in longer)):
        (copied / "stage_0.onnx").write_bytes(each)
        manifest = json.loads((copied / MANIFEST).read_text())
        manifest["stages"][0]["checksum"] = checksum(each)
        (copied / MANIFEST).write_text(json.dumps(manifest))
        runtimes = [None, *(["openvino"] if importlib.util.find_spec("openvino") else [])]
        for runtime in runtimes:
            with pytest.raises(BadFile, match="it names another file for its weights"):
                Predictor.load(copied, settings=RunSettings(runtime=runtime))


def test_the_folder_can_be_moved(copied):
    assert len(Predictor.load(copied)(np.zeros((2, 3, 6, 7)))) == 2
