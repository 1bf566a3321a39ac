"""From the bytes of a request to samples: what it holds is counted first, and read afterwards.

Counting opens no picture, tokenises no text and builds no numbers, so it takes little time and memory, whatever was
sent. `UnreadSamples.amount` says how much there is to read; who admits requests decides by it when that is done.
"""

import base64
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from alight.data.preprocess import image_batch
from alight.serve.model import Sample, ServedModel
from alight.serve.pictures import one_line, picture, read_picture
from alight.serve.requests import Limits, PredictOptions, RequestRefused, parse

MAX_LETTERS = 1000  # of a text for each token that is read of it
MAX_NUMBER = 1e6  # in an array: beyond, networks overflow
OPTION_BYTES = 200  # of a budget or deadline as JSON: they are short
NOTHING = msgspec.Raw()
ReadPicture = Callable[..., np.ndarray]  # of a file, and the `spec` of inputs


class RawRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request whose values are still JSON: a parser has seen that they are well-formed, and built nothing."""

    images: msgspec.Raw = NOTHING
    arrays: msgspec.Raw = NOTHING
    texts: msgspec.Raw = NOTHING
    budget: msgspec.Raw = NOTHING
    deadline_ms: msgspec.Raw = NOTHING


@dataclass(frozen=True)
class UnreadSamples:
    """Samples that are counted and not read yet."""

    kind: str  # images, arrays or texts
    values: Sequence[Any]  # files, texts, numbers as JSON or arrays
    amount: int  # pixels, letters or numbers of all together


def decode_json(content: bytes | bytearray | memoryview, kind: Any) -> Any:
    """Return JSON as objects of this kind; an error refuses the request."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        fields = ", ".join(getattr(kind, "__struct_fields__", ()))
        expected = f": it may have {fields}" if fields else ""
        raise RequestRefused(422, f"not the JSON that is expected ({one_line(error)}){expected}") from error


def open_request(
    content: bytes | bytearray, model: ServedModel, limits: Limits
) -> tuple[PredictOptions, UnreadSamples]:
    """Return what a request in JSON may spend, and its samples, counted."""
    raw = decode_json(content, RawRequest)
    given = [kind for kind in COUNTERS if bytes(getattr(raw, kind)) not in (b"", b"null")]
    if len(given) != 1:
        raise RequestRefused(422, f"{' and '.join(given) or 'no samples'}: give one of images, arrays and texts")
    options = {}
    for name in ("budget", "deadline_ms"):
        if value := bytes(getattr(raw, name)):
            if len(value) > OPTION_BYTES:
                raise RequestRefused(422, f"{name}: {len(value):,} bytes: give a number or a few letters")
            options[name] = decode_json(value, Any)
    (kind,) = given
    text = bytes(getattr(raw, kind))
    values = _rows(text, model, limits) if kind == "arrays" else _strings(kind, text, limits)
    return parse(PredictOptions, options, strict=True), count_samples(kind, values, model, limits)


def _strings(kind: str, text: bytes, limits: Limits) -> list[str]:
    """Return an array of strings; one that is too long is refused before it is built."""
    quotes = text.count(b'"') - text.count(rb"\"")  # of each string one at least, and two at most
    if quotes > 2 * limits.batch:
        raise too_many(quotes // 2, kind, limits)
    return decode_json(text, list[str])


def _rows(text: bytes, model: ServedModel, limits: Limits) -> list[msgspec.Raw]:
    """Return the arrays of an array of arrays of numbers, as JSON; what cannot be one is refused before it is built."""
    if b"{" in text or b'"' in text:
        raise RequestRefused(422, "array 0: not an array of numbers: it holds strings or objects")
    numbers, lists = math.prod(int(size or 1) for size in model.shape), 1
    for size in model.shape[:-1]:
        lists += lists * int(size or 1)
    if text.count(b",") > limits.batch * numbers or text.count(b"[") > 1 + limits.batch * max(lists, 1 + numbers):
        shape = tuple(model.shape)
        raise RequestRefused(413, f"arrays: more numbers than {limits.batch} arrays of shape {shape} have")
    return decode_json(text, list[msgspec.Raw])


def count_samples(kind: str, values: Sequence[Any], model: ServedModel, limits: Limits) -> UnreadSamples:
    """Count what has to be read of "images" (bytes or base64), "arrays" or "texts"; an error names the index."""
    if not {"images": model.spec.image_shape, "arrays": not model.tokenize, "texts": model.tokenize}[kind]:
        raise RequestRefused(422, f"this network takes {model.input_kind}, not {kind}")
    if len(values) == 0:
        raise RequestRefused(422, f"no {kind.removesuffix('s')}: send at least one")
    if len(values) > limits.batch:
        raise too_many(len(values), kind, limits)
    count = partial(COUNTERS[kind], model=model, limits=limits)
    counted, amounts = zip(*_each(kind, values, count, math.inf), strict=True)
    return UnreadSamples(kind, counted, sum(amounts))


def read_samples(
    unread: UnreadSamples, model: ServedModel, until: float = math.inf, read: ReadPicture = read_picture
) -> list[Sample]:
    """Return the samples as the network takes them, unless that lasts beyond a moment of time.monotonic."""
    readers: dict[str, Callable[[Any], Sample]] = {
        "images": partial(read, spec=model.spec),
        "arrays": partial(_read_array, model=model),
        "texts": partial(_read_text, model=model),
    }
    return _each(unread.kind, unread.values, readers[unread.kind], until)


def too_many(count: int, kind: str, limits: Limits) -> RequestRefused:
    """Return the refusal of a request with so many samples."""
    return RequestRefused(413, f"{count} {kind} in one request, and at most {limits.batch} are taken: send several")


def _each(kind: str, values: Sequence[Any], work: Callable[[Any], Any], until: float) -> list[Any]:
    """Return what work makes of every value; an error names the value's index."""
    name, made = kind.removesuffix("s"), []
    for index, value in enumerate(values):
        if time.monotonic() > until:
            raise RequestRefused(504, f"there was no time left to read {name} {index}")
        try:
            made.append(work(value))
        except RequestRefused as refused:
            raise RequestRefused(refused.status_code, f"{name} {index}: {refused.detail}") from refused
        except ConnectionError as error:
            raise RequestRefused(503, f"{name} {index}: {error}", 1) from error
        except (ValueError, TypeError) as error:  # all errors of alight are among them
            raise RequestRefused(422, f"{name} {index}: {one_line(error)}") from error
    return made


def _count_pixels(file: str | bytes, model: ServedModel, limits: Limits) -> tuple[bytes, int]:
    """Return the content of an image file and how many pixels it says to have, few enough also once it is resized.

    Its shorter side is brought to the network's size, so that a long and thin one becomes larger than it is. In base64
    it may begin with data:...;base64, and then the file.
    """
    assert model.spec.image_shape is not None  # checked before
    _, rows, columns = model.spec.image_shape
    if isinstance(file, str):
        try:
            file = base64.b64decode(file.split(";base64,", 1)[-1], validate=True)
        except ValueError as error:
            raise RequestRefused(422, f"not base64 ({one_line(error)})") from error
    try:
        with picture(file) as opened:
            width, height = opened.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RequestRefused(413, f"more than the {limits.pixels:,} pixels that are taken") from error
    scale = max(1.0, max(rows, columns) / min(width, height))  # it may have to be turned
    if scale**2 * width * height > limits.pixels:
        raise RequestRefused(
            413, f"{width} x {height} pixels, and at most {limits.pixels:,} are taken, resized ones too"
        )
    return file, width * height


def _count_letters(text: str, model: ServedModel, limits: Limits) -> tuple[str, int]:
    if len(text) > MAX_LETTERS * limits.tokens:
        raise RequestRefused(413, f"{len(text):,} letters, and at most {MAX_LETTERS * limits.tokens:,} are taken")
    return text, len(text)


def _read_text(text: str, model: ServedModel) -> Sample:
    assert model.tokenize is not None  # checked before
    with nullcontext() if model.tokenize.is_thread_safe else model.tokenizing:
        return model.tokenize([text])


def _count_numbers(values: Any, model: ServedModel, limits: Limits) -> tuple[Any, int]:
    return values, len(memoryview(values)) if isinstance(values, msgspec.Raw) else values.size


def _read_array(values: Any, model: ServedModel) -> Sample:
    """Return the numbers of one sample, of JSON or of an array, as the network takes them; bytes are pixels."""
    if isinstance(values, np.ndarray) and values.dtype == np.uint8 and model.input_kind == "images":
        return image_batch(values[None], model.spec, "the request")
    if isinstance(values, msgspec.Raw):
        kind: Any = float
        for _ in model.shape:
            kind = list[kind]
        try:
            values = msgspec.json.decode(values, type=kind)
        except msgspec.MsgspecError as error:
            reason = f"not an array of numbers of shape {model.shape} ({one_line(error)})"
            raise RequestRefused(422, reason) from error
    try:
        array = np.asarray(values, dtype=np.float64)
    except ValueError as error:  # rows of different lengths
        raise RequestRefused(422, f"not an array of numbers ({one_line(error)})") from error
    if not model.spec.tensors[0].fits((1, *array.shape)):
        raise RequestRefused(422, f"shape {array.shape}, and the network takes {model.shape}")
    unusable = ~(np.abs(array) <= MAX_NUMBER)
    if unusable.any():
        place = np.argwhere(unusable)[0].tolist()
        what = f"{int(unusable.sum())} numbers that are NaN, infinite or beyond {MAX_NUMBER:g}"
        raise RequestRefused(422, f"{what}, the first at {place}")
    return array.astype(model.dtype)[None]


COUNTERS: dict[str, Callable[..., tuple[Any, int]]] = {
    "images": _count_pixels,
    "arrays": _count_numbers,
    "texts": _count_letters,
}
