"""A walk that a GPU decides: one launch answers many batches, and nothing waits for the host.

Samples wait for a stage in its room, on the device. A stage runs as soon as a full batch waits there: its head's values
are read, samples leave, and the others move on to the next room, all by one kernel; a condition on how many wait there
runs the next stage. Rooms hold less than a batch between two launches, so any number of samples streams through. At the
end the rooms are emptied by partial batches, each as the smallest captured size that holds it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from alight.engine.backends import Integers, Reads, State
from alight.engine.backends.torch import rows
from alight.engine.backends.torch.conditional import Choose, Condition, Loop, Program, Run
from alight.engine.backends.torch.values import columns_of, pack
from alight.engine.walk import Answers
from alight.errors import AlightError
from alight.policies.policy import ExitAt, Lottery, Mixture, Patience, Policy, Streak, Threshold
from alight.policies.route import visit

WINDOW = 8  # batches of inputs that one launch answers
SIZES = 3  # captured of each stage: a batch, a half, a quarter
SMALL = 16  # batches below are not halved: a GPU takes as long for them
PROGRAMS = 2048  # of a kernel, enough to fill a GPU
BLOCK = 1024  # words that a program moves at a time
BY_KERNEL = (Threshold, Lottery, ExitAt)  # the kernel that moves samples decides by itself
BY_STEP = (*BY_KERNEL, Streak, Patience)  # steps are arithmetic, on a device too

Stage = Callable[..., tuple[State, Tensor]]


def is_decidable(policy: Policy) -> bool:
    """Return whether a device can decide as the policy says: sample by sample, by arithmetic alone."""
    if isinstance(policy, Mixture):
        return is_decidable(policy.first) and is_decidable(policy.second)
    return type(policy) in BY_STEP


def same_rule(one: Policy, other: Policy) -> bool:
    """Return whether a walk captured for one policy decides as the other says, once it has its numbers."""
    return one == other or (_is_by_kernel(one) and _is_by_kernel(other))


def _is_by_kernel(policy: Policy) -> bool:
    return type(policy) in BY_KERNEL and policy.combination is None


class Executor(NamedTuple):
    """How programs run: `capture` makes a graph of work, `compile` what launches a program of such graphs."""

    capture: Callable[[Callable[[], None]], Any]
    compile: Callable[[Program, Mapping[Any, Any], Tensor, Tensor], Callable[[], None]]


class Room(NamedTuple):
    """Where samples wait for a stage: what it takes, what is remembered of them, and their numbers as a ring."""

    state: State
    memory: tuple[Tensor, ...]
    structure: Any  # of the memory
    samples: Tensor


class DeviceWalk:
    """The stages of a network and a policy, captured for batches of one size and shape.

    `one_batch` answers a batch; `push`, `end` and `fetched` any number of them. What comes from the host is copied to
    the device in the stream `uploading`, while earlier batches are answered.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        reads: Sequence[Reads],
        policy: Policy,
        admit: Callable[[State], State],
        example: State,
        size: int,
        executor: Executor,
        *,
        uploading: Any = None,
        window: int = WINDOW,
    ) -> None:
        self.stages, self.size, self.admit, self.executor = stages, size, admit, executor
        self.unpacked = [not each.is_packed for each in reads]  # stages that give logits
        self.reads = [each if each.is_packed else each._replace(columns=("margin",)) for each in reads]
        self.window, self.uploading = window * size, uploading
        self.by_kernel = _is_by_kernel(policy)
        self.sizes = [size >> index for index in range(SIZES) if size >> index >= SMALL] or [size]
        example = admit(example)
        device, places = example[0].device, 2 * len(stages) + 1
        inputs = 2 * self.window + size  # rows: one window is uploaded while another runs
        integers = partial(torch.zeros, dtype=torch.int64, device=device)
        control = integers(2 * places + inputs)
        self.counters, self.updated = control[:places], control[places : 2 * places]
        self.header = control[2 * places - 3 :]  # how many inputs wait, which is the first, how many answers; numbers
        most = 1 + self.window + 2 * len(stages) * size
        self.answers = integers(most, 4)  # sample, class, open exit and probability of each; the first row counts them
        if window == 1 and control.is_cuda:  # for single batches, which the host waits for: written where it reads
            self.answers = torch.zeros(most, 4, dtype=torch.int64, pin_memory=True)
        self.thresholds, self.rules = integers(len(stages)).double(), integers(len(stages), 4)
        self.use(policy)
        self.inputs = _repeated(example, inputs)
        self.rooms = [Room(_repeated(example, size), (), None, self.header[3:])]
        self.graphs: dict[Any, Any] = {}
        for stage in range(len(stages)):
            if stage < len(stages) - 1:
                self.rooms.append(self._room_after(stage))
            for each in self.sizes:
                self.graphs[stage, each] = self._captured(stage, each)
        self.sent = torch.zeros(3 + size, dtype=torch.int64, pin_memory=control.is_cuda)  # header of one batch
        self.half = self.filled = 0  # of the inputs
        self.pending: deque[Callable[[], Answers]] = deque()
        self.released: list[Any] = [None, None]  # events after which a half may be written again

    def use(self, policy: Policy) -> None:
        """Decide by the numbers of this policy from now on; its rule must be that of the first one."""
        self.policy, last = policy, len(self.stages) - 1
        if last and isinstance(policy, Threshold | Lottery) and self.by_kernel:
            numbers = [policy.numbers(open_index) for open_index in range(last)]
            self.thresholds[:last] = self.thresholds.new_tensor([threshold for threshold, _ in numbers])
            self.rules[:last] = self.rules.new_tensor([rule for _, rule in numbers])

    # Batches come and answers go

    def one_batch(self, samples: Integers, inputs: State) -> Answers:
        """Return the answers of one batch, no larger than the size of this walk; no sample may wait."""
        count, answer = len(samples), self._answer_one  # captured before anything is sent
        for there, each in zip(self.rooms[0].state, self.admit(inputs), strict=True):
            there[:count].copy_(each, non_blocking=True)
        sent = self.sent[: 3 + count]
        sent.numpy()[:] = (count, 0, 0, *samples)
        self.header[: 3 + count].copy_(sent, non_blocking=True)
        answer()
        if self.header.is_cuda:
            torch.cuda.current_stream().synchronize()
        return self._read(self.answers.cpu(), count)

    def push(self, samples: Integers, inputs: State) -> None:
        """Take in a batch of any size, and launch each window that is full."""
        stream = None if any(getattr(each, "is_cuda", False) for each in inputs) else self.uploading
        with torch.cuda.stream(stream):
            state = self.admit(inputs)
        start = 0
        while start < len(samples):
            count = min(self.window - self.filled, len(samples) - start)
            with torch.cuda.stream(stream):
                if not self.filled and self.released[self.half] is not None:
                    torch.cuda.current_stream().wait_event(self.released[self.half])
                first = self.half * self.window + self.filled
                for there, each in zip(self.inputs, state, strict=True):
                    there[first : first + count].copy_(each[start : start + count], non_blocking=True)
                numbers = torch.from_numpy(samples[start : start + count])
                self.header[3 + first :][:count].copy_(self._pinned(numbers), non_blocking=True)
            self.filled, start = self.filled + count, start + count
            if self.filled == self.window:
                self._launch()

    def end(self) -> None:
        """Launch what has come since the last full window, and empty the rooms."""
        self._launch(last=True)

    def fetched(self, pending: int = 0) -> Iterator[Answers]:
        """Yield answers in the order of windows, until so many windows are pending."""
        while len(self.pending) > pending:
            yield self.pending.popleft()()

    def reset(self) -> None:
        """Let no sample wait, as after an error."""
        self.pending.clear()
        self.updated.zero_()
        self.half = self.filled = 0

    def _launch(self, *, last: bool = False) -> None:
        if self.uploading is not None:
            torch.cuda.current_stream().wait_stream(self.uploading)
        sent = self._pinned(torch.tensor([self.filled, self.half * self.window, 0], dtype=torch.int64))
        self.header[:3].copy_(sent, non_blocking=True)
        self.answers[0].zero_()  # there may be none
        if self.filled >= self.size:
            self._answer_window()
        if last:
            self._empty_rooms()
        self.pending.append(self._fetching())
        if self.uploading is not None:
            self.released[self.half] = torch.cuda.current_stream().record_event()
        self.half, self.filled = 1 - self.half, 0

    def _pinned(self, numbers: Tensor) -> Tensor:
        return numbers.pin_memory() if self.header.is_cuda else numbers

    def _fetching(self) -> Callable[[], Answers]:
        """Start the copy of all answers to the host, and return what waits for it."""
        host = torch.empty(self.answers.shape, dtype=torch.int64, pin_memory=self.answers.is_cuda)
        host.copy_(self.answers, non_blocking=True)
        arrived = torch.cuda.current_stream().record_event() if self.answers.is_cuda else None

        def wait() -> Answers:
            if arrived is not None:
                arrived.synchronize()
            return self._read(host, int(host[0, 0]))

        return wait

    def _read(self, host: Tensor, count: int) -> Answers:
        """Return so many answers, in memory of their own."""
        samples, predictions, open_indices, bits = host.numpy()[1 : 1 + count].T.copy()
        probabilities = bits.view(np.float64) if self.reads[-1].probability else None
        return Answers(samples, predictions, open_indices, probabilities)

    # Programs

    @cached_property
    def _answer_one(self) -> Callable[[], None]:
        self.graphs[0, "alone"] = self._captured(0, self.size, taken=True)
        return self._compiled([Run((0, "alone")), *self._following(1)])

    @cached_property
    def _answer_window(self) -> Callable[[], None]:
        inputs = Condition(self._waiting(0), self.size - 1)
        return self._compiled([Loop(inputs, [Run((0, self.size)), *self._full_from(1)])])

    @cached_property
    def _empty_rooms(self) -> Callable[[], None]:
        stages = range(len(self.stages))
        return self._compiled([step for stage in stages for step in (self._rest(stage), *self._full_from(stage + 1))])

    def _full_from(self, stage: int) -> Program:
        """Return what runs a stage if a full batch waits for it, then those behind it, so that less than one waits."""
        if stage == len(self.stages):
            return []
        run = Run((stage, self.size))
        return [Choose([(Condition(self._waiting(stage), self.size - 1), [run, *self._full_from(stage + 1)])])]

    def _following(self, stage: int) -> Program:
        """Return what answers one batch from a stage on, as long as some samples stay."""
        if stage == len(self.stages):
            return []
        run = self._rest(stage) if len(self.sizes) > 1 else Run((stage, self.size))
        return [Choose([(Condition(self._waiting(stage)), [run, *self._following(stage + 1)])])]

    def _rest(self, stage: int) -> Choose:
        """Return the choice of the smallest captured size that holds all who wait for a stage."""
        ranges = zip_longest(self.sizes, self.sizes[1:], fillvalue=0)
        return Choose([(Condition(self._waiting(stage), above, upto), [Run((stage, upto))]) for upto, above in ranges])

    def _compiled(self, program: Program) -> Callable[[], None]:
        return self.executor.compile(program, self.graphs, self.counters, self.updated)

    def _waiting(self, stage: int) -> int:
        """Return the place of the counter of samples that wait for a stage; the next is their first in the ring."""
        return 2 * (stage or len(self.stages)) - 2

    # What a captured stage does

    def _captured(self, stage: int, size: int, *, taken: bool = False) -> Any:
        self.counters.zero_()  # nobody waits: the runs before the capture change nothing
        try:
            return self.executor.capture(partial(self._step, stage, size, taken=taken or stage > 0))
        except RuntimeError as error:
            raise AlightError(
                f"stage {stage} cannot be captured as a CUDA graph ({str(error).partition(chr(10))[0]})"
            ) from error

    def _room_after(self, stage: int) -> Room:
        """Return the room for what a stage hands on, filled with what it makes of the example."""
        state, _, _, memory, structure = self._ran(stage, self.size)
        samples = torch.zeros(2 * self.size, dtype=torch.int64, device=self.counters.device)
        return Room(_repeated(state, 2 * self.size), _repeated(memory, 2 * self.size), structure, samples)

    def _step(self, stage: int, size: int, *, taken: bool) -> None:
        """Run a stage for the first samples of its room, decide, answer, and move survivors on."""
        if not taken:
            for source, target in zip(self.inputs, self.rooms[0].state, strict=True):
                _take(source, self.counters[self._waiting(0) + 1 :], target[:size])
        state, packed, decided, memory, _ = self._ran(stage, size)
        room, last = self.rooms[stage], stage == len(self.stages) - 1
        following = room if last else self.rooms[stage + 1]
        targets = following.state + following.memory
        moved = [] if last else [*zip((*state, *memory), targets, strict=True)]
        shifted = [*room.state, *room.memory] if stage and size == self.size else []
        for index, (pair, own) in enumerate(zip_longest(moved, shifted) if moved or shifted else [(None, None)]):
            self._settle(stage, size, packed, decided, following, pair, own, first=index == 0)

    def _ran(self, stage: int, size: int) -> tuple[State, Tensor, Tensor | None, tuple[Tensor, ...], Any]:
        """Run a stage; return its state, packed values, what was decided elsewhere than in the kernel, and memory."""
        room, reads = self.rooms[stage], self.reads[stage]
        state, values = self.stages[stage](*(each[:size] for each in room.state))
        if stage:  # what a stage hands on unchanged lies in the room, where rows are moved to the front
            own = {each.untyped_storage().data_ptr() for each in room.state}
            state = tuple(each.clone() if each.untyped_storage().data_ptr() in own else each for each in state)
        if self.unpacked[stage]:
            values = pack(values, reads)
        if self.by_kernel:
            return state, values, None, (), None
        first = self.counters[self._waiting(stage) + 1]
        places = (first + torch.arange(size, device=values.device)) % len(room.samples)
        recalled = tree_unflatten([each[:size] for each in room.memory], room.structure) if stage else ((), ())
        leaving, classes, recalled = visit(
            self.policy, stage, room.samples[places], values[:, 0].long(), columns_of(values, reads), recalled
        )
        memory, structure = tree_flatten(recalled)
        return state, values, torch.stack([leaving.long(), classes.long()], 1), tuple(memory), structure

    def _settle(
        self,
        stage: int,
        size: int,
        packed: Tensor,
        decided: Tensor | None,
        following: Room,
        pair: tuple[Tensor, Tensor] | None,
        own: Tensor | None,
        *,
        first: bool,
    ) -> None:
        """Launch the kernel that decides and moves one tensor."""
        source, target = rows.words(*pair) if pair else (packed, packed)
        (moving,) = rows.words(own) if own is not None else (packed,)
        words, own_words = source.shape[1] if pair else 0, moving.shape[1] if own is not None else 0
        count = size if own is None else 2 * size
        parts = min(max(1, PROGRAMS // count), -(-max(words, own_words, 1) // BLOCK))
        room, last = self.rooms[stage], stage == len(self.stages) - 1
        kernels: Any = rows.kernels(packed.device.type)
        kernels.settle_rows[(count, parts)](
            packed,
            packed.shape[1],
            2 + len(self.reads[stage].columns),
            room.samples,
            len(room.samples),
            packed if decided is None else decided,
            self.thresholds,
            self.rules,
            self.counters,
            self.updated,
            self.answers,
            following.samples,
            len(following.samples),
            source,
            target,
            words,
            moving,
            own_words,
            self._waiting(stage),
            self._waiting(min(stage + 1, len(self.stages) - 1)),
            len(self.counters) - 1,
            stage,
            size,
            FIRST=first,
            LAST=last,
            DECIDED=decided is not None,
            PROBABILITY=self.reads[-1].probability,
            ROWS=1 << (size - 1).bit_length(),
            BLOCK=BLOCK,
        )


def _take(source: Tensor, cursor: Tensor, target: Tensor) -> None:
    """Copy the rows behind the cursor."""
    source, target = rows.words(source, target)
    kernels: Any = rows.kernels(source.device.type)
    kernels.take_rows[(len(target), -(-source.shape[1] // BLOCK))](source, cursor, target, source.shape[1], BLOCK=BLOCK)


def _repeated(state: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
    """Return memory for so many samples, laid out like these and filled with them: rows that a network can take."""
    made = rows.allocate(count, tuple(state))
    for there, each in zip(made, state, strict=True):
        for start in range(0, count, len(each)):
            there[start : start + len(each)] = each[: count - start]
    return made
