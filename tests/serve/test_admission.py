"""What stands before the queue: large requests neither delay small ones nor pile up; garbage is not built."""

import array
import asyncio
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import termios
import threading
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from digit_service import application, in_base64, pixels, png, served_model
from fastapi.testclient import TestClient
from PIL import Image
from text_service import text_model
from waiting import wait_until

from alight.errors import BadInput
from alight.serve import admission as admitting
from alight.serve.admission import Admission, warm_up
from alight.serve.app import build_app
from alight.serve.hosting import ModelHost
from alight.serve.monitoring import Metrics
from alight.serve.pictures import PictureProcess, read_picture
from alight.serve.reading import open_request
from alight.serve.requests import Limits, RequestRefused


def webp(side):
    """A lossless picture of few bytes and many pixels."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), (1, 2, 3)).save(file, "WEBP", lossless=True)
    return file.getvalue()


class Counted:
    """An application, and how many requests it has begun."""

    def __init__(self, app):
        self.app, self.begun = app, 0

    async def __call__(self, scope, receive, send):
        self.begun += scope["type"] == "http"
        await self.app(scope, receive, send)


def together(app, *senders):
    """The replies to requests that begin one after the other, in the order in which they come back."""
    replies = []
    threads = [threading.Thread(target=lambda send=send: replies.append(send())) for send in senders]
    for number, thread in enumerate(threads, 1):
        thread.start()
        wait_until(lambda number=number: app.begun >= number)
    for thread in threads:
        thread.join()
    return replies


def test_a_small_picture_does_not_wait_for_large_ones():
    large = [("images", webp(1500))] * 3
    small = [("images", png(pixels(1)[0]))]
    with TestClient(app := Counted(application())) as client:
        senders = [lambda: client.post("/predict/files", files=large)] * 5
        replies = together(app, *senders, lambda: client.post("/predict/files", files=small))
    assert 1 in [len(reply.json()["predictions"]) for reply in replies[:3]]
    assert {reply.status_code for reply in replies} == {200}


def test_pictures_that_could_not_be_decoded_in_time_are_refused_at_once_and_say_when_to_come_again():
    with TestClient(app := Counted(application(timeout=0.5))) as client:
        sides = [("images", webp(2000))] * 2
        replies = together(app, *[lambda: client.post("/predict/files", files=sides)] * 4)
        statuses = [reply.status_code for reply in replies]
        assert set(statuses) <= {200, 429, 504}
        assert 429 in statuses
        assert all(int(reply.headers["Retry-After"]) >= 1 for reply in replies if reply.status_code == 429)
        never = client.post("/predict/files", files=[("images", webp(3000))] * 8)
    assert never.status_code == 413
    assert "and 0.5 are allowed" in never.json()["error"]


def test_a_small_picture_that_took_long_says_nothing_about_large_ones(monkeypatch):
    admission = Admission(Limits(), 2**20, Metrics())
    usual = admission.rates["images"]
    times = iter([0.0, 60.0])
    monkeypatch.setattr(admitting, "time", SimpleNamespace(monotonic=times.__next__))
    admission._timed("images", 256, admission.quick, str)  # on a machine that does something else
    assert not [*times]
    assert admission.rates["images"] == usual
    for _ in range(100):
        admission._learn("images", 10**6, 60.0)
    assert admission.rates["images"] == pytest.approx(8 * usual)
    for _ in range(100):
        admission._learn("images", 10**6, 10**6 * usual)
    assert admission.rates["images"] == pytest.approx(usual)
    admission.close()


@pytest.mark.parametrize(
    "twice", ["Authorization", "Content-Type", "Content-Encoding", "Origin", "Inference-Header-Content-Length"]
)
def test_a_header_that_a_proxy_may_read_otherwise_is_refused(twice):
    content = json.dumps({"images": [in_base64(pixels(1)[0])]})
    once = {"Content-Type": "application/json", "Content-Encoding": "identity", "Origin": "http://testserver"}
    with TestClient(application()) as client:
        assert client.post("/predict", content=content, headers=once).status_code == 200
        reply = client.post("/predict", content=content, headers=[*once.items(), (twice, "1"), (twice, "2")])
    assert reply.status_code == 400
    assert f"the header {twice.lower()}, " in reply.json()["error"]
    assert reply.headers["Connection"] == "close"


@pytest.mark.parametrize("path", ["/predict", "/predict/files", "/v2/models/model/infer"])
def test_a_body_that_does_not_arrive_in_time_is_408_also_if_the_time_is_short(path):
    app, sent = application(timeout=0.2), []
    kinds = {"/predict/files": b"multipart/form-data; boundary=x"}
    headers = [(b"host", b"localhost"), (b"content-type", kinds.get(path, b"application/json"))]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}

    async def receive():
        if sent:
            await asyncio.Event().wait()  # nothing more ever comes
        sent.append({"type": "first"})
        return {"type": "http.request", "body": b"--x", "more_body": True}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert [message["status"] for message in sent if message["type"] == "http.response.start"] == [408]


def test_every_thread_that_reads_is_warm_before_the_first_request():
    admission, seen = Admission(Limits(readers=3), 2**20, Metrics()), []
    warm_up(admission, lambda: seen.append(threading.current_thread().name))
    assert len({*seen}) == len(seen) == 4  # three for small requests, one for large ones
    admission.close()


def test_a_short_text_does_not_wait_for_long_ones(tmp_path):
    served = text_model(tmp_path, max_tokens=16)
    with TestClient(app := Counted(build_app(ModelHost.of(served, Limits(tokens=16))))) as client:
        long, short = [" ".join(["bread"] * 2600)] * 16, ["the soup"]
        replies = together(
            app,
            *[lambda: client.post("/predict", json={"texts": long})] * 2,
            lambda: client.post("/predict", json={"texts": short}),
        )
    assert len(replies[0].json()["predictions"]) == 1
    assert {reply.status_code for reply in replies} == {200}


@pytest.mark.parametrize(
    "content",
    [
        b'{"arrays": [[' + b'{"": 0},' * 2**18 + b"0]]}",
        b'{"arrays": [' + b"0," * 2**20 + b"0]}",
        b'{"arrays": [' + b"[]," * 2**19 + b"0]}",
        b'{"images": [' + b'"ab",' * 2**18 + b'""]}',
        b'{"images": [' + b"0," * 2**20 + b"0]}",
        b'{"texts": [' + rb'"\\",' * 2**18 + b'""]}',
        b'{"budget": [' + b"0," * 2**20 + b'0], "images": ["ab"]}',
        b"{" + b",".join(b'"a%d":0' % index for index in range(2**17)) + b"}",
        b'{"arrays": ' + b"[" * 2**20,
    ],
    ids=["objects", "numbers", "empty arrays", "strings", "no strings", "escapes", "options", "names", "depth"],
)
def test_nothing_is_built_of_json_that_is_refused(content):
    model, limits = served_model(), Limits()
    tracemalloc.start()
    try:
        with pytest.raises(RequestRefused):
            open_request(content, model, limits)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(content) + 2**16


def test_the_largest_body_is_what_a_full_batch_needs():
    model = served_model()
    assert model.largest_body(32, 0) == 16 * 2**20  # of pictures
    with TestClient(application(batch=4, body=1000)) as client:
        assert client.post("/predict", json={"images": [in_base64(pixels(1)[0])] * 9}).status_code == 413


def test_bytes_under_way_are_bounded():
    with TestClient(app := Counted(application(batch=4, readers=1))) as client:
        slow = [("images", webp(3000))] * 4
        filler = json.dumps({"images": ["A" * (15 * 2**20)]}).encode()
        json_type = {"Content-Type": "application/json"}
        replies = together(
            app,
            lambda: client.post("/predict/files", files=slow),
            *[lambda: client.post("/predict", content=filler, headers=json_type)] * 3,
        )
        statuses = sorted(reply.status_code for reply in replies)
        assert statuses[0] == 200
        assert set(statuses[1:]) <= {413, 422, 429}
        assert client.get("/metrics").text.count('alight_body_bytes{lane="slow"} 0.0') == 1


def test_large_pictures_are_read_in_another_process_with_the_same_result():
    spec, pictures = served_model().spec, PictureProcess()
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (1100, 1000), dtype=np.uint8)).save(file, "PNG")
    large, small = file.getvalue(), png(pixels(1)[0])
    assert np.array_equal(pictures.read(small, spec), read_picture(small, spec))
    assert pictures._process is None
    assert np.array_equal(pictures.read(large, spec), read_picture(large, spec))
    first = pictures._process
    with pytest.raises(BadInput, match="not a complete image"):
        pictures.read(large[: len(large) // 2], spec)
    assert pictures._process is first
    first.kill()  # as the kernel does when memory is short
    first.wait()
    assert np.array_equal(pictures.read(large, spec), read_picture(large, spec))
    pictures._process.send_signal(signal.SIGSTOP)
    stopped = pictures._process

    def kill_once_it_has_to_read():
        waiting = array.array("i", [0])  # bytes
        wait_until(lambda: fcntl.ioctl(stopped.stdin, termios.FIONREAD, waiting) == 0 and waiting[0] > 0)
        stopped.kill()

    threading.Thread(target=kill_once_it_has_to_read).start()
    with pytest.raises(ConnectionError, match="send it again"):
        pictures.read(large, spec)
    pictures.close()
    assert pictures._process is None


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")
def test_on_a_busy_core_the_network_comes_first_then_small_requests_then_large_ones():
    with TestClient(application()) as client:
        assert client.post("/predict/files", files=[("images", png(pixels(1)[0]))]).status_code == 200
        found = {thread.name.partition("_")[0]: thread.native_id for thread in threading.enumerate()}
        loop = client.portal.call(threading.get_native_id)
        threads = [found["alight-model"], loop, found["alight-quick"], found["alight-slow"]]
        model, *others = [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads]
        assert [each - model for each in others] == [5, 5, 10]


LOW_PRIORITY = """
import os
from alight.serve.admission import Lane
if os.getuid() == 0:  # who may raise priorities
    os.setuid(65534)
os.nice(15)
lane = Lane("slow", 1, 1, 10)
print(lane.pool.submit(os.nice, 0).result())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")
def test_a_service_of_low_priority_reads_large_requests_too():
    done = subprocess.run([sys.executable, "-c", LOW_PRIORITY], capture_output=True, text=True)
    assert done.stdout == "19\n", done.stderr
