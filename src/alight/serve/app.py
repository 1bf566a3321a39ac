"""The application, and the endpoints that answer samples: /predict and /predict/files."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from alight import __version__
from alight.serve.middleware import LimitsMiddleware, error_response
from alight.serve.model import Sample
from alight.serve.monitoring import log_event
from alight.serve.operations import add_operations
from alight.serve.samples import check_content_type, parse, read_request, read_samples
from alight.serve.schemas import (
    PredictOptions,
    PredictRequest,
    PredictResponse,
    RequestRefused,
    error_schemas,
    request_body,
)
from alight.serve.worker import BatchWorker, QueuedRequest

DECODERS = 4  # requests that are decoded at once: each may hold an image of as many pixels as are taken
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


def create_app(worker: BatchWorker, token: str | None = None) -> FastAPI:
    """Return the application; its worker starts and ends with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await run_sync(worker.close)
        log_event("drained", samples=sum(worker.metrics.counts))

    app = FastAPI(
        title="alight", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False
    )
    app.add_middleware(LimitsMiddleware, limits=worker.limits, metrics=worker.metrics, token=token)
    _add_predictions(app, worker)
    add_operations(app, worker)

    @app.exception_handler(RequestRefused)
    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestRefused)  # the type it is registered for
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def refused_by_framework(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    return app


def _add_predictions(app: FastAPI, worker: BatchWorker) -> None:
    model, limits, decoders = worker.model, worker.limits, CapacityLimiter(DECODERS)

    @app.post(
        "/predict",
        response_model=PredictResponse,
        responses=error_schemas(),
        openapi_extra=request_body("application/json", PredictRequest.model_json_schema()),
    )
    async def predict(request: Request) -> PredictResponse:
        """Answer samples that come as JSON."""
        check_content_type(request.headers.get("content-type", ""), "application/json")
        content = await request.body()
        options, samples = await run_sync(read_request, content, model, limits, limiter=decoders)
        return await _answer(request, worker, samples, options)

    @app.post(
        "/predict/files",
        response_model=PredictResponse,
        responses=error_schemas(),
        openapi_extra=request_body("multipart/form-data", FILES),
    )
    async def predict_files(request: Request) -> PredictResponse:
        """Answer images that come as files."""
        check_content_type(request.headers.get("content-type", ""), "multipart/form-data")
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
