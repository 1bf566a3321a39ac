"""Exits on a classifier: heads attached to its features, or the outputs that it has."""

import operator
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from alight.cutting.cut import cut, split_outputs
from alight.cutting.flops import count_flops
from alight.cutting.placement import HeadFlops, cut_evenly, linear_flops
from alight.cutting.running import Inputs, LogitsChoice, in_mode, pick_logits
from alight.cutting.stages import Stage
from alight.data.preprocess import Normalisation
from alight.data.tokens import Meaning
from alight.errors import BadInput
from alight.networks.features import Masks, are_channels_last, run_stages
from alight.networks.heads import HEADS, HeadChoice, HeadFactory, TokenHead, make_head
from alight.networks.multi_exit import (
    Carried,
    MultiExitModel,
    checked_read,
    count_classes,
    describe,
    input_names,
    same_classes,
)
from alight.scores import are_probabilities

EXITS = 3  # that "auto" places before the end: heads cost where they save nothing, and `plan` can only close exits
END = "end"  # the name of the last exit, the network's own classifier


def attach_heads(
    backbone: nn.Module,
    after: str | int | Sequence[str] = "auto",
    *,
    example: Any,
    num_classes: int | None = None,
    head: HeadChoice = "auto",
    classes: Sequence[str] = (),
    normalisation: Normalisation | None = None,
    logits: LogitsChoice = None,
    channels: Literal["first", "last"] | None = None,
    mask: Mapping[str, Meaning] | None = None,
) -> MultiExitModel:
    """Attach an untrained head after each named module; the last exit is the backbone itself, bit by bit.

    Args:
        backbone: The network, whose weights the model shares.
        after: Names of modules in the order in which they run, or how many exits to place, or fewer where there are
            fewer places; "auto": 3; none: the network alone, as a cascade takes it.
        example: One batch as the backbone takes it, with every input that it will ever be given.
        num_classes: None: as many as the backbone has logits.
        head: The name of a kind, a function of the shape of the features, or one of these per exit.
        classes: Their names.
        normalisation: Of images in files and bytes; None: the network takes floats alone.
        logits: Which of several outputs they are: a name, an index, or a function of the output.
        channels: Which axis of features is the channels, where the network does not say.
        mask: What 1 means in a mask of tokens: {"valid": "tokens"}, {"pad": "padding"}; {}: no input is one.

    >>> import torch
    >>> backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 10))
    >>> images = torch.zeros(2, 3, 8, 8)
    >>> model = attach_heads(backbone, after=["1"], num_classes=10, example=images)
    >>> model.exits, torch.equal(model(images)[-1], backbone(images))
    (('1', 'end'), True)
    """
    _check_network(backbone, after)
    if channels not in (None, "first", "last"):
        raise BadInput(f"channels={channels!r}: say 'first' for (channels, ...), 'last' for (..., channels)")
    inputs = Inputs(example, partial(pick_logits, choice=logits))
    masks = Masks(backbone, inputs, mask)
    with in_mode(backbone, training=False):
        if after == "auto" or (isinstance(after, int) and after):
            names, stages = _placed(backbone, inputs, after, partial(_head_flops, head))
        else:
            stages = cut(backbone, after or (), inputs)
            names = list(after or ())
        runs = run_stages(stages, inputs.tensors)
        own = _checked_classes(runs[-1].carried[0], num_classes, classes)
        _check_task(stages[-1], runs[-1].carried[0])
        last = [channels == "last"] * len(names) if channels else are_channels_last(stages, runs, inputs)
    for stage in stages:
        stage.training = backbone.training  # a training loop of one's own may not set modes
    heads: list[nn.Module] = []
    for kind, name, run, channels_last in zip(_per_exit(head, len(names)), names, runs, last, strict=False):
        heads.append(_fitted(kind, Features(name, run.carried, channels_last, masks), own))
    recipe = {
        "source": "backbone",
        "type": type(backbone).__name__,
        "after": names,
        "example": describe(example),
        "features": [list(run.carried[0].shape[1:]) for run in runs[:-1]],
        "logits": {"function": getattr(logits, "__qualname__", repr(logits))} if callable(logits) else logits,
        "mask": [masks.place, masks.meaning] if masks.place is not None else None if mask is None else [],
        "channels": channels,
    }
    model = MultiExitModel(
        stages,
        [*heads, nn.Identity()],
        [*names, END],
        inputs.names,
        num_classes=own,
        classes=classes,
        normalisation=normalisation,
        recipe=recipe,
    )
    model.note_untrained("heads")
    return model.keep_network(backbone, inputs.pick)


def from_outputs(
    network: nn.Module, example: Any, exits: Sequence[str] = (), *, normalisation: Normalisation | None = None
) -> MultiExitModel:
    """Split a network whose `forward` returns several logits, so that each can be computed without the later ones.

    Args:
        network: Returns logits in a list, tuple or dict, from early to late.
        example: One batch as it takes them.
        exits: Names of the outputs.
        normalisation: Of images in files and bytes.

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
    recipe = {"source": "outputs", "example": describe(example)}
    model = MultiExitModel(stages, heads, exits, input_names(example), normalisation=normalisation, recipe=recipe)
    with in_mode(model, training=False):
        model.num_classes = same_classes(model(example), "outputs")
    return model.keep_network(network)


def _head_flops(head: HeadChoice, shape: tuple[int, ...], num_classes: int) -> float:
    """Return the FLOPs of a head on features of this shape, to choose places by; the first of several kinds counts."""
    kind = head if isinstance(head, str) or callable(head) else head[0]
    linear = linear_flops(shape, num_classes)
    if kind in ("auto", "pooled_linear", "token"):
        return linear
    last = len(shape) == 3 and shape[0] == shape[1] != shape[2]  # a guess, on which no more than a place depends
    try:
        with torch.device("meta"):
            made = make_head(kind, shape, num_classes, channels_last=last)
            return count_flops(made.eval(), torch.zeros(1, *shape))
    except Exception:  # of a head that does not fit there, or of a function's own code
        return linear


def _per_exit(head: HeadChoice, exits: int) -> list[str | HeadFactory]:
    if isinstance(head, str) or callable(head):
        return [head] * exits
    if len(head) != exits:
        raise BadInput(f"{len(head)} heads for {exits} exits before the end: give one per exit, or one for all")
    return list(head)


def _check_network(backbone: Any, after: Any) -> None:
    """Raise if the first argument is not a network, and say whether the second one is."""
    if not isinstance(backbone, nn.Module):
        order = "the arguments are in another order" if isinstance(after, nn.Module) else "the network comes first"
        kind = f"a {type(backbone).__name__} is not a network"
        raise BadInput(f"{kind}, {order}: write attach_heads(network, after, example=...)")


def _placed(
    backbone: nn.Module, inputs: Inputs, after: str | int | Sequence[str], head_flops: HeadFlops
) -> tuple[list[str], list[nn.Module]]:
    """Return where exits are placed, and the stages: as many as were asked for, or fewer, with a warning."""
    asked = isinstance(after, int)
    count = after if isinstance(after, int) else EXITS
    names, stages = cut_evenly(backbone, inputs, count, allow_fewer=True, allow_crowded=asked, head_flops=head_flops)
    if asked and len(names) < count:
        placed = f"{len(names)} placed, after {', '.join(names)}"
        warnings.warn(f"{after} exits were asked for and {placed}: there are no more places that pay", stacklevel=3)
    return names, stages


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


def _check_task(last: nn.Module, logits: Tensor) -> None:
    """Raise if the network gives every class a probability of its own; warn if it gives probabilities of classes."""
    if _ends_in_sigmoid(last):
        raise BadInput(
            "the network ends in a sigmoid, which gives every class a probability of its own, as where several labels"
            " of a sample are right, and exits choose one class: leave the sigmoid out if one class is right"
        )
    if are_probabilities(logits):
        warnings.warn(
            "the network gives probabilities, not logits: leave its softmax out, or give logits=torch.log, or losses"
            " and scores are those of a softmax of a softmax",
            stacklevel=3,
        )


def _ends_in_sigmoid(stage: nn.Module) -> bool:
    """Check what the last call of a stage is, also of one inside the last module that it calls."""
    if not isinstance(stage, Stage):
        return False
    node = next(iter(stage._graphs[0].output_node().all_input_nodes), None)
    target = getattr(node and node.target, "function", node and node.target)  # under torch.autocast
    if target is operator.call and node is not None:
        target = getattr(node.args[0], "target", None)
    elif node is None or node.op != "call_module":
        return target in ("sigmoid", torch.sigmoid, nn.functional.sigmoid, Tensor.sigmoid)
    module: nn.Module | None = stage.get_submodule(str(target))
    while isinstance(module, nn.Sequential):
        module = module[-1] if len(module) else None
    return isinstance(module, nn.Sigmoid)


class Features(NamedTuple):
    """What is carried past one exit, and what is known about its axes."""

    exit: str
    carried: Carried
    channels_last: bool | None  # None where nothing says
    masks: Masks

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the features of one sample."""
        return tuple(self.carried[0].shape[1:])


def _fitted(kind: str | HeadFactory, features: Features, num_classes: int) -> nn.Module:
    """Return a head for what is carried past this exit, on its device and in its dtype."""
    first = features.carried[0]
    if not first.is_floating_point() or first.ndim < 2:
        raise BadInput(
            f"the output of {features.exit!r} is {first.dtype} of shape {tuple(first.shape)}, without features for a"
            " head: put the exit after another module"
        )
    if kind in HEADS or kind == "auto":
        head = _named_head(str(kind), features, num_classes)
    else:
        head = make_head(kind, features.shape, num_classes)
    head.to(first.device, first.dtype)
    logits = checked_read(head, features.carried, features.exit)
    if tuple(logits.shape) != (len(first), num_classes):
        raise BadInput(
            f"the head at {features.exit!r} gives {tuple(logits.shape)} for {len(first)} samples and {num_classes}"
            " classes: let it give one logit per sample and class"
        )
    return head


def _named_head(kind: str, features: Features, num_classes: int) -> nn.Module:
    """Return a head of a named kind, whose logits of a sample do not depend on padding."""
    shape, last, masks = features.shape, features.channels_last, features.masks
    if last is None and kind != "flatten_linear":
        raise BadInput(
            f"nothing says which axis of the features of shape {shape} after {features.exit!r} is the channels: give"
            " attach_heads channels='first' for (channels, ...) or channels='last' for (..., channels)"
        )
    if len(shape) != 2:
        return make_head(kind, shape, num_classes, channels_last=last)
    if unknown := [name for name in masks.unknown if masks.inputs[name].shape[1] in shape]:
        raise BadInput(
            f"{unknown[0]!r} may be a mask of the features of shape {shape} after {features.exit!r}: say what 1 means,"
            f" mask={{{unknown[0]!r}: 'tokens'}} or mask={{{unknown[0]!r}: 'padding'}}, or mask={{}} if it is none"
        )
    if masks.place is None:
        return make_head(kind, shape, num_classes, channels_last=last)
    if kind not in ("auto", "token") or not last:
        raise BadInput(
            f"head {kind!r} would read the padding of features of shape {shape} after {features.exit!r} too: use"
            " head='token' on (tokens, channels), or a function of your own"
        )
    meaning = masks.of(features.carried[0], features.carried[1:])
    return TokenHead(shape, num_classes, mask=meaning, pooling="mean" if meaning else "class")  # the first is a token
