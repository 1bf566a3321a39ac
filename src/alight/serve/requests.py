"""What a request may hold and what comes back: limits, refusals and JSON schemas."""

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Self, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator
from starlette.exceptions import HTTPException

from alight.errors import BadInput

JSON, FORM = "application/json", "multipart/form-data"
BUDGET = (
    "what one sample may cost at most: a number in the policy's unit, '2.5 GFLOPs', or '50%' of the most expensive exit"
)
DEADLINE = "milliseconds from the arrival of the request within which the answer is wanted"

OF_STATUS = {  # headers of refusals; of what cannot be read, it is not known where the next request begins
    400: {"Connection": "close"},
    401: {"WWW-Authenticate": "Bearer"},
}

Amount = Annotated[FiniteFloat, Field(gt=0)] | Annotated[str, Field(max_length=40)]
DeadlineMs = Annotated[FiniteFloat, Field(gt=0, le=3_600_000)]
Schema = TypeVar("Schema", bound=BaseModel)


@dataclass(frozen=True)
class Limits:
    """Sizes and times beyond which a request is refused.

    >>> Limits(batch=8).queue
    512
    """

    batch: int = 32  # samples that run together, and of one request
    wait: float = 0.002  # seconds for which the first of a batch waits for others
    queue: int = 512  # samples that are admitted and not answered yet
    body: int | None = None  # bytes of a request; None: as many as a full batch needs
    pixels: int = 16_000_000  # of one image
    tokens: int = 128  # of one text; longer texts are truncated
    timeout: float = 30.0  # seconds for a request to arrive, and to be answered
    connections: int = 512  # open at once
    readers: int = 2  # threads that decode and tokenise small requests; one more takes large ones
    watch: float = 0.0  # share of the samples that run to the last exit once more, to watch disagreement

    def __post_init__(self) -> None:
        for name in ("batch", "queue", "pixels", "tokens", "timeout", "connections", "readers"):
            if not getattr(self, name) > 0:
                raise BadInput(f"{name} {getattr(self, name)}: give a positive number")
        if self.body is not None and self.body <= 0:
            raise BadInput(f"body {self.body}: give a positive number")
        if self.wait < 0:
            raise BadInput(f"a wait of {self.wait:g} seconds: give 0 or more")
        if not 0 <= self.watch <= 1:
            raise BadInput(f"a share of {self.watch:g} of the samples to watch: give 0 to 1")
        if self.queue < self.batch:
            raise BadInput(
                f"a queue of {self.queue} samples for batches of {self.batch}: let it hold one batch at least"
            )


class RequestRefused(HTTPException):
    """A request that is not answered: the status, the reason, and after how many seconds it may be sent again."""

    def __init__(self, status: int, reason: str, retry_after: int | None = None) -> None:
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, reason, headers | OF_STATUS.get(status, {}))


def retry_after(seconds: float) -> int:
    """Return whole seconds, one at least, as Retry-After takes them.

    >>> retry_after(0.2), retry_after(7.1)
    (1, 8)
    """
    return max(1, math.ceil(seconds))


class PredictOptions(BaseModel):
    """What a request may spend."""

    model_config = ConfigDict(extra="forbid")

    budget: Amount | None = Field(None, description=BUDGET)
    deadline_ms: DeadlineMs | None = Field(None, description=DEADLINE)


class PredictRequest(PredictOptions):
    """Samples of one kind, and what they may spend."""

    model_config = ConfigDict(strict=True)

    images: list[str] | None = Field(None, description="image files in base64: PNG, JPEG, WebP, GIF, BMP")
    arrays: list[list[Any]] | None = Field(None, description="numbers as the network takes them, nested by axis")
    texts: list[str] | None = Field(None, description="texts, for a network that reads them")


class Prediction(BaseModel):
    """The class of one sample, the exit it left at, and its cost."""

    label: str | int = Field(description="the class by its name where that is known, else by its index")
    index: int = Field(description="of the class")
    exit: int = Field(description="where the sample left, counted from 0")
    cost: float = Field(description="of the sample, in `unit`")
    probability: float | None = Field(description="of the class by this exit; null where exits are combined")


class PredictResponse(BaseModel):
    """The predictions of a request in the order of its samples."""

    predictions: list[Prediction]
    policy: str = Field(description="the one in force")
    budget: float | None = Field(description="average cost per sample that it allows")
    unit: str
    queued_ms: float = Field(description="from the queue to the network")
    latency_ms: float = Field(description="from the arrival of the request to its answer")


class BudgetChange(BaseModel):
    """The policy to put in force: by its name, or the most expensive one whose budget is not above this one."""

    model_config = ConfigDict(extra="forbid", strict=True)

    policy: str | None = None
    budget: Amount | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.policy is None) == (self.budget is None):
            raise ValueError("give either the policy's name or a budget")
        return self


class PolicyInfo(BaseModel):
    """A policy that may be in force."""

    name: str
    budget: float | None
    rule: str
    contract: str | None = Field(description="what is guaranteed, 'stream' for the average over all samples")


class BudgetResponse(BaseModel):
    """The policy in force, and the policies that may be."""

    policy: str
    budget: float | None
    unit: str
    policies: list[PolicyInfo]


class ExitCount(BaseModel):
    """Samples that have left at an exit, and the cost of that exit."""

    exit: int
    name: str
    cost: float | None = Field(description="null of an exit that the policy in force does not open")
    samples: int


class StatusResponse(BaseModel):
    """Samples and spend since the start, the state of the queue and of the stream."""

    policy: str
    budget: float | None
    unit: str
    samples: int
    spent: float
    allowed: float
    max_overspend: float | None = Field(
        description="by how much `spent` may exceed `allowed`; null where nothing is guaranteed"
    )
    exits: list[ExitCount]
    queue: int
    alarm: bool = Field(description="whether samples have become more expensive than they were at calibration")
    disagreement: float | None = Field(description="share of watched samples that the last exit answers otherwise")
    disagreement_alarm: bool = Field(description="whether that share has grown since the first watched samples")
    input_kind: str = Field(description="images, texts or arrays")
    input_shape: list[int | None]
    max_samples: int = Field(description="of one request")


class ErrorResponse(BaseModel):
    """Why a request was not answered."""

    error: str


class HealthResponse(BaseModel):
    """Whether the service is alive, or ready."""

    state: str


ERRORS: dict[int, str] = {
    400: "a request that cannot be read",
    401: "the bearer token is missing or wrong",
    403: "the token's role, the Host or the Origin is not allowed",
    404: "there is no such model",
    408: "the request did not arrive in time",
    413: "too many bytes, pixels or samples",
    415: "another type of content",
    422: "samples, a budget or a deadline that cannot be used, and which",
    429: "too much is under way, or a tenant's hour is spent: see Retry-After",
    503: "the service is stopping, a part of it has ended and is replaced, or the ledger does not answer",
    504: "no exit is left in time",
}


def error_schemas(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the part of OpenAPI that describes these errors; all of them if none is named."""
    return {status: {"model": ErrorResponse, "description": ERRORS[status]} for status in statuses or ERRORS}


def request_body(content_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the part of OpenAPI that describes the body of a request."""
    return {"requestBody": {"required": True, "content": {content_type: {"schema": schema}}}}


def check_content_type(request: Request, content_type: str) -> None:
    """Check that a request's header names this type of content."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != content_type:
        files = " (files of images go to /predict/files)" if request.url.path == "/predict" else ""
        raise RequestRefused(415, f"content of type {given[:100]!r}: send {content_type}{files}")


async def check_query(request: Request) -> None:
    """Check that a request has only query parameters that its endpoint reads: a misspelt one would have no effect.

    Endpoints that only show something, and read none, take any, as probes and scrapers add them.
    """
    known = {*map(attrgetter("alias"), request.scope["route"].dependant.query_params)}
    if not known and request.method == "GET":
        return
    for name in (query := request.query_params):
        times = len(query.getlist(name))
        given = f"query parameter {name[:100]!r} at {request.url.path[:100]}"
        if name not in known:
            raise RequestRefused(422, f"{given}: give {' and '.join(sorted(known)) + ', or ' if known else ''}none")
        if times > 1:
            raise RequestRefused(422, f"{given}, {times} times: give it once")


def parse(schema: type[Schema], content: bytes | dict[str, Any], *, strict: bool | None = None) -> Schema:
    """Return JSON, or values, as an object of this schema; the first error refuses the request."""
    try:
        if isinstance(content, bytes):
            return schema.model_validate_json(content)
        return schema.model_validate(content, strict=strict)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])[:100]
        raise RequestRefused(422, f"{place + ': ' if place else ''}{first['msg'][:200]}") from error
