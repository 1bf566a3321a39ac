"""The application: endpoints that answer samples, and those for the people who run the service."""

import asyncio
import base64
import hashlib
import logging
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from alight import __version__
from alight.costs import Costs
from alight.errors import AlightError
from alight.policies.paced import Paced
from alight.serve.ledger import RESERVE, SpendLedger, resume_state
from alight.serve.model import Sample, ServedModel, measure_timings
from alight.serve.monitoring import LimitsMiddleware, Metrics, error_response, log_event
from alight.serve.protocol import add_protocol
from alight.serve.requests import (
    FORM,
    JSON,
    BudgetChange,
    BudgetResponse,
    ExitCount,
    HealthResponse,
    Limits,
    PolicyInfo,
    PredictOptions,
    PredictRequest,
    PredictResponse,
    RequestRefused,
    StatusResponse,
    check_content_type,
    error_schemas,
    parse,
    read_request,
    read_samples,
    request_body,
)
from alight.serve.worker import BatchWorker, QueuedRequest

DECODERS = 4  # requests that are decoded at once: each may hold an image of as many pixels as are taken
PAGE_RULES = (
    "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; connect-src 'self'; img-src data: blob:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)  # of what a browser lets the page do
FILES = PredictOptions.model_json_schema() | {"required": ["images"]}  # of a form
FILES["properties"]["images"] = {"type": "array", "items": {"type": "string", "format": "binary"}}


def build_app(model: ServedModel, state: Path | None, limits: Limits, token: str | None = None) -> FastAPI:
    """Return the application of a network: its stream is resumed, its exits are timed, its worker starts with it."""
    ledger = SpendLedger(resume_state(state, model.policies), state, max(RESERVE, 4 * limits.batch))
    timings = measure_timings(model, limits.batch)
    for name, policy in model.policies.items():
        if not isinstance(policy, Paced):
            log_event("no guarantee for the stream", logging.WARNING, policy=name, advice="calibrate --contract stream")
    worker = BatchWorker(model, ledger, timings, limits, Metrics(model.exits))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await run_sync(worker.close)
        log_event("drained", samples=sum(worker.metrics.counts))

    app = FastAPI(
        title="alight", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False
    )
    app.add_middleware(LimitsMiddleware, limits=limits, metrics=worker.metrics, token=token)
    _add_predictions(app, worker)
    _add_operations(app, worker)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # the type it is registered for
        return error_response(error)

    return app


def _add_predictions(app: FastAPI, worker: BatchWorker) -> None:
    model, limits, decoders = worker.model, worker.limits, CapacityLimiter(DECODERS)
    add_protocol(app, worker, _answer, decoders)

    @app.post(
        "/predict",
        response_model=PredictResponse,
        responses=error_schemas(),
        openapi_extra=request_body(JSON, PredictRequest.model_json_schema()),
    )
    async def predict(request: Request) -> PredictResponse:
        """Answer samples that come as JSON."""
        check_content_type(request, JSON)
        content = await request.body()
        options, samples = await run_sync(read_request, content, model, limits, limiter=decoders)
        return await _answer(request, worker, samples, options)

    @app.post(
        "/predict/files",
        response_model=PredictResponse,
        responses=error_schemas(),
        openapi_extra=request_body(FORM, FILES),
    )
    async def predict_files(request: Request) -> PredictResponse:
        """Answer images that come as files."""
        check_content_type(request, FORM)
        async with request.form(max_fields=8, max_part_size=limits.body) as form:
            files = [await part.read() for part in form.getlist("images") if isinstance(part, UploadFile)]
            if len(files) < len(form.getlist("images")) or set(form) - {"images", "budget", "deadline_ms"}:
                raise RequestRefused(422, "send images as files, and at most budget and deadline_ms beside them")
            options = parse(PredictOptions, {name: form[name] for name in ("budget", "deadline_ms") if name in form})
        samples = await run_sync(read_samples, "images", files, model, limits, limiter=decoders)
        return await _answer(request, worker, samples, options)


async def _answer(
    request: Request, worker: BatchWorker, samples: Sequence[Sample], options: PredictOptions
) -> PredictResponse:
    """Queue the samples of a request, and wait for their predictions."""
    arrived: float = request.scope["state"]["arrived"]
    deadline = math.inf if options.deadline_ms is None else arrived + 1e-3 * options.deadline_ms
    queued = QueuedRequest(samples, options.budget, deadline, arrived)
    worker.submit(queued)
    try:
        response = await asyncio.wait_for(asyncio.wrap_future(queued.response), worker.limits.timeout)
    except TimeoutError as error:
        raise RequestRefused(504, f"there was no answer within {worker.limits.timeout:g} seconds") from error
    exits = [prediction.exit for prediction in response.predictions]
    request.scope["state"]["logged"] = {"samples": len(exits), "exits": exits[:32], "policy": response.policy}
    return response


def _add_operations(app: FastAPI, worker: BatchWorker) -> None:

    @app.get("/budget", responses=error_schemas(400, 401))
    async def budget() -> BudgetResponse:
        """Return the policy in force, and the policies that may be."""
        return _budget(worker)

    @app.put(
        "/budget",
        response_model=BudgetResponse,
        responses=error_schemas(400, 401, 408, 413, 415, 422, 503),
        openapi_extra=request_body(JSON, BudgetChange.model_json_schema()),
    )
    async def change(request: Request) -> BudgetResponse:
        """Put another policy in force, between two batches."""
        check_content_type(request, JSON)
        name = _chosen(worker, parse(BudgetChange, await request.body()))
        try:
            await asyncio.wait_for(asyncio.wrap_future(worker.change_policy(name)), worker.limits.timeout)
        except TimeoutError as error:
            raise RequestRefused(503, "the service is stopping: ask another one", 1) from error
        except OSError as error:
            raise RequestRefused(503, f"the change cannot be saved ({error}): make room on the disk", 60) from error
        log_event("budget changed", policy=name, budget=worker.model.policies[name].budget)
        return _budget(worker)

    @app.get("/status", responses=error_schemas(400, 401))
    async def status() -> StatusResponse:
        """Return samples and spend since the start, and the state of the stream."""
        return _status(worker)

    @app.get("/healthz", responses={503: {"model": HealthResponse}})
    async def healthz() -> Response:
        """Return whether the process should stay alive."""
        state, status = ("the worker has ended", 503) if worker.failed else ("alive", 200)
        return JSONResponse({"state": state}, status)

    @app.get("/readyz", responses={503: {"model": HealthResponse}})
    async def readyz() -> Response:
        """Return whether requests should be sent here."""
        state, status = ("ready", 200) if worker.ready else ("starting or stopping", 503)
        return JSONResponse({"state": state}, status)

    @app.get("/metrics", responses=error_schemas(400, 401), response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Return the metrics for Prometheus."""
        text = worker.metrics.text(worker.ledger.state, worker.queued)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def show_page() -> HTMLResponse:
        """Return a page to try the service."""
        content, headers = page()
        return HTMLResponse(content, headers=headers)


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
    costs = max((policy.costs for policy in policies.values()), key=lambda costs: costs[-1])
    assert change.budget is not None  # one of both is given
    try:
        amount = Costs.from_cumulative(costs, unit=worker.ledger.state.policy.unit).budget(change.budget)
    except AlightError as error:
        raise RequestRefused(422, str(error)) from error
    budgets = {name: policy.budget for name, policy in policies.items() if policy.budget is not None}
    affordable = [name for name, budget in budgets.items() if budget <= amount]
    if not affordable:
        raise RequestRefused(422, f"no policy has a budget of {amount:g} or less: choose among {known}")
    return max(affordable, key=lambda name: budgets[name])


def _status(worker: BatchWorker) -> StatusResponse:
    state, metrics, model = worker.ledger.state, worker.metrics, worker.model
    costs = dict(zip(state.policy.open_exits, state.policy.costs, strict=True))
    return StatusResponse(
        policy=state.name,
        budget=state.policy.budget,
        unit=state.policy.unit,
        samples=sum(metrics.counts),
        spent=metrics.total_spent,
        allowed=metrics.total_allowed,
        max_overspend=state.policy.costs[-1] if isinstance(state.policy, Paced) else None,
        exits=[
            ExitCount(exit=index, name=name, cost=costs.get(index), samples=metrics.counts[index])
            for index, name in enumerate(model.exits)
        ],
        queue=worker.queued,
        alarm=state.pace.alarmed,
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
