"""Where data lies and results go: a path of any file system that pyarrow knows."""

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from pyarrow import ArrowException, fs

from alight.errors import BadInput


@dataclass(frozen=True)
class Store:
    """A file or folder of a file system: here, in a bucket, or wherever else.

    >>> Store.at("results") / "part-00000.parquet" == Store.at("results/part-00000.parquet")
    True
    """

    filesystem: Any  # a pyarrow.fs.FileSystem, which goes with the path to other machines
    path: str

    @classmethod
    def at(cls, where: "str | os.PathLike[str] | Store") -> "Store":
        """The place of a path here, or of a URI as s3://bucket/folder, gs://..., hdfs://..., fsspec+PROTOCOL://..."""
        if isinstance(where, Store):
            return where
        text = os.fspath(where)
        if "://" not in text:
            return cls(fs.LocalFileSystem(), os.path.abspath(text))  # noqa: PTH100  # which does not follow links
        try:
            return cls(*fs.FileSystem.from_uri(text))
        except (ArrowException, ImportError, ValueError) as error:
            raise BadInput(
                f"{text} is no place that pyarrow knows ({error}): give a path, or s3://BUCKET/..."
            ) from error

    def __truediv__(self, name: str) -> "Store":
        return Store(self.filesystem, f"{self.path.rstrip('/')}/{name}" if self.path else name)

    def __str__(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(self.path).name

    @property
    def suffix(self) -> str:
        """How its name ends, with the dot."""
        return PurePosixPath(self.path).suffix.lower()

    def is_file(self) -> bool:
        """Whether it is a file."""
        return bool(self.filesystem.get_file_info(self.path).type == fs.FileType.File)

    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return bool(self.filesystem.get_file_info(self.path).type == fs.FileType.Directory)

    def files(self) -> Iterator[tuple[str, Any]]:
        """Every file below it, by its path from here, in the order of names, with its size and date."""
        below = self.filesystem.get_file_info(fs.FileSelector(self.path, recursive=True, allow_not_found=True))
        root = PurePosixPath(self.path)
        found = {PurePosixPath(each.path).relative_to(root): each for each in below if each.type == fs.FileType.File}
        for path in sorted(found):
            yield str(path), found[path]

    def open(self) -> Any:
        """The file, to be read from any position."""
        return self.filesystem.open_input_file(self.path)

    def read(self) -> bytes:
        """The content of the file."""
        with self.open() as file:
            return bytes(file.read())

    def write_whole(self, content: bytes) -> None:
        """Put a file in place: nobody sees less than all of it, and whoever comes second puts the same there."""
        path = PurePosixPath(self.path)
        temporary = str(path.with_name(f".{path.name}.{secrets.token_hex(4)}"))
        try:
            with self.filesystem.open_output_stream(temporary) as file:
                file.write(content)
            self.filesystem.move(temporary, self.path)
        except BaseException:
            with suppress(OSError):
                self.filesystem.delete_file(temporary)
            raise

    def remove(self) -> None:
        """Take the file away, if it is still there."""
        with suppress(FileNotFoundError):
            self.filesystem.delete_file(self.path)

    def make_folder(self) -> None:
        """Make the folder, unless it is there."""
        self.filesystem.create_dir(self.path, recursive=True)


def public_name(where: "str | Store") -> str:
    """A place as it may be written down: without the keys to it, and without settings behind its path.

    >>> public_name("s3://key:secret@bucket/images?region=eu-west-1")
    's3://bucket/images'
    """
    kind, found, rest = str(where).partition("://")
    if not found:
        return kind
    machine, slash, path = rest.partition("?")[0].partition("/")
    return f"{kind}://{machine.rpartition('@')[2]}{slash}{path}"
