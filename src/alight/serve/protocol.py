"""The Open Inference Protocol (V2, of KServe and Triton): the same answers as /predict, as tensors in JSON."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

import numpy as np
from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from alight import __version__
from alight.serve.model import Sample, ServedModel
from alight.serve.requests import (
    JSON,
    HealthResponse,
    Limits,
    PredictOptions,
    PredictResponse,
    RequestRefused,
    check_content_type,
    error_schemas,
    parse,
    read_samples,
    request_body,
)
from alight.serve.worker import BatchWorker

NAME = "alight"  # of the model
TEXTS, BYTES = "texts", "BYTES"
DATATYPES = {"uint8": "UINT8", "int64": "INT64", "float64": "FP64"}  # all other inputs are FP32
ANSWERS = {"predictions": "INT64", "exits": "INT64", "spent": "FP64"}  # classes, exits and costs of the samples
Answer = Callable[[Request, BatchWorker, Sequence[Sample], PredictOptions], Awaitable[PredictResponse]]


class InferTensor(BaseModel):
    """A tensor as a list of numbers or texts, flat or nested."""

    name: str
    shape: list[Annotated[int, Field(ge=1)]] = Field(min_length=1, max_length=8)
    datatype: str
    data: list[Any]


class InferRequest(BaseModel):
    """One input tensor, and in the parameters what each of its samples may spend."""

    model_config = ConfigDict(extra="ignore")

    id: str | None = Field(None, max_length=200)
    parameters: PredictOptions = PredictOptions()
    inputs: list[InferTensor] = Field(min_length=1, max_length=1)


class InferResponse(BaseModel):
    """Classes, exits and costs, in the order of the samples; the parameters name policy and unit."""

    model_name: str
    id: str | None
    outputs: list[InferTensor]
    parameters: dict[str, str]


def add_protocol(app: FastAPI, worker: BatchWorker, answer: Answer, decoders: CapacityLimiter) -> None:
    """Add the endpoints of the protocol to an application."""
    model, limits = worker.model, worker.limits

    @app.get("/v2/health/live", responses={503: {"model": HealthResponse}})
    @app.get("/v2/health/ready", responses={503: {"model": HealthResponse}})
    @app.get(f"/v2/models/{NAME}/ready", responses={503: {"model": HealthResponse}})
    async def ready() -> JSONResponse:
        """Return whether requests should be sent here."""
        return JSONResponse(
            {"state": "ready" if worker.ready else "starting or stopping"}, 200 if worker.ready else 503
        )

    @app.get("/v2", responses=error_schemas(400, 401))
    async def server() -> dict[str, Any]:
        """Return what serves."""
        return {"name": NAME, "version": __version__, "extensions": []}

    @app.get(f"/v2/models/{NAME}", responses=error_schemas(400, 401))
    async def describe() -> dict[str, Any]:
        """Return the tensors that the model takes and gives."""
        outputs = [{"name": name, "datatype": kind, "shape": [-1]} for name, kind in ANSWERS.items()]
        return {"name": NAME, "platform": "alight", "inputs": [described_input(model)], "outputs": outputs}

    @app.post(
        f"/v2/models/{NAME}/infer",
        response_model=InferResponse,
        responses=error_schemas(),
        openapi_extra=request_body(JSON, InferRequest.model_json_schema()),
    )
    async def infer(request: Request) -> InferResponse:
        """Answer samples that come as a tensor."""
        check_content_type(request, JSON)
        asked = parse(InferRequest, await request.body())
        samples = await run_sync(read_tensor, asked.inputs[0], model, limits, limiter=decoders)
        found = await answer(request, worker, samples, asked.parameters)
        columns = zip(*((each.index, each.exit, each.cost) for each in found.predictions), strict=True)
        outputs = [
            InferTensor(name=name, shape=[len(samples)], datatype=kind, data=[*values])
            for (name, kind), values in zip(ANSWERS.items(), columns, strict=True)
        ]
        return InferResponse(
            model_name=NAME, id=asked.id, outputs=outputs, parameters={"policy": found.policy, "unit": found.unit}
        )


def described_input(model: ServedModel) -> dict[str, Any]:
    """Return the input tensor: texts, or what the network takes."""
    if model.tokenize:
        return {"name": TEXTS, "datatype": BYTES, "shape": [-1]}
    kind = DATATYPES.get(np.dtype(model.dtype).name, "FP32")
    name = model.spec.tensors[0].name if model.spec.tensors else "arrays"
    return {"name": name, "datatype": kind, "shape": [-1, *(-1 if size is None else size for size in model.shape)]}


def read_tensor(tensor: InferTensor, model: ServedModel, limits: Limits) -> list[Sample]:
    """Return the samples of a tensor."""
    own = described_input(model)
    if tensor.name != own["name"] or (tensor.datatype == BYTES) != (own["datatype"] == BYTES):
        raise RequestRefused(422, f"the model takes {own['name']} as {own['datatype']}: see /v2/models/{NAME}")
    if own["datatype"] == BYTES:
        if tensor.shape != [len(tensor.data)] or not all(isinstance(text, str) for text in tensor.data):
            raise RequestRefused(422, f"{len(tensor.data)} texts for the shape {tensor.shape}: give as many texts")
        return read_samples(TEXTS, tensor.data, model, limits)
    try:
        rows = np.array(tensor.data, np.float64).reshape(tensor.shape)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestRefused(422, f"the data is not numbers of the shape {tensor.shape}") from error
    return read_samples("arrays", [*rows], model, limits)
