"""Middleware around every request: its size and time are bounded, its token compared, its end logged and counted."""

import asyncio
import hmac
import logging
import re
import secrets
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alight.serve.monitoring import Metrics, log_event
from alight.serve.schemas import Limits, RequestRefused

PUBLIC = ("/", "/healthz", "/readyz")  # the page, which holds no data, and probes
MAX_BODIES = 16  # times the largest request: bytes of all requests under way
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")  # as clients may name a request
PATHS = ("/", "/predict", "/predict/files", "/budget", "/status", "/healthz", "/readyz", "/metrics", "/openapi.json")
QUIET = ("/healthz", "/readyz", "/metrics", "/status")  # paths logged at level debug


def error_response(refused: RequestRefused) -> JSONResponse:
    """Return the response that says why a request is refused."""
    headers = {} if refused.retry_after is None else {"Retry-After": str(refused.retry_after)}
    if refused.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": refused.reason}, refused.status, headers)


@dataclass
class ReceivedBody:
    """How much of a request's body has arrived, and until when all of it must."""

    deadline: float
    size: int = 0
    complete: bool = False


class LimitsMiddleware:
    """An application whose requests are bounded, authorised, logged and counted."""

    def __init__(self, app: ASGIApp, limits: Limits, metrics: Metrics, token: str | None) -> None:
        self.app, self.limits, self.metrics = app, limits, metrics
        self.token = None if token is None else token.encode()
        self._held = 0  # bytes of all requests under way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, headers, status = time.monotonic(), dict(scope["headers"]), 0
        own_id = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = own_id if REQUEST_ID.fullmatch(own_id) else secrets.token_hex(8)
        scope.setdefault("state", {})["arrived"] = start
        body = ReceivedBody(start + self.limits.timeout)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._check(scope["path"], headers)
            await self.app(scope, partial(self._receive, receive, body), send_with_id)
        except RequestRefused as refused:
            if not status:
                await error_response(refused)(scope, receive, send_with_id)
        except Exception as error:  # a fault of ours, or of a library
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename}:{last.lineno}"
            log_event("fault", logging.ERROR, id=request_id, error=f"{type(error).__name__}: {error}", where=where)
            if not status:
                fault = RequestRefused(500, "a fault of the service: its log says more")
                await error_response(fault)(scope, receive, send_with_id)
        finally:
            self._held -= body.size
            self._finish(scope, request_id, status, time.monotonic() - start)

    def _check(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Check the token and the length that a request states."""
        if self.token is not None and path not in PUBLIC:
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self.token):
                raise RequestRefused(401, "a bearer token is needed: send the header Authorization: Bearer TOKEN")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.limits.body:
            raise self._too_large()

    async def _receive(self, receive: Receive, body: ReceivedBody) -> Message:
        """Return the next message, unless the body is too large, alone or with others, or too slow."""
        if body.complete:
            return await receive()  # says whether the client has disconnected
        try:
            message = await asyncio.wait_for(receive(), max(0.0, body.deadline - time.monotonic()))
        except TimeoutError as error:
            raise RequestRefused(408, f"the request did not arrive within {self.limits.timeout:g} seconds") from error
        size = len(message.get("body", b""))
        body.size += size
        self._held += size
        body.complete = not message.get("more_body", False)
        if body.size > self.limits.body:
            raise self._too_large()
        if self._held > MAX_BODIES * self.limits.body:
            raise RequestRefused(429, f"{self._held:,} bytes of requests are under way: come again", retry_after=1)
        return message

    def _too_large(self) -> RequestRefused:
        return RequestRefused(413, f"the request is too large: at most {self.limits.body:,} bytes are taken")

    def _finish(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        """Count and log a request that has ended."""
        path = scope["path"] if scope["path"] in PATHS else "other"
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
