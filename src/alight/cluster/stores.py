"""Where data lies and results go: files and folders of any file system that pyarrow supports.

A folder of results holds
    plan.json             what the partitions are made from, and how; another job is refused
    part-00000.parquet    one partition for each shard of the data, there once it is complete
    bad-00000.parquet     rows of that shard that were left out, with their names and reasons, if there are any
    job.json              there once all partitions are: their sizes and totals
"""

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from pyarrow import ArrowException, fs

from alight.errors import BadInput, Mismatch
from alight.files import DONE, PLAN, json_text, read_json

DIGITS = 5  # of a partition's number, more where there are more


@dataclass(frozen=True)
class Store:
    """A file or folder of a file system: local, in a bucket, or elsewhere.

    >>> Store.at("results") / "part-00000.parquet" == Store.at("results/part-00000.parquet")
    True
    """

    filesystem: Any  # a pyarrow.fs.FileSystem, which is sent to other machines with the path
    path: str

    @classmethod
    def at(cls, where: "str | os.PathLike[str] | Store") -> "Store":
        """Return the store of a local path, or of a URI: s3://bucket/folder, gs://..., hdfs://..., fsspec+PROTOCOL://..."""
        if isinstance(where, Store):
            return where
        text = os.fspath(where)
        if "://" not in text:
            return cls(fs.LocalFileSystem(), os.path.abspath(text))  # noqa: PTH100  # which does not follow links
        try:
            return cls(*fs.FileSystem.from_uri(text))
        except (ArrowException, ImportError, ValueError) as error:
            raise BadInput(
                f"{text} is not a URI that pyarrow supports ({error}): give a path, or s3://BUCKET/..."
            ) from error

    def __truediv__(self, name: str) -> "Store":
        return Store(self.filesystem, f"{self.path.rstrip('/')}/{name}" if self.path else name)

    def __str__(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(self.path).name

    def info(self) -> fs.FileInfo:
        """Return the type, size and date of the file or folder."""
        return self.filesystem.get_file_info(self.path)

    def files(self) -> Iterator[tuple[str, Any]]:
        """Yield every file below it, by its path from here, in the order of names, with its size and date."""
        below = self.filesystem.get_file_info(fs.FileSelector(self.path, recursive=True, allow_not_found=True))
        root = PurePosixPath(self.path)
        files = {PurePosixPath(each.path).relative_to(root): each for each in below if each.type == fs.FileType.File}
        yield from ((str(path), files[path]) for path in sorted(files))

    def open(self) -> Any:
        """Open the file for reading from any position."""
        return self.filesystem.open_input_file(self.path)

    def read(self) -> bytes:
        """Return the content of the file."""
        with self.open() as file:
            return bytes(file.read())

    def write_whole(self, content: bytes) -> None:
        """Write a file that appears complete or not at all, also if two workers write it at once."""
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


def public_name(where: "str | Store") -> str:
    """Return a path or URI without credentials and settings, so that it may be written to files.

    >>> public_name("s3://key:secret@bucket/images?region=eu-west-1")
    's3://bucket/images'
    """
    scheme, separator, rest = str(where).partition("://")
    if not separator:
        return scheme
    machine, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{machine.rpartition('@')[2]}{slash}{path}"


@dataclass(frozen=True)
class PartitionFolder:
    """A folder of results in partitions, whose names end with the suffix."""

    folder: Store
    suffix: str

    def begin(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plan of the folder, written now or the same before; a folder of other things is refused.

        Plans are the same if all but the name of the data is: it says where the data lies, and not what it is.
        """
        file = self.folder / PLAN
        if not file.info().is_file:
            if other := next((name for name, _ in self.folder.files()), None):
                raise BadInput(f"{self.folder} has {other} and no {PLAN}: give a folder that is empty or not there yet")
            self.folder.filesystem.create_dir(self.folder.path, recursive=True)
            file.write_whole(json_text("Plan", plan).encode())
            return {**plan}
        written, plan = read_json(str(file), "Plan", file.read()), json.loads(json.dumps(plan))
        names = sorted({*written, *plan} - {"data"})
        if differing := [name for name in names if written.get(name) != plan.get(name)]:
            raise Mismatch(
                f"{self.folder} has partitions of another job, whose {' and '.join(differing)} differ: give another"
                " folder, or remove this one"
            )
        return written

    def partition(self, index: int) -> Store:
        """Return the file of a partition, written or not."""
        return self.folder / f"part-{index:0{DIGITS}}{self.suffix}"

    def bad_rows(self, index: int) -> Store:
        """Return the file of the rows of a shard that were left out, written or not."""
        return self.folder / f"bad-{index:0{DIGITS}}.parquet"

    def existing(self) -> set[int]:
        """Return the indices of partitions that are written; incomplete files of workers that died are removed."""
        indices = set()
        for name, _ in self.folder.files():
            if name.startswith((".part-", ".bad-")):
                with suppress(FileNotFoundError):  # another job may have removed it
                    self.folder.filesystem.delete_file((self.folder / name).path)
            elif name.startswith("part-") and name.endswith(self.suffix):
                indices.add(int(name.removeprefix("part-").removesuffix(self.suffix)))
        return indices

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write that all partitions are done, with their sizes and totals."""
        (self.folder / DONE).write_whole(json_text("Job", summary).encode())
