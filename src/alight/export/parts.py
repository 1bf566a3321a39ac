"""What is exported of a network: its segments as modules that give logits and what is carried on, with examples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from alight.data.spec import TensorSpec
from alight.engine.segments import Segment, segments
from alight.errors import BadInput
from alight.networks.multi_exit import Carried, MultiExitModel
from alight.policies.policy import Policy

BATCHES = (3, 1)  # samples in the examples: the first is traced, all are compared
TOKENS = (7, 10)  # of texts in them, so that no size is that of another axis
MASK = "attention_mask"


class Part(nn.Module):
    """The stages up to an open exit and its head: gives logits first, then what is carried on."""

    def __init__(self, segment: Segment, exit_index: int) -> None:
        super().__init__()
        self.segment, self.exit_index = segment, exit_index

    def forward(self, *carried: Tensor) -> tuple[Tensor, ...]:
        """Logits, then what is carried on."""
        carried, logits = self.segment.logits(*carried)
        return logits, *carried


@dataclass(frozen=True)
class Seen:
    """What went into a part, in each of several runs of the whole network, and what came out."""

    given: Sequence[Carried]
    made: Sequence[Carried]


def parts_of(model: MultiExitModel, policy: Policy) -> list[Part]:
    """The network as the policy opens it: no closed head is in it, nor what comes after the last open exit."""
    pairs = zip(segments(model, policy), policy.open_exits, strict=True)
    return [Part(segment, exit_index).eval() for segment, exit_index in pairs]


def seen(parts: Sequence[Part], model: MultiExitModel, example: Any) -> list[Seen]:
    """What every part takes and gives on random inputs like the example: of several batch sizes, and of texts lengths.

    Only the lengths that the network takes: one that was cut for texts of one length is seen at that length.
    """
    rng = torch.Generator().manual_seed(0)
    try:
        runs = _runs(parts, [_random(model, example, *sizes, rng) for sizes in zip(BATCHES, TOKENS, strict=True)])
    except Exception:
        if not model.input_names:
            raise
        runs = _runs(parts, [_random(model, example, count, None, rng) for count in BATCHES])
    return [Seen(*(list(each) for each in zip(*run, strict=True))) for run in zip(*runs, strict=True)]


def described(name: str, tensors: Sequence[Tensor]) -> TensorSpec:
    """One tensor as it was seen several times: sizes that differed may differ."""
    sizes = zip(*(each.shape for each in tensors), strict=True)
    first, *others = (None if len({*each}) > 1 else each[0] for each in sizes)
    if first is not None:
        raise BadInput(f"{name} has {first} rows whatever the batch: every tensor must have one row per sample")
    return TensorSpec(name, (None, *others), str(tensors[0].dtype).removeprefix("torch."))


def _runs(parts: Sequence[Part], inputs: Sequence[Carried]) -> list[list[tuple[Carried, Carried]]]:
    with torch.no_grad():
        return [[*_walk(parts, carried)] for carried in inputs]


def _walk(parts: Sequence[Part], carried: Carried) -> Iterator[tuple[Carried, Carried]]:
    for part in parts:
        made = part(*carried)
        yield carried, made
        # Under new names: a trace would keep what was noted about the tensors by those who made them.
        carried = tuple(each.detach() for each in made[1:])


def _random(model: MultiExitModel, example: Any, count: int, tokens: int | None, rng: torch.Generator) -> Carried:
    """So many random inputs like the example; texts of so many tokens, None is as many as there."""
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
