"""A worker: a network in a process of its own that reads one shard at a time and writes its partition."""

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

from alight.cluster.shards import Shard
from alight.cluster.stores import PartitionFolder
from alight.cluster.tasks import ClusterTask, Summary
from alight.data.formats import collation
from alight.data.preprocess import Sample
from alight.engine.settings import RunSettings
from alight.errors import AlightError
from alight.files import CONFIG, WEIGHTS
from alight.networks.store import load_model

TOKENIZER = "tokenizer"  # the folder beside a network that reads text


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker needs beside the network."""

    task: ClusterTask
    partitions: PartitionFolder
    kind: str  # of the data, "images" or "text"
    where: str
    batch_size: int
    run: RunSettings


@dataclass(frozen=True)
class ShardBatches:
    """The batches of a shard; they can be iterated over many times."""

    shard: Shard
    batch_size: int
    collate: Callable[[Sequence[Sample]], Any]

    def __iter__(self) -> Iterator[Any]:
        samples = self.shard.samples()
        while batch := list(islice(samples, self.batch_size)):
            yield self.collate(batch)

    def __len__(self) -> int:
        return -(-len(self.shard) // self.batch_size)


class ShardWorker:
    """Holds the network, and turns rows of Ray Data that name shards into rows that sum up their partitions."""

    def __init__(self, network: Mapping[str, bytes], settings: WorkerSettings) -> None:
        self.settings = settings
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            unpack(network, folder)
            model = load_model(folder)
            self.collate = collation(settings.kind, model.input_spec, settings.where, tokenizer=folder / TOKENIZER)
        self.work = settings.task.prepare(model, settings.batch_size, settings.run)

    def __call__(self, rows: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return the summary of each partition once it is written, or the error, which the job raises."""
        done: dict[str, list[Any]] = {"index": [], "summary": [], "error": []}
        for content in rows["shard"]:
            shard: Shard = pickle.loads(content)  # from our own driver
            summary, error = "", ""
            try:
                summary = json.dumps(self._write_partition(shard))
            except AlightError as refused:
                error = str(refused)
            except OSError as failed:
                error = f"{failed.filename}: {failed.strerror}" if failed.filename else str(failed)
            for name, value in {"index": shard.index, "summary": summary, "error": error}.items():
                done[name].append(value)
        return done

    def _write_partition(self, shard: Shard) -> Summary:
        partition, summary = self.work(shard, ShardBatches(shard, self.settings.batch_size, self.collate))
        self.settings.partitions.partition(shard.index).write_whole(partition)
        release_memory()
        return summary


def release_memory() -> None:
    """Return freed memory to the system: glibc would keep it, in pieces, for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def pack(folder: Path, tokenizer: Path | None = None) -> dict[str, bytes]:
    """Return the files of a network's folder, with its tokenizer or another, to be sent to workers."""
    files = {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    words = tokenizer or folder / TOKENIZER
    if words.is_dir():
        files |= {f"{TOKENIZER}/{file.name}": file.read_bytes() for file in words.iterdir() if file.is_file()}
    return files


def unpack(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files into a folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
