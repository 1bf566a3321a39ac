"""The models of one service by name and version, each with a worker of its own, and how requests are answered by them.

Models are loaded, loaded anew, and closed. A request is read, queued and answered in time, whatever its protocol.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Self, TypeVar

from fastapi import Request

from alight.errors import BadFile
from alight.policies.paced import Paced
from alight.policies.policy import Policy
from alight.serve.access import TenantCaps, check_caps
from alight.serve.admission import Admission
from alight.serve.ledger import RESERVE, Ledger, SpendLedger
from alight.serve.model import ExitTiming, ServedModel, measure_timings
from alight.serve.monitoring import Metrics, log_event
from alight.serve.reading import UnreadSamples, read_samples
from alight.serve.requests import Limits, PredictOptions, PredictResponse, RequestRefused
from alight.serve.worker import BatchWorker, QueuedRequest

INLINE = 2**12  # bytes of a body that is counted at once: others would wait for the headers of larger files
Result = TypeVar("Result")


@dataclass(frozen=True)
class ModelSource:
    """Where a version of a model comes from."""

    name: str
    version: str
    load: Callable[[], ServedModel] = field(compare=False)
    files: tuple[Path, ...] = ()  # folders and files that it is made of
    state: Path | None = None  # where its spend is kept

    def signature(self) -> tuple[tuple[str, int, int], ...]:
        """Return the names, sizes and dates of all files: where these are the same, so is the model."""
        found = [path for each in self.files for path in ([each] if each.is_file() else sorted(each.rglob("*")))]
        stats = [(str(path), path.stat()) for path in found if path.is_file()]
        return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def listed_models(path: Path) -> list[dict[str, Any]]:
    """Return the models of a JSON file: name, version, folder, policies and state of each, paths from its folder."""
    example = '{"models": [{"name": "digits", "version": "1", "folder": "model", "policies": ["policy.json"]}]}'
    try:
        models = json.loads(path.read_text(encoding="utf-8"))["models"]
        found = [_listed(path.parent, **each) for each in models]
    except (ValueError, KeyError, TypeError) as error:
        raise BadFile(path, f"it does not list models ({type(error).__name__}: {error})", f"write {example}") from error
    if not found or len({(each["name"], each["version"]) for each in found}) < len(found):
        raise BadFile(path, f"of {len(found)} models some have the same name and version, or there is none", example)
    return found


def _listed(
    home: Path, name: str, folder: str, policies: Sequence[str], version: str = "1", state: str | None = None
) -> dict[str, Any]:
    state = f"spending-{name}-{version}.json" if state is None else state
    paths = [home / policy for policy in policies]
    return {"name": name, "version": str(version), "folder": home / folder, "policies": paths, "state": home / state}


@dataclass
class LoadedModel:
    """A version of a model that is loaded and not served yet."""

    source: ModelSource
    signature: tuple[tuple[str, int, int], ...]  # from before it was loaded: a change meanwhile is seen next time
    model: ServedModel
    timings: Mapping[str, ExitTiming]


@dataclass
class HostedModel:
    """A version of a model that is being served."""

    source: ModelSource
    signature: tuple[tuple[str, int, int], ...]
    worker: BatchWorker
    caps: TenantCaps


Sources = Callable[[], Sequence[ModelSource]]
OpenLedger = Callable[[ModelSource, Mapping[str, Policy], int], Ledger]


def open_in_file(source: ModelSource, policies: Mapping[str, Policy], reserve: int) -> Ledger:
    """Return the ledger of a model that keeps its spend in a file, or forgets it."""
    return SpendLedger(source.state, policies, reserve)


class ModelHost:
    """All models of a service. The first is the one that requests mean which name none."""

    def __init__(
        self,
        sources: Sources,
        limits: Limits,
        *,
        open_ledger: OpenLedger = open_in_file,
        caps: Callable[[], Mapping[str, str | float | None]] = dict,
    ) -> None:
        self.sources, self.limits, self.open_ledger, self.caps = sources, limits, open_ledger, caps
        self.metrics = Metrics(limits.timeout)
        self.models: dict[str, dict[str, HostedModel]] = {}  # by name and version, the latest version last
        self._running, self._reloading = False, Lock()
        self._serve([self._load(source) for source in sources()])

    @classmethod
    def of(cls, model: ServedModel, limits: Limits, state: Path | None = None) -> Self:
        """Return a host of one model that is loaded already."""
        return cls(lambda: [ModelSource("model", "1", lambda: model, state=state)], limits)

    def _load(self, source: ModelSource) -> LoadedModel:
        signature, model = source.signature(), source.load()
        check_caps(self.caps(), [*model.policies.values()])
        for name, policy in model.policies.items():
            if not isinstance(policy, Paced):
                advice = "calibrate --contract stream"
                log_event("no guarantee for the stream", logging.WARNING, policy=name, advice=advice)
        return LoadedModel(source, signature, model, measure_timings(model, self.limits.batch))

    def _serve(self, loaded: Sequence[LoadedModel]) -> None:
        """Serve models; a version that is served already goes on with its queue and its spend."""
        for each in loaded:
            source, model = each.source, each.model
            hosted = self.models.get(source.name, {}).get(source.version)
            if hosted is None:
                ledger = self.open_ledger(source, model.policies, max(RESERVE, 4 * self.limits.batch))
                label = source.name if source.version == "1" else f"{source.name}:{source.version}"
                worker = BatchWorker(model, ledger, each.timings, self.limits, self.metrics, label)
                hosted = HostedModel(source, each.signature, worker, TenantCaps(ledger.lease, self.caps))
                self.models = self.models | {
                    source.name: self.models.get(source.name, {}) | {source.version: hosted}
                }  # never changed in place: other threads read it
                if self._running:
                    worker.start()
            else:
                hosted.worker.reload(model, each.timings).result()
                hosted.source, hosted.signature = source, each.signature
            policies = [*model.policies]
            log_event("loaded", model=source.name, version=source.version, engine=model.engine, policies=policies)

    def reload(self) -> list[str]:
        """Load what is new or has changed, close what is gone, and return the names of all three."""
        with self._reloading:
            return self._reload(self.sources())

    def _reload(self, sources: Sequence[ModelSource]) -> list[str]:
        loaded = []  # all of them before any is served: after an error nothing has changed
        for source in sources:
            hosted = self.models.get(source.name, {}).get(source.version)
            if hosted is None or hosted.source != source or hosted.signature != source.signature():
                loaded.append(self._load(source))
        self._serve(loaded)
        before, wanted = self.models, dict[str, dict[str, HostedModel]]()
        for source in sources:  # in their order, by which the first and the latest are found
            wanted.setdefault(source.name, {})[source.version] = before[source.name][source.version]
        self.models = wanted
        changed = [f"{each.source.name}:{each.source.version}" for each in loaded]
        for name, versions in before.items():
            for version in [each for each in versions if each not in wanted.get(name, {})]:
                versions[version].worker.close()
                changed.append(f"{name}:{version}")
        return changed

    def find(self, name: str | None = None, version: str | None = None) -> HostedModel:
        """Return a model by its name and version, the first model and its latest version where none is named."""
        versions = self.models.get(name or next(iter(self.models)))
        hosted = None if versions is None else versions.get(version or [*versions][-1])
        if hosted is None:
            known = ", ".join(f"{each} {' '.join(versions)}" for each, versions in self.models.items())
            raise RequestRefused(404, f"there is no model {f'{name} {version or str()}'.strip()[:100]!r}: {known}")
        return hosted

    @property
    def workers(self) -> list[BatchWorker]:
        """The workers of all models."""
        return [hosted.worker for versions in self.models.values() for hosted in versions.values()]

    @property
    def ready(self) -> bool:
        """Whether every model answers requests."""
        return bool(self.workers) and all(worker.ready for worker in self.workers)

    def start(self) -> None:
        """Begin to decide requests."""
        self._running = True
        for worker in self.workers:
            worker.start()

    def close(self) -> None:
        """Decide the requests that wait, then stop."""
        for worker in self.workers:
            worker.close()


@dataclass(frozen=True)
class Service:
    """What endpoints work with: the models, and the one place that admits requests."""

    host: ModelHost
    admission: Admission

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
        arrived, tenant = state["arrived"], state["caller"].tenant
        deadline = math.inf if options.deadline_ms is None else arrived + 1e-3 * options.deadline_ms
        until = min(deadline, arrived + self.host.limits.timeout)
        policy = worker.ledger.state.policy
        with worker.admitting(count, until):
            async with hosted.caps.charged(tenant, policy, count) as charge:
                begun = time.monotonic()
                model = worker.model  # which may be replaced meanwhile
                work = (read_samples, unread, model, until, self.admission.pictures.read)
                samples = await self.admission.read(unread.kind, unread.amount, count, until, *work)
                decided: list[QueuedRequest] = []
                size = count if count == 1 else worker.turn(count, deadline)
                try:
                    for first in range(0, count, size):
                        part = samples[first : first + size]
                        queued = QueuedRequest(part, options.budget, deadline, arrived, charge.cap, model=model)
                        worker.submit(queued)
                        decided.append(queued)
                        await asyncio.wrap_future(queued.response)
                finally:
                    if charge.cap is not None:
                        costs = [each.spent for each in decided]
                        charge.spent = None if None in costs else math.fsum(filter(None, costs))
        responses = [each.response.result() for each in decided]
        response = responses[0] if len(responses) == 1 else joined(responses)
        tracer, now, first_part = state["tracer"], time.monotonic(), decided[0]
        tracer.past("read", begun, first_part.queued, kind=unread.kind, amount=unread.amount)
        tracer.past("queue", first_part.queued, first_part.started)
        tracer.past("run", first_part.started, now, policy=response.policy)
        if tenant:
            spent = math.fsum(prediction.cost for prediction in response.predictions)
            worker.metrics.tenants.labels(tenant, response.unit).inc(spent)
        exits = [prediction.exit for prediction in response.predictions]
        state["logged"] = {"samples": len(exits), "exits": exits[:32], "policy": response.policy}
        return response

    @asynccontextmanager
    async def in_time(self, request: Request) -> AsyncIterator[float]:
        """Yield the moment until which a request has to be answered, and refuse it then."""
        until = request.scope["state"]["arrived"] + self.host.limits.timeout
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                yield until
        except TimeoutError as error:
            raise RequestRefused(504, f"there was no answer within {self.host.limits.timeout:g} seconds") from error


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
