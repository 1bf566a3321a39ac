"""What endpoints share: a request is read, queued and answered in time, whatever protocol it came by."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request

from alight.serve.admission import Admission
from alight.serve.hosting import HostedModel, ModelHost
from alight.serve.reading import UnreadSamples, read_samples
from alight.serve.requests import Limits, PredictOptions, PredictResponse, RequestRefused
from alight.serve.worker import QueuedRequest

INLINE = 2**12  # bytes of a body that is counted at once: others would wait for the headers of larger files
Result = TypeVar("Result")


@dataclass(frozen=True)
class Service:
    """What endpoints work with: the models, and the one place that admits requests."""

    host: ModelHost
    admission: Admission

    @property
    def limits(self) -> Limits:
        """Sizes and times beyond which a request is refused."""
        return self.host.limits

    async def counted(self, size: int, until: float, count: Callable[..., Result], *arguments: Any) -> Result:
        """Return what a body of so many bytes holds, counted in a thread unless it is small."""
        if size <= INLINE:
            return count(*arguments)
        return await self.admission.read("arrays", size, 0, until, count, *arguments)

    async def answer(
        self, request: Request, hosted: HostedModel, unread: UnreadSamples, options: PredictOptions
    ) -> PredictResponse:
        """Read the samples of a request, queue them, and wait for their predictions."""
        state, worker, count = request.scope["state"], hosted.worker, len(unread.values)
        arrived: float = state["arrived"]
        deadline = math.inf if options.deadline_ms is None else arrived + 1e-3 * options.deadline_ms
        until = min(deadline, arrived + self.limits.timeout)
        policy = worker.ledger.state.policy
        with worker.admitting(count, until):
            async with hosted.caps.charged(state["caller"].tenant, policy, count) as charge:
                begun = time.monotonic()
                work = (read_samples, unread, worker.model, until, self.admission.pictures.read)
                samples = await self.admission.read(unread.kind, unread.amount, count, until, *work)
                decided: list[QueuedRequest] = []
                size = count if count == 1 else worker.turn(count, deadline)
                try:
                    for first in range(0, count, size):
                        part = samples[first : first + size]
                        queued = QueuedRequest(part, options.budget, deadline, arrived, charge.cap)
                        worker.submit(queued)
                        decided.append(queued)
                        await asyncio.wrap_future(queued.response)
                finally:
                    costs = [each.spent for each in decided]
                    charge.spent = None if None in costs else math.fsum(filter(None, costs))
        responses = [each.response.result() for each in decided]
        response = responses[0] if len(responses) == 1 else joined(responses)
        tracer, now, first_part = state["tracer"], time.monotonic(), decided[0]
        tracer.past("read", begun, first_part.queued, kind=unread.kind, amount=unread.amount)
        tracer.past("queue", first_part.queued, first_part.started)
        tracer.past("run", first_part.started, now, policy=response.policy)
        if state["caller"].tenant:
            worker.metrics.tenants.labels(state["caller"].tenant, response.unit).inc(charge.spent or 0.0)
        exits = [prediction.exit for prediction in response.predictions]
        state["logged"] = {"samples": len(exits), "exits": exits[:32], "policy": response.policy}
        return response

    @asynccontextmanager
    async def in_time(self, request: Request) -> AsyncIterator[float]:
        """Yield the moment until which a request has to be answered, and refuse it then."""
        until = request.scope["state"]["arrived"] + self.limits.timeout
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                yield until
        except TimeoutError as error:
            raise RequestRefused(504, f"there was no answer within {self.limits.timeout:g} seconds") from error


def joined(responses: Sequence[PredictResponse]) -> PredictResponse:
    """Return the response of a request whose samples were decided in turns: the policy in force is that of the last."""
    predictions = [prediction for response in responses for prediction in response.predictions]
    return responses[-1].model_copy(update={"predictions": predictions, "queued_ms": responses[0].queued_ms})


async def body_of(request: Request) -> bytearray:
    """Return the body of a request, in memory once."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
    return content
