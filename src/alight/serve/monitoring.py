"""What people see of a running service: lines of JSON, metrics for Prometheus, traces, and whether accuracy drifts."""

import importlib.util
import json
import logging
import math
import platform
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

from alight import __version__
from alight.policies.paced import Pace
from alight.policies.policy import Policy

LOGGER = logging.getLogger("alight.serve")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
PAST = (1.0, 2.0, 4.0)  # times the timeout: the last buckets
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
OF_STREAM = ["model", "policy", "unit"]  # labels
FIRST = 300  # watched samples that say how often early answers usually differ
CONFIDENCE = 0.995  # of the bound on how often
FACTORS = (1.5, 2.0, 4.0)  # times the bound: rates of disagreement that are bet on
ALARM_RATE, HORIZON = 0.01, 100_000  # of false alarms, within so many watched samples


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
    """Write everything that this process logs, and errors that end a thread, as lines of JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.ERROR)
    LOGGER.setLevel(level.upper())
    logging.captureWarnings(True)
    threading.excepthook = lambda args: LOGGER.critical(
        "thread ended", exc_info=(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)
    )


class Metrics:
    """Counters and gauges of one service, in a registry of its own.

    >>> metrics = Metrics()
    >>> metrics.requests.labels("/predict", "200").inc()
    >>> metrics.registry.get_sample_value("alight_requests_total", {"path": "/predict", "status": "200"})
    1.0
    """

    def __init__(self, timeout: float = 30.0) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.buckets = sorted({*SECONDS, *(factor * timeout for factor in PAST)})
        self._gauge("alight_build_info", "Versions", ["version", "python"]).labels(
            __version__, platform.python_version()
        ).set(1)
        self.requests = self._counter("alight_requests", "Requests", ["path", "status"])
        self.refused = self._counter("alight_refused_requests", "Requests not answered", ["status"])
        self.seconds = self._histogram("alight_request_duration_seconds", "From the headers to the answer", ["path"])
        self.reading = self._histogram("alight_read_duration_seconds", "To decode or tokenise", ["kind", "lane"])
        self.queued = self._histogram("alight_queue_duration_seconds", "From the queue to the network", ["model"])
        self.leaving = self._histogram(
            "alight_exit_duration_seconds", "From the start of a batch to the answers of an exit", ["model", "exit"]
        )
        self.batches = self._histogram("alight_batch_samples", "Samples run together", ["model"], SIZES)
        self.samples = self._counter("alight_samples", "Samples by exit", ["model", "policy", "exit"])
        self.spent = self._counter("alight_spent_cost", "Cost of all samples, in `unit`", OF_STREAM)
        self.allowed = self._counter("alight_allowed_cost", "Samples times the budget in force", OF_STREAM)
        self.budget = self._gauge("alight_budget_cost", "Average cost per sample that is allowed", OF_STREAM)
        self.overspend = self._gauge("alight_overspend_cost", "Spend beyond what is allowed so far", OF_STREAM)
        self.alarm = self._gauge("alight_drift_alarm", "1 once samples have become more expensive", ["model"])
        self.watched = self._counter("alight_watched_samples", "Samples run to the end too", ["model", "policy"])
        self.disagreed = self._counter("alight_disagreements", "Watched answers that differ", ["model", "policy"])
        self.disagreement_alarm = self._gauge(
            "alight_disagreement_alarm", "1 once early answers differ from the last exit more than at first", ["model"]
        )
        self.queue = self._gauge("alight_queue_samples", "Samples admitted and not answered", ["model"])
        self.lane_bytes = self._gauge("alight_body_bytes", "Bytes of requests under way", ["lane"])
        self.lane_seconds = self._gauge("alight_read_backlog_seconds", "Reading that waits", ["lane"])
        self.late = self._counter("alight_late_answers", "Answers after their deadline", ["model"])
        self.state_errors = self._counter("alight_state_errors", "Writes of the state that failed", ["model"])
        self.restarts = self._counter("alight_worker_restarts", "Workers that ended and were replaced", ["model"])
        self.ledger_up = self._gauge("alight_ledger_up", "1 while the shared ledger answers", ["model"])
        self.credit = self._gauge("alight_ledger_credit_cost", "Savings that this replica holds", OF_STREAM)
        self.tenants = self._counter("alight_tenant_spent_cost", "Cost by tenant", ["tenant", "unit"])

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: Sequence[str]) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float] = ()) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets or self.buckets, registry=self.registry)

    def show_stream(self, model: str, name: str, policy: Policy, pace: Pace) -> None:
        """Set the gauges of a model's stream under the policy in force."""
        labels, budget = (model, name, policy.unit), policy.budget or 0.0
        self.budget.labels(*labels).set(budget)
        self.overspend.labels(*labels).set(pace.spent - pace.admitted * budget)
        self.alarm.labels(model).set(pace.alarmed)

    def text(self) -> str:
        """Return all metrics as Prometheus reads them."""
        return generate_latest(self.registry).decode()


class Tracer:
    """Spans of OpenTelemetry where its API is installed; nothing where it is not.

    A request continues the trace that its `traceparent` names. The configuration of the
    SDK, say by `opentelemetry-instrument alight serve ...`, decides where spans go.
    """

    def __init__(self) -> None:
        self._trace: Any = None
        if importlib.util.find_spec("opentelemetry") and importlib.util.find_spec("opentelemetry.trace"):
            from opentelemetry import propagate, trace

            self._trace, self._propagate = trace, propagate
            self._tracer = trace.get_tracer("alight.serve", __version__)

    @contextmanager
    def request(self, method: str, path: str, headers: Mapping[str, str]) -> Iterator[Any]:
        """Yield the span of a request, None without OpenTelemetry."""
        if self._trace is None:
            yield None
            return
        attributes = {"http.request.method": method, "url.path": path}
        with self._tracer.start_as_current_span(
            f"{method} {path}",
            context=self._propagate.extract(headers),
            kind=self._trace.SpanKind.SERVER,
            attributes=attributes,
        ) as span:
            yield span

    def past(self, name: str, start: float, end: float, **attributes: Any) -> None:
        """Record a span, within the request's, that began and ended at these moments of time.monotonic."""
        if self._trace is not None:
            offset = time.time_ns() - time.monotonic_ns()
            span = self._tracer.start_span(name, start_time=int(1e9 * start) + offset, attributes=attributes)
            span.end(int(1e9 * end) + offset)


def error_type(error: BaseException) -> str:
    """Return an error as a log line names it: its type, and what it says."""
    return f"{type(error).__name__}: {error}"


class DisagreementWatch:
    """Counts early answers that differ from the last exit's, and raises an alarm once there are more than at first.

    It is drift of accuracy that shows without labels. The first watched samples say how often an early answer differs:
    at most `p` with 99.5 % confidence (Clopper and Pearson). From then on a Shiryaev-Roberts sum of bets that it
    differs more often grows only at random while `p` holds: over `HORIZON` samples it is raised to 1 / ALARM_RATE with
    probability ALARM_RATE at most.

    >>> watch = DisagreementWatch()
    >>> watch.add(300, 6)
    >>> watch.add(300, 9)
    >>> watch.alarmed
    False
    >>> watch.add(300, 60)
    >>> watch.alarmed
    True
    """

    def __init__(self) -> None:
        self.samples = self.disagreements = 0
        self.usual: float | None = None  # rate of disagreement that is exceeded at first with little probability
        self.alarmed = False
        self._sums = [0.0] * len(FACTORS)

    def add(self, samples: int, disagreements: int) -> None:
        """Take note of watched samples."""
        self.samples += samples
        self.disagreements += disagreements
        if self.usual is None:
            if self.samples >= FIRST:
                self.usual = upper_rate(self.samples, self.disagreements)
            return
        for index, factor in enumerate(FACTORS):
            rate = min(factor * self.usual, (1 + self.usual) / 2)
            won, lost = rate / self.usual, (1 - rate) / (1 - self.usual)
            stake = disagreements * math.log(won) + (samples - disagreements) * math.log(lost)
            self._sums[index] = (self._sums[index] + samples / HORIZON) * math.exp(min(stake, 500.0))
        self.alarmed = self.alarmed or sum(self._sums) / len(FACTORS) >= 1 / ALARM_RATE


def upper_rate(samples: int, events: int) -> float:
    """Return the rate that a rate is below with 99.5 % confidence, where so many of the samples had the event.

    >>> round(upper_rate(300, 6), 4)
    0.0514
    """
    from scipy.stats import beta  # slow to import

    return float(beta.ppf(CONFIDENCE, events + 1, samples - events)) if events < samples else 1.0 - 1e-9
