"""One thread that owns the network: it takes requests from a queue in small batches and decides them."""

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import repeat

from alight.costs import Costs
from alight.errors import AlightError, BudgetTooSmall
from alight.policies.paced import Paced
from alight.policies.policy import Policy
from alight.serve.ledger import SpendLedger
from alight.serve.model import ExitTiming, Sample, ServedModel
from alight.serve.monitoring import Metrics, log_event
from alight.serve.requests import Limits, Prediction, PredictResponse, RequestRefused


@dataclass(eq=False)
class QueuedRequest:
    """The samples of one request, what it may spend, and where its response goes."""

    samples: Sequence[Sample]
    budget: float | str | None = None  # what one sample may cost at most
    deadline: float = math.inf  # on the clock of time.monotonic
    arrived: float = field(default_factory=time.monotonic)
    queued: float = field(default_factory=time.monotonic)
    response: "Future[PredictResponse]" = field(default_factory=Future)


class BatchWorker:
    """The queue of requests and the thread that decides them."""

    def __init__(
        self,
        model: ServedModel,
        ledger: SpendLedger,
        timings: Mapping[str, ExitTiming],
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self.model, self.ledger, self.limits, self.metrics = model, ledger, limits, metrics
        self.queued = 0  # samples that wait
        self.failed = False  # whether the thread has ended
        self.timing = timings[ledger.state.name]  # of exits under the policy in force
        self._timings = timings  # by policy
        self._queue: deque[QueuedRequest] = deque()
        self._changes: deque[tuple[str, Future[None]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._next_number = secrets.randbits(62)  # of the next sample: other replicas and other runs draw otherwise
        self._thread = threading.Thread(target=self._work, name="alight-worker", daemon=True)

    def start(self) -> None:
        """Begin to decide requests."""
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether requests are decided and more of them accepted."""
        return self._thread.is_alive() and not self._closing

    def submit(self, request: QueuedRequest) -> None:
        """Put a request into the queue, before the thread has started, too; or refuse it."""
        with self._changed:
            if self._closing or self.failed:
                raise RequestRefused(503, "the service is stopping: ask another one", retry_after=1)
            if self.queued + len(request.samples) > self.limits.queue:
                seconds = max(1, math.ceil(self.queued * self.timing.per_sample))
                raise RequestRefused(429, f"{self.queued} samples are waiting, as many as may: come again", seconds)
            self._queue.append(request)
            self.queued += len(request.samples)
            self._changed.notify()

    def change_policy(self, name: str) -> "Future[None]":
        """Put another policy in force between two batches, and return a future that is done once it is."""
        done: Future[None] = Future()
        with self._changed:
            self._changes.append((name, done))
            self._changed.notify()
        return done

    def close(self) -> None:
        """Decide the requests that wait, then stop, and write the final state."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self.ledger.close()

    def _work(self) -> None:
        try:
            while (requests := self._next_batch()) is not None:
                try:
                    while requests:
                        requests = self._decide_first(requests)
                except Exception as error:  # a fault of ours: these requests get it, and later ones are decided
                    log_event("fault", logging.ERROR, error=f"{type(error).__name__}: {error}")
                    for request in requests:
                        if not request.response.done():
                            request.response.set_exception(error)
        finally:
            self.failed = True

    def _next_batch(self) -> list[QueuedRequest] | None:
        """Wait for the next requests; an empty list where only the policy was changed, None once all are decided."""
        with self._changed:
            while not (self._queue or self._changes or self._closing):
                self._changed.wait()
            while self._changes:
                self._change(*self._changes.popleft())
            if not self._queue:
                return None if self._closing else []
            end = self._queue[0].queued + self.limits.wait
            while self.queued < self.limits.batch and not self._closing and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            requests: list[QueuedRequest] = []
            room = self.limits.batch
            while self._queue and len(self._queue[0].samples) <= room:
                requests.append(self._queue.popleft())
                room -= len(requests[-1].samples)
            self.queued -= self.limits.batch - room
            return [request for request in requests if request.response.set_running_or_notify_cancel()]

    def _change(self, name: str, done: "Future[None]") -> None:
        try:
            if name != self.ledger.state.name:
                self.ledger.change(name, self.model.policies[name])
                self.timing = self._timings[name]
        except Exception as error:  # the caller gets it, and the worker continues
            done.set_exception(error)
        else:
            done.set_result(None)

    def _decide_first(self, requests: list[QueuedRequest]) -> list[QueuedRequest]:
        """Decide the most urgent requests, all if no deadline is close, and return the others."""
        now, last = time.monotonic(), len(self.ledger.state.policy.costs) - 1
        needed = self.timing.seconds(sum(len(request.samples) for request in requests), last)
        urgent = [request for request in requests if request.deadline - now < needed]
        if not urgent:
            self._decide(requests, last)
            return []
        reachable: list[QueuedRequest] = []
        for request in urgent:
            if self.timing.deepest(len(request.samples), request.deadline - now) is not None:
                reachable.append(request)
                continue
            reason = f"after {1e3 * (now - request.queued):.0f} ms in the queue no exit is left in time"
            request.response.set_exception(RequestRefused(504, reason))
        count = sum(len(request.samples) for request in reachable)
        deepest = {request: self.timing.deepest(count, request.deadline - now) or 0 for request in reachable}
        first = [request for request in reachable if deepest[request] == min(deepest.values())]
        if first:
            self._decide(first, deepest[first[0]])
        return [request for request in requests if not request.response.done()]

    def _decide(self, requests: list[QueuedRequest], deepest: int) -> None:
        """Decide the samples of these requests together, none beyond this open exit, and set the responses."""
        state, start = self.ledger.state, time.monotonic()
        limits: list[int] = []
        accepted: list[QueuedRequest] = []
        for request in requests:
            limit = deepest
            try:
                if request.budget is not None:
                    limit = min(deepest, deepest_within(request.budget, state.policy))
            except AlightError as error:
                request.response.set_exception(RequestRefused(422, str(error)))
                continue
            accepted.append(request)
            limits += [limit] * len(request.samples)
        predictions = self._predict([sample for request in accepted for sample in request.samples], limits)
        for request in accepted:
            self.metrics.queued_seconds.observe(start - request.queued)
            own, predictions = predictions[: len(request.samples)], predictions[len(request.samples) :]
            if failed := [(index, each) for index, each in enumerate(own) if isinstance(each, Exception)]:
                index, fault = failed[0]
                if isinstance(fault, AlightError):
                    advice = "the network gives no usable answer: look for numbers out of range"
                    fault = RequestRefused(422, f"sample {index}: {advice}")
                request.response.set_exception(fault)
                continue
            now = time.monotonic()
            if now > request.deadline:
                self.metrics.late.inc()
            request.response.set_result(
                PredictResponse(
                    predictions=own,  # type: ignore[arg-type]  # no exception is among them
                    policy=state.name,
                    budget=state.policy.budget,
                    unit=state.policy.unit,
                    queued_ms=round(1e3 * (start - request.queued), 3),
                    latency_ms=round(1e3 * (now - request.arrived), 3),
                )
            )

    def _predict(self, samples: Sequence[Sample], limits: Sequence[int]) -> list[Prediction | Exception]:
        """Return the prediction of each sample; if a batch fails, each of its samples is tried alone."""
        if not samples:
            return []
        state, first = self.ledger.state, self._next_number
        self._next_number += len(samples)
        paced = isinstance(state.policy, Paced)
        try:
            bounds = self._admit(limits) if paced else limits
            start = time.perf_counter()
            decisions, pace = self.model.decide(state.name, samples, first, bounds, state.pace if paced else None)
            reached = state.policy.open_exits.index(int(decisions.exits.max()))
            self.timing.update(len(samples), reached, time.perf_counter() - start)
        except Exception as error:
            if isinstance(state.policy, Paced):  # the batch may have cost as much as the bound allows
                self.ledger.settle(state.policy.owing(state.pace, len(samples)))
            if len(samples) == 1:
                level = logging.WARNING if isinstance(error, AlightError) else logging.ERROR
                log_event("no answer", level, error=f"{type(error).__name__}: {error}")
                return [error]
            pairs = zip(samples, limits, strict=True)
            return [each for sample, limit in pairs for each in self._predict([sample], [limit])]
        if pace is not None:
            self.ledger.settle(pace)
        self.metrics.add_batch(decisions, state.policy.budget)
        names, classes = self.model.spec.classes, decisions.predictions.tolist()
        probabilities = repeat(None) if decisions.probabilities is None else decisions.probabilities.tolist()
        columns = zip(classes, decisions.exits.tolist(), decisions.spent.tolist(), probabilities, strict=False)
        return [
            Prediction(label=names[index] if names else index, index=index, exit=left, cost=cost, probability=top)
            for index, left, cost, top in columns
        ]

    def _admit(self, limits: Sequence[int]) -> Sequence[int]:
        """Return the limits, lowered to exits that the budget covers on its own if the state cannot be written."""
        try:
            self.ledger.admit(len(limits))
            return limits
        except OSError as error:
            self.metrics.state_errors.inc()
            log_event("state not written", logging.ERROR, path=str(self.ledger.path), error=str(error))
            policy = self.ledger.state.policy
            covered = deepest_within(policy.budget, policy)
            return [min(limit, covered) for limit in limits]


def deepest_within(budget: float | str | None, policy: Policy) -> int:
    """Return the index of the most expensive open exit that one sample may take for this budget.

    >>> from alight.policies.policy import Threshold
    >>> deepest_within("50%", Threshold(thresholds=(0.5, 0.5), costs=(1.0, 2.0, 4.0)))
    1
    """
    if budget is None:
        return len(policy.costs) - 1
    amount = Costs.from_cumulative(policy.costs, unit=policy.unit).budget(budget)
    covered = [open_index for open_index, cost in enumerate(policy.costs) if cost <= amount]
    if not covered:
        raise BudgetTooSmall(amount, policy.costs[0], policy.unit)
    return covered[-1]
