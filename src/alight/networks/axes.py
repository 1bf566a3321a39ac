"""Which axes of features are positions in space or time, and which one is the channels.

Positions are axes that grow when the network is given larger inputs. Where it takes no other size, its modules say what
they take for channels.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from alight.cutting.calls import walk
from alight.cutting.proof import Axes, axes_of_one_size, resized
from alight.cutting.running import Inputs, in_mode
from alight.cutting.tracing import on_meta
from alight.errors import BadInput
from alight.networks.heads import Head

CHANNELS_FIRST = (_ConvNd, _NormBase, nn.GroupNorm)
CHANNELS_LAST = (nn.Linear, nn.Embedding, nn.RNNBase, nn.MultiheadAttention)
NORMS = (nn.LayerNorm, nn.RMSNorm)

Shape = tuple[int, ...]


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
