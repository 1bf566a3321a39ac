"""What is asked and answered, as JSON: the schema that OpenAPI shows."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

Amount = Annotated[FiniteFloat, Field(gt=0)] | Annotated[str, Field(max_length=40)]
DeadlineMs = Annotated[FiniteFloat, Field(gt=0, le=3_600_000)]

BUDGET = "what one sample may cost at most: a number in the policy's unit, '2.5 GFLOPs', or '50%' of the dearest exit"
DEADLINE = "milliseconds from the arrival of the request within which the answer is wanted"


class Asked(BaseModel):
    """Samples to be answered, of one kind."""

    model_config = ConfigDict(extra="forbid", strict=True)

    images: list[str] | None = Field(None, description="image files in base64: PNG, JPEG, WebP, GIF, BMP")
    arrays: list[list[Any]] | None = Field(None, description="numbers as the network takes them, nested by axis")
    texts: list[str] | None = Field(None, description="texts, for a network that reads them")
    budget: Amount | None = Field(None, description=BUDGET)
    deadline_ms: DeadlineMs | None = Field(None, description=DEADLINE)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [name for name in ("images", "arrays", "texts") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"{' and '.join(given) or 'no samples'}: give one of images, arrays and texts")
        return self


class Allowance(BaseModel):
    """What a request may take, where its samples come as files."""

    model_config = ConfigDict(extra="forbid")

    budget: Amount | None = None
    deadline_ms: DeadlineMs | None = None


class Told(BaseModel):
    """What one sample got."""

    label: str | int = Field(description="the class by its name where that is known, else by its index")
    index: int = Field(description="of the class")
    exit: int = Field(description="where the sample left, counted from 0")
    cost: float = Field(description="what that took, in `unit`")
    probability: float | None = Field(description="of the class by this exit; null where a lens joins exits")


class Answers(BaseModel):
    """What every sample of a request got, in its order."""

    answers: list[Told]
    policy: str = Field(description="the one in force")
    budget: float | None = Field(description="average cost per sample that it allows")
    unit: str
    queued_ms: float
    took_ms: float


class Change(BaseModel):
    """Which policy is to be in force: by its name, or the dearest whose budget is not above this one."""

    model_config = ConfigDict(extra="forbid", strict=True)

    policy: str | None = None
    budget: Amount | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.policy is None) == (self.budget is None):
            raise ValueError("give either the policy's name or a budget")
        return self


class Offered(BaseModel):
    """A policy that may be in force."""

    name: str
    budget: float | None
    rule: str
    contract: str | None = Field(description="what is promised about it, 'stream' for the average of all samples")


class Budget(BaseModel):
    """The policy in force, and those that may be."""

    policy: str
    budget: float | None
    unit: str
    policies: list[Offered]


class Left(BaseModel):
    """How many samples have left at an exit, and what that costs."""

    exit: int
    name: str
    cost: float | None = Field(description="null of an exit that the policy in force does not open")
    samples: int


class Status(BaseModel):
    """What the service has done since it started, and where its stream stands."""

    policy: str
    budget: float | None
    unit: str
    samples: int
    spent: float
    allowed: float
    ahead_at_most: float | None = Field(
        description="what `spent` may be beyond `allowed`; null where nothing is promised"
    )
    exits: list[Left]
    queue: int
    alarm: bool = Field(description="whether samples have become dearer than they were at calibration")
    takes: str = Field(description="images, texts or arrays")
    shape: list[int | None]
    batch: int = Field(description="samples that one request may have at most")


class Wrong(BaseModel):
    """Why a request was not answered."""

    error: str


class State(BaseModel):
    """Whether the service is well."""

    state: str
