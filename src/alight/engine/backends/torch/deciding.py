"""Who decides about samples on a GPU: the device itself, or the host; where both can, whichever is faster here."""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain, islice
from threading import Lock
from typing import Any

import torch

from alight.engine.backends import Integers, Reads, State
from alight.engine.backends.torch import conditional, rows
from alight.engine.backends.torch.device_walk import WINDOW, DeviceWalk, Executor, Stage, is_decidable, same_rule
from alight.engine.backends.torch.prepare import SHAPES, capture
from alight.engine.walk import Answers
from alight.errors import AlightError
from alight.policies.policy import Policy

Batch = tuple[Integers, State]  # sample numbers, and inputs as they came
Host = Callable[[Iterator[Batch]], Iterator[Answers]]  # the walk that the host decides

SEEN = 3  # batches of a kind before a walk is captured for it, which takes as long as hundreds of them
TRIES = 3  # runs of each way, of which the shortest counts


class Deciding:
    """The walks of one network that its device decides, captured when they are needed, and why others are not."""

    def __init__(
        self,
        stages: Sequence[Stage],
        reads: Sequence[Reads],
        admit: Callable[[State], State],
        device: torch.device,
        decide: str,
    ) -> None:
        self.stages, self.reads, self.admit, self.device, self.decide = stages, reads, admit, device, decide
        self.walks: dict[Any, DeviceWalk | None] = {}  # by kind of batch; None where the host decides
        self.reasons: dict[Any, str] = {}  # who decides, and why
        self.seen: Counter[Any] = Counter()
        self.busy: set[Any] = set()  # kinds whose walk is in use, as by another thread
        self.lock = Lock()

    def __str__(self) -> str:
        return "; ".join(dict.fromkeys(self.reasons.values())) or "the host decides about the first batches"

    @cached_property
    def missing(self) -> str:
        """What a device needs to decide and is not here."""
        missing = conditional.why_not() or ("" if rows.kernels() else "Triton kernels do not run here")
        if missing and self.decide == "device":
            warnings.warn(f"the host decides: {missing}", stacklevel=2)
        return missing

    def answers(
        self, policy: Policy, batches: Iterator[Batch], size: int, host: Host, *, joins: bool
    ) -> Iterator[Answers]:
        """Yield the answers of batches: decided on the device where that can be and pays, else as the host does.

        Where batches join, survivors of several run together in batches of this size; else each is answered by itself.
        """
        if self.missing or not is_decidable(policy):
            self.reasons[type(policy)] = f"the host decides: {self.missing or f'{type(policy).__name__} needs it'}"
            return host(batches)
        if joins:
            return self._streamed(policy, batches, size, host)
        return chain.from_iterable(self._alone(policy, batch, size, host) for batch in batches)

    def _alone(self, policy: Policy, batch: Batch, size: int, host: Host) -> Iterator[Answers]:
        kind = _kind(batch, min(size, 1 << (len(batch[0]) - 1).bit_length()))
        walk = self._walk(kind, policy, [batch], host, window=1)
        if walk is None:
            yield from host(iter([batch]))
            return
        try:
            yield walk.one_batch(*batch)
        finally:
            self.busy.discard(kind)

    def _streamed(self, policy: Policy, batches: Iterator[Batch], size: int, host: Host) -> Iterator[Answers]:
        """Yield the answers of many batches; each kind of batch, as texts of one length, has a walk of its own."""
        first = [*islice(batches, WINDOW)]
        taken: dict[Any, DeviceWalk] = {}

        def walk_of(batch: Batch) -> DeviceWalk | None:
            if (kind := _kind(batch, size)) not in taken:
                alike = [each for each in first if _kind(each, size) == kind] or [batch]
                walk = self._walk(kind, policy, alike, host)
                if walk is None:
                    return None
                taken[kind] = walk
            return taken[kind]

        try:
            if not first or walk_of(first[0]) is None:
                yield from host(chain(first, batches))
                return
            for batch in chain(first, batches):
                if (walk := walk_of(batch)) is None:
                    yield from host(iter([batch]))
                    continue
                walk.push(*batch)
                yield from walk.fetched(pending=1)
            for walk in taken.values():
                walk.end()
            for walk in taken.values():
                yield from walk.fetched()
        except Exception:
            for walk in taken.values():
                yield from walk.fetched()  # what has run to the end
            raise
        finally:
            for kind, walk in taken.items():
                walk.reset()
                self.busy.discard(kind)

    def _walk(
        self, kind: Any, policy: Policy, batches: Sequence[Batch], host: Host, window: int = WINDOW
    ) -> DeviceWalk | None:
        """Return the walk for a kind of batch, which is in use from now on; None where the host decides."""
        with self.lock:
            if kind in self.busy:
                return None
            self.seen[kind] += len(batches)
            walk = self.walks.get(kind)
            if kind not in self.walks or (walk is not None and not same_rule(walk.policy, policy)):
                if self.decide == "auto" and self.seen[kind] < SEEN:
                    return None
                walk = self.walks[kind] = self._captured(kind, policy, batches, host, window)
            if walk is not None:
                self.busy.add(kind)
                if walk.policy != policy:
                    walk.use(policy)
            return walk

    def _captured(
        self, kind: Any, policy: Policy, batches: Sequence[Batch], host: Host, window: int
    ) -> DeviceWalk | None:
        """Return a new walk, if it can be captured and is faster than the host, and note why or why not."""
        if len(self.walks) >= SHAPES:
            self.reasons[None] = f"the host decides about batches of further shapes: {SHAPES} are captured"
            return None
        uploading = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        executor = Executor(partial(capture, pool=torch.cuda.graph_pool_handle(), keep=True), conditional.compiled)
        options: dict[str, Any] = {"uploading": uploading, "window": window}
        try:
            walk = DeviceWalk(self.stages, self.reads, policy, self.admit, batches[0][1], kind[0], executor, **options)
            ours = _shortest(partial(_run, walk, batches))
        except (AlightError, RuntimeError) as error:  # RuntimeError: of torch, when memory is short or a capture fails
            torch.cuda.empty_cache()
            reason = f"the host decides: {str(error).partition(chr(10))[0]}"
            if self.decide == "device":
                warnings.warn(reason, stacklevel=2)
            self.reasons[kind] = reason
            return None
        if self.decide == "device":
            self.reasons[kind] = "the device decides"
            return walk
        theirs = _shortest(lambda: [*host(iter(batches))])
        faster, slower = ("device", "host") if ours < theirs else ("host", "device")
        times = sorted([1e3 * ours, 1e3 * theirs])
        self.reasons[kind] = (
            f"the {faster} decides about batches of {kind[0]}: {times[0]:.3g} ms for {len(batches)}, the {slower} takes"
            f" {times[1]:.3g} ms"
        )
        return walk if ours < theirs else None


def _kind(batch: Batch, size: int) -> tuple[int, ...]:
    """Return what a walk is captured for: the size of batches, and shape and dtype of a sample."""
    return (size, *((tuple(each.shape[1:]), str(each.dtype)) for each in batch[1]))  # type: ignore[return-value]


def _run(walk: DeviceWalk, batches: Sequence[Batch]) -> None:
    """Answer some batches."""
    if len(batches) == 1 and len(batches[0][0]) <= walk.size:
        walk.one_batch(*batches[0])
        return
    for batch in batches:
        walk.push(*batch)
    walk.end()
    for _ in walk.fetched():
        pass


def _shortest(work: Callable[[], object]) -> float:
    """Return the seconds of the shortest of a few runs, all of which wait for the device."""
    taken = []
    for _ in range(TRIES):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)
