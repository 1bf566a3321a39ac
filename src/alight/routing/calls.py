"""One call of a member: a function or a coroutine, with a timeout, whose reply is (answer, score, cost)."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from alight.errors import BadInput

Member = Callable[[Any], Any]


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
    async with asyncio.timeout(timeout):
        if inspect.iscoroutinefunction(member) or inspect.iscoroutinefunction(type(member).__call__):
            return as_report(await member(request))
        reply = await asyncio.to_thread(member, request)
        return as_report(await reply if inspect.isawaitable(reply) else reply)


def called_in_turn(member: Member, request: Any, timeout: float | None) -> dict[str, Any]:
    """Return the report of a function, or raise TimeoutError; its thread ends when it does."""
    if timeout is None:
        return _report_now(member, request)
    replies: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            replies.put((_report_now(member, request), None))
        except BaseException as error:  # handed to the thread that waits
            replies.put((None, error))

    Thread(target=run, daemon=True).start()
    try:
        report, error = replies.get(timeout=timeout)
    except Empty:
        raise TimeoutError(f"no answer within {timeout:g} s") from None
    if error is not None:
        raise error
    return report


def _report_now(member: Member, request: Any) -> dict[str, Any]:
    reply = member(request)
    if inspect.isawaitable(reply):
        getattr(reply, "close", lambda: None)()
        raise BadInput("the member is a coroutine: use `await router.answer(request)`")
    return as_report(reply)
