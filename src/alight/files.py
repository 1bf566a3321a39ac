"""Files are written whole or not at all, hold only data, and say what they are."""

import errno
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from alight.errors import BadFile

SCHEMA = 1  # raised whenever an older alight could no longer read what is written

PathLike = str | os.PathLike[str]


def write_whole(path: PathLike, write: Callable[[IO[bytes]], object]) -> Path:
    """The path, once `write` has filled a temporary file beside it and that has taken its place."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder to write to", str(path.parent))
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)  # mkstemp makes private files; an ordinary one is expected
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


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
    try:
        with Path(path).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("a lone array")
            arrays = {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, EOFError, ValueError, AttributeError, TypeError) as error:
        raise BadFile(path, f"it is no whole .npz of plain arrays ({error})", f"save the {kind} again") from error
    _check_kind(path, kind, *(_plain(arrays.pop(name, None)) for name in ("alight", "schema")))
    return arrays


def _plain(value: np.ndarray | None) -> Any:
    return None if value is None or value.ndim else value.item()


def _check_kind(path: PathLike, kind: str, found: Any, schema: Any) -> None:
    if found != kind or not isinstance(schema, int):
        what = f"a {found}" if isinstance(found, str) else "a file from elsewhere"
        raise BadFile(path, f"it is {what}, not a {kind}", f"give a file that alight wrote as a {kind}")
    if schema > SCHEMA:
        raise BadFile(path, f"its schema is {schema} and this alight reads up to {SCHEMA}", "upgrade alight")
