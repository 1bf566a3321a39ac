"""Is there a better combination of exits than the geometric mean? Stacked weights, another score, learned stopping.

    python experiments/stacked_exits.py msdnet_joint_0 minilm_clinc150    # some minutes each; all four without names

Writes results/combinations_stacked.csv, for recordings with log-probabilities: points of accuracy gained over `eero` at
equal spent budget, and over `eero` on the geometric mean, each the mean over spent budgets and splits with its 95 %
interval over splits. Rows of recordings that are not named stay.

`stacked`: at exit m a class k has the value sum_(j <= m) w_mj log p_j(k), w at least 0, fitted by cross-entropy with a
ridge penalty towards the weights that the geometric mean gives. `odds`: the geometric mean, scored by the log-odds of
its answer, as an estimate of the probability that it is right, instead of by the gap to the next class.
`learned_stopping`: the geometric mean, and what going on brings is learned from its answers and gaps.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from combinations import Pool, curve, pools
from recorded_cifar100 import RESULTS as FOLDER
from recorded_cifar100 import rows
from scipy.optimize import minimize

from alight import Costs, HeadOutputs, calibrate
from alight.calibrate.crossval import shared_by_budgets
from alight.files import write_rows
from alight.outputs import TOP
from alight.policies.combinations import IMPOSSIBLE, Array, Combination, Gain, GeometricMean, Mapped, Memory
from alight.policies.policy import Policy
from alight.provenance import provenance

RESULTS = FOLDER / "combinations_stacked.csv"
RECORDINGS = ("msdnet_joint_0", "resnet18_mixed_distilled_0", "minilm_banking77", "minilm_clinc150")
SPLITS = 10
RIDGE = 100.0  # on half the squared deviations in standard deviations of log-probabilities; 10 gains no more

Floats = npt.NDArray[np.float64]
fit_mean = calibrate.COMBINE["geometric_mean"]


@dataclass(frozen=True, kw_only=True)
class Stacked(Combination):
    """Answers with the class of the largest value; the score is the gap to the next."""

    score: ClassVar[str] = "gap"
    weights: tuple[tuple[float, ...], ...]  # per exit, one per exit so far

    def _check(self) -> None:
        pass

    def step(self, exit_index: int, predictions: Array, columns: tuple[Array, ...], memory: Memory) -> Mapped:
        """Return answers and scores."""
        memory = (*memory, columns)
        classes, logs = named(memory)
        values = np.tensordot(self.weights[self.exits.index(exit_index)], logs, axes=1)  # (samples, classes + 1)
        best = values[:, :-1].argmax(axis=1)
        answers = classes[np.arange(len(best)), best]
        others = np.append(classes == answers[:, None], np.zeros((len(best), 1), dtype=bool), axis=1)
        return answers, values.max(axis=1) - np.where(others, -np.inf, values).max(axis=1), memory


def named(said: Memory) -> tuple[npt.NDArray[np.int64], Floats]:
    """Return all likeliest classes, repeated ones too, and (exits, samples, classes + 1) log-probabilities.

    The last column is that of all classes beyond; a class beyond the likeliest of an exit counts as the last of them.
    """
    classes = np.concatenate([each.astype(np.int64) for each, _ in said], axis=1)
    values = []
    for own, likely in said:
        known = np.clip(likely.astype(np.float64), IMPOSSIBLE, None)
        beyond = np.repeat(known[:, -1:], classes.shape[1] + 1, axis=1)
        for place in range(own.shape[1]):
            beyond[:, :-1] = np.where(classes == own[:, place : place + 1], known[:, place : place + 1], beyond[:, :-1])
        values.append(beyond)
    return classes, np.stack(values)


@shared_by_budgets
def fit_stacked(labelled: HeadOutputs) -> Stacked:
    """Return stacked weights, fitted one exit after the other."""
    mean, truth = fit_mean(labelled), labelled.known_labels("stacking")[:, None]
    assert isinstance(mean, GeometricMean)
    so_far, weights, said = np.zeros(0), [], []
    for index in range(labelled.num_exits):
        said.append(tuple(labelled.column(name)[:, index] for name in TOP))
        classes, logs = named(tuple(said))
        so_far = np.append(mean.kept[index] * so_far, mean.fresh[index])
        weights.append(tuple(_fitted(logs, classes, truth, so_far).tolist()))
    return Stacked(exits=mean.exits, top=mean.top, weights=tuple(weights))


def _fitted(logs: Floats, classes: npt.NDArray[np.int64], truth: npt.NDArray[np.int64], centre: Floats) -> Floats:
    """Return the weights that make the truth likeliest, held near these."""
    size, spread = len(truth), logs.std(axis=(1, 2))
    again = np.array([[each in row[:place] for place, each in enumerate(row)] for row in classes.tolist()])
    again = np.append(again, np.zeros((size, 1), dtype=bool), axis=1)
    place = np.append(classes == truth, np.ones((size, 1), dtype=bool), axis=1).argmax(axis=1)
    of_truth = logs[:, np.arange(size), place].sum(axis=1)

    def surprise(weights: Floats) -> tuple[float, Floats]:
        values = np.where(again, -np.inf, np.tensordot(weights, logs, axes=1))
        most = values.max(axis=1, keepdims=True)
        shares = np.exp(values - most)
        totals = shares.sum(axis=1, keepdims=True)
        moved = RIDGE * (weights - centre) * spread**2
        value = (np.log(totals) + most).sum() - weights @ of_truth + moved @ (weights - centre) / 2
        slope = np.einsum("esc,sc->e", logs, shares / totals) - of_truth + moved
        return float(value) / size, slope / size

    bounds = [(0.0, None)] * len(centre)
    return np.asarray(minimize(surprise, centre, jac=True, method="L-BFGS-B", bounds=bounds).x)


@dataclass(frozen=True, kw_only=True)
class Odds(Stacked):
    """Answers with the class of the largest value; the score is its log-odds against all others that were named."""

    score: ClassVar[str] = "odds"

    def step(self, exit_index: int, predictions: Array, columns: tuple[Array, ...], memory: Memory) -> Mapped:
        """Return answers and scores."""
        answers, _, memory = super().step(exit_index, predictions, columns, memory)
        classes, logs = named(memory)
        values = np.tensordot(self.weights[self.exits.index(exit_index)], logs, axes=1)
        most = values.max(axis=1, keepdims=True)
        rivals = np.zeros(len(values))
        for place in range(classes.shape[1]):
            new = (classes[:, :place] != classes[:, place : place + 1]).all(axis=1) & (classes[:, place] != answers)
            rivals += new * np.exp(values[:, place] - most[:, 0])
        return answers, -np.log(np.maximum(rivals, np.exp(IMPOSSIBLE))), memory


@shared_by_budgets
def fit_odds(labelled: HeadOutputs) -> Odds:
    """Return the geometric mean with another score."""
    mean = fit_mean(labelled)
    assert isinstance(mean, GeometricMean)
    so_far, weights = np.zeros(0), []
    for kept, fresh in zip(mean.kept, mean.fresh, strict=True):
        so_far = np.append(kept * so_far, fresh)
        weights.append(tuple(so_far.tolist()))
    return Odds(exits=mean.exits, top=mean.top, weights=tuple(weights))


@dataclass(frozen=True, kw_only=True)
class Chained(Combination):
    """One combination on the answers and scores of another."""

    score: ClassVar[str] = "negative_gain"
    before: GeometricMean
    after: Gain

    def __post_init__(self) -> None:  # both parts are checked
        pass

    def _check(self) -> None:
        pass

    def step(self, exit_index: int, predictions: Array, columns: tuple[Array, ...], memory: Memory) -> Mapped:
        """Return answers and scores."""
        kept = memory or ((), ())
        answers, gaps, earlier = self.before.step(exit_index, predictions, columns, kept[0])
        answers, scores, later = self.after.step(exit_index, answers, (gaps,), kept[1])
        return answers, scores, (earlier, later)


def learned_on_mean(costs: Costs, budget: str, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None) -> Policy:
    """Return learned stopping on the answers and gaps of the geometric mean."""
    mean = fit_mean(labelled)
    policy = calibrate.learned_stopping(costs, budget, mean.apply(labelled))
    assert isinstance(mean, GeometricMean)
    assert isinstance(policy.combination, Gain)
    chained = Chained(exits=mean.exits, top=mean.top, before=mean, after=policy.combination)
    return replace(policy, combination=chained)


METHODS: Mapping[str, calibrate.Method] = {
    "eero": calibrate.eero,
    "geometric_mean": calibrate.combined(calibrate.eero, "geometric_mean"),
    "stacked": calibrate.combined(calibrate.eero, fit_stacked),
    "odds": calibrate.combined(calibrate.eero, fit_odds),
    "learned_stopping": learned_on_mean,
}


def compare(name: str, given: Pool) -> Iterator[dict[str, str | float | int]]:
    """Yield what each combination gains on a recording."""
    found: dict[str, list[Floats]] = {way: [] for way in METHODS}
    for seed in range(SPLITS):
        labelled, test = given.samples.split(given.labelled / len(given.samples), np.random.default_rng(seed))
        for way, method in METHODS.items():
            found[way].append(curve(method, given.costs, labelled, test))
    curves = np.array([*found.values()])  # (ways, splits, spends)
    compared = curves[..., ~np.isnan(curves).any(axis=(0, 1))]  # at spends that all reach
    means = dict(zip(METHODS, compared.mean(axis=2), strict=True))  # (splits,) each
    for way in list(METHODS)[1:]:
        row: dict[str, str | float | int] = {"outputs": name, "combine": way}
        for column, other in {"gain": "eero", "over_geometric_mean": "geometric_mean"}.items():
            gains = means[way] - means[other]
            row |= {column: float(gains.mean()), f"{column}_error": float(1.96 * gains.std(ddof=1) / SPLITS**0.5)}
        yield row | {"splits": SPLITS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=RECORDINGS, help="recordings to measure")
    names = parser.parse_args().names
    made = provenance("numpy", "scipy", folder=FOLDER.parent)
    kept: list[Mapping[str, str | float | int]] = [*(rows(RESULTS) if RESULTS.exists() else [])]
    known = {name: given for name, given in pools() if name in RECORDINGS}
    for name in names:
        kept = [row for row in kept if row["outputs"] != name]
        kept += [row | made for row in compare(name, known[name])]
        write_rows(RESULTS, sorted(kept, key=lambda row: RECORDINGS.index(str(row["outputs"]))))
        print(name, flush=True)


if __name__ == "__main__":
    main()
