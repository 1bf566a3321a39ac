"""Who decides about samples on a GPU: the device itself, or the host; where both can, whichever is faster here."""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from itertools import chain
from math import inf
from threading import Lock
from typing import Any

import torch
from torch import nn

from alight.engine.backends import Integers, Reads, State
from alight.engine.backends.torch import conditional, rows
from alight.engine.backends.torch.captures import Addresses, Captures, stream_for
from alight.engine.backends.torch.device_walk import (
    WIDEST,
    BatchWalk,
    DeviceWalk,
    Executor,
    Network,
    Stage,
    StreamWalk,
    is_decidable,
    laid_out,
    on,
    same_rule,
    slots_and_group,
)
from alight.engine.backends.torch.prepare import SHAPES
from alight.engine.walk import Answers
from alight.errors import AlightError
from alight.policies.policy import Policy

Batch = tuple[Integers, State]  # sample numbers, and inputs as they came
Host = Callable[[Iterator[Batch]], Iterator[Answers]]  # the walk that the host decides

SEEN = 3  # batches of a kind before a walk is captured for it, which takes as long as hundreds of them
TRIES = 3  # runs of each way, of which the shortest counts


class Deciding:
    """The walks of one network that its device decides, captured when they are needed, and why others are not."""

    window = 8  # batches that are best handed over at once

    def __init__(
        self,
        stages: Sequence[Stage],
        reads: Sequence[Reads],
        admit: Callable[[State], State],
        device: torch.device,
        decide: str,
        modules: Sequence[nn.Module] = (),
    ) -> None:
        launched = [getattr(each, "logits", each) for each in modules]
        self.network, self.device = Network(stages, reads, admit, launched), device
        self.decide, self.modules = decide, modules
        self.walks: dict[Any, DeviceWalk | None] = {}  # by kind of batch; None where the host decides
        self.addresses: dict[Any, Addresses] = {}  # of the weights that each has captured
        self.reasons: dict[Any, str] = {}  # who decides, and why
        self.known: dict[Any, Any] = {}  # kinds of batches, by how single samples are laid out that need nothing done
        self.seen: Counter[Any] = Counter()
        self.busy: set[Any] = set()  # kinds whose walk is in use, as by another thread
        self.lock = Lock()

    def __str__(self) -> str:
        return "; ".join(dict.fromkeys(self.reasons.values())) or "the host decides about the first batches"

    @cached_property
    def missing(self) -> str:
        """What a device needs to decide and is not here."""
        return self._warned("" if rows.kernels() else "Triton kernels do not run here")

    @cached_property
    def missing_for_one(self) -> str:
        """What it needs, further, to choose what runs for one batch."""
        return self.missing or self._warned(conditional.why_not())

    def _warned(self, missing: str) -> str:
        if missing and self.decide == "device":
            warnings.warn(f"the host decides: {missing}", stacklevel=3)
        return missing

    def answers(self, policy: Policy, batches: Iterator[Batch], size: int | None, host: Host) -> Iterator[Answers]:
        """Yield the answers of batches: decided on the device where that can be and pays, else as the host does.

        With a size survivors of several run together in batches of that size; else each is answered by itself.
        """
        if size is None:
            return chain.from_iterable(self._alone(policy, batch, host) for batch in batches)
        if self._refuses(policy, self.missing):
            return host(batches)
        return self._streamed(policy, batches, size, host)

    def one_batch(self, policy: Policy, batch: Batch, host: Host) -> Answers | None:
        """Return the answers of one batch that waits for no other; None where the host decides."""
        kind = _kind(batch, 1 << (len(batch[0]) - 1).bit_length(), alone=True)
        if self._refuses(policy, self.missing_for_one):
            return None
        walk = self._ready(kind, policy)
        if walk is not None and (answers := self._one_batch(walk, kind, batch, self.addresses[kind].hold)):
            return answers
        walk = self._walk(kind, policy, [batch], host)
        return None if walk is None else self._one_batch(walk, kind, batch)

    def _one_batch(
        self, walk: Any, kind: Any, batch: Batch, meanwhile: Callable[[], bool] = lambda: True
    ) -> Answers | None:
        """Return the answers of one batch by a walk, which is free then; None if what is looked at does not hold."""
        try:
            answers: Answers | None = walk.one_batch(*batch, meanwhile)
            self.known.update(dict.fromkeys(walk.ready, kind))
        finally:
            self.busy.discard(kind)
        return answers

    def one_sample(self, policy: Policy, sample: int, inputs: State) -> tuple[int, int, float | None] | None:
        """Return class, open exit and probability of one sample whose inputs need nothing done, as quickly as possible.

        None where `one_batch` has to look at it. The weights are looked at while it runs.
        """
        kind = self.known.get(layout := laid_out(inputs))
        if kind is None or torch.is_autocast_enabled(self.device.type):
            return None
        addresses = [each.data_ptr() for each in inputs]
        if any(each % WIDEST for each in addresses) or (walk := self._ready(kind, policy)) is None:
            return None
        try:
            if layout not in walk.ready:  # another walk than the one that took such inputs
                return None
            found: tuple[int, int, float | None] | None
            found = walk.one_sample(sample, addresses, self.addresses[kind].hold)
        finally:
            self.busy.discard(kind)
        return found

    def _alone(self, policy: Policy, batch: Batch, host: Host) -> Iterator[Answers]:
        answers = self.one_batch(policy, batch, host)
        return host(iter([batch])) if answers is None else iter([answers])

    @contextmanager
    def replays(self, size: int) -> Iterator[list[tuple[Callable[[], None], int]]]:
        """Give what replays each stage for some batches of a size, decisions included, and for how many.

        Nothing where no walk is free.
        """
        with self.lock:
            streams = {kind: walk for kind, walk in self.walks.items() if isinstance(walk, StreamWalk)}
            free = [kind for kind, walk in streams.items() if walk.size == size and kind not in self.busy][:1]
            self.busy.update(free)
        try:
            replays: list[tuple[Callable[[], None], int]] = []
            if free:
                walk = streams[free[0]]
                walk.limit.zero_()  # no row is of a sample
                graphs = [walk.graphs[stage, size * walk.group, 0] for stage in range(len(self.modules))]
                replays = [(each.replay, walk.group) for each in graphs]
            yield replays
        finally:
            self.busy.difference_update(free)

    def _refuses(self, policy: Policy, missing: str) -> bool:
        """Return whether the host has to decide, and note why."""
        if not missing and not is_decidable(policy):
            missing = f"{type(policy).__name__} needs it"
        if not missing and torch.is_autocast_enabled(self.device.type):  # of which what is captured knows nothing
            missing = "under torch.autocast it has to, give dtype instead"
        if missing:
            self.reasons[type(policy)] = f"the host decides: {missing}"
        return bool(missing)

    def _streamed(self, policy: Policy, batches: Iterator[Batch], size: int, host: Host) -> Iterator[Answers]:
        """Yield the answers of many batches; each kind of batch, as texts of one length, has a walk of its own."""
        first, batches = _window(batches, self.window * size)
        taken: dict[Any, StreamWalk] = {}
        others: list[Batch] = []  # that no walk takes; the host decides about several together

        def walk_of(batch: Batch) -> StreamWalk | None:
            if (kind := _kind(batch, size)) not in taken:
                alike = [each for each in first if _kind(each, size) == kind] or [batch]
                walk: StreamWalk | None = self._walk(kind, policy, alike, host)
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
                    others.append(batch)
                    if len(others) == self.window:
                        yield from host(_emptied(others))
                    continue
                walk.push(*batch)
                yield from walk.fetched()
            for walk in taken.values():
                walk.end()
                yield from walk.fetched(every=True)
            yield from host(_emptied(others))
        except Exception:  # of a loader: what came before is answered, unless that fails too
            yield from _rescued(taken.values(), host(_emptied(others)))
            raise
        finally:
            for kind, walk in taken.items():
                walk.reset()
                self.busy.discard(kind)

    def _ready(self, kind: Any, policy: Policy) -> Any:
        """Return the walk that decided as this policy says before, quickly; it is in use from now on."""
        with self.lock:
            walk = self.walks.get(kind)
            if walk is None or walk.policy is not policy or kind in self.busy:
                return None
            self.busy.add(kind)
            return walk

    def _walk(self, kind: Any, policy: Policy, batches: Sequence[Batch], host: Host) -> Any:
        """Return the walk for a kind of batch, which is in use from now on; None where the host decides."""
        with self.lock:
            if kind in self.busy:
                return None
            if kind not in self.walks and len(self.walks) >= SHAPES:
                self.reasons[None] = (
                    f"the host decides about batches of further shapes, {SHAPES} are captured: give images of few"
                    " sizes, tokens of few lengths, such as multiples of 32"
                )
                return None
            self.seen[kind] += sum(-(-len(samples) // kind[0]) for samples, _ in batches)
            walk = self.walks.get(kind)
            fits = walk is None or (same_rule(walk.policy, policy) and self.addresses[kind].hold())
            if kind not in self.walks or not fits:
                if self.decide == "auto" and self.seen[kind] < SEEN:
                    return None
                walk = None  # frees the old one; nor does a capture that is interrupted leave it
                self.walks.pop(kind, None)
                with on(self.device):
                    self.addresses[kind] = Addresses(self.modules)
                    walk = self.walks[kind] = self._captured(kind, policy, batches, host)
            if walk is None:
                self.addresses.pop(kind, None)  # which keeps tensors
                return None
            if walk.policy is not policy:
                walk.use(policy)
            self.busy.add(kind)
            return walk

    def _captured(self, kind: Any, policy: Policy, batches: Sequence[Batch], host: Host) -> DeviceWalk | None:
        """Return a new walk, if it can be captured and is faster than the host, and note why or why not."""
        size, alone, *_ = kind
        walk: DeviceWalk | None = None
        try:
            executor, uploading = self.executor(1 if alone else slots_and_group(size)[1], alone=alone)
            given, free = (self.network, policy, batches[0][1], size, executor), self._free_memory()
            walk = BatchWalk(*given) if alone else StreamWalk(*given, uploading)
            self.addresses[kind].follow(walk.outside)
            ours = _shortest(partial(_run, walk, batches))
            if (left := self._free_memory()) < free - left and self.decide == "auto":  # the host may need as much
                raise AlightError(f"captured batches of {size} take {free - left:,} bytes, and leave {left:,} free")
        except Exception as error:  # memory is short, a capture fails, a compiler is missing: the host can decide
            walk, reason = None, f"the host decides: {str(error).partition(chr(10))[0]}"
        if walk is None:
            with suppress(RuntimeError):
                torch.cuda.empty_cache()
            if self.decide == "device":
                warnings.warn(reason, stacklevel=2)
            self.reasons[kind] = reason
            return None
        theirs = inf
        with suppress(Exception):  # of logits that are unusable, which the walk will say
            theirs = inf if self.decide == "device" else _shortest(lambda: [*host(iter(batches))])
        if theirs == inf:
            self.reasons[kind] = "the device decides"
            return walk
        faster, slower = ("device", "host") if ours < theirs else ("host", "device")
        low, high = sorted([1e3 * ours, 1e3 * theirs])
        count = sum(len(samples) for samples, _ in batches)
        self.reasons[kind] = (
            f"the {faster} decides about batches of {size}: {low:.3g} ms for {count} samples, the {slower} takes"
            f" {high:.3g} ms"
        )
        return walk if ours < theirs else None

    def _free_memory(self) -> float:
        """Return how many bytes of the device nobody has."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else inf

    def executor(self, lanes: int, *, alone: bool) -> tuple[Executor, Any]:
        """Return what captures and runs a walk, of concurrent batches or of one alone, and a stream for copies."""
        device = torch.cuda.current_device()
        captures = Captures(device, lanes)
        captured = partial(captures.capture, keep=alone)  # as a part of the graph that chooses what runs
        return Executor(captured, conditional.Executable, captures.run_concurrently), stream_for("copies", device)


def _window(batches: Iterator[Batch], samples: int) -> tuple[list[Batch], Iterator[Batch]]:
    """Return as many batches as hold these samples, and the others; where reading fails, that comes after them."""
    first: list[Batch] = []
    try:
        while samples > 0 and (batch := next(batches, None)) is not None:
            samples -= len(batch[0])
            first.append(batch)
    except Exception as error:
        return first, (_raised(each) for each in [error])
    return first, batches


def _emptied(batches: list[Batch]) -> Iterator[Batch]:
    """Return an iterator over batches of a list, which is empty from now on."""
    given = iter([*batches])
    batches.clear()
    return given


def _raised(error: Exception) -> Batch:
    raise error


def _rescued(walks: Iterable[StreamWalk], others: Iterator[Answers]) -> Iterator[Answers]:
    """Yield the answers of all that came before an error, but of what fails."""
    for walk in walks:
        with suppress(Exception):
            walk.end()
        with suppress(Exception):
            yield from walk.fetched(every=True)
    with suppress(Exception):
        yield from others


def _kind(batch: Batch, size: int, *, alone: bool = False) -> tuple[Any, ...]:
    """Return what a walk is captured for: the size of batches, whether of one alone, shape and dtype of a sample."""
    return (size, alone, *((each.shape[1:], each.dtype) for each in batch[1]))


def _run(walk: Any, batches: Sequence[Batch]) -> None:
    """Answer some batches."""
    if isinstance(walk, BatchWalk):
        walk.one_batch(*batches[0], lambda: True)
        return
    for batch in batches:
        walk.push(*batch)
    walk.end()
    for _ in walk.fetched(every=True):
        pass
    walk.reset()


def _shortest(work: Callable[[], object]) -> float:
    """Return the seconds of the shortest of a few runs, all of which wait for the device."""
    taken = []
    for _ in range(TRIES):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)
