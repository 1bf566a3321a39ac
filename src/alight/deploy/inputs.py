"""Inputs as people have them become arrays as an exported network takes them, as its manifest says.

an array                      as it is; bytes (uint8) of images in 0..255 are normalised
a list of pictures or arrays  stacked; pictures (Pillow) are brought to the network's size first
a dict by name, or a tuple    one array per input, as of text: tokens and mask
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from alight.engine.manifest import Described, Manifest
from alight.errors import BadInput

Carried = tuple[np.ndarray, ...]

LABELS = ("labels", "label")  # names of what is no input
SEGMENTS = "token_type_ids"  # all 0 for single texts, as a network takes them to be where none are given


def admit(inputs: Any, manifest: Manifest) -> Carried:
    """One batch as the first stage takes it: contiguous, of one number of samples."""
    first = manifest.inputs[0]
    plain = type(inputs) is np.ndarray and len(manifest.inputs) == 1 and inputs.dtype == first.dtype
    if plain and len(inputs) and first.fits(inputs.shape):  # quickly
        return (np.ascontiguousarray(inputs),)
    parts = _parts(inputs, manifest)
    if len(parts) != len(manifest.inputs):
        raise BadInput(f"{len(parts)} inputs, and the network takes {'; '.join(map(str, manifest.inputs))}")
    carried = tuple(_fitted(part, told) for part, told in zip(parts, manifest.inputs, strict=True))
    sizes = {len(each) for each in carried}
    if len(sizes) != 1 or 0 in sizes:
        raise BadInput(f"inputs of {sorted(sizes)} samples: give arrays of one and the same number, at least 1")
    return carried


def first_unusable(carried: Carried) -> int | None:
    """The first row that holds NaN, infinity or a negative index, which a network may take in silence; None if none."""
    found = [row for each in carried if (row := _first_unusable(each)) is not None]
    return min(found, default=None)


def in_batches(data: Any, manifest: Manifest, batch_size: int) -> Iterator[Any]:
    """Batches of an array, of arrays in a tuple or dict, or of a list of samples; others come in batches already."""
    if isinstance(data, list) and data and isinstance(data[0], tuple) and _is_sample(data[0][0], manifest):
        data = [sample for sample, *_ in data]  # each came with its label
    if isinstance(data, Mapping):
        columns = {name: np.asarray(part) for name, part in data.items()}
        for rows in _slices(columns.values(), batch_size):
            yield {name: part[rows] for name, part in columns.items()}
    elif isinstance(data, tuple) and data and all(hasattr(part, "__array__") for part in data):
        parts = [np.asarray(part) for part in data]
        for rows in _slices(parts, batch_size):
            yield tuple(part[rows] for part in parts)
    elif hasattr(data, "__array__") or (isinstance(data, list) and _is_sample(data[0] if data else None, manifest)):
        for rows in _slices([data], batch_size):
            yield data[rows]
    else:
        yield from data


def without_labels(batch: Any) -> Any:
    """The inputs of a loader's batch: the last of several is the labels if it has one axis, as are those by name."""
    if isinstance(batch, Mapping):
        return {name: part for name, part in batch.items() if name not in LABELS}
    if isinstance(batch, list | tuple) and len(batch) > 1 and np.ndim(batch[-1]) == 1:
        batch = tuple(batch[:-1])
    return batch[0] if isinstance(batch, tuple) and len(batch) == 1 else batch


def _parts(inputs: Any, manifest: Manifest) -> tuple[Any, ...]:
    if isinstance(inputs, Mapping):
        return _by_name(inputs, manifest)
    if isinstance(inputs, list) and inputs and _is_sample(inputs[0], manifest):
        return (_stacked(inputs, manifest),)
    if isinstance(inputs, tuple) or (isinstance(inputs, list) and len(manifest.inputs) > 1):
        return tuple(inputs)
    if is_picture(inputs):
        return (_stacked([inputs], manifest),)
    array = _array(inputs)
    return (normalised(array, manifest) if _wants_pixels(array, manifest) else array,)


def _by_name(inputs: Mapping[str, Any], manifest: Manifest) -> tuple[Any, ...]:
    names = manifest.input_names
    if not names or any(name not in inputs for name in names):
        raise BadInput(f"the batch has {sorted(inputs)}, the network takes {list(names) or str(manifest.inputs[0])}")
    if SEGMENTS in inputs and SEGMENTS not in names and np.any(inputs[SEGMENTS]):
        raise BadInput(f"the batch has pairs of texts ({SEGMENTS}): export a network that takes them")
    return tuple(inputs[name] for name in names)


def _is_sample(value: Any, manifest: Manifest) -> bool:
    """Whether it is one image or one row, not a batch or a part of one."""
    return is_picture(value) or (hasattr(value, "__array__") and np.ndim(value) == len(manifest.inputs[0].shape) - 1)


def is_picture(value: Any) -> bool:
    """Whether it is a picture as Pillow makes them."""
    return callable(getattr(value, "convert", None)) and callable(getattr(value, "resize", None))


def _wants_pixels(array: np.ndarray, manifest: Manifest) -> bool:
    return array.dtype == np.uint8 and manifest.image_shape is not None and manifest.inputs[0].dtype != "uint8"


def _stacked(samples: Sequence[Any], manifest: Manifest) -> np.ndarray:
    if not any(map(is_picture, samples)):
        arrays = [_array(each) for each in samples]
        if len({each.shape for each in arrays}) > 1:
            raise BadInput(f"samples of shapes {sorted({each.shape for each in arrays})}: bring them to one shape")
        whole = np.stack(arrays)
        return normalised(whole, manifest) if _wants_pixels(whole, manifest) else whole
    if (shape := manifest.image_shape) is None:
        raise BadInput("the network does not take images, and pictures were given: give arrays")
    return normalised(
        np.stack([_pixels(each, shape) if is_picture(each) else _array(each) for each in samples]), manifest
    )


def _pixels(picture: Any, shape: tuple[int, int, int]) -> np.ndarray:
    """A picture's bytes at the network's size: its shorter side resized, its middle taken."""
    channels, height, width = shape
    picture = picture.convert("L" if channels == 1 else "RGB")
    scale = max(height / picture.height, width / picture.width)
    if scale != 1:
        size = (max(width, round(scale * picture.width)), max(height, round(scale * picture.height)))
        picture = picture.resize(size, resample=2)  # bilinear
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    pixels = np.asarray(picture.crop((left, top, left + width, top + height)))
    return pixels if pixels.ndim == 3 else pixels[..., None]


def normalised(images: np.ndarray, manifest: Manifest) -> np.ndarray:
    """Images as the network takes them: channels first, in 0..1, less the mean, over the standard deviation."""
    shape = manifest.image_shape
    if shape is None:
        raise BadInput(f"the network takes {manifest.inputs[0]}, and images were given")
    channels, height, width = shape
    if images.shape[1:] == (height, width) and channels == 1:
        images = images[:, None]
    elif images.shape[1:] == (height, width, channels) and images.shape[1:] != shape:
        images = images.transpose(0, 3, 1, 2)
    if images.shape[1:] != shape:
        raise BadInput(
            f"images of shape {images.shape[1:]}, and the network takes {shape} (channels, height, width): resize them"
        )
    pixels = np.ascontiguousarray(images, dtype=np.float32)
    if images.dtype == np.uint8:
        pixels = pixels / np.float32(255)
    elif manifest.mean and not (pixels.min() >= 0 and pixels.max() <= 1):
        raise BadInput(
            f"images from {pixels.min():g} to {pixels.max():g}, and the network normalises ones in 0..1: give bytes"
            " (uint8), or divide them"
        )
    if manifest.mean:
        mean, std = (np.array(each, dtype=np.float32)[:, None, None] for each in (manifest.mean, manifest.std))
        pixels = (pixels - mean) / std
    return pixels


def _fitted(values: Any, told: Described) -> np.ndarray:
    """The array in the dtype that the network takes, if that loses no more than digits."""
    array = _array(values)
    if not told.fits(array.shape):
        raise BadInput(f"an array of shape {array.shape}, and the network takes {told}")
    if array.dtype != told.dtype:
        if not np.can_cast(array.dtype, told.dtype, casting="same_kind"):
            raise BadInput(f"an array of {array.dtype}, and the network takes {told}")
        array = array.astype(told.dtype)
    return np.ascontiguousarray(array)


def _array(values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"a {type(values).__name__} is no array ({error}): give arrays or pictures") from error
    if array.dtype.kind not in "biuf":
        raise BadInput(f"a {type(values).__name__} of {array.dtype} is no array of numbers: give arrays or pictures")
    return array


def _first_unusable(array: np.ndarray) -> int | None:
    if array.dtype.kind == "f":
        if math.isfinite(np.vdot(array, array)):  # quick, and nearly always; large numbers are looked at again
            return None
        bad = ~np.isfinite(array)
    elif array.dtype.kind == "i" and array.size and array.min() < 0:
        bad = array < 0
    else:
        return None
    rows = np.flatnonzero(bad.reshape(len(array), -1).any(axis=1))
    return int(rows[0]) if len(rows) else None


def _slices(parts: Any, size: int) -> Iterator[slice]:
    sizes = [len(part) for part in parts]
    if len(set(sizes)) != 1 or not sizes[0]:
        raise BadInput(f"arrays of {sizes} samples: give as many of each, at least one")
    for start in range(0, sizes[0], size):
        yield slice(start, start + size)
