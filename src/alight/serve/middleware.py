"""Around every request: it is bounded, authorised, logged as one line of JSON, counted and traced."""

import asyncio
import logging
import re
import secrets
import time
import traceback
from functools import partial

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alight.serve.access import Access
from alight.serve.admission import STALL, Admission, ReceivedBody
from alight.serve.monitoring import Tracer, error_type, log_event
from alight.serve.requests import RequestRefused

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")  # as clients may name a request
PATHS = ("/", "/predict", "/predict/files", "/budget", "/status", "/healthz", "/readyz", "/metrics", "/openapi.json")
# other paths are counted under the route that takes them, so that clients cannot make metrics grow
GONE = 499  # as logs and metrics say that a client went before its request was complete; it is never sent
QUIET = ("/healthz", "/readyz", "/metrics", "/status")  # paths logged at level debug


class LimitsMiddleware:
    """An application whose requests are bounded, authorised, logged, counted and traced."""

    def __init__(self, app: ASGIApp, admission: Admission, access: Access) -> None:
        self.app, self.admission, self.access = app, admission, access
        self.limits, self.metrics, self.tracer = admission.limits, admission.metrics, Tracer()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, headers, status = time.monotonic(), dict(scope["headers"]), 0
        own_id = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = own_id if REQUEST_ID.fullmatch(own_id) else secrets.token_hex(8)
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
                length = headers.get(b"content-length", b"0")
                if length.isdigit() and int(length[:20]) > self.admission.body:
                    raise self.admission.too_large()
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
