"""One thread that owns the network: it takes what waits in small batches and decides them under the policy in force."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alight.costs import Costs
from alight.errors import AlightError, BudgetTooSmall
from alight.outputs import Decisions
from alight.policies.limits import capped
from alight.policies.paced import Pace, Paced
from alight.policies.policy import Policy
from alight.serve.ledger import Book
from alight.serve.limits import Limits, Refused
from alight.serve.logs import event
from alight.serve.metrics import Metrics
from alight.serve.network import Network, Sample
from alight.serve.timing import Timing


@dataclass(frozen=True)
class Answer:
    """What one sample got."""

    prediction: int
    exit: int
    cost: float
    probability: float | None


@dataclass(frozen=True)
class Answered:
    """What a request got, under which policy, and how long it waited."""

    answers: list[Answer]
    policy: str
    budget: float | None
    queued: float  # seconds


@dataclass(eq=False)
class Job:
    """The samples of one request, what it may take, and where the answer goes."""

    samples: Sequence[Sample]
    budget: float | str | None = None  # what one sample may cost at most
    deadline: float = math.inf  # on the clock of time.monotonic
    came: float = field(default_factory=time.monotonic)
    answer: "Future[Answered]" = field(default_factory=Future)


class Worker:
    """The queue and the thread that empties it."""

    def __init__(
        self, network: Network, book: Book, timings: Mapping[str, Timing], limits: Limits, metrics: Metrics
    ) -> None:
        self.network, self.book, self.limits, self.metrics = network, book, limits, metrics
        self._timings = timings  # by policy
        self._waiting: deque[Job] = deque()
        self._changes: deque[tuple[str, Future[None]]] = deque()
        self._queued = 0  # samples
        self._changed = threading.Condition()
        self._closing = False
        self._number = book.spending.pace.admitted  # of the next sample
        self._thread = threading.Thread(target=self._work, name="alight-worker", daemon=True)
        self._resume()

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread is at work."""
        return self._thread.is_alive()

    @property
    def started(self) -> bool:
        """Whether the thread was ever at work."""
        return self._thread.ident is not None

    @property
    def queued(self) -> int:
        """Samples that wait."""
        return self._queued

    @property
    def accepting(self) -> bool:
        """Whether requests are taken: also before the thread is at work, as far as the queue holds."""
        return not self._closing and (self.alive or not self.started)

    @property
    def timing(self) -> Timing:
        """How long exits take under the policy in force."""
        return self._timings[self.book.spending.name]

    def offer(self, job: Job) -> None:
        """Put a request into the queue, or refuse it."""
        with self._changed:
            if not self.accepting:
                raise Refused(503, "the service is stopping: ask another one", retry_after=1)
            if self._queued + len(job.samples) > self.limits.queue:
                seconds = max(1, math.ceil(self._queued * self.timing.per_sample))
                raise Refused(429, f"{self._queued} samples are waiting, as many as may: come again", seconds)
            self._waiting.append(job)
            self._count(len(job.samples))
            self._changed.notify()

    def change(self, name: str) -> "Future[None]":
        """Let another policy be in force, between two batches; done once the future is."""
        done: Future[None] = Future()
        with self._changed:
            self._changes.append((name, done))
            self._changed.notify()
        return done

    def close(self) -> None:
        """Answer what waits, then stop, and write down what was spent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self.book.close()

    def _work(self) -> None:
        while (jobs := self._next()) is not None:
            try:
                self._serve(jobs)
            except Exception as error:  # of our own: those who wait are told, and the others are answered
                event("fault", logging.ERROR, error=f"{type(error).__name__}: {error}")
                for job in jobs:
                    if not job.answer.done():
                        job.answer.set_exception(error)

    def _next(self) -> list[Job] | None:
        """The next batch of requests, none where only the policy was changed; None once all is done."""
        with self._changed:
            while not (self._waiting or self._changes or self._closing):
                self._changed.wait()
            while self._changes:
                self._change(*self._changes.popleft())
            if not self._waiting:
                return None if self._closing else []
            end = self._waiting[0].came + self.limits.wait
            while self._queued < self.limits.batch and not self._closing and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            jobs: list[Job] = []
            room = self.limits.batch
            while self._waiting and len(self._waiting[0].samples) <= room:
                jobs.append(self._waiting.popleft())
                room -= len(jobs[-1].samples)
            self._count(room - self.limits.batch)
            return [job for job in jobs if job.answer.set_running_or_notify_cancel()]

    def _count(self, more: int) -> None:
        self._queued += more
        self.metrics.queue.set(self._queued)

    def _change(self, name: str, done: "Future[None]") -> None:
        if name != self.book.spending.name:
            try:
                self.book.change(name, self.network.runners[name].policy)
                self._resume()
            except Exception as error:  # whoever asked is told, and the worker goes on
                done.set_exception(error)
                return
        done.set_result(None)

    def _resume(self) -> None:
        """Let the runner of the policy in force know of its stream."""
        spending = self.book.spending
        self.network.runners[spending.name].memory = (spending.pace,) if isinstance(spending.policy, Paced) else ()
        self.metrics.paced(spending)

    def _serve(self, jobs: list[Job]) -> None:
        """Answer these requests: first those whose deadline leaves no time for all exits of the whole batch."""
        now, last = time.monotonic(), len(self.book.spending.policy.costs) - 1
        whole = sum(len(job.samples) for job in jobs)
        in_time = [job for job in jobs if not self._too_late(job, now)]
        hurried = [job for job in in_time if job.deadline - now < self.timing.seconds(whole, last)]
        if not hurried:
            return self._answer(in_time, last)
        count = sum(len(job.samples) for job in hurried)
        reached = {job: self.timing.deepest(count, job.deadline - now) or 0 for job in hurried}
        shallowest = min(reached.values())
        first = [job for job in hurried if reached[job] == shallowest]
        self._answer(first, shallowest)
        return self._serve([job for job in in_time if job not in first])

    def _too_late(self, job: Job, now: float) -> bool:
        if self.timing.deepest(len(job.samples), job.deadline - now) is not None:
            return False
        waited = 1e3 * (now - job.came)
        job.answer.set_exception(Refused(504, f"after {waited:.0f} ms in the queue no exit is left in time"))
        return True

    def _answer(self, jobs: list[Job], deepest: int) -> None:
        """Decide the samples of these requests together, none beyond this position."""
        spending, start = self.book.spending, time.monotonic()
        limits: list[int] = []
        asked: list[Job] = []
        for job in jobs:
            try:
                limit = min(deepest, dearest(job.budget, spending.policy))
            except AlightError as error:
                job.answer.set_exception(Refused(422, str(error)))
                continue
            asked.append(job)
            limits += [limit] * len(job.samples)
        if not asked:
            return
        samples = [sample for job in asked for sample in job.samples]
        found = self._decided(samples, limits)
        for job in asked:
            own, found = found[: len(job.samples)], found[len(job.samples) :]
            self.metrics.queued_seconds.observe(start - job.came)
            wrong = [(index, each) for index, each in enumerate(own) if isinstance(each, Exception)]
            if wrong:
                job.answer.set_exception(_told(*wrong[0]))
                continue
            if time.monotonic() > job.deadline:
                self.metrics.late.inc()
            answers = [each for each in own if isinstance(each, Answer)]
            job.answer.set_result(Answered(answers, spending.name, spending.policy.budget, start - job.came))

    def _decided(self, samples: Sequence[Sample], limits: Sequence[int]) -> list[Answer | Exception]:
        """What each sample gets; where a batch fails, each of its samples is tried alone."""
        try:
            decisions = self._run(samples, self._covered(limits))
        except Exception as error:
            self._lost(len(samples))
            if len(samples) == 1:
                level = logging.WARNING if isinstance(error, AlightError) else logging.ERROR
                event("no answer", level, error=f"{type(error).__name__}: {error}")
                return [error]
            pairs = zip(samples, limits, strict=True)
            return [answer for sample, limit in pairs for answer in self._decided([sample], [limit])]
        self.metrics.decided(decisions, self.book.spending.policy)
        self.metrics.paced(self.book.spending)
        return answers_of(decisions)

    def _covered(self, limits: Sequence[int]) -> Sequence[int]:
        """The limits, lowered to exits that the budget covers on its own while the state cannot be written."""
        policy = self.book.spending.policy
        try:
            self.book.admit(len(limits))
            return limits
        except OSError as error:
            self.metrics.state_errors.inc()
            event("state not written", logging.ERROR, path=str(self.book.path), error=str(error))
            covered = dearest(policy.budget, policy)
            return [min(limit, covered) for limit in limits]

    def _run(self, samples: Sequence[Sample], limits: Sequence[int]) -> Decisions:
        """Decide a batch; those with a limit leave there at the latest."""
        spending = self.book.spending
        runner = self.network.runners[spending.name]
        numbers = np.arange(self._number, self._number + len(samples))
        self._number += len(samples)
        last, inputs = len(spending.policy.costs) - 1, self.network.joined(samples)
        bound = {int(number): limit for number, limit in zip(numbers, limits, strict=True) if limit < last}
        chosen: Any = runner
        if bound:
            chosen = runner.with_policy(capped(spending.policy, bound))
            chosen.memory = runner.memory
        start = time.perf_counter()
        decisions: Decisions = chosen(inputs, numbers)
        taken = time.perf_counter() - start
        deepest = spending.policy.open_exits.index(int(decisions.exits.max()))
        self.timing.learn(len(samples), deepest, taken)
        runner.memory = chosen.memory
        if runner.memory and isinstance(runner.memory[0], Pace):
            self.book.settle(runner.memory[0])
        return decisions

    def _lost(self, count: int) -> None:
        """Book a batch that failed on its way: it may have cost as much as the bound lets it."""
        spending = self.book.spending
        if isinstance(spending.policy, Paced):
            self.book.settle(spending.policy.owing(spending.pace, count))
            self._resume()


def dearest(budget: float | str | None, policy: Policy) -> int:
    """The position of the dearest open exit that one sample may take for this budget.

    >>> from alight.policies.policy import Threshold
    >>> dearest("50%", Threshold(thresholds=(0.5, 0.5), costs=(1.0, 2.0, 4.0)))
    1
    """
    if budget is None:
        return len(policy.costs) - 1
    amount = Costs.from_cumulative(policy.costs, unit=policy.unit).budget(budget)
    covered = [open_index for open_index, cost in enumerate(policy.costs) if cost <= amount]
    if not covered:
        raise BudgetTooSmall(amount, policy.costs[0], policy.unit)
    return covered[-1]


def answers_of(decisions: Decisions) -> list[Answer | Exception]:
    """Decisions sample by sample."""
    chances = [None] * len(decisions) if decisions.probabilities is None else decisions.probabilities.tolist()
    columns = (decisions.predictions.tolist(), decisions.exits.tolist(), decisions.spent.tolist(), chances)
    return [Answer(*row) for row in zip(*columns, strict=True)]


def _told(index: int, error: Exception) -> Exception:
    """What a request is told of a sample that could not be decided."""
    if isinstance(error, AlightError):
        return Refused(422, f"sample {index}: the network gives no usable answer: look for numbers out of range")
    return error
