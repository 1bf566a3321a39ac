"""Endpoints for the people who run the service: /budget, /status, health, /metrics, and the page at /."""

import asyncio
import base64
import hashlib
from functools import cache
from importlib.resources import files
from string import Template

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from alight.costs import Costs
from alight.errors import AlightError
from alight.policies.paced import Paced
from alight.serve.monitoring import log_event
from alight.serve.requests import (
    JSON,
    BudgetChange,
    BudgetResponse,
    ExitCount,
    HealthResponse,
    PolicyInfo,
    RequestRefused,
    StatusResponse,
    check_content_type,
    error_schemas,
    parse,
    request_body,
)
from alight.serve.worker import BatchWorker


def add_operations(app: FastAPI, worker: BatchWorker) -> None:
    """Add the endpoints to the application."""

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
        state, counted, model = worker.ledger.state, worker.metrics, worker.model
        costs = dict(zip(state.policy.open_exits, state.policy.costs, strict=True))
        return StatusResponse(
            policy=state.name,
            budget=state.policy.budget,
            unit=state.policy.unit,
            samples=sum(counted.counts),
            spent=counted.total_spent,
            allowed=counted.total_allowed,
            max_overspend=state.policy.costs[-1] if isinstance(state.policy, Paced) else None,
            exits=[
                ExitCount(exit=index, name=name, cost=costs.get(index), samples=counted.counts[index])
                for index, name in enumerate(model.exits)
            ],
            queue=worker.queued,
            alarm=state.pace.alarmed,
            input_kind=model.input_kind,
            input_shape=list(model.shape),
            max_samples=worker.limits.batch,
        )

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
        headers = {"Content-Security-Policy": content_security_policy(), "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(page(), headers=headers)


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


@cache
def page() -> str:
    """Return the page at /, one document that asks nothing of any other host.

    >>> "<title>alight</title>" in page()
    True
    """
    return Template(_asset("page.html")).substitute(style=_asset("page.css"), script=_asset("page.js"))


@cache
def content_security_policy() -> str:
    """Return what a browser lets the page do: its own style and script, and requests to this service."""
    style, script = (
        f"'sha256-{base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode()}'"
        for name in ("page.css", "page.js")
    )
    return (
        f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data: blob:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _asset(name: str) -> str:
    return (files("alight.serve") / "assets" / name).read_text(encoding="utf-8")
