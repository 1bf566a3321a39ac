"""What a network takes, and how pictures and pixels become that: at its size, in 0..1, normalised.

Floats are what the network takes, whatever they come from; pictures and bytes alone are normalised. A network in
PyTorch and an exported one both describe themselves as plain data, and one pipeline in NumPy serves both, so that they
get the same inputs, bit for bit. Inputs are compared with what the network takes before it runs, so that a wrong shape
gets a sentence.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from alight.errors import BadInput

SHIFT = 8  # augmented images are moved by up to an eighth of their size, as is usual for 32 x 32

UNKNOWN = (
    "and how the network normalises them is unknown: give Normalisation(mean, std), as preprocess= of fit or"
    " normalisation= of attach_heads and export_model (--mean and --std of the commands), mean 0 and std 1 where it"
    " takes pixels in 0..1; or give floats as the network takes them"
)
BITS, PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0  # tags of TIFF, and a value of the second
ORIENTATION = 274  # tag of EXIF

Sample = tuple[Any, int | None]  # an image or a text, and its class
CHANNELS_FIRST = "x.transpose(0, 3, 1, 2) of an array, x.permute(0, 3, 1, 2) of a tensor"


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, shape and dtype; None stands for a size that may differ, as that of the batch, the first."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether an array of this shape is such a tensor.

        >>> TensorSpec("images", (None, 3, 32, 32), "float32").fits((5, 3, 32, 32))
        True
        """
        return len(shape) == len(self.shape) and all(
            own in (None, size) for own, size in zip(self.shape, shape, strict=True)
        )

    def freed(self, axes: Iterable[int]) -> "TensorSpec":
        """Return such a tensor whose sizes along these axes may differ.

        >>> print(TensorSpec("images", (None, 3, 32, 32), "float32").freed([2, 3]))
        images of shape (samples, 3, any, any), float32
        """
        free = set(axes)
        return TensorSpec(
            self.name, tuple(None if axis in free else size for axis, size in enumerate(self.shape)), self.dtype
        )

    def __str__(self) -> str:
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape[1:])
        return f"{self.name} of shape (samples{sizes and ', ' + sizes}), {self.dtype}"


@dataclass(frozen=True)
class Normalisation:
    """What is subtracted from every channel of an image in 0..1, and what the difference is divided by.

    `Normalisation((0, 0, 0), (1, 1, 1))` says that a network takes images in 0..1 unchanged; None, where a
    normalisation may be, says that it is unknown: such a network takes floats alone, no pictures and no bytes.

    >>> Normalisation(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)).mean
    (0.5, 0.5, 0.5)
    """

    mean: tuple[float, ...]  # of each channel
    std: tuple[float, ...]  # of each channel

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        usable = np.isfinite([*self.mean, *self.std]).all() and min(self.std, default=0.0) > 0
        if not usable or len(self.mean) != len(self.std):
            raise BadInput(
                f"normalisation by mean {self.mean} and std {self.std}: give a finite mean and a positive std for each"
                " channel"
            )

    @cached_property
    def by_channel(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and std in single precision, each (channels, 1, 1)."""
        mean, std = (np.array(each, dtype=np.float32)[:, None, None] for each in (self.mean, self.std))
        return mean, std


@dataclass(frozen=True)
class InputSpec:
    """The tensors that a network takes, how its images are normalised, and the classes that labels may name.

    >>> InputSpec((TensorSpec("images", (None, 3, 32, 32), "float32"),)).image_shape
    (3, 32, 32)
    """

    tensors: tuple[TensorSpec, ...] = ()  # () where the network does not say, as one that was built by hand
    names: tuple[str, ...] = ()  # of a network whose input is a dict of tensors
    normalisation: Normalisation | None = None  # of its images; None where it is unknown
    classes: tuple[str, ...] = ()  # their names, where known
    num_classes: int | None = None
    tokenizer: Any = None  # of its texts: the folder of one, or a tokenizer of transformers
    token_multiple: int = field(default=1, compare=False)  # of which padded texts have as many tokens, so few lengths
    free: tuple[tuple[int, ...], ...] = field(default=(), compare=False)  # axes of each tensor that take any size
    loaded: dict[int, Any] = field(init=False, repr=False, compare=False, default_factory=dict)  # tokenizer, by length

    @cached_property
    def accepted(self) -> tuple[TensorSpec, ...]:
        """The tensors with None for every size that may differ from that of pictures which are made for the network."""
        return tuple(map(TensorSpec.freed, self.tensors, self.free)) if self.free else self.tensors

    @cached_property
    def known_kinds(self) -> set[Any]:
        """Shapes, and of several tensors dtypes, of samples that the network takes unchanged: each is checked once."""
        is_float = len(self.tensors) == 1 and self.tensors[0].dtype == "float32"
        return {self.tensors[0].shape[1:]} if is_float else set()

    @cached_property
    def image_shape(self) -> tuple[int, int, int] | None:
        """Channels, height and width of the images that it takes; None of a network that takes none or does not say."""
        shape = self.tensors[0].shape if len(self.tensors) == 1 else ()
        if len(shape) != 4 or None in shape[1:]:
            return None
        channels, height, width = (int(size or 0) for size in shape[1:])
        return channels, height, width

    @property
    def takes_pictures(self) -> bool:
        """Whether pictures and bytes can be made into what it takes: its normalisation is known, or it takes bytes."""
        return self.image_shape is not None and (self.normalisation is not None or not self.takes_floats)

    @cached_property
    def takes_floats(self) -> bool:
        """Whether its first input is of floats."""
        return "float" in self.tensors[0].dtype

    @property
    def takes_texts(self) -> bool:
        """Whether a tokenizer makes its inputs."""
        return "input_ids" in self.names


def image_batch(
    pictures: np.ndarray | Sequence[Any], spec: InputSpec, where: str = "the data", augment: bool = False
) -> np.ndarray:
    """Return pictures (Pillow), pixels (uint8) or floats as one batch: (samples, channels, height, width).

    Pictures are brought to the network's size, they and pixels are normalised; floats are left unchanged. `where` they
    come from is named in errors; `augment` moves and flips them at random. A network that takes bytes gets them
    unchanged.

    >>> tensors = (TensorSpec("images", (None, 1, 1, 2), "float32"),)
    >>> spec = InputSpec(tensors, normalisation=Normalisation((0.5,), (0.5,)))
    >>> image_batch(np.array([[[0, 255]]], dtype=np.uint8), spec)
    array([[[[-1.,  1.]]]], dtype=float32)
    """
    shape = spec.image_shape
    if shape is None:
        raise BadInput(
            f"the network does not take images, and {where} holds some: give what it takes"
            if spec.tensors
            else "the network does not say which images it takes, so pictures cannot be brought to its size: build it"
            " with attach_heads, which keeps an example, or give tensors"
        )
    known = spec.normalisation
    if known and len(known.mean) != shape[0]:
        raise BadInput(
            f"the network normalises {len(known.mean)} channels and takes images of {shape[0]}: attach heads with as"
            " many means and standard deviations as channels"
        )
    if isinstance(pictures, Sequence):
        images = np.concatenate(
            [_normalised(_arranged(_pixels(each, shape)[None], shape, where), spec, where) for each in pictures]
        )
    else:
        pixels = as_array(pictures)
        check_several(pixels.shape, shape)
        images = _normalised(_arranged(pixels, shape, where), spec, where)
    return _augmented(images, known) if augment else images


def check_several(given: tuple[int, ...], shape: tuple[int, int, int]) -> None:
    """Raise if an array of pixels is one image, whose rows would be taken for samples."""
    channels, height, width = shape
    if given in (shape, (height, width, channels)) and not (channels == 1 and given[1:] == (height, width)):
        raise BadInput(f"one image of shape {given}: give a batch, x[None] of one image")


def first_unusable(arrays: Iterable[np.ndarray]) -> int | None:
    """Return the first row that holds NaN, infinity or a negative index, which a network may take in silence.

    >>> first_unusable([np.array([[1, 2], [3, -1]])])
    1
    """
    rows: list[int] = []
    for array in arrays:
        if array.dtype.kind == "f":
            if math.isfinite(np.vdot(array, array)):  # quick, and nearly always; large numbers are looked at again
                continue
            bad = ~np.isfinite(array)
        elif array.dtype.kind == "i" and array.size and array.min() < 0:
            bad = array < 0
        else:
            continue
        rows += np.flatnonzero(bad.reshape(len(array), -1).any(axis=1))[:1].tolist()
    return min(rows, default=None)


def is_picture(value: Any) -> bool:
    """Return whether it is a picture as Pillow makes them."""
    return callable(getattr(value, "convert", None)) and callable(getattr(value, "resize", None))


def is_tensor(value: Any) -> bool:
    """Return whether it is a tensor of torch, which is not imported for the question."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def is_pixels(value: Any, spec: InputSpec) -> bool:
    """Return whether it is an array or tensor of whole numbers for a network that takes images of floats."""
    if spec.image_shape is None or not spec.takes_floats:
        return False
    if is_tensor(value):
        return "int" in str(value.dtype)
    return isinstance(value, np.ndarray) and value.dtype.kind in "iu"


def as_array(values: Any) -> np.ndarray:
    """Return numbers as an array, of a tensor or an array without a copy where that can be."""
    try:
        array = values.numpy(force=True) if is_tensor(values) else np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(
            f"a {type(values).__name__} is not an array of numbers ({error}): give arrays, tensors or pictures"
        ) from error
    if array.dtype.kind not in "biuf":
        raise BadInput(
            f"a {type(values).__name__} of {array.dtype} is not an array of numbers: give arrays, tensors or pictures"
        )
    return array


def flattened(picture: Any) -> Any:
    """Return a picture (Pillow) upright and in 8 bits, grey or RGB, itself if it is: all pictures and files pass here.

    It is turned as its EXIF orientation says, 16 bits become their upper 8, and what is transparent lies over white.
    Of a file with several frames it is the one that the picture is at, the first where it was just opened.

    >>> from PIL import Image
    >>> flattened(Image.new("RGBA", (1, 1), (200, 0, 0, 0))).getpixel((0, 0))
    (255, 255, 255)
    """
    from PIL import Image, ImageOps

    tags, mode = getattr(picture, "tag_v2", {}), picture.mode  # of TIFF, the only format with the exceptions below
    of_16_bits = mode.startswith("I;16") and tags.get(BITS, (16,)) == (16,) and tags.get(PHOTOMETRIC) != WHITE_IS_ZERO
    if mode[0] in "IF" and not of_16_bits:
        low, high = picture.getextrema()
        raise BadInput(
            f"a picture of mode {mode} with numbers from {low:g} to {high:g} does not say which are black and white:"
            " save it in 8 or 16 bits, or give arrays"
        )
    picture.load()
    if picture.getexif().get(ORIENTATION, 1) != 1:  # else it would be copied, and may be large
        picture = ImageOps.exif_transpose(picture)
    if of_16_bits:
        numbers, clear = np.asarray(picture), picture.info.get("transparency")
        picture = Image.fromarray((numbers >> 8).astype(np.uint8))
        if clear is not None:
            picture.putalpha(Image.fromarray(numbers != clear))
    if picture.has_transparency_data:
        picture = picture.convert("LA" if picture.mode == "La" else "RGBA").convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture if picture.mode in ("L", "RGB") else picture.convert("RGB")


def _pixels(picture: Any, shape: tuple[int, int, int]) -> np.ndarray:
    """Return a picture's bytes at the network's size, its shorter side resized and its middle cut out; or an array."""
    if not is_picture(picture):
        return as_array(picture)
    channels, height, width = shape
    picture, mode = flattened(picture), "L" if channels == 1 else "RGB"
    picture = picture if picture.mode == mode else picture.convert(mode)
    scale = max(height / picture.height, width / picture.width)
    if scale != 1:
        size = (max(width, round(scale * picture.width)), max(height, round(scale * picture.height)))
        picture = picture.resize(size, resample=2)  # bilinear
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    return np.asarray(picture.crop((left, top, left + width, top + height)))


def _arranged(images: np.ndarray, shape: tuple[int, int, int], where: str) -> np.ndarray:
    """Return images channels first, of the network's size; channels of floats are not moved."""
    channels, height, width = shape
    if images.shape[1:] == (height, width) and channels == 1:
        images = images[:, None]
    elif images.shape[1:] == (height, width, channels) and images.shape[1:] != shape and images.dtype.kind in "iu":
        images = images.transpose(0, 3, 1, 2)
    if images.shape[1:] != shape:
        raise BadInput(
            f"{where} has images of shape {images.shape[1:]} and the network takes {shape} (channels, height, width):"
            " resize them, or attach heads for this image size"
        )
    return images


def _normalised(images: np.ndarray, spec: InputSpec, where: str) -> np.ndarray:
    """Return pixels as the network takes them and floats in single precision, in a new array."""
    is_bytes, own = images.dtype == np.uint8, np.dtype("float32" if spec.takes_floats else spec.tensors[0].dtype)
    if not (is_bytes or images.dtype.kind == "f" if spec.takes_floats else np.can_cast(images.dtype, own)):
        raise BadInput(f"{where} has images of {images.dtype}: give bytes (uint8), or {own} as the network takes them")
    made = np.array(images, dtype=own, order="C")
    if not (spec.takes_floats and is_bytes):
        return made
    if spec.normalisation is None:
        raise BadInput(f"{where} has pictures or bytes, {UNKNOWN}")
    mean, std = spec.normalisation.by_channel
    made /= np.float32(255)
    made -= mean
    made /= std
    return made


def _augmented(images: np.ndarray, normalisation: Normalisation | None) -> np.ndarray:
    """Return each image moved by a few pixels, flipped or not, by torch's generator; what comes in is black."""
    import torch

    count, channels, height, width = images.shape
    down, right = height // SHIFT, width // SHIFT
    padded = np.zeros((count, channels, height + 2 * down, width + 2 * right), images.dtype)
    if normalisation is not None and images.dtype == np.float32:
        mean, std = normalisation.by_channel
        padded += (0 - mean) / std
    padded[..., down : down + height, right : right + width] = images
    moved = np.empty_like(images)
    for index, image in enumerate(padded):
        top, left = int(torch.randint(2 * down + 1, ())), int(torch.randint(2 * right + 1, ()))
        flipped = bool(torch.rand(()) < 0.5)
        cropped = image[:, top : top + height, left : left + width]
        moved[index] = cropped[..., ::-1] if flipped else cropped
    return moved


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
