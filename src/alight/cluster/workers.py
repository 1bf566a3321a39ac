"""A worker: a network in a process of its own that predicts or records one shard at a time and writes its partition."""

import ctypes
import io
import json
import operator
import pickle
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from alight.cluster.shards import Shard
from alight.cluster.stores import PartitionFolder
from alight.data.formats import answer_columns
from alight.data.samples import Collate
from alight.data.tokens import TOKENIZER
from alight.engine.predictor import Predictor, load_network
from alight.engine.recorder import Recorder
from alight.engine.settings import RunSettings
from alight.errors import AlightError, BadInput
from alight.files import CASCADE, CONFIG, SCHEMA, WEIGHTS
from alight.outputs import KEPT, HeadOutputs
from alight.policies.paced import Paced
from alight.policies.policy import Policy

Summary = dict[str, Any]  # numbers and lists of numbers, which are added up over partitions
Work = Callable[[Shard, Iterable[Any]], bytes]  # from a shard and its batches to the content of a partition


@dataclass(frozen=True)
class PredictTask:
    """Prediction under a policy; partitions are Parquet files."""

    suffix: ClassVar[str] = ".parquet"
    policy: Policy
    exits: tuple[str, ...]  # names of all exits of the network
    classes: tuple[str, ...]
    allow_mismatch: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.policy, Paced):
            raise BadInput(
                "a paced policy keeps its budget along one stream, and every worker is a stream of its own: calibrate"
                " with --contract batch, which adds up, or predict without --engine ray"
            )

    def plan(self) -> dict[str, Any]:
        """Return all that the results depend on beside network and data, as JSON values."""
        return {"task": "predict", "policy": self.policy.to_dict(), "allow_mismatch": self.allow_mismatch}

    def prepare(self, model: Any, batch_size: int, settings: RunSettings) -> Work:
        """Return prediction of a shard, with the network ready to run."""
        policy = self.policy
        predictor = Predictor(
            model,
            policy,
            settings=settings,
            batch_size=batch_size,
            probabilities=policy.keeps_answers,
            allow_mismatch=self.allow_mismatch,
        )

        def predict(shard: Shard, batches: Iterable[Any]) -> bytes:
            numbers = np.arange(shard.start, shard.stop)  # as on one machine: ties are broken by them
            decisions = predictor.run(batches, samples=numbers, progress=False)
            columns = answer_columns(decisions, shard.names() or numbers.tolist(), self.classes)
            file = io.BytesIO()
            parquet.write_table(pa.table(columns), file)
            return file.getvalue()

        return predict

    def summary(self, content: bytes) -> Summary:
        """Return the number of samples of a partition, their cost, how many left at each exit and are right."""
        table = parquet.read_table(io.BytesIO(content))
        spent = table[f"cost_{self.policy.unit}" if self.policy.unit else "cost"].to_numpy()
        left, answers = Counter(table["exit"].to_pylist()), table["prediction"].to_pylist()
        labels = table["label"].to_pylist() if "label" in table.column_names else []
        right = [sum(map(operator.eq, answers, labels))] if labels else []
        exits = [left[name] for name in self.exits]
        return {"rows": len(spent), "spent": float(spent.sum()), "exits": exits, "correct": right}


@dataclass(frozen=True)
class RecordTask:
    """Recording of the outputs of every head; partitions are .npz files that `HeadOutputs.load` reads."""

    suffix: ClassVar[str] = ".npz"
    score: str = "margin"
    features: tuple[str, ...] = ()
    top: int = KEPT

    def plan(self) -> dict[str, Any]:
        """Return all that the results depend on beside network and data, as JSON values."""
        scores = {"score": self.score, "features": list(self.features), "top": self.top}
        return {"task": "record", **scores}

    def prepare(self, model: Any, batch_size: int, settings: RunSettings) -> Work:
        """Return recording of a shard, with the network ready to run."""
        recorder = Recorder(model, self.score, self.features, self.top, settings)
        own = recorder.backend.fingerprint

        def record(shard: Shard, batches: Iterable[Any]) -> bytes:
            table = replace(HeadOutputs.joined([*recorder.tables(batches, progress=False)]), fingerprint=own)
            named = {"alight": np.array("HeadOutputs"), "schema": np.array(SCHEMA), **table.rows(), **table.metadata()}
            file = io.BytesIO()
            np.savez(file, **named)  # type: ignore[arg-type]  # not compressed: calibration reads it again and again
            return file.getvalue()

        return record

    def summary(self, content: bytes) -> Summary:
        """Return the number of samples of a partition, and for how many of them each exit predicts the label."""
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            predictions, labels = arrays["predictions"], arrays.get("labels")
        correct = [] if labels is None else (predictions == labels[:, None]).sum(axis=0).tolist()
        return {"rows": len(predictions), "correct": correct}


ClusterTask = PredictTask | RecordTask  # what is done with every shard


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker needs beside the network."""

    task: ClusterTask
    partitions: PartitionFolder
    where: str
    batch_size: int
    run: RunSettings


class ShardWorker:
    """Holds the network, and turns rows of Ray Data that name shards into rows that sum up their partitions."""

    def __init__(self, network: Mapping[str, bytes], settings: WorkerSettings) -> None:
        self.settings = settings
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for file, content in network.items():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_bytes(content)
            model = load_network(folder)
            self.collate = Collate(model.input_spec, settings.where)
            if model.input_spec.takes_texts:
                self.collate.load_tokenizer()  # from the folder, which is removed
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
        content = self.work(shard, self._batches(shard))
        self.settings.partitions.partition(shard.index).write_whole(content)
        summary = self.settings.task.summary(content)
        release_memory()
        return summary

    def _batches(self, shard: Shard) -> Iterator[Any]:
        samples = shard.samples()
        while batch := list(islice(samples, self.settings.batch_size)):
            inputs, labels = zip(*batch, strict=True)
            yield self.collate(([*inputs], [*labels]))


def release_memory() -> None:
    """Return freed memory to the system: glibc would keep it, in pieces, for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def pack(folder: Path, tokenizer: Path | None = None) -> dict[str, bytes]:
    """Return the files of a network's folder, with its tokenizer or another, to be sent to workers."""
    if (folder / CASCADE).is_file():
        every = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in every}
    files = {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    words = tokenizer or folder / TOKENIZER
    if words.is_dir():
        files |= {f"{TOKENIZER}/{file.name}": file.read_bytes() for file in words.iterdir() if file.is_file()}
    return files
