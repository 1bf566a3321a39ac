"""A network in a process of its own, on whatever machine: it takes one shard at a time and writes its partition."""

import ctypes
import json
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from alight.cluster.partitions import Partitions
from alight.cluster.shards import Shard
from alight.cluster.tasks import Summary, Task
from alight.data.formats import collation
from alight.data.preprocess import Sample
from alight.errors import AlightError
from alight.networks.folder import CONFIG, WEIGHTS
from alight.networks.store import load_model

TOKENIZER = "tokenizer"  # the folder beside a network that reads text


@dataclass(frozen=True)
class Settings:
    """What a worker has to know beside the network."""

    task: Task
    partitions: Partitions
    kind: str  # of the data, "images" or "text"
    where: str
    batch_size: int
    switches: Mapping[str, Any]


@dataclass(frozen=True)
class Batches:
    """The batches of a shard, as often as asked for."""

    shard: Shard
    opened: dict[str, Any]
    batch_size: int
    collate: Callable[[Sequence[Sample]], Any]

    def __iter__(self) -> Iterator[Any]:
        samples = self.shard.samples(self.opened)
        while batch := list(islice(samples, self.batch_size)):
            yield self.collate(batch)

    def __len__(self) -> int:
        return -(-(self.shard.stop - self.shard.start) // self.batch_size)


class Worker:
    """Holds the network, and answers Ray Data for a row: a shard in, what its partition amounts to out."""

    def __init__(self, network: Mapping[str, bytes], settings: Settings) -> None:
        self.settings, self.opened = settings, dict[str, Any]()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            unpack(network, folder)
            model = load_model(folder)
            self.collate = collation(settings.kind, model, settings.where, tokenizer=folder / TOKENIZER)
        self.work = settings.task.ready(model, settings.batch_size, settings.switches)

    def __call__(self, rows: Mapping[str, Any]) -> dict[str, list[Any]]:
        """What each partition amounts to, once it is in its place; or why it cannot be made, which is told as it is."""
        done: dict[str, list[Any]] = {"index": [], "summary": [], "error": []}
        for content in rows["shard"]:
            shard: Shard = pickle.loads(content)  # from our own driver
            summary, error = "", ""
            try:
                summary = json.dumps(self._made(shard))
            except AlightError as refused:
                error = str(refused)
            except OSError as failed:
                error = f"{failed.filename}: {failed.strerror}" if failed.filename else str(failed)
            for name, value in {"index": shard.index, "summary": summary, "error": error}.items():
                done[name].append(value)
        return done

    def _made(self, shard: Shard) -> Summary:
        batches = Batches(shard, self.opened, self.settings.batch_size, self.collate)
        partition, summary = self.work(shard, batches)
        self.settings.partitions.store(shard.index).write_whole(partition)
        give_back()
        return summary


def give_back() -> None:
    """Let the system have what this process has freed: glibc would keep it, in pieces, for what may come."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def pack(folder: Path, tokenizer: Path | None = None) -> dict[str, bytes]:
    """The files of a network's folder, to be sent to workers, with its tokenizer or another."""
    files = {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    words = tokenizer or folder / TOKENIZER
    if words.is_dir():
        files |= {f"{TOKENIZER}/{file.name}": file.read_bytes() for file in words.iterdir() if file.is_file()}
    return files


def unpack(files: Mapping[str, bytes], folder: Path) -> None:
    """Put the files into a folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
