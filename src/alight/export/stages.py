"""What is exported of a network: its stages between open exits as modules that give logits and the next state."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from alight.data.spec import TensorSpec
from alight.engine.backends import State
from alight.engine.backends.torch import OpenStage, open_stages
from alight.engine.head_values import Reads
from alight.errors import BadInput
from alight.networks.multi_exit import MultiExitModel
from alight.policies.policy import Policy

BATCHES = (3, 1)  # samples in the examples: the first is traced, all are compared
TOKENS = (7, 10)  # of texts in them, so that no size is that of another axis
MASK = "attention_mask"


class ExportedStage(nn.Module):
    """The stages up to an open exit and its head: gives logits first, then the next state."""

    def __init__(self, stage: OpenStage, exit_index: int) -> None:
        super().__init__()
        self.stage, self.exit_index = stage, exit_index

    def forward(self, *state: Tensor) -> tuple[Tensor, ...]:
        """Return the logits, then the next state."""
        state, logits = self.stage.logits(*state)
        return logits, *state


@dataclass(frozen=True)
class StageRuns:
    """What went into a stage in several runs of the whole network, and what came out."""

    inputs: Sequence[State]
    outputs: Sequence[State]


def exported_stages(model: MultiExitModel, policy: Policy) -> list[ExportedStage]:
    """Return the network as the policy opens it: without closed heads, and nothing after the last open exit."""
    stages = open_stages(model, policy.open_exits, [Reads(())] * len(policy.open_exits))
    pairs = zip(stages, policy.open_exits, strict=True)
    return [ExportedStage(stage, exit_index).eval() for stage, exit_index in pairs]


def run_stages(stages: Sequence[ExportedStage], model: MultiExitModel, example: Any) -> list[StageRuns]:
    """Return the inputs and outputs of every stage on random inputs like the example, at several batch sizes.

    Texts have several lengths, but for a network that was cut for one length.
    """
    rng = torch.Generator().manual_seed(0)
    try:
        runs = _runs(stages, [_random(model, example, *sizes, rng) for sizes in zip(BATCHES, TOKENS, strict=True)])
    except Exception:
        if not model.input_names:
            raise
        runs = _runs(stages, [_random(model, example, count, None, rng) for count in BATCHES])
    return [StageRuns(*(list(each) for each in zip(*run, strict=True))) for run in zip(*runs, strict=True)]


def spec_of(name: str, tensors: Sequence[Tensor]) -> TensorSpec:
    """Return the description of a tensor from several runs: sizes that differed are free."""
    sizes = zip(*(each.shape for each in tensors), strict=True)
    first, *others = (None if len({*each}) > 1 else each[0] for each in sizes)
    if first is not None:
        raise BadInput(f"{name} has {first} rows whatever the batch: every tensor must have one row per sample")
    return TensorSpec(name, (None, *others), str(tensors[0].dtype).removeprefix("torch."))


def _runs(stages: Sequence[ExportedStage], inputs: Sequence[State]) -> list[list[tuple[State, State]]]:
    with torch.no_grad():
        return [[*_walk(stages, state)] for state in inputs]


def _walk(stages: Sequence[ExportedStage], state: State) -> Iterator[tuple[State, State]]:
    for stage in stages:
        outputs = stage(*state)
        yield state, outputs
        # New tensors: a trace would keep what a stage noted about its own.
        state = tuple(each.detach() for each in outputs[1:])


def _random(model: MultiExitModel, example: Any, count: int, tokens: int | None, rng: torch.Generator) -> State:
    """Return `count` random inputs like the example; texts of so many tokens, None is as many as there."""
    names = model.input_names or ("",) * len(model.admit(example))
    text = isinstance(example, Mapping)

    def drawn(name: str, like: Tensor) -> Tensor:
        shape = (count, tokens, *like.shape[2:]) if text and tokens and like.ndim > 1 else (count, *like.shape[1:])
        if like.is_floating_point():
            return torch.randn(shape, generator=rng, dtype=like.dtype)
        if name == MASK:
            lengths = torch.randint(1, shape[1] + 1, (count, 1), generator=rng)
            return (torch.arange(shape[1]) < lengths).to(like.dtype)
        return torch.randint(0, 2, shape, generator=rng).to(like.dtype)  # the only indices that every network knows

    return tuple(drawn(*pair) for pair in zip(names, model.admit(example), strict=True))
