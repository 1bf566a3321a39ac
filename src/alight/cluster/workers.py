"""A worker: a network in a process of its own that predicts or records one shard at a time and writes its partition."""

import ctypes
import io
import json
import operator
import pickle
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from alight.cluster.shards import BadRow, Shard
from alight.cluster.stores import PartitionFolder
from alight.data.batches import Collate
from alight.data.formats import answer_columns
from alight.data.tokens import TOKENIZER
from alight.engine.backends import Integers
from alight.engine.predictor import Predictor, load_network
from alight.engine.recorder import Recorder
from alight.engine.settings import RunSettings
from alight.errors import AlightError, BadInput
from alight.files import CASCADE, CONFIG, SCHEMA, WEIGHTS
from alight.outputs import KEPT, HeadOutputs
from alight.policies.paced import Paced
from alight.policies.policy import Policy

Summary = dict[str, Any]  # numbers and lists of numbers, which are added up over partitions
Names = Sequence[int | str]  # of samples: their files, or their numbers
Work = Callable[[Integers, Names, Iterable[Any]], bytes]  # from numbers, names and batches to a partition's content
Row = tuple[int, Any, int | None]  # the number of a sample, the sample, and its label


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

        def predict(numbers: Integers, names: Names, batches: Iterable[Any]) -> bytes:
            decisions = predictor.run(batches, samples=numbers, progress=False)  # numbers of one machine, for ties
            columns = answer_columns(decisions, names, self.classes)
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

        def record(numbers: Integers, names: Names, batches: Iterable[Any]) -> bytes:
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
    on_error: str = "fail"  # or "skip": bad rows are left out, and listed


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
            except Exception as failed:  # Ray would try the same three times more, and say so at length
                error = f"{type(failed).__name__} in rows {shard.start} to {shard.stop - 1}: {failed}"
            for name, value in {"index": shard.index, "summary": summary, "error": error}.items():
                done[name].append(value)
        return done

    def _write_partition(self, shard: Shard) -> Summary:
        names: Names = shard.names() or range(shard.start, shard.stop)
        bad: dict[int, str] = {}  # what is wrong with rows, by number
        try:
            content = self._content(shard, names, bad)
        except (AlightError, ValueError) as error:
            bad = dict(self._bad_rows(shard))
            if not bad:
                raise
            number, reason = next(iter(bad.items()))
            name = f"row {number}" + (f" ({names[number - shard.start]})" if shard.names() else "")
            if self.settings.on_error == "fail":
                raise BadInput(f"{reason} ({name}; --on-error skip leaves such rows out)") from error
            if len(bad) == len(shard):
                raise BadInput(f"every row of a partition is bad, the first: {reason} ({name})") from error
            content = self._content(shard, names, bad)
            self._write_bad_rows(shard, names, bad)
        self.settings.partitions.partition(shard.index).write_whole(content)
        summary = self.settings.task.summary(content) | {"skipped": len(bad)}
        release_memory()
        return summary

    def _content(self, shard: Shard, names: Names, bad: Mapping[int, str]) -> bytes:
        """Return the content of a shard's partition, without the bad rows."""
        numbers = np.array([number for number in range(shard.start, shard.stop) if number not in bad])
        kept = [names[number - shard.start] for number in numbers.tolist()]
        rows = self._rows(shard, bad)
        return self.work(numbers, kept, (self._batch(batch) for batch in self._in_batches(rows)))

    def _rows(self, shard: Shard, bad: Mapping[int, str]) -> Iterator[Row]:
        for number, sample in enumerate(shard.samples(), shard.start):
            if number in bad:
                continue
            if isinstance(sample, BadRow):
                raise BadInput(sample.reason)
            yield number, *sample

    def _in_batches(self, rows: Iterator[Row]) -> Iterator[list[Row]]:
        while batch := list(islice(rows, self.settings.batch_size)):
            yield batch

    def _batch(self, rows: Sequence[Row]) -> Any:
        _, inputs, labels = zip(*rows, strict=True)
        return self.collate(([*inputs], [*labels]))

    def _bad_rows(self, shard: Shard) -> Iterator[tuple[int, str]]:
        """Yield the numbers of the rows that cannot be read or run, and why; the first alone if it fails the job."""
        found: dict[int, str] = {}

        def good() -> Iterator[Row]:
            for number, sample in enumerate(shard.samples(), shard.start):
                if isinstance(sample, BadRow):
                    found[number] = sample.reason
                else:
                    yield number, *sample

        for batch in self._in_batches(good()):
            found |= self._failing(batch)
            if found and self.settings.on_error == "fail":
                break
        yield from sorted(found.items())

    def _failing(self, rows: Sequence[Row]) -> dict[int, str]:
        """Return which of these rows fail, and why: each is tried alone if they do not run together."""
        numbers = [number for number, _, _ in rows]
        try:
            self.work(np.array(numbers), numbers, [self._batch(rows)])
        except (AlightError, ValueError) as error:
            if len(rows) == 1:
                return {numbers[0]: str(error)}
            return {number: reason for row in rows for number, reason in self._failing([row]).items()}
        return {}

    def _write_bad_rows(self, shard: Shard, names: Names, bad: Mapping[int, str]) -> None:
        columns = {"row": [*bad], "name": [str(names[number - shard.start]) for number in bad]}
        file = io.BytesIO()
        parquet.write_table(pa.table({**columns, "reason": [*bad.values()]}), file)
        self.settings.partitions.bad_rows(shard.index).write_whole(file.getvalue())


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
