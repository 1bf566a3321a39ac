"""Around every request: it is bounded, authorised, logged as one line of JSON, and counted for Prometheus."""

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alight.outputs import Decisions
from alight.serve.ledger import SpendState
from alight.serve.requests import Limits, RequestRefused

MAX_BODIES = 16  # times the largest request: bytes of all requests under way
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")  # as clients may name a request
PATHS = ("/", "/predict", "/predict/files", "/budget", "/status", "/healthz", "/readyz", "/metrics", "/openapi.json")
PATHS += ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/alight", "/v2/models/alight/ready")
PATHS += ("/v2/models/alight/infer",)
PUBLIC = (
    "/",
    "/healthz",
    "/readyz",
    "/v2/health/live",
    "/v2/health/ready",
)  # the page, which holds no data, and probes
QUIET = (
    "/healthz",
    "/readyz",
    "/metrics",
    "/status",
    "/v2/health/live",
    "/v2/health/ready",
)  # paths logged at level debug
LOGGER = logging.getLogger("alight.serve")
OTHERS = ("uvicorn", "uvicorn.error", "uvicorn.access", "fastapi", "python_multipart", "PIL")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def log_event(name: str, level: int = logging.INFO, **values: object) -> None:
    """Log an event by its name, with values."""
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, name, extra={"values": values})


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON.

    >>> record = logging.LogRecord("alight.serve", logging.INFO, "", 0, "drained", (), None)
    >>> json.loads(JsonFormatter().format(record))["event"]
    'drained'
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "values", {}),
        }
        if record.name != LOGGER.name:
            line["logger"] = record.name
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_as_json(level: str) -> None:
    """Write everything that this process logs as lines of JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    for name in (LOGGER.name, *OTHERS):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper() if name == LOGGER.name else logging.ERROR)


class Metrics:
    """Counters and gauges of one service, in a registry of its own.

    >>> metrics = Metrics(["layer1", "end"])
    >>> metrics.requests.labels("/predict", "200").inc()
    >>> metrics.registry.get_sample_value("alight_requests_total", {"path": "/predict", "status": "200"})
    1.0
    """

    def __init__(self, exits: Sequence[str]) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._exits = list(exits)
        self.requests = Counter("alight_requests", "Requests by path and status", ["path", "status"], registry=registry)
        self.seconds = Histogram(
            "alight_request_seconds", "From the first byte to the answer", ["path"], buckets=SECONDS, registry=registry
        )
        self.queued_seconds = Histogram(
            "alight_queued_seconds", "From the queue to the network", buckets=SECONDS, registry=registry
        )
        self.batches = Histogram("alight_batch_samples", "Samples run together", buckets=SIZES, registry=registry)
        self.samples = Counter("alight_samples", "Samples by the exit they left at", ["exit"], registry=registry)
        self.spent = Counter("alight_spent", "Cost of all samples, in the policy's unit", registry=registry)
        self.allowed = Counter("alight_allowed", "Samples times the budget in force", registry=registry)
        self.budget = Gauge("alight_budget", "Average cost per sample that is allowed", registry=registry)
        self.overspend = Gauge("alight_overspend", "Spend beyond what the budget allows so far", registry=registry)
        self.alarm = Gauge("alight_drift_alarm", "1 once samples have become more expensive", registry=registry)
        self.queue = Gauge("alight_queue_samples", "Samples that wait", registry=registry)
        self.refused = Counter("alight_refused", "Requests not answered, by status", ["reason"], registry=registry)
        self.late = Counter("alight_late", "Answers after their deadline", registry=registry)
        self.state_errors = Counter("alight_state_errors", "Writes of the state that failed", registry=registry)
        self.counts = [0] * len(self._exits)  # by exit, for the page
        self.total_spent = self.total_allowed = 0.0

    def add_batch(self, decisions: Decisions, budget: float | None) -> None:
        """Count the samples and the cost of a batch that was decided under this budget."""
        exits = decisions.exits.tolist()
        self.batches.observe(len(exits))
        for exit_index in exits:
            self.samples.labels(self._exits[exit_index]).inc()
            self.counts[exit_index] += 1
        spent, allowed = float(decisions.spent.sum()), len(exits) * (budget or 0.0)
        self.spent.inc(spent)
        self.allowed.inc(allowed)
        self.total_spent += spent
        self.total_allowed += allowed

    def text(self, state: SpendState, queued: int) -> str:
        """Return all metrics as Prometheus reads them, those of the stream and the queue as they stand now."""
        self.queue.set(queued)
        budget = state.policy.budget or 0.0
        self.budget.set(budget)
        self.overspend.set(state.pace.spent - state.pace.admitted * budget)
        self.alarm.set(state.pace.alarmed)
        return generate_latest(self.registry).decode()


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


def error_response(error: HTTPException) -> JSONResponse:
    """Return the response that says why a request is refused."""
    return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)
