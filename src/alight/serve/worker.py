"""One thread that owns the network: it takes requests from a queue in small batches and decides them.

The answer of a request leaves as soon as its last sample has left the network, while others of the batch go on.
"""

import logging
import math
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat

import numpy as np

from alight.engine.walk import Answers
from alight.errors import AlightError, BudgetTooSmall, Mismatch, Unreachable
from alight.policies.paced import Paced
from alight.policies.policy import Policy
from alight.serve.ledger import Ledger
from alight.serve.model import ExitTiming, Sample, ServedModel
from alight.serve.monitoring import DisagreementWatch, Metrics, error_type, log_event
from alight.serve.requests import Limits, Prediction, PredictResponse, RequestRefused, retry_after

IDLE = 0.5  # seconds after which a worker without requests looks whether others have changed the policy
SLACK = 0.25  # share of the time to a deadline that is kept for what the machine does beside
TURN = 0.03  # seconds of the network that one request takes at a time, if its samples can be split
ALONE = 10.0  # seconds since two requests were here at once, after which one takes all at a time: turns cost speed
SPARE_TIME = 4.0  # times what all samples take: a request with less time left is decided in one turn
KEPT = 64  # samples that wait to be watched, at most: those that came last


@dataclass(eq=False)
class QueuedRequest:
    """The samples of one request, what it may spend, and where its response goes."""

    samples: Sequence[Sample]
    budget: float | str | None = None  # what one sample may cost at most, as the request says
    deadline: float = math.inf  # on the clock of time.monotonic
    arrived: float = field(default_factory=time.monotonic)
    cap: float | None = None  # what one sample may cost at most, as its tenant has left
    queued: float = field(default_factory=time.monotonic)
    started: float = math.inf  # when it left the queue
    response: "Future[PredictResponse]" = field(default_factory=Future)
    predictions: dict[int, Prediction | Exception] = field(default_factory=dict)  # by position, as they come
    model: ServedModel | None = None  # for which the samples were read

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def spent(self) -> float | None:
        """What its samples cost: 0 if it was never decided, None if it may be decided still, or failed on the way."""
        if self.response.cancelled() or (self.response.done() and self.started == math.inf):
            return 0.0
        if not self.response.done() or self.response.exception() is not None:
            return None
        return sum([prediction.cost for prediction in self.response.result().predictions])


class BatchWorker:
    """The queue of requests to one model, and the thread that decides them."""

    def __init__(
        self,
        model: ServedModel,
        ledger: Ledger,
        timings: Mapping[str, ExitTiming],
        limits: Limits,
        metrics: Metrics,
        name: str = "model",
    ) -> None:
        self.model, self.ledger, self.limits, self.metrics, self.name = model, ledger, limits, metrics, name
        self.admitted = 0  # samples that are admitted and not answered; changed in one thread
        self.shared = -math.inf  # when two requests were admitted at once, the last time
        self.counts = [0] * len(model.exits)  # samples answered, by exit
        self.spent = self.allowed = 0.0
        self.watch = DisagreementWatch()
        self._to_watch: deque[tuple[Sample, int]] = deque(maxlen=KEPT)  # samples, and the classes they were answered
        self._draw = random.Random(secrets.randbits(64))
        self._timings = timings  # by policy
        self._queue: deque[QueuedRequest] = deque()
        self._changes: deque[tuple[Callable[[], None], Future[None]]] = deque()  # made between two batches
        self._changed = threading.Condition()
        self._closing = False
        self._current: list[QueuedRequest] = []  # requests that left the queue and are not answered
        self._busy_since: float | None = None
        self._next_number = secrets.randbits(62)  # of the next sample: other replicas and other runs draw otherwise
        self._thread = threading.Thread()

    @property
    def timing(self) -> ExitTiming:
        """How long exits take under the policy in force."""
        return self._timings[self.ledger.state.name]

    def start(self) -> None:
        """Begin to decide requests, or go on if the thread has ended."""
        self._thread = threading.Thread(target=self._work, name=f"alight-{self.name}", daemon=True)
        self._thread.start()

    def revive(self) -> None:
        """Start another thread if this one has ended without being asked to."""
        if not self._thread.is_alive() and self._thread.ident is not None and not self._closing:
            self.metrics.restarts.labels(self.name).inc()
            log_event("worker replaced", logging.ERROR, model=self.name)
            self.start()

    @property
    def ready(self) -> bool:
        """Whether requests are decided and more of them accepted, under the policy that is in force."""
        return self._thread.is_alive() and not self._closing and not self.stalled and not self.unknown_policy

    @property
    def unknown_policy(self) -> bool:
        """Whether the fleet has put a policy in force that this replica does not have."""
        return self.ledger.wanted is not None and self.ledger.wanted not in self.model.policies

    @property
    def stalled(self) -> bool:
        """Whether a batch takes longer than any request may wait, or the thread has ended."""
        if self._thread.ident is not None and not self._thread.is_alive() and not self._closing:
            return True
        since = self._busy_since
        return since is not None and time.monotonic() - since > self.limits.timeout

    @contextmanager
    def admitting(self, count: int, until: float) -> Iterator[None]:
        """Count samples from their admission to their answer; refuse them if they would not be answered in time."""
        wait = self.admitted * self.timing.per_sample
        if self.admitted + count > self.limits.queue or wait > until - time.monotonic() > 0:
            reason = f"{self.admitted} samples are waiting, for {wait:.1f} seconds or so: come again"
            raise RequestRefused(429, reason, retry_after(wait))
        if self.admitted:
            self.shared = time.monotonic()
        self.admitted += count
        try:
            yield
        finally:
            self.admitted -= count

    def turn(self, count: int, deadline: float) -> int:
        """Return how many of a request's samples run at once: not all if others would wait long, and time is left."""
        timing, last, now = self.timing, len(self.ledger.state.policy.costs) - 1, time.monotonic()
        if now - self.shared > ALONE or deadline - now < SPARE_TIME * timing.seconds(count, last):
            return count
        return next((size for size in range(1, count) if timing.seconds(size + 1, last) > TURN), count)

    def submit(self, request: QueuedRequest) -> None:
        """Put a request into the queue, before the thread has started, too; or refuse it."""
        with self._changed:
            if self._closing:
                raise RequestRefused(503, "the service is stopping: ask another one", retry_after=1)
            if self.unknown_policy:
                reason = f"all replicas are under the policy {self.ledger.wanted}, which is not here: ask another one"
                raise RequestRefused(503, reason, retry_after=1)
            self._queue.append(request)
            self._changed.notify()

    def change_policy(self, name: str) -> "Future[None]":
        """Put another policy in force between two batches, and return a future that is done once it is."""
        return self._between_batches(partial(self._put_in_force, name))

    def reload(self, model: ServedModel, timings: Mapping[str, ExitTiming]) -> "Future[None]":
        """Run another network or other policies from the next batch on; requests that wait are decided by them."""
        return self._between_batches(partial(self._replace, model, timings))

    def _between_batches(self, change: Callable[[], None]) -> "Future[None]":
        done: Future[None] = Future()
        with self._changed:
            self._changes.append((change, done))
            self._changed.notify()
        return done

    def close(self) -> None:
        """Decide the requests that wait, then stop, and keep the final state."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self.ledger.close()

    def _work(self) -> None:
        try:
            while (requests := self._next_batch()) is not None:
                self._busy_since, self._current = time.monotonic(), requests
                try:
                    while requests:
                        requests = self._decide_first(requests)
                    if self._to_watch and not self._queue:
                        self._watch_some()
                except Exception as error:  # a fault of ours: these requests get it, and later ones are decided
                    log_event("fault", logging.ERROR, error=error_type(error))
                    self._fail(error)
                self._busy_since, self._current = None, []
        except BaseException:
            self._busy_since = None
            self._fail(RequestRefused(503, "the worker has ended and is replaced: ask again", retry_after=1))
            raise

    def _fail(self, error: Exception) -> None:
        for request in self._current:
            if not request.response.done():
                request.response.set_exception(error)

    def _next_batch(self) -> list[QueuedRequest] | None:
        """Wait for the next requests; an empty list where there is something else to do, None once all are decided."""
        with self._changed:
            while not (self._queue or self._changes or self._closing or (self._to_watch and self._watchable)):
                self._changed.wait(IDLE)
                self._adopt()
            changes = [*self._changes]
            self._changes.clear()
        self._adopt()
        for change, done in changes:  # a disk or a ledger may take long, and requests come meanwhile
            self._change(change, done)
        with self._changed:
            if not self._queue:
                return None if self._closing else []
            while not self._closing and (left := self._begin() - time.monotonic()) > 0:
                self._changed.wait(left)
            requests: list[QueuedRequest] = []
            room = self.limits.batch
            while self._queue and len(self._queue[0]) <= room:
                requests.append(self._queue.popleft())
                room -= len(requests[-1])
            return [request for request in requests if request.response.set_running_or_notify_cancel()]

    def _begin(self) -> float:
        """Return when the next batch has to begin: once it is full, the first has waited, or a deadline comes close."""
        count, latest = 0, self._queue[0].queued + self.limits.wait
        for request in self._queue:
            count += len(request)
            if count >= self.limits.batch:
                return -math.inf
            needed = self.timing.seconds(count, len(self.ledger.state.policy.costs) - 1)
            latest = min(latest, request.deadline - needed - SLACK * (request.deadline - request.queued))
        return latest

    def _adopt(self) -> None:
        """Put the policy in force that others have chosen for all replicas."""
        wanted = self.ledger.wanted
        if wanted is not None and wanted in self.model.policies:
            self._put_in_force(wanted)

    def _change(self, change: Callable[[], None], done: "Future[None]") -> None:
        if not done.set_running_or_notify_cancel():  # nobody waits for it any more
            return
        try:
            change()
        except Exception as error:  # the caller gets it, and the worker continues
            done.set_exception(error)
        else:
            done.set_result(None)

    def _put_in_force(self, name: str) -> None:
        if name != self.ledger.state.name:
            self.ledger.change(name, self.model.policies[name])

    def _replace(self, model: ServedModel, timings: Mapping[str, ExitTiming]) -> None:
        if (model.spec.tensors, model.input_kind) != (self.model.spec.tensors, self.model.input_kind):
            raise Mismatch("the model takes other inputs than before: give it another version")
        state = self.ledger.state
        name = state.name if state.name in model.policies else next(iter(model.policies))
        if model.policies[name] != state.policy:
            self.ledger.change(name, model.policies[name])
        self.counts += [0] * (len(model.exits) - len(self.counts))
        self.model, self._timings, self.watch = model, timings, DisagreementWatch()

    def _decide_first(self, requests: list[QueuedRequest]) -> list[QueuedRequest]:
        """Decide the most urgent requests, all if no deadline is close, and return the others."""
        now, last = time.monotonic(), len(self.ledger.state.policy.costs) - 1
        needed = self.timing.seconds(sum(map(len, requests)), last)
        urgent = [request for request in requests if request.deadline - now < needed]
        if not urgent:
            self._decide(requests, last)
            return []
        reachable: list[QueuedRequest] = []
        for request in urgent:
            if self.timing.deepest(len(request), request.deadline - now) is not None:
                reachable.append(request)
                continue
            reason = f"after {1e3 * (now - request.queued):.0f} ms in the queue no exit is left in time"
            request.response.set_exception(RequestRefused(504, reason))
        count = sum(map(len, reachable))
        deepest = {request: self.timing.deepest(count, request.deadline - now) or 0 for request in reachable}
        first = [request for request in reachable if deepest[request] == min(deepest.values())]
        if first:
            self._decide(first, deepest[first[0]])
        return [request for request in requests if not request.response.done()]

    def _decide(self, requests: list[QueuedRequest], deepest: int) -> None:
        """Decide the samples of these requests together, none beyond this open exit, and set the responses."""
        policy, start = self.ledger.state.policy, time.monotonic()
        limits: list[int] = []
        owners: list[tuple[QueuedRequest, int]] = []  # of samples: the request, and the position in it
        for request in requests:
            read_for = request.model or self.model
            if read_for is not self.model and not self.model.reads_like(read_for):
                reason = "the model was replaced by one that reads otherwise: send the samples again"
                request.response.set_exception(RequestRefused(503, reason, 1))
                continue
            try:
                bounds = (request.budget, request.cap)
                limit = min([deepest, *[deepest_within(each, policy) for each in bounds if each is not None]])
            except AlightError as error:
                request.response.set_exception(RequestRefused(422, str(error)))
                continue
            request.started = start
            self.metrics.queued.labels(self.name).observe(start - request.queued)
            owners += [(request, position) for position in range(len(request))]
            limits += [limit] * len(request)
        if not owners:
            return
        samples = [request.samples[position] for request, position in owners]
        for place, prediction in self._predictions(samples, limits):
            request, position = owners[place]
            request.predictions[position] = prediction
            if len(request.predictions) == len(request):
                self._respond(request)

    def _respond(self, request: QueuedRequest) -> None:
        """Answer a request whose samples have all left."""
        own = [request.predictions[position] for position in range(len(request))]
        if failed := [(position, each) for position, each in enumerate(own) if isinstance(each, Exception)]:
            position, fault = failed[0]
            if isinstance(fault, Unreachable):
                fault = RequestRefused(503, "a network that another server runs gave no answer: come again", 1)
            elif isinstance(fault, AlightError):
                advice = "the network gives no usable answer: look for numbers out of range"
                fault = RequestRefused(422, f"sample {position}: {advice}")
            request.response.set_exception(fault)
            return
        state, now = self.ledger.state, time.monotonic()
        if now > request.deadline:
            self.metrics.late.labels(self.name).inc()
        request.response.set_result(
            PredictResponse(
                predictions=own,  # type: ignore[arg-type]  # no exception is among them
                policy=state.name,
                budget=state.policy.budget,
                unit=state.policy.unit,
                queued_ms=round(1e3 * (request.started - request.queued), 3),
                latency_ms=round(1e3 * (now - request.arrived), 3),
            )
        )

    def _predictions(
        self, samples: Sequence[Sample], limits: Sequence[int]
    ) -> Iterator[tuple[int, Prediction | Exception]]:
        """Yield the place and the prediction of each sample as it leaves; if a batch fails, the others run alone."""
        first, count, waiting = self._next_number, len(samples), {*range(len(samples))}
        self._next_number += count
        numbers, paced = [*range(first, first + count)], isinstance(self.ledger.state.policy, Paced)
        try:
            bounds = self._admit(limits) if paced else limits
            state = self.ledger.state  # which others do not change from here on until it is settled
            predictor = self.model.predictor(state.name, numbers, bounds, state.pace if paced else None)
            start, seconds, reached = time.monotonic(), 0.0, 0
            self.metrics.batches.labels(self.name).observe(count)
            for answers in predictor.answers(self.model.batch(samples), numbers):
                seconds, reached = time.monotonic() - start, max(reached, int(answers.open_indices.max()))
                places = (answers.samples - first).tolist()
                waiting.difference_update(places)
                if self.limits.watch:
                    self._keep_some([samples[place] for place in places], answers)
                yield from zip(places, self._count(answers, seconds), strict=True)
            self.timing.update(count, reached, seconds)
        except BaseException as error:
            state = self.ledger.state
            if isinstance(state.policy, Paced):  # the batch may have cost as much as the bound allows
                self.ledger.settle(state.policy.owing(state.pace, count))
            if not isinstance(error, Exception):  # the worker ends
                raise
            yield from self._without_answer(error, samples, limits, sorted(waiting))
        else:
            if paced:
                self.ledger.settle(predictor.memory[0])

    def _without_answer(
        self, error: Exception, samples: Sequence[Sample], limits: Sequence[int], waiting: Sequence[int]
    ) -> Iterator[tuple[int, Prediction | Exception]]:
        """Yield what becomes of samples whose batch failed: each runs alone, unless each would wait for a server."""
        if len(samples) == 1 or isinstance(error, Unreachable):
            level = logging.WARNING if isinstance(error, AlightError) else logging.ERROR
            log_event("no answer", level, error=error_type(error))
            yield from ((place, error) for place in waiting)
            return
        for place in waiting:
            for _, prediction in self._predictions([samples[place]], [limits[place]]):
                yield place, prediction

    def _count(self, answers: Answers, seconds: float) -> list[Prediction]:
        """Return answers as predictions, and count them."""
        name, policy = self.ledger.state.name, self.ledger.state.policy
        labels = self.name, name, policy.unit
        exits = [policy.open_exits[index] for index in answers.open_indices.tolist()]
        costs = [policy.costs[index] for index in answers.open_indices.tolist()]
        for exit_index in {*exits}:
            number, exit_name = exits.count(exit_index), self.model.exits[exit_index]
            self.counts[exit_index] += number
            self.metrics.samples.labels(self.name, name, exit_name).inc(number)
            self.metrics.leaving.labels(self.name, exit_name).observe(seconds)
        spent, allowed = sum(costs), len(costs) * (policy.budget or 0.0)
        self.spent += spent
        self.allowed += allowed
        self.metrics.spent.labels(*labels).inc(spent)
        self.metrics.allowed.labels(*labels).inc(allowed)
        names = self.model.spec.classes
        probabilities = repeat(None) if answers.probabilities is None else answers.probabilities.tolist()
        columns = zip(answers.predictions.tolist(), exits, costs, probabilities, strict=False)
        return [
            Prediction(label=names[index] if names else index, index=index, exit=left, cost=cost, probability=top)
            for index, left, cost, top in columns
        ]

    def _keep_some(self, samples: Sequence[Sample], answers: Answers) -> None:
        """Keep a share of the samples, with their classes, to run them to the end when nothing else is to do."""
        for sample, answer in zip(samples, answers.predictions.tolist(), strict=True):
            if self._draw.random() < self.limits.watch:
                self._to_watch.append((sample, answer))

    @property
    def _watchable(self) -> int:
        """How many of the samples to be watched the savings of the stream pay for; all if it has no budget."""
        state = self.ledger.state
        if not (self._to_watch and isinstance(state.policy, Paced) and state.policy.budget):
            return len(self._to_watch)
        saved = state.pace.admitted * state.policy.budget - state.pace.spent
        return min(len(self._to_watch), max(0, math.floor(saved / state.policy.costs[-1])))

    def _watch_some(self) -> None:
        """Run samples that were answered to the last exit, and see how many are answered otherwise there."""
        if not (count := min(self._watchable, self.limits.batch)):
            return
        policy = self.ledger.state.policy
        paced = isinstance(policy, Paced) and policy.budget is not None
        if paced:
            last, budget = policy.costs[-1], policy.budget or 0.0
            # reserved as so many samples as may exceed their budgets by as much together
            self.ledger.admit(math.ceil(count * last / (last - budget)) if last > budget else 0)
            count = min(count, self._watchable)  # savings may have been given to others before
            pace = self.ledger.state.pace
            self.ledger.settle(replace(pace, spent=pace.spent + count * last))
        if not count:
            return
        state = self.ledger.state
        samples, answers = zip(*(self._to_watch.popleft() for _ in range(count)), strict=True)
        differing = int((self.model.full_answers(state.name, samples) != np.array(answers)).sum())
        self.watch.add(count, differing)
        self.metrics.watched.labels(self.name, state.name).inc(count)
        self.metrics.disagreed.labels(self.name, state.name).inc(differing)
        self.metrics.disagreement_alarm.labels(self.name).set(self.watch.alarmed)

    def _admit(self, limits: Sequence[int]) -> Sequence[int]:
        """Return the limits, lowered to exits that the budget covers on its own if the state cannot be written."""
        try:
            self.ledger.admit(len(limits))
            return limits
        except OSError as error:
            self.metrics.state_errors.labels(self.name).inc()
            log_event("state not written", logging.ERROR, error=str(error))
            policy = self.ledger.state.policy
            assert policy.budget is not None  # of a paced one
            covered = deepest_within(policy.budget, policy)
            return [min(limit, covered) for limit in limits]


def deepest_within(budget: float | str, policy: Policy) -> int:
    """Return the index of the most expensive open exit that one sample may take for this budget.

    >>> from alight.policies.policy import Threshold
    >>> deepest_within("50%", Threshold(thresholds=(0.5, 0.5), costs=(1.0, 2.0, 4.0)))
    1
    """
    amount = policy.in_own_unit(budget)
    covered = [open_index for open_index, cost in enumerate(policy.costs) if cost <= amount]
    if not covered:
        raise BudgetTooSmall(amount, policy.costs[0], policy.unit, full=policy.full_cost)
    return covered[-1]
