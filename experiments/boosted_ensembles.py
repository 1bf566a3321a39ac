"""Do boosted ensembles of exits (Zero-Time-Waste) gain more than the geometric mean of `combine="geometric_mean"`?

    python experiments/boosted_ensembles.py        # a few minutes on one core

Writes results/combinations_boosted.csv, with the columns of results/combinations.csv, for the recordings that have
log-probabilities. At exit m a class k has the value

    sum_(j <= m) w_mj log p_j(k) + b_m(k)

w at least 0 and b with a ridge penalty, fitted by cross-entropy. `ensemble` fits all weights of an exit anew, as
Wolczyk et al. (2021) do; `boosted` adds exits stage by stage, as boosting does: what was fitted at earlier exits stays.
A class beyond the recorded ones has its share of the probability that they leave. `geometric_mean` and
`temperature` are beside them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from combinations import Pool, compare, pools
from scipy.optimize import minimize

from alight import HeadOutputs, calibrate
from alight.calibrate.crossval import shared_by_budgets
from alight.files import write_rows
from alight.outputs import TOP
from alight.policies.combinations import IMPOSSIBLE, Array, Combination, Mapped, Memory
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results/combinations_boosted.csv"
PENALTY = 10.0  # on half the squared biases, against the log-likelihood of all samples; 3 and 30 gain no more
STEPS = 60  # of the optimiser

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Ensemble(Combination):
    """Answers with the class of the largest value; the score is the gap to the next."""

    score: ClassVar[str] = "gap"
    weights: tuple[tuple[float, ...], ...]  # per exit, one per exit so far
    biases: tuple[tuple[float, ...], ...]  # per exit and class

    def _check(self) -> None:
        pass

    @property
    def inputs(self) -> tuple[str, ...]:
        """The likeliest classes."""
        return TOP

    def step(self, exit_index: int, predictions: Array, columns: tuple[Array, ...], memory: Memory) -> Mapped:
        """Return answers and scores."""
        open_index = self.exits.index(exit_index)
        memory = (*memory, all_classes(columns[0], columns[1], len(self.biases[0])))
        values = np.tensordot(self.weights[open_index], memory, axes=1) + np.array(self.biases[open_index])
        ordered = np.partition(values, -2, axis=1)
        return values.argmax(axis=1), ordered[:, -1] - ordered[:, -2], memory


def all_classes(classes: npt.NDArray[np.int32], logs: npt.NDArray[np.float16], count: int) -> Floats:
    """Return log-probabilities of all classes, (samples, classes)."""
    known = np.clip(logs.astype(np.float64), IMPOSSIBLE, None)
    left = np.clip(1 - np.exp(known).sum(axis=1), np.exp(IMPOSSIBLE), 1) / max(count - known.shape[1], 1)
    others = np.minimum(np.log(left), known[:, -1])
    values = np.repeat(others[:, None], count, axis=1)
    np.put_along_axis(values, classes.astype(np.int64), known, axis=1)
    return np.maximum(values, IMPOSSIBLE)


def fit(num_classes: int, stagewise: bool, labelled: HeadOutputs) -> Ensemble:
    """Return the ensemble of all exits, fitted one exit after the other."""
    classes, likely = (labelled.column(name) for name in TOP)
    columns = zip(classes.swapaxes(0, 1), likely.swapaxes(0, 1), strict=True)
    logs = np.stack([all_classes(*each, num_classes) for each in columns])  # (exits, samples, classes)
    truth = labelled.known_labels("an ensemble")
    weights: list[Floats] = []
    biases: list[Floats] = []
    for index in range(labelled.num_exits):
        if stagewise and index:
            fixed = np.tensordot(weights[-1], logs[:index], axes=1) + biases[-1]
            weight, bias = _fitted(fixed, logs[index : index + 1], truth)
            weights.append(np.append(weights[-1], weight))
            biases.append(biases[-1] + bias)
        else:
            weight, bias = _fitted(np.zeros(logs.shape[1:]), logs[: index + 1], truth)
            weights.append(weight)
            biases.append(bias)
    numbers = {"weights": weights, "biases": biases}
    kept = {name: tuple(tuple(each.tolist()) for each in several) for name, several in numbers.items()}
    return Ensemble(exits=tuple(range(labelled.num_exits)), top=classes.shape[2], **kept)


def _fitted(fixed: Floats, logs: Floats, truth: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return the weights of these exits and the biases that make the truth likeliest, on top of fixed values."""
    count, samples = len(logs), np.arange(len(truth))

    def surprise(numbers: Floats) -> tuple[float, Floats]:
        values = fixed + np.tensordot(numbers[:count], logs, axes=1) + numbers[count:]
        likely = np.exp(values - values.max(axis=1, keepdims=True))
        likely /= likely.sum(axis=1, keepdims=True)
        missed = likely.copy()
        missed[samples, truth] -= 1
        missed /= len(truth)
        penalty = PENALTY / len(truth) * numbers[count:]
        value = -np.log(np.maximum(likely[samples, truth], 1e-300)).mean() + penalty @ numbers[count:] / 2
        slope = np.concatenate([np.einsum("sc,esc->e", missed, logs), missed.sum(axis=0) + penalty])
        return float(value), slope

    start = np.concatenate([np.full(count, 1 / count), np.zeros(logs.shape[2])])
    bounds = [(0.0, None)] * count + [(None, None)] * logs.shape[2]
    options = {"maxiter": STEPS}
    found = minimize(surprise, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
    return found[:count], found[count:]


def rows(name: str, given: Pool) -> Iterator[dict[str, str | float | int]]:
    """Yield what each ensemble gains on one recording."""
    count = 1 + int(max(given.samples.known_labels("an ensemble").max(), given.samples.column(TOP[0]).max()))
    ways = {"ensemble": False, "boosted": True}
    fits = {way: shared_by_budgets(partial(fit, count, stagewise)) for way, stagewise in ways.items()}
    known = {name: calibrate.COMBINE[name] for name in ("geometric_mean", "temperature")}
    yield from compare(name, given, known | fits)


def main() -> None:
    recorded = [(name, given) for name, given in pools() if name.startswith("minilm")]
    found = [row for name, given in recorded for row in rows(name, given)]
    made = provenance("numpy", "scipy", folder=ROOT)
    write_rows(RESULTS, [row | made for row in found])


if __name__ == "__main__":
    main()
