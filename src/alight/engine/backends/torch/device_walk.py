"""Walks that a GPU decides: after every stage one kernel reads its head's values, answers, and moves survivors on.

Samples wait for a stage in its room, on the device, in the order in which they came. `BatchWalk` answers one batch by
one launch, whose graph asks on the device whether a stage runs. `StreamWalk` answers any number: every stage runs by a
graph of its own, launched by the host as soon as it knows of a full batch in the stage's room, while others run; of
small batches a few at a time. It waits for no decision: the kernel writes how many have arrived in a room where the
host reads it.
"""

import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from alight.engine.backends import Integers, Reads, State
from alight.engine.backends.torch import rows
from alight.engine.backends.torch.captures import memory_use, run_sequentially
from alight.engine.backends.torch.conditional import Choose, Condition, Program, Run
from alight.engine.backends.torch.values import columns_of, pack
from alight.engine.walk import Answers
from alight.errors import AlightError
from alight.policies.combinations import Gain, GeometricMean, Vote
from alight.policies.policy import ExitAt, Lottery, Mixture, Patience, Policy, Streak, Threshold
from alight.policies.route import visit

SLOTS, SAMPLES = 16, 1536  # batches that a room holds; fewer of large ones, but three at least
GROUP = 4  # batches of a stage that one graph runs concurrently, and one kernel decides about, which takes as many
IN_FLIGHT = 3  # graphs launched before the host waits for the first of them
UNREAD = 8  # batches of answers of one exit after which the host takes them
SIZES = 4  # captured of each stage: a batch, a half, a quarter, an eighth
SMALL = 16  # batches below are not halved: a GPU takes as long for them
FURTHER = 64  # samples in whose time a GPU begins one more batch: a partial one is divided only if that saves more
PROGRAMS = 2048  # of a kernel, enough to fill a GPU
BLOCK = 1024  # words of inputs that a program copies at a time
MOVE, WARPS = 4096, 8  # words of a survivor that a program moves at a time, by so many warps
MOVED = 3  # tensors that one kernel moves
BY_KERNEL = (Threshold, Lottery, ExitAt)  # the kernel that moves samples decides by itself
COMBINED_BY_KERNEL = (Vote, GeometricMean, Gain)  # before it, another one combines answers
BY_STEP = (*BY_KERNEL, Streak, Patience)  # steps are arithmetic, on a device too
WIDEST = 8  # bytes of a word that kernels read
UNKNOWN = -(2**62)  # stands where no answer is yet: neither a class, nor an exit, nor the bits of a probability

Stage = Callable[..., tuple[State, Tensor]]
RunAll = Callable[[Sequence[Callable[[], Any]]], list[Any]]  # runs functions, and returns their results


def is_decidable(policy: Policy) -> bool:
    """Return whether a device can decide as the policy says: sample by sample, by arithmetic alone."""
    if isinstance(policy.combination, Gain) and not _is_by_kernel(policy):
        return False  # its step reads a table of classes that a cache holds, and lets go of
    if isinstance(policy, Mixture):
        return is_decidable(policy.first) and is_decidable(policy.second)
    return type(policy) in BY_STEP


def same_rule(one: Policy, other: Policy) -> bool:
    """Return whether a walk captured for one policy decides as the other says, once it has its numbers."""
    return one == other or (_is_by_kernel(one) and _is_by_kernel(other) and one.combination == other.combination)


def _is_by_kernel(policy: Policy) -> bool:
    combined_by_kernel = not policy.combines or isinstance(policy.combination, COMBINED_BY_KERNEL)
    return type(policy) in BY_KERNEL and combined_by_kernel


class Executor(NamedTuple):
    """How captured work runs: `capture` makes a graph of it, `compile` what launches a program of such graphs."""

    capture: Callable[[Callable[[], None]], Any]
    compile: Callable[[Program, Mapping[Any, Any], Tensor], Any]  # has `launch`, `wait`, `finish`
    run_concurrently: RunAll = run_sequentially


class Network(NamedTuple):
    """What walks need of a network."""

    stages: Sequence[Stage]
    reads: Sequence[Reads]  # of each stage
    admit: Callable[[State], State]
    launched: Sequence[Callable[..., Any]] = ()  # what the stages run, operation by operation


class Room(NamedTuple):
    """Where samples wait for a stage: what it takes, what is remembered of them, and their numbers."""

    state: State
    memory: tuple[Tensor, ...]
    structure: Any  # of the memory
    samples: Tensor


class Counts(NamedTuple):
    """Numbers in device memory that the kernel after a stage reads, and then writes."""

    waiting: Tensor  # rows that are of samples
    answered: Tensor  # before
    arrived: Tensor  # in the next room, before
    after: Tensor  # both, afterwards
    seen: Tensor  # the same, in memory that the host sees


class DeviceWalk:
    """The stages of a network and a policy for batches of one size and shape, in rooms for so many samples."""

    answers: Tensor  # rows of sample, class, open exit and probability, as a ring; written where the host reads

    def __init__(self, network: Network, policy: Policy, example: State, size: int, capacity: int) -> None:
        self.stages, self.admit, self.size, self.capacity = network.stages, network.admit, size, capacity
        self.last = len(self.stages) - 1
        self.unpacked = [not each.is_packed for each in network.reads]  # stages that give logits
        self.reads = [each if each.is_packed else each._replace(columns=("margin",)) for each in network.reads]
        self.by_kernel = _is_by_kernel(policy)
        self.sizes = [size >> index for index in range(SIZES) if size >> index >= SMALL] or [size]
        example = self.admit(example)
        device = example[0].device
        self.here: Callable[[], Any] = partial(on, device)
        self.integers = partial(torch.zeros, dtype=torch.int64, device=device)
        self.pinned = partial(torch.zeros, dtype=torch.int64, pin_memory=example[0].is_cuda)
        self.ties, self.rules = self.integers(self.last + 1, 2).double(), self.integers(self.last + 1, 4)
        self.use(policy)
        self.numbers: list[Tensor] = []  # of the combination at every stage whose answers or scores it changes
        if self.by_kernel and isinstance(policy.combination, COMBINED_BY_KERNEL):
            numbers = map(policy.combination.numbers, range(self.last + (not policy.keeps_answers)))
            self.numbers = [self.ties.new_tensor(each) for each in numbers]
        self.rooms = [Room(_repeated(example, capacity), (), None, self.integers(capacity))]
        self.graphs: dict[Any, Any] = {}
        self.operations, self.outside = network.launched, list[Tensor]()  # of stages; what they use and were not given

    def use(self, policy: Policy) -> None:
        """Decide by the numbers of this policy from now on; its rule must be that of the first one."""
        self.policy = copy(policy)  # another one, should this be interrupted
        if self.last and isinstance(policy, Threshold | Lottery) and self.by_kernel:
            numbers = [policy.numbers(open_index) for open_index in range(self.last)]
            self.ties[: self.last] = self.ties.new_tensor([ties for ties, _ in numbers])
            self.rules[: self.last] = self.rules.new_tensor([rule for _, rule in numbers])
        self.policy = policy

    def _answers(self, found: Integers) -> Answers:
        """Return rows of answers by column."""
        samples, predictions, open_indices, bits = found.T.copy()
        return Answers(
            samples, predictions, open_indices, bits.view(np.float64) if self.reads[-1].probability else None
        )

    def _add_room(self, stage: int) -> None:
        """Add the room for what a stage hands on, filled with what it makes of the example."""
        state, _, _, memory, structure = self._ran(stage, slice(self.size))
        if others := {len(each) for each in (*state, *memory)} - {self.size}:
            raise AlightError(f"stage {stage} hands on a tensor of {others.pop()} rows for {self.size} samples")
        count = self.capacity
        self.rooms.append(Room(_repeated(state, count), _repeated(memory, count), structure, self.integers(count)))

    def _writes_own(self, stage: int) -> bool:
        """Return whether a stage writes to no other memory than its own, and note what else it uses."""
        if not self.operations:
            return False
        use = memory_use(self.operations[stage], [each[: self.size] for each in self.rooms[stage].state])
        self.outside += use.outside
        return use.writes_own

    def _capture(
        self,
        executor: Executor,
        stage: int,
        size: int,
        slot: int,
        counts: Counts,
        batches: int = 1,
        run_all: RunAll = run_sequentially,
    ) -> None:
        """Capture a stage for successive batches of its room: they run, and it decides, answers and moves survivors."""
        try:
            graph = executor.capture(partial(self._step, run_all, stage, size, slot, counts, batches))
            self.graphs[stage, size * batches, slot] = graph
        except RuntimeError as error:
            raise AlightError(
                f"stage {stage} cannot be captured as a CUDA graph ({str(error).partition(chr(10))[0]})"
            ) from error

    def _step(self, run_all: RunAll, stage: int, size: int, slot: int, counts: Counts, batches: int) -> None:
        starts = [index * self.size for index in range(slot, slot + batches)]
        made = run_all([partial(self._ran, stage, slice(start, start + size)) for start in starts])
        states, packed, decided, memories, _ = zip(*made, strict=True)
        following = self.rooms[min(stage + 1, self.last)]
        moved: list[tuple[Any, Tensor]] = []  # tensors of every batch, and where their rows go
        if stage < self.last and self.capacity == 1:  # where one sample lies already
            self.rooms[stage + 1] = following._replace(state=states[0], memory=memories[0])
        elif stage < self.last:
            parts = [(*state, *memory) for state, memory in zip(states, memories, strict=True)]
            moved = [*zip(zip(*parts, strict=True), following.state + following.memory, strict=True)]
        elsewhere = None if decided[0] is None else torch.cat(decided)
        ran = slice(starts[0], starts[0] + batches * size)
        for start in range(0, max(1, len(moved)), MOVED):
            self._settle(stage, ran, packed, elsewhere, counts, moved[start : start + MOVED], first=start == 0)

    def _ran(self, stage: int, batch: slice) -> tuple[State, Tensor, Tensor | None, tuple[Tensor, ...], Any]:
        """Run a stage; return its state, packed values, what was decided elsewhere than in the kernel, and memory."""
        room, reads = self.rooms[stage], self.reads[stage]
        state, values = self.stages[stage](*(each[batch] for each in room.state))
        if self.unpacked[stage]:
            values = pack(values, reads)
        if stage < len(self.numbers):
            combine = self._scored if isinstance(self.policy.combination, Gain) else self._combined
            values, memory = combine(stage, values, *(each[batch] for each in room.memory))
            return state, values, None, (memory,) if stage + 1 < len(self.numbers) else (), None
        if self.by_kernel:
            return state, values, None, (), None
        recalled = tree_unflatten([each[batch] for each in room.memory], room.structure) if stage else ((), ())
        leaving, classes, recalled = visit(
            self.policy, stage, room.samples[batch], values[:, 0].long(), columns_of(values, reads), recalled
        )
        parts, structure = tree_flatten(recalled)
        return state, values, torch.stack([leaving.long(), classes.long()], 1), tuple(parts), structure

    def _combined(self, stage: int, packed: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Launch the kernel that combines exits; return answers and scores as head values, and what to remember."""
        votes, first = isinstance(self.policy.combination, Vote), 2 + len(self.reads[stage].columns)
        size, width = packed.shape
        ranks = 1 if votes else (width - first) // 2
        count = ranks * (stage + 1)
        combined, remembered = packed.new_empty(size, 3), packed.new_empty(size, 2 * count + 1)
        kernels: Any = rows.kernels(packed.device.type)
        kernels.combine_rows[(size,)](
            packed,
            width,
            2 if votes else first,
            packed if memory is None else memory,
            self.numbers[stage],
            ranks,
            count,
            combined,
            remembered,
            VOTES=votes,
            BLOCK=1 << max(1, (count - 1).bit_length()),
            num_warps=1,
            enable_fp_fusion=False,
        )
        return combined, remembered

    def _scored(self, stage: int, packed: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Launch the kernel that scores by all exits so far; return head values with that score, and the memory."""
        combination: Any = self.policy.combination
        columns, (size, width) = len(combination.columns), packed.shape
        combined, remembered = packed.new_empty(size, width), packed.new_empty(size, 3 * columns + 2 * (stage + 1))
        kernels: Any = rows.kernels(packed.device.type)
        kernels.score_rows[(size,)](
            packed,
            width,
            packed if memory is None else memory,
            self.numbers[stage],
            stage,
            combined,
            remembered,
            COLUMNS=columns,
            KNOTS=combination.most_knots,
            BLOCK=1 << max(1, (self.last - 1).bit_length()),
            num_warps=1,
            enable_fp_fusion=False,
        )
        return combined, remembered

    def _settle(
        self,
        stage: int,
        ran: slice,
        packed: Sequence[Tensor],
        decided: Tensor | None,
        counts: Counts,
        moved: Sequence[tuple[Sequence[Tensor], Tensor]],
        *,
        first: bool,
    ) -> None:
        """Launch the kernel that decides about the rows that ran, batch by batch, and moves a few tensors."""
        flat = [rows.words(*rows.laid_out_like(target, made), target) for made, target in moved]
        places: list[tuple[Any, ...]] = [(*_padded_to_group(made), target, target.shape[1]) for *made, target in flat]
        places += [(*_padded_to_group(packed), packed[0], 0)] * (MOVED - len(flat))
        (size, width), answers, batches = packed[0].shape, self.answers[stage % len(self.answers)], len(packed)
        count = batches * size
        parts = min(max(1, PROGRAMS // count), max(1, *(-(-words // MOVE) for *_, words in places)))
        kernels: Any = rows.kernels(packed[0].device.type)
        kernels.settle_rows[(count, parts)](
            *_padded_to_group(packed),
            width,
            2 + len(self.reads[stage].columns),
            self.rooms[stage].samples[ran],
            packed[0] if decided is None else decided,
            self.ties[stage],
            self.rules[stage],
            counts.waiting,
            size,
            stage,
            counts.answered,
            counts.arrived,
            counts.after,
            counts.seen,
            answers,
            len(answers),
            self.rooms[min(stage + 1, self.last)].samples,
            self.capacity,
            *chain.from_iterable(places),
            BATCHES=batches,
            TENSORS=len(flat),
            FIRST=first,
            LAST=stage == self.last,
            DECIDED=decided is not None,
            PROBABILITY=self.reads[-1].probability,
            ROWS=1 << (count - 1).bit_length(),
            BLOCK=MOVE,
            num_warps=WARPS,
        )


class BatchWalk(DeviceWalk):
    """Answers one batch, no larger than its size, by one launch of a graph that chooses on the device what runs."""

    def __init__(self, network: Network, policy: Policy, example: State, size: int, executor: Executor) -> None:
        super().__init__(network, policy, example, size, size)
        self.places = places = 2 * (self.last + 2)  # answers so far and who waits, for each stage and behind the last
        self.control, self.sent = self.integers(places + size), self.pinned(places + size + len(self.rooms[0].state))
        self.rooms[0] = self.rooms[0]._replace(samples=self.control[places:])
        self.layouts = [rows.layout_of(each) for each in self.rooms[0].state]
        self.answers = self.pinned(1, size, 4)
        self.given, self.found = self.sent.numpy(), self.answers.numpy()[0]
        counters, self.nobody = self.control[:places], self.integers(1)
        counts = counters.view(-1, 2)
        for stage in range(self.last + 1):
            (answered, waiting), after = counts[stage], counts[stage + 1]
            if stage < self.last:
                self._add_room(stage)
            self._writes_own(stage)
            for each in self.sizes:
                self._capture(executor, stage, each, 0, Counts(waiting, answered, self.nobody, after, after))
            if size == 1:
                self.graphs[stage, 1, 0].replay()  # so that the next stage has something in its room that it can take
        self.program = executor.compile([Run((0, size, 0)), *self._following(1)], self.graphs, counters)
        self.written = self.found[
            :, : 4 if self.reads[-1].probability else 3
        ]  # by the device: sample, class, exit, ...
        self.first, self.addresses = self.written[0, 1:], self.given[places + size :]  # its answer; where inputs lie
        self.is_running = False  # has been launched, and its answers are not collected
        self.ready: set[Any] = set()  # how single samples were laid out whose inputs needed nothing done

    def one_batch(self, samples: Integers, inputs: State, meanwhile: Callable[[], bool]) -> Answers | None:
        """Return the answers of one batch; None if what is looked at `meanwhile` does not hold."""
        state = [_readable(*each) for each in zip(self.admit(inputs), self.layouts, strict=True)]
        with self.here():
            self._launch(samples, [each.data_ptr() for each in state])
            holds = meanwhile()
            self.program.wait(lambda: bool((self.written[: len(samples)] != UNKNOWN).all()))
            self._check_answered(self.found[: len(samples), 2])
        if not holds:
            return None
        if self.size == 1 and all(map(operator.is_, state, inputs)) and (layout := laid_out(inputs)):
            self.ready.add(layout)
        return self._answers(self.found[: len(samples)])

    def one_sample(
        self, sample: int, addresses: Sequence[int], meanwhile: Callable[[], bool]
    ) -> tuple[int, int, float | None] | None:
        """Return class, open exit and probability of one sample whose inputs lie there, as soon as they are written.

        None if what is looked at `meanwhile` does not hold.
        """
        with self.here():
            self._launch(sample, addresses)
            holds = meanwhile()
            self.program.wait(lambda: UNKNOWN not in self.first.tolist())  # quicker than by NumPy
            prediction, open_index, *rest = self.first.tolist()
            self._check_answered(self.first[1:2])
        return (prediction, open_index, float(self.first.view(np.float64)[2]) if rest else None) if holds else None

    def _launch(self, samples: Integers | int, addresses: Sequence[int]) -> None:
        """Let a batch run, or one sample, whose inputs lie there."""
        if self.is_running:  # it was left, as by an interrupt
            self.program.finish()
        self.is_running, count = True, 1 if isinstance(samples, int) else len(samples)
        self.written[:count] = UNKNOWN
        self.given[1], self.given[self.places : self.places + count] = count, samples
        self.addresses[:] = addresses
        self.program.launch()

    def _check_answered(self, exits: Integers) -> None:
        """Check that what has run has written answers: open exits are enough."""
        self.is_running = False
        if (exits == UNKNOWN).any():
            raise AlightError(
                'the device has ended a batch without its answers: run with decide="host", and report what network it'
                " was"
            )

    def _step(self, run_all: RunAll, stage: int, *given: Any) -> None:
        if stage == 0:
            self._enter()
        super()._step(run_all, stage, *given)

    def _enter(self) -> None:
        """Launch the kernels that copy inputs, counts and sample numbers: quicker in the graph than before it."""
        kernels: Any = rows.kernels(self.control.device.type)
        for index, (target,) in enumerate(map(rows.words, self.rooms[0].state)):
            words = target.shape[1]
            programs = min(PROGRAMS, -(-max(words * self.size, 1) // BLOCK))
            kernels.admit_rows[(programs,)](
                self.sent, len(self.control), index, target, words, self.control, FIRST=index == 0, BLOCK=BLOCK
            )

    def _following(self, stage: int) -> Program:
        """Return what runs from a stage on, as long as samples stay: each as the smallest captured size."""
        if stage > self.last:
            return []
        following, ranges = self._following(stage + 1), zip_longest(self.sizes, self.sizes[1:], fillvalue=0)
        branches = [(Condition(2 * stage + 1, above, upto), [Run((stage, upto, 0))]) for upto, above in ranges]
        if len(branches) > 1:
            return [Choose(branches), *following]
        ((condition, body),) = branches
        return [Choose([(condition, [*body, *following])])]  # asks about later stages only if this one runs


class StreamWalk(DeviceWalk):
    """Answers any number of samples in batches of one size: `push` them, say `end`, and take what is `fetched`.

    What comes from the host is copied to the device in the stream `uploading`, while earlier batches run.
    """

    def __init__(
        self,
        network: Network,
        policy: Policy,
        example: State,
        size: int,
        executor: Executor,
        uploading: Any = None,
    ) -> None:
        self.slots, self.group = slots_and_group(size)
        super().__init__(network, policy, example, size, self.slots * size)
        self.uploading, stages = uploading, self.last + 1
        self.limit = self.integers(1)  # rows of a batch that are of samples
        counts, seen = self.integers(stages, self.slots, 2), self.pinned(stages, self.slots, 2)
        self.counts, self.seen = counts, seen.numpy()
        self.answers = self.pinned(stages, (UNREAD + (IN_FLIGHT + 1) * self.group) * size, 4)
        for stage in range(stages):
            if stage < self.last:
                self._add_room(stage)
            is_apart = self._writes_own(stage)  # and concurrent: a few samples leave most of a GPU idle
            run_all = executor.run_concurrently if self.group > 1 and is_apart else run_sequentially
            for count in dict.fromkeys([1, self.group]):
                for slot in range(0, self.slots, count):
                    before, last = counts[stage, slot - 1], slot + count - 1  # counts of the batch before, and the slot
                    own = Counts(self.limit, before[0], before[1], counts[stage, last], seen[stage, last])
                    for each_size in self.sizes if last == 0 else [size]:
                        self._capture(executor, stage, each_size, slot, own, count, run_all)
        event: Callable[[], Any] = torch.cuda.Event
        self.events, self.emptied = ([event() for _ in range(count)] for count in (IN_FLIGHT, self.slots))
        self.launches = 0
        self.in_flight: deque[tuple[int, int, int, Any]] = deque()  # stage, last slot, batches, the event after them
        self.found: list[Answers] = []
        self.stream: Any = None  # in which stages run
        self.turn = 0  # the stage that ran last
        self.reset()

    def reset(self) -> None:
        """Let no sample wait, as after an error."""
        while self.in_flight:
            self._wait()
        stages, self.started, self.ending, self.turn = self.last + 1, False, False, 0
        self.arrived, self.launched, self.flying = [0] * stages, [0] * stages, [0] * stages  # samples, batches, batches
        self.answered, self.taken = [0] * stages, [0] * stages  # answers that the host knows of, and has taken
        self.found.clear()

    def push(self, samples: Integers, inputs: State) -> None:
        """Take in a batch of any size, and launch each one that is full."""
        with self.here():
            self._push(samples, inputs)

    def _push(self, samples: Integers, inputs: State) -> None:
        self._enter()
        if not self.started:
            self.reset()
            self.counts.zero_()
            self.limit.fill_(self.size)
            if self.uploading is not None:
                self.uploading.wait_stream(self.stream)  # for copies of a run that was left
            self.started = True
        on_device = self.uploading is None or any(getattr(each, "is_cuda", False) for each in inputs)
        with torch.cuda.stream(None if on_device else self.uploading):
            numbers = torch.from_numpy(samples)
            state = (*self.admit(inputs), numbers.pin_memory() if self.limit.is_cuda else numbers)
        start = 0
        while start < len(samples):
            first = self.arrived[0] % self.capacity
            # copies on the device hold up what runs there, so they are few; uploads go on beside it, so they are small
            most = self.capacity - max(first, self._waiting(0)) if on_device else self.size - first % self.size
            count = min(most, len(samples) - start)
            self._copy(tuple(each[start : start + count] for each in state), first, on_device=on_device)
            start, self.arrived[0] = start + count, self.arrived[0] + count
            while self._waiting(0) >= (self.size if self._is_idle() else self.group * self.size):
                self._go_on()

    def _enter(self) -> None:
        """Go on in the current stream, which may be another one than before."""
        if self.uploading is not None:
            stream = torch.cuda.current_stream()
            if self.stream is not None and stream != self.stream:
                stream.wait_stream(self.stream)
            self.stream = stream

    def _copy(self, state: State, first: int, *, on_device: bool) -> None:
        """Copy inputs to the first room, from a row on."""
        stream = None if on_device else self.uploading
        with torch.cuda.stream(stream):
            if stream is not None:
                stream.wait_event(self.emptied[first // self.size])
            for there, each in zip((*self.rooms[0].state, self.rooms[0].samples), state, strict=True):
                there[first : first + len(each)].copy_(each, non_blocking=True)
        if stream is not None:
            self.stream.wait_stream(stream)

    def end(self) -> None:
        """Answer everything that waits, stage by stage: full batches, then a partial one."""
        with self.here():
            self._enter()
            self.ending, given = True, self.arrived[0]
            for stage in range(self.last + 1):
                self._finish_full()
                if waiting := self._waiting(stage):
                    self._run_partial(stage, waiting)
            self._finish_full()
        self.started = self.ending = False
        if sum(self.answered) != given:
            raise AlightError(
                f"{given} samples were given to the device and {sum(self.answered)} answered: run with"
                ' decide="host", and report what network it was'
            )

    def fetched(self, *, every: bool = False) -> Iterator[Answers]:
        """Yield what was answered so far, once it is worth while; or `every` answer of what was launched."""
        while every and self.in_flight:
            self._wait()
        if every or sum(self.answered) - sum(self.taken) >= UNREAD * self.size:
            self.found.append(self._take())
        found, self.found = self.found, []
        yield from found

    def _waiting(self, stage: int) -> int:
        """Return how many samples wait for a stage, as far as the host knows: at least so many do."""
        return self.arrived[stage] - self.launched[stage] * self.size

    def _is_idle(self) -> bool:
        """Return whether nothing that was launched still runs, as where samples come more slowly than they leave."""
        while self.in_flight and ((event := self.in_flight[0][-1]) is None or event.query()):
            self._wait()
        return not self.in_flight

    def _go_on(self) -> bool:
        """Launch batches, or else wait for some in flight; return whether there were any.

        A stage goes on while it can, for its weights are in the caches, then the next one does.
        """
        if len(self.in_flight) < IN_FLIGHT:
            for count in dict.fromkeys([self.group, 1]):
                for stage in (*range(self.turn, self.last + 1), *range(self.turn)):
                    if self._is_due(stage, count):
                        self._launch(stage, self.size, self.launched[stage] % self.slots, count)
                        self.turn = stage
                        return True
        if self.in_flight:
            self._wait()
            return True
        return False

    def _is_due(self, stage: int, count: int) -> bool:
        """Return whether so many batches of a stage can be launched now, and should.

        Single batches are launched where nothing is in flight, where no more samples come, and up to the slot at which
        the next group begins.
        """
        if self._waiting(stage) < count * self.size or not self._has_room(stage, count):
            return False
        odd = self.launched[stage] % self.group > 0
        return not odd if count == self.group else odd or self.ending or not self.in_flight

    def _wait(self) -> None:
        """Wait for the first batch in flight, and note what its kernel has written."""
        stage, slot, count, event = self.in_flight.popleft()
        if event is not None:
            event.synchronize()
        self.flying[stage] -= count
        self.answered[stage], arrived = self.seen[stage, slot].tolist()
        if stage < self.last:
            self.arrived[stage + 1] = arrived

    def _has_room(self, stage: int, count: int) -> bool:
        """Return whether batches of a stage have slots for their counts, and fit into the next room if all go on."""
        if stage == self.last:
            return self.flying[stage] + count <= self.slots
        return self._waiting(stage + 1) + (self.flying[stage] + count) * self.size <= self.capacity

    def _launch(self, stage: int, size: int, slot: int, count: int = 1) -> None:
        self.graphs[stage, count * size, slot].replay()
        event = None
        if self.uploading is not None:
            event = self.events[self.launches % IN_FLIGHT]
            event.record(self.stream)
            for emptied in self.emptied[slot : slot + count] if stage == 0 else ():
                emptied.record(self.stream)
        self.launches += 1
        self.launched[stage] += count
        self.flying[stage] += count
        self.in_flight.append((stage, slot + count - 1, count, event))
        if max(map(operator.sub, self.answered, self.taken)) >= UNREAD * self.size:
            self.found.append(self._take())  # while others run

    def _finish_full(self) -> None:
        while self._go_on():
            pass

    def _run_partial(self, stage: int, count: int) -> None:
        """Run the last samples of a room, at its front, in the captured sizes that fit them best; nothing else runs."""
        slot, room = self.launched[stage] % self.slots, self.rooms[stage]
        start, last = slot * self.size, slot - 1  # of the samples, and the slot whose counts are those before
        for size in self._sizes_for(count):
            here = min(size, count)
            if start:
                for each in (*room.state, *room.memory, room.samples):
                    each[:here] = each[start : start + here]
            if last >= 0:
                self.counts[stage, -1] = self.counts[stage, last]
            self.limit.fill_(here)
            self._launch(stage, size, 0)
            self._wait()
            start, last, count = start + here, 0, count - here
        self.limit.fill_(self.size)
        self.arrived[stage] = self.launched[stage] * self.size  # nobody waits

    def _sizes_for(self, count: int) -> list[int]:
        """Return the captured sizes in which so many samples run, at most a batch: the quickest together."""
        whole, below = min(each for each in self.sizes if each >= count), [each for each in self.sizes if each < count]
        if not below:
            return [whole]
        divided = [below[0], *self._sizes_for(count - below[0])]
        return min([whole], divided, key=lambda sizes: sum(sizes) + FURTHER * len(sizes))

    def _take(self) -> Answers:
        """Return the answers that the host knows of and has not taken yet."""
        found, length = [], self.answers.shape[1]
        for ring, first, end in zip(self.answers.numpy(), self.taken, self.answered, strict=True):
            here = first % length
            found += [ring[here : here + end - first], ring[: max(0, here + end - first - length)]]
        self.taken = [*self.answered]
        return self._answers(np.concatenate(found))


def slots_and_group(size: int) -> tuple[int, int]:
    """Return how many batches of a size a room holds, and how many run together: others wait or are in flight.

    >>> slots_and_group(32), slots_and_group(256), slots_and_group(1024)
    ((16, 4), (6, 2), (3, 1))
    """
    slots = min(SLOTS, max(3, SAMPLES // size))
    group = min(GROUP, 1 << (slots // 3).bit_length() - 1)
    return slots - slots % group, group


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which streams, graphs and kernels are of this device; quick where they are."""
    is_other = device.type == "cuda" and device.index not in (None, torch.cuda.current_device())
    return torch.cuda.device(device) if is_other else nullcontext()


def _padded_to_group(each: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return what there is of each batch, for a kernel that takes as many as a group has."""
    return (*each, *[each[0]] * (GROUP - len(each)))


def laid_out(inputs: State) -> tuple[Any, ...]:
    """Return shape, memory layout, dtype and device of one sample's inputs; nothing unless all are plain tensors."""
    if any(type(each) is not Tensor for each in inputs):
        return ()
    return tuple([(each.shape, each.stride(), each.dtype, each.device) for each in inputs])


def _readable(tensor: Tensor, layout: torch.memory_format) -> Tensor:
    """Return a tensor whose memory a kernel can read from its address on, in the widest words."""
    tensor = tensor.contiguous(memory_format=layout)
    return tensor.clone() if tensor.data_ptr() % WIDEST else tensor


def _repeated(state: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
    """Return memory for so many samples, laid out like these and filled with them: rows that a network can take."""
    made = rows.allocate(count, tuple(state))
    for there, each in zip(made, state, strict=True):
        for start in range(0, count, len(each)):
            there[start : start + len(each)] = each[: count - start]
    return made
