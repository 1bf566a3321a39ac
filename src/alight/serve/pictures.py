"""Image files that strangers send: opened in a bounded number of parts, and large ones decoded in another process.

Pillow holds Python's lock while it copies pixels, so that one picture of 16 megapixels would stop everything else in
this process for some hundred milliseconds. The other process has low priority, and ends with this one.
"""

import io
import math
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import numpy as np
from PIL import Image, UnidentifiedImageError

from alight.data.preprocess import InputSpec, image_batch
from alight.errors import BadInput

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # the only decoders that untrusted bytes reach
MAX_PARTS, PART = 1000, 128  # of an image file, and bytes of it that allow for one more: decoders walk them slowly
INFLATED, MAX_INFLATED = (b"iCCP", b"iTXt", b"zTXt"), 5  # chunks of a PNG that become up to a megabyte, and how many
LARGE = 2**20  # pixels of a picture that is decoded in the other process
NICENESS = 10  # of what reads large requests: small ones and the network come first
HEAD = struct.Struct("<?Q")  # before an answer of the other process: whether it is a picture, and its bytes
MEMORY = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(2**20)}  # of glibc: pictures leave no trace


class ImageParts(io.BytesIO):
    """An image file that is read in a bounded number of parts.

    A decoder takes a part at a time, in Python, until it comes to the pixels: of a hostile file a million empty ones.
    """

    def __init__(self, file: bytes) -> None:
        super().__init__(file)
        self._parts, self._inflated = MAX_PARTS + len(file) // PART, MAX_INFLATED  # that may still come

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes."""
        part = super().read(size)
        self._parts -= 1
        self._inflated -= size == 8 and part[4:] in INFLATED
        if min(self._parts, self._inflated) < 0:
            raise BadInput("an image file of too many parts that are not pixels: save it without its metadata")
        return part


@contextmanager
def picture(file: bytes) -> Iterator[Image.Image]:
    """Give an image file that is open, and not decoded yet; what goes wrong with it is said in a sentence."""
    try:
        with Image.open(ImageParts(file), formats=FORMATS) as opened:
            yield opened
    except (BadInput, Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise
    except Exception as error:  # a damaged image fails in a dozen ways, each decoder its own
        detail = "" if isinstance(error, UnidentifiedImageError) else f" ({one_line(error)})"
        raise BadInput(f"not a complete image in {', '.join(FORMATS)}{detail}") from error


def read_picture(file: bytes, spec: InputSpec) -> np.ndarray:
    """Return the first picture of an image file as the network takes it."""
    with picture(file) as opened:
        return image_batch([opened], spec, "the request")


class PictureProcess:
    """Another process that reads large pictures, one at a time; it is started again if it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self) -> tuple[IO[bytes], IO[bytes]]:
        """Return where the process reads and writes, once it has begun to."""
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            line = [sys.executable, "-P", "-m", "alight.serve.pictures"]
            self._process = subprocess.Popen(
                line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **MEMORY}
            )
        assert self._process.stdin is not None  # asked for above
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    def read(self, file: bytes, spec: InputSpec) -> np.ndarray:
        """Return the first picture of an image file as the network takes it, read here if it is small."""
        with picture(file) as opened:
            if math.prod(opened.size) <= LARGE:
                return image_batch([opened], spec, "the request")
        with self._lock:
            try:
                questions, answers = self.start()
                pickle.dump((file, spec), questions)
                questions.flush()
                is_picture, size = HEAD.unpack(answers.read(HEAD.size))
                content = answers.read(size)
            except (OSError, struct.error) as error:
                self._end()
                raise ConnectionError("the process that reads large pictures has ended: send it again") from error
        if not is_picture:
            raise BadInput(content.decode())
        return np.load(io.BytesIO(content), allow_pickle=False)

    def close(self) -> None:
        """End the process once it has read what it reads."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def one_line(error: Exception) -> str:
    """Return what an error says, shortened to one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _answer(file: bytes, spec: InputSpec) -> tuple[bool, bytes]:
    try:
        picture = io.BytesIO()
        np.save(picture, read_picture(file, spec), allow_pickle=False)
        return True, picture.getvalue()
    except (ValueError, TypeError, MemoryError) as error:
        return False, one_line(error).encode()


def main() -> None:
    """Read pictures from the standard input until it is closed."""
    for each in (signal.SIGINT, signal.SIGTERM):  # which also the service gets: it decides when this ends
        signal.signal(each, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # about images that are refused anyway
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            file, spec = pickle.load(questions)
        except EOFError:
            return
        is_picture, content = _answer(file, spec)
        del file
        answers.write(HEAD.pack(is_picture, len(content)) + content)
        answers.flush()


if __name__ == "__main__":
    main()
