"""Exits on a classifier: heads attached to its features, the outputs that it has, or separate networks in a cascade."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from alight.cutting.cut import cut, split_outputs
from alight.cutting.placement import cut_evenly
from alight.cutting.running import in_mode
from alight.data.tokens import MASK
from alight.errors import BadInput
from alight.networks.heads import HEADS, HeadChoice, HeadFactory, TokenHead, are_channels_last, make_head
from alight.networks.multi_exit import (
    Carried,
    MultiExitModel,
    Normalisation,
    count_classes,
    describe,
    input_names,
    read,
)

EXITS = 3  # that "auto" places before the end: heads cost where they save nothing, and `plan` can only close exits
END = "end"  # the name of the last exit, the network's own classifier


def attach_heads(
    backbone: nn.Module,
    after: str | Sequence[str] = "auto",
    *,
    example: Any,
    num_classes: int | None = None,
    head: HeadChoice = "auto",
    count: int = EXITS,
    classes: Sequence[str] = (),
    normalisation: Normalisation | None = None,
) -> MultiExitModel:
    """Attach an untrained head after each named module; the last exit is the backbone itself, bit by bit.

    `after` names modules in the order in which they run; "auto" puts `count` exits at even shares of the cost.
    `example` is one batch as the backbone takes it: a tensor, several, or a dict. `head` is the name of a kind, a
    function that makes one from the shape of the features, or one of these per exit.

    >>> import torch
    >>> backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 10))
    >>> images = torch.zeros(2, 3, 8, 8)
    >>> model = attach_heads(backbone, after=["1"], num_classes=10, example=images)
    >>> model.exits, torch.equal(model(images)[-1], backbone(images))
    (('1', 'end'), True)
    """
    if not after:
        raise BadInput("after names no module: give at least one, or 'auto'")
    with in_mode(backbone, training=False):
        if after == "auto":
            names, stages = cut_evenly(backbone, example, count)
        else:
            stages = cut(backbone, after, example)
            names = list(after)
        model = MultiExitModel(
            stages, [nn.Identity() for _ in stages], [*names, END], input_names(example), classes=classes
        )
        carried = model.carried_past_exits(example)
    model.num_classes = _checked_classes(carried[-1][0], num_classes, classes)
    for index, (kind, features) in enumerate(zip(_per_exit(head, len(names)), carried[:-1], strict=True)):
        model.heads[index] = _fitted(kind, features, model.num_classes, example, names[index])
    model.normalisation = normalisation
    model.recipe = {
        "source": "backbone",
        "type": type(backbone).__name__,
        "after": names,
        "example": describe(example),
        "features": [list(each[0].shape[1:]) for each in carried[:-1]],
    }
    return model


def from_outputs(network: nn.Module, example: Any, exits: Sequence[str] = ()) -> MultiExitModel:
    """Split a network whose `forward` returns several logits, so that each can be computed without the later ones.

    The logits come in a list, tuple or dict, from early to late; `exits` names them.

    >>> import torch
    >>> class TwoOutputs(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.first, self.second, self.early, self.late = (nn.Linear(4, 4) for _ in range(4))
    ...     def forward(self, x):
    ...         x = self.first(x)
    ...         return [self.early(x), self.late(self.second(x))]
    >>> from_outputs(TwoOutputs(), torch.zeros(1, 4), exits=["early", "late"]).exits
    ('early', 'late')
    """
    stages, heads = split_outputs(network, example)
    model = MultiExitModel(
        stages, heads, exits, input_names(example), recipe={"source": "outputs", "example": describe(example)}
    )
    with in_mode(model, training=False):
        model.num_classes = _same_classes(model(example), "outputs")
    return model


def _same_classes(logits: Sequence[Tensor], what: str) -> int:
    """Return how many classes all of these logits have."""
    counts = [*map(count_classes, logits)]
    if len(set(counts)) > 1:
        raise BadInput(f"the {what} give {counts} logits: give as many of each, one per class")
    return counts[0]


def _per_exit(head: HeadChoice, exits: int) -> list[str | HeadFactory]:
    if isinstance(head, str) or callable(head):
        return [head] * exits
    if len(head) != exits:
        raise BadInput(f"{len(head)} heads for {exits} exits before the end: give one per exit, or one for all")
    return list(head)


def _checked_classes(logits: Tensor, num_classes: int | None, classes: Sequence[str]) -> int:
    own = count_classes(logits)
    if classes and len(classes) != own:
        raise BadInput(f"{len(classes)} names for {own} classes: give one name per class")
    if num_classes not in (None, own):
        raise BadInput(
            f"num_classes is {num_classes}, but the network itself gives {own} logits:"
            f" give num_classes={own}, or replace the network's classifier first"
        )
    return own


def _fitted(kind: str | HeadFactory, carried: Carried, num_classes: int, example: Any, name: str) -> nn.Module:
    """Return a head for what is carried past this exit, on its device and in its dtype."""
    features, masked = carried[0], _has_mask(carried)
    if not features.is_floating_point() or features.ndim < 2:
        raise BadInput(
            f"the output of {name!r} is {features.dtype} of shape {tuple(features.shape)}, without features for a head:"
            " put the exit after another module"
        )
    shape = tuple(features.shape[1:])
    image = tuple(example.shape[1:]) if isinstance(example, Tensor) else ()
    if isinstance(example, Mapping) and MASK in example and isinstance(kind, str) and features.ndim == 3:
        kind = _without_padding(kind, masked, num_classes)
    head = make_head(kind, shape, num_classes, channels_last=are_channels_last(shape, image), masked=masked)
    head.to(features.device, features.dtype)
    with in_mode(head, training=False):
        logits = read(head, carried)
    if tuple(logits.shape) != (len(features), num_classes):
        raise BadInput(
            f"the head at {name!r} gives {tuple(logits.shape)} for {len(features)} samples and {num_classes} classes:"
            " let it give one logit per sample and class"
        )
    return head


def _without_padding(kind: str, masked: bool, num_classes: int) -> str | HeadFactory:
    """Return a kind of head whose logits of a text do not depend on the longest text of its batch."""
    if kind in HEADS and kind != "token":
        raise BadInput(
            f"head {kind!r} would read the padding of texts too: use head='token', or a function of your own"
        )
    if masked or kind not in ("auto", "token"):
        return kind
    return lambda shape: TokenHead(shape, num_classes, pooling="class")  # no mask is carried past this exit


def _has_mask(carried: Carried) -> bool:
    """Check whether the second tensor carried is an attention mask: one whole number per token."""
    return len(carried) > 1 and carried[1].shape == carried[0].shape[:2] and not carried[1].is_floating_point()


def cascade(models: Sequence[nn.Module], exits: Sequence[str] = (), example: Any = None) -> MultiExitModel:
    """Chain separate networks, from cheap to expensive, as one model with an exit after each.

    Each is the head of its exit, so that a closed exit costs nothing and the full network is the last one alone.
    `exits` names them. With an `example`, a batch as every network takes it, the number of classes is checked.

    >>> import torch
    >>> model = cascade([nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))])
    >>> [tuple(logits.shape) for logits in model(torch.zeros(5, 4))]
    [(5, 3), (5, 3)]
    """
    names = input_names(example)
    members = [_CascadeMember(network, names) for network in models]
    model = MultiExitModel([_CascadeStage() for _ in members], members, exits, names, recipe={"source": "cascade"})
    if example is not None:
        with in_mode(model, training=False):
            model.num_classes = _same_classes(model(example), "networks")
        model.recipe["example"] = describe(example)
    return model


class _CascadeStage(nn.Module):
    """Carries the inputs to the next network."""

    def forward(self, *inputs: Tensor) -> Carried:
        return inputs


class _CascadeMember(nn.Module):
    """One network of a cascade, as the head of its exit: returns the logits of the inputs."""

    reads_everything = True

    def __init__(self, network: nn.Module, input_names: Sequence[str] = ()) -> None:
        super().__init__()
        self.network, self.input_names = network, tuple(input_names)

    def forward(self, *inputs: Tensor) -> Tensor:
        if self.input_names:
            output = self.network(**dict(zip(self.input_names, inputs, strict=True)))
        else:
            output = self.network(*inputs)
        return getattr(output, "logits", output)  # transformers return an object that has logits
