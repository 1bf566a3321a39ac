"""An open-loop client: requests are sent when they are due, whether or not earlier ones were answered.

Latency counts from the moment at which a request was due, so that a slow server cannot hide by slowing the client down
(no coordinated omission). Connections are kept alive and reused; as many are opened as there are requests under way.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Reply:
    """What came back: the status, 0 if nothing did, the content, and the seconds since it was due."""

    status: int
    content: Any
    seconds: float


class Client:
    """Connections to one server."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._idle: list[Connection] = []

    async def post(self, path: str, body: bytes, due: float | None = None, headers: str = "") -> Reply:
        """The reply to a body of JSON that was due at this moment of the event loop's clock."""
        due = time.perf_counter() if due is None else due
        try:
            status, content = await self._exchange(await self._connection(), path, body, headers)
        except (OSError, EOFError, ValueError):
            return Reply(0, None, time.perf_counter() - due)
        return Reply(status, content, time.perf_counter() - due)

    async def _connection(self) -> Connection:
        """One that is idle and that the server has not closed meanwhile, or a fresh one."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self.host, self.port)

    async def _exchange(self, connection: Connection, path: str, body: bytes, headers: str) -> tuple[int, Any]:
        reader, writer = connection
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{headers}\r\n"
        )
        writer.write(head.encode() + body)
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        content = await reader.readexactly(int(fields["content-length"]))
        if fields.get("connection", "").lower() == "close":
            writer.close()
        else:
            self._idle.append(connection)
        return int(first.split()[1]), json.loads(content)

    def close(self) -> None:
        """Let all connections go."""
        for _, writer in self._idle:
            writer.close()


async def open_loop(client: Client, path: str, bodies: Sequence[bytes], rate: float, seed: int) -> list[Reply]:
    """The replies to these bodies, sent at random moments of so many a second on average (a Poisson process)."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=len(bodies))
    start = time.perf_counter() + 0.1
    moments, tasks = (start + np.cumsum(gaps)).tolist(), []
    for due, body in zip(moments, bodies, strict=True):
        if (left := due - time.perf_counter()) > 0:
            await asyncio.sleep(left)
        tasks.append(asyncio.create_task(client.post(path, body, due)))
    return list(await asyncio.gather(*tasks))


async def closed_loop(client: Client, path: str, bodies: Sequence[bytes], clients: int, seconds: float) -> float:
    """Requests a second that are answered when each of so many clients sends the next one at once."""
    end, done = time.perf_counter() + seconds, 0

    async def ask(first: int) -> None:
        nonlocal done
        index = first
        while time.perf_counter() < end:
            reply = await client.post(path, bodies[index % len(bodies)])
            if reply.status != 200:
                raise SystemExit(f"a request was answered by {reply.status}: {reply.content}")
            done += 1
            index += clients

    start = time.perf_counter()
    await asyncio.gather(*(ask(first) for first in range(clients)))
    return done / (time.perf_counter() - start)
