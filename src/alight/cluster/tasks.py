"""What is done with every shard: answers under a policy, or a recording of what every head says."""

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from alight.cluster.shards import Shard
from alight.engine.answers import answer_columns
from alight.engine.predictor import Predictor
from alight.engine.prepare import threads
from alight.engine.recorder import Recorder
from alight.errors import BadInput
from alight.files import SCHEMA
from alight.networks.multi_exit import MultiExitModel
from alight.networks.store import fingerprint
from alight.outputs import HeadOutputs
from alight.policies.paced import Paced
from alight.policies.policy import Policy

Summary = dict[str, Any]  # numbers and lists of numbers, which add up over partitions
Work = Callable[[Shard, Iterable[Any]], tuple[bytes, Summary]]  # a shard and its batches become a partition


class Task(Protocol):
    """Something to be done with every shard."""

    suffix: ClassVar[str]

    def told(self) -> dict[str, Any]:
        """All that the results depend on beside network and data, as JSON has it."""

    def ready(self, model: MultiExitModel, batch_size: int, switches: Mapping[str, Any]) -> Work:
        """The work itself, with the network ready to run."""

    def summary(self, content: bytes) -> Summary:
        """What a partition that is there already amounts to."""


@dataclass(frozen=True)
class Answers:
    """Answers under a policy, as Parquet."""

    suffix: ClassVar[str] = ".parquet"
    policy: Policy
    classes: tuple[str, ...]
    allow_mismatch: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.policy, Paced):
            raise BadInput(
                "a paced policy keeps its budget along one stream, and many workers are many: calibrate with"
                " --contract batch, which adds up, or predict without --engine ray"
            )

    def told(self) -> dict[str, Any]:
        """The policy."""
        return {"task": "predict", "policy": self.policy.to_dict(), "allow_mismatch": self.allow_mismatch}

    def ready(self, model: MultiExitModel, batch_size: int, switches: Mapping[str, Any]) -> Work:
        """A predictor, to be run on each shard."""
        policy = self.policy
        predictor = Predictor(
            model,
            policy,
            batch_size=batch_size,
            probabilities=policy.keeps_predictions,
            allow_mismatch=self.allow_mismatch,
            **switches,
        )

        def work(shard: Shard, batches: Iterable[Any]) -> tuple[bytes, Summary]:
            numbers = np.arange(shard.start, shard.stop)  # by which ties are decided, as on one machine
            decisions = predictor.run(batches, samples=numbers, progress=False)
            columns = answer_columns(decisions, shard.names() or numbers.tolist(), self.classes, policy.unit)
            file = io.BytesIO()
            parquet.write_table(pa.table(columns), file)
            return file.getvalue(), _spent(decisions.exits, decisions.spent, policy.num_exits)

        return work

    def summary(self, content: bytes) -> Summary:
        """Samples, what they cost, and where they left."""
        table = parquet.read_table(io.BytesIO(content))
        cost = f"cost_{self.policy.unit}" if self.policy.unit else "cost"
        return _spent(table["exit"].to_numpy(), table[cost].to_numpy(), self.policy.num_exits)


@dataclass(frozen=True)
class Recordings:
    """What every head says about every sample, as .npz that `HeadOutputs.load` reads."""

    suffix: ClassVar[str] = ".npz"
    score: str = "margin"
    features: tuple[str, ...] = ()
    log_probabilities: bool = False

    def told(self) -> dict[str, Any]:
        """Which scores are kept."""
        kept = {"score": self.score, "features": list(self.features), "log_probabilities": self.log_probabilities}
        return {"task": "record", **kept}

    def ready(self, model: MultiExitModel, batch_size: int, switches: Mapping[str, Any]) -> Work:
        """A recorder, to be asked about each shard."""
        asked = {name: value for name, value in switches.items() if name != "num_threads"}
        recorder = Recorder(model, self.score, self.features, self.log_probabilities, **asked)
        own = fingerprint(recorder.model)

        def work(shard: Shard, batches: Iterable[Any]) -> tuple[bytes, Summary]:
            with threads(switches.get("num_threads")):
                table = HeadOutputs.joined([*recorder.tables(batches, progress=False)])
            table = replace(table, fingerprint=own)
            named = {"alight": np.array("HeadOutputs"), "schema": np.array(SCHEMA), **table.rows(), **table.metadata()}
            file = io.BytesIO()
            np.savez(file, **named)  # type: ignore[arg-type]  # not compressed: calibration reads it again and again
            return file.getvalue(), _right(table.predictions, table.labels)

        return work

    def summary(self, content: bytes) -> Summary:
        """Samples, and how many of them each exit is right about."""
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            labels = arrays["labels"] if "labels" in arrays.files else None
            return _right(arrays["predictions"], labels)


def added(summaries: Iterable[Summary]) -> Summary:
    """What partitions amount to together.

    >>> added([{"rows": 2, "exits": [1, 1]}, {"rows": 1, "exits": [0, 1]}])
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


def _spent(exits: np.ndarray, spent: np.ndarray, num_exits: int) -> Summary:
    counts = np.bincount(exits, minlength=num_exits).tolist()
    return {"rows": len(exits), "spent": float(spent.sum()), "exits": counts}


def _right(predictions: np.ndarray, labels: np.ndarray | None) -> Summary:
    right = [] if labels is None else (predictions == labels[:, None]).sum(axis=0).tolist()
    return {"rows": len(predictions), "right": right}
