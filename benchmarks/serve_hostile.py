"""Fifty thousand hostile requests: malformed, huge, slow and half-open ones, and bombs, while a bystander is served.

    python benchmarks/serve_hostile.py FOLDER POLICY       # of an image network; 9 minutes on two idle cores
    for seed in 0 1 2; do python benchmarks/serve_hostile.py FOLDER POLICY --requests 17000 --seed $seed; done

A service has one core. From the other come requests of processes of low priority. Some send, on several connections,
requests that break the OpenAPI schema (by schemathesis) and those made here from one good image: truncated and damaged
files, decompression bombs, pictures of few bytes and many pixels, arrays with NaN and of wrong shapes, JSON that is
deep, broken or would become millions of objects, wrong types of content, bodies and headers that are too large, and
bytes that are not HTTP. Another holds hundreds of connections open that send a head or a body slowly, or nothing. All
the time a bystander sends a good picture and waits for its answer, /healthz is asked, and the memory of the service is
looked at. Writes results/serve_hostile.csv: requests and statuses of each kind, and what the bystander saw before and
during the attack. Rows of other seeds are kept.
"""

import argparse
import asyncio
import base64
import io
import json
import multiprocessing
import os
import socket
import struct
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from serve_load import kept
from service_process import served

from alight.files import write_rows
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
REQUESTS = 50_000
FROM_SCHEMA, SLOWLY = 0.04, 0.04  # of them
CONNECTIONS = 4  # at once, each of which sends again as soon as it is answered
BOMBS = 0.25  # seconds between two pictures of many pixels, sent beside: forty times what can be decoded
HELD = 300  # connections at once that are slow or half-open
QUIET = 30.0  # seconds for which the bystander is alone
EVERY, LOOK = 0.05, 0.25  # seconds between two requests of the bystander, and two looks at health and memory
SERVER_CORE, CLIENT_CORE = 0, 1
DOCUMENTED = (200, 503, 504)  # beside all of 4xx: good pictures are among the bombs
JSON = "application/json"
SLOW = 60.0  # seconds that an answer may take: twice as long as the service lets a request wait
Row = dict[str, str | float | int]


@dataclass(frozen=True)
class Request:
    """What is sent, and what kind of fault it is."""

    kind: str
    path: str
    content: bytes
    headers: dict[str, str]
    method: str = "POST"

    def wire(self) -> bytes:
        """The request as it goes over the connection."""
        lines = [f"{self.method} {self.path} HTTP/1.1", "Host: localhost", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines += [f"Content-Length: {len(self.content)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + self.content


def picture(rng: np.random.Generator) -> bytes:
    """A small image file of a random format."""
    file = io.BytesIO()
    pixels = rng.integers(0, 256, size=(16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, str(rng.choice(["PNG", "JPEG", "WEBP", "GIF", "BMP"])))
    return file.getvalue()


def as_json(**body: object) -> bytes:
    return json.dumps(body).encode()


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def form(*parts: bytes, name: str = "images") -> tuple[bytes, dict[str, str]]:
    """Files as multipart, and its header."""
    head = f'--edge\r\nContent-Disposition: form-data; name="{name}"; filename="a.png"\r\n\r\n'.encode()
    return b"".join(head + part + b"\r\n" for part in parts) + b"--edge--\r\n", {
        "Content-Type": "multipart/form-data; boundary=edge"
    }


def truncated(rng: np.random.Generator) -> Request:
    content = picture(rng)
    cut = content[: int(rng.integers(0, int(0.6 * len(content))))]
    if rng.random() < 0.5:
        return Request("truncated image", "/predict", as_json(images=[encoded(cut)]), {"Content-Type": JSON})
    body, headers = form(cut)
    return Request("truncated image", "/predict/files", body, headers)


def no_image(rng: np.random.Generator) -> Request:
    body, headers = form(rng.bytes(int(rng.integers(1, 2000))))
    return Request("no image", "/predict/files", body, headers)


def bomb(rng: np.random.Generator) -> Request:
    """A PNG of a few bytes that says it has up to 10^9 pixels, and of which some really have."""
    side = int(rng.integers(5_000, 30_000))
    rows = zlib.compress(bytes(side // 8 + 2) * int(rng.choice([10, 400])), 9)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    body, headers = form(b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b""))
    return Request("decompression bomb", "/predict/files", body, headers)


@cache
def plain_picture(side: int) -> bytes:
    """A lossless picture of one colour: it takes long to make, so it is made once."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), (1, 2, 3)).save(file, "WEBP", lossless=True)
    return file.getvalue()


def many_pixels(rng: np.random.Generator) -> Request:
    """Pictures of a few hundred bytes and 16 million pixels each: seconds of decoding in a request of a few KB."""
    body, headers = form(*[plain_picture(int(rng.choice([2500, 3000, 4000])))] * int(rng.integers(1, 33)))
    return Request("few bytes, many pixels", "/predict/files", body, headers)


def amplified(rng: np.random.Generator) -> Request:
    """JSON that a parser would make into millions of objects."""
    piece = [b'{"":0},', b"0,", b"[],", b'"a",', b"[[0]],"][int(rng.integers(5))]
    kind = str(rng.choice(["arrays", "images", "texts", "budget"]))
    content = b'{"' + kind.encode() + b'":[' + piece * int(rng.integers(10_000, 400_000)) + b"0]}"
    return Request("JSON of many objects", "/predict", content, {"Content-Type": JSON})


def tensors(rng: np.random.Generator) -> Request:
    """Requests of the V2 protocol whose parts do not fit."""
    shape = rng.integers(-1, 40, size=int(rng.integers(0, 5))).tolist()
    kind = str(rng.choice(["FP32", "UINT8", "BYTES", "FP99"]))
    tail = rng.bytes(int(rng.integers(0, 2000)))
    tensor = {"name": "x", "shape": shape, "datatype": kind, "parameters": {"binary_data_size": len(tail)}}
    head = as_json(
        inputs=[tensor] * int(rng.integers(0, 3)), parameters={"budget": "much"} if rng.random() < 0.2 else {}
    )
    headers = {"Inference-Header-Content-Length": str(len(head) + int(rng.choice([0, 0, 1, 10**9, -1])))}
    return Request("tensors that do not fit", "/v2/models/model/infer", head + tail, headers)


def from_elsewhere(rng: np.random.Generator) -> Request:
    headers = {"Content-Type": JSON, "Origin": str(rng.choice(["https://evil.org", "null", "http://localhost:1"]))}
    return Request("pages of other hosts", "/budget", as_json(policy="x"), headers, "PUT")


def thin(rng: np.random.Generator) -> Request:
    """An image of few pixels, one high, that resizing would make into a very large one."""
    file = io.BytesIO()
    size = (int(rng.integers(600_000, 1_000_000)), 1)
    Image.new("L", size if rng.random() < 0.5 else size[::-1]).save(file, "PNG")
    body, headers = form(file.getvalue())
    return Request("long and thin image", "/predict/files", body, headers)


def not_finite(rng: np.random.Generator) -> Request:
    array = rng.normal(size=(3, 32, 32)).round(3)
    array.flat[rng.integers(array.size)] = rng.choice([np.nan, np.inf, -np.inf, 1e38])
    return Request("NaN or infinite array", "/predict", as_json(arrays=[array.tolist()]), {"Content-Type": JSON})


def wrong_shape(rng: np.random.Generator) -> Request:
    shape = tuple(rng.integers(0, 6, size=int(rng.integers(1, 6))).tolist())
    array: object = np.zeros(shape).tolist()
    if rng.random() < 0.3:
        array = [[1.0, 2.0], [3.0], "x", None, {"a": 1}][: int(rng.integers(1, 6))]
    return Request("wrong shape", "/predict", as_json(arrays=[array]), {"Content-Type": JSON})


def broken_json(rng: np.random.Generator) -> Request:
    good = as_json(images=[encoded(picture(rng))], budget="50%")
    choices = [
        good[: int(rng.integers(1, len(good)))],
        b"[" * int(rng.integers(1, 100_000)),
        b'{"a":' * int(rng.integers(1, 20_000)),
        rng.bytes(int(rng.integers(1, 500))),
        b'{"arrays": [[1' + b"0" * 5000 + b"]]}",
        b'{"texts": ["\\ud800"]}',
    ]
    return Request("broken JSON", "/predict", choices[int(rng.integers(len(choices)))], {"Content-Type": JSON})


def wrong_options(rng: np.random.Generator) -> Request:
    values = [-1, 0, "much", "50 parsecs", "1e999%", [], {}, True, "9" * 100, float("nan")]
    name = str(rng.choice(["budget", "deadline_ms"]))
    value = values[int(rng.integers(len(values)))]
    body = as_json(images=[encoded(picture(rng))], **{name: value})
    return Request("wrong budget or deadline", "/predict", body, {"Content-Type": JSON})


def wrong_address(rng: np.random.Generator) -> Request:
    path = str(rng.choice(["/predict/", "/%00", "/../etc/passwd", "/predict?" + "x=1&" * 500, "/" + "a" * 5000]))
    method = str(rng.choice(["POST", "DELETE", "PATCH", "TRACE", "PUT", "BREW"]))
    kind = str(rng.choice(["", "text/html", "application/x-www-form-urlencoded", "multipart/form-data", "\x7f"]))
    return Request("wrong path, method or type", path, b"x=1", {"Content-Type": kind}, method)


def too_large(rng: np.random.Generator) -> Request:
    if rng.random() < 0.5:
        return Request("too large", "/predict", b"x", {"X-Huge": "a" * int(rng.integers(70_000, 200_000))})
    body, headers = form(*[b"x"] * int(rng.integers(40, 200)))
    return Request("too large", "/predict/files", body, headers)


MADE: tuple[Callable[[np.random.Generator], Request], ...] = (
    truncated,
    no_image,
    bomb,
    thin,
    not_finite,
    wrong_shape,
    broken_json,
    wrong_options,
    wrong_address,
    too_large,
    amplified,
    tensors,
    from_elsewhere,
)


def sent(port: int, content: bytes) -> int:
    """The status of the answer to these bytes; 0 if the connection was closed without one, or none came."""
    with socket.create_connection(("127.0.0.1", port), timeout=SLOW) as connection:
        reply = b""
        with suppress(ConnectionError):  # it need not read all of what it refuses
            connection.sendall(content)
        with suppress(ConnectionError, TimeoutError):
            while b"\r\n" not in reply and (more := connection.recv(4096)):
                reply += more
    parts = reply.split(b" ", 2)
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0


def from_here(port: int, number: int, seed: int) -> tuple[str, int]:
    """The kind and the status of the request of this number, which is made here."""
    rng = np.random.default_rng((seed, number))
    if number % (len(MADE) + 1) == len(MADE):
        return "no HTTP", sent(port, rng.bytes(int(rng.integers(1, 3000))) + b"\r\n\r\n")
    return answered(port, MADE[number % (len(MADE) + 1)](rng))


def answered(port: int, request: Request) -> tuple[str, int]:
    """The kind and the status of a request."""
    return request.kind, sent(port, request.wire())


def from_schema(port: int, count: int, seed: int) -> Iterator[tuple[str, int]]:
    """Kinds and statuses of requests that break the schema."""
    import hypothesis
    import schemathesis

    base = f"http://127.0.0.1:{port}"
    schema = schemathesis.openapi.from_url(f"{base}/openapi.json")
    operations = (("/predict", "POST"), ("/predict/files", "POST"), ("/budget", "PUT"))
    for path, method in operations:
        found: list[int] = []
        strategy = schema[path][method].as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)
        run = hypothesis.seed(seed)(hypothesis.given(case=strategy)(_asking(base, path, method, found)))
        hypothesis.settings(
            max_examples=-(-count // len(operations)),
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )(run)()
        yield from (("against the schema", status) for status in found)


def _asking(base: str, path: str, method: str, found: list[int]) -> Callable[[Any], None]:
    """What sends a case where it belongs, whatever else is wrong with it, and notes the status."""

    def ask(case: Any) -> None:
        case.method, case.path = method, path
        found.append(case.call(base_url=base, timeout=SLOW).status_code)

    return ask


def memory(pid: int) -> float:
    """Mebibytes that a process and those that it started have in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    own = next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), 0.0)
    started = " ".join(each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/children"))
    return own + sum(memory(int(child)) for child in started.split())


async def slowly(port: int, count: int, seed: int) -> Counter[str]:
    """Send heads and bodies slowly, or nothing, on many connections at once; statuses by kind."""
    rng, seen, room = np.random.default_rng(seed), Counter[str](), asyncio.Semaphore(HELD)
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    begun = {
        "half-open connection": b"",
        "slow head": head,
        "slow body": head + b"Content-Length: 1000000\r\n\r\n",
        "body that stops": head + b"Content-Length: 300000\r\n\r\n" + b" " * 200_000,
    }

    async def one(kind: str) -> None:
        async with room:
            status = 0
            with suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(begun[kind])
                answer = asyncio.create_task(reader.read(64))
                while not answer.done():
                    if kind in ("slow head", "slow body"):
                        writer.write(b"x")
                    await asyncio.wait([answer], timeout=0.5)
                parts = answer.result().split(b" ", 2) if answer.exception() is None else []
                status = int(parts[1]) if len(parts) > 1 else 0
                writer.close()
            seen[f"{kind}|{status}"] += 1

    kinds = rng.choice([*begun], size=count).tolist()
    await asyncio.gather(*map(one, kinds))
    return seen


def _attack(kind: str, port: int, count: int, seed: int, results: Any) -> None:
    """Send hostile requests, in a process of its own."""
    os.sched_setaffinity(0, {CLIENT_CORE})
    os.nice(10)
    seen: Counter[str] = Counter()
    if kind == "slow":
        seen = asyncio.run(slowly(port, count, seed))
    elif kind == "schema":
        warnings.simplefilter("ignore")
        seen.update(f"{each}|{status}" for each, status in from_schema(port, count, seed))
    else:
        rng, bombs = np.random.default_rng(seed), []
        with ThreadPoolExecutor(CONNECTIONS) as pool, ThreadPoolExecutor(HELD) as beside:
            cheap = [pool.submit(from_here, port, number, seed) for number in range(count)]
            while not all(each.done() for each in cheap):
                bombs.append(beside.submit(answered, port, many_pixels(rng)))
                time.sleep(BOMBS)
        found = [each.result() for each in (*cheap, *bombs)]
        seen.update(f"{each}|{status}" for each, status in found)
    results.put(seen)


class Bystander:
    """Sends a good picture again and again, and notes how long the answer takes; looks at health and memory."""

    def __init__(self, port: int, pid: int) -> None:
        self.port, self.pid = port, pid
        self.seconds: list[float] = []
        self.health = self.memory = 0.0
        self.failed: Counter[int] = Counter()
        body = as_json(images=[encoded(picture(np.random.default_rng(0)))])
        self._wire = Request("", "/predict", body, {"Content-Type": JSON}).wire()

    def watch(self, going_on: Callable[[], bool]) -> None:
        """Send and look for as long as it goes on."""
        looked = 0.0
        while going_on():
            start = time.perf_counter()
            if (status := sent(self.port, self._wire)) != 200:
                self.failed[status] += 1
            self.seconds.append(time.perf_counter() - start)
            if start - looked > LOOK:
                looked = time.perf_counter()
                healthy = sent(self.port, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                self.failed[healthy] += healthy != 200
                self.health = max(self.health, time.perf_counter() - looked)
                self.memory = max(self.memory, memory(self.pid))
            time.sleep(max(0.0, EVERY - (time.perf_counter() - start)))

    def p99(self) -> float:
        """Milliseconds within which 99 % of the answers came."""
        return float(1e3 * np.quantile(self.seconds, 0.99))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("policy", type=Path)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--quiet-seconds", type=float, default=QUIET)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "results/serve_hostile.csv")
    options = parser.parse_args()
    os.sched_setaffinity(0, {CLIENT_CORE})
    counts = {"schema": int(FROM_SCHEMA * options.requests), "slow": int(SLOWLY * options.requests)}
    counts["fast"] = options.requests - sum(counts.values())
    with served(options.folder, options.policy, core=SERVER_CORE) as (port, pid):
        before = Bystander(port, pid)
        end = time.monotonic() + options.quiet_seconds
        before.watch(lambda: time.monotonic() < end)
        idle, start = memory(pid), time.perf_counter()
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        attacks = [
            context.Process(target=_attack, args=(kind, port, count, options.seed, results))
            for kind, count in counts.items()
        ]
        for attack in attacks:
            attack.start()
        during, statuses = Bystander(port, pid), Counter[str]()
        during.watch(lambda: any(attack.is_alive() for attack in attacks) and results.qsize() < len(attacks))
        for _ in attacks:
            statuses.update(results.get())
        seconds = time.perf_counter() - start
        after = memory(pid)
        alive = sent(port, b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") == 200
    made = provenance("fastapi", "uvicorn", "starlette", "pillow", "schemathesis", "msgspec", folder=ROOT)
    fixed: Row = {"memory_mib_idle": idle, "memory_mib_most": during.memory, "memory_mib_after": after}
    fixed |= {"healthz_s_most": during.health, "bystander_p99_ms_quiet": before.p99(), "bystander_p99_ms": during.p99()}
    fixed |= {"bystander_failed": during.failed.total(), "bystander_requests": len(during.seconds)}
    fixed |= {"ready_after": str(alive), "seconds": seconds, "seed": options.seed}
    rows: list[Row] = []
    for kind in dict.fromkeys(key.partition("|")[0] for key in sorted(statuses)):
        own = {int(key.rpartition("|")[2]): count for key, count in statuses.items() if key.startswith(f"{kind}|")}
        wrong = sum(count for status, count in own.items() if status >= 500 and status not in DOCUMENTED)
        shown = " ".join(f"{status}:{count}" for status, count in sorted(own.items()))
        rows.append({"kind": kind, "requests": sum(own.values()), "statuses": shown, "wrong": wrong, **fixed, **made})
        print(f"{kind:28} {sum(own.values()):6} {shown}")
    print(f"{statuses.total()} requests in {seconds:.0f} s; {fixed}; bystander: {dict(during.failed)}")
    write_rows(options.output, [*(row for row in kept(options.output) if row["seed"] != str(options.seed)), *rows])


if __name__ == "__main__":
    main()
