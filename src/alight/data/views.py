"""One sample for several networks: pixels or texts are kept once, and become what each of the networks takes."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, Literal

import numpy as np

from alight.data.preprocess import InputSpec, Normalisation, TensorSpec, is_tensor
from alight.data.tokens import IDS, MASK, library, texts_for
from alight.errors import BadInput

Kind = Literal["same", "pixels", "texts"]  # what a cascade keeps of a sample


class Utf8:
    """Texts as their bytes, of which every network makes its own tokens; shorter ones end in zeros.

    >>> Utf8()(["a", "bc"])["input_ids"]
    array([[97,  0],
           [98, 99]], dtype=uint8)
    """

    model_max_length, pad_token_id, padding_side = 2**31, 0, "right"

    def __call__(self, texts: Sequence[str], **_: Any) -> dict[str, np.ndarray]:
        """Return bytes as ids; nothing is truncated, which is left to the tokenizers of the networks."""
        encoded = [text.replace("\0", " ").encode() for text in texts]
        width = max(1, *map(len, encoded))
        ids = np.frombuffer(b"".join(each.ljust(width, b"\0") for each in encoded), np.uint8).reshape(-1, width)
        return {IDS: ids.copy(), MASK: np.ones(ids.shape, np.int64)}


@dataclass(frozen=True)
class View:
    """How a sample of a cascade becomes the input of one network.

    The "same" inputs are handed on. Of "pixels", bytes with their channels first, the middle is cut out, a share `crop`
    of each side, resized to the network's size and normalised as it says. "texts" become its own tokens.

    >>> spec = InputSpec((TensorSpec("images", (None, 1, 1, 1), "uint8"),))
    >>> View("pixels", spec, crop=0.5)((np.arange(16, dtype=np.uint8).reshape(1, 1, 4, 4),))[0].tolist()
    [[[[8]]]]
    """

    kind: Kind
    spec: InputSpec  # what the network takes
    crop: float = 1.0
    bicubic: bool = False  # the filter that resizes, instead of the bilinear one

    def __call__(self, kept: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what is kept of a batch as the network takes it; tensors stay tensors, on their device."""
        if self.kind == "same":
            return kept
        if self.kind == "texts":
            texts = [bytes(row).rstrip(b"\0").decode() for row in np.asarray(kept[0])]
            return tuple(texts_for(self.spec, "the cascade")(texts).values())
        assert self.spec.image_shape is not None  # as `common_inputs` has checked
        _, height, width = self.spec.image_shape
        return (_scaled(_resized(_middle(kept[0], self.crop), height, width, self.bicubic), self.spec),)


def common_inputs(
    specs: Sequence[InputSpec], crops: Sequence[float], names: Sequence[str], image_size: Sequence[int] = ()
) -> tuple[Kind, InputSpec]:
    """Return what a cascade of networks keeps of a sample, and what it takes: as all of them do, or pixels, or texts.

    Pixels are kept at a height and width that each network can cut its own out of, or at `image_size`.

    >>> small, large = (InputSpec((TensorSpec("images", (None, 3, size, size), "uint8"),)) for size in (8, 12))
    >>> kind, spec = common_inputs([small, large], [1.0, 0.75], ["small", "large"])
    >>> kind, spec.image_shape
    ('pixels', (3, 16, 16))
    """
    terms: dict[str, Any] = {"num_classes": _number_of_classes(specs, names), "classes": _class_names(specs, names)}
    if all(_take_the_same(*pair) for pair in product(specs, specs)) and {*crops} == {1.0} and not image_size:
        return "same", replace(min(specs, key=_free_sizes), **terms)
    shapes = [spec.image_shape for spec in specs if spec.image_shape is not None and spec.takes_pictures]
    if len(shapes) == len(specs) and len({shape[0] for shape in shapes}) == 1:
        pixels = TensorSpec("images", (None, shapes[0][0], *(image_size or _fitting(shapes, crops))), "uint8")
        return "pixels", InputSpec((pixels,), **terms)
    if all(spec.takes_texts and spec.tokenizer is not None for spec in specs):
        ids = TensorSpec(IDS, (None, None), "uint8")
        return "texts", InputSpec((ids,), (IDS,), tokenizer=Utf8(), **terms)
    raise BadInput(
        f"the networks of a cascade take different inputs ({_listed(specs, names)}), and nothing says how a sample"
        " becomes each of them: give images with the normalisation of every network, texts with their tokenizers, or"
        " networks that take the same"
    )


def _free_sizes(spec: InputSpec) -> int:
    return sum(size is None for each in spec.tensors for size in each.shape)


def _listed(specs: Sequence[InputSpec], names: Sequence[str]) -> str:
    """Return what each network takes, as text."""
    tensors = ("; ".join(map(str, spec.tensors)) or "unknown" for spec in specs)
    return ", ".join(f"{name} {each}" for name, each in zip(names, tensors, strict=True))


def _fitting(shapes: Sequence[tuple[int, ...]], crops: Sequence[float]) -> list[int]:
    """Return the least height and width that each network can cut its own out of."""
    return [max(round(shape[axis] / crop) for shape, crop in zip(shapes, crops, strict=True)) for axis in (1, 2)]


def _number_of_classes(specs: Sequence[InputSpec], names: Sequence[str]) -> int | None:
    counts = {name: spec.num_classes for name, spec in zip(names, specs, strict=True) if spec.num_classes}
    if len({*counts.values()}) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise BadInput(
            f"the networks of a cascade have different numbers of classes ({listed}): leave out a class that only some"
            " have, such as a background before the others, with Member(network, skip_classes=1)"
        )
    return next(iter(counts.values()), None)


def _class_names(specs: Sequence[InputSpec], names: Sequence[str]) -> tuple[str, ...]:
    known = {name: spec.classes for name, spec in zip(names, specs, strict=True) if spec.classes}
    if len({*known.values()}) > 1:
        raise BadInput(f"{' and '.join(known)} name their classes differently: let all number the same classes")
    return next(iter(known.values()), ())


def _take_the_same(one: InputSpec, other: InputSpec) -> bool:
    """Return whether what the one takes is what the other takes; a size of None is any."""
    if one.names != other.names or one.normalisation != other.normalisation or one.tokenizer != other.tokenizer:
        return False
    if len(one.tensors) != len(other.tensors):
        return False
    return all(
        first.dtype == second.dtype
        and len(first.shape) == len(second.shape)
        and all(None in pair or pair[0] == pair[1] for pair in zip(first.shape, second.shape, strict=True))
        for first, second in zip(one.tensors, other.tensors, strict=True)
    )


def _middle(pixels: Any, crop: float) -> Any:
    """Return the middle of images, this share of each side."""
    height, width = (max(1, round(crop * side)) for side in pixels.shape[2:])
    top, left = (pixels.shape[2] - height) // 2, (pixels.shape[3] - width) // 2
    return pixels[:, :, top : top + height, left : left + width]


def _resized(pixels: Any, height: int, width: int, bicubic: bool) -> Any:
    """Return images of this size, as floats in 0..255 if they had another; arrays and tensors agree but for rounding.

    Filters widen where they shrink an image, and nothing is rounded to bytes.
    """
    if tuple(pixels.shape[2:]) == (height, width):
        return pixels
    if is_tensor(pixels):
        resize = sys.modules["torch"].nn.functional.interpolate
        mode = "bicubic" if bicubic else "bilinear"
        made = resize(pixels.float(), (height, width), mode=mode, antialias=True, align_corners=False)
        return made.clamp_(0, 255)  # which a bicubic filter may leave
    image = library("PIL.Image", "pillow")
    made = np.empty((*pixels.shape[:2], height, width), np.float32)
    for row, channel in np.ndindex(*pixels.shape[:2]):
        plane = image.fromarray(pixels[row, channel].astype(np.float32))
        made[row, channel] = plane.resize((width, height), resample=3 if bicubic else 2)
    return np.clip(made, 0, 255, out=made)


def _scaled(pixels: Any, spec: InputSpec) -> Any:
    """Return numbers in 0..255 normalised as the network says, or as bytes if it takes these."""
    if not spec.takes_floats:
        if "uint8" in str(pixels.dtype):
            return pixels
        return pixels.round().byte() if is_tensor(pixels) else np.rint(pixels).astype(np.uint8)
    assert spec.normalisation is not None  # as `common_inputs` has checked
    mean, std = _tensors(spec.normalisation, pixels.device) if is_tensor(pixels) else spec.normalisation.by_channel
    return (pixels / np.float32(255) - mean) / std  # in this order, as a network alone gets its images


@lru_cache(maxsize=64)
def _tensors(normalisation: Normalisation, device: Any) -> list[Any]:
    """Return mean and std on a device, copied there once: the host waits for such a copy, a graph does not hold it."""
    return [sys.modules["torch"].from_numpy(each).to(device) for each in normalisation.by_channel]
