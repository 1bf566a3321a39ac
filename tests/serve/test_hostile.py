"""A service in a process of its own, and people who mean harm: others are answered, memory and health stay."""

import base64
import io
import json
import signal
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from digit_service import folder, in_base64, pixels
from PIL import Image
from processes import benchmark, service
from waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.alone]  # starts a service, and looks at the clock


@pytest.fixture
def home(tmp_path):
    for name in ("model", "unpaced.json"):
        (tmp_path / name).symlink_to(folder() / name)
    return tmp_path


def memory(running):
    """Mebibytes that the service has in memory, with the process that reads large pictures."""
    return benchmark("serve_hostile").memory(running.process.pid)


def in_background(*calls):
    """Threads that make these calls."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def test_a_bystander_is_answered_while_large_pictures_are_decoded(home):
    file = io.BytesIO()
    Image.new("RGB", (4000, 4000), (1, 2, 3)).save(file, "WEBP", lossless=True)
    bomb = {"images": [base64.b64encode(file.getvalue()).decode()] * 32}
    small = {"images": [in_base64(pixels(1)[0])], "deadline_ms": 1000}
    assert len(json.dumps(bomb)) < 50_000
    with service("model unpaced.json", home) as running:
        statuses = []

        def attack():
            statuses.append(httpx.post(f"{running.url}/predict", json=bomb, timeout=60).status_code)

        attackers = in_background(*[attack] * 8)
        replies = [httpx.post(f"{running.url}/predict", json=small, timeout=60) for _ in range(20)]
        assert [reply.status_code for reply in replies] == [200] * 20
        assert max(reply.json()["latency_ms"] for reply in replies) < 1000
        for thread in attackers:
            thread.join()
    assert set(statuses) <= {200, 413, 429, 504}


def test_photos_that_come_too_fast_are_refused_and_none_is_answered_late(home):
    rng = np.random.default_rng(0)
    file = io.BytesIO()
    coarse = Image.fromarray(rng.integers(0, 256, (300, 400, 3), dtype=np.uint8))
    coarse.resize((4000, 3000)).save(file, "JPEG", quality=90)
    body = json.dumps({"images": [base64.b64encode(file.getvalue()).decode()]}).encode()
    with service("model unpaced.json --timeout 2 --queue 32", home) as running:
        replies, json_type, stopping = [], {"Content-Type": "application/json"}, threading.Event()

        def send():
            try:
                reply = httpx.post(f"{running.url}/predict", content=body, headers=json_type, timeout=60)
            except httpx.TransportError:  # it came after the service had stopped
                assert stopping.is_set()
                return
            replies.append((reply.status_code, reply.json().get("latency_ms"), reply.headers.get("Retry-After")))

        threads = in_background(*[send] * 60)
        wait_until(lambda: len(replies) > 5)
        stopping.set()
        assert running.stop() == 0  # while many are under way
        for thread in threads:
            thread.join()
        faults = [line for line in running.lines if line["level"] in ("error", "critical")]
    statuses = [status for status, _, _ in replies]
    assert set(statuses) <= {200, 408, 429, 503, 504}  # 408: it took longer than the timeout to arrive
    assert statuses.count(429) > 5
    assert all(int(retry) >= 1 for status, _, retry in replies if status == 429)
    assert max(latency for status, latency, _ in replies if status == 200) <= 2000  # from its arrival, as it counts
    assert not faults


def test_json_that_would_become_many_objects_does_not_fill_the_memory(home):
    body = b'{"arrays": [[' + b'{"": 0},' * (2 * 10**6 - 10) + b"0]]}"
    with service("model unpaced.json", home) as running:
        idle, json_type = memory(running), {"Content-Type": "application/json"}
        slowest = [0.0]

        def send():
            reply = httpx.post(f"{running.url}/predict", content=body, headers=json_type, timeout=60)
            assert reply.status_code in (413, 422, 429)

        threads = in_background(*[send] * 16)
        highest = idle
        while any(thread.is_alive() for thread in threads):
            start = time.monotonic()
            assert httpx.get(f"{running.url}/healthz", timeout=60).status_code == 200
            slowest[0] = max(slowest[0], time.monotonic() - start)
            highest = max(highest, memory(running))
        assert highest < 2 * idle
        assert slowest[0] < 1.0


def test_half_open_connections_leave_room_for_others(home):
    with service("model unpaced.json --connections 200", home) as running, ExitStack() as opened:
        host, port = running.url.removeprefix("http://").split(":")
        for number in range(1100):
            connection = opened.enter_context(socket.create_connection((host, int(port))))
            if number % 2:
                connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\n")
            if number % 100 == 0:
                assert httpx.get(f"{running.url}/healthz").status_code == 200
        small = {"images": [in_base64(pixels(1)[0])]}
        assert httpx.post(f"{running.url}/predict", json=small).status_code == 200
        assert len(list(Path(f"/proc/{running.process.pid}/fd").iterdir())) < 300
        assert running.stop(signal.SIGTERM) == 0
    assert not [line for line in running.lines if line["level"] in ("error", "critical")]


def test_clients_that_do_not_read_their_answers_are_dropped_and_bounded(home):
    with service("model unpaced.json --timeout 2 --connections 20", home) as running, ExitStack() as opened:
        host, port = running.url.removeprefix("http://").split(":")
        for _ in range(60):
            connection = opened.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.setblocking(False)
            with suppress(BlockingIOError, ConnectionError):
                while True:
                    connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        wait_until(lambda: len(list(Path(f"/proc/{running.process.pid}/fd").iterdir())) < 16)
        assert httpx.get(f"{running.url}/healthz").status_code == 200
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            connection.sendall(b"Content-Length: 1000\r\n\r\n{")
        wait_until(lambda: 'path="/predict",status="499"} 1' in httpx.get(f"{running.url}/metrics").text)
        assert running.stop(signal.SIGTERM) == 0
    assert not [line for line in running.lines if line["level"] in ("error", "critical")]


def test_a_body_that_trickles_in_is_dropped(home):
    with service("model unpaced.json --timeout 20", home) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            head = "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: 100000\r\n\r\n".encode())
            start = time.monotonic()
            stop = threading.Event()

            def trickle():
                while not stop.wait(0.3):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return

            (thread,) = in_background(trickle)
            assert b" 408 " in connection.recv(4096)
            assert time.monotonic() - start < 10
            stop.set()
            thread.join()


def test_a_body_in_chunks_of_a_few_bytes_is_not_read_to_its_end(home):
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    with service("model unpaced.json", home) as running:
        address = running.url.removeprefix("http://").split(":")
        for size, answered in ((1, False), (40, True)):
            with socket.create_connection(address, timeout=60) as connection:
                piece = b"%x\r\n" % size + b" " * size + b"\r\n"
                answer = b""
                with suppress(ConnectionError):
                    connection.sendall(head + piece * (2**20 // len(piece)) + b"0\r\n\r\n")
                    answer = connection.recv(4096)
            assert (b" 422 " in answer) if answered else not answer
        with socket.create_connection(address, timeout=60) as connection:  # the next request before the answer
            request = head.replace(b"Transfer-Encoding: chunked", b"Content-Length: 9000") + b" " * 9000
            for _ in range(5):
                connection.sendall(request)
            answers = b""
            while answers.count(b" 422 ") < 5:
                answers += (more := connection.recv(4096))
                assert more
        assert httpx.get(f"{running.url}/healthz").status_code == 200


def test_a_request_of_two_lengths_is_refused_and_what_follows_is_not_read(home):
    hidden = b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n"
    body = b"1\r\n{\r\n0\r\n\r\n" + hidden
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\nContent-Length: %d\r\n\r\n" % len(body)
    with service("model unpaced.json", home) as running:
        with socket.create_connection(running.url.removeprefix("http://").split(":"), timeout=30) as connection:
            connection.sendall(head + body)
            answer = b""
            with suppress(ConnectionError):
                while more := connection.recv(4096):
                    answer += more
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b" 400 " in answer
        assert b"say two lengths" in answer


def test_what_everything_logs_is_json(home):
    with service("model unpaced.json", home) as running:
        with socket.create_connection(running.url.removeprefix("http://").split(":")) as connection:
            connection.sendall(b"\x16\x03\x01 not HTTP\r\n\r\n")
            connection.recv(100)
        assert running.stop() == 0
    assert all("time" in line for line in running.lines)
