"""A day of requests in an hour: memory stays flat, and no answer is lost or swapped.

    python benchmarks/serve_soak.py --requests 1000000       # half an hour on two idle cores; --seconds ends it earlier

A service of a small network that has learned scikit-learn's digits, under a stream policy that keeps its spend in a
file, gets one picture after the other on kept connections: as a file in JSON, and as a tensor of the V2 protocol in
JSON and in bytes. One request of fifty is malformed, of the kinds that benchmarks/serve_hostile.py makes. Every answer
to a good picture is compared with what its exit says by a recording. At the end the service has counted as many samples
as the clients have answers, but for requests that were refused as late, and has spent no more than its bound, or the
script fails. Writes results/serve_soak.csv: memory, requests a second and latencies of each twentieth of the run.
"""

import argparse
import asyncio
import itertools
import json
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from open_loop import Client
from serve_fleet import body, prepare
from serve_hostile import MADE, memory
from service_process import Process, served

from alight import load_model, record
from alight.files import write_rows
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
PARTS, CLIENTS, HOSTILE = 20, 128, 0.02
Row = dict[str, str | float | int]


class Question(NamedTuple):
    """A good request, and the picture that it asks about."""

    path: str
    content: bytes
    headers: str
    picture: int


def questions(pictures: np.ndarray) -> list[Question]:
    """Each picture in one of the three ways to send it."""
    asked = []
    for index, picture in enumerate(pictures):
        tensor: dict[str, Any] = {"name": "x", "shape": [1, 1, *picture.shape], "datatype": "UINT8"}
        if index % 3 == 0:
            asked.append(Question("/predict", body(picture), "", index))
        elif index % 3 == 1:
            content = json.dumps({"inputs": [tensor | {"data": picture.ravel().tolist()}]}).encode()
            asked.append(Question("/v2/models/model/infer", content, "", index))
        else:
            head = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": picture.size}}]}).encode()
            length = f"Inference-Header-Content-Length: {len(head)}\r\n"
            asked.append(Question("/v2/models/model/infer", head + picture.tobytes(), length, index))
    return asked


def answered(content: dict[str, Any]) -> tuple[int, int]:
    """The class and the exit of one picture, from an answer of either protocol."""
    if "outputs" in content:
        outputs = {output["name"]: output["data"] for output in content["outputs"]}
        return outputs["index"][0], outputs["exit"][0]
    (found,) = content["predictions"]
    return found["index"], found["exit"]


def faults(status: dict[str, Any], answers: int, late: int) -> list[str]:
    """What is wrong with the counts of a service after so many answers, and refusals of requests that waited too long.

    >>> status = {"samples": 12, "spent": 7.0, "allowed": 6.0, "max_overspend": 1.0}
    >>> faults(status, answers=10, late=2), faults(status, answers=10, late=1)
    ([], ['10 answers and 1 late refusals, and the service has decided 12 samples'])
    """
    found = []
    if not answers <= status["samples"] <= answers + late:  # a sample may be decided just after its request was refused
        found.append(
            f"{answers} answers and {late} late refusals, and the service has decided {status['samples']} samples"
        )
    if status["spent"] > status["allowed"] + status["max_overspend"]:
        found.append(f"the bound is broken: {status}")
    return found


async def soak(
    process: Process, asked: list[Question], expected: np.ndarray, options: argparse.Namespace
) -> tuple[list[Row], list[str]]:
    """Send all requests, or as many as the seconds allow; a row for each part, and what the counts show to be wrong."""
    client, numbers, statuses = Client("127.0.0.1", process.port), itertools.count(), Counter[int]()
    wrong, answers, seconds = 0, 0, list[float]()
    rows: list[Row] = []
    rng = np.random.default_rng(0)
    small = [make for make in MADE if make.__name__ not in ("many_pixels", "amplified", "thin", "bomb", "too_large")]
    hostile = [request for make in small for request in (make(rng) for _ in range(20))]
    hostile = [each for each in hostile if each.path == "/predict" and each.headers.get("Content-Type")]
    start, done = time.monotonic(), 0
    end, part = start + options.seconds, options.part or options.requests // PARTS

    async def ask() -> None:
        nonlocal wrong, answers, done
        while (number := next(numbers)) < options.requests and time.monotonic() < end:
            if number % int(1 / HOSTILE) == 0:
                reply = await client.post("/predict", hostile[number % len(hostile)].content)
            else:
                path, content, headers, picture = asked[number % len(asked)]
                reply = await client.post(path, content, headers=headers)
                if reply.status == 200:
                    answers += 1
                    index, left = answered(reply.content)
                    wrong += index != expected[picture, left]
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
                "memory_mib": memory(process.pid),
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
    with urllib.request.urlopen(f"http://127.0.0.1:{process.port}/status") as response:
        return rows, faults(json.load(response), answers, statuses[504])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which it ends")
    parser.add_argument("--part", type=int, default=0, help="requests of one row (default: a twentieth)")
    parser.add_argument("--output", type=Path, default=ROOT / "results/serve_soak.csv")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _, (clean, noisy) = prepare(folder)
        pictures = np.concatenate([clean, noisy])
        table = record(load_model(folder / "model"), pictures[:, None], progress=False)
        with served(folder / "model", folder / "policy.json") as process:
            rows, wrong = asyncio.run(soak(process, questions(pictures), table.predictions, options))
    made = provenance("numpy", "torch", "uvicorn", "fastapi", folder=ROOT)
    write_rows(options.output, [row | made for row in rows])
    wrong += [f"answers that are wrong or lost: {row}" for row in rows if row["wrong"] or row["lost"]]
    if wrong:
        raise SystemExit(wrong[-1])


if __name__ == "__main__":
    main()
