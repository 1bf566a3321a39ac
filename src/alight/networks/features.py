"""What a head may read: which axis of features is the channels, and which tokens an input says to be padding.

Other axes are positions in space or time, which grow when the network is given larger inputs. Where it takes no other
size, its modules say what they take for channels. A mask is known by its name, or stated.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from alight.cutting.calls import walk
from alight.cutting.chain import is_close
from alight.cutting.proof import Axes, axes_of_one_size, resized
from alight.cutting.running import Inputs, in_mode, same_bits
from alight.cutting.tracing import on_meta
from alight.data.tokens import IDS, SEGMENTS, Meaning, mask_meaning
from alight.errors import BadInput
from alight.networks.heads import Head

CHANNELS_FIRST = (_ConvNd, _NormBase, nn.GroupNorm)
CHANNELS_LAST = (nn.Linear, nn.Embedding, nn.RNNBase, nn.MultiheadAttention)
NORMS = (nn.LayerNorm, nn.RMSNorm)
HIDDEN: tuple[Callable[[Tensor], Tensor], ...] = (  # which of the tokens, by their numbers, a mask hides in a trial
    lambda steps: steps >= len(steps) // 2,
    lambda steps: steps % 2 == 0,
    lambda steps: steps % 2 == 1,
)

Shape = tuple[int, ...]
Batch = tuple[Tensor, ...]


class LayerCall(NamedTuple):
    """One call of a layer that knows where its channels are, with the shapes of its first input and output."""

    layer: nn.Module
    taken: Shape
    made: Shape


class StageRun(NamedTuple):
    """What one stage returned for the example, and the layers that it called."""

    carried: tuple[Tensor, ...]
    calls: list[LayerCall]


def run_stages(stages: Sequence[nn.Module], batch: tuple[Tensor, ...]) -> list[StageRun]:
    """Run stages one after the other, each with what the one before returned."""
    runs = []
    for stage in stages:
        with _layer_calls(stage) as calls:
            made = stage(*batch)
        batch = made if isinstance(made, tuple) else (made,)
        runs.append(StageRun(batch, calls))
    return runs


def are_channels_last(stages: Sequence[nn.Module], runs: Sequence[StageRun], inputs: Inputs) -> list[bool | None]:
    """Return for each exit before the end whether its features are (batch, ..., channels); None where nothing says.

    Features (batch, channels) are both, and said to be (batch, channels, ...).
    """
    shapes = [tuple(run.carried[0].shape) for run in runs[:-1]]
    candidates = [{*range(1, len(shape))} for shape in shapes]  # axes that may be the channels
    for found in _at_other_sizes(stages[:-1], inputs, candidates):
        for axes, shape, other in zip(candidates, shapes, found, strict=False):
            if len(other) == len(shape):
                axes.difference_update(axis for axis, size in enumerate(other) if size != shape[axis])
    found_last = []
    for index, (shape, axes) in enumerate(zip(shapes, candidates, strict=True)):
        axis = axes.pop() if len(axes) == 1 else _axis_by_layers(shape, axes, *runs[index : index + 2])
        known = {1: False, len(shape) - 1: len(shape) > 2}
        found_last.append(None if axis is None else known.get(axis))
    return found_last


def check_axes(stages: Sequence[nn.Module], heads: Sequence[nn.Module], exits: Sequence[str], inputs: Inputs) -> None:
    """Raise if a head takes another axis for the channels than the network has, or one that nothing says."""
    with in_mode(*stages, training=False):
        runs = run_stages(stages, inputs.tensors)
        found = are_channels_last(stages, runs, inputs)
    for head, name, run, last in zip(heads, exits, runs, found, strict=False):
        shape = tuple(run.carried[0].shape[1:])
        if isinstance(head, Head) and len(shape) > 1 and head.channels_last not in (None, last):
            own, known = (f"channels {'last' if each else 'first'}" for each in (head.channels_last, last))
            raise BadInput(
                f"the head at {name!r} reads features of shape {shape} with {own}, and the network has"
                f" {'no axis that is known to be the channels' if last is None else known}: say channels= when you"
                " attach heads"
            )


def _at_other_sizes(
    stages: Sequence[nn.Module], inputs: Inputs, candidates: Sequence[set[int]]
) -> Iterator[list[Shape]]:
    """Yield the shapes of features for inputs of other sizes, of as many exits as take them, until all is known."""
    if all(len(axes) < 2 for axes in candidates):
        return
    try:
        copies = on_meta(nn.ModuleList(stages)).eval()
    except Exception:  # of a network that cannot be copied
        return
    for places, own in (*axes_of_one_size(inputs, alone=False), *axes_of_one_size(inputs)):
        for size in (2 * own, own // 2):
            if all(len(axes) < 2 for axes in candidates):
                return
            if found := _shapes_at(copies, inputs, places, size):
                yield found
                break


def _shapes_at(stages: Any, inputs: Inputs, places: Axes, size: int) -> list[Shape]:
    """Return the shapes of features where some axes of the inputs have another size, until a stage fails."""
    carried: Any = resized(tuple(tensor.to("meta") for tensor in inputs.tensors), [(places, size)])
    found = []
    try:
        with in_mode(stages, training=False):
            for stage in stages:
                made = stage.forward(*carried)  # without its hooks, which refuse other sizes
                carried = made if isinstance(made, tuple) else (made,)
                if len(carried[0]) != len(inputs.tensors[0]):
                    break
                found.append(tuple(carried[0].shape))
    except Exception:  # whatever a network says to sizes that it does not take
        pass
    return found


def _axis_by_layers(shape: Shape, axes: set[int], run: StageRun, following: StageRun) -> int | None:
    """Return the axis that the layers before and behind features have for channels, where those that say so agree."""
    before = [(call.layer, call.made) for call in reversed(run.calls)]
    behind = [(call.layer, call.taken) for call in following.calls if not isinstance(call.layer, nn.Embedding)]
    found = {_axis_by_nearest(shape, calls) for calls in (before, behind) if calls} - {None}
    return found.pop() if len(found) == 1 and (not axes or found <= axes) else None


def _axis_by_nearest(shape: Shape, calls: Sequence[tuple[nn.Module, Shape]]) -> int | None:
    """Return the axis by the nearest layer that has features of this shape, or by how many channels the nearest has."""
    same = (shape, (shape[1], shape[0], *shape[2:]))  # the batch may come second in the network
    layer, own = next((call for call in calls if call[1] in same), calls[0])
    axis = _channel_axis(layer, own)
    if axis is None or own in same:
        return axis
    places = [place for place in range(1, len(shape)) if shape[place] == own[axis]]
    return places[0] if len(places) == 1 else None


def _channel_axis(layer: nn.Module, shape: Shape) -> int | None:
    if isinstance(layer, CHANNELS_FIRST):
        return 1
    if isinstance(layer, CHANNELS_LAST) or (type(layer) in NORMS and shape[-1:] == layer.normalized_shape):
        return len(shape) - 1
    widths = {weight.numel() for weight in _vectors(layer)}  # one number per channel
    places = [axis for axis in range(1, len(shape)) if shape[axis] in widths]
    return places[0] if len(places) == 1 else None


def _vectors(layer: nn.Module) -> list[Tensor]:
    return [weight for weight in layer.parameters(recurse=False) if weight.ndim == 1]


@contextmanager
def _layer_calls(stage: nn.Module) -> Iterator[list[LayerCall]]:
    """Note calls of layers that know where their channels are, in the order in which they return."""
    calls: list[LayerCall] = []

    def note(layer: nn.Module, taken: Any, made: Any) -> None:
        shapes = [[tuple(each.shape) for each in walk(part) if isinstance(each, Tensor)] for part in (taken, made)]
        if all(shapes):
            calls.append(LayerCall(layer, shapes[0][0], shapes[1][0]))

    known = (*CHANNELS_FIRST, *CHANNELS_LAST, *NORMS)
    modules = [module for module in stage.modules() if not isinstance(module, torch.jit.ScriptModule)]
    layers = [layer for layer in modules if isinstance(layer, known) or _vectors(layer)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


class MaskTrial(NamedTuple):
    """A batch with a mask, and with other tokens where it hides and where it shows; which of these are read."""

    batches: list[Batch]
    reads: list[bool]


class Masks:
    """The mask among the inputs of a network, and others that look like one."""

    place: int | None = None  # among the inputs
    meaning: Meaning | None = None  # of 1 or True

    def __init__(self, backbone: nn.Module, inputs: Inputs, stated: Mapping[str, Meaning] | None) -> None:
        names = argument_names(backbone, inputs)
        self.inputs = dict(zip(names, inputs.tensors, strict=True))
        self.unknown: list[str] = []  # inputs that may be masks
        known = {name: meaning for name in names if (meaning := mask_meaning(name))} if stated is None else dict(stated)
        self._check(known)
        for name, meaning in known.items():
            self.place, self.meaning = names.index(name), meaning
        if stated is None and not known and len(names) > 1:
            self.unknown = [name for name in names if name not in (IDS, SEGMENTS) and _is_flags(self.inputs[name])]
        inputs.mask = self.place
        if self.place is not None:
            self._check_meaning(backbone, inputs, names[self.place])

    def _check_meaning(self, backbone: nn.Module, inputs: Inputs, name: str) -> None:
        """Raise if the network reads what the mask hides, and does not read what it shows."""
        trial = self._trial(backbone, inputs, name)
        if trial is not None and trial.reads == [True, False]:
            other = "padding" if self.meaning == "tokens" else "tokens"
            raise BadInput(
                f"where {name!r} is 1 it means {other}, as the network reads it, not {self.meaning}: say so,"
                f" mask={{{name!r}: {other!r}}}"
            )

    def check_exits(
        self, network: nn.Module, inputs: Inputs, run: Callable[[Batch], list[Tensor]], exits: Sequence[str]
    ) -> None:
        """Raise if the logits of an exit depend on tokens that a mask hides from the network."""
        for mask in self.unknown if self.place is None else [[*self.inputs][self.place]]:
            trial = self._trial(network, inputs, mask)
            if trial is None:
                continue
            pairs = zip(exits, run(trial.batches[0]), run(trial.batches[1 + trial.reads.index(False)]), strict=True)
            if moved := [exit_name for exit_name, one, other in pairs if not is_close(one, other)]:
                raise BadInput(
                    f"the logits at {moved[0]!r} depend on tokens that {mask!r} hides from the network: carry the mask,"
                    f" and attach a head that reads it, with what 1 means, mask={{{mask!r}: ...}}"
                )

    def _trial(self, network: nn.Module, inputs: Inputs, mask: str) -> MaskTrial | None:
        """Return batches of which the network reads either the tokens that the mask hides or those that it shows.

        The end is hidden, or every second token: a decoder that classifies by its last token, and looks back at a few
        alone, sees none that is shown if the end is hidden. What says that hidden tokens are not read counts.
        """
        found = []
        for pattern in HIDDEN:
            try:
                batches = self._batches(inputs, mask, pattern)
                with in_mode(network, training=False):
                    first, *others = [inputs.run(network, batch) for batch in batches]
                reads = [not same_bits(first, other) for other in others]
            except Exception:  # of a network that does not take such batches
                continue
            found.append(MaskTrial(batches, reads))
            if reads == [False, True]:
                return found[-1]
        return next((trial for trial in found if trial.reads == [True, False]), None)

    def _batches(self, inputs: Inputs, mask: str, pattern: Callable[[Tensor], Tensor]) -> list[Batch]:
        """Return a batch whose mask hides these of the tokens, the same with others of these, and with others shown."""
        place, batch = [*self.inputs].index(mask), [*inputs.of_size(2)]
        flags = batch[place]
        if flags.ndim != 2 or flags.shape[1] < 2 or flags.is_floating_point():
            raise BadInput(f"{mask!r} of shape {tuple(flags.shape)} is not one flag per token: give it so")
        hidden = pattern(torch.arange(flags.shape[1], device=flags.device)).expand_as(flags)
        batch[place] = (hidden if self.meaning == "padding" else ~hidden).to(flags.dtype)
        return [tuple(batch), *(_changed(batch, places, place) for places in (hidden, ~hidden))]

    def of(self, features: Tensor, others: Sequence[Tensor]) -> Meaning | None:
        """Return what 1 means in the mask that is carried right behind tokens, None where there is none."""
        if self.place is None or not others or features.ndim != 3:
            return None
        given = [*self.inputs.values()][self.place]
        return self.meaning if given.shape == features.shape[:2] and torch.equal(given, others[0]) else None

    def _check(self, known: Mapping[str, Meaning]) -> None:
        """Raise unless there is at most one mask, among the inputs, of a known meaning that its content has."""
        if len(known) > 1 or not known.keys() <= self.inputs.keys() or not {*known.values()} <= {*get_args(Meaning)}:
            raise BadInput(
                f"masks {dict(known)} of inputs {list(self.inputs)}: say which is the one of the features, and what 1"
                " means in it, as in mask={'pad': 'padding'} or mask={'valid': 'tokens'}"
            )
        for name in known:
            given = self.inputs[name]
            if known[name] == "tokens" and given.is_floating_point() and not (_is_binary(given) and given.any()):
                raise BadInput(f"{name!r} is not 1 for tokens and 0 for padding: give it so, or say mask={{}}")


def _changed(batch: Sequence[Tensor], places: Tensor, mask: int) -> tuple[Tensor, ...]:
    """Return inputs that differ at some tokens."""
    changed = [tensor.clone() for tensor in batch]
    for index, tensor in enumerate(changed):
        if index != mask and tensor.shape[:2] == places.shape:
            other = tensor.roll(1, 0) if not tensor.is_floating_point() else tensor + 1
            tensor[places] = other[places]
    return tuple(changed)


def masks_left_out(network: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the masks that the network's code takes besides inputs of these names."""
    return [name for name in signature(network.forward).parameters if mask_meaning(name) and name not in names]


def _is_flags(tensor: Tensor) -> bool:
    """Check for one whole number per sample and token, 0 or 1."""
    return tensor.ndim == 2 and not tensor.is_floating_point() and _is_binary(tensor)


def _is_binary(tensor: Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all())


def argument_names(backbone: nn.Module, inputs: Inputs) -> Sequence[str]:
    """Return the names of inputs; of several without names those that the network's code has for them."""
    if inputs.names or len(inputs.tensors) < 2:
        return tuple(inputs.arguments)
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, each in signature(backbone.forward).parameters.items() if each.kind in kinds]
    return tuple(names[: len(inputs.tensors)] if len(names) >= len(inputs.tensors) else inputs.arguments)
