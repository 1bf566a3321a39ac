"""Logs as one JSON object per line on stderr, and metrics for Prometheus."""

import json
import logging
import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

from alight.outputs import Decisions
from alight.serve.ledger import SpendState

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
    >>> [line for line in metrics.text().splitlines() if line.startswith("alight_requests_total")]
    ['alight_requests_total{path="/predict",status="200"} 1.0']
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
        count = len(decisions)
        self.batches.observe(count)
        for exit_index in decisions.exits.tolist():
            self.samples.labels(self._exits[exit_index]).inc()
            self.counts[exit_index] += 1
        spent, allowed = float(decisions.spent.sum()), count * (budget or 0.0)
        self.spent.inc(spent)
        self.allowed.inc(allowed)
        self.total_spent += spent
        self.total_allowed += allowed

    def text(self, state: SpendState | None = None, queued: int = 0) -> str:
        """Return all metrics as Prometheus reads them, those of the stream and the queue as they stand now."""
        self.queue.set(queued)
        if state is not None:
            budget = state.policy.budget or 0.0
            self.budget.set(budget)
            self.overspend.set(state.pace.spent - state.pace.admitted * budget)
            self.alarm.set(state.pace.alarmed)
        return generate_latest(self.registry).decode()
