"""What a request may hold, how its samples are read, and what comes back: limits, refusals and JSON schemas."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeVar

import numpy as np
from fastapi import Request
from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator
from starlette.exceptions import HTTPException

from alight.data.preprocess import image_batch
from alight.errors import BadInput
from alight.serve.model import Sample, ServedModel

JSON, FORM = "application/json", "multipart/form-data"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # the only decoders that untrusted bytes reach
MAX_LETTERS = 1000  # of a text for each token that is read of it
MAX_NUMBER = 1e6  # in an array: beyond, networks overflow
BUDGET = (
    "what one sample may cost at most: a number in the policy's unit, '2.5 GFLOPs', or '50%' of the most expensive exit"
)
DEADLINE = "milliseconds from the arrival of the request within which the answer is wanted"

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
    queue: int = 512  # samples that wait
    body: int = 16 * 2**20  # bytes of a request
    pixels: int = 16_000_000  # of one image
    tokens: int = 128  # of one text; longer texts are truncated
    timeout: float = 30.0  # seconds for a request to arrive, and to be answered

    def __post_init__(self) -> None:
        for name in ("batch", "queue", "body", "pixels", "tokens", "timeout"):
            if not getattr(self, name) > 0:
                raise BadInput(f"{name} {getattr(self, name)}: give a positive number")
        if self.wait < 0:
            raise BadInput(f"a wait of {self.wait:g} seconds: give 0 or more")
        if self.queue < self.batch:
            raise BadInput(
                f"a queue of {self.queue} samples for batches of {self.batch}: let it hold one batch at least"
            )


class RequestRefused(HTTPException):
    """A request that is not answered: the status, the reason, and after how many seconds it may be sent again."""

    def __init__(self, status: int, reason: str, retry_after: int | None = None) -> None:
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, reason, headers | ({"WWW-Authenticate": "Bearer"} if status == 401 else {}))


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
    408: "the request did not arrive in time",
    413: "too many bytes, pixels or samples",
    415: "another type of content",
    422: "samples, a budget or a deadline that cannot be used, and which",
    429: "too many samples wait: see Retry-After",
    503: "the service is stopping",
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
        raise RequestRefused(415, f"content of type {given[:100]!r}: send {content_type}")


def parse(schema: type[Schema], content: bytes | dict[str, Any]) -> Schema:
    """Return JSON, or values, as an object of this schema; the first error refuses the request."""
    try:
        return schema.model_validate_json(content) if isinstance(content, bytes) else schema.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])[:100]
        raise RequestRefused(422, f"{place + ': ' if place else ''}{first['msg'][:200]}") from error


def read_request(content: bytes, model: ServedModel, limits: Limits) -> tuple[PredictRequest, list[Sample]]:
    """Return a request in JSON and its samples."""
    request = parse(PredictRequest, content)
    given = [kind for kind in READERS if getattr(request, kind) is not None]
    if len(given) != 1:
        raise RequestRefused(422, f"{' and '.join(given) or 'no samples'}: give one of images, arrays and texts")
    return request, read_samples(given[0], getattr(request, given[0]), model, limits)


def read_samples(kind: str, values: Sequence[Any], model: ServedModel, limits: Limits) -> list[Sample]:
    """Return the samples of "images", as bytes or in base64, of "arrays" or of "texts"; an error names the index."""
    if not {"images": model.spec.image_shape, "arrays": not model.tokenize, "texts": model.tokenize}[kind]:
        raise RequestRefused(422, f"this network takes {model.input_kind}, not {kind}")
    name, read, samples = kind.removesuffix("s"), READERS[kind], []
    if not values:
        raise RequestRefused(422, f"no {name}: send at least one")
    if len(values) > limits.batch:
        raise RequestRefused(
            413, f"{len(values)} {kind} in one request, and at most {limits.batch} are taken: send several"
        )
    for index, value in enumerate(values):
        try:
            samples.append(read(value, model, limits))
        except RequestRefused as refused:
            raise RequestRefused(refused.status_code, f"{name} {index}: {refused.detail}") from refused
        except (ValueError, TypeError) as error:  # all errors of alight are among them
            raise RequestRefused(422, f"{name} {index}: {_line(error)}") from error
    return samples


def _read_image(file: str | bytes, model: ServedModel, limits: Limits) -> Sample:
    """Return the first picture of an image file, decoded only if it has few enough pixels, also once it is resized.

    Its shorter side is brought to the network's size, so that a long and thin one becomes larger than it is. In base64
    it may begin with data:...;base64, and then the file.
    """
    assert model.spec.image_shape is not None  # checked before
    _, rows, columns = model.spec.image_shape
    if isinstance(file, str):
        try:
            file = base64.b64decode(file.split(";base64,", 1)[-1], validate=True)
        except ValueError as error:
            raise RequestRefused(422, f"not base64 ({_line(error)})") from error
    try:
        with Image.open(io.BytesIO(file), formats=FORMATS) as opened:
            width, height = opened.size
            scale = max(1.0, max(rows, columns) / min(width, height))  # it may have to be turned
            if scale**2 * width * height > limits.pixels:
                raise RequestRefused(
                    413, f"{width} x {height} pixels, and at most {limits.pixels:,} are taken, resized ones too"
                )
            return image_batch([opened], model.spec, "the request")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RequestRefused(413, f"more than the {limits.pixels:,} pixels that are taken") from error
    except (RequestRefused, BadInput):
        raise
    except Exception as error:  # a damaged image fails in a dozen ways, each decoder its own
        detail = "" if isinstance(error, UnidentifiedImageError) else f" ({_line(error)})"
        raise RequestRefused(422, f"not a complete image in {', '.join(FORMATS)}{detail}") from error


def _read_text(text: str, model: ServedModel, limits: Limits) -> Sample:
    letters = MAX_LETTERS * limits.tokens
    if len(text) > letters:
        raise RequestRefused(413, f"{len(text):,} letters, and at most {letters:,} are taken")
    return text


def _read_array(values: Any, model: ServedModel, limits: Limits) -> Sample:
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestRefused(422, f"not an array of numbers ({_line(error)})") from error
    if model.shape and not model.spec.tensors[0].fits((1, *array.shape)):
        raise RequestRefused(422, f"shape {array.shape}, and the network takes {model.shape}")
    unusable = ~(np.abs(array) <= MAX_NUMBER)
    if unusable.any():
        place = np.argwhere(unusable)[0].tolist()
        what = f"{int(unusable.sum())} numbers that are NaN, infinite or beyond {MAX_NUMBER:g}"
        raise RequestRefused(422, f"{what}, the first at {place}")
    return array.astype(model.dtype)[None]


READERS: dict[str, Callable[[Any, ServedModel, Limits], Sample]] = {
    "images": _read_image,
    "arrays": _read_array,
    "texts": _read_text,
}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
