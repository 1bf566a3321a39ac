"""What the service takes at most, and how long it waits."""

from dataclasses import dataclass

from alight.errors import BadInput


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
    tokens: int = 128  # of one text; what is longer is cut off
    timeout: float = 30.0  # seconds until a request is given up: to arrive, and to be answered

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


class Refused(Exception):
    """A request that is not answered: the status, why, and after how many seconds it may be asked again."""

    def __init__(self, status: int, reason: str, retry_after: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.retry_after = status, reason, retry_after
