"""Data cut into shards, the same ones every time: a worker reads one shard for each partition of results.

    folder/class/*.png     a folder for each class; folder/*.png without labels
    folder/images.npy      one array of images, and labels.npy beside it; or images.npy alone
    *.parquet              a file or a folder of files: images as bytes of files or as arrays, or text; and labels

Ray Data's own readers group rows by the size of blocks and of the cluster, and rows of a file have no number there. A
partition has to hold the same samples in every run, so shards are ranges of files, rows or row groups that are fixed
here; pyarrow, NumPy and Pillow read them.
"""

import errno
import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, repeat
from operator import attrgetter
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from pyarrow import ArrowException, fs, parquet

from alight.cluster.stores import Store, public_name
from alight.data.columns import IMAGE_NAMES, LABEL_NAMES, SUFFIXES, TEXT_NAMES, first_of
from alight.data.labels import class_indices
from alight.data.preprocess import Sample
from alight.data.samples import picture
from alight.data.tables import column_values
from alight.errors import AlightError, BadFile, BadInput
from alight.networks.multi_exit import MultiExitModel

AT_ONCE = 256  # rows that are read together
SAVE = "save it with np.save"


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be read, and why."""

    reason: str


@dataclass(frozen=True)
class Shard(ABC):
    """A range of the samples, which can be read on any machine."""

    index: int
    start: int  # the number of its first sample
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def names(self) -> list[str] | None:
        """Return the files of the samples, None where samples have numbers alone."""
        return None

    @abstractmethod
    def samples(self) -> Iterator[Sample | BadRow]:
        """Yield the samples; those that cannot be read as what is wrong with them."""


@dataclass(frozen=True)
class ShardedData:
    """All shards of a data set."""

    where: str
    content: str  # changes with any file's name, size or date
    shards: Sequence[Shard]

    def __len__(self) -> int:
        return self.shards[-1].stop

    def named(self, where: str) -> "ShardedData":
        """Return the same data under the name that it had when the job began."""
        shards = [replace(each, where=where) if isinstance(each, ImageShard) else each for each in self.shards]
        return replace(self, where=where, shards=shards)


def open_data(where: "str | Store", model: MultiExitModel, rows: int) -> ShardedData:
    """Open data in shards of so many samples; of Parquet in whole row groups, so many samples or more."""
    store, named = Store.at(where), public_name(where)
    info = store.info()
    if info.type not in (fs.FileType.File, fs.FileType.Directory):
        raise FileNotFoundError(errno.ENOENT, "there is no such file or folder", named)
    files = {"": info} if info.is_file else dict(store.files())
    tables, arrays = (
        [store / name if name else store for name in files if (name or store.path).endswith(suffix)]
        for suffix in (".parquet", ".npy")
    )
    if tables:
        shards = _parquet_shards(tables, model, rows)
    elif arrays:
        shards = _array_shards(arrays, named, rows)
    else:
        names = [name for name in files if PurePosixPath(name).suffix.lower() in SUFFIXES]
        shards = _image_shards(store, named, names, model, rows)
    if not shards:
        raise BadInput(f"{named} has no samples: give data with at least one")
    listed = "\n".join(f"{name} {info.size} {info.mtime_ns}" for name, info in files.items())
    return ShardedData(named, hashlib.sha256(listed.encode()).hexdigest(), shards)


def _ranges(total: int, rows: int) -> list[tuple[int, int, int]]:
    return [(index, start, min(start + rows, total)) for index, start in enumerate(range(0, total, rows))]


@dataclass(frozen=True)
class ImageShard(Shard):
    """Image files of a folder."""

    folder: Store
    where: str
    files: tuple[str, ...]
    labels: tuple[int | None, ...]

    def names(self) -> list[str]:
        """Return the files, below the folder as it was named."""
        return [f"{self.where.rstrip('/')}/{file}" for file in self.files]

    def samples(self) -> Iterator[Sample | BadRow]:
        """Yield the images."""
        for file, name, label in zip(self.files, self.names(), self.labels, strict=True):
            content = (self.folder / file).read()
            try:
                yield picture(io.BytesIO(content), name), label
            except BadFile as error:
                yield BadRow(str(error))


def _image_shards(store: Store, where: str, names: Sequence[str], model: MultiExitModel, rows: int) -> list[Shard]:
    loose = [name for name in names if "/" not in name]
    if loose and len(loose) < len(names):
        raise BadInput(f"{where} has both images and folders: put each image into the folder of its class, or all here")
    if not names:
        raise BadInput(
            f"{where} has no images ({' '.join(SUFFIXES)}), .npy or .parquet: give one of these (np.save writes .npy)"
        )
    labels: list[int | None] = [None] * len(names)
    if not loose:
        classes = [name.partition("/")[0] for name in names]
        indices = class_indices(sorted(set(classes)), model.input_spec, where)
        labels = [indices[name] for name in classes]
    return [
        ImageShard(*bounds, store, where, tuple(names[slice(*bounds[1:])]), tuple(labels[slice(*bounds[1:])]))
        for bounds in _ranges(len(names), rows)
    ]


@dataclass(frozen=True)
class ArrayFile:
    """An array in an .npy file, of which any rows can be read."""

    file: Store
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int  # of the first row, in bytes

    @classmethod
    def open(cls, file: Store) -> "ArrayFile":
        """Read the header."""
        try:
            with file.open() as source:
                version = np.lib.format.read_magic(source)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, by_column, dtype = read(source)
                offset = source.tell()
        except (ValueError, OSError) as error:
            raise BadFile(str(file), f"it is not a complete .npy file ({error})", SAVE) from error
        if dtype.hasobject or by_column or not shape:
            raise BadFile(str(file), "it holds objects, a single number, or columns first", SAVE)
        return cls(file, shape, dtype, offset)

    def rows(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield these rows one by one; a few of them are in memory at a time."""
        size = self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
        with self.file.open() as source:
            source.seek(self.offset + start * size)
            for first in range(start, stop, AT_ONCE):
                count = min(AT_ONCE, stop - first)
                content = source.read(count * size)
                if len(content) < count * size:
                    raise BadFile(str(self.file), f"it ends before row {first + count}", SAVE)
                yield from np.frombuffer(content, self.dtype).reshape(count, *self.shape[1:])


@dataclass(frozen=True)
class ArrayShard(Shard):
    """Rows of arrays in .npy files."""

    images: ArrayFile
    labels: ArrayFile | None

    def samples(self) -> Iterator[Sample | BadRow]:
        """Yield the rows."""
        images = self.images.rows(self.start, self.stop)
        labels = map(int, self.labels.rows(self.start, self.stop)) if self.labels else repeat(None)
        yield from zip(images, labels, strict=False)


def _array_shards(files: Sequence[Store], where: str, rows: int) -> list[Shard]:
    arrays = {PurePosixPath(file.path).stem: ArrayFile.open(file) for file in files}
    images, labels = (arrays.get(first_of([*arrays], names) or "") for names in (IMAGE_NAMES, LABEL_NAMES))
    if len(arrays) == 1:
        (images,), labels = arrays.values(), None
    if images is None:
        raise BadInput(f"{where} has {', '.join(sorted(arrays))}: save images.npy, and labels.npy beside it")
    total = images.shape[0]
    if labels is not None and (labels.dtype.kind not in "iu" or labels.shape != (total,)):
        raise BadFile(str(labels.file), f"its labels have shape {labels.shape}", f"give {total} class indices")
    return [ArrayShard(*bounds, images, labels) for bounds in _ranges(total, rows)]


class RowGroup(NamedTuple):
    """A row group of a Parquet file."""

    file: Store
    number: int
    rows: int


@dataclass(frozen=True)
class ParquetShard(Shard):
    """Row groups of Parquet files."""

    groups: tuple[RowGroup, ...]
    column: str
    label: str | None
    classes: tuple[str, ...]

    def samples(self) -> Iterator[Sample | BadRow]:
        """Yield the rows."""
        indices: dict[Any, int] = {name: index for index, name in enumerate(self.classes)}
        for file, batch in self._batches():
            labels = batch.column(1).to_pylist() if self.label else [None] * len(batch)
            for value, label in zip(_values(batch.column(0), str(file)), labels, strict=True):
                if isinstance(value, BadRow):
                    yield value
                elif self.label and not isinstance(label, int) and label not in indices:
                    problem = f"it has a label {label!r}, which the network does not know"
                    yield BadRow(str(BadFile(str(file), problem, "give names or indices")))
                else:
                    yield value, indices.get(label, label)

    def _batches(self) -> Iterator[tuple[Store, Any]]:
        columns = [self.column, self.label] if self.label else [self.column]
        for file, groups in groupby(self.groups, key=attrgetter("file")):
            with file.open() as source:
                table, numbers = parquet.ParquetFile(source), [group.number for group in groups]
                yield from ((file, batch) for batch in table.iter_batches(AT_ONCE, numbers, columns))


def _values(column: Any, where: str) -> list[Any]:
    """Return the values of a column; where some cannot be read, these as what is wrong with them."""
    try:
        return [*column_values(column, where)]
    except (AlightError, ValueError) as error:
        if len(column) == 1:
            return [BadRow(str(error))]
        return [value for row in range(len(column)) for value in _values(column.slice(row, 1), where)]


def _parquet_shards(files: Sequence[Store], model: MultiExitModel, rows: int) -> list[Shard]:
    groups, names = _row_groups(files)
    column, label = first_of(names, (*IMAGE_NAMES, *TEXT_NAMES)), first_of(names, LABEL_NAMES)
    if column is None:
        raise BadInput(f"{files[0]} has columns {', '.join(names)}: name one 'image' or 'text', and one 'label'")
    shards: list[Shard] = []
    chunk: list[RowGroup] = []
    start = stop = 0
    for place, group in enumerate(groups, start=1):
        chunk.append(group)
        stop += group.rows
        if stop - start >= rows or place == len(groups):
            shards.append(ParquetShard(len(shards), start, stop, tuple(chunk), column, label, tuple(model.classes)))
            chunk, start = [], stop
    return shards


def _row_groups(files: Sequence[Store]) -> tuple[list[RowGroup], list[str]]:
    """Return the row groups of all files that have rows, and the columns of the first file."""
    groups: list[RowGroup] = []
    names: list[str] = []
    for file in files:
        try:
            with file.open() as source:
                table = parquet.ParquetFile(source)
                names = names or table.schema_arrow.names
                sizes = [table.metadata.row_group(index).num_rows for index in range(table.metadata.num_row_groups)]
        except ArrowException as error:
            raise BadFile(str(file), f"it is not a complete Parquet file ({error})", "write it again") from error
        groups += [RowGroup(file, number, size) for number, size in enumerate(sizes) if size]
    return groups, names
