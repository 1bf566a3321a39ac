"""A recording in partitions, too large for memory: read part by part, as often as needed."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from alight.errors import BadFile, Mismatch
from alight.files import DONE, PLAN, PathLike
from alight.outputs import Floats, HeadOutputs


@dataclass(frozen=True)
class Scores:
    """Scores of all samples in their order, block by block, from files that were found to be good."""

    paths: tuple[Path, ...]
    array: str  # its name in a file

    def __iter__(self) -> Iterator[Floats]:
        for path in self.paths:
            with np.load(path, allow_pickle=False) as file:
                yield file[self.array]


@dataclass(frozen=True, eq=False)
class PartitionedOutputs:
    """What every head said about every sample, in a folder of .npz files, each a `HeadOutputs`, in the order of names.

    Memory holds one of them at a time. `calibrate.eero` and `calibrate.eero_marginal` take it as it is and give the
    policy that they give for the whole table; for all else there is `load`.

    >>> import tempfile
    >>> table = HeadOutputs(scores=[[0.2, 0.9], [0.7, 0.8]], predictions=[[1, 0], [2, 2]], labels=[0, 2])
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("part-00000.npz", "part-00001.npz"):
    ...     table.save(folder / name)
    >>> outputs = PartitionedOutputs.open(folder)
    >>> outputs, outputs.risks()
    (PartitionedOutputs(4 samples in 2 partitions, 2 exits, score 'margin', labelled), array([0.5, 0. ]))
    """

    paths: tuple[Path, ...]
    sizes: tuple[int, ...]  # samples of each
    num_exits: int
    score: str
    fingerprint: str
    is_labelled: bool
    scores: Scores
    right: Floats  # samples that each exit is right about

    @classmethod
    def open(cls, folder: PathLike, score: str | None = None) -> "PartitionedOutputs":
        """The recording of a folder, once every partition has been read; `score` is another than the recorded one."""
        paths = _paths(Path(folder))
        sizes, right, kinds = [], np.zeros(0), {}
        for path in paths:
            part = HeadOutputs.load(path, log_probabilities=False)
            part.column(score or part.score)  # is there, or that is told
            kinds[part.num_exits, part.score, part.fingerprint, part.is_labelled] = path
            if len(kinds) > 1:
                first, second = kinds.values()
                raise Mismatch(f"{first} and {second} differ in exits, score, network or labels: give one recording")
            sizes.append(len(part))
            right = part.correct().sum(axis=0) + (right if right.size else 0.0)
        ((num_exits, named, fingerprint, is_labelled),) = kinds
        scores = Scores(paths, "scores" if score in (None, named) else f"feature_{score}")
        return cls(paths, tuple(sizes), num_exits, score or named, fingerprint, is_labelled, scores, right)

    def __len__(self) -> int:
        return sum(self.sizes)

    def __repr__(self) -> str:
        kind = "labelled" if self.is_labelled else "unlabelled"
        parts = f"{len(self)} samples in {len(self.paths)} partitions"
        return f"PartitionedOutputs({parts}, {self.num_exits} exits, score {self.score!r}, {kind})"

    def risks(self) -> Floats:
        """Error rate of each exit alone; without labels, its disagreement with the last exit."""
        return 1.0 - self.right / len(self)

    def load(self, *, log_probabilities: bool = True) -> HeadOutputs:
        """The whole table, in memory."""
        parts = [HeadOutputs.load(path, log_probabilities=log_probabilities) for path in self.paths]
        return HeadOutputs.joined(parts).with_score(self.score)


def _paths(folder: Path) -> tuple[Path, ...]:
    if (folder / PLAN).exists() and not (folder / DONE).exists():
        raise BadFile(folder, "its recording is not finished", "run the command that began it again, it goes on")
    paths = tuple(sorted(path for path in folder.glob("*.npz") if not path.name.startswith(".")))
    if not paths:
        raise BadFile(folder, "it has no partitions (*.npz)", "give a folder that `alight record --engine ray` wrote")
    return paths
