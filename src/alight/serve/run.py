"""The service as a process: its networks are loaded and timed, it serves, and it drains before it stops."""

import asyncio
import ctypes
import logging
import os
import platform
import signal
import socket
import ssl
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from alight.serve.access import Access, Tokens
from alight.serve.app import build_app
from alight.serve.hosting import ModelHost
from alight.serve.monitoring import error_type, log_as_json, log_event

GRACE = 30  # seconds for requests under way, once the service is to stop
KEEP_ALIVE = 75  # seconds that an idle connection lasts: longer than load balancers keep theirs, which is 60 mostly
HEAD = 10.0  # seconds within which the head of a request has to be complete
SPARE = 64  # open files that are not connections
M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3  # of glibc's mallopt
SWITCH = 1e-4  # seconds after which Python lets another thread run: the worker takes turns with the event loop often
READ = 2**15  # bytes that are taken from a connection at once: others wait meanwhile
TELLING = 2**12  # bytes of a body that say how much of it is content
LARGE_BLOCK = 2**20  # bytes: as much as a small request has at most


@dataclass(frozen=True)
class Listening:
    """Where a service listens, and with which certificate."""

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: Path | None = None
    key: Path | None = None

    def bind(self) -> socket.socket:
        """Return a socket with the address, which does not listen yet."""
        bound = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((self.host, self.port))
        except OSError as error:
            bound.close()
            error.filename = f"{self.host}:{self.port}"
            raise
        return bound


class BoundedConnection(H11Protocol):
    """A connection among at most `limit`: one that stalls is closed after a while, or for a new one.

    It stalls if it sends no complete head, or does not read its answers. A body in chunks of a few bytes, each of which
    takes as long as one of many, is not read to its end.
    """

    limit = 512
    timeout = 30.0  # seconds for a client to read
    waiting_since: float | None = None  # for the head of a request
    unread_since: float | None = None  # by the client
    dropped = False

    def connection_made(self, transport: Any) -> None:
        """Take a connection; if there are too many, close the one that has waited longest for its head."""
        super().connection_made(transport)
        transport.max_size = READ
        if len(self.connections) > self.limit:
            self._make_room()
        self._wait_for_head()

    def _make_room(self) -> None:
        """Close one that is only left to be read, the one that waits longest for a head, an idle one, or this one."""
        connections: Any = self.connections  # all of this class
        others = [each for each in connections if each is not self and not each.dropped]
        if len(others) >= self.limit:
            closing = [each for each in others if each.transport.is_closing()]
            waiting = [each for each in others if each.waiting_since is not None]
            idle = [each for each in others if each.is_idle]
            longest = sorted(waiting, key=lambda each: each.waiting_since)
            next(iter([*closing, *longest, *idle, self])).drop()

    def drop(self) -> None:
        """Close the connection, whatever is still to be sent."""
        self.dropped = True
        self.transport.abort()

    def pause_writing(self) -> None:
        """Wait for the client to read, for a while."""
        super().pause_writing()
        self.unread_since = began = time.monotonic()

        def look() -> None:
            if self.unread_since == began:
                log_event("dropped", logging.WARNING, reason="the client does not read its answer")
                self.drop()

        self.loop.call_later(self.timeout, look)

    def resume_writing(self) -> None:
        """Go on: the client has read."""
        super().resume_writing()
        self.unread_since = None

    def data_received(self, data: bytes) -> None:
        """Take bytes; those of a head have to be complete in time, those of a body content to a half at least."""
        cycle = self.cycle
        before = 0 if cycle is None else len(cycle.body)
        super().data_received(data)
        reads_body = cycle is not None and cycle is self.cycle and cycle.more_body and not cycle.response_complete
        if reads_body and len(data) >= TELLING and 2 * (len(cycle.body) - before) < len(data):
            log_event("dropped", logging.WARNING, reason="a body in chunks of a few bytes")
            self.drop()
        if not self.is_idle:
            self.waiting_since = None
        elif self.waiting_since is None and not self.transport.is_closing():
            self._wait_for_head()

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self.waiting_since = began = time.monotonic()

        def look() -> None:
            if self.waiting_since == began:
                self.drop()

        self.loop.call_later(HEAD, look)


@dataclass
class Process:
    """A service that runs: its models and tokens are loaded anew on SIGHUP."""

    host: ModelHost
    access: Access
    token_file: Path | None = None
    config: uvicorn.Config | None = None
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    def on_hangup(self) -> None:
        """Load tokens, certificates and models anew, beside the requests that are under way."""
        task = asyncio.get_running_loop().create_task(asyncio.to_thread(self.reload))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def reload(self) -> None:
        """Load tokens, certificates and models anew; of a part that cannot be loaded, what was is kept."""
        for part, load in {
            "tokens": self._tokens,
            "certificate": self._certificate,
            "models": self.host.reload,
        }.items():
            try:
                changed = load()
            except Exception as error:  # whatever is wrong with the files: the service goes on
                log_event("not reloaded", logging.ERROR, part=part, error=error_type(error))
            else:
                log_event("reloaded", part=part, changed=changed)

    def _tokens(self) -> list[str]:
        """Load the tokens, and return where from."""
        if self.token_file is None:
            return []
        self.access.tokens = Tokens.load(self.token_file)
        return [str(self.token_file)]

    def _certificate(self) -> list[str]:
        """Load the certificate, and return where from; of a key that does not belong to it, nothing is taken."""
        if self.config is None or self.config.ssl is None or not self.config.ssl_certfile:
            return []
        files = self.config.ssl_certfile, self.config.ssl_keyfile
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*files)  # one that fails is left without a key
        self.config.ssl.load_cert_chain(*files)
        return [str(self.config.ssl_certfile)]


def serve(
    load: Callable[[], ModelHost],
    access: Access,
    listening: Listening,
    *,
    token_file: Path | None = None,
    log_level: str = "info",
) -> None:
    """Serve until SIGTERM or SIGINT, then answer requests under way and write the final state.

    `load` loads the networks, once the address is found to be free.
    """
    log_as_json(log_level)
    _return_freed_memory()
    sys.setswitchinterval(SWITCH)
    warnings.filterwarnings("ignore", module="PIL")  # about images that are refused anyway
    with listening.bind() as bound:
        host = load()
        BoundedConnection.limit = min(host.limits.connections, _open_files() - SPARE)
        BoundedConnection.timeout = host.limits.timeout
        process = Process(host, access, token_file)
        process.config = config = uvicorn.Config(
            build_app(host, access),
            http=BoundedConnection,  # which builds on h11, and h11 bounds heads
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=GRACE,
            ssl_certfile=listening.certificate,
            ssl_keyfile=listening.key,
        )
        scheme = "https" if listening.certificate else "http"
        url = "{}://{}:{}".format(scheme, *bound.getsockname())
        log_event("serving", url=url, models=[*host.models], pid=os.getpid())
        # uvicorn raises SIGTERM again once it has drained, which is not a failure
        signal.signal(signal.SIGTERM, lambda *_: log_event("stopped"))
        asyncio.run(_run(uvicorn.Server(config), bound, process))


async def _run(server: uvicorn.Server, bound: socket.socket, process: Process) -> None:
    if hasattr(signal, "SIGHUP"):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, process.on_hangup)
    await server.serve(sockets=[bound])


def _return_freed_memory() -> None:
    """Let glibc return large blocks to the system when they are freed, and keep few heaps: pictures leave no trace."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_ARENA_MAX, 2)
        libc.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


def _open_files() -> int:
    """Return how many files this process may open, as many as the system lets it have."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 2**16
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return 2**16 if soft == resource.RLIM_INFINITY else soft
