"""The application: endpoints that answer samples, and those for the people who run the service."""

import asyncio
import base64
import gc
import hashlib
import io
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache, partial
from importlib.resources import files
from string import Template

from anyio.to_thread import run_sync
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from PIL import Image
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.middleware.cors import CORSMiddleware

from alight import __version__
from alight.errors import AlightError
from alight.policies.paced import Paced
from alight.serve.access import Access
from alight.serve.admission import QUICK_NICENESS, Admission, LimitsMiddleware, be_nice, error_response, warm_up
from alight.serve.fleet import FleetLedger
from alight.serve.hosting import ModelHost, Service, body_of
from alight.serve.model import MOST_BYTES
from alight.serve.monitoring import error_type, log_event
from alight.serve.pictures import FORMATS
from alight.serve.protocol import add_inference_protocol
from alight.serve.reading import MAX_LETTERS, count_samples, open_request, read_samples
from alight.serve.requests import (
    FORM,
    JSON,
    BudgetChange,
    BudgetResponse,
    ExitCount,
    HealthResponse,
    PolicyInfo,
    PredictOptions,
    PredictRequest,
    PredictResponse,
    RequestRefused,
    StatusResponse,
    check_content_type,
    check_query,
    error_schemas,
    parse,
    request_body,
)
from alight.serve.worker import BatchWorker

MAX_FIELDS = 8  # of a form, beside files
LOOK = 1.0  # seconds between two looks at the workers
PAGE_RULES = (
    "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; connect-src 'self'; img-src data: blob:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)  # of what a browser lets the page do
FILES = PredictOptions.model_json_schema() | {"required": ["images"]}  # of a form
FILES["properties"]["images"] = {"type": "array", "items": {"type": "string", "format": "binary"}}


def build_app(host: ModelHost, access: Access | None = None) -> FastAPI:
    """Return the application of these models; their workers start and end with it."""
    limits = host.limits
    letters = MAX_LETTERS * limits.tokens
    body = limits.body or max(worker.model.largest_body(limits.batch, letters) for worker in host.workers)
    service = Service(host, Admission(limits, body, host.metrics))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await run_sync(_warm_up, service)
        gc.collect()
        gc.freeze()  # the garbage collector stops everything for as long as it looks at what stays anyway
        host.start()
        be_nice(QUICK_NICENESS)  # from here on: the threads that run networks have started, and come first
        looking = asyncio.create_task(_look_after(host))
        yield
        looking.cancel()
        gc.unfreeze()
        await run_sync(host.close)
        service.admission.close()
        log_event("drained", samples=sum(sum(worker.counts) for worker in host.workers))

    app = FastAPI(
        title="alight",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
        dependencies=[Depends(check_query)],
    )
    access = access or Access()
    app.add_middleware(LimitsMiddleware, admission=service.admission, access=access)
    if access.origins:  # outermost: a browser asks first whether it may send, and brings no token then
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.origins,
            allow_methods=["GET", "POST", "PUT"],
            allow_headers=["Authorization", "Content-Type", "Inference-Header-Content-Length", "X-Request-ID"],
            expose_headers=["Inference-Header-Content-Length", "Retry-After", "X-Request-ID"],
        )
    _add_predictions(app, service)
    _add_budget(app, service)
    _add_operations(app, service)
    add_inference_protocol(app, service)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # the type it is registered for
        return error_response(error)

    return app


async def _look_after(host: ModelHost) -> None:
    """Replace workers that have ended."""
    while True:
        await asyncio.sleep(LOOK)
        for worker in host.workers:
            try:
                worker.revive()
            except Exception as error:  # the system has no thread left, say: it is tried again
                log_event("worker not replaced", logging.ERROR, model=worker.name, error=error_type(error))


def _warm_up(service: Service) -> None:
    """Read one picture of each format, or a text, in every thread, so that the first request is as fast as others."""
    for worker in service.host.workers:
        model = worker.model
        values: list[str | bytes] = ["a few words"] if model.tokenize else [*map(_picture, FORMATS)]
        if model.input_kind != "arrays":
            limits = service.host.limits
            limits = replace(limits, batch=len(values), queue=max(len(values), limits.queue))
            unread = count_samples(model.input_kind, values, model, limits)
            warm_up(service.admission, partial(read_samples, unread, model))
        if model.input_kind == "images":
            service.admission.pictures.start()


def _picture(kind: str) -> bytes:
    """Return a small image file."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, kind)
    return file.getvalue()


def _add_predictions(app: FastAPI, service: Service) -> None:
    limits = service.host.limits

    @app.post(
        "/predict",
        response_model=PredictResponse,
        responses=error_schemas(),
        openapi_extra=request_body(JSON, PredictRequest.model_json_schema()),
    )
    async def predict(request: Request, model: str | None = None, version: str | None = None) -> PredictResponse:
        """Answer samples that come as JSON."""
        check_content_type(request, JSON)
        hosted = service.host.find(model, version)
        content = await body_of(request)
        async with service.in_time(request) as until:
            arguments = open_request, content, hosted.worker.model, limits
            options, unread = await service.counted(len(content), until, *arguments)
            del content, arguments
            return await service.answer(request, hosted, unread, options)

    @app.post(
        "/predict/files",
        response_model=PredictResponse,
        responses=error_schemas(),
        openapi_extra=request_body(FORM, FILES),
    )
    async def predict_files(request: Request, model: str | None = None, version: str | None = None) -> PredictResponse:
        """Answer images that come as files."""
        check_content_type(request, FORM)
        hosted = service.host.find(model, version)
        async with _form(request, service.admission.body) as form:
            images = [await part.read() for part in form.getlist("images") if isinstance(part, UploadFile)]
            if len(images) < len(form.getlist("images")) or set(form) - {"images", "budget", "deadline_ms"}:
                raise RequestRefused(422, "send images as files, and at most budget and deadline_ms beside them")
            given = {name: form[name] for name in ("budget", "deadline_ms") if name in form}
            for name in given:
                if len(form.getlist(name)) > 1:
                    raise RequestRefused(422, f"{name}, {len(form.getlist(name))} times: send it once")
            options = parse(PredictOptions, given)
        async with service.in_time(request) as until:
            arguments = count_samples, "images", images, hosted.worker.model, limits
            unread = await service.counted(sum(map(len, images)), until, *arguments)
            return await service.answer(request, hosted, unread, options)


class FormInMemory(MultiPartParser):
    """Reads a form without files on the disk, which may be full: its bytes are bounded, and counted, before."""

    spool_max_size = MOST_BYTES
    ended = False  # whether its last boundary has come: what stands after the one before would be left out

    def on_end(self) -> None:
        """Take note of the last boundary."""
        self.ended = True

    async def parse(self) -> FormData:
        """Return the form, if it is whole."""
        self.stream = self._to_its_end(self.stream)
        return await super().parse()

    async def _to_its_end(self, stream: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        async for chunk in stream:
            yield chunk
        if not self.ended:
            raise MultiPartException("The form is cut off: send it to its last boundary.")


@asynccontextmanager
async def _form(request: Request, most_bytes: int) -> AsyncIterator[FormData]:
    """Yield the fields and files of a form."""
    parser = FormInMemory(request.headers, request.stream(), max_fields=MAX_FIELDS, max_part_size=most_bytes)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise RequestRefused(400, error.message) from error
    try:
        yield form
    finally:
        await form.close()


def _add_budget(app: FastAPI, service: Service) -> None:
    host = service.host

    @app.get("/budget", responses=error_schemas(400, 401, 403, 404))
    async def budget(model: str | None = None, version: str | None = None) -> BudgetResponse:
        """Return the policy in force, and the policies that may be."""
        return _budget(host.find(model, version).worker)

    @app.put(
        "/budget",
        response_model=BudgetResponse,
        responses=error_schemas(400, 401, 403, 404, 408, 413, 415, 422, 503),
        openapi_extra=request_body(JSON, BudgetChange.model_json_schema()),
    )
    async def change(request: Request, model: str | None = None, version: str | None = None) -> BudgetResponse:
        """Put another policy in force, between two batches; with a shared ledger, for all replicas."""
        check_content_type(request, JSON)
        worker = host.find(model, version).worker
        name = _chosen(worker, parse(BudgetChange, bytes(await body_of(request))))
        try:
            await asyncio.wait_for(asyncio.wrap_future(worker.change_policy(name)), host.limits.timeout)
        except TimeoutError as error:
            reason = f"no change within {host.limits.timeout:g} seconds: a batch takes long, or the service is stopping"
            raise RequestRefused(503, reason, 1) from error
        except ConnectionError as error:
            reason = f"{error}, and may still hear of the change: look at /budget which policy is in force"
            raise RequestRefused(503, reason, 1) from error
        except OSError as error:
            raise RequestRefused(503, f"the change cannot be saved ({error}): make room on the disk", 60) from error
        log_event("budget changed", policy=name, budget=worker.model.policies[name].budget)
        return _budget(worker)


def _add_operations(app: FastAPI, service: Service) -> None:
    host = service.host

    @app.get("/status", responses=error_schemas(400, 401, 403, 404))
    async def status(model: str | None = None, version: str | None = None) -> StatusResponse:
        """Return samples and spend since the start, and the state of the stream."""
        return _status(host.find(model, version).worker)

    @app.get("/healthz", responses={503: {"model": HealthResponse}})
    async def healthz() -> Response:
        """Return whether the process should stay alive: the workers finish their batches."""
        stalled = [worker.name for worker in host.workers if worker.stalled]
        state, status = (f"no answers from {', '.join(stalled)}", 503) if stalled else ("alive", 200)
        return JSONResponse({"state": state}, status)

    @app.get("/readyz", responses={503: {"model": HealthResponse}})
    async def readyz() -> Response:
        """Return whether requests should be sent here."""
        state, status = ("ready", 200) if host.ready else ("starting or stopping", 503)
        return JSONResponse({"state": state}, status)

    @app.get("/metrics", responses=error_schemas(400, 401, 403), response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Return the metrics for Prometheus."""
        for worker in host.workers:
            _show(worker)
        for lane in (service.admission.quick, service.admission.slow):
            host.metrics.lane_bytes.labels(lane.name).set(lane.bytes)
            host.metrics.lane_seconds.labels(lane.name).set(lane.wait)
        return PlainTextResponse(host.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def show_page() -> HTMLResponse:
        """Return a page to try the service."""
        content, headers = page()
        return HTMLResponse(content, headers=headers)


def _show(worker: BatchWorker) -> None:
    """Set the gauges of a worker."""
    state, metrics = worker.ledger.state, worker.metrics
    metrics.queue.labels(worker.name).set(worker.admitted)
    metrics.show_stream(worker.name, state.name, state.policy, state.pace)
    if isinstance(worker.ledger, FleetLedger):
        metrics.ledger_up.labels(worker.name).set(worker.ledger.up)
        metrics.credit.labels(worker.name, state.name, state.policy.unit).set(worker.ledger.credit)


def _budget(worker: BatchWorker) -> BudgetResponse:
    state = worker.ledger.state
    infos = [
        PolicyInfo(
            name=name,
            budget=policy.budget,
            rule=policy.summary(),
            contract=policy.certificate.contract if policy.certificate else None,
        )
        for name, policy in worker.model.policies.items()
    ]
    return BudgetResponse(policy=state.name, budget=state.policy.budget, unit=state.policy.unit, policies=infos)


def _chosen(worker: BatchWorker, change: BudgetChange) -> str:
    """Return the name of the policy that a change asks for."""
    policies = worker.model.policies
    known = ", ".join(f"{name} ({policy.budget})" for name, policy in policies.items())
    if change.policy is not None:
        if change.policy not in policies:
            raise RequestRefused(422, f"there is no policy {change.policy[:100]!r}: choose among {known}")
        return change.policy
    whole = max(policies.values(), key=lambda policy: policy.costs[-1])
    assert change.budget is not None  # one of both is given
    try:
        amount = whole.in_own_unit(change.budget)
    except AlightError as error:
        raise RequestRefused(422, str(error)) from error
    budgets = {name: policy.budget for name, policy in policies.items() if policy.budget is not None}
    affordable = [name for name, budget in budgets.items() if budget <= amount]
    if not affordable:
        raise RequestRefused(422, f"no policy has a budget of {amount:g} or less: choose among {known}")
    return max(affordable, key=lambda name: budgets[name])


def _status(worker: BatchWorker) -> StatusResponse:
    state, model = worker.ledger.state, worker.model
    costs = dict(zip(state.policy.open_exits, state.policy.costs, strict=True))
    return StatusResponse(
        policy=state.name,
        budget=state.policy.budget,
        unit=state.policy.unit,
        samples=sum(worker.counts),
        spent=worker.spent,
        allowed=worker.allowed,
        max_overspend=state.policy.costs[-1] if isinstance(state.policy, Paced) else None,
        exits=[
            ExitCount(exit=index, name=name, cost=costs.get(index), samples=worker.counts[index])
            for index, name in enumerate(model.exits)
        ],
        queue=worker.admitted,
        alarm=state.pace.alarmed,
        disagreement=worker.watch.disagreements / worker.watch.samples if worker.watch.samples else None,
        disagreement_alarm=worker.watch.alarmed,
        input_kind=model.input_kind,
        input_shape=list(model.shape),
        max_samples=worker.limits.batch,
    )


@cache
def page() -> tuple[str, dict[str, str]]:
    """Return the page at /, one document that asks nothing of any other host, and the headers that hold it to that.

    >>> "<title>alight</title>" in page()[0]
    True
    """
    folder = files("alight.serve") / "assets"
    style, script, html = ((folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js", "html"))
    hashes = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in (style, script))
    headers = {"Content-Security-Policy": PAGE_RULES.format(*hashes), "X-Content-Type-Options": "nosniff"}
    return Template(html).substitute(style=style, script=script), headers
