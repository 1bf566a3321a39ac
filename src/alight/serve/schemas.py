"""What a request may hold and what comes back: limits, refusals, and JSON schemas as OpenAPI shows them."""

from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from alight.errors import BadInput

Amount = Annotated[FiniteFloat, Field(gt=0)] | Annotated[str, Field(max_length=40)]
DeadlineMs = Annotated[FiniteFloat, Field(gt=0, le=3_600_000)]

BUDGET = (
    "what one sample may cost at most: a number in the policy's unit, '2.5 GFLOPs', or '50%' of the most expensive exit"
)
DEADLINE = "milliseconds from the arrival of the request within which the answer is wanted"


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


class RequestRefused(Exception):
    """A request that is not answered: the status, the reason, and after how many seconds it may be sent again."""

    def __init__(self, status: int, reason: str, retry_after: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.retry_after = status, reason, retry_after


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
    probability: float | None = Field(description="of the class by this exit; null where a lens joins exits")


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
