"""The service's endpoints."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from alight import __version__
from alight.serve.limits import Limits, Refused
from alight.serve.logs import event
from alight.serve.metrics import Metrics
from alight.serve.middleware import Guard, refusal
from alight.serve.network import Network, Sample
from alight.serve.page import POLICY, page
from alight.serve.samples import from_arrays, from_base64, from_pictures, from_texts
from alight.serve.schemas import Allowance, Answers, Asked, Budget, Change, State, Status, Wrong
from alight.serve.service import Service
from alight.serve.worker import Worker

DECODING = 4  # requests that are decoded at once: each may hold a picture of as many pixels as are taken
Kind = TypeVar("Kind", bound=BaseModel)

WRONG: dict[int | str, dict[str, Any]] = {
    400: {"model": Wrong, "description": "no request that can be read"},
    401: {"model": Wrong, "description": "the bearer token is missing or wrong"},
}
READING = WRONG | {
    408: {"model": Wrong, "description": "the request did not arrive in time"},
    413: {"model": Wrong, "description": "too many bytes, pixels or samples"},
    415: {"model": Wrong, "description": "another kind of content"},
    422: {"model": Wrong, "description": "samples or an allowance that cannot be used, and which"},
}
ANSWERING = READING | {
    429: {"model": Wrong, "description": "too many samples wait: see Retry-After"},
    503: {"model": Wrong, "description": "the service is stopping"},
    504: {"model": Wrong, "description": "no exit is left in time"},
}
FILES = {
    "type": "object",
    "required": ["images"],
    "additionalProperties": False,
    "properties": {
        "images": {"type": "array", "items": {"type": "string", "format": "binary"}},
        "budget": {"type": "string", "maxLength": 40},
        "deadline_ms": {"type": "number", "exclusiveMinimum": 0, "maximum": 3_600_000},
    },
}


def create_app(network: Network, worker: Worker, limits: Limits, metrics: Metrics, token: str | None = None) -> FastAPI:
    """The application; its worker starts and ends with it."""
    service = Service(network, worker, limits, metrics)

    @asynccontextmanager
    async def at_work(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await run_sync(worker.close)
        event("drained", samples=sum(metrics.counts))

    app = FastAPI(
        title="alight", version=__version__, docs_url=None, redoc_url=None, lifespan=at_work, redirect_slashes=False
    )
    app.add_middleware(Guard, limits=limits, metrics=metrics, token=token)
    _predictions(app, service)
    _operations(app, service)
    _errors(app)
    return app


def _predictions(app: FastAPI, service: Service) -> None:
    network, limits, decoding = service.network, service.limits, CapacityLimiter(DECODING)

    @app.post(
        "/predict",
        response_model=Answers,
        responses=ANSWERING,
        openapi_extra=_body("application/json", Asked.model_json_schema()),
    )
    async def predict(request: Request) -> Answers:
        """Answer samples that come as JSON."""
        _check_kind(request, "application/json")
        content = await request.body()
        asked, samples = await run_sync(_read, content, network, limits, limiter=decoding)
        return await service.answer(request, samples, asked)

    @app.post(
        "/predict/files",
        response_model=Answers,
        responses=ANSWERING,
        openapi_extra=_body("multipart/form-data", FILES),
    )
    async def predict_files(request: Request) -> Answers:
        """Answer images that come as files."""
        _check_kind(request, "multipart/form-data")
        async with request.form(max_fields=8, max_part_size=limits.body) as form:
            files = [await part.read() for part in form.getlist("images") if isinstance(part, UploadFile)]
            if len(files) < len(form.getlist("images")) or set(form) - {"images", "budget", "deadline_ms"}:
                raise Refused(422, "send images as files, and at most budget and deadline_ms beside them")
            allowed = _validated(Allowance, {name: form[name] for name in ("budget", "deadline_ms") if name in form})
        samples = await run_sync(from_pictures, files, network, limits, limiter=decoding)
        return await service.answer(request, samples, allowed)


def _operations(app: FastAPI, service: Service) -> None:
    worker = service.worker

    @app.get("/budget", responses=WRONG)
    async def budget() -> Budget:
        """The policy in force, and those that may be."""
        return service.budget()

    @app.put(
        "/budget",
        response_model=Budget,
        responses=READING | {503: ANSWERING[503]},
        openapi_extra=_body("application/json", Change.model_json_schema()),
    )
    async def change(request: Request) -> Budget:
        """Let another policy be in force, between two batches."""
        _check_kind(request, "application/json")
        return await service.change(_parsed(Change, await request.body()))

    @app.get("/status", responses=WRONG)
    async def status() -> Status:
        """What was done since the start, and where the stream stands."""
        return service.status()

    @app.get("/healthz", responses={503: {"model": State}})
    async def healthz() -> Response:
        """Whether the process should live on."""
        well = worker.alive or not worker.started
        return JSONResponse({"state": "alive" if well else "the worker has ended"}, 200 if well else 503)

    @app.get("/readyz", responses={503: {"model": State}})
    async def readyz() -> Response:
        """Whether requests should be sent here."""
        ready = worker.alive and worker.accepting
        return JSONResponse({"state": "ready" if ready else "starting or stopping"}, 200 if ready else 503)

    @app.get("/metrics", responses=WRONG, response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Figures for Prometheus."""
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def shown() -> HTMLResponse:
        """A page to try it."""
        return HTMLResponse(page(), headers={"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"})


def _errors(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)  # as it was registered
        return refusal(error)

    @app.exception_handler(HTTPException)
    async def refused_by_framework(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)


def _read(content: bytes, network: Network, limits: Limits) -> tuple[Asked, list[Sample]]:
    """What is asked in JSON, and its samples."""
    asked = _parsed(Asked, content)
    if asked.images is not None:
        return asked, from_base64(asked.images, network, limits)
    if asked.arrays is not None:
        return asked, from_arrays(asked.arrays, network, limits)
    return asked, from_texts(asked.texts or [], network, limits)


def _parsed(kind: type[Kind], content: bytes) -> Kind:
    return _checked(lambda: kind.model_validate_json(content))


def _validated(kind: type[Kind], values: dict[str, Any]) -> Kind:
    return _checked(lambda: kind.model_validate(values))


def _checked(made: Callable[[], Kind]) -> Kind:
    try:
        return made()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])[:100]
        raise Refused(422, f"{place + ': ' if place else ''}{first['msg'][:200]}") from error


def _check_kind(request: Request, kind: str) -> None:
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != kind:
        raise Refused(415, f"content of type {given[:100]!r}: send {kind}")


def _body(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The part of OpenAPI that describes what is sent."""
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema}}}}
