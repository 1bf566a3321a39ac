"""One call of a member: a function or a coroutine, with a timeout, whose reply is (answer, score, cost)."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary

from alight.errors import BadInput

Member = Callable[[Any], Any]

THREADS = 64  # that make calls of one event loop at once
_SLOTS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def by_model(models: Sequence[str], members: Mapping[str, Member] | Sequence[Member]) -> dict[str, Member]:
    """Return the member of each model, from a mapping by name or a list in their order."""
    if not isinstance(members, Mapping):
        if len(members) != len(models):
            raise BadInput(f"{len(members)} members for the models {', '.join(models)}: give one each, in this order")
        members = dict(zip(models, members, strict=True))
    if lacking := [model for model in models if model not in members]:
        raise BadInput(f"there is no member for the model {lacking[0]!r}: give one for each of {', '.join(models)}")
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
