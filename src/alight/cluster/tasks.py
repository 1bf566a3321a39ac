"""What is done with every shard: prediction under a policy, or recording the outputs of every head."""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from alight.cluster.shards import Shard
from alight.data.formats import answer_columns
from alight.engine.predictor import Predictor
from alight.engine.recorder import Recorder
from alight.engine.settings import RunSettings
from alight.errors import BadInput
from alight.files import SCHEMA
from alight.networks.multi_exit import MultiExitModel
from alight.outputs import HeadOutputs
from alight.policies.paced import Paced
from alight.policies.policy import Policy

Summary = dict[str, Any]  # numbers and lists of numbers, which are added up over partitions
Work = Callable[[Shard, Iterable[Any]], tuple[bytes, Summary]]  # from a shard and its batches to a partition


class ClusterTask(Protocol):
    """Something to be done with every shard."""

    suffix: ClassVar[str]

    def plan(self) -> dict[str, Any]:
        """Return all that the results depend on beside network and data, as JSON values."""

    def prepare(self, model: MultiExitModel, batch_size: int, settings: RunSettings) -> Work:
        """Return the work on a shard, with the network ready to run."""

    def summary(self, content: bytes) -> Summary:
        """Return the summary of a partition that is written already."""


@dataclass(frozen=True)
class PredictTask:
    """Prediction under a policy; partitions are Parquet files."""

    suffix: ClassVar[str] = ".parquet"
    policy: Policy
    classes: tuple[str, ...]
    allow_mismatch: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.policy, Paced):
            raise BadInput(
                "a paced policy keeps its budget along one stream, and every worker is a stream of its own: calibrate"
                " with --contract batch, which adds up, or predict without --engine ray"
            )

    def plan(self) -> dict[str, Any]:
        """Return the policy."""
        return {"task": "predict", "policy": self.policy.to_dict(), "allow_mismatch": self.allow_mismatch}

    def prepare(self, model: MultiExitModel, batch_size: int, settings: RunSettings) -> Work:
        """Return prediction of a shard."""
        policy = self.policy
        predictor = Predictor(
            model,
            policy,
            settings=settings,
            batch_size=batch_size,
            probabilities=policy.keeps_predictions,
            allow_mismatch=self.allow_mismatch,
        )

        def predict(shard: Shard, batches: Iterable[Any]) -> tuple[bytes, Summary]:
            numbers = np.arange(shard.start, shard.stop)  # as on one machine: ties are broken by them
            decisions = predictor.run(batches, samples=numbers, progress=False)
            columns = answer_columns(decisions, shard.names() or numbers.tolist(), self.classes, policy.unit)
            file = io.BytesIO()
            parquet.write_table(pa.table(columns), file)
            return file.getvalue(), self._summary(decisions.exits, decisions.spent)

        return predict

    def summary(self, content: bytes) -> Summary:
        """Return the number of samples, their cost, and how many left at each exit."""
        table = parquet.read_table(io.BytesIO(content))
        cost = f"cost_{self.policy.unit}" if self.policy.unit else "cost"
        return self._summary(table["exit"].to_numpy(), table[cost].to_numpy())

    def _summary(self, exits: np.ndarray, spent: np.ndarray) -> Summary:
        counts = np.bincount(exits, minlength=self.policy.num_exits).tolist()
        return {"rows": len(exits), "spent": float(spent.sum()), "exits": counts}


@dataclass(frozen=True)
class RecordTask:
    """Recording of the outputs of every head; partitions are .npz files that `HeadOutputs.load` reads."""

    suffix: ClassVar[str] = ".npz"
    score: str = "margin"
    features: tuple[str, ...] = ()
    log_probabilities: bool = False

    def plan(self) -> dict[str, Any]:
        """Return which scores are recorded."""
        scores = {"score": self.score, "features": list(self.features), "log_probabilities": self.log_probabilities}
        return {"task": "record", **scores}

    def prepare(self, model: MultiExitModel, batch_size: int, settings: RunSettings) -> Work:
        """Return recording of a shard."""
        recorder = Recorder(model, self.score, self.features, self.log_probabilities, settings)
        own = recorder.backend.fingerprint

        def record(shard: Shard, batches: Iterable[Any]) -> tuple[bytes, Summary]:
            table = replace(HeadOutputs.joined([*recorder.tables(batches, progress=False)]), fingerprint=own)
            named = {"alight": np.array("HeadOutputs"), "schema": np.array(SCHEMA), **table.rows(), **table.metadata()}
            file = io.BytesIO()
            np.savez(file, **named)  # type: ignore[arg-type]  # not compressed: calibration reads it again and again
            return file.getvalue(), self._summary(table.predictions, table.labels)

        return record

    def summary(self, content: bytes) -> Summary:
        """Return the number of samples, and for how many of them each exit predicts the label."""
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            labels = arrays["labels"] if "labels" in arrays.files else None
            return self._summary(arrays["predictions"], labels)

    def _summary(self, predictions: np.ndarray, labels: np.ndarray | None) -> Summary:
        correct = [] if labels is None else (predictions == labels[:, None]).sum(axis=0).tolist()
        return {"rows": len(predictions), "correct": correct}


def add_summaries(summaries: Iterable[Summary]) -> Summary:
    """Return the totals over partitions.

    >>> add_summaries([{"rows": 2, "exits": [1, 1]}, {"rows": 1, "exits": [0, 1]}])
    {'rows': 3, 'exits': [1, 2]}
    """
    total: Summary = {}
    for each in summaries:
        for name, value in each.items():
            if isinstance(value, list):
                total[name] = [a + b for a, b in zip(total.get(name, [0] * len(value)), value, strict=True)]
            else:
                total[name] = total.get(name, 0) + value
    return total
