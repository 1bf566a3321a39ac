"""Inputs are compared with what the network takes before it runs, so that a wrong shape gets a sentence."""

from collections.abc import Sequence
from typing import Any

from alight.data.preprocess import InputSpec, TensorSpec
from alight.errors import BadInput

CHANNELS_FIRST = "x.transpose(0, 3, 1, 2) of an array, x.permute(0, 3, 1, 2) of a tensor"


def check_shapes(arrays: Sequence[Any], spec: InputSpec) -> None:
    """Raise unless the arrays have the shapes that the network takes; sizes that were proven to be free may differ.

    >>> import numpy as np
    >>> check_shapes([np.zeros((4, 2))], InputSpec((TensorSpec("numbers", (None, 3), "float32"),)))
    Traceback (most recent call last):
    alight.errors.BadInput: samples of 2 numbers, and the network takes numbers of shape (samples, 3), float32: give 3
    numbers for each
    """
    for array, own in zip(arrays, spec.accepted, strict=False):
        if not own.fits(array.shape):
            raise BadInput(_misfit(tuple(array.shape), own))


def _misfit(shape: tuple[int, ...], own: TensorSpec) -> str:
    """Return what is wrong with a shape, and what to do."""
    expected = f"and the network takes {own}"
    if own.fits((1, *shape)):
        return f"one sample of shape {shape}, {expected}: give a batch, x[None] of one sample"
    if _is_channels_last(shape, own):
        return f"images of shape {shape} with their channels last, {expected}: put them first, {CHANNELS_FIRST}"
    if _is_channels_last((1, *shape), own):
        first = f"x.transpose(2, 0, 1)[None] has shape {(1, shape[2], *shape[:2])}"
        return f"one image of shape {shape} with its channels last, {expected}: give a batch, channels first ({first})"
    if len(shape) == 3 and own.fits((shape[0], 1, *shape[1:])):
        return f"grey images of shape {shape} without channels, {expected}: give them one, x[:, None]"
    if len(shape) != len(own.shape):
        return f"an input of shape {shape}, {expected}: give {len(own.shape)} axes, the first is the samples"
    if len(shape) == 2:
        return f"samples of {shape[1]} numbers, {expected}: give {own.shape[1]} numbers for each"
    if len(shape) == 4 and own.shape[1] not in (None, shape[1]):
        remedy = "convert grey to RGB, or RGB to grey" if {own.shape[1], shape[1]} == {1, 3} else "give as many"
        return f"images of {shape[1]} channels (shape {shape}), {expected}: {remedy}, or attach heads with such images"
    return f"an input of shape {shape}, {expected}: resize it, or attach heads with an example of this size"


def _is_channels_last(shape: Sequence[int], own: TensorSpec) -> bool:
    return len(shape) == 4 and own.fits((shape[0], shape[3], shape[1], shape[2]))
