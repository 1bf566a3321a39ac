"""The two tables that travel: what the heads said, and what was decided."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

import numpy as np
import numpy.typing as npt

from alight import display
from alight.display import accuracy_text, html_table, layer_label, quantity
from alight.errors import BadFile, BadInput, LabelsNeeded, Mismatch
from alight.files import DONE, PLAN, PathLike, read_arrays, write_arrays
from alight.scores import SCORES, logit_margin, probabilities, top_classes

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Likeliest = tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]  # classes and logarithms, (samples, exits, top) each

TOP = ("top_classes", "top_log_probabilities")  # columns of the likeliest classes
LOGGED = ("costs", "quality")  # columns that logs of models have, and recordings of a network have not
KEPT = 5  # likeliest classes that a recording keeps by default
SAME = 0.5  # of a table's samples in another: by chance there are fewer, even if scores are few
LEAST_KINDS = 30  # different samples, below which repeated ones may be the few values of a coarse score
ROWS = 1_000_000  # of a sample: rates and risks are then known to 0.0005, one standard error


class Origin(TypedDict, total=False):
    """Where all rows of a table are from, as far as it is known."""

    fingerprint: str  # of the network
    exits: Sequence[str]  # their names
    sample_shape: Sequence[int]  # of every image


@dataclass(frozen=True, eq=False, repr=False, init=False)
class HeadOutputs:
    """What every head said about every sample.

    >>> outputs = HeadOutputs(scores=[[0.2, 0.9], [0.7, 0.8]], predictions=[[1, 0], [2, 2]], labels=[0, 2])
    >>> outputs
    HeadOutputs(2 samples, 2 exits, score 'margin', labelled)
    >>> outputs.risks()
    array([0.5, 0. ])
    """

    scores: Floats  # (samples, exits), higher is surer
    predictions: Integers  # (samples, exits), class indices
    labels: Integers | None  # (samples,), None when unlabelled
    score: str  # its name
    features: Mapping[str, Floats]  # further scores by name, each (samples, exits)
    top: Likeliest | None  # the likeliest classes, likeliest first, and their log-probabilities
    fingerprint: str  # of the network that said it, "" where it is not known
    exits: tuple[str, ...]  # their names, () where they are not known
    sample_shape: tuple[int, ...]  # of each image, such as (3, 32, 32); () where it is not known, or they differ
    costs: Floats | None  # (samples, exits), what each call cost, its own; None where every sample costs the same
    quality: Floats | None  # (samples, exits), of each answer, in 0..1; None where it is right or wrong by its label

    def __init__(
        self,
        scores: npt.ArrayLike,
        predictions: npt.ArrayLike,
        labels: npt.ArrayLike | None = None,
        score: str = "margin",
        features: Mapping[str, npt.ArrayLike] | None = None,
        top: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
        costs: npt.ArrayLike | None = None,
        quality: npt.ArrayLike | None = None,
        **origin: Unpack[Origin],
    ) -> None:
        if unknown := origin.keys() - Origin.__annotations__.keys():
            raise TypeError(f"HeadOutputs has no argument {min(unknown)!r}")
        scores = _table("scores", scores)
        predictions = _integers("predictions", predictions)
        _same_shape("predictions", predictions, "scores", scores)
        tables = {name: _table(f"feature {name!r}", values) for name, values in (features or {}).items()}
        if taken := tables.keys() & {score, *TOP, *LOGGED}:
            raise BadInput(f"a feature is named {min(taken)!r}, like the score itself or another column: rename it")
        for name, values in tables.items():
            _same_shape(f"feature {name!r}", values, "scores", scores)
        truth = None if labels is None else _labels(labels, len(scores))
        arrays: dict[str, Any] = {"scores": scores, "predictions": predictions, "labels": truth}
        arrays["top"] = None if top is None else _top(*top, scores.shape)
        for name, given, most in zip(LOGGED, (costs, quality), (np.inf, 1.0), strict=True):
            arrays[name] = None if given is None else _logged(name, given, scores, most)
        if quality is not None and labels is None:
            raise BadInput("quality without labels: give the index of a right answer as label, or one that none gave")
        names, shape = tuple(map(str, origin.get("exits", ()))), tuple(map(int, origin.get("sample_shape", ())))
        if names and len(names) != scores.shape[1]:
            raise BadInput(f"{len(names)} names for {scores.shape[1]} exits: give one name per exit")
        arrays |= {"fingerprint": str(origin.get("fingerprint", "")), "exits": names, "sample_shape": shape}
        self.__dict__.update(arrays, score=str(score), features=tables)

    @classmethod
    def from_logits(
        cls,
        logits: npt.ArrayLike | Sequence[npt.ArrayLike],
        labels: npt.ArrayLike | None = None,
        score: str = "margin",
        *,
        features: Iterable[str] = (),
        top: int = KEPT,
        noise: float = 0.0,
        rng: np.random.Generator | None = None,
    ) -> "HeadOutputs":
        """Return the table of a network's logits, (samples, exits, classes) or a list of (samples, classes) per exit.

        `features` names further scores to keep; of so many likeliest classes (`top`) the log-probabilities are kept,
        too. `noise` is the paper's u: uniform noise of that width on every class probability, drawn from `rng`, so that
        no two scores stay equal.

        >>> HeadOutputs.from_logits(np.array([[[0.0, 0.0], [0.0, 2.0]]]), labels=[1]).predictions
        array([[0, 1]])
        """
        stacked = _logits(logits)
        _check_samples_first(stacked, labels)
        names = (score, *features)
        check_top(top)
        for name in names:
            if name not in SCORES:
                raise BadInput(f"there is no score {name!r}: choose one of {', '.join(SCORES)}")
        if not 0 <= noise < np.inf or (noise > 0 and rng is None):
            needed = "a width >= 0 and an explicit generator: rng=np.random.default_rng(0)"
            raise BadInput(f"noise {noise:g} needs {needed}")
        if noise > 0 and "logit_margin" in names:
            raise BadInput("noise is added to probabilities, which logit_margin does not use: choose another score")
        noisy = probabilities(stacked)  # with noise, where it is asked for
        if noise > 0 and rng is not None:
            noisy = noisy + rng.uniform(0, noise, size=noisy.shape)
        tables = {name: logit_margin(stacked) if name == "logit_margin" else SCORES[name](noisy) for name in names}
        predictions = (noisy if noise > 0 else stacked).argmax(-1)
        if labels is not None:
            _check_classes(_labels(labels, len(stacked)), stacked.shape[2])
        classes, logs = top_classes(stacked, top)
        return cls(tables.pop(score), predictions, labels, score, tables, (classes, half(logs)))

    def __len__(self) -> int:
        return len(self.scores)

    def __repr__(self) -> str:
        kind = "unlabelled" if self.labels is None else "labelled"
        return f"HeadOutputs({len(self)} samples, {self.num_exits} exits, score {self.score!r}, {kind})"

    def _repr_html_(self) -> str:
        right = "agrees with the last" if self.labels is None else "accuracy"
        columns = [
            ["exit", *map(layer_label, self.exit_names)],
            [f"mean {self.score}", *(f"{mean:.3g}" for mean in self.scores.mean(axis=0))],
            [right, *(accuracy_text(1 - risk) for risk in self.risks())],
        ]
        return html_table(repr(self), columns)

    @property
    def num_exits(self) -> int:
        """Number of exits."""
        return self.scores.shape[1]

    @property
    def exit_names(self) -> tuple[str, ...]:
        """Names of the exits: "exit 1", "exit 2", ... where they are not known."""
        return display.exit_names(self.exits, self.num_exits)

    @property
    def top_classes(self) -> npt.NDArray[np.int32] | None:
        """The likeliest classes, likeliest first, (samples, exits, top); None where the table has none."""
        return None if self.top is None else self.top[0]

    @property
    def top_log_probabilities(self) -> npt.NDArray[np.float16] | None:
        """The log-probabilities of these classes."""
        return None if self.top is None else self.top[1]

    def truth(self) -> Integers:
        """Return what counts as right: the labels, or without them what the last exit says."""
        return self.predictions[:, -1] if self.labels is None else self.labels

    def correct(self) -> npt.NDArray[Any]:
        """Return where an exit is right, (samples, exits); the quality of its answers where they are graded."""
        return np.equal(self.predictions, self.truth()[:, None]) if self.quality is None else self.quality

    def quality_of(self, answers: Integers, exits: Integers) -> Floats | None:
        """Return the quality of an answer to every sample, given at these exits; None where answers are not graded.

        An answer that was taken over from an earlier exit has the quality that it had there.
        """
        if self.quality is None:
            return None
        rows, same = np.arange(len(self)), self.predictions == answers[:, None]
        if unknown := int((~same.any(axis=1)).sum()):
            raise BadInput(
                f"{unknown} of {len(self)} answers were given by no exit, so nothing grades them: combine graded"
                " answers by a vote, which chooses among them"
            )
        said_there = same[rows, exits]
        return self.quality[rows, np.where(said_there, exits, np.argmax(same, axis=1))]

    def costs_by(self, open_exits: Sequence[int]) -> Floats | None:
        """Return what each sample has cost when it leaves at each open exit, (samples, open exits); None as `costs`."""
        return None if self.costs is None else np.cumsum(self.costs[:, list(open_exits)], axis=1)

    def risks(self) -> Floats:
        """Return the error rate of each exit alone (R-hat); without labels, its disagreement with the last exit."""
        return 1.0 - self.correct().mean(axis=0)

    def column(self, name: str) -> np.ndarray:
        """Return the score, a feature, or one of `TOP`, of every sample and exit."""
        if name == self.score:
            return self.scores
        rows = self.rows()
        columns = {**self.features, **{each: rows[each] for each in (*TOP, "costs") if each in rows}}
        if name not in columns:
            known = ", ".join([self.score, *columns])
            raise BadInput(f"this table has no {name!r}, only {known}: record it again with {name!r}")
        return columns[name]

    def known_labels(self, purpose: str) -> Integers:
        """Return the labels, or raise an error that says what they are needed for."""
        if self.labels is None:
            raise LabelsNeeded(purpose)
        return self.labels

    def take(self, rows: npt.NDArray[Any] | slice) -> "HeadOutputs":
        """Return the table of these samples, in this order."""
        return replace(self, **_named({name: values[rows] for name, values in self.rows().items()}))

    def at_exits(self, open_exits: Sequence[int]) -> "HeadOutputs":
        """Return the table of these exits alone. Without labels the truth is then the last of *them*."""
        by_exit = {name: values for name, values in self.rows().items() if name != "labels"}
        names = tuple(self.exits[index] for index in open_exits) if self.exits else ()
        tables = _named({name: values[:, list(open_exits)] for name, values in by_exit.items()})
        return replace(self, exits=names, **tables)

    def split(self, fraction: float, rng: np.random.Generator) -> tuple["HeadOutputs", "HeadOutputs"]:
        """Return two disjoint tables of shuffled samples, the first with this fraction of them."""
        first = round(fraction * len(self)) if np.isfinite(fraction) else 0
        if not 0 < first < len(self):
            raise BadInput(
                f"a split at {fraction:g} of {len(self)} samples leaves one side empty: choose a fraction inside (0, 1)"
            )
        order = rng.permutation(len(self))
        return self.take(order[:first]), self.take(order[first:])

    def unlabelled(self) -> "HeadOutputs":
        """Return the same table without its labels."""
        return replace(self, labels=None, quality=None)

    def with_score(self, name: str) -> "HeadOutputs":
        """Return the same table with another of its features as the score."""
        if name == self.score:
            return self
        scores = self.column(name)
        others = {key: values for key, values in self.features.items() if key != name}
        return replace(self, scores=scores, score=name, features={**others, self.score: self.scores})

    def rows(self) -> dict[str, np.ndarray]:
        """Return all arrays that have a row for each sample, by their name in a file."""
        arrays: dict[str, np.ndarray] = {"scores": self.scores, "predictions": self.predictions}
        arrays |= {f"feature_{name}": values for name, values in self.features.items()}
        arrays |= dict(zip(TOP, self.top or (), strict=False))
        optional = {"labels": self.labels} | {name: getattr(self, name) for name in LOGGED}
        return arrays | {name: values for name, values in optional.items() if values is not None}

    def metadata(self) -> dict[str, np.ndarray]:
        """Return what is said once of all rows, by its name in a file."""
        said = {name: getattr(self, name) for name in ("score", *Origin.__annotations__)}
        return {name: np.array(value) for name, value in said.items() if isinstance(value, str) or value}

    def digest(self) -> bytes:
        """Return a hash of all that the table says: equal tables have equal ones, also in other processes."""
        found = hashlib.blake2b(digest_size=16)
        for name, array in {**self.rows(), **self.metadata()}.items():
            found.update(f"{name} {array.dtype} {array.shape}".encode())
            found.update(np.ascontiguousarray(array).data)
        return found.digest()

    def shared_samples(self, other: "HeadOutputs") -> float:
        """Return the share of the smaller table's samples that are in both: alike in all scores and answers.

        Samples that are not the only one of their kind in their table do not count, so that equal scores of a coarse
        score are not taken for equal samples.

        >>> table = HeadOutputs(scores=[[0.2, 0.9], [0.7, 0.8]], predictions=[[1, 0], [2, 2]])
        >>> table.shared_samples(table.take(slice(1))), table.shared_samples(replace(table, scores=table.scores / 2))
        (1.0, 0.0)
        """
        if self is other or self.num_exits != other.num_exits:
            return float(self is other)
        found = [np.unique(table._row_keys(), return_counts=True) for table in (self, other)]
        own, others = (keys[counts == 1] for keys, counts in found)
        return len(np.intersect1d(own, others, assume_unique=True)) / min(len(self), len(other))

    def copied_samples(self) -> float:
        """Return the share of samples that repeat an earlier one: alike in all scores and answers.

        It is 0 where scores are coarse, that is where samples which differ share the scores of every exit, and samples
        that have the highest score at every exit do not count: such repetitions are not copies.

        >>> scores = np.random.default_rng(0).uniform(size=(100, 2))
        >>> tables = [HeadOutputs(each, np.zeros(each.shape, int)) for each in (scores, np.tile(scores, (4, 1)))]
        >>> [table.copied_samples() for table in (*tables, replace(tables[1], scores=tables[1].scores.round(1)))]
        [0.0, 0.75, 0.0]
        """
        rows = ~(self.scores == self.scores.max(axis=0)).all(axis=1)
        kinds = len(np.unique(self._row_keys()[rows]))
        if kinds == rows.sum() or kinds < LEAST_KINDS:
            return 0.0
        is_coarse = 2 * max(map(len, map(np.unique, self.scores[rows].T))) < kinds
        return 0.0 if is_coarse else (int(rows.sum()) - kinds) / len(self)

    def _row_keys(self) -> Floats:
        """Return a number for each sample, the same for the same scores and answers, and next to never for others."""
        keys, rng = np.zeros(len(self)), np.random.default_rng(0)
        for column in (*self.scores.T, *self.predictions.T):
            keys += rng.uniform(1, 2) * column
        return keys

    @classmethod
    def joined(cls, parts: Sequence["HeadOutputs"]) -> "HeadOutputs":
        """Return one table of several, in their order.

        >>> table = HeadOutputs(scores=[[0.2, 0.9], [0.7, 0.8]], predictions=[[1, 0], [2, 2]])
        >>> HeadOutputs.joined([table, table]).predictions.tolist()
        [[1, 0], [2, 2], [1, 0], [2, 2]]
        """
        kinds = {(part.score, part.fingerprint, part.exits, *part.rows()) for part in parts}
        if len(kinds) != 1:
            raise BadInput(f"{len(parts)} tables of {len(kinds)} kinds: join one or more, alike in score and columns")
        rows = {name: np.concatenate([part.rows()[name] for part in parts]) for name in parts[0].rows()}
        shapes = {part.sample_shape for part in parts}
        shape = parts[0].sample_shape if len(shapes) == 1 else ()
        origin: Origin = {"fingerprint": parts[0].fingerprint, "exits": parts[0].exits, "sample_shape": shape}
        return cls(**_named(rows), score=parts[0].score, **origin)

    def save(self, path: PathLike) -> None:
        """Write the table to an .npz file, whole or not at all."""
        write_arrays(path, "HeadOutputs", {**self.rows(), **self.metadata()})

    @classmethod
    def load(cls, path: PathLike) -> "HeadOutputs":
        """Load the table of an .npz file that `save` wrote."""
        arrays = read_arrays(path, "HeadOutputs")
        with as_bad_file(path):
            return cls.from_arrays(arrays)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "HeadOutputs":
        """Return the table of arrays by their names in a file, as `rows` and `metadata` give them."""
        rows = dict(arrays)
        score = str(rows.pop("score"))
        origin = {name: rows.pop(name) for name in Origin.__annotations__ if name in rows}
        return cls(score=score, **cast("Origin", origin), **_named(rows))

    @classmethod
    def load_sample(cls, folder: PathLike, rows: int = ROWS, seed: int = 0) -> "HeadOutputs":
        """Return a table of partitions (.npz, in the order of names), or so many of its rows, drawn at random.

        The draw is uniform, without replacement, and depends on `seed` alone, not on how the rows are partitioned;
        the order stays. Memory holds one partition and twice the rows. Every method takes the sample as it takes any
        table, and what it guarantees holds for the n rows drawn: exit shares follow the Beta and Dirichlet laws of n
        samples. What sampling loses is a standard error of at most 0.5 / sqrt(n) in a rate, a risk or an accuracy.

        >>> import tempfile
        >>> table = HeadOutputs(scores=[[0.2, 0.9], [0.7, 0.8]], predictions=[[1, 0], [2, 2]], labels=[0, 2])
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("part-00000.npz", "part-00001.npz"):
        ...     table.save(folder / name)
        >>> HeadOutputs.load_sample(folder), HeadOutputs.load_sample(folder, rows=3).predictions.tolist()
        (HeadOutputs(4 samples, 2 exits, score 'margin', labelled), [[2, 2], [1, 0], [2, 2]])
        """
        if rows < 1:
            raise BadInput(f"a sample of {rows} rows: draw at least 1")
        rng, limit = np.random.default_rng(seed), np.inf  # of the rows' random keys: the smallest are kept
        kinds: dict[tuple[Any, ...], Path] = {}
        parts: list[tuple[HeadOutputs, Floats]] = []
        for path in _partitions(Path(folder)):
            part = cls.load(path)
            kinds.setdefault((part.num_exits, part.score, part.fingerprint, part.exits, *part.rows()), path)
            if len(kinds) > 1:
                first, second = kinds.values()
                raise Mismatch(f"{first} and {second} differ in exits, score, network or columns: give one recording")
            parts += _below(limit, [(part, rng.random(len(part)))])
            if sum(len(keys) for _, keys in parts) > 2 * rows:
                limit = _smallest(parts, rows)
                parts = _below(limit, parts)
        return cls.joined([part for part, _ in _below(_smallest(parts, rows), parts)])


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Decisions:
    """Which class each sample got, at which exit, and what that cost.

    >>> decisions = Decisions(predictions=[3, 1], exits=[0, 2], spent=[1.0, 4.0])
    >>> decisions
    Decisions(2 samples, mean cost 2.5, left at exit 1 50.0%, exit 2 0.0%, exit 3 50.0%)
    >>> decisions.mean_cost, decisions.exit_shares, decisions.accuracy([3, 0])
    (2.5, array([0.5, 0. , 0.5]), 0.5)
    """

    predictions: Integers  # (samples,), class indices
    exits: Integers  # (samples,), where each left
    spent: Floats  # (samples,), in the unit of the costs
    num_exits: int  # of the network; by default as many as were taken
    probabilities: Floats | None  # (samples,), of the class that was chosen, None where they were not requested
    labels: Integers | None  # (samples,), the true classes, None where they are not known
    unit: str  # of the costs
    exit_names: tuple[str, ...]  # of all exits of the network; "exit 1", "exit 2", ... where they are not known
    quality: Floats | None = None  # (samples,), of the answers, where they were graded

    def __init__(
        self,
        predictions: npt.ArrayLike,
        exits: npt.ArrayLike,
        spent: npt.ArrayLike,
        num_exits: int = 0,
        probabilities: npt.ArrayLike | None = None,
        labels: npt.ArrayLike | None = None,
        unit: str = "",
        exit_names: Sequence[str] = (),
        quality: npt.ArrayLike | None = None,
    ) -> None:
        predictions, exits = _integers("predictions", predictions, axes=1), _integers("exits", exits, axes=1)
        spent = np.asarray(spent, dtype=np.float64)
        _same_shape("exits", exits, "predictions", predictions)
        _same_shape("spent", spent, "predictions", predictions)
        if infinite := int((~np.isfinite(spent)).sum()):
            raise BadInput(f"spent holds {infinite} values that are NaN or infinite: give costs")
        count = max(int(num_exits), int(exits.max()) + 1)
        if len(exit_names) not in (0, count):
            raise BadInput(f"{len(exit_names)} names for {count} exits: give one name per exit")
        of_class = None if probabilities is None else np.asarray(probabilities, dtype=np.float64)
        if of_class is not None:
            _same_shape("probabilities", of_class, "predictions", predictions)
        truth = None if labels is None else _labels(labels, len(predictions))
        arrays = {"predictions": predictions, "exits": exits, "spent": spent, "probabilities": of_class}
        names = display.exit_names(exit_names, count)
        graded = None if quality is None else np.asarray(quality, dtype=np.float64)
        if graded is not None:
            _same_shape("quality", graded, "predictions", predictions)
        self.__dict__.update(arrays, labels=truth, num_exits=count, unit=str(unit), exit_names=names, quality=graded)

    @classmethod
    def unchecked(
        cls,
        predictions: Integers,
        exits: Integers,
        spent: Floats,
        exit_names: tuple[str, ...],
        unit: str,
        *,
        probabilities: Floats | None = None,
        labels: Integers | None = None,
    ) -> "Decisions":
        """Return decisions of arrays that are known to fit together: checks would be slow for a single sample."""
        made = object.__new__(cls)
        arrays = {"predictions": predictions, "exits": exits, "spent": spent, "probabilities": probabilities}
        made.__dict__.update(arrays, labels=labels, num_exits=len(exit_names), unit=unit, exit_names=exit_names)
        return made

    def __len__(self) -> int:
        return len(self.predictions)

    def __repr__(self) -> str:
        shares = zip(map(layer_label, self.exit_names), self.exit_shares, strict=True)
        return f"Decisions({self._summary()}, left at {', '.join(f'{name} {share:.1%}' for name, share in shares)})"

    def _repr_html_(self) -> str:
        return html_table(f"Decisions: {self._summary()}", self.columns())

    def _summary(self) -> str:
        right = "" if self.labels is None else f"accuracy {accuracy_text(self.accuracy(), '%')}, "
        return f"{len(self):,} samples, {right}mean cost {quantity(self.mean_cost, self.unit)}"

    def columns(self) -> list[list[str]]:
        """Return columns of text with a row for each exit: how many samples left there, and with which accuracy.

        >>> for row in zip(*Decisions([3, 1], [0, 2], [1, 4], labels=[3, 2]).columns()):
        ...     print(*row, sep=" | ")
        exit | samples | share | accuracy
        exit 1 | 1 | 50.0 % | 100.0 %
        exit 2 | 0 | 0.0 % | -
        exit 3 | 1 | 50.0 % | 0.0 %
        """
        counts = np.bincount(self.exits, minlength=self.num_exits)
        columns = [
            ["exit", *map(layer_label, self.exit_names)],
            ["samples", *(f"{count:,}" for count in counts)],
            ["share", *map(accuracy_text, self.exit_shares)],
        ]
        if self.labels is None:
            return columns
        right = np.bincount(self.exits, self.correct(), minlength=self.num_exits)
        accuracies = (accuracy_text(each / of) if of else "-" for each, of in zip(right, counts, strict=True))
        return [*columns, ["accuracy", *accuracies]]

    @cached_property
    def mean_cost(self) -> float:
        """Average cost of a sample."""
        return float(self.spent.mean())

    @cached_property
    def exit_shares(self) -> Floats:
        """Observed share of samples that left at each exit (epsilon-hat_out)."""
        return np.bincount(self.exits, minlength=self.num_exits) / len(self)

    def accuracy(self, labels: npt.ArrayLike | None = None) -> float:
        """Return the share of samples whose prediction is the label, or the mean quality of answers that were graded.

        The labels are these, or those of the data that was decided.
        """
        return float(np.mean(self.correct(labels)))

    def correct(self, labels: npt.ArrayLike | None = None) -> npt.NDArray[Any]:
        """Return which predictions are right, (samples,); the quality of the answers where they were graded."""
        truth = self.labels if labels is None else _labels(labels, len(self))
        if self.quality is not None:
            if truth is not None and (self.labels is None or not np.array_equal(truth, self.labels)):
                raise BadInput("these answers were graded, so other labels cannot judge them: leave the labels out")
            return self.quality
        if truth is None:
            raise LabelsNeeded("accuracy")
        return np.equal(self.predictions, truth)

    def save(self, path: PathLike) -> None:
        """Write the decisions to an .npz file, whole or not at all."""
        names = ("predictions", "exits", "spent", "probabilities", "labels", "quality")
        arrays = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        said = {"unit": np.array(self.unit), "exit_names": np.array(self.exit_names)}
        write_arrays(path, "Decisions", {**arrays, **said})

    @classmethod
    def load(cls, path: PathLike) -> "Decisions":
        """Load the decisions of an .npz file that `save` wrote."""
        arrays = read_arrays(path, "Decisions")
        with as_bad_file(path):
            names, unit = arrays.pop("exit_names").tolist(), str(arrays.pop("unit"))
            return cls(num_exits=len(names), unit=unit, exit_names=names, **arrays)


def _partitions(folder: Path) -> list[Path]:
    if (folder / PLAN).exists() and not (folder / DONE).exists():
        raise BadFile(folder, "its recording is not finished", "run the command that began it again, to resume it")
    paths = sorted(path for path in folder.glob("*.npz") if not path.name.startswith("."))
    if not paths:
        raise BadFile(folder, "it has no partitions (*.npz)", "give a folder that `alight record --engine ray` wrote")
    return paths


def _smallest(parts: Sequence[tuple[HeadOutputs, Floats]], count: int) -> float:
    """Return the key up to which this many keys lie; infinity where there are no more."""
    keys = np.concatenate([keys for _, keys in parts])
    return float(np.partition(keys, count - 1)[count - 1]) if count < len(keys) else np.inf


def _below(limit: float, parts: Sequence[tuple[HeadOutputs, Floats]]) -> list[tuple[HeadOutputs, Floats]]:
    """Return the rows whose keys are at most the limit, without parts that have none."""
    if limit == np.inf:
        return list(parts)
    return [(part.take(keys <= limit), keys[keys <= limit]) for part, keys in parts if (keys <= limit).any()]


def _named(rows: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the arrays of a file as the table's constructor takes them."""
    named: dict[str, Any] = {name: values for name, values in rows.items() if not name.startswith("feature_")}
    features = {name.removeprefix("feature_"): values for name, values in rows.items() if name not in named}
    top = [named.pop(name) for name in TOP if name in named]
    if len(top) == 1:
        raise BadInput(f"the table has only one of {' and '.join(TOP)}: give both or neither")
    return named | {"features": features} | ({"top": tuple(top)} if top else {})


@contextmanager
def as_bad_file(path: PathLike) -> Iterator[None]:
    """Name the file in errors about content that a constructor cannot use."""
    try:
        yield
    except (BadInput, KeyError, TypeError) as error:
        raise BadFile(path, f"its content is not usable ({error})", "save it again") from error


def _table(what: str, values: npt.ArrayLike) -> Floats:
    try:
        table = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{what} are not a table of numbers ({error}): give (samples, exits)") from error
    if table.ndim != 2:
        raise BadInput(f"{what} have {table.ndim} axes, shape {table.shape}: give (samples, exits)")
    if not table.size:
        raise BadInput(f"{what} are empty, shape {table.shape}: record at least one sample and one exit")
    _check_usable(what, np.isfinite(table))
    return table


def _logged(what: str, values: npt.ArrayLike, scores: Floats, most: float) -> Floats:
    """Return a table beside the scores whose values lie between 0 and the most they can be."""
    table = _table(what, values)
    _same_shape(what, table, "scores", scores)
    if (outside := (table < 0) | (table > most)).any():
        span = "0 or more" if most == np.inf else f"0 to {most:g}"
        raise BadInput(f"{what} hold {int(outside.sum())} values such as {table[outside][0]:g}: give {span}")
    return table


def _check_usable(what: str, usable: npt.NDArray[np.bool_]) -> None:
    if not usable.all():
        sample, exit_index = np.argwhere(~usable)[0][:2]
        raise BadInput(
            f"{what} hold {int((~usable).sum())} values that are NaN or infinite, the first of sample {sample} at index"
            f" {exit_index} of the exits: find out why the network gives them, or drop those samples"
        )


def _integers(what: str, values: npt.ArrayLike, axes: int = 2) -> Integers:
    table = np.asarray(values)
    if table.dtype.kind not in "iu":
        raise BadInput(f"{what} are {table.dtype}, not class indices: give integers")
    if table.ndim != axes:
        raise BadInput(f"{what} have {table.ndim} axes, shape {table.shape}: give {axes}")
    if not table.size:
        raise BadInput(f"{what} are empty: give at least one sample")
    if table.min() < 0 or table.max() > 2**62:
        extreme = table.min() if table.min() < 0 else table.max()
        raise BadInput(f"{what} hold {extreme}: class and exit indices start at 0 and stay below 2**62")
    return table.astype(np.int64, copy=False)


def half(logs: Floats) -> npt.NDArray[np.float16]:
    """Return log-probabilities in half precision; below its range they are minus infinity.

    >>> half(np.array([-0.125, -1e9]))
    array([-0.125,   -inf], dtype=float16)
    """
    with np.errstate(over="ignore"):
        return logs.astype(np.float16)


def check_top(top: int) -> None:
    """Check that the number of likeliest classes to keep is one."""
    if top < 1:
        raise BadInput(f"top {top}: keep at least the likeliest class")


def _top(classes: npt.ArrayLike, logs: npt.ArrayLike, shape: tuple[int, ...]) -> Likeliest:
    """Return the likeliest classes and their log-probabilities, once they fit together and to scores of this shape."""
    indices, halves = _integers("top_classes", classes, axes=3).astype(np.int32), np.asarray(logs, dtype=np.float16)
    _same_shape("top_log_probabilities", halves, "top_classes", indices)
    if indices.shape[:2] != shape:
        raise BadInput(f"top_classes have shape {indices.shape} beside scores {shape}: give (samples, exits, top)")
    if positive := int((~(halves <= 0)).sum()):
        raise BadInput(f"top_log_probabilities hold {positive} values above 0 or NaN: give logarithms")
    if rising := int((halves[..., 1:] > halves[..., :-1]).sum()):
        raise BadInput(f"top_log_probabilities rise at {rising} places: give the likeliest class first")
    again = sum(int((indices[..., step:] == indices[..., :-step]).sum()) for step in range(1, indices.shape[2]))
    if again:
        raise BadInput(f"top_classes name a class twice at {again} places: give each of the likeliest classes once")
    return indices, halves


def _check_samples_first(logits: Floats, labels: npt.ArrayLike | None) -> None:
    """Raise if logits have exits, and then as many samples as there are labels."""
    if labels is not None and len(logits) != np.size(labels) == logits.shape[1]:
        raise BadInput(
            f"logits of shape {logits.shape} and {logits.shape[1]:,} labels: samples come first, as in"
            " np.stack(logits, axis=1); or give a list of (samples, classes), one array for each exit"
        )


def _labels(values: npt.ArrayLike, num_samples: int) -> Integers:
    labels = np.asarray(values)
    if labels.ndim == 2:
        raise BadInput(
            f"labels have shape {labels.shape}, as in multi-label data: alight gives each sample one class,"
            " so give one index per sample (argmax of one-hot rows)"
        )
    if labels.ndim != 1 or len(labels) != num_samples:
        raise BadInput(f"labels have shape {labels.shape} for {num_samples} samples: give one index per sample")
    return _integers("labels", labels, axes=1)


def _check_classes(labels: Integers, num_classes: int) -> None:
    if labels.max() >= num_classes:
        raise BadInput(
            f"labels run from {labels.min()} to {labels.max()}, but the logits have {num_classes} classes, 0 to"
            f" {num_classes - 1}: number the classes from 0"
        )


def _logits(logits: npt.ArrayLike | Sequence[npt.ArrayLike]) -> Floats:
    try:
        listed = isinstance(logits, list | tuple)
        arrays = [_array(part) for part in logits] if listed else [_array(logits)]  # type: ignore[union-attr]
    except (TypeError, ValueError) as error:
        raise BadInput(f"logits are not numbers ({error}): give (samples, exits, classes)") from error
    if len({part.shape for part in arrays}) > 1:
        shapes = [part.shape for part in arrays]
        raise BadInput(f"the exits' logits disagree in shape, {shapes}: give (samples, classes) for each")
    parts = np.stack(arrays) if listed and arrays else arrays[0] if arrays else np.empty((0, 0, 0))
    if parts.ndim != 3:
        raise BadInput(
            f"logits have {parts.ndim} axes, shape {parts.shape}: give (samples, exits, classes),"
            " or a list with one (samples, classes) per exit"
        )
    stacked = np.moveaxis(parts, 0, 1) if listed else parts
    if not stacked.size:
        raise BadInput(f"logits are empty, shape {stacked.shape}: give at least one sample and one exit")
    if stacked.shape[2] == 1:
        raise BadInput(
            "logits have 1 class per exit: for two classes behind one sigmoid, stack [0, logit] on the last axis"
        )
    usable = np.isfinite(stacked) | (stacked == -np.inf)  # -inf is a class that was masked out
    usable &= np.isfinite(stacked.max(axis=-1, keepdims=True))
    _check_usable("logits", usable)
    return stacked


def _array(values: Any) -> Floats:
    """Return numbers as float64, from anything like an array; tensors leave their graph and device."""
    if hasattr(values, "detach"):
        values = values.detach().double().cpu().numpy()
    if np.iscomplexobj(values):
        raise TypeError("they are complex")
    return np.asarray(values, dtype=np.float64)


def _same_shape(what: str, table: np.ndarray, other: str, reference: np.ndarray) -> None:
    if table.shape != reference.shape:
        raise BadInput(f"{what} have shape {table.shape} and {other} {reference.shape}: they must agree")
