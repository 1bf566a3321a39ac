"""Stages that PyTorch runs: eager, compiled, as CUDA graphs; on a GPU whole walks that the device decides."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from alight.data.batches import as_tensor
from alight.data.preprocess import InputSpec, Normalisation
from alight.engine.backends import HeadValues, Reads, State, unpack
from alight.engine.backends.torch import rows
from alight.engine.backends.torch.deciding import Deciding
from alight.engine.backends.torch.prepare import (
    check_prepared,
    compiled_stage,
    device_of,
    graphed,
    placed,
    prepared,
    running,
)
from alight.engine.backends.torch.values import OnDevice, is_fused, pack, score_one
from alight.engine.settings import RunSettings
from alight.errors import BadInput
from alight.networks.attach import attach_heads
from alight.networks.multi_exit import MultiExitModel, advance, check_has_exits, read
from alight.networks.store import fingerprint

TOKENS = 32  # texts are padded to a multiple of so many where a GPU decides: each length takes a walk of its own
IN_FLIGHT = 2  # batches whose values are awaited while others run: enough to keep a GPU from idling


class OpenStage(nn.Module):
    """The network's stages up to an open exit, and its head."""

    def __init__(self, stages: Sequence[nn.Module], head: nn.Module, reads: Reads, *, last: bool) -> None:
        super().__init__()
        self.stages, self.head, self.reads, self.last = nn.ModuleList(stages), head, reads, last
        self.head_reads_everything = getattr(head, "reads_everything", False)  # looked up once, which is slow

    def forward(self, *state: Tensor) -> tuple[State, Tensor]:
        """Return the next state, and packed values; the logits where the policy reads nothing but the class."""
        state, logits = self.logits(*state)
        return state, pack(logits, self.reads) if self.reads.is_packed else logits

    def logits(self, *state: Tensor) -> tuple[State, Tensor]:
        """Return the next state, which is empty after the last open exit, and the head's logits."""
        modules: Any = self._modules  # faster than by attribute
        for stage in modules["stages"]._modules.values():
            state = advance(stage, state)
        logits = modules["head"](*(state if self.head_reads_everything else state[:1]))
        return (() if self.last else state), logits


class AllHeads(nn.Module):
    """A network of which every head is read for every sample, as one stage."""

    def __init__(self, model: MultiExitModel, reads: Reads) -> None:
        super().__init__()
        self.stages, self.heads, self.reads = model.stages, model.heads, reads

    def forward(self, *state: Tensor) -> tuple[tuple[int], Tensor]:
        """Return the number of classes, and packed values or logits of every sample's exits, (samples x exits, ...)."""
        logits = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            state = advance(stage, state)
            logits.append(read(head, state))
        shapes = [tuple(each.shape) for each in logits]
        if any(shape != shapes[0] for shape in shapes) or len(shapes[0]) != 2 or shapes[0][1] < 2:
            raise BadInput(
                f"the exits' logits have shapes {shapes}: attach heads that give (samples, classes), all with one"
                " number of classes, at least 2"
            )
        joined = torch.stack(logits, dim=1).flatten(0, 1)
        return (shapes[0][1],), pack(joined, self.reads) if self.reads.is_packed else joined


def open_stages(model: MultiExitModel, open_exits: Sequence[int], reads: Sequence[Reads]) -> list[OpenStage]:
    """Return the network between its open exits: without closed heads, and nothing after the last open exit."""
    stages, start, last = [], 0, open_exits[-1]
    for exit_index, read_here in zip(open_exits, reads, strict=True):
        own = [*model.stages][start : exit_index + 1]
        stages.append(OpenStage(own, model.heads[exit_index], read_here, last=exit_index == last))
        start = exit_index + 1
    return stages


def in_few_lengths(spec: InputSpec) -> InputSpec:
    """Return what a network takes, its texts padded to few lengths."""
    return replace(spec, token_multiple=TOKENS) if spec.takes_texts else spec


class TorchBackend:
    """The stages of a network with exits between the exits that are open."""

    name = "PyTorch"
    make_stages: Callable[..., list[Any]] = staticmethod(open_stages)
    stages: Sequence[Any] = ()  # built once a policy says what it reads
    runs: Sequence[Any] = ()  # their functions: compiled, as CUDA graphs, or forward, which is faster than a call
    deciding: Deciding | None = None  # where the device may decide

    def __init__(
        self,
        model: MultiExitModel,
        open_exits: Sequence[int],
        settings: RunSettings | None = None,
        batch_size: int | None = None,
    ) -> None:
        check_has_exits(model)
        self.settings = settings or RunSettings()
        self.device = device_of(model, self.settings.device)
        if self.settings.decide == "device" and self.device.type != "cuda":
            raise BadInput(f"a GPU can decide and the network runs on {self.device}: leave decide out")
        self.model = prepared(model, self.settings)
        may_decide = self.device.type == "cuda" and self.settings.decide != "host"
        self.inputs = in_few_lengths(model.input_spec) if may_decide else model.input_spec
        self.exits, self.open_exits = model.exits, tuple(open_exits)
        self.in_flight = 0 if self.device.type == "cpu" else IN_FLIGHT
        self.batch_size = batch_size
        self.unproven = model if self.settings.dtype or self.settings.channels_last else None
        self.supports_single_sample = self.device.type == "cpu" and not self.settings.compile
        self.running = partial(running, self.settings.threads)

    def admit(self, inputs: State) -> State:
        """Return inputs as the stages take them; first batches prove that the network may run so, at each size."""
        if self.unproven is not None:
            if self.unproven is not self.model:
                check_prepared(self.unproven, self.model, inputs, self.settings, self.open_exits)
            self.unproven = None
        return self.model.proven(placed(inputs, self.device, self.settings))

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the network as it runs."""
        return fingerprint(self.model)

    def with_reads(self, reads: Sequence[Reads]) -> Self:
        if [*reads] == [stage.reads for stage in self.stages]:
            return self
        other, settings = copy.copy(self), self.settings
        other.stages = self.make_stages(self.model, self.open_exits, reads)
        runs = [self._compiled(*each) if settings.compile else each[1].forward for each in enumerate(other.stages)]
        other.runs = graphed(runs, self.device, self.batch_size, other.stages) if settings.graphs else runs
        if self.device.type == "cuda" and settings.decide != "host":
            other.deciding = Deciding(runs, reads, self.admit, self.device, settings.decide, other.stages)
        return other

    def _compiled(self, index: int, stage: Any) -> Callable[..., Any]:
        """Return a compiled stage; on a GPU one kernel of ours reads its logits, a compiler would need several."""
        reads = stage.reads
        if self.device.type != "cuda" or not (reads.top or (reads.columns and is_fused(reads))):
            return compiled_stage(index, stage)
        bare = copy.copy(stage)
        bare.reads = Reads(())
        run = compiled_stage(index, bare)

        def packed(*state: Tensor) -> tuple[State, Tensor]:
            state, logits = run(*state)
            return state, pack(logits, reads)

        return packed

    def pin(self, inputs: State) -> State:
        tensors = tuple(map(as_tensor, inputs))
        if self.device.type != "cuda":
            return tensors
        return tuple(each if each.is_cuda or each.is_pinned() else each.pin_memory() for each in tensors)

    def run(self, stage: int, state: State) -> tuple[HeadValues | OnDevice, State]:
        reads = self.stages[stage].reads
        packed = reads.is_packed
        state, values = self.runs[stage](*state)
        if self.in_flight:
            return OnDevice(values, reads, packed=packed), state
        return unpack((values if packed else pack(values, reads)).numpy(), reads), state

    def run_one(self, stage: int, state: State) -> tuple[HeadValues, State]:
        module = self.stages[stage]
        state, logits = module.logits(*state)
        return score_one(logits, module.reads), state

    take = staticmethod(rows.take)
    allocate = staticmethod(rows.allocate)
    move = staticmethod(rows.move)
    owns = staticmethod(rows.owns)

    def first_unusable(self, state: State) -> int | None:
        return None  # torch carries NaN through to the logits, where the engine finds it


class EveryExit(TorchBackend):
    """The whole network as one stage that gives the values of every exit: what a recording is made of."""

    num_classes = 0  # known once a batch has run
    make_stages = staticmethod(lambda model, _, reads: [AllHeads(model, reads[0])])

    def fingerprint_aside(self) -> Callable[[], str]:
        """Return a function that takes the fingerprint in another thread, on a GPU in a stream of its own."""
        if self.device.type != "cuda":
            return lambda: self.fingerprint
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))

        def take() -> str:
            with torch.cuda.stream(stream):
                return self.fingerprint

        return take

    def run(self, stage: int, state: State) -> tuple[HeadValues | OnDevice, State]:
        values, (self.num_classes,) = super().run(stage, state)
        return values, ()


def torch_member(
    network: Any, example: Any = None, image_size: int | None = None, normalisation: Normalisation | None = None
) -> MultiExitModel:
    """Return a network with its exits, or one without as a network with a single exit, its end."""
    if isinstance(network, MultiExitModel):
        return network
    if not isinstance(network, nn.Module):
        raise BadInput(
            f"a {type(network).__name__} is not a network: give one of torch, a MultiExitModel, a folder that alight"
            " wrote, an .onnx or .tflite file, or a URL"
        )
    if image_size is not None:
        channels = 3 if normalisation is None else len(normalisation.mean)
        example = torch.zeros(2, channels, image_size, image_size)
    if example is None:
        raise BadInput(
            f"a {type(network).__name__} does not say what it takes: give cascade(networks, example=...) a batch, or"
            " the network as Member(network, image_size=..., normalisation=...)"
        )
    return attach_heads(network, (), example=example, normalisation=normalisation)
