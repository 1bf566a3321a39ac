"""The images, arrays and texts of a request become samples as the network takes them; errors name the index."""

import base64
import binascii
import io
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, ValidationError

from alight.serve.model import Sample, ServedModel
from alight.serve.schemas import Limits, PredictRequest, RequestRefused

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # the only decoders that untrusted bytes reach
MAX_LETTERS = 1000  # of a text for each token that is read of it
MAX_NUMBER = 1e6  # in an array: beyond, networks overflow
Schema = TypeVar("Schema", bound=BaseModel)


def check_content_type(header: str, content_type: str) -> None:
    """Check that a request's header names this type of content."""
    given = header.partition(";")[0].strip().lower()
    if given != content_type:
        raise RequestRefused(415, f"content of type {given[:100]!r}: send {content_type}")


def parse(schema: type[Schema], content: bytes | dict[str, Any]) -> Schema:
    """Return JSON, or values, as an object of this schema; the first error refuses the request."""
    try:
        return schema.model_validate_json(content) if isinstance(content, bytes) else schema.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])[:100]
        raise RequestRefused(422, f"{place + ': ' if place else ''}{first['msg'][:200]}") from error


def read_request(content: bytes, model: ServedModel, limits: Limits) -> tuple[PredictRequest, list[Sample]]:
    """Return a request in JSON and its samples."""
    request = parse(PredictRequest, content)
    given = {kind: values for kind in READERS if (values := getattr(request, kind)) is not None}
    if len(given) != 1:
        raise RequestRefused(422, f"{' and '.join(given) or 'no samples'}: give one of images, arrays and texts")
    ((kind, values),) = given.items()
    return request, read_samples(kind, values, model, limits)


def read_samples(kind: str, values: Sequence[Any], model: ServedModel, limits: Limits) -> list[Sample]:
    """Return the samples of "images", as bytes or in base64, of "arrays" or of "texts"; an error names the index."""
    if not {"images": model.image_shape, "arrays": not model.tokenize, "texts": model.tokenize}[kind]:
        raise RequestRefused(422, f"this network takes {model.input_kind}, not {kind}")
    name, read, samples = kind.removesuffix("s"), READERS[kind], []
    if not values:
        raise RequestRefused(422, f"no {name}: send at least one")
    if len(values) > limits.batch:
        raise RequestRefused(
            413, f"{len(values)} {kind} in one request, and at most {limits.batch} are taken: send several"
        )
    for index, value in enumerate(values):
        try:
            samples.append(read(value, model, limits))
        except RequestRefused as refused:
            raise RequestRefused(refused.status, f"{name} {index}: {refused.reason}") from refused
        except (ValueError, TypeError) as error:  # all errors of alight are among them
            raise RequestRefused(422, f"{name} {index}: {_line(error)}") from error
    return samples


def _read_image(file: str | bytes, model: ServedModel, limits: Limits) -> Sample:
    """Return the first picture of an image file, decoded only if it has few enough pixels, also once it is resized.

    Its shorter side is brought to the network's size, so that a long and thin one becomes larger than it is. In base64
    it may begin with data:...;base64, and then the file.
    """
    assert model.image_shape is not None  # checked before
    _, rows, columns = model.image_shape
    try:
        if isinstance(file, str):
            _, found, encoded = file.partition(";base64,")
            file = base64.b64decode(encoded if found else file, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestRefused(422, f"not base64 ({_line(error)})") from error
    try:
        with Image.open(io.BytesIO(file), formats=FORMATS) as opened:
            width, height = opened.size
            scale = max(1.0, rows / height, columns / width)
            if scale**2 * width * height > limits.pixels:
                raise RequestRefused(
                    413, f"{width} x {height} pixels, and at most {limits.pixels:,} are taken, resized ones too"
                )
            opened.load()
            image = opened.copy()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RequestRefused(413, f"more than the {limits.pixels:,} pixels that are taken") from error
    except RequestRefused:
        raise
    except UnidentifiedImageError as error:
        raise RequestRefused(422, f"not a complete image in {', '.join(FORMATS)}") from error
    except Exception as error:  # a damaged image fails in a dozen ways, each decoder its own
        raise RequestRefused(422, f"not a complete image in {', '.join(FORMATS)} ({_line(error)})") from error
    return model.preprocess(image)


def _read_text(text: str, model: ServedModel, limits: Limits) -> Sample:
    letters = MAX_LETTERS * limits.tokens
    if len(text) > letters:
        raise RequestRefused(413, f"{len(text):,} letters, and at most {letters:,} are taken")
    return text


def _read_array(values: Any, model: ServedModel, limits: Limits) -> Sample:
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestRefused(422, f"not an array of numbers ({_line(error)})") from error
    if model.shape and (
        array.ndim != len(model.shape)
        or any(size not in (None, own) for size, own in zip(model.shape, array.shape, strict=True))
    ):
        raise RequestRefused(422, f"shape {array.shape}, and the network takes {model.shape}")
    unusable = ~(np.abs(array) <= MAX_NUMBER)
    if unusable.any():
        place = tuple(int(axis) for axis in np.argwhere(unusable)[0])
        what = f"{int(unusable.sum())} numbers that are NaN, infinite or beyond {MAX_NUMBER:g}"
        raise RequestRefused(422, f"{what}, the first at {list(place)}")
    return array.astype(model.dtype)[None]


READERS: dict[str, Callable[[Any, ServedModel, Limits], Sample]] = {
    "images": _read_image,
    "arrays": _read_array,
    "texts": _read_text,
}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
