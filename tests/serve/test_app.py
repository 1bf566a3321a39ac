"""The service answers with the decisions of the predictor, keeps every limit, and names what is wrong by index."""

import errno
import io
import json
import logging
import re
import struct
import threading
import time
import zlib

import numpy as np
import pytest
from digit_service import application, folder, in_base64, model, pixels, png, served_model
from fastapi.testclient import TestClient
from PIL import Image

from alight import Predictor, load_policy
from alight.serve.app import build_app
from alight.serve.hosting import ModelHost
from alight.serve.model import ExitTiming
from alight.serve.monitoring import LOGGER, JsonFormatter
from alight.serve.requests import Limits

TOKEN = "a-token-of-many-letters"
JSON = {"Content-Type": "application/json"}
FILE = png(pixels(1)[0])


@pytest.fixture(scope="module")
def client():
    with TestClient(application("unpaced", body=200_000, pixels=10_000, batch=8)) as client:
        yield client


def ask(client, **body):
    return client.post("/predict", json=body)


def test_labels_exits_costs_and_probabilities_are_those_of_the_predictor(client):
    pictures = pixels(48)
    policy = load_policy(folder() / "unpaced.json")
    expected = Predictor(model(), policy, probabilities=True)(pictures[:, None])
    found = []
    for start in range(0, 48, 8):
        part = pictures[start : start + 8]
        if start % 16:
            answer = ask(client, images=[in_base64(picture) for picture in part])
        else:
            answer = client.post("/predict/files", files=[("images", png(picture)) for picture in part])
        assert answer.status_code == 200
        assert answer.json()["unit"] == "FLOPs"
        found += answer.json()["predictions"]
    assert [each["index"] for each in found] == expected.predictions.tolist()
    assert [each["exit"] for each in found] == expected.exits.tolist()
    assert [each["cost"] for each in found] == expected.spent.tolist()
    assert np.allclose([each["probability"] for each in found], expected.probabilities, atol=1e-5)
    assert len(set(expected.exits.tolist())) > 1
    arrays = [((picture / 255 - 0.305) / 0.376)[None].tolist() for picture in pictures[:8]]
    assert [each["exit"] for each in ask(client, arrays=arrays).json()["predictions"]] == expected.exits[:8].tolist()


def test_a_request_may_lower_its_budget_and_set_a_deadline(client):
    policy = load_policy(folder() / "unpaced.json")
    images = [in_base64(picture) for picture in pixels(8)]
    for budget in (policy.costs[0], f"{100 * policy.costs[1] / policy.costs[-1] + 0.1}%"):
        predictions = ask(client, images=images, budget=budget).json()["predictions"]
        assert {each["cost"] for each in predictions} <= set(policy.costs[: 1 + isinstance(budget, str)])
    refused = ask(client, images=images, budget=1.0)
    assert refused.status_code == 422
    assert "below the cheapest exit" in refused.json()["error"]
    late = ask(client, images=images, deadline_ms=1e-3)
    assert late.status_code == 504
    assert "no exit is left in time" in late.json()["error"]
    budget = f"{policy.costs[0] / 1e6 + 1e-3} MFLOPs"
    files = {"files": [("images", png(pixels(1)[0]))], "data": {"budget": budget, "deadline_ms": "30000"}}
    assert client.post("/predict/files", **files).json()["predictions"][0]["exit"] == 0


UNUSABLE = [
    ({"images": ["no base64!"]}, 422, "image 0: not base64"),
    ({"images": [in_base64(np.zeros((8, 8), np.uint8))[:-40]]}, 422, "image 0: not"),
    ({"images": [in_base64(np.zeros((300, 300), np.uint8))]}, 413, "image 0: 300 x 300 pixels"),
    ({"images": [in_base64(np.zeros((8, 8), np.uint8)), "Zm9v"]}, 422, "image 1: not a complete image"),
    ({"inputs": [1]}, 422, "unknown field `inputs`): it may have images, arrays, texts, budget, deadline_ms"),
    ({"images": []}, 422, "no image: send at least one"),
    ({"images": ["Zm9v"] * 9}, 413, "9 images in one request, and at most 8"),
    ({"arrays": [[1, 2]]}, 422, "array 0: not an array of numbers of shape (1, 8, 8)"),
    ({"arrays": [[[[0] * 8] * 7]]}, 422, "array 0: shape (1, 7, 8), and the network takes (1, 8, 8)"),
    ({"arrays": [[[[0] * 8] * 8]] * 9}, 413, "more numbers than 8 arrays of shape (1, 8, 8) have"),
    ({"arrays": [[[[{"": 0}] * 8] * 8]]}, 422, "array 0: not an array of numbers: it holds strings or objects"),
    ({"arrays": [[[[0] * 8] * 7 + [["x"] * 8]]]}, 422, "array 0: not an array of numbers"),
    ({"arrays": [[[[0] * 8] * 7 + [[0] * 7]]]}, 422, "array 0: not an array of numbers"),
    ({"arrays": [[[[0.0] * 8] * 8], [[[0.0] * 8] * 7 + [[1e30] * 8]]]}, 422, "array 1: 8 numbers that are NaN"),
    ({"arrays": [[[[None] * 8] * 8]]}, 422, "array 0: "),
    ({"texts": ["hello"]}, 422, "takes images, not texts"),
    ({}, 422, "give one of images, arrays and texts"),
    ({"images": ["Zm9v"], "texts": ["a"]}, 422, "images and texts"),
    ({"images": ["Zm9v"], "budget": -1}, 422, "budget"),
    ({"images": [in_base64(np.zeros((8, 8), np.uint8))], "budget": "much"}, 422, "budget 'much' is not a number"),
    ({"images": ["Zm9v"], "deadline_ms": "soon"}, 422, "deadline_ms"),
    ({"images": ["Zm9v"], "colour": "red"}, 422, "colour"),
]


@pytest.mark.parametrize(("body", "status", "error"), UNUSABLE, ids=[error for _, _, error in UNUSABLE])
def test_the_error_names_what_cannot_be_used(client, body, status, error):
    answer = ask(client, **body)
    assert answer.status_code == status
    assert error in answer.json()["error"]


def test_a_file_sent_to_the_path_of_json_is_answered_with_the_path_of_files(client):
    answer = client.post("/predict", content=b"a file", headers={"Content-Type": "image/png"})
    expected = "content of type 'image/png': send application/json (files of images go to /predict/files)"
    assert (answer.status_code, answer.json()["error"]) == (415, expected)


def test_the_error_names_the_place_of_a_number_that_cannot_be_used(client):
    array = np.zeros((1, 8, 8)).tolist()
    array[0][2][3] = 1e30
    answer = ask(client, arrays=[np.zeros((1, 8, 8)).tolist(), array])
    assert answer.status_code == 422
    assert "array 1: 1 numbers that are NaN, infinite or beyond 1e+06, the first at [0, 2, 3]" in answer.json()["error"]


def test_a_body_is_read_up_to_its_limit(client):
    def endless():
        for _ in range(100):
            yield b" " * 10_000

    sized = client.post("/predict", content=b" " * 300_000, headers=JSON)
    streamed = client.post("/predict", content=endless(), headers=JSON)
    assert (sized.status_code, streamed.status_code) == (413, 413)
    assert "at most 200,000 bytes" in streamed.json()["error"]


def test_a_decompression_bomb_is_refused_before_it_is_decoded(client):
    bomb = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(bomb, "PNG")
    answer = client.post("/predict/files", files={"images": bomb.getvalue()})
    assert (len(bomb.getvalue()) < 100_000, answer.status_code) == (True, 413)
    assert "pixels" in answer.json()["error"]


def test_a_thin_image_that_would_have_too_many_pixels_once_resized_is_refused(client):
    thin = io.BytesIO()
    Image.new("L", (9_000, 1)).save(thin, "PNG")  # 8 x 72,000 once it is 8 high
    answer = client.post("/predict/files", files={"images": thin.getvalue()})
    assert answer.status_code == 413
    assert "9000 x 1 pixels, and at most 10,000 are taken, resized ones too" in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "content", "kind", "status"),
    [
        ("/predict", b"{", "application/json", 422),
        ("/predict", b"[" * 100_000, "application/json", 422),
        ("/predict", b"\xff\xfe", "application/json", 422),
        ("/predict", b"{}", "text/plain", 415),
        ("/predict/files", b"nonsense", "multipart/form-data", 400),
        ("/predict/files", b"nonsense", "multipart/form-data; boundary=x", 400),
        ("/predict/files", b"{}", "application/json", 415),
        ("/budget", b"{}", "application/json", 405),
        ("/nowhere", b"{}", "application/json", 404),
        ("/predict/", b"{}", "application/json", 404),
    ],
)
def test_malformed_requests_are_refused(client, path, content, kind, status):
    answer = client.post(path, content=content, headers={"Content-Type": kind})
    assert answer.status_code == status
    assert answer.json()["error"]


def test_a_form_that_gives_an_option_twice_is_refused(client):
    reply = client.post("/predict/files", data={"budget": ["100%", "40%"]}, files=[("images", ("a", FILE))])
    assert reply.status_code == 422
    assert reply.json()["error"] == "budget, 2 times: send it once"


@pytest.mark.parametrize("end", [b"", b"--", b"--edge", b"--edge-", b"--edge\r\n"])
def test_a_form_that_is_cut_off_is_refused_as_a_whole(client, end):
    head = b'--edge\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n'
    parts, kind = head + png(pixels(1)[0]) + b"\r\n", {"Content-Type": "multipart/form-data; boundary=edge"}
    whole = client.post("/predict/files", content=2 * parts + b"--edge--\r\n", headers=kind)
    assert len(whole.json()["predictions"]) == 2
    reply = client.post("/predict/files", content=2 * parts + end, headers=kind)
    assert reply.status_code == 400
    assert reply.json()["error"] == "The form is cut off: send it to its last boundary."


def test_a_form_needs_no_disk(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.SpooledTemporaryFile.rollover", full)
    with TestClient(application("unpaced")) as client:
        assert client.post("/predict/files", files=[("images", ("a", FILE + bytes(2**21)))]).status_code == 200


def test_a_request_that_is_decided_in_turns_is_answered_as_a_whole():
    host = ModelHost.of(served_model("unpaced"), Limits())
    (worker,) = host.workers
    worker._timings = {"unpaced": ExitTiming([0.012] * 4, growth=32.0, max_batch=32)}  # two samples at once
    worker.shared = time.monotonic()  # someone else was here
    cost = worker.ledger.state.policy.costs[0]
    with TestClient(build_app(host)) as client:
        images = [in_base64(picture) for picture in pixels(9)]
        alone = [ask(client, images=[image], budget=cost).json()["predictions"][0] for image in images]
        reply = ask(client, images=images, budget=cost).json()
        probabilities = [each["probability"] for each in alone]
        assert np.allclose([each["probability"] for each in reply["predictions"]], probabilities, atol=1e-6)
        assert len({round(each, 5) for each in probabilities}) == 9  # which tell them apart
        assert host.metrics.registry.get_sample_value("alight_batch_samples_count", {"model": "model"}) == 9 + 5
        assert client.get("/status").json()["samples"] == 18


def hostile_images():
    """Image files whose decoders walk parts that are not pixels, one at a time, before they come to the size."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    jpeg = io.BytesIO()
    Image.new("L", (8, 8)).save(jpeg, "JPEG")
    large = zlib.compress(bytes(2**20 - 1), 9)
    yield "PNG chunks", FILE[:33] + chunk(b"abCd", b"") * 14_000 + FILE[33:]
    yield "PNG profiles", FILE[:33] + chunk(b"iCCP", b"a\0\0" + large) * 150 + FILE[33:]
    yield "PNG texts behind", FILE[:-12] + chunk(b"zTXt", b"a\0\0" + large) * 60 + FILE[-12:]
    yield "JPEG segments", jpeg.getvalue()[:2] + b"\xff\xfe\x00\x02" * 45_000 + jpeg.getvalue()[2:]
    yield "JPEG filling", jpeg.getvalue()[:2] + b"\xff" * 180_000 + jpeg.getvalue()[2:]


@pytest.mark.parametrize("name", [name for name, _ in hostile_images()])
def test_an_image_file_of_many_parts_is_refused_before_they_are_walked(client, name):
    file = dict(hostile_images())[name]
    reply = client.post("/predict/files", files=[("images", ("a", file))])
    assert reply.status_code == 422
    assert "too many parts that are not pixels" in reply.json()["error"]


def test_a_query_parameter_that_would_have_no_effect_is_refused(client):
    body = {"images": [in_base64(pixels(1)[0])]}
    for path in ("/predict?budget=10%25", "/predict?modle=a", "/predict?=false"):
        answer = client.post(path, json=body)
        assert answer.status_code == 422
        assert f"query parameter {path[9:].partition('=')[0]!r} at /predict: give model" in answer.json()["error"]
    assert client.get("/status?modle=a").status_code == 422
    assert client.post("/predict?model=model&model=model", json=body).json()["error"].endswith("2 times: give it once")
    refused = client.post("/v2/models/model/versions/1/infer?budget=10%25", json={"inputs": []})
    assert refused.json()["error"].endswith("/infer: give none")
    assert client.put("/budget?budget=10", json={"policy": "cheap"}).status_code == 422
    assert client.get("/healthz?now=12").status_code == 200  # as balancers ask, so that nothing is cached


def test_all_paths_but_probes_and_the_page_need_the_token():
    with TestClient(application(token=TOKEN)) as client:
        body = {"images": [in_base64(pixels(1)[0])]}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
            answer = client.post("/predict", json=body, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert client.get("/metrics", headers=headers).status_code == 401
        assert [client.get(path).status_code for path in ("/", "/healthz", "/readyz")] == [200] * 3
        good = client.post("/predict", json=body, headers={"Authorization": f"Bearer {TOKEN}"})
        assert good.status_code == 200


def test_metrics_and_status_count_samples_and_spend():
    with TestClient(application("expensive", "cheap")) as client:
        for _ in range(5):
            assert ask(client, images=[in_base64(picture) for picture in pixels(8)]).status_code == 200
        status, metrics = client.get("/status").json(), client.get("/metrics").text
    assert status["samples"] == 40 == sum(each["samples"] for each in status["exits"])
    assert status["allowed"] == pytest.approx(40 * status["budget"])
    spent = sum(each["samples"] * each["cost"] for each in status["exits"])
    assert status["spent"] == pytest.approx(spent)
    for line in (
        'alight_requests_total{path="/predict",status="200"} 5.0',
        'alight_batch_samples_count{model="model"} 5.0',
        'alight_drift_alarm{model="model"} 0.0',
        'alight_queue_samples{model="model"} 0.0',
        'alight_request_duration_seconds_count{path="/predict"} 5.0',
        'alight_read_duration_seconds_count{kind="images",lane="quick"} 5.0',
        'alight_request_duration_seconds_bucket{le="120.0",path="/predict"} 5.0',  # past the timeout
        "alight_build_info{python=",
    ):
        assert line in metrics
    counted = float(re.search(r"^alight_spent_cost_total{.*policy=\"expensive\".*} (.*)$", metrics, re.MULTILINE)[1])
    assert counted == pytest.approx(spent)


def test_the_budget_changes_between_calibrated_policies_and_no_others():
    with TestClient(application("expensive", "cheap")) as client:
        before = client.get("/budget").json()
        budgets = {each["name"]: each["budget"] for each in before["policies"]}
        assert before["policy"] == "expensive"
        assert {each["contract"] for each in before["policies"]} == {"stream"}
        for body, name in (
            ({"policy": "cheap"}, "cheap"),
            ({"budget": "90%"}, "expensive"),
            ({"budget": "45%"}, "cheap"),
        ):
            assert client.put("/budget", json=body).json()["policy"] == name
            answer = ask(client, images=[in_base64(pixels(1)[0])]).json()
            assert (answer["policy"], answer["budget"]) == (name, budgets[name])
        for body in (
            {"policy": "none"},
            {"budget": "1%"},
            {"budget": "much"},
            {},
            {"policy": "expensive", "budget": 1.0},
        ):
            answer = client.put("/budget", json=body)
            assert answer.status_code == 422, body
            assert client.get("/budget").json()["policy"] == "cheap"


def test_a_full_queue_says_when_to_retry():
    app = application("unpaced", queue=8, batch=8, wait=0.5)
    with TestClient(app) as client:
        images = [in_base64(picture) for picture in pixels(7)]
        replies = []
        threads = [threading.Thread(target=lambda: replies.append(ask(client, images=images))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        statuses = sorted(reply.status_code for reply in replies)
        assert statuses[0] == 200
        assert statuses[-1] == 429
        refused = [reply for reply in replies if reply.status_code == 429]
        assert all(int(reply.headers["Retry-After"]) >= 1 for reply in refused)


def test_every_request_is_logged_as_one_line_of_json_with_its_id(client):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(json.loads(JsonFormatter().format(record)))
    LOGGER.addHandler(handler)
    LOGGER.setLevel("INFO")
    try:
        answer = client.post("/predict", json={"images": [in_base64(pixels(1)[0])]}, headers={"X-Request-ID": "mine-1"})
        client.get("/status", headers={"X-Request-ID": "not one\tword"})
        refused = client.post("/predict", content=b"", headers={"X-Request-ID": "x" * 500})
    finally:
        LOGGER.removeHandler(handler)
    assert answer.headers["X-Request-ID"] == "mine-1"
    assert len(refused.headers["X-Request-ID"]) == 16
    first, second = lines
    assert (first["event"], first["id"], first["status"], first["samples"]) == ("request", "mine-1", 200, 1)
    assert (second["status"], second["path"]) == (415, "/predict")


def test_openapi_describes_every_endpoint_and_status(client):
    openapi = client.get("/openapi.json").json()
    assert {path for path in openapi["paths"] if not path.startswith("/v2")} == {
        "/predict", "/predict/files", "/budget", "/status", "/healthz", "/readyz", "/metrics",
    }  # fmt: skip
    assert {"/v2", "/v2/health/live", "/v2/models/{name}", "/v2/models/{name}/infer"} <= set(openapi["paths"])
    assert {"200", "401", "408", "413", "415", "422", "429", "503", "504"} <= set(
        openapi["paths"]["/predict"]["post"]["responses"]
    )
