"""What every head says about every sample, once, so that everything else is arithmetic on a table."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from alight.data.batches import BATCH_SIZE, Batch, as_tensor, batches, in_batches, length_of
from alight.engine.graphs import quickened
from alight.engine.prefetch import ahead
from alight.engine.prepare import as_dtype, device_of, pinned, placed, prepared, threads
from alight.engine.segments import LOGS, apart, wide
from alight.engine.walk import IN_FLIGHT
from alight.errors import BadInput
from alight.files import GrowingArrays, PathLike
from alight.networks.multi_exit import Carried, MultiExitModel, advance, read
from alight.networks.store import fingerprint
from alight.outputs import HeadOutputs
from alight.scores import SCORES


@dataclass(frozen=True)
class Recorded:
    """A table on the disk: what it is, without holding it.

    >>> Recorded(Path("outputs.npz"), 1000, 3, "margin", "", accuracies=(0.6, 0.7, 0.8)).num_samples
    1000
    """

    path: Path
    num_samples: int
    num_exits: int
    score: str
    fingerprint: str
    accuracies: tuple[float, ...]  # of every exit; none without labels

    def load(self, *, log_probabilities: bool = True) -> HeadOutputs:
        """The table itself, with log_probabilities or without."""
        return HeadOutputs.load(self.path, log_probabilities=log_probabilities)

    def __str__(self) -> str:
        kind = "labelled" if self.accuracies else "unlabelled"
        return f"{self.num_samples} samples, {self.num_exits} exits, score {self.score!r}, {kind}: {self.path}"


def record(
    model: MultiExitModel,
    loader: Any,
    *,
    batch_size: int = BATCH_SIZE,
    score: str = "margin",
    features: Iterable[str] = (),
    log_probabilities: bool = False,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    channels_last: bool = False,
    compile: bool = False,  # noqa: A002  # torch's own word for it
    graphs: bool = False,
    num_threads: int | None = None,
    progress: bool = True,
) -> HeadOutputs:
    """What every head says about everything that a loader gives, in its order; with labels, if it gives any.

    Instead of a loader there may be a data set, arrays or tensors, (inputs, labels), or a list of images: they are
    taken in batches of `batch_size`, and pictures and bytes are normalised as the network says.

    Scores are computed in float64 from logits, where the network runs: only they are kept, and `log_probabilities` in
    half precision if asked for. `features` names further scores. `dtype` is "bf16", "fp16" or None for the network's
    own; a predictor in that dtype needs a recording in it. The table carries the fingerprint of the network as it ran.
    For tables that memory cannot hold there is `record_to`.

    >>> from torch import nn
    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> record(model, [(torch.zeros(5, 4), torch.tensor([0, 1, 2, 0, 1]))], progress=False)
    HeadOutputs(5 samples, 2 exits, score 'margin', labelled)
    """
    asked = Recorder(model, score, features, log_probabilities, device, dtype, channels_last, compile, graphs)
    with threads(num_threads), ThreadPoolExecutor(1) as aside:
        own = aside.submit(_fingerprint, asked.model, _beside(asked.device))
        parts = [*asked.tables(in_batches(loader, model.input_spec, batch_size), progress)]
        return replace(HeadOutputs.joined(parts), fingerprint=own.result())


def record_to(
    path: PathLike,
    model: MultiExitModel,
    loader: Any,
    *,
    batch_size: int = BATCH_SIZE,
    score: str = "margin",
    features: Iterable[str] = (),
    log_probabilities: bool = False,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    channels_last: bool = False,
    compile: bool = False,  # noqa: A002  # torch's own word for it
    graphs: bool = False,
    num_threads: int | None = None,
    progress: bool = True,
) -> Recorded:
    """A recording as `record` makes it, written to an .npz file batch by batch: memory holds a few batches, no more.

    `HeadOutputs.load` reads the file. It is there once it is whole; when something goes wrong, nothing of it stays.

    >>> import tempfile
    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> print(record_to(f"{tempfile.mkdtemp()}/outputs.npz", model, torch.zeros(5, 4), progress=False).num_samples)
    5
    """
    asked = Recorder(model, score, features, log_probabilities, device, dtype, channels_last, compile, graphs)
    right, labelled = np.zeros(model.num_exits), False
    with GrowingArrays(path) as growing, threads(num_threads), ThreadPoolExecutor(1) as aside:
        own = aside.submit(_fingerprint, asked.model, _beside(asked.device))
        for part in asked.tables(in_batches(loader, model.input_spec, batch_size), progress):
            growing.add(part.rows())
            right += part.correct().sum(axis=0)
            labelled = part.labels is not None
        written = growing.write("HeadOutputs", replace(part, fingerprint=own.result()).metadata())
        accuracies = tuple((right / growing.rows).tolist()) if labelled else ()
        return Recorded(written, growing.rows, model.num_exits, score, own.result(), accuracies)


class _Told(NamedTuple):
    """What was told of a batch once it has arrived, and how many classes there are."""

    values: Tensor  # (samples x exits, numbers)
    labels: Tensor | None
    num_classes: int
    arrived: Any  # a CUDA event, or None on the host


class _Heads(nn.Module):
    """A network of which every head is asked about every sample."""

    def __init__(self, model: MultiExitModel, columns: Sequence[str]) -> None:
        super().__init__()
        self.stages, self.heads, self.columns = model.stages, model.heads, tuple(columns)

    def forward(self, *carried: Tensor) -> tuple[Tensor, int]:
        """What is told of each sample at each exit, (samples x exits, numbers), and the number of classes."""
        logits = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            carried = advance(stage, carried)
            logits.append(read(head, carried))
        shapes = [tuple(each.shape) for each in logits]
        if any(shape != shapes[0] for shape in shapes) or len(shapes[0]) != 2 or shapes[0][1] < 2:
            raise BadInput(
                f"the exits' logits have shapes {shapes}: attach heads that give (samples, classes), all with one"
                " number of classes, at least 2"
            )
        return wide(torch.stack(logits, dim=1).flatten(0, 1), self.columns), shapes[0][1]


class Recorder:
    """A network made ready to be asked, and what it is asked for: what `record` makes, for those who ask it often.

    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> [len(table) for table in Recorder(model).tables([torch.zeros(5, 4), torch.zeros(2, 4)], progress=False)]
    [5, 2]
    """

    def __init__(
        self,
        model: MultiExitModel,
        score: str = "margin",
        features: Iterable[str] = (),
        log_probabilities: bool = False,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        channels_last: bool = False,
        compile: bool = False,  # noqa: A002
        graphs: bool = False,
    ) -> None:
        if not isinstance(model, MultiExitModel):
            raise BadInput(f"a {type(model).__name__} has no exits yet: attach_heads makes a MultiExitModel of it")
        self.score, self.names = score, tuple(dict.fromkeys((score, *features)))
        if unknown := [name for name in self.names if name not in SCORES]:
            raise BadInput(f"there is no score {unknown[0]!r}: choose one of {', '.join(SCORES)}")
        self.model = prepared(model, device=device, dtype=dtype, channels_last=channels_last)
        self.device, self.dtype, self.channels_last = device_of(self.model), as_dtype(dtype), channels_last
        self.columns = (*self.names, LOGS) if log_probabilities else self.names
        heads = _Heads(self.model, self.columns)
        (self.run,) = quickened([heads], self.device, compiling=compile, graphs=graphs) or [heads]

    def tables(self, loader: Iterable[Any], progress: bool) -> Iterator[HeadOutputs]:
        """The table of each batch, in their order."""
        shown: dict[str, Any] = {"desc": "record", "unit": "batch", "total": length_of(loader), "disable": not progress}
        seen = 0
        for came in self._arriving(tqdm(ahead(self._admitted(loader)), **shown)):
            table = self._table(came, seen)
            yield table
            seen += len(table)

    def _arriving(self, admitted: Iterable[tuple[Batch, Carried]]) -> Iterator[_Told]:
        """What is told of each batch, in their order; on a GPU the next batches run while one is on its way."""
        awaited: deque[_Told] = deque()
        for batch, carried in admitted:
            awaited.append(self._launched(batch, carried))
            if len(awaited) > (IN_FLIGHT if self.device.type == "cuda" else 0):
                yield awaited.popleft()
        yield from awaited

    def _admitted(self, loader: Iterable[Any]) -> Iterator[tuple[Batch, Carried]]:
        for index, batch in enumerate(batches(loader, self.model.input_spec, "the recording")):
            if index == 0:
                labelled = batch.labels is not None
            if labelled != (batch.labels is not None):
                raise BadInput(
                    f"batch {index} has {'no ' if labelled else ''}labels, unlike those before it: give labels for all"
                    " or none"
                )
            yield batch, pinned(tuple(map(as_tensor, batch.inputs)), self.device)

    def _launched(self, batch: Batch, carried: Carried) -> _Told:
        """A batch on its way through the network."""
        with torch.inference_mode():
            values, classes = self.run(*placed(carried, self.device, self.dtype, self.channels_last))
            sent, labels = _to_host(values), None if batch.labels is None else _to_host(as_tensor(batch.labels))
        if self.device.type != "cuda":
            return _Told(sent, labels, classes, None)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(self.device))
        return _Told(sent, labels, classes, arrived)

    def _table(self, came: _Told, seen: int) -> HeadOutputs:
        """The table of a batch, `seen` samples after the first."""
        if came.arrived is not None:
            came.arrived.synchronize()  # the only wait for this batch
        said = apart(came.values.numpy(), self.columns)
        shape = (-1, self.model.num_exits)
        self._check(said.largest.reshape(shape), seen)
        if came.labels is not None:
            Batch(came.labels, came.labels).check(came.num_classes)
        columns = dict(zip(self.columns, said.columns, strict=True))
        logs = columns.pop(LOGS, None)
        scores = {name: values.reshape(shape).copy() for name, values in columns.items()}  # lets go of the rest
        return HeadOutputs(
            scores=scores.pop(self.score),
            predictions=said.predictions.reshape(shape),
            labels=None if came.labels is None else came.labels.numpy(),
            score=self.score,
            features=scores,
            log_probabilities=None if logs is None else logs.reshape(*shape, came.num_classes),
        )

    def _check(self, largest: np.ndarray, seen: int) -> None:
        bad = ~np.isfinite(largest)  # the others may be -inf, which is a class that was masked out
        if bad.any():
            row, exit_index = np.argwhere(bad)[0]
            raise BadInput(
                f"exit {exit_index} ({self.model.exits[exit_index]}) gives {largest[row, exit_index]:g} for sample"
                f" {seen + row}: look for NaN in that sample or in the weights; in half precision try dtype='bf16'"
            )


def _to_host(tensor: Tensor) -> Tensor:
    """The tensor on the host; from a GPU it is on its way."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _beside(device: torch.device) -> AbstractContextManager[Any]:
    """A queue of its own on a GPU, which waits for what is queued now and for nothing later; on the host nothing."""
    if device.type != "cuda":
        return nullcontext()
    queue = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    queue.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(queue)


def _fingerprint(model: MultiExitModel, beside: AbstractContextManager[Any]) -> str:
    """The network's fingerprint, taken while it runs."""
    with beside:
        return fingerprint(model)
