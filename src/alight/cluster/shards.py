"""Data cut into shards, the same ones every time: what a worker reads for one partition of results.

folder/class/*.png     a folder for each class; folder/*.png without labels
images.npz             images and labels, in one file
*.parquet              a file or a folder of files: images as bytes of files or as arrays, or text; and labels
"""

import errno
import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from pyarrow import ArrowException, parquet

from alight.cluster.archives import Member
from alight.cluster.columns import values_of
from alight.cluster.stores import Store, public_name
from alight.data.formats import IMAGE_NAMES, LABEL_NAMES, SUFFIXES, TEXT_NAMES, class_indices, picture
from alight.data.preprocess import Sample
from alight.errors import BadFile, BadInput
from alight.networks.multi_exit import MultiExitModel

AT_ONCE = 256  # rows that are read together


@dataclass(frozen=True)
class Shard(ABC):
    """A run of the samples, which can be read on any machine."""

    index: int
    start: int  # the number of its first sample
    stop: int

    def names(self) -> list[str] | None:
        """The samples' files, None where they are known by number alone."""
        return None

    @abstractmethod
    def samples(self, opened: dict[str, Any]) -> Iterator[Sample]:
        """Its samples; `opened` is what a worker keeps open from one shard to the next."""


@dataclass(frozen=True)
class Data:
    """All shards of some data."""

    where: str
    kind: str  # "images" or "text"
    content: str  # changes with any file's name, size or date
    shards: Sequence[Shard]

    def __len__(self) -> int:
        return self.shards[-1].stop


def open_data(where: "str | Store", model: MultiExitModel, rows: int) -> Data:
    """The data that lie there, in shards of so many samples; of Parquet in whole row groups, so many or more."""
    store, named = Store.at(where), public_name(where)
    if store.is_folder():
        files = dict(store.files())
    elif store.is_file():
        files = {"": store.filesystem.get_file_info(store.path)}
    else:
        raise FileNotFoundError(errno.ENOENT, "there is no such file or folder", named)
    if store.suffix == ".npz" and "" in files:
        kind, shards = "images", _archive(store, rows)
    elif tables := [name for name in files if (name or store.path).endswith(".parquet")]:
        kind, shards = _tables([store / name if name else store for name in tables], model, rows)
    else:
        names = [name for name in files if PurePosixPath(name).suffix.lower() in SUFFIXES]
        kind, shards = "images", _pictures(store, named, names, model, rows)
    if not shards:
        raise BadInput(f"{named} has no samples: give data with at least one")
    listed = "\n".join(f"{name} {info.size} {info.mtime_ns}" for name, info in files.items())
    return Data(named, kind, hashlib.sha256(listed.encode()).hexdigest(), shards)


def _ranges(total: int, rows: int) -> list[tuple[int, int, int]]:
    return [(index, start, min(start + rows, total)) for index, start in enumerate(range(0, total, rows))]


@dataclass(frozen=True)
class PictureShard(Shard):
    """Image files of a folder."""

    folder: Store
    where: str
    files: tuple[str, ...]
    labels: tuple[int, ...] | None

    def names(self) -> list[str] | None:
        """The files, as their folder was named."""
        return [f"{self.where.rstrip('/')}/{file}" for file in self.files]

    def samples(self, opened: dict[str, Any]) -> Iterator[Sample]:
        """Its pictures."""
        for position, file in enumerate(self.files):
            image = picture(io.BytesIO((self.folder / file).read()), f"{self.where.rstrip('/')}/{file}")
            yield image, None if self.labels is None else self.labels[position]


def _pictures(store: Store, where: str, names: Sequence[str], model: MultiExitModel, rows: int) -> list[Shard]:
    loose = [name for name in names if "/" not in name]
    if loose and len(loose) < len(names):
        raise BadInput(f"{where} has both images and folders: put each image into the folder of its class, or all here")
    if not names:
        raise BadInput(f"{where} has no images ({' '.join(SUFFIXES)}), .npz or .parquet: give one of these")
    labels = None
    if not loose:
        classes = [name.partition("/")[0] for name in names]
        indices = class_indices(sorted(set(classes)), model.input_spec, where)
        labels = [indices[name] for name in classes]
    return [
        PictureShard(
            index,
            start,
            stop,
            store,
            where,
            tuple(names[start:stop]),
            None if labels is None else tuple(labels[start:stop]),
        )
        for index, start, stop in _ranges(len(names), rows)
    ]


@dataclass(frozen=True)
class ArchiveShard(Shard):
    """Rows of the arrays in an .npz file."""

    file: Store
    images: str
    labels: str | None

    def samples(self, opened: dict[str, Any]) -> Iterator[Sample]:
        """Its rows."""
        names = [name for name in (self.images, self.labels) if name]
        for name in names:
            if name not in opened:
                opened[name] = Member(self.file, name)
        for start in range(self.start, self.stop, AT_ONCE):
            stop = min(start + AT_ONCE, self.stop)
            labels = opened[self.labels].rows(start, stop).tolist() if self.labels else [None] * (stop - start)
            yield from zip(opened[self.images].rows(start, stop), labels, strict=True)


def _archive(file: Store, rows: int) -> list[Shard]:
    arrays = Member.names(file)
    images, labels = (next((name for name in names if name in arrays), None) for names in (IMAGE_NAMES, LABEL_NAMES))
    if images is None:
        raise BadFile(str(file), f"it has {', '.join(arrays) or 'nothing'}", "save images=..., labels=... by np.savez")
    total = len(Member(file, images))
    if labels is not None:
        told = Member(file, labels)
        if told.kind not in "iu" or told.shape != (total,):
            raise BadFile(str(file), f"its labels have shape {told.shape}", f"give {total} class indices")
    return [ArchiveShard(*each, file, images, labels) for each in _ranges(total, rows)]


@dataclass(frozen=True)
class TableShard(Shard):
    """Row groups of Parquet files."""

    groups: tuple[tuple[Store, tuple[int, ...]], ...]  # of each file, which
    column: str
    label: str | None
    classes: tuple[str, ...]
    found: Mapping[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "found", {name: index for index, name in enumerate(self.classes)})

    def samples(self, opened: dict[str, Any]) -> Iterator[Sample]:
        """Its rows."""
        columns = [self.column, *([self.label] if self.label else [])]
        for file, groups in self.groups:
            with file.open() as source:
                table = parquet.ParquetFile(source)
                for batch in table.iter_batches(AT_ONCE, row_groups=list(groups), columns=columns):
                    labels = batch.column(1).to_pylist() if self.label else [None] * len(batch)
                    for value, label in zip(values_of(batch.column(0), str(file)), labels, strict=True):
                        yield value, self._class(label, file)

    def _class(self, label: Any, file: Store) -> int | None:
        if label is None and self.label is None:
            return None
        if isinstance(label, int):
            return label
        if label not in self.found:
            raise BadFile(
                str(file), f"it has a label {label!r}, which the network does not know", "give names or indices"
            )
        return self.found[label]


def _tables(files: Sequence[Store], model: MultiExitModel, rows: int) -> tuple[str, list[Shard]]:
    groups, schema = [], None
    for file in files:
        try:
            with file.open() as source:
                told = parquet.ParquetFile(source)
                schema = schema or told.schema_arrow
                sizes = [told.metadata.row_group(group).num_rows for group in range(told.metadata.num_row_groups)]
        except ArrowException as error:
            raise BadFile(str(file), f"it is no whole Parquet file ({error})", "write it again") from error
        groups += [(file, group, size) for group, size in enumerate(sizes) if size]
    there = schema.names if schema is not None else []
    image, text, label = (
        next((name for name in names if name in there), None) for names in (IMAGE_NAMES, TEXT_NAMES, LABEL_NAMES)
    )
    if image is None and text is None:
        raise BadInput(f"{files[0]} has columns {', '.join(there)}: name one 'image' or 'text', and one 'label'")
    shards: list[Shard] = []
    start, waiting, held = 0, [], 0
    for position, (file, group, size) in enumerate(groups):
        waiting.append((file, group))
        held += size
        if held >= rows or position == len(groups) - 1:
            whole = tuple((each, tuple(g for other, g in waiting if other is each)) for each in _unique(waiting))
            column = str(image or text)
            shards.append(TableShard(len(shards), start, start + held, whole, column, label, tuple(model.classes)))
            start, waiting, held = start + held, [], 0
    return "images" if image else "text", shards


def _unique(groups: Sequence[tuple[Store, int]]) -> list[Store]:
    return list({id(file): file for file, _ in groups}.values())
