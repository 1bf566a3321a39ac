"""Calls to models, one request after another or many at once, under a budget that is counted in real costs.

A request walks through the models of its policy: `Request._route` is all of it. The account says whether the next call
can be paid for, and a member's reply whether the request leaves. A member is a function or a coroutine, called with a
timeout, whose reply is (answer, score, cost).
"""

import asyncio
import inspect
import math
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX, Thread
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from alight.display import quantity
from alight.errors import BadInput
from alight.policies.limits import Metered, meter
from alight.policies.policy import Policy
from alight.policies.route import Recalled, visit
from alight.routing.account import Account, SpendWarning
from alight.routing.logs import numbering, same_answer

Member = Callable[[Any], Any]
THREADS = 64  # that make calls of one event loop at once
_SLOTS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class ModelCall:
    """One call that is to be made: of this model; what came of it is reported once."""

    def __init__(self, router: "Router", open_index: int) -> None:
        self.model: str = router.models[open_index]
        self.member: int = router.policy.open_exits[open_index]  # its index among all models of the log
        self.answer: Any = None
        self.score = math.nan
        self.failure: str | None = None  # why it gave no answer
        self.charged: float | None = None  # what it cost, once that is settled
        self._router, self._open_index = router, open_index

    def report(self, *, score: float, answer: Any = None, cost: float | None = None) -> None:
        """Report an answer, how sure the model is, and what the call cost; None where that is not known."""
        sure = float(score)  # what is not a number was not reported
        self._settle(cost)
        self.answer, self.score = answer, sure

    def fail(self, reason: object = "it failed", cost: float | None = None) -> None:
        """Report that the call gave no answer; unless its cost is known, the most that it can cost is charged."""
        self._settle(cost, "timeouts" if isinstance(reason, TimeoutError) else "failures")
        self.failure = str(reason) or type(reason).__name__

    def _settle(self, cost: float | None, fault: str = "") -> None:
        if self.charged is not None:
            raise BadInput(
                f"a call of {self.model} was reported twice: report each once, so that none is charged twice"
            )
        self.charged, odd = self._router.settle(self._open_index, cost, fault)
        if odd:
            warnings.warn(odd, SpendWarning, stacklevel=4)


class Request:
    """One request on its way: iterate over the calls to make, then read the answer."""

    def __init__(self, router: "Router", number: int) -> None:
        self.number = number  # which decides ties and mixtures
        self.answer: Any = None  # None if no model gave one
        self.model: str | None = None  # that the request left at
        self.calls: list[ModelCall] = []
        self._router, self._is_routed = router, False

    @property
    def spent(self) -> float:
        """What its calls have cost."""
        return sum(call.charged or 0.0 for call in self.calls)

    @property
    def failures(self) -> dict[str, str]:
        """Why models gave no answer, by their names."""
        return {call.model: call.failure for call in self.calls if call.failure is not None}

    def __iter__(self) -> Generator[ModelCall, None, None]:
        if self._is_routed:
            raise BadInput(f"request {self.number} was routed already, and its calls are paid for once: ask() again")
        self._is_routed = True
        with self._router.routing():
            yield from self._route()

    def _route(self) -> Generator[ModelCall, None, None]:
        """Yield call after call, until the request leaves, or the budget might not pay for the next one."""
        router, policy = self._router, self._router.policy
        recalled: Recalled = ((), ())
        said: dict[str | int, Any] = {}  # the last of equal answers, in the order of their first appearance
        numbers = numbering(np.array([self.number]), policy.num_exits)[0].tolist()
        for open_index in range(len(policy.open_exits)):
            if open_index and not router.reserve(open_index, is_answered=bool(said)):
                return
            call = ModelCall(router, open_index)
            self.calls.append(call)
            try:
                yield call
            finally:
                if call.charged is None:
                    call.fail("nothing was reported")
            if call.failure is not None:
                continue  # the next model is asked instead
            key = same_answer(call.answer) or open_index  # a missing answer equals no other
            said[key] = call.answer
            self.answer, self.model = call.answer, call.model
            score = policy.usable_score([each.score for each in self.calls])
            if score is None and math.isnan(call.score):
                continue
            if score is None:
                return
            code = numbers[[*said].index(key)]
            leaving, chosen, recalled = visit(policy, open_index, self.number, code, (score,), recalled)
            self.answer = [*said.values()][numbers.index(chosen)]
            if leaving:
                return


class Router(Account):
    """A policy and what it has spent: which models to call for a request, under a budget of real costs.

    `router.ask()` gives a request, whose calls you make; with `members`, callables by model or in the order of the
    policy's models that take a request and return (answer, score, cost), `router(request)` makes them, and
    `await router.answer(request)` does so beside other requests. A member that fails, or takes longer than `timeout`
    seconds, is skipped, and the last answer stays if later members fail. Threads and tasks may share a router.

    With `max_costs`, the most that a call of each open model can cost, or a policy that `certified_stream` gave, the
    most is reserved before a call and settled with the cost that it reports, so that at every moment, whatever the
    requests are: spent <= requests x budget + the most that one request can cost. What cannot be a cost (none, NaN,
    below 0) is charged as the most; more than the most is charged as reported, counted and warned of, exceeds the bound
    by as much, and is paid back by later requests.

    Args:
        policy: What `calibrate` made of a log, certified or not.
        members: Callables by model, or in the order of the policy's models; None: you make the calls.
        max_costs: The most that a call of each open model can cost; None: nothing is reserved, unless the policy knows.
        timeout: Seconds after which a member is skipped.

    >>> from alight import Threshold
    >>> policy = Threshold(thresholds=(0.8,), costs=(0.1, 1.1), budget=0.5, exits=("small", "large"))
    >>> router = Router(policy, max_costs=[0.2, 2.0])
    >>> request = router.ask()
    >>> for call in request:
    ...     call.report(score={"small": 0.3, "large": 0.9}[call.model], answer=call.model, cost=0.1)
    >>> request.answer, router
    ('large', Router(small, large: 1 requests, 0.2 spent of 2.7 allowed))
    """

    def __init__(
        self,
        policy: Policy,
        members: Mapping[str, Member] | Sequence[Member] | None = None,
        *,
        max_costs: Sequence[float] | None = None,
        timeout: float | None = None,
    ) -> None:
        if not isinstance(policy, Policy):
            raise BadInput(f"a {type(policy).__name__} is not a policy: give what calibrate or load_policy returns")
        if isinstance(policy, Metered) and policy.per_batch:
            raise BadInput("the policy keeps the budget of batches: a router needs one of certified_stream")
        guard = policy if isinstance(policy, Metered) and max_costs is None else None
        self.policy = policy.policy if isinstance(policy, Metered) else policy
        if self.policy.is_batch_dependent or len(self.policy.inputs) != 1:
            raise BadInput(f"a {type(policy).__name__} does not decide on one score of one request: calibrate another")
        if timeout is not None and not (isinstance(timeout, int | float) and 0 < timeout <= TIMEOUT_MAX):
            raise BadInput(f"a timeout of {timeout!r} s: give more than 0, or None to wait for every member")
        models = [self.policy.exit_names[index] for index in self.policy.open_exits]
        super().__init__(self.policy, models, guard if max_costs is None else meter(self.policy, max_costs))
        self.members, self.timeout = None if members is None else by_model(self.models, members), timeout

    def ask(self) -> Request:
        """Admit a request; its calls are made while one iterates over it."""
        return Request(self, self.admit())

    def __call__(self, request: Any) -> Request:
        """Route a request through the members, and return it with its answer."""
        members, routed = self._callables(), self.ask()
        with closing(iter(routed)) as calls:
            for call in calls:
                try:
                    report = called_in_turn(members[call.model], request, self.timeout)
                except Exception as error:  # of a member: the next one is asked
                    call.fail(error)
                else:
                    call.report(**report)
        return routed

    async def answer(self, request: Any) -> Request:
        """Route a request through the members, which may be coroutines, and return it with its answer."""
        members, routed = self._callables(), self.ask()
        with closing(iter(routed)) as calls:
            for call in calls:
                try:
                    report = await called(members[call.model], request, self.timeout)
                except Exception as error:  # of a member: the next one is asked
                    call.fail(error)
                else:
                    call.report(**report)
        return routed

    def _callables(self) -> Mapping[str, Member]:
        if self.members is None:
            raise BadInput("this router has no members to call: give Router(policy, members), or use ask()")
        return self.members

    def __repr__(self) -> str:
        spent = f"{self.admitted:,} requests, {quantity(self.spent, self.policy.unit)} spent"
        bound = f" of {quantity(self.allowed, self.policy.unit)} allowed" if self.guard else ""
        return f"Router({', '.join(self.models)}: {spent}{bound})"


def by_model(models: Sequence[str], members: Mapping[str, Member] | Sequence[Member]) -> dict[str, Member]:
    """Return the member of each model, from a mapping by name or a list in their order."""
    if not isinstance(members, Mapping):
        if not isinstance(members, Sequence):
            raise BadInput(f"a {type(members).__name__} instead of members: give a callable for each model")
        if len(members) != len(models):
            raise BadInput(f"{len(members)} members for the models {', '.join(models)}: give one each, in this order")
        members = dict(zip(models, members, strict=True))
    if lacking := [model for model in models if model not in members]:
        raise BadInput(f"there is no member for the model {lacking[0]!r}: give one for each of {', '.join(models)}")
    for model in models:
        if not callable(members[model]):
            raise BadInput(f"the member of {model} is a {type(members[model]).__name__}: give a callable")
    return {model: members[model] for model in models}


def as_report(reply: Any) -> dict[str, Any]:
    """Return a reply, (answer, score, cost) or a mapping of them, as `ModelCall.report` takes it."""
    if isinstance(reply, Mapping):
        return {"answer": reply["answer"], "score": float(reply["score"]), "cost": reply.get("cost")}
    answer, score, cost = reply
    return {"answer": answer, "score": float(score), "cost": cost}


async def called(member: Member, request: Any, timeout: float | None) -> dict[str, Any]:
    """Return the report of a coroutine, or of a function, which another thread runs."""
    is_coroutine = inspect.iscoroutinefunction(member) or inspect.iscoroutinefunction(type(member).__call__)
    async with nullcontext() if is_coroutine else _slots():  # time counts from the start of a call
        async with asyncio.timeout(timeout):
            try:
                reply = await (member(request) if is_coroutine else _in_thread(member, request))
                return as_report(await reply if inspect.isawaitable(reply) else reply)
            except asyncio.CancelledError as error:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                raise RuntimeError("the member cancelled its call") from error  # the request was not cancelled


def called_in_turn(member: Member, request: Any, timeout: float | None) -> dict[str, Any]:
    """Return the report of a function, or raise TimeoutError; its thread ends when it does."""
    if timeout is None:
        return _report_now(member, request)
    replies: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    _start(lambda: _report_now(member, request), lambda *reply: replies.put(reply))
    try:
        report, error = replies.get(timeout=timeout)
    except Empty:
        raise TimeoutError(f"no answer within {timeout:g} s") from None
    if error is not None:
        raise error
    return report


def _slots() -> asyncio.Semaphore:
    """Return the places for calls in threads of this event loop; a call that took too long gives its place back."""
    return _SLOTS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(THREADS))


async def _in_thread(member: Member, request: Any) -> Any:
    """Return what a function returns in a thread of its own: in a pool, calls that hang would delay all others."""
    loop = asyncio.get_running_loop()
    replied: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def receive(reply: tuple[Any, BaseException | None]) -> None:
        if not replied.done():  # else it took too long
            replied.set_result(reply)

    def hand_over(*reply: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(receive, reply)

    _start(partial(copy_context().run, member, request), hand_over)
    reply, error = await replied
    if error is not None:
        raise error
    return reply


def _start(call: Callable[[], Any], done: Callable[[Any, BaseException | None], Any]) -> None:
    """Run a call in a thread, which hands over what it returns or raises."""

    def run() -> None:
        try:
            reply = call()
        except BaseException as error:  # handed to the thread that waits
            done(None, error)
        else:
            done(reply, None)

    Thread(target=run, daemon=True).start()


def _report_now(member: Member, request: Any) -> dict[str, Any]:
    reply = member(request)
    if inspect.isawaitable(reply):
        getattr(reply, "close", lambda: None)()
        raise BadInput("the member is a coroutine: use `await router.answer(request)`")
    return as_report(reply)
