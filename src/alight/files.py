"""Files are written whole or not at all, hold only data, and say what they are."""

import errno
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from alight.errors import BadFile

SCHEMA = 1  # raised whenever an older alight could no longer read what is written

PathLike = str | os.PathLike[str]


def write_whole(path: PathLike, write: Callable[[IO[bytes]], object]) -> Path:
    """The path, once `write` has filled a temporary file beside it and that has taken its place."""
    check_writable(path)
    path = Path(path)
    target = path.resolve()  # what a link points to, not the link
    if target.exists() and not target.is_file():  # a device or a pipe cannot be replaced
        with target.open("wb") as file:
            write(file)
        return path
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # on the disk before it takes the old one's place
        Path(temporary).chmod(target.stat().st_mode if target.exists() else 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def check_writable(path: PathLike) -> None:
    """Raise an OSError that names the path unless a file can be written there."""
    target = Path(path).resolve()
    if not str(path):
        raise FileNotFoundError(errno.ENOENT, "an empty name is no file to write to", str(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder, not a file to write to", str(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder to write to", str(target.parent))
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise PermissionError(errno.EACCES, "it must not be written to", str(path))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: PathLike, text: str) -> Path:
    """The path of a text file written whole."""
    return write_whole(path, lambda file: file.write(text.encode("utf-8")))


def write_json(path: PathLike, kind: str, content: Mapping[str, Any]) -> Path:
    """The path of a JSON file that says its kind and schema."""
    document = {"alight": kind, "schema": SCHEMA, **content}
    return write_text(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def read_json(path: PathLike, kind: str) -> dict[str, Any]:
    """The content of a JSON file of this kind."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadFile(path, f"it is not whole JSON ({error})", f"write the {kind} again") from error
    if not isinstance(document, dict):
        raise BadFile(path, f"it holds no {kind}", f"give a file that alight wrote as a {kind}")
    _check_kind(path, kind, document.pop("alight", None), document.pop("schema", None))
    return document


def write_arrays(path: PathLike, kind: str, arrays: Mapping[str, np.ndarray]) -> Path:
    """The path of an .npz file that says its kind and schema."""
    named = {"alight": np.array(kind), "schema": np.array(SCHEMA), **arrays}
    return write_whole(path, lambda file: np.savez_compressed(file, **named))  # type: ignore[arg-type]


def read_arrays(path: PathLike, kind: str) -> dict[str, np.ndarray]:
    """The arrays of an .npz file of this kind; pickled ones are refused, since they could run code."""
    with Path(path).open("rb") as opened:
        if opened.read(2) != b"PK":
            raise BadFile(path, "it is no .npz", f"give a file that alight wrote as a {kind}")
        opened.seek(0)
        try:
            with np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except Exception as error:  # a damaged archive fails in a dozen ways
            raise BadFile(path, f"it is damaged ({error})", f"save the {kind} again") from error
    _check_kind(path, kind, *(_plain(arrays.pop(name, None)) for name in ("alight", "schema")))
    return arrays


def _plain(value: np.ndarray | None) -> Any:
    return None if value is None or value.ndim else value.item()


def _check_kind(path: PathLike, kind: str, found: Any, schema: Any) -> None:
    if found != kind or type(schema) is not int or schema < 1:
        what = f"a {found}" if isinstance(found, str) else "a file from elsewhere"
        raise BadFile(path, f"it is {what}, not a {kind}", f"give a file that alight wrote as a {kind}")
    if schema > SCHEMA:
        raise BadFile(path, f"its schema is {schema} and this alight reads up to {SCHEMA}", "upgrade alight")
