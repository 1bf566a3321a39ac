"""Files that are written completely or not at all, hold only data, and state their kind and schema."""

import csv
import errno
import io
import json
import os
import secrets
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from alight.errors import BadFile, BadInput

SCHEMA = 1  # raised whenever an older alight could no longer read what is written
BLOCK_SIZE = 2**20  # bytes that are copied at a time
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space on the disk, in the quota, or in the file

WEIGHTS, CONFIG = "model.safetensors", "config.json"  # in the folder of a saved network
MANIFEST = "manifest.json"  # in the folder of an exported one
FIRST_STAGES = ("stage_0.onnx", "stage_0.pt2")  # of an exported network
CASCADE = "cascade.json"  # in the folder of a cascade, beside a file or folder for each network
POLICY = "policy.json"  # beside a saved or an exported network
COSTS, CALIBRATION, TEST, CALLS = "costs.json", "labelled.npz", "test_outputs.npz", "calls.txt"  # and of a fit
FIT = "fit.json"  # what it says in words, and its speed
PLAN, DONE = "plan.json", "job.json"  # beside partitions of a job: what is to be done, and that all of it is

PathLike = str | os.PathLike[str]


def write_whole(path: PathLike, write: Callable[[IO[bytes]], object]) -> Path:
    """Write a temporary file beside the path by `write`, move it to the path, and return the path."""
    check_writable(path)
    path = Path(path)
    target = path.resolve()  # what a link points to, not the link
    if target.exists() and not target.is_file():  # a device or a pipe cannot be replaced
        with _named_errors(path), target.open("wb") as file:
            write(file)
        return path
    mode = target.stat().st_mode if target.exists() else None
    temporary = _beside(target)  # named before it is created, so that an interrupt at any moment leaves nothing
    try:
        with _named_errors(path), open(temporary, "xb", opener=partial(os.open, mode=mode or 0o666)) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # on the disk before it replaces the old file
        if mode is not None:
            temporary.chmod(mode)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def check_writable(path: PathLike) -> None:
    """Check that a file can be written there; the OSError names the path."""
    target = Path(path).resolve()
    if not str(path):
        raise FileNotFoundError(errno.ENOENT, "an empty name is not a file to write to", str(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder, not a file to write to", str(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder to write to", str(target.parent))
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise PermissionError(errno.EACCES, "it is read-only", str(path))


@contextmanager
def _named_errors(path: PathLike) -> Iterator[None]:
    """Add the file's name to errors in the middle of writing, which have none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def _beside(target: Path) -> Path:
    """Return an unused hidden name beside the target."""
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}")


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which replaces this one at the end, completely or not at all."""
    folder = folder.resolve()
    filling, old = _beside(folder), _beside(folder)
    try:
        filling.mkdir()
        yield filling
        if folder.exists():
            folder.rename(old)
        filling.rename(folder)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    finally:
        for each in (filling, old):
            shutil.rmtree(each, ignore_errors=True)


def check_network_folder(folder: PathLike) -> None:
    """Check that the folder holds a saved network or a cascade, without loading torch."""
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {path}: give one that `alight fit` or `alight attach` wrote")
    if (path / MANIFEST).is_file() and not (path / WEIGHTS).is_file():
        raise BadFile(path, "it holds an exported network", "use `alight run`, or give the folder it was exported from")
    is_of_transformers = False
    with suppress(OSError, ValueError, TypeError):
        is_of_transformers = "model_type" in json.loads((path / CONFIG).read_bytes())
    if is_of_transformers:
        raise BadFile(
            path, "it holds a network of transformers", f"write transformers:{path} to `alight fit` or `attach`"
        )
    for name in (WEIGHTS, CONFIG):
        if not (path / name).is_file() and not (path / CASCADE).is_file():
            raise BadFile(path, f"it has no {name}", "give a folder that alight saved a network to")


def check_replaceable(folder: PathLike, *, force: bool) -> None:
    """Check that a folder holds no saved network and nothing that `fit` wrote, unless they may be replaced."""
    path = Path(folder)
    if force or not any((path / name).is_file() for name in (WEIGHTS, CALLS)):
        return
    held = described_network(path) if (path / WEIGHTS).is_file() else "what `fit` wrote"
    raise BadInput(f"{path} holds {held}: give another folder, or force=True to replace it")


def described_network(folder: Path) -> str:
    """Return in a few words which network a folder holds."""
    try:
        config = read_json(folder / CONFIG, "MultiExitModel")
        return f"a network of {config['num_classes']} classes with exits after {', '.join(config['exits'])}"
    except (BadFile, OSError, KeyError):
        return "a saved network"


def write_text(path: PathLike, text: str) -> Path:
    """Write a text file, completely or not at all, and return its path."""
    return write_whole(path, lambda file: file.write(text.encode("utf-8")))


def write_csv(path: PathLike, header: Iterable[str], rows: Iterable[Iterable[object]]) -> Path:
    """Write a CSV file, completely or not at all, and return its path."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return write_text(path, text.getvalue())


def write_rows(path: PathLike, rows: Sequence[Mapping[str, str | float | int]], digits: int = 4) -> Path:
    """Write rows of the same columns as CSV, floats with so many digits, and return the path."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: f"{cell:.{digits}f}" if isinstance(cell, float) else cell for name, cell in row.items()} for row in rows
    )
    return write_text(path, text.getvalue())


def write_json(path: PathLike, kind: str, content: Mapping[str, Any]) -> Path:
    """Write a JSON file with its kind and schema, and return its path."""
    return write_text(path, json_text(kind, content))


def json_text(kind: str, content: Mapping[str, Any]) -> str:
    """Return the text of a JSON file with its kind and schema."""
    return json.dumps({"alight": kind, "schema": SCHEMA, **content}, indent=2, allow_nan=False) + "\n"


def read_json(path: PathLike, kind: str, text: bytes | None = None, remedy: str = "") -> dict[str, Any]:
    """Return the content of a JSON file of this kind, whose text was read before where the path is not a local one.

    The remedy for a damaged file is to write it again, unless another one is given.
    """
    try:
        document = json.loads((Path(path).read_bytes() if text is None else text).decode("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadFile(path, f"it is not whole JSON ({error})", remedy or f"write the {kind} again") from error
    if not isinstance(document, dict):
        raise BadFile(path, f"it holds no {kind}", f"give a file that alight wrote as a {kind}")
    _check_kind(path, kind, document.pop("alight", None), document.pop("schema", None))
    return document


def write_arrays(path: PathLike, kind: str, arrays: Mapping[str, np.ndarray]) -> Path:
    """Write an .npz file with its kind and schema, and return its path."""
    named = {"alight": np.array(kind), "schema": np.array(SCHEMA), **arrays}
    return write_whole(path, lambda file: np.savez_compressed(file, **named))  # type: ignore[arg-type]


class GrowingArrays:
    """Arrays that grow on the disk, and become one .npz file in the end.

    Memory holds the rows of one `add` at a time. They are kept in a hidden folder beside the file until the end, so
    the disk needs twice their space. In any case the folder is removed, and the file is complete or unchanged.
    """

    def __init__(self, path: PathLike) -> None:
        check_writable(path)
        target = Path(path).resolve()
        device = target.exists() and not target.is_file()  # a hidden folder cannot lie beside a device
        self.path, self.rows = path, 0
        self._folder = _beside(Path(tempfile.gettempdir()) / target.name if device else target)
        self._files: dict[str, IO[bytes]] = {}
        self._kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}  # dtype and shape of a row

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir(mode=0o700)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            with suppress(OSError):  # of a full disk, which was reported
                file.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Append rows, of the same names, dtypes and shapes each time."""
        kinds = {name: (array.dtype, array.shape[1:]) for name, array in arrays.items()}
        if not self._files:
            self._kinds = kinds
            self._files = {name: (self._folder / name).open("w+b") for name in arrays}
        if kinds != self._kinds or len({len(array) for array in arrays.values()}) != 1:
            raise BadInput(f"rows of {kinds} after rows of {self._kinds}: give the same arrays each time")
        with self._full_disk_errors():
            for name, array in arrays.items():
                self._files[name].write(np.ascontiguousarray(array).data)
        self.rows += len(next(iter(arrays.values())))

    def write(self, kind: str, arrays: Mapping[str, np.ndarray]) -> Path:
        """Write the .npz file with its kind and schema, all rows and these arrays, and return its path."""
        named = {"alight": np.array(kind), "schema": np.array(SCHEMA), **arrays}

        def assemble(file: IO[bytes]) -> None:
            with zipfile.ZipFile(file, "w") as archive:
                for name, array in named.items():
                    with archive.open(f"{name}.npy", "w") as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
                for name in self._files:
                    self._copy(name, archive)

        with self._full_disk_errors():
            return write_whole(self.path, assemble)

    def _copy(self, name: str, archive: zipfile.ZipFile) -> None:
        dtype, row = self._kinds[name]
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (self.rows, *row)}
        info = zipfile.ZipInfo(f"{name}.npy")
        # scores hardly compress, and compressing them takes longer than computing them
        info.compress_type = zipfile.ZIP_DEFLATED if dtype.kind in "iu" else zipfile.ZIP_STORED
        with archive.open(info, "w", force_zip64=True) as member:
            np.lib.format.write_array_header_1_0(member, header)
            self._files[name].seek(0)
            shutil.copyfileobj(self._files[name], member, BLOCK_SIZE)

    @contextmanager
    def _full_disk_errors(self) -> Iterator[None]:
        """Say in the error of a full disk how many rows were written, and what to do."""
        with _named_errors(self.path):
            try:
                yield
            except OSError as error:
                if error.errno in DISK_FULL:
                    size = sum(file.stat().st_size for file in self._folder.iterdir())
                    error.strerror = (
                        f"{error.strerror} after {self.rows:,} rows ({size / 1e6:,.1f} MB): free twice the space of all"
                        " rows, or write to another disk"
                    )
                raise


def read_arrays(path: PathLike, kind: str) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file of this kind; pickled ones are refused, since they could run code."""
    with Path(path).open("rb") as opened:
        if opened.read(2) != b"PK":
            raise BadFile(path, "it is not an .npz file", f"give a file that alight wrote as a {kind}")
        opened.seek(0)
        try:
            with np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except Exception as error:  # a damaged archive fails in a dozen ways
            raise BadFile(path, f"it is damaged ({error})", f"save the {kind} again") from error
    _check_kind(path, kind, *(_scalar(arrays.pop(name, None)) for name in ("alight", "schema")))
    return arrays


def _scalar(value: np.ndarray | None) -> Any:
    return None if value is None or value.ndim else value.item()


def _check_kind(path: PathLike, kind: str, found: Any, schema: Any) -> None:
    if found != kind or type(schema) is not int or schema < 1:
        what = f"a {found}" if isinstance(found, str) else "a file from elsewhere"
        raise BadFile(path, f"it is {what}, not a {kind}", f"give a file that alight wrote as a {kind}")
    if schema > SCHEMA:
        raise BadFile(path, f"its schema is {schema} and this alight reads up to {SCHEMA}", "upgrade alight")
