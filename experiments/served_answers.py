"""Samples answered by `alight serve`, a process of its own, over HTTP."""

import asyncio
import base64
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from open_loop import Client
from service_process import served

UNDER_WAY = 4  # requests
MOST = 8  # samples of one

Answer = dict[str, Any]


def ask_service(network: Path, policy: Path, kind: str, samples: Sequence[str], options: Sequence[str]) -> list[Answer]:
    """What a service answers to samples of a kind, in their order; requests of several sizes are under way together."""
    with served(network, policy, *options) as process:
        return asyncio.run(_asked(Client("127.0.0.1", process.port), kind, samples))


def as_png(image: np.ndarray) -> str:
    """An image as a file in base64."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


async def _asked(client: Client, kind: str, samples: Sequence[str]) -> list[Answer]:
    sizes: list[int] = []
    rng = np.random.default_rng(0)
    while sum(sizes) < len(samples):
        sizes.append(int(rng.integers(1, MOST + 1)))
    ends = np.cumsum(sizes).tolist()
    parts = [samples[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    found: list[list[Answer]] = [[] for _ in parts]
    turns = iter(enumerate(parts))

    async def ask() -> None:
        for index, part in turns:
            reply = await client.post("/predict", json.dumps({kind: list(part)}).encode())
            if reply.status != 200:
                raise SystemExit(f"the service answered {reply.status}: {reply.content}")
            found[index] = reply.content["predictions"]

    await asyncio.gather(*(ask() for _ in range(UNDER_WAY)))
    client.close()
    return [answer for part in found for answer in part]
