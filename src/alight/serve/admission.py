"""The one place that admits requests: bytes, samples and the time to read them are counted before any work starts.

Small requests are read by threads of their own, and large ones by one thread of low priority, so that a picture of a
few kilobytes never waits for one of many megapixels. What is under way is known in bytes, in samples and in seconds of
reading. A request that could not be answered in time is refused at once, with the seconds after which it may come back.
Around every request, a middleware bounds and authorises it, logs it as one line of JSON, counts and traces it.
"""

import asyncio
import logging
import math
import os
import random
import re
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alight.serve.access import Access
from alight.serve.monitoring import Metrics, Tracer, error_type, log_event
from alight.serve.pictures import NICENESS, PictureProcess
from alight.serve.requests import Limits, RequestRefused, retry_after

QUICK_BYTES, QUICK_SECONDS = 2**20, 0.05  # of a request that is small
QUICK_TOTAL = 32 * 2**20  # bytes of all small requests under way
QUICK_NICENESS = 5  # of what takes and reads small requests: on a busy core, those that were read are answered first
SLOW_BODIES = 2  # times the largest body: bytes of all large requests under way
READING = {"images": 4e-8, "texts": 5e-6, "arrays": 2e-8}  # seconds per pixel, letter, byte; as measured once it runs
PER_SAMPLE = 5e-4  # seconds
TELLING = 0.02  # seconds that reading has to be expected to take, so that its measurement says something about the rate
WEIGHT = 0.3  # of the latest measurement
WITHIN = 8.0  # times faster or slower than READING a measured rate may be: a busy moment must not refuse everything
STALL, LEAST = 5.0, 2**14  # seconds within which so many bytes of a body have to arrive: slower clients are dropped
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")  # as clients may name a request
PATHS = ("/", "/predict", "/predict/files", "/budget", "/status", "/healthz", "/readyz", "/metrics", "/openapi.json")
# other paths are counted under the route that takes them, so that clients cannot make metrics grow
GONE = 499  # as logs and metrics say that a client went before its request was complete; it is never sent
QUIET = ("/healthz", "/readyz", "/metrics", "/status")  # paths logged at level debug

Result = TypeVar("Result")


class Lane:
    """Threads that read requests in the order of coming, and the work and bytes that wait for them."""

    def __init__(self, name: str, threads: int, most_bytes: int, niceness: int) -> None:
        self.name, self.threads, self.most_bytes = name, threads, most_bytes
        self.bytes = 0  # of requests under way
        self.seconds = 0.0  # that unfinished reading is expected to take
        self.pool = ThreadPoolExecutor(threads, f"alight-{name}", initializer=partial(be_nice, niceness))

    @property
    def wait(self) -> float:
        """Seconds until a thread is free for the next request."""
        return self.seconds / self.threads


def be_nice(niceness: int) -> None:
    """Lower the priority of this thread, from whatever it is, where the system has one for each thread."""
    if sys.platform == "linux":
        os.nice(niceness)


@dataclass
class ReceivedBody:
    """How much of a request's body has arrived, and until when all of it, and the next part of it, must."""

    deadline: float
    size: int = 0
    complete: bool = False
    lane: Lane | None = None  # which counts its bytes
    window_size: int = 0
    window_end: float = math.inf


class Admission:
    """All that is under way in a service, and what may still begin. It belongs to the event loop's thread."""

    def __init__(self, limits: Limits, body: int, metrics: Metrics) -> None:
        self.limits, self.body, self.metrics = limits, body, metrics
        self.quick = Lane("quick", limits.readers, QUICK_TOTAL, QUICK_NICENESS)
        self.slow = Lane("slow", 1, SLOW_BODIES * body, NICENESS)
        self.rates = dict(READING)
        self.pictures = PictureProcess()  # for those that are large

    def hold(self, body: ReceivedBody, size: int) -> None:
        """Count bytes that have arrived; refuse the request if it is too large, alone or with the others."""
        body.size += size
        if body.size - body.window_size >= LEAST:  # a window ends once enough bytes have come in it
            body.window_size, body.window_end = body.size, time.monotonic() + STALL
        if body.size > self.body:
            raise self.too_large()
        lane = self.quick if body.size <= QUICK_BYTES else self.slow
        if lane is not body.lane:
            if body.lane is not None:
                body.lane.bytes -= body.size - size
            body.lane, size = lane, body.size
        lane.bytes += size
        if lane.bytes > lane.most_bytes:
            raise RequestRefused(
                429, f"{lane.bytes:,} bytes of requests are under way: come again", retry_after(lane.wait)
            )

    def release(self, body: ReceivedBody) -> None:
        """Let the bytes of a request go."""
        if body.lane is not None:
            body.lane.bytes -= body.size
            body.lane = None

    def too_large(self) -> RequestRefused:
        """Return the refusal of a body that is too large."""
        return RequestRefused(413, f"the request is too large: at most {self.body:,} bytes are taken")

    async def read(
        self, kind: str, amount: int, samples: int, until: float, work: Callable[..., Result], *arguments: Any
    ) -> Result:
        """Return what work makes of samples with so many pixels, letters or bytes, in a thread of the lane for it.

        It has to be finished at `until`, on the clock of time.monotonic.
        """
        seconds, left = samples * PER_SAMPLE + amount * self.rates[kind], until - time.monotonic()
        least = samples * PER_SAMPLE + amount * min(self.rates[kind], READING[kind])  # when nothing else is under way
        if least > self.limits.timeout:
            raise RequestRefused(
                413, f"reading these {kind} takes about {least:.1f} seconds, and {self.limits.timeout:g} are allowed"
            )
        lane = self.quick if seconds <= QUICK_SECONDS else self.slow
        if seconds > left:
            raise RequestRefused(504, f"reading takes {1e3 * seconds:.1f} ms: no exit is left in time")
        if lane.wait + seconds > left:
            raise RequestRefused(
                429, f"{lane.wait:.1f} seconds of reading are under way: come again", retry_after(lane.wait)
            )
        lane.seconds += seconds
        loop = asyncio.get_running_loop()
        future = lane.pool.submit(self._timed, kind, amount, lane, work, *arguments)
        future.add_done_callback(partial(loop.call_soon_threadsafe, self._finished, lane, seconds))
        return await asyncio.wrap_future(future)  # which drops it from the lane if the request is cancelled

    def _finished(self, lane: Lane, seconds: float, _: Any = None) -> None:
        lane.seconds = max(0.0, lane.seconds - seconds)

    def _timed(self, kind: str, amount: int, lane: Lane, work: Callable[..., Result], *arguments: Any) -> Result:
        start = time.monotonic()
        try:
            return work(*arguments)
        finally:
            seconds = time.monotonic() - start
            self.metrics.reading.labels(kind, lane.name).observe(seconds)
            if amount * READING[kind] > TELLING:
                self._learn(kind, amount, seconds)

    def _learn(self, kind: str, amount: int, seconds: float) -> None:
        """Take note of how long so many pixels, letters or bytes took."""
        measured = min(max(seconds / amount, READING[kind] / WITHIN), WITHIN * READING[kind])
        self.rates[kind] = (1 - WEIGHT) * self.rates[kind] + WEIGHT * measured

    def close(self) -> None:
        """Let the threads end once they have finished what they do."""
        for lane in (self.quick, self.slow):
            lane.pool.shutdown(wait=False, cancel_futures=True)
        self.pictures.close()


def warm_up(admission: Admission, work: Callable[[], Any]) -> None:
    """Run work once in every thread of all lanes, so that the first request finds decoders loaded."""
    for lane in (admission.quick, admission.slow):
        together = threading.Barrier(lane.threads)

        def once(barrier: threading.Barrier = together) -> None:
            barrier.wait()  # so that no thread takes two
            work()

        futures: list[Future[None]] = [lane.pool.submit(once) for _ in range(lane.threads)]
        for future in futures:
            future.result()


class LimitsMiddleware:
    """An application whose requests are bounded, authorised, logged, counted and traced."""

    def __init__(self, app: ASGIApp, admission: Admission, access: Access) -> None:
        self.app, self.admission, self.access = app, admission, access
        self.limits, self.metrics, self.tracer = admission.limits, admission.metrics, Tracer()
        self._draw = random.Random(secrets.randbits(128))  # of names of requests, without a call of the system for each

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, headers, status = time.monotonic(), Headers(scope=scope), 0
        own_id = headers.get("x-request-id", "")
        request_id = own_id if REQUEST_ID.fullmatch(own_id) else f"{self._draw.getrandbits(64):016x}"
        state = scope.setdefault("state", {})
        state |= {"arrived": start, "tracer": self.tracer}
        body = ReceivedBody(start + self.limits.timeout, window_end=start + STALL)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        with self.tracer.request(scope["method"], scope["path"], headers) as span:
            try:
                state["caller"] = self.access.check(scope["method"], scope["path"], headers)
                length = headers.get("content-length", "0")
                if length.isdecimal() and int(length[:20]) > self.admission.body:
                    raise self.admission.too_large()
                if (encoding := headers.get("content-encoding", "identity")).lower() != "identity":
                    raise RequestRefused(415, f"content that is encoded as {encoding[:40]!r}: send it unencoded")
                await self.app(scope, partial(self._receive, receive, body), send_with_id)
            except RequestRefused as refused:
                if not status:
                    await error_response(refused)(scope, receive, send_with_id)
            except ClientDisconnect:
                status = GONE
            except Exception as error:  # a fault of ours, or of a library
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{last.filename}:{last.lineno}"
                log_event("fault", logging.ERROR, id=request_id, error=error_type(error), where=where)
                if not status:
                    fault = RequestRefused(500, "a fault of the service: its log says more")
                    await error_response(fault)(scope, receive, send_with_id)
            finally:
                self.admission.release(body)
                if span is not None:
                    span.set_attribute("http.response.status_code", status)
                self._finish(scope, request_id, status, time.monotonic() - start)

    async def _receive(self, receive: Receive, body: ReceivedBody) -> Message:
        """Return the next message, unless the body is too large, alone or with others, or too slow."""
        if body.complete:
            return await receive()  # says whether the client has disconnected
        left = min(body.deadline, body.window_end) - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, left)):
                message = await receive()
        except TimeoutError as error:
            reason = f"the request did not arrive within {self.limits.timeout:g} seconds, or too slowly"
            raise RequestRefused(408, reason) from error
        body.complete = not message.get("more_body", False)
        self.admission.hold(body, len(message.get("body", b"")))
        return message

    def _finish(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        """Count and log a request that has ended."""
        path = scope["path"] if scope["path"] in PATHS else getattr(scope.get("route"), "path", "other")
        self.metrics.requests.labels(path, str(status)).inc()
        self.metrics.seconds.labels(path).observe(seconds)
        if status >= 400:
            self.metrics.refused.labels(str(status)).inc()
        log_event(
            "request",
            logging.DEBUG if path in QUIET and status < 400 else logging.INFO,
            id=request_id,
            method=scope["method"],
            path=scope["path"][:200],
            status=status,
            ms=round(1e3 * seconds, 3),
            **scope["state"].get("logged", {}),
        )


def error_response(error: HTTPException) -> JSONResponse:
    """Return the response that says why a request is refused."""
    return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)
