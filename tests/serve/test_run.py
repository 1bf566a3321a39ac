"""The service as a process: it drains, keeps its guarantee when it is killed, and fails with one clear line."""

import json
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from commands import run
from digit_service import folder, in_base64, model, pixels, png
from processes import benchmark, service
from waiting import wait_until

from alight import load_policy, record
from alight.cli.command import ExitStatus
from alight.cli.parser import COMMANDS
from alight.policies.policy import Threshold
from alight.serve.monitoring import LOGGER

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def home(tmp_path):
    """A folder of its own with the network and its policies."""
    shutil.copytree(folder(), tmp_path, dirs_exist_ok=True)
    shutil.copy(tmp_path / "unpaced.json", tmp_path / "policy.json")
    return tmp_path


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A service under two policies, and its folder."""
    home = tmp_path_factory.mktemp("shared")
    shutil.copytree(folder(), home, dirs_exist_ok=True)
    with service("model expensive.json cheap.json", home) as running:
        yield running, home


@pytest.fixture(autouse=True)
def _own_handlers():
    yield
    for handler in [*LOGGER.handlers]:
        LOGGER.removeHandler(handler)


@pytest.mark.slow
def test_a_service_killed_under_load_and_restarted_stays_within_its_bound(home):
    pictures = pixels(190)
    table = record(model(), pictures[:, None], progress=False)
    policy = load_policy(home / "cheap.json")
    bodies = [{"images": [in_base64(picture)]} for picture in pictures]
    sent, predictions, lock = [0], [], threading.Lock()

    def load(url, first, stop):
        with httpx.Client(timeout=30) as client:
            index = first
            while not stop.is_set():
                with lock:
                    sent[0] += 1
                try:
                    reply = client.post(f"{url}/predict", json=bodies[index % len(bodies)])
                except httpx.TransportError:
                    return  # it was killed
                assert reply.status_code == 200
                with lock:
                    predictions.append((index % len(bodies), reply.json()["predictions"][0]))
                index += 7

    def under_load(running, count, end):
        stop, target = threading.Event(), len(predictions) + count
        threads = [threading.Thread(target=load, args=(running.url, first, stop)) for first in range(6)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(predictions) >= target)
        end()
        stop.set()
        for thread in threads:
            thread.join()

    line = "model cheap.json --batch-size 8 --state spending.json"
    with service(line, home) as running:
        under_load(running, 60, lambda: running.stop(signal.SIGKILL))
    state = json.loads((home / "spending.json").read_text())
    assert state["reserved"] > 0  # samples were in the file before they were admitted
    with service(line, home) as running:
        under_load(running, 60, lambda: None)
        assert running.stop() == 0
        assert "drained" in [line["event"] for line in running.lines]
    state = json.loads((home / "spending.json").read_text())
    assert state["reserved"] == 0
    assert len(predictions) >= 120
    for index, prediction in predictions:  # every prediction is that of its exit for its image
        assert prediction["index"] == table.predictions[index, prediction["exit"]]
        assert prediction["cost"] == policy.costs[prediction["exit"]]
    spent = sum(prediction["cost"] for _, prediction in predictions)
    assert spent <= sent[0] * policy.budget + policy.costs[-1]
    owed = state["pace"]["spent"] - state["pace"]["admitted"] * policy.budget
    assert spent - sent[0] * policy.budget <= owed + 1  # it assumes to owe no less than it owes


@pytest.mark.slow
def test_the_example_runs_and_requests_that_wait_at_sigterm_are_answered(home):
    shutil.copy(home / "expensive.json", home / "policy.json")
    example = COMMANDS["serve"].examples[0].removeprefix("serve ").replace("--port 8000", "--max-wait 1500")
    with service(example, home) as running:
        replies = []
        body = {"images": [in_base64(pixels(1)[0])]}
        asking = threading.Thread(target=lambda: replies.append(httpx.post(f"{running.url}/predict", json=body)))
        asking.start()
        wait_until(lambda: httpx.get(f"{running.url}/status").json()["queue"] == 1)
        assert running.stop() == 0
        asking.join()
    assert [reply.status_code for reply in replies] == [200]
    assert json.loads((home / "spending.json").read_text())["pace"]["admitted"] == 1
    events = [line["event"] for line in running.lines]
    assert events[-2:] == ["drained", "stopped"]


def refused(line, capsys):
    status, out, err = run(line, capsys)
    assert (status, out) == (ExitStatus.FAILURE, "")
    return err


def test_a_service_that_cannot_start_says_why_in_one_line(home, capsys, monkeypatch):
    monkeypatch.chdir(home)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = refused(f"serve model policy.json --port {port}", capsys)
    assert error == f"alight: 127.0.0.1:{port}: Address already in use\n"
    missing = "alight: there is no folder nowhere: give one that `alight fit` or `alight attach` wrote\n"
    assert refused("serve nowhere policy.json --port 0", capsys) == missing
    error = refused("serve model expensive.json --port 0 --state /dev/full", capsys)
    assert error == "alight: /dev/full: No space left on device\n"
    status, _, error = run("serve model expensive.json --port 0 --state /proc/spending.json", capsys)
    assert (status, error.count("\n")) in ((ExitStatus.INVALID_ARGUMENTS, 1), (ExitStatus.FAILURE, 1))
    assert "spending.json" in error
    assert "16 or more" in refused_with_token("short", capsys, monkeypatch)
    (home / "same").mkdir()
    shutil.copy("cheap.json", "same/expensive.json")
    assert "2 policies have 1 names" in refused("serve model expensive.json same/expensive.json", capsys)
    error = refused("serve model expensive.json --port 0 --no-state --per-hour '3 ms'", capsys)
    assert (
        "the cap '3 ms' of all requests (--per-hour) cannot be used: budget '3 ms' is not in the costs' unit" in error
    )
    error = refused("serve model expensive.json --port 0 --ledger ledger:6379", capsys)
    assert "the ledger ledger:6379 is not a URL" in error
    assert "--tls-key belongs to a certificate" in refused("serve model expensive.json --tls-key key.pem", capsys)
    content = (home / "model" / "model.safetensors").read_bytes()
    for broken in (content[:1000], content[:-5] + bytes(5), b""):
        (home / "model" / "model.safetensors").write_bytes(broken)
        error = refused("serve model policy.json --port 0", capsys)
        assert error.count("\n") == 1
        assert error.startswith("alight: cannot read model")


def refused_with_token(token, capsys, monkeypatch):
    monkeypatch.setenv("ALIGHT_TOKEN", token)
    error = refused("serve model policy.json --port 0", capsys)
    monkeypatch.delenv("ALIGHT_TOKEN")
    return error


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of schemathesis about requests that are malformed on purpose
def test_fuzzed_requests_get_nothing_but_4xx(shared):
    running, _ = shared
    fuzz = benchmark("serve_hostile")
    port = int(running.url.rpartition(":")[2])
    found = [*fuzz.from_schema(port, 60, seed=1)]
    with ThreadPoolExecutor(8) as pool:
        found += pool.map(lambda number: fuzz.from_here(port, number, 1), range(150))
        warm = fuzz.memory(running.process.pid)
        found += pool.map(lambda number: fuzz.from_here(port, number, 2), range(210))
        bombs = [fuzz.many_pixels(np.random.default_rng(seed)) for seed in range(12)]
        found += pool.map(lambda request: fuzz.answered(port, request), bombs)
    assert fuzz.memory(running.process.pid) < 1.1 * warm
    assert httpx.get(f"{running.url}/healthz").status_code == 200
    good = ("few bytes, many pixels",)  # which are pictures, and may be answered
    assert not [(kind, status) for kind, status in found if not 400 <= status < 500 and kind not in good]
    assert {status for kind, status in found if kind in good} <= {200, 413, 429, 504}
    assert len(found) >= 430
    assert len({kind for kind, _ in found}) == 16
    assert not [line for line in running.lines if line["level"] == "error"]


EXPORTED = """
import sys
from pathlib import Path
from fastapi.testclient import TestClient
from alight.engine.settings import RunSettings
from alight.serve.hosting import ModelHost
from alight.serve.model import load_policies, load_served_model
from alight.serve.app import build_app
from alight.serve.requests import Limits
policies = load_policies([Path("exported/policy.json")])
model = load_served_model(Path("exported"), policies, settings=RunSettings(threads=1))
with TestClient(build_app(ModelHost.of(model, Limits()))) as client:
    print(client.post("/predict", content=Path("body.json").read_bytes(),
                      headers={"Content-Type": "application/json"}).text)
assert "torch" not in sys.modules
"""


def test_an_exported_network_is_served_without_torch_and_decides_the_same(home):
    pytest.importorskip("onnxruntime")
    from exported import older_exporter

    from alight import Predictor
    from alight.export.exporting import export_model

    network, four = model(), load_policy(home / "unpaced.json")
    ends, costs = (four.open_exits[0], four.open_exits[-1]), (four.costs[0], four.costs[-1])
    policy = Threshold(thresholds=four.thresholds[:1], costs=costs, open_exits=ends, fingerprint=four.fingerprint)
    with older_exporter():
        export_model(network, policy, home / "exported")
    pictures = pixels(32)
    (home / "body.json").write_text(json.dumps({"images": [in_base64(picture) for picture in pictures]}))
    done = subprocess.run([sys.executable, "-W", "error", "-c", EXPORTED], cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    predictions = json.loads(done.stdout)["predictions"]
    expected = Predictor(network, policy, probabilities=True)(pictures[:, None])
    assert [each["index"] for each in predictions] == expected.predictions.tolist()
    assert [each["exit"] for each in predictions] == expected.exits.tolist()
    assert np.allclose([each["probability"] for each in predictions], expected.probabilities, atol=1e-5)
    assert len(set(expected.exits.tolist())) == 2


@pytest.mark.parametrize("option", ["--compile", "--dtype bf16", "--device cuda", "--tokenizer model"])
def test_an_option_that_an_exported_network_cannot_honour_is_refused(option, home, monkeypatch, capsys):
    pytest.importorskip("onnxruntime")
    from exported import folder as exported_folder

    monkeypatch.chdir(home)
    (home / "exported").symlink_to(exported_folder())
    capsys.readouterr()  # what the exporter has printed
    status, _, err = run(f"serve exported exported/policy.json --port 0 {option}", capsys)
    name = option.split()[0].removeprefix("--")
    assert (status, len(err.splitlines())) == (ExitStatus.FAILURE, 1)
    assert f"exported was exported, and {name} is for networks that were not" in err


def curls():
    """The lines of docs/service.md that send a request."""
    page = (ROOT / "docs" / "service.md").read_text()
    return [line.removeprefix("$ ") for line in page.splitlines() if line.startswith("$ curl ")]


@pytest.mark.slow  # with its start
def test_every_request_on_the_page_about_deployment_is_answered(shared):
    running, home = shared
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    (home / "digit.png").write_bytes(png(pixels(1)[0]))
    (home / "body.json").write_text(json.dumps({"images": [in_base64(pixels(1)[0])], "budget": "60%"}))
    for line in curls():
        words = shlex.split(line.replace("http://localhost:8000", running.url))
        done = subprocess.run([*words, "--silent", "--fail"], cwd=home, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stdout)
        assert done.stdout
    assert httpx.get(f"{running.url}/budget").json()["policy"] == "expensive"  # whose budget is not above 70%
    assert len(curls()) > 9
