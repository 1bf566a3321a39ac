"""The application: bounds, authorisation, log and counters of every request, and the endpoints that answer samples."""

import asyncio
import hmac
import logging
import math
import re
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alight import __version__
from alight.serve.model import Sample
from alight.serve.monitoring import Metrics, log_event
from alight.serve.operations import add_operations
from alight.serve.requests import (
    FORM,
    JSON,
    Limits,
    PredictOptions,
    PredictRequest,
    PredictResponse,
    RequestRefused,
    check_content_type,
    error_schemas,
    parse,
    read_request,
    read_samples,
    request_body,
)
from alight.serve.worker import BatchWorker, QueuedRequest

DECODERS = 4  # requests that are decoded at once: each may hold an image of as many pixels as are taken
MAX_BODIES = 16  # times the largest request: bytes of all requests under way
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")  # as clients may name a request
PATHS = ("/", "/predict", "/predict/files", "/budget", "/status", "/healthz", "/readyz", "/metrics", "/openapi.json")
PUBLIC = ("/", "/healthz", "/readyz")  # the page, which holds no data, and probes
QUIET = ("/healthz", "/readyz", "/metrics", "/status")  # paths logged at level debug
FILES = {
    "type": "object",
    "required": ["images"],
    "additionalProperties": False,
    "properties": {
        "images": {"type": "array", "items": {"type": "string", "format": "binary"}},
        "budget": {"type": "string", "maxLength": 40},
        "deadline_ms": {"type": "number", "exclusiveMinimum": 0, "maximum": 3_600_000},
    },
}


def create_app(worker: BatchWorker, token: str | None = None) -> FastAPI:
    """Return the application; its worker starts and ends with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await run_sync(worker.close)
        log_event("drained", samples=sum(worker.metrics.counts))

    app = FastAPI(
        title="alight", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False
    )
    app.add_middleware(LimitsMiddleware, limits=worker.limits, metrics=worker.metrics, token=token)
    _add_predictions(app, worker)
    add_operations(app, worker)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # the type it is registered for
        return _error_response(error)

    return app


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
                await _error_response(refused)(scope, receive, send_with_id)
        except Exception as error:  # a fault of ours, or of a library
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename}:{last.lineno}"
            log_event("fault", logging.ERROR, id=request_id, error=f"{type(error).__name__}: {error}", where=where)
            if not status:
                fault = RequestRefused(500, "a fault of the service: its log says more")
                await _error_response(fault)(scope, receive, send_with_id)
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


def _error_response(error: HTTPException) -> JSONResponse:
    return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)


def _add_predictions(app: FastAPI, worker: BatchWorker) -> None:
    model, limits, decoders = worker.model, worker.limits, CapacityLimiter(DECODERS)

    @app.post(
        "/predict",
        response_model=PredictResponse,
        responses=error_schemas(),
        openapi_extra=request_body(JSON, PredictRequest.model_json_schema()),
    )
    async def predict(request: Request) -> PredictResponse:
        """Answer samples that come as JSON."""
        check_content_type(request, JSON)
        content = await request.body()
        options, samples = await run_sync(read_request, content, model, limits, limiter=decoders)
        return await _answer(request, worker, samples, options)

    @app.post(
        "/predict/files",
        response_model=PredictResponse,
        responses=error_schemas(),
        openapi_extra=request_body(FORM, FILES),
    )
    async def predict_files(request: Request) -> PredictResponse:
        """Answer images that come as files."""
        check_content_type(request, FORM)
        async with request.form(max_fields=8, max_part_size=limits.body) as form:
            files = [await part.read() for part in form.getlist("images") if isinstance(part, UploadFile)]
            if len(files) < len(form.getlist("images")) or set(form) - {"images", "budget", "deadline_ms"}:
                raise RequestRefused(422, "send images as files, and at most budget and deadline_ms beside them")
            options = parse(PredictOptions, {name: form[name] for name in ("budget", "deadline_ms") if name in form})
        samples = await run_sync(read_samples, "images", files, model, limits, limiter=decoders)
        return await _answer(request, worker, samples, options)


async def _answer(
    request: Request, worker: BatchWorker, samples: Sequence[Sample], options: PredictOptions
) -> PredictResponse:
    """Queue the samples of a request, and wait for their predictions."""
    arrived: float = request.scope["state"]["arrived"]
    deadline = math.inf if options.deadline_ms is None else arrived + 1e-3 * options.deadline_ms
    queued = QueuedRequest(samples, options.budget, deadline, arrived)
    worker.submit(queued)
    try:
        response = await asyncio.wait_for(asyncio.wrap_future(queued.response), worker.limits.timeout)
    except TimeoutError as error:
        raise RequestRefused(504, f"there was no answer within {worker.limits.timeout:g} seconds") from error
    exits = [prediction.exit for prediction in response.predictions]
    request.scope["state"]["logged"] = {"samples": len(exits), "exits": exits[:32], "policy": response.policy}
    return response
