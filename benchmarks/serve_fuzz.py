"""Ten thousand malformed requests: the service answers each by a 4xx, never by a 5xx, and its memory stays flat.

    python benchmarks/serve_fuzz.py FOLDER POLICY       # of an image network; 5 minutes on two cores

Requests that break the OpenAPI schema come from schemathesis; the others are made here from one good image: truncated
and damaged files, decompression bombs, arrays with NaN and of wrong shapes, JSON that is deep or broken, wrong types of
content, bodies and headers that are too large, and bytes that are not HTTP. Writes results/serve_faults.csv: requests
and statuses of each kind, and the service's memory after the first thousand and in the end.
"""

import argparse
import base64
import io
import json
import socket
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from service_process import served

from alight.files import write_rows
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
REQUESTS = 10_000
FROM_SCHEMA = 0.4  # of them
WARM = 1000  # requests after which memory is looked at first: caches are filled
JSON = "application/json"
SLOW = 30.0  # seconds that an answer may take
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
)


def sent(port: int, content: bytes) -> int:
    """The status of the answer to these bytes; 0 if the connection was closed without one."""
    with socket.create_connection(("127.0.0.1", port), timeout=SLOW) as connection:
        reply = b""
        with suppress(ConnectionError):  # it need not read all of what it refuses
            connection.sendall(content)
        with suppress(ConnectionError):
            while b"\r\n" not in reply and (more := connection.recv(4096)):
                reply += more
    parts = reply.split(b" ", 2)
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0


def from_here(port: int, count: int, seed: int) -> Iterator[tuple[str, int]]:
    """Kinds and statuses of requests that are made here."""
    rng = np.random.default_rng(seed)
    for index in range(count):
        if index % (len(MADE) + 1) == len(MADE):
            yield "no HTTP", sent(port, rng.bytes(int(rng.integers(1, 3000))) + b"\r\n\r\n")
        else:
            request = MADE[index % (len(MADE) + 1)](rng)
            yield request.kind, sent(port, request.wire())


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
    """Mebibytes that a process has in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("policy", type=Path)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "results/serve_faults.csv")
    options = parser.parse_args()
    schema = int(FROM_SCHEMA * options.requests)
    statuses: dict[str, Counter[int]] = {}
    with served(options.folder, options.policy) as (port, pid):
        start, done, first = time.perf_counter(), 0, memory(pid)
        for source in (
            from_here(port, options.requests - schema, options.seed),
            from_schema(port, schema, options.seed),
        ):
            for kind, status in source:
                statuses.setdefault(kind, Counter())[status] += 1
                done += 1
                if done == min(WARM, options.requests // 2):
                    first = memory(pid)
        seconds, last = time.perf_counter() - start, memory(pid)
        alive = sent(port, b"GET /readyz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n") == 200
    made = provenance("fastapi", "uvicorn", "starlette", "pillow", "schemathesis", folder=ROOT)
    fixed: Row = {"memory_mib_first": first, "memory_mib_last": last, "ready_after": str(alive), "seconds": seconds}
    rows: list[Row] = [
        {
            "kind": kind,
            "requests": counts.total(),
            "statuses": " ".join(f"{status}:{number}" for status, number in sorted(counts.items())),
            "not_4xx": sum(number for status, number in counts.items() if not 400 <= status < 500),
            **fixed,
            **made,
        }
        for kind, counts in statuses.items()
    ]
    for row in rows:
        print(f"{row['kind']:28} {row['requests']:6} {row['statuses']}")
    print(f"{done} requests in {seconds:.0f} s, {first:.1f} MiB, then {last:.1f} MiB, ready after: {alive}")
    write_rows(options.output, rows)


if __name__ == "__main__":
    main()
