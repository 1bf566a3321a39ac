"""What Prometheus is told: requests, exits, spend against budget, the queue, latencies, and the alarm."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

from alight.outputs import Decisions
from alight.policies.policy import Policy
from alight.serve.ledger import Spending

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters and gauges of one service, in a registry of its own.

    >>> metrics = Metrics(["layer1", "end"])
    >>> metrics.requests.labels("/predict", "200").inc()
    >>> 'alight_requests_total{path="/predict",status="200"} 1.0' in metrics.text()
    True
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
        self.ahead = Gauge("alight_ahead", "Spend beyond what the budget allows so far", registry=registry)
        self.alarm = Gauge("alight_drift_alarm", "1 once samples have become dearer", registry=registry)
        self.queue = Gauge("alight_queue_samples", "Samples that wait", registry=registry)
        self.refused = Counter("alight_refused", "Requests not answered, by why", ["reason"], registry=registry)
        self.late = Counter("alight_late", "Answers after their deadline", registry=registry)
        self.state_errors = Counter("alight_state_errors", "Writes of the state that failed", registry=registry)
        self.counts = [0] * len(self._exits)  # by exit, for the page
        self.total_spent = self.total_allowed = 0.0

    def decided(self, decisions: Decisions, policy: Policy) -> None:
        """Count a batch."""
        self.batches.observe(len(decisions))
        for exit_index in decisions.exits.tolist():
            self.samples.labels(self._exits[exit_index]).inc()
            self.counts[exit_index] += 1
        spent, allowed = float(decisions.spent.sum()), len(decisions) * (policy.budget or 0.0)
        self.spent.inc(spent)
        self.allowed.inc(allowed)
        self.total_spent += spent
        self.total_allowed += allowed

    def paced(self, spending: Spending) -> None:
        """Show the state of the stream."""
        budget = spending.policy.budget or 0.0
        self.budget.set(budget)
        self.ahead.set(spending.pace.spent - spending.pace.admitted * budget)
        self.alarm.set(spending.pace.alarmed)

    def text(self) -> str:
        """All of them as Prometheus reads it."""
        return generate_latest(self.registry).decode()
