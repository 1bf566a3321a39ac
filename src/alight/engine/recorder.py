"""What every head says about every sample, once, so that everything else is arithmetic on a table."""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from alight.data.batches import BATCH_SIZE, Batch, batches, in_batches, length_of, prefetch, sample_shape
from alight.data.labels import single_classes
from alight.data.preprocess import as_array
from alight.engine.backends import Backend, DeviceValues, HeadValues, Reads, State
from alight.engine.backends.cascade import Cascade
from alight.engine.settings import RunSettings
from alight.errors import BadInput
from alight.files import GrowingArrays, PathLike
from alight.outputs import KEPT, TOP, HeadOutputs, check_top
from alight.scores import SCORES

ERRORS = 4  # standard errors below guessing: no network that knows nothing is so rarely right
KNOWING = 0.4  # of the samples, at least, that a network which knows something gets right under other numbers


@dataclass(frozen=True)
class Recorded:
    """A table on the disk: what it is, without holding it.

    >>> Recorded(Path("outputs.npz"), 1000, 3, "margin", "", accuracies=(0.6, 0.7, 0.8)).num_samples
    1000
    """

    path: Path  # of the .npz file
    num_samples: int  # rows of the table
    num_exits: int  # columns of the table
    score: str  # its name
    fingerprint: str  # of the network
    accuracies: tuple[float, ...]  # of every exit; none without labels

    def load(self) -> HeadOutputs:
        """Return the table itself."""
        return HeadOutputs.load(self.path)

    def __str__(self) -> str:
        kind = "labelled" if self.accuracies else "unlabelled"
        return f"{self.num_samples:,} samples, {self.num_exits} exits, score {self.score!r}, {kind}: {self.path}"


def record(
    model: Any,
    data: Any,
    *,
    batch_size: int = BATCH_SIZE,
    score: str = "margin",
    features: Iterable[str] = (),
    top: int = KEPT,
    settings: RunSettings | None = None,
    progress: bool = True,
) -> HeadOutputs:
    """Return what every head of a `MultiExitModel` says about the data, in its order, with labels if it has any.

    `data` is a loader, a data set, arrays or tensors, (inputs, labels), or a list of images: taken in batches of
    `batch_size`, pictures and bytes normalised as the network says.

    Scores are computed in float64 from logits, where the network runs: only they are kept, and the log-probabilities of
    the likeliest classes, `top` of them, in half precision. `features` names further scores. A predictor with another
    dtype in its `settings` needs a recording with that dtype. The table carries the fingerprint of the network as it
    ran. For tables that memory cannot hold there is `Recorder.write`.

    Args:
        model: A `MultiExitModel`, a `cascade`, or a backend, of which only the open exits are recorded.
        data: Arrays, a list, a data set, a loader, a DataFrame or a path.
        batch_size: Of what is not a loader.
        score: The confidence of a head: "margin", "max_probability", "negative_entropy", "logit_margin".
        features: Further scores, by name.
        top: Likeliest classes whose log-probabilities are kept.
        settings: How the network runs; a predictor must run the same dtype.
        progress: Show a bar.

    >>> import torch
    >>> from torch import nn
    >>> from alight import MultiExitModel
    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> record(model, [(torch.zeros(5, 4), torch.tensor([0, 1, 2, 0, 1]))], progress=False)
    HeadOutputs(5 samples, 2 exits, score 'margin', labelled)
    """
    recorder = Recorder(model, score, features, top, settings)
    table = recorder.table(data, batch_size, progress)
    if problem := numbered_otherwise(table, recorder.backend.num_classes):
        warnings.warn(problem, stacklevel=2)
    return table


def numbered_otherwise(table: HeadOutputs, num_classes: int | None) -> str:
    """Return what to do about labels that are numbered otherwise than the classes of a network; nothing if they fit.

    The full network is then significantly less accurate than guessing, and accurate once its classes are renumbered.

    >>> other = HeadOutputs([[0.9]] * 300, [[0], [1], [2]] * 100, [1, 2, 0] * 100)
    >>> numbered_otherwise(other, 3).partition(":")[0]
    'the full network has 0.0% accuracy on 300 labelled samples, guessing 33.3%, and with classes in another order 100.0%'
    """  # noqa: E501
    if table.labels is None or table.quality is not None or not num_classes or num_classes < 2:
        return ""
    count, guessing, labels = len(table), 1 / num_classes, table.labels
    accuracy = float(table.correct()[:, -1].mean())
    if accuracy >= guessing - ERRORS * (guessing * (1 - guessing) / count) ** 0.5:
        return ""
    from scipy.optimize import linear_sum_assignment  # slow to import

    met = np.zeros((max(num_classes, table.predictions[:, -1].max() + 1, labels.max() + 1),) * 2, np.int64)
    np.add.at(met, (table.predictions[:, -1], labels), 1)
    renumbered = float(met[linear_sum_assignment(met, maximize=True)].sum() / count)
    most = float(met.sum(axis=0).max() / count)  # which the best constant answer would reach
    if renumbered <= max(KNOWING, most + ERRORS * (most * (1 - most) / count) ** 0.5):
        return ""
    return (
        f"the full network has {accuracy:.1%} accuracy on {count:,} labelled samples, guessing {guessing:.1%}, and with"
        f" classes in another order {renumbered:.1%}: number the labels as its logits are, or set model.classes in the"
        " order of its logits (names are numbered by the alphabet where the network has none)"
    )


class Recorder:
    """A network made ready to be recorded, once or repeatedly, into memory or to the disk; arguments as of `record`.

    Args:
        model: A `MultiExitModel`, a `cascade`, or a backend.
        score: As of `record`.
        features: As of `record`.
        top: As of `record`.
        settings: How the network runs.

    >>> import tempfile, torch
    >>> from torch import nn
    >>> from alight import MultiExitModel
    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> Recorder(model).write(f"{tempfile.mkdtemp()}/outputs.npz", torch.zeros(5, 4), progress=False).num_samples
    5
    """

    def __init__(
        self,
        model: Any,
        score: str = "margin",
        features: Iterable[str] = (),
        top: int = KEPT,
        settings: RunSettings | None = None,
    ) -> None:
        names = tuple(dict.fromkeys((score, *features)))
        if unknown := [name for name in names if name not in SCORES]:
            raise BadInput(f"there is no score {unknown[0]!r}: choose one of {', '.join(SCORES)}")
        check_top(top)
        self.score, self.columns = score, (*names, *TOP)
        self.backend = _every_exit(model, settings).with_reads([Reads(names, top=top)])

    def table(self, data: Any, batch_size: int = BATCH_SIZE, progress: bool = True) -> HeadOutputs:
        """Return the table of all data, as `record` does."""
        with ThreadPoolExecutor(1) as aside:
            fingerprint = aside.submit(self.backend.fingerprint_aside())
            parts = [*self.tables(data, batch_size, progress)]
            return replace(HeadOutputs.joined(parts), fingerprint=fingerprint.result())

    def write(self, path: PathLike, data: Any, batch_size: int = BATCH_SIZE, progress: bool = True) -> Recorded:
        """Write the table of all data to an .npz file, batch by batch: memory holds a few batches, no more.

        `HeadOutputs.load` reads the file. It is there once it is whole; when something fails, nothing of it stays.
        """
        correct, labelled, shapes = np.zeros(len(self.backend.exits)), False, set()
        with GrowingArrays(path) as growing, ThreadPoolExecutor(1) as aside:
            fingerprint = aside.submit(self.backend.fingerprint_aside())
            for part in self.tables(data, batch_size, progress):
                growing.add(part.rows())
                correct += part.correct().sum(axis=0)
                labelled = part.labels is not None
                shapes.add(part.sample_shape)
            shape = part.sample_shape if len(shapes) == 1 else ()
            said = replace(part, fingerprint=fingerprint.result(), sample_shape=shape)
            written = growing.write("HeadOutputs", said.metadata())
            accuracies = tuple((correct / growing.rows).tolist()) if labelled else ()
            return Recorded(written, growing.rows, len(correct), self.score, fingerprint.result(), accuracies)

    def tables(self, data: Any, batch_size: int = BATCH_SIZE, progress: bool = True) -> Iterator[HeadOutputs]:
        """Yield the table of each batch, in their order; on a device the next batches run while one is on its way."""
        loader = in_batches(data, self.backend.inputs, batch_size)
        bar: dict[str, Any] = {"desc": "record", "unit": "batch", "total": length_of(loader), "disable": not progress}
        awaited: deque[tuple[Any, Any, tuple[int, ...]]] = deque()  # head values, perhaps on their way, labels, shape
        seen = 0
        for batch in chain(tqdm(prefetch(self._loaded(loader)), **bar), repeat(None, self.backend.in_flight)):
            if batch is not None:
                awaited.append((self._launched(batch), batch.labels, sample_shape(batch.inputs)))
            if awaited and (batch is None or len(awaited) > self.backend.in_flight):
                table = self._table(*awaited.popleft(), seen)
                yield table
                seen += len(table)

    def _launched(self, batch: Batch) -> HeadValues | DeviceValues:
        with self.backend.running():
            values, _ = self.backend.run(0, self.backend.admit(batch.inputs))
            if not isinstance(values, HeadValues):
                values.send()
        return values

    def _loaded(self, loader: Iterable[Any]) -> Iterator[Batch]:
        """Yield the batches of a loader, fetched ahead; all with labels, or none."""
        for index, batch in enumerate(batches(loader, self.backend.inputs, "the recording")):
            if index == 0:
                labelled = batch.labels is not None
            if labelled != (batch.labels is not None):
                raise BadInput(
                    f"batch {index} has {'no ' if labelled else ''}labels, unlike those before it: give labels for all"
                    " or none"
                )
            yield Batch(self.backend.pin(batch.inputs), batch.labels)

    def _table(self, values: Any, labels: Any, sample_shape: tuple[int, ...], seen: int) -> HeadOutputs:
        """Return the table of a batch, `seen` samples after the first."""
        values = values if isinstance(values, HeadValues) else values.get()  # the only wait for this batch
        shape = (-1, len(self.backend.exits))
        largest = values.largest.reshape(shape)
        if not np.isfinite(largest).all():  # other logits may be -inf: a class that was masked out
            row, exit_index = np.argwhere(~np.isfinite(largest))[0]
            raise BadInput(
                f"the head at {self.backend.exits[exit_index]} gives {largest[row, exit_index]:g} for sample"
                f" {seen + row}: look for NaN in that sample or in the weights; in half precision try dtype='bf16'"
            )
        if labels is not None:
            if self.backend.num_classes is not None:
                Batch((), labels).check(self.backend.num_classes)
            labels = single_classes(as_array(labels))
        columns = dict(zip(self.columns, values.columns, strict=True))
        classes, logs = (columns.pop(name).reshape(*largest.shape, -1) for name in TOP)
        scores = {name: column.reshape(shape).copy() for name, column in columns.items()}  # lets go of the others
        return HeadOutputs(
            scores=scores.pop(self.score),
            predictions=values.predictions.reshape(shape),
            labels=labels,
            score=self.score,
            features=scores,
            top=(classes, logs),
            exits=self.backend.exits,
            sample_shape=sample_shape,
        )


def _every_exit(model: Any, settings: RunSettings | None) -> Any:
    """Return what runs a network as one stage that gives the values of every exit."""
    exits = range(getattr(model, "num_exits", 0))
    if isinstance(model, Cascade):
        return EveryStage(model.backend(exits, settings))
    if hasattr(model, "with_reads"):
        return EveryStage(model)
    from alight.engine.backends.torch import EveryExit  # PyTorch is imported where it runs

    return EveryExit(model, exits, settings)


class EveryStage:
    """All stages of a backend as one that gives the values of every open exit: what a recording is made of.

    >>> from alight.engine.backends.members import LogitsBackend
    >>> backend = LogitsBackend(("first", "end"), (0, 1))
    >>> record(backend, np.array([[[0.0, 9.0], [9.0, 0.0]]]), progress=False).predictions
    array([[1, 0]])
    """

    in_flight = 0

    def __init__(self, backend: Backend) -> None:
        self.backend, self.inputs = backend, backend.inputs
        self.exits = tuple(backend.exits[index] for index in backend.open_exits)
        self.num_classes, self.fingerprint = backend.inputs.num_classes, backend.fingerprint
        self.admit, self.pin, self.running = backend.admit, backend.pin, backend.running

    def with_reads(self, reads: Sequence[Reads]) -> "EveryStage":
        """Return the same stages with these values computed from the logits of each."""
        return EveryStage(self.backend.with_reads([reads[0]] * len(self.exits)))

    def fingerprint_aside(self) -> Callable[[], str]:
        """Return a function that returns the fingerprint."""
        return lambda: self.fingerprint

    def run(self, _: int, state: State) -> tuple[HeadValues, State]:
        """Return the values of each sample at each exit, (samples x exits)."""
        exits: list[HeadValues] = []
        for stage in range(len(self.exits)):
            values, state = self.backend.run(stage, state)
            if not isinstance(values, HeadValues):
                values.send()
                values = values.get()
            exits.append(values)
        first = exits[0]
        columns = tuple(_interleaved([each.columns[index] for each in exits]) for index in range(len(first.columns)))
        predictions, largest = (_interleaved(each) for each in list(zip(*exits, strict=True))[:2])
        return HeadValues(predictions, largest, columns, None), ()


def _interleaved(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Return what all exits say about the first sample, then about the second, ..."""
    stacked = np.stack(columns, axis=1)
    return stacked.reshape(-1, *stacked.shape[2:])
