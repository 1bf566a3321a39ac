"""What stands before every request: its size and time are bounded, its token compared, its end logged."""

import asyncio
import hmac
import logging
import re
import secrets
import time
import traceback
from collections.abc import MutableMapping
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alight.serve.limits import Limits, Refused
from alight.serve.logs import event
from alight.serve.metrics import Metrics

OPEN = ("/", "/healthz", "/readyz")  # the page, which holds no data, and what probes ask
TOGETHER = 16  # times the largest request: what all that are under way may have
NAMED = re.compile(r"[A-Za-z0-9._-]{1,64}")  # of a request, as others may name it
PATHS = ("/", "/predict", "/predict/files", "/budget", "/status", "/healthz", "/readyz", "/metrics", "/openapi.json")


def refusal(refused: Refused) -> JSONResponse:
    """The answer that says why there is none."""
    headers = {} if refused.retry_after is None else {"Retry-After": str(refused.retry_after)}
    if refused.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": refused.reason}, refused.status, headers)


def _where(error: Exception) -> str:
    """The line of code from which an error came."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}"


class Guard:
    """An application behind its guards."""

    def __init__(self, app: ASGIApp, limits: Limits, metrics: Metrics, token: str | None) -> None:
        self.app, self.limits, self.metrics = app, limits, metrics
        self.token = None if token is None else token.encode()
        self._held = 0  # bytes of all requests under way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        return await self._request(scope, receive, send)

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        start, headers = time.perf_counter(), dict(scope["headers"])
        told = headers.get(b"x-request-id", b"").decode("latin-1")
        name = told if NAMED.fullmatch(told) else secrets.token_hex(8)
        scope.setdefault("state", {})["came"] = time.monotonic()
        status, taken = 0, [0]

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", name.encode())]
            await send(message)

        try:
            self._check(scope["path"], headers)
            await self.app(scope, self._bounded(receive, taken), sent)
        except Refused as refused:
            if not status:
                await refusal(refused)(scope, receive, sent)
        except Exception as error:  # of our own, or of a library
            event("fault", logging.ERROR, id=name, error=f"{type(error).__name__}: {error}", where=_where(error))
            if not status:
                await refusal(Refused(500, "a fault of the service: its log says more"))(scope, receive, sent)
        finally:
            self._held -= taken[0]
            self._done(scope, name, status, time.perf_counter() - start)

    def _check(self, path: str, headers: MutableMapping[bytes, bytes]) -> None:
        if self.token is not None and path not in OPEN:
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self.token):
                raise Refused(401, "a bearer token is needed: send the header Authorization: Bearer TOKEN")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.limits.body:
            raise self._too_large()

    def _bounded(self, receive: Receive, taken: list[int]) -> Receive:
        """What is received, as long as it is neither too much, alone or with others, nor too slow; and how much."""
        ended, end = False, time.monotonic() + self.limits.timeout

        async def bounded() -> Message:
            nonlocal ended
            if ended:
                return await receive()  # tells whether the client has gone
            try:
                message = await asyncio.wait_for(receive(), max(0.0, end - time.monotonic()))
            except TimeoutError as error:
                raise Refused(408, f"the request did not arrive within {self.limits.timeout:g} seconds") from error
            more = len(message.get("body", b""))
            taken[0] += more
            self._held += more
            ended = not message.get("more_body", False)
            if taken[0] > self.limits.body:
                raise self._too_large()
            if self._held > TOGETHER * self.limits.body:
                raise Refused(429, f"{self._held:,} bytes of requests are under way: come again", retry_after=1)
            return message

        return bounded

    def _too_large(self) -> Refused:
        return Refused(413, f"the request is too large: at most {self.limits.body:,} bytes are taken")

    def _done(self, scope: Scope, name: str, status: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in PATHS else "other"
        self.metrics.requests.labels(path, str(status)).inc()
        self.metrics.seconds.labels(path).observe(seconds)
        if status >= 400:
            self.metrics.refused.labels(str(status)).inc()
        quiet = path in ("/healthz", "/readyz", "/metrics", "/status")
        values: dict[str, Any] = scope["state"].get("told", {})
        event(
            "request",
            logging.DEBUG if quiet and status < 400 else logging.INFO,
            id=name,
            method=scope["method"],
            path=scope["path"][:200],
            status=status,
            ms=round(1e3 * seconds, 3),
            **values,
        )
