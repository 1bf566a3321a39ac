"""Calls to models, one request after another or many at once, under a budget that is counted in real costs."""

import asyncio
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any

import numpy as np

from alight.display import quantity
from alight.errors import BadFile, BadInput, Mismatch
from alight.files import PathLike, read_json, write_json
from alight.policies.metered import Metered, meter
from alight.policies.policy import Policy
from alight.policies.route import Recalled, visit
from alight.routing.logs import numbering, same_answer

KIND = "Router"  # of the file that keeps its state
COUNTED = ("calls", "failures", "timeouts", "unknown_costs", "above_most")  # for every model


class SpendWarning(UserWarning):
    """A member reported a cost that cannot be, or more than a call of it can cost."""


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
        self._settle(cost)
        self.answer, self.score = answer, float(score)

    def fail(self, reason: object = "it failed", cost: float | None = None) -> None:
        """Report that the call gave no answer; unless its cost is known, the most that it can cost is charged."""
        self.failure = str(reason) or type(reason).__name__
        self._settle(cost, "timeouts" if isinstance(reason, TimeoutError) else "failures")

    def _settle(self, cost: float | None, kind: str = "") -> None:
        if self.charged is not None:
            raise BadInput(
                f"a call of {self.model} was reported twice: report each once, so that none is charged twice"
            )
        self.charged = self._router._settled(self._open_index, cost, kind)


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

    def __iter__(self) -> Iterator[ModelCall]:
        if self._is_routed:
            raise BadInput(f"request {self.number} was routed already, and its calls are paid for once: ask() again")
        self._is_routed = True
        with self._router._on_its_way():
            yield from self._route()

    def _route(self) -> Iterator[ModelCall]:
        router, policy = self._router, self._router.policy
        recalled: Recalled = ((), ())
        answers: dict[str, int] = {}  # by their text, the distinct ones in the order of their first appearance
        said: list[Any] = []
        numbers = numbering(np.array([self.number]), policy.num_exits)[0]
        for open_index in range(len(policy.open_exits)):
            if open_index and not router._reserved(open_index, is_answered=bool(said)):
                break  # the budget might not pay for it
            call = ModelCall(router, open_index)
            self.calls.append(call)
            try:
                yield call
            finally:
                if call.charged is None:  # nothing was reported
                    call.fail("nothing was reported")
            if call.failure is not None:
                continue
            if (text := same_answer(call.answer)) not in answers:
                answers[text] = len(answers)
                said.append(call.answer)
            self.answer, self.model = call.answer, call.model
            unscored = [math.isnan(each.score) for each in self.calls]  # failed calls are, too
            if policy.combination and unscored[-1]:
                continue
            if policy.combination and any(unscored):
                break  # answers are combined of all members or none
            code = np.array([numbers[answers[text]]])
            scores = (np.array([-math.inf if unscored[-1] else call.score]),)  # as unsure as can be
            leaving, chosen, recalled = visit(policy, open_index, np.array([self.number]), code, scores, recalled)
            self.answer = next(each for each, code in zip(said, numbers, strict=False) if code == chosen[0])
            if leaving[0]:
                break


class Router:
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
        members: Mapping[str, Callable[[Any], Any]] | Sequence[Callable[[Any], Any]] | None = None,
        *,
        max_costs: Sequence[float] | None = None,
        timeout: float | None = None,
    ) -> None:
        if isinstance(policy, Metered) and policy.per_batch:
            raise BadInput("the policy keeps the budget of batches: a router needs one of certified_stream")
        guard = policy if isinstance(policy, Metered) and max_costs is None else None
        self.policy = policy.policy if isinstance(policy, Metered) else policy
        if self.policy.is_batch_dependent or len(self.policy.inputs) != 1:
            raise BadInput(f"a {type(policy).__name__} does not decide on one score of one request: calibrate another")
        if max_costs is not None:
            guard = meter(self.policy, max_costs)
        self.models = tuple(self.policy.exit_names[index] for index in self.policy.open_exits)
        self.timeout, self._guard = timeout, guard
        self._members = None if members is None else _by_model(self.models, members)
        self._means = np.diff(self.policy.costs, prepend=0.0).tolist()
        self.admitted, self.spent, self.reserved, self._under_way = 0, 0.0, 0.0, 0
        self.counts = {model: dict.fromkeys(COUNTED, 0) for model in self.models}
        self._lock, self._warned = Lock(), set[tuple[str, str]]()

    @property
    def allowed(self) -> float:
        """What may have been spent by now; infinite where the most that calls can cost is not known."""
        return self._guard.allowed(self.admitted) if self._guard else math.inf

    def __repr__(self) -> str:
        spent = f"{self.admitted:,} requests, {quantity(self.spent, self.policy.unit)} spent"
        bound = f" of {quantity(self.allowed, self.policy.unit)} allowed" if self._guard else ""
        return f"Router({', '.join(self.models)}: {spent}{bound})"

    def ask(self) -> Request:
        """Admit a request; its calls are made while one iterates over it."""
        with self._lock:
            number = self.admitted
            self.admitted += 1
            self.reserved += self._most(0)  # at most the budget
        return Request(self, number)

    def __call__(self, request: Any) -> Request:
        """Route a request through the members, and return it with its answer."""
        members, routed = self._callables, self.ask()
        with closing(_calls(routed)) as calls:
            for call in calls:
                try:
                    reply = _reply(_within(self.timeout, members[call.model], request))
                except Exception as error:  # of a member: the next one is asked
                    call.fail(error)
                else:
                    call.report(**reply)
        return routed

    async def answer(self, request: Any) -> Request:
        """Route a request through the members, which may be coroutines, and return it with its answer."""
        members, routed = self._callables, self.ask()
        with closing(_calls(routed)) as calls:
            for call in calls:
                try:
                    async with asyncio.timeout(self.timeout):
                        reply = _reply(await _awaited(members[call.model], request))
                except Exception as error:  # of a member: the next one is asked
                    call.fail(error)
                else:
                    call.report(**reply)
        return routed

    @property
    def _callables(self) -> Mapping[str, Callable[[Any], Any]]:
        if self._members is None:
            raise BadInput("this router has no members to call: give Router(policy, members), or use ask()")
        return self._members

    def _most(self, open_index: int) -> float:
        return self._guard.max_costs[open_index] if self._guard else 0.0

    @contextmanager
    def _on_its_way(self) -> Iterator[None]:
        with self._lock:
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1

    def _reserved(self, open_index: int, *, is_answered: bool) -> bool:
        """Reserve the most that a call can cost, if the budget can pay for it.

        Requests that have an answer leave room for those whose first member will fail, as often as it has so far.
        """
        with self._lock:
            first, room = self.counts[self.models[0]], 0.0
            if self._guard and is_answered and (failed := first["failures"] + first["timeouts"]):
                room = sum(self._guard.max_costs) * (1 + self._under_way * failed / first["calls"])
            if self.spent + self.reserved + self._most(open_index) + room > self.allowed:
                return False
            self.reserved += self._most(open_index)
            return True

    def _settled(self, open_index: int, cost: float | None, kind: str) -> float:
        """Charge a call instead of what was reserved for it, and return the charge."""
        model, most = self.models[open_index], self._most(open_index)
        known = isinstance(cost, int | float | np.number) and 0 <= cost < math.inf
        charge = float(cost) if known else (most if self._guard else self._means[open_index])  # type: ignore[arg-type]
        found = [kind] if kind else []
        found += [] if known else ["unknown_costs"]
        found += ["above_most"] if self._guard and charge > most * (1 + 1e-9) else []
        with self._lock:
            self.reserved = max(0.0, self.reserved - most)
            self.spent += charge
            for each in ("calls", *found):
                self.counts[model][each] += 1
            odd = "above_most" in found or (cost is not None and not known)
            first = odd and (model, found[-1]) not in self._warned
            self._warned |= {(model, found[-1])} if odd else set()
        if first:
            warnings.warn(
                f"{model} reported a cost of {cost!r} for a call that can cost {quantity(most, self.policy.unit)}:"
                f" {quantity(charge, self.policy.unit)} was charged; further ones are counted in router.counts",
                SpendWarning,
                stacklevel=4,
            )
        return charge

    def save(self, path: PathLike) -> None:
        """Write what was spent and counted to a JSON file; calls on their way count as the most that they can cost."""
        with self._lock:
            content: dict[str, Any] = {"models": [*self.models], "budget": self.policy.budget, "unit": self.policy.unit}
            content |= {"admitted": self.admitted, "spent": self.spent + self.reserved, "counts": self.counts}
        write_json(path, KIND, content)

    def restore(self, path: PathLike) -> None:
        """Take over the state of a JSON file that `save` wrote, of a router with these models and this budget."""
        if self._under_way or self.reserved:
            raise BadInput(
                "requests of this router are on their way: restore before the first of them, or after the last"
            )
        content = read_json(path, KIND)
        try:
            admitted, spent = int(content["admitted"]), float(content["spent"])
            counts = {model: {name: int(each[name]) for name in COUNTED} for model, each in content["counts"].items()}
            written = ([*content["models"]], content["budget"], content["unit"])
            if admitted < 0 or not 0 <= spent < math.inf:
                raise ValueError(f"{admitted} requests admitted, {spent} spent")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadFile(path, f"its content is not usable ({error})", "start a fresh router") from error
        if written != ([*self.models], self.policy.budget, self.policy.unit):
            raise Mismatch(
                f"{path} is of a router of {', '.join(written[0])}, budget {written[1]}: start a fresh router"
            )
        with self._lock:
            self.admitted, self.spent, self.reserved, self.counts = admitted, spent, 0.0, counts


def _calls(request: Request) -> Any:
    """Return the generator of a request's calls, which can be closed."""
    return iter(request)


def _by_model(models: Sequence[str], members: Any) -> dict[str, Callable[[Any], Any]]:
    """Return the member of each open model, from a mapping by name or a list in their order."""
    if not isinstance(members, Mapping):
        if len(members) != len(models):
            raise BadInput(f"{len(members)} members for the models {', '.join(models)}: give one each, in this order")
        members = dict(zip(models, members, strict=True))
    if lacking := [model for model in models if model not in members]:
        raise BadInput(f"there is no member for the model {lacking[0]!r}: give one for each of {', '.join(models)}")
    return {model: members[model] for model in models}


def _reply(reply: Any) -> dict[str, Any]:
    """Return what a member answered as `ModelCall.report` takes it: (answer, score, cost), or a mapping of them."""
    if isinstance(reply, Mapping):
        return {"answer": reply["answer"], "score": float(reply["score"]), "cost": reply.get("cost")}
    answer, score, cost = reply
    return {"answer": answer, "score": float(score), "cost": cost}


async def _awaited(member: Callable[[Any], Any], request: Any) -> Any:
    """Return the reply of a coroutine, or of a function, which another thread runs."""
    if inspect.iscoroutinefunction(member) or inspect.iscoroutinefunction(type(member).__call__):
        return await member(request)
    reply = await asyncio.to_thread(member, request)
    return await reply if inspect.isawaitable(reply) else reply


def _within(timeout: float | None, member: Callable[[Any], Any], request: Any) -> Any:
    """Return the reply of a function, or raise TimeoutError; its thread ends when it does."""
    if timeout is None:
        return _checked(member(request))
    replies: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            replies.put((_checked(member(request)), None))
        except BaseException as error:  # handed to the thread that waits
            replies.put((None, error))

    Thread(target=run, daemon=True).start()
    try:
        reply, error = replies.get(timeout=timeout)
    except Empty:
        raise TimeoutError(f"no answer within {timeout:g} s") from None
    if error is not None:
        raise error
    return reply


def _checked(reply: Any) -> Any:
    if inspect.isawaitable(reply):
        getattr(reply, "close", lambda: None)()
        raise BadInput("the member is a coroutine: use `await router.answer(request)`")
    return reply
