"""Rows of an array inside an .npz file, read without the others."""

import zipfile
from typing import Any

import numpy as np
from pyarrow import ArrowException

from alight.cluster.stores import Store
from alight.errors import BadFile

REMEDY = "save plain arrays with np.savez"


class Member:
    """An array of an .npz file: what np.savez wrote is read from any row on, what was compressed from its start on.

    Whoever asks for rows in their order reads a compressed array once in all.
    """

    def __init__(self, file: Store, name: str) -> None:
        self._where, archive = str(file), _opened(file)
        info = archive.getinfo(f"{name}.npy")
        try:
            member: Any = archive.open(info)
            version = np.lib.format.read_magic(member)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            self.shape, fortran, self._dtype = read(member)
        except Exception as error:  # a damaged archive fails in a dozen ways
            raise BadFile(self._where, f"its array {name} is damaged ({error})", REMEDY) from error
        if self._dtype.hasobject or fortran or not self.shape:
            raise BadFile(self._where, f"its array {name} holds objects, no rows, or columns first", REMEDY)
        self._file, self._first = member, member.tell()
        if info.compress_type == zipfile.ZIP_STORED:
            self._file = file.open()
            self._first += _content_of(self._file, info)

    @staticmethod
    def names(file: Store) -> list[str]:
        """The arrays of an .npz file."""
        return [name.removesuffix(".npy") for name in _opened(file).namelist()]

    @property
    def kind(self) -> str:
        """The letter of NumPy for what kind of numbers these are."""
        return self._dtype.kind

    def __len__(self) -> int:
        return int(self.shape[0])

    def rows(self, start: int, stop: int) -> np.ndarray:
        """These rows."""
        size = self._dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
        try:
            self._file.seek(self._first + start * size)
            content = self._file.read((stop - start) * size)
            return np.frombuffer(content, self._dtype).reshape(stop - start, *self.shape[1:])
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise BadFile(self._where, f"it ends before row {stop} ({error})", REMEDY) from error


def _opened(file: Store) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file.open())
    except (zipfile.BadZipFile, ArrowException) as error:
        raise BadFile(str(file), f"it is damaged ({error})", REMEDY) from error


def _content_of(file: Any, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a member begin: after its header, a name and more."""
    file.seek(info.header_offset)
    header = file.read(30)
    return info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
