"""A day of requests in an hour: memory stays flat, and no answer is lost or swapped.

    python benchmarks/serve_soak.py --requests 1000000       # 50 minutes on two idle cores; --seconds ends it earlier

A service of a small network that has learned scikit-learn's digits, under a stream policy that keeps its spend in a
file, gets one picture after the other on kept connections; one request of fifty is malformed, of the kinds that
benchmarks/serve_hostile.py makes. Every answer to a good picture is compared with what its exit says by a recording.
Writes results/serve_soak.csv: memory, requests a second and latencies of each fiftieth of the run.
"""

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from open_loop import Client
from serve_fleet import body, prepare
from serve_hostile import MADE, memory
from service_process import served

from alight import load_model, record
from alight.files import write_rows
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
PARTS, CLIENTS, HOSTILE = 50, 32, 0.02
Row = dict[str, str | float | int]


async def soak(
    port: int, pid: int, bodies: list[bytes], expected: np.ndarray, options: argparse.Namespace
) -> list[Row]:
    """Send all requests, or as many as the seconds allow, and return a row for each part."""
    client, numbers, statuses = Client("127.0.0.1", port), itertools.count(), Counter[int]()
    wrong, seconds = 0, list[float]()
    rows: list[Row] = []
    rng = np.random.default_rng(0)
    small = [make for make in MADE if make.__name__ not in ("many_pixels", "amplified", "thin", "bomb", "too_large")]
    hostile = [request for make in small for request in (make(rng) for _ in range(20))]
    hostile = [each for each in hostile if each.path == "/predict" and each.headers.get("Content-Type")]
    start, done = time.monotonic(), 0
    end, part = start + options.seconds, options.part or options.requests // PARTS

    async def ask() -> None:
        nonlocal wrong, done
        while (number := next(numbers)) < options.requests and time.monotonic() < end:
            if number % int(1 / HOSTILE) == 0:
                reply = await client.post("/predict", hostile[number % len(hostile)].content)
            else:
                index = number % len(bodies)
                reply = await client.post("/predict", bodies[index])
                if reply.status == 200:
                    (found,) = reply.content["predictions"]
                    wrong += found["index"] != expected[index, found["exit"]]
            statuses[reply.status] += 1
            seconds.append(reply.seconds)
            done += 1
            if done % part == 0:
                note()

    def note() -> None:
        nonlocal start
        took = time.monotonic() - start
        rows.append(
            {
                "requests": done,
                "memory_mib": memory(pid),
                "requests_per_second": len(seconds) / took,
                "p50_ms": float(1e3 * np.median(seconds)),
                "p99_ms": float(1e3 * np.quantile(seconds, 0.99)),
                "statuses": " ".join(f"{status}:{count}" for status, count in sorted(statuses.items())),
                "wrong": int(wrong),
                "lost": statuses[0],
            }
        )
        print(rows[-1], flush=True)
        seconds.clear()
        start = time.monotonic()

    await asyncio.gather(*(ask() for _ in range(CLIENTS)))
    client.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which it ends")
    parser.add_argument("--part", type=int, default=0, help="requests of one row (default: a fiftieth)")
    parser.add_argument("--output", type=Path, default=ROOT / "results/serve_soak.csv")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _, (clean, noisy) = prepare(folder)
        pictures = np.concatenate([clean, noisy])
        table = record(load_model(folder / "model"), pictures[:, None], progress=False)
        with served(folder / "model", folder / "policy.json") as (port, pid):
            bodies = [body(picture) for picture in pictures]
            rows = asyncio.run(soak(port, pid, bodies, table.predictions, options))
    made = provenance("numpy", "torch", "uvicorn", "fastapi", folder=ROOT)
    write_rows(options.output, [row | made for row in rows])
    print(json.dumps(rows[-1]))


if __name__ == "__main__":
    main()
