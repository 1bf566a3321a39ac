"""Images, arrays and texts of a request become samples as the network takes them; what is wrong is told by index."""

import base64
import binascii
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from alight.serve.limits import Limits, Refused
from alight.serve.network import Network, Sample

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # no more decoders than people send pictures in
LETTERS = 1000  # of a text for each token that is read of it
LARGEST = 1e6  # of a number in an array: beyond, networks overflow


def from_pictures(contents: Sequence[bytes], network: Network, limits: Limits) -> list[Sample]:
    """Samples of encoded images."""
    shape = network.image_shape
    if shape is None:
        raise Refused(422, f"this network takes {network.kind}, not images")
    return _each("image", contents, limits, lambda content: network.picture(picture(content, limits.pixels, shape)))


def from_base64(texts: Sequence[str], network: Network, limits: Limits) -> list[Sample]:
    """Samples of images in base64, with or without data:...;base64, before it."""
    return from_pictures(_each("image", texts, limits, _decoded), network, limits)


def from_arrays(arrays: Sequence[Any], network: Network, limits: Limits) -> list[Sample]:
    """Samples of numbers as the network takes them, normalised already."""
    if network.texts:
        raise Refused(422, "this network takes texts, not arrays")
    return _each("array", arrays, limits, lambda values: _array(values, network)[None])


def from_texts(texts: Sequence[str], network: Network, limits: Limits) -> list[Sample]:
    """Samples of texts."""
    if network.texts is None:
        raise Refused(422, f"this network takes {network.kind}, not texts")
    return _each("text", texts, limits, lambda text: _bounded(text, LETTERS * limits.tokens))


def picture(content: bytes, pixels: int, shape: tuple[int, int, int]) -> Image.Image:
    """The first picture of an image file, decoded only if it has no more pixels than that, nor will have once resized.

    Its shorter side is brought to the network's size, so that a long and thin one becomes larger than it is.
    """
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as opened:
            width, height = opened.size
            scale = max(1.0, shape[1] / height, shape[2] / width)
            if scale**2 * width * height > pixels:
                raise Refused(413, f"{width} x {height} pixels, and at most {pixels:,} are taken, resized ones too")
            opened.load()
            return opened.copy()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Refused(413, f"more than the {pixels:,} pixels that are taken") from error
    except Refused:
        raise
    except UnidentifiedImageError as error:
        raise Refused(422, f"no whole image in {', '.join(FORMATS)}") from error
    except Exception as error:  # a damaged image fails in a dozen ways, each decoder its own
        raise Refused(422, f"no whole image in {', '.join(FORMATS)} ({_line(error)})") from error


def _each(kind: str, values: Sequence[Any], limits: Limits, made: Callable[[Any], Any]) -> list[Any]:
    """What is made of each; what is wrong with one is told with its index."""
    if not values:
        raise Refused(422, f"no {kind}: send at least one")
    if len(values) > limits.batch:
        raise Refused(413, f"{len(values)} {kind}s in one request, and at most {limits.batch} are taken: send several")
    samples = []
    for index, value in enumerate(values):
        try:
            samples.append(made(value))
        except Refused as refused:
            raise Refused(refused.status, f"{kind} {index}: {refused.reason}") from refused
        except (ValueError, TypeError) as error:  # all errors of alight are among them
            raise Refused(422, f"{kind} {index}: {_line(error)}") from error
    return samples


def _decoded(text: str) -> bytes:
    start, comma, rest = text.partition(",")
    try:
        return base64.b64decode(rest if comma and start.endswith(";base64") else text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(422, f"no base64 ({_line(error)})") from error


def _bounded(text: str, letters: int) -> str:
    if len(text) > letters:
        raise Refused(413, f"{len(text):,} letters, and at most {letters:,} are taken")
    return text


def _array(values: Any, network: Network) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise Refused(422, f"no array of numbers ({_line(error)})") from error
    wanted = network.shape
    if wanted and (
        array.ndim != len(wanted) or any(own not in (None, n) for own, n in zip(wanted, array.shape, strict=True))
    ):
        raise Refused(422, f"shape {array.shape}, and the network takes {wanted}")
    unusable = ~(np.abs(array) <= LARGEST)
    if unusable.any():
        place = tuple(int(axis) for axis in np.argwhere(unusable)[0])
        what = f"{int(unusable.sum())} numbers that are NaN, infinite or beyond {LARGEST:g}"
        raise Refused(422, f"{what}, the first at {list(place)}")
    return array.astype(network.dtype)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
