"""The V2 inference protocol gives the answers of our own, from JSON and from binary tensors."""

import json
import shutil
import struct

import numpy as np
import pytest
from digit_service import folder, in_base64, pixels, png, served_model
from fastapi.testclient import TestClient
from text_service import text_model

from alight.engine.settings import RunSettings
from alight.errors import BadFile
from alight.serve.app import build_app
from alight.serve.hosting import ModelHost, ModelSource, listed_models
from alight.serve.model import load_policies, load_served_model
from alight.serve.requests import Limits

PICTURES = pixels(6)
FLOATS = ((PICTURES / 255 - 0.305) / 0.376).astype(np.float32)[:, None]
LENGTH = "Inference-Header-Content-Length"


@pytest.fixture(scope="module")
def client():
    with TestClient(build_app(ModelHost.of(served_model(), Limits(batch=8)))) as client:
        yield client


def binary(tensor, content, **parameters):
    """A request with one tensor behind its JSON."""
    tensor = tensor | {"parameters": {"binary_data_size": len(content)}}
    head = json.dumps({"id": "mine", "inputs": [tensor], "parameters": parameters}).encode()
    return {"content": head + content, "headers": {LENGTH: str(len(head))}}


def files(*contents):
    return b"".join(struct.pack("<I", len(each)) + each for each in contents)


def outputs(reply):
    assert reply.status_code == 200, reply.text
    if LENGTH not in reply.headers:
        return {each["name"]: each["data"] for each in reply.json()["outputs"]}
    size = int(reply.headers[LENGTH])
    found, place = {}, size
    for each in json.loads(reply.content[:size])["outputs"]:
        content = reply.content[place : (place := place + each["parameters"]["binary_data_size"])]
        dtype = {"INT64": "<i8", "FP64": "<f8"}.get(each["datatype"])
        found[each["name"]] = np.frombuffer(content, dtype).tolist() if dtype else content
    return found


def test_every_way_to_send_samples_gives_the_same_answers(client):
    own = client.post("/predict", json={"images": [in_base64(each) for each in PICTURES]}).json()["predictions"]
    path, shape = "/v2/models/model/infer", [6, 1, 8, 8]
    numbers = {"name": "input_0", "shape": shape, "datatype": "FP32"}
    strings = {"name": "input_0", "shape": [6], "datatype": "BYTES"}
    pixel = {"name": "input_0", "shape": shape, "datatype": "UINT8"}
    encoded = [in_base64(each) for each in PICTURES]
    replies = [
        client.post(path, json={"inputs": [numbers | {"data": FLOATS.tolist()}]}),
        client.post(path, json={"inputs": [numbers | {"data": FLOATS.ravel().tolist()}]}),
        client.post(path, json={"inputs": [strings | {"data": encoded}]}),
        client.post(path, **binary(numbers, FLOATS.tobytes())),
        client.post(path, **binary(numbers | {"datatype": "FP64"}, FLOATS.astype("<f8").tobytes())),
        client.post(path, **binary(pixel, PICTURES.tobytes())),
        client.post(path, **binary(strings, files(*map(png, PICTURES)))),
        client.post("/v2/models/model/versions/1/infer", **binary(pixel, PICTURES.tobytes(), binary_data_output=True)),
    ]
    for reply in replies:
        found = outputs(reply)
        for name in ("index", "exit", "cost"):
            assert found[name] == [each[name] for each in own]
        assert np.allclose(found["probability"], [each["probability"] for each in own], atol=1e-5)
    assert replies[3].json()["id"] == "mine"
    assert outputs(replies[-1])["label"] == files(*(str(each["label"]).encode() for each in own))


def test_bytes_behind_the_json_that_no_tensor_names_are_refused(client):
    head = json.dumps({"inputs": [NUMBERS | {"data": [0.5] * 64}]}).encode()
    reply = client.post("/v2/models/model/infer", content=head + b"more", headers={LENGTH: str(len(head))})
    assert reply.status_code == 422
    assert "4 bytes after the JSON" in reply.json()["error"]


def test_a_request_gets_the_outputs_that_it_names(client):
    tensor = {"name": "input_0", "shape": [6, 1, 8, 8], "datatype": "FP32", "data": FLOATS.tolist()}
    path, wanted = "/v2/models/model/infer", [{"name": "index"}, {"name": "exit", "parameters": {"binary_data": True}}]
    everything = outputs(client.post(path, json={"inputs": [tensor]}))
    reply = client.post(path, json={"inputs": [tensor], "outputs": wanted})
    size = int(reply.headers[LENGTH])
    index, left = json.loads(reply.content[:size])["outputs"]
    assert (index["name"], index["data"]) == ("index", everything["index"])
    assert left["parameters"] == {"binary_data_size": 48}
    assert np.frombuffer(reply.content[size:], "<i8").tolist() == everything["exit"]


def test_a_request_may_lower_its_budget(client):
    costs = client.get("/status").json()["exits"]
    tensor = {"name": "input_0", "shape": [6, 1, 8, 8], "datatype": "FP32", "data": FLOATS.tolist()}
    body = {"inputs": [tensor], "parameters": {"budget": costs[0]["cost"], "deadline_ms": 20000}}
    assert set(outputs(client.post("/v2/models/model/infer", json=body))["exit"]) == {0}


def test_texts_are_bytes(tmp_path):
    with TestClient(build_app(ModelHost.of(text_model(tmp_path, max_tokens=16), Limits(tokens=16)))) as client:
        own = client.post("/predict", json={"texts": ["the bread", "a soup"]}).json()["predictions"]
        tensor = {"name": "texts", "shape": [2], "datatype": "BYTES"}
        path = "/v2/models/model/infer"
        assert client.get("/v2/models/model").json()["inputs"] == [
            {"name": "texts", "datatype": "BYTES", "shape": [-1]}
        ]
        for reply in (
            client.post(path, json={"inputs": [tensor | {"data": ["the bread", "a soup"]}]}),
            client.post(path, **binary(tensor, files(b"the bread", b"a soup"))),
        ):
            assert outputs(reply)["index"] == [each["index"] for each in own]
        assert client.post(path, **binary(tensor, files(b"\xff", b"a"))).status_code == 422
        assert client.post(path, json={"inputs": [tensor | {"data": ["datatype", "name"]}]}).status_code == 200


NUMBERS = {"name": "x", "shape": [1, 1, 8, 8], "datatype": "FP32"}
TWO = json.dumps({"inputs": [NUMBERS | {"data": [0.0] * 64}] * 2})
HIDDEN = r'"dat\u0061type"'.join(TWO.rsplit('"datatype"', 1))  # the second cannot be found without a parser
UNUSABLE = [
    ({"json": {}}, "not the JSON that is expected"),
    ({"json": {"inputs": []}}, "`array` of length 1 - at `$.inputs`"),
    ({"json": {"inputs": [NUMBERS | {"data": [0.0] * 64}] * 2}}, "`array` of length 1 - at `$.inputs`"),
    ({"content": HIDDEN}, "`array` of length 1 - at `$.inputs`"),
    ({"json": {"inputs": [NUMBERS | {"shape": [1] * 66, "data": [0.0]}]}}, "a tensor of shape [1, 1"),
    ({"json": {"inputs": [NUMBERS | {"data": [0.0] * 63}]}}, "63 numbers, and the shape"),
    ({"json": {"inputs": [NUMBERS | {"data": ["a"] * 64}]}}, "not an array of numbers"),
    ({"json": {"inputs": [NUMBERS | {"data": [None] * 64}]}}, "not an array of numbers"),
    ({"json": {"inputs": [NUMBERS | {"datatype": "COMPLEX", "data": []}]}}, "a tensor of 'COMPLEX'"),
    ({"json": {"inputs": [NUMBERS | {"shape": [9, 1, 8, 8], "data": []}]}}, "1 to 8 samples"),
    ({"json": {"inputs": [NUMBERS | {"shape": [1, -1, 8, 8], "data": []}]}}, "a tensor of shape"),
    ({"json": {"inputs": [NUMBERS | {"shape": [1, *[10**9] * 15, 0], "data": []}]}}, "a tensor of shape [1, 100"),
    ({"json": {"inputs": [NUMBERS | {"shape": [1, *[10**9] * 15], "data": []}]}}, "0 numbers, and the shape"),
    ({"json": {"inputs": [NUMBERS | {"shape": [1, 10**300], "data": []}]}}, "bytes where 200 are enough"),
    ({"json": {"inputs": [NUMBERS | {"shape": [1] * 200, "data": []}]}}, "bytes where 200 are enough"),
    ({"json": {"inputs": [NUMBERS | {"shape": [1, 8, 8, 1], "data": [0.0] * 64}]}}, "the network takes (1, 8, 8)"),
    ({"json": {"inputs": [{"name": "x", "shape": [2], "datatype": "BYTES", "data": ["Zm9v"]}]}}, "1 elements"),
    ({"json": {"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": ["Zm9v"]}]}}, "image 0: not a comp"),
    ({"json": {"inputs": [NUMBERS | {"datatype": "UINT8", "data": [300] * 64}]}}, "UINT8 with the number 300"),
    ({"json": {"inputs": [NUMBERS | {"datatype": "UINT8", "data": [-1] * 64}]}}, "UINT8 with the number -1"),
    ({"json": {"inputs": [NUMBERS | {"datatype": "INT64", "data": [1.5] * 64}]}}, "INT64 with the number 1.5"),
    ({"json": {"inputs": [NUMBERS | {"datatype": "BOOL", "data": [7] * 64}]}}, "BOOL with the number 7"),
    ({"json": {"inputs": [NUMBERS | {"data": [[0.5] * 63, [0.5]]}]}}, "not nested as the shape [1, 1, 8, 8] says"),
    ({"json": {"inputs": [NUMBERS | {"data": [[], *[0.5] * 63]}]}}, "not nested as the shape"),
    ({"json": {"inputs": [NUMBERS | {"data": [0.5] * 64}], "budget": "10%"}}, "unknown field `budget`"),
    ({"json": {"inputs": [NUMBERS | {"data": [0.5] * 64}], "parameters": {"budgt": 1}}}, "unknown field `budgt`"),
    ({"json": {"inputs": [NUMBERS | {"data": [0.5] * 64, "parameters": {"budget": 1}}]}}, "unknown field `budget`"),
    ({"json": {"inputs": [NUMBERS | {"data": [0.5] * 64}], "outputs": [{"name": "logits"}]}}, "no output 'logits'"),
    (
        {"json": {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "BYTES", "data": ["a", "b"]}]}},
        "one element for",
    ),
    (binary(NUMBERS | {"data": [0.5] * 64}, bytes(256)), "send the values once"),
    (binary(NUMBERS, bytes(255)), "255 bytes for 64 numbers"),
    (binary(NUMBERS, np.full(64, np.nan, "<f4").tobytes()), "64 numbers that are NaN"),
    (binary(NUMBERS, bytes(256)) | {"headers": {LENGTH: "99999"}}, "mend inference-header-content-length"),
    (binary(NUMBERS, bytes(256)) | {"headers": {LENGTH: "0" * 20 + "9" * 4400}}, "mend inference-header-content-len"),
    ({"json": {}, "headers": {"Content-Encoding": "gzip"}}, "content that is encoded as 'gzip'"),
    (binary({"name": "x", "shape": [1], "datatype": "BYTES"}, b"\xff\xff\xff\xffab"), "do not end where the data ends"),
]


@pytest.mark.parametrize(("request_", "error"), UNUSABLE, ids=[error for _, error in UNUSABLE])
def test_the_error_says_what_cannot_be_used(client, request_, error):
    reply = client.post("/v2/models/model/infer", **request_)
    assert 400 <= reply.status_code < 500
    assert error in reply.json()["error"]


def test_models_describe_themselves(client):
    assert client.get("/v2").json()["extensions"] == ["binary_tensor_data", "model_repository"]
    assert [client.get(f"/v2/health/{kind}").status_code for kind in ("live", "ready")] == [200, 200]
    described = client.get("/v2/models/model/versions/1").json()
    assert described["inputs"] == [{"name": "input_0", "datatype": "FP32", "shape": [-1, 1, 8, 8]}]
    assert [each["name"] for each in described["outputs"]] == ["index", "label", "exit", "cost", "probability"]
    assert client.get("/v2/models/model/ready").status_code == 200
    assert client.get("/v2/models/other").status_code == 404
    assert "model 1" in client.get("/v2/models/model/versions/9").json()["error"]


def test_several_models_and_versions_are_served_and_loaded_while_others_answer(tmp_path):
    for name in ("cheap", "expensive"):
        shutil.copy(folder() / f"{name}.json", tmp_path)
    listed = tmp_path / "models.json"

    def write(*models):
        keys = ("name", "version", "policies")
        entries = [dict(zip(keys, each, strict=True)) | {"folder": str(folder() / "model")} for each in models]
        listed.write_text(json.dumps({"models": entries}))

    def sources():
        def load(each):
            return load_served_model(each["folder"], load_policies(each["policies"]), settings=RunSettings(threads=1))

        return [
            ModelSource(
                each["name"], each["version"], lambda each=each: load(each), (*each["policies"],), each["state"]
            )
            for each in listed_models(listed)
        ]

    write(("a", "1", ["cheap.json"]))
    with TestClient(build_app(ModelHost(sources, Limits()))) as client:
        body = {"images": [in_base64(pixels(1)[0])]}
        assert client.post("/predict", json=body).json()["policy"] == "cheap"
        write(("a", "1", ["cheap.json"]), ("a", "2", ["expensive.json"]), ("b", "1", ["expensive.json", "cheap.json"]))
        assert client.post("/v2/repository/models/a/load").json() == {"changed": ["a:2", "b:1"]}
        assert client.get("/v2/models/a").json()["versions"] == ["1", "2"]
        assert client.post("/predict", json=body).json()["policy"] == "expensive"  # the latest version of the first
        assert client.post("/predict?model=a&version=1", json=body).json()["policy"] == "cheap"
        assert client.put("/budget?model=b", json={"policy": "cheap"}).json()["policy"] == "cheap"
        assert client.get("/status?model=a&version=2").json()["samples"] == 1
        assert 'model="a:2"' in client.get("/metrics").text
        write(("a", "2", ["expensive.json"]), ("a", "1", ["cheap.json"]), ("b", "1", ["expensive.json", "cheap.json"]))
        assert client.post("/v2/repository/models/a/load").json() == {"changed": []}
        assert client.post("/predict", json=body).json()["policy"] == "cheap"  # which is the last of the list now
        assert client.post("/v2/repository/models/c/load").status_code == 404
        write(("b", "1", ["expensive.json", "cheap.json"]))
        assert client.post("/v2/repository/models/b/load").json() == {"changed": ["a:2", "a:1"]}
        assert client.post("/predict?model=a", json=body).status_code == 404
        assert client.get("/budget").json()["policy"] == "cheap"  # of b, which was not loaded again
        listed.write_text("{}")
        refused = client.post("/v2/repository/models/b/load")
        assert refused.status_code == 422
        assert "what was served still is" in refused.json()["error"]
        assert client.post("/predict", json=body).status_code == 200
    with pytest.raises(BadFile, match="it does not list models"):
        listed_models(listed)


def test_a_file_that_changes_while_it_is_loaded_is_loaded_again(tmp_path):
    file, loads = tmp_path / "weights", []

    def load():
        loads.append(file.write_text("x" * (1 + len(loads) % 2)) if len(loads) < 2 else None)
        return served_model()

    file.write_text("")
    host = ModelHost(lambda: [ModelSource("a", "1", load, (file,))], Limits())
    host.start()
    assert host.reload() == ["a:1"]  # the file changed during the first load
    assert host.reload() == ["a:1"]  # and during the second
    assert host.reload() == []
    host.close()


def test_after_a_model_that_cannot_be_loaded_none_has_changed(tmp_path):
    files, broken = [tmp_path / name for name in "ab"], []

    def load(name):
        if name in broken:
            raise BadFile(tmp_path / name, "it is damaged", "copy it again")
        return served_model("cheap" if not broken else "expensive")

    for file in files:
        file.write_text("")
    host = ModelHost(
        lambda: [ModelSource(each.name, "1", lambda each=each: load(each.name), (each,)) for each in files], Limits()
    )
    host.start()
    broken.append("b")
    for file in files:
        file.write_text("changed")
    with pytest.raises(BadFile):
        host.reload()
    assert [*host.find("a").worker.model.policies] == ["cheap"]
    host.close()
