"""Networks as the service loads them: texts by their tokenizer, and policies that fit together."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch
from cascades import COSTS, chain, outputs, pixels, remote_model
from digit_service import in_base64
from exported import older_exporter
from fastapi.testclient import TestClient
from text_service import save_text_network

from alight import (
    Member,
    Predictor,
    calibrate,
    cascade,
    export_model,
    load_policy,
    measure_costs,
    record,
    save_model,
    zoo,
)
from alight.engine.settings import RunSettings
from alight.errors import BadInput
from alight.policies.policy import ExitAt, Threshold
from alight.serve.app import build_app
from alight.serve.hosting import ModelHost
from alight.serve.model import check_policies, load_served_model
from alight.serve.requests import Limits

TEXTS = ["the bread", "a soup the train a hotel", "song", "", "unknown words " * 50]


@pytest.fixture
def folder(tmp_path):
    return tmp_path, save_text_network(tmp_path)


def test_texts_get_the_decisions_of_the_predictor(folder):
    home, model = folder
    policy = Threshold(thresholds=(0.05,) * (model.num_exits - 1), costs=tuple(range(1, model.num_exits + 1)))
    served = load_served_model(home, {"policy": policy}, max_tokens=16, settings=RunSettings(threads=1))
    assert served.input_kind == "texts"
    batch = {name: torch.as_tensor(part) for name, part in served.tokenize(TEXTS).items()}
    assert batch["input_ids"].shape == (5, 16)
    expected = Predictor(model.eval(), policy, probabilities=True)(batch)
    with TestClient(build_app(ModelHost.of(served, Limits(tokens=16)))) as client:
        predictions = client.post("/predict", json={"texts": TEXTS}).json()["predictions"]
        long = client.post("/predict", json={"texts": ["a" * 20_000]})
        image = client.post("/predict", json={"images": ["Zm9v"]})
    assert [each["index"] for each in predictions] == expected.predictions.tolist()
    assert [each["exit"] for each in predictions] == expected.exits.tolist()
    assert np.allclose([each["probability"] for each in predictions], expected.probabilities, atol=1e-5)
    assert (long.status_code, image.status_code) == (413, 422)
    assert "takes texts, not images" in image.json()["error"]


def test_a_text_network_without_a_tokenizer_is_refused(folder, tmp_path):
    home, _ = folder
    with pytest.raises(BadInput, match=r"there is no tokenizer in .*nowhere: name one"):
        load_served_model(home, {"policy": ExitAt(costs=(1.0,), open_exits=(2,))}, tokenizer=tmp_path / "nowhere")


def test_policies_of_several_units_or_of_one_budget_are_refused():
    with pytest.raises(BadInput, match="there is no policy"):
        check_policies({})
    flops, seconds = (ExitAt(costs=(1.0,), budget=1.0, unit=unit) for unit in ("FLOPs", "ms"))
    with pytest.raises(BadInput, match="costs in 'FLOPs' and 'ms'"):
        check_policies({"a": flops, "b": seconds})
    with pytest.raises(BadInput, match="each of several needs a budget of its own"):
        check_policies({"a": flops, "b": flops})


def test_a_network_of_unknown_normalisation_is_served_arrays_and_refuses_images(tmp_path):
    model = zoo.resnet_digits()
    model.normalisation = None
    policy = ExitAt(costs=(1.0,), open_exits=(model.num_exits - 1,))
    served = load_served_model(save_model(model, tmp_path), {"policy": policy}, settings=RunSettings(threads=1))
    floats = np.random.default_rng(0).normal(size=(2, 1, 8, 8)).astype(np.float32)
    with TestClient(build_app(ModelHost.of(served, Limits()))) as client:
        kind = client.get("/status").json()["input_kind"]
        answered = client.post("/predict", json={"arrays": floats.tolist()}).json()["predictions"]
        image = client.post("/predict", json={"images": [in_base64(np.zeros((8, 8), np.uint8))]})
    assert kind == "arrays"
    assert [each["index"] for each in answered] == Predictor(model.eval(), policy)(floats).predictions.tolist()
    assert image.status_code == 422
    assert "how the network normalises them is unknown: give Normalisation(" in image.json()["error"]


@pytest.mark.parametrize("exported", [False, True])
def test_a_cascade_is_served_with_a_budget_and_a_deadline_per_request(tmp_path, exported):
    policy = calibrate.certified_stream(calibrate.eero, seed=0)(COSTS, "70%", outputs())
    folder = chain().save(tmp_path / "cascade")
    if exported:
        with older_exporter():
            folder = export_model(chain(), policy, tmp_path / "exported", progress=False)
        policy = load_policy(folder / "policy.json")
    served = load_served_model(folder, {"policy": policy}, settings=RunSettings(threads=1))
    assert served.input_kind == "images"
    pictures = [in_base64(each.transpose(1, 2, 0)) for each in pixels()[:40]]
    with TestClient(build_app(ModelHost.of(served, Limits(batch=40)))) as client:
        answers = client.post("/predict", json={"images": pictures}).json()["predictions"]
        cheap = client.post("/predict", json={"images": pictures[:4], "budget": policy.costs[0]}).json()["predictions"]
    assert {each["exit"] for each in answers} > {0}
    said = outputs().predictions
    assert all(each["index"] == said[row, each["exit"]] for row, each in enumerate(answers))
    assert {(each["exit"], each["cost"]) for each in cheap} == {(0, policy.costs[0])}
    assert sum(each["cost"] for each in answers) <= 40 * policy.budget + policy.costs[-1]


def test_a_cascade_whose_large_network_is_remote_and_paid_for_is_served(tmp_path):
    rng = np.random.default_rng(0)
    weights, rows = rng.normal(size=(4, 3)).astype(np.float32), rng.normal(size=(300, 4)).astype(np.float32)
    right = (rows @ weights).argmax(1)
    torch.manual_seed(0)
    small = Member(torch.nn.Linear(4, 3), "small", price=0.0001)
    running = ExitStack()
    url, sizes = running.enter_context(remote_model(weights))
    model = cascade([small, Member(url, "large", price=0.002)], example=torch.zeros(1, 4))
    costs, said = measure_costs(model, unit="USD"), record(model, (rows, right), progress=False)
    policies = {
        name: calibrate.certified_stream(calibrate.eero, seed=0)(costs, budget, said)
        for name, budget in (("low", "30%"), ("high", "60%"))
    }
    folder = model.save(tmp_path / "cascade")
    sizes.clear()
    served = load_served_model(folder, policies, settings=RunSettings(threads=1))
    app = build_app(ModelHost.of(served, Limits(batch=40)))
    assert sum(sizes) <= 6  # calls that are paid for, to time it
    batch = rows[:40].tolist()
    with running, TestClient(app) as client:
        sizes.clear()
        assert client.put("/budget", json={"budget": "60%"}).json()["policy"] == "high"
        assert client.put("/budget", json={"budget": "59%"}).json()["policy"] == "low"  # of the large one alone
        answers = client.post("/predict", json={"arrays": batch}).json()["predictions"]
        assert sum(sizes) == sum(each["exit"] for each in answers) > 0
        assert all(each["index"] == right[row] for row, each in enumerate(answers) if each["exit"])
        assert {each["cost"] for each in answers} == {0.0001, 0.0021}
        for budget, covered in (("$2/1000", 0), ("100%", 0), ("105%", 1), ("0.0021 USD", 1)):
            left = client.post("/predict", json={"arrays": batch, "budget": budget}).json()["predictions"]
            assert max(each["exit"] for each in left) == covered, budget
        little = client.post("/predict", json={"arrays": batch, "budget": "1%"})
        assert "5 % of the full network" in little.json()["error"]
        name = client.get("/v2/models/model").json()["inputs"][0]["name"]
        tensor = {
            "name": name,
            "shape": [40, 4],
            "datatype": "FP32",
            "data": rows[:40].ravel().tolist(),
        }
        replied = client.post("/v2/models/model/infer", json={"inputs": [tensor]}).json()["outputs"]
        found = {each["name"]: each["data"] for each in replied}
        assert 1 in found["exit"]
        assert all(found["index"][row] == right[row] for row in range(40) if found["exit"][row])
        running.close()  # the large network is gone
        failed = client.post("/predict", json={"arrays": batch})
        assert failed.status_code == 503
        assert failed.json()["error"] == "a network that another server runs gave no answer: come again"
        assert client.post("/v2/models/model/infer", json={"inputs": [tensor]}).status_code == 503
        cheap = client.post("/predict", json={"arrays": batch, "budget": 0.0001})
        assert {each["exit"] for each in cheap.json()["predictions"]} == {0}
