"""Do contracts hold? Many calibration draws, batches and streams; an hour on one core.

    python experiments/guarantees.py             # everything
    python experiments/guarantees.py alarm       # one part: contracts, calls, salts, tight, quota, paced or alarm

Writes results/guarantees_<part>.csv: one row per claim with what was measured, what was guaranteed, whether it holds,
and on what it was run. docs/guarantees.md shows the tables.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import binom
from torch import nn

from alight import HeadOutputs, MultiExitModel, Policy, Predictor, RunSettings, calibrate, recordings, replay
from alight.calibrate import certified_mean, certified_probability, certified_stream
from alight.errors import BadInput
from alight.files import write_rows
from alight.policies.limits import Quota
from alight.policies.policy import Threshold
from alight.policies.route import replay_on
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
Floats = npt.NDArray[np.float64]
Row = dict[str, str | float | int]
COSTS = np.array([1.0, 2.0, 3.5, 5.0, 8.0])
BUDGET = 4.0
DELTA = 0.05
DRAWS = 2000
FRESH, FRESH_TABLES = 20_000, 10  # samples, and tables of so many
STREAMS = 50  # of 100,000 samples each
RECORDING = recordings.load("resnet18_cifar100_frozen")


def independent(rng: np.random.Generator, size: int) -> Floats:
    return rng.uniform(size=(size, 5))


def tied(rng: np.random.Generator, size: int) -> Floats:
    """A common part and noise, rounded to five levels."""
    return np.floor(5 * (rng.uniform(size=(size, 1)) + rng.uniform(size=(size, 5))) / 2)


def heavy_tailed(rng: np.random.Generator, size: int) -> Floats:
    """Sums of Cauchy variables: no mean, and exits that depend on each other."""
    return np.cumsum(rng.standard_cauchy(size=(size, 5)), axis=1)


def recorded(rng: np.random.Generator, size: int) -> Floats:
    """Margins of a ResNet-18 on CIFAR-100, five of its exits."""
    return RECORDING.test.scores[rng.integers(len(RECORDING.test), size=size)][:, [0, 2, 4, 6, 7]]


DISTRIBUTIONS = {each.__name__: each for each in (independent, tied, heavy_tailed, recorded)}


def table(scores: Floats) -> HeadOutputs:
    return HeadOutputs(scores, np.zeros(scores.shape, dtype=np.int64))


def truth(name: str) -> tuple[list[HeadOutputs], float]:
    """Tables on which a policy's true mean cost is measured, taken in turn, and the standard error of all of them."""
    if name == "recorded":  # draws come from the recorded samples, so these are the whole distribution
        return [table(RECORDING.test.scores[:, [0, 2, 4, 6, 7]])], 0.0
    seeds = range(10**6, 10**6 + FRESH_TABLES)
    return [table(DISTRIBUTIONS[name](np.random.default_rng(seed), FRESH)) for seed in seeds], 2.5 / np.sqrt(
        FRESH * FRESH_TABLES
    )


def contracts() -> Iterator[Row]:
    """Mean and probability contracts over calibration draws, by the exact law and by a family of lowered policies."""
    certify: dict[str, Callable[..., calibrate.Method]] = {
        "mean": certified_mean,
        "probability": partial(certified_probability, delta=DELTA),
    }
    cases: list[tuple[Callable[..., Policy], str, int]] = [
        (calibrate.geometric, "exact law", 50),
        (calibrate.geometric, "exact law", 500),
        (calibrate.global_threshold, "family", 50),
    ]
    for name, draw in DISTRIBUTIONS.items():
        fresh, fresh_error = truth(name)
        fitting = table(draw(np.random.default_rng(10**5), 500))
        for method, kind, samples in cases:
            for contract, certified in certify.items():
                spent = np.empty(DRAWS)
                for seed in range(DRAWS):  # of the draw, and of the salt
                    drawn = table(draw(np.random.default_rng(seed), samples))
                    policy = certified(method, seed=seed)(COSTS, BUDGET, fitting, drawn)
                    spent[seed] = replay(policy, fresh[seed % len(fresh)]).mean_cost
                yield _judged(f"{contract}, {kind}", name, samples, spent, fresh_error)


def _judged(claim: str, distribution: str, samples: int, spent: Floats, fresh_error: float) -> Row:
    error = float(np.hypot(spent.std() / np.sqrt(len(spent)), fresh_error))
    row: Row = {"claim": claim, "distribution": distribution, "samples": samples, "draws": len(spent)}
    if claim.startswith("mean"):
        return row | {
            "measured": f"{spent.mean() / BUDGET:.4f} of the budget",
            "guaranteed": f"at most 1 (Monte-Carlo error {error / BUDGET:.4f})",
            "holds": str(bool(spent.mean() <= BUDGET + 3 * error)),
        }
    failures = int((spent > BUDGET).sum())
    return row | {
        "measured": f"{failures / len(spent):.4f} of draws overspend, {spent.mean() / BUDGET:.4f} of the budget spent",
        "guaranteed": f"at most {DELTA:g} of draws",
        "holds": str(bool(failures <= binom.ppf(0.999, len(spent), DELTA))),
    }


def equal(rng: np.random.Generator, size: int) -> Floats:
    """One score for all: ties alone decide."""
    return np.ones((size, 5))


class ExitLogits(nn.Module):
    """A head whose logits are a row of the input, so that a real network gives the scores and classes of a draw."""

    def __init__(self, exit_index: int) -> None:
        super().__init__()
        self.exit_index = exit_index

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return inputs[:, self.exit_index]


def calls() -> Iterator[Row]:
    """Mean contracts where samples come one at a time, and in calls of mixed sizes, each draw with its own salt."""
    model = MultiExitModel([nn.Identity() for _ in COSTS], [ExitLogits(index) for index in range(len(COSTS))]).eval()
    methods = {"exact law": calibrate.geometric, "patience": calibrate.patience}
    methods["performance control"] = calibrate.performance_control
    for draw in (equal, tied):
        fitting = _answered(draw, np.random.default_rng(10**5), 500)[1]
        for kind, method in methods.items():
            spent = np.empty((2, DRAWS))
            for seed in range(DRAWS):
                rng = np.random.default_rng(seed)
                drawn, (inputs, _) = _answered(draw, rng, 50)[1], _answered(draw, rng, 50)
                policy = certified_mean(method, seed=seed)(COSTS, BUDGET, fitting, drawn)
                predictor = Predictor(model, policy, settings=RunSettings(threads=1))
                alone = [predictor(inputs[row : row + 1]).spent for row in range(10)]
                ends = [10, *(10 + np.cumsum(rng.permutation([1, 2, 7, 30]))).tolist()]
                mixed = [predictor(inputs[start:stop]).spent for start, stop in pairwise(ends)]
                spent[:, seed] = np.concatenate(alone).mean(), np.concatenate(mixed).mean()
            for way, values in zip(("one sample a call", "calls of 1 to 30"), spent, strict=True):
                yield _judged(f"mean, {kind}, {way}", draw.__name__, 50, values, 0.0)


def _answered(draw: Callable[..., Floats], rng: np.random.Generator, size: int) -> tuple[torch.Tensor, HeadOutputs]:
    """Return the logits of a draw, its scores at classes drawn at random, and the table that they give."""
    scores, classes = draw(rng, size).astype(np.float32), rng.integers(2, size=(size, len(COSTS)))
    logits = np.where(classes[..., None] == np.arange(2), scores[..., None], 0)
    return torch.from_numpy(logits), HeadOutputs.from_logits(logits, score="logit_margin")


def salts() -> Iterator[Row]:
    """Contracts on risks, costs, batches and streams over calibration draws, each with its own salt."""
    yield from _salted_risks()
    for draw in (tied, equal):
        yield from _salted_costs(draw)
        yield from _salted_batches_and_streams(draw)


def _salted_costs(draw: Callable[..., Floats]) -> Iterator[Row]:
    """Yield how often a probability contract overspends where ties decide."""
    fresh = [table(draw(np.random.default_rng(10**6 + number), FRESH)) for number in range(FRESH_TABLES)]
    fitting, spent = table(draw(np.random.default_rng(10**5), 500)), np.empty(DRAWS)
    for seed in range(DRAWS):
        drawn = table(draw(np.random.default_rng(seed), 50))
        policy = certified_probability(calibrate.geometric, delta=DELTA, seed=seed)(COSTS, BUDGET, fitting, drawn)
        spent[seed] = replay(policy, fresh[seed % FRESH_TABLES]).mean_cost
    yield _judged("probability, exact law", draw.__name__, 50, spent, 0.0)


def _salted_batches_and_streams(draw: Callable[..., Floats]) -> Iterator[Row]:
    """Yield whether any batch of 1 to 200 samples, or any stream of 100 in batches of one size, breaks its bound."""
    overspent, ahead, used = 0, -np.inf, []
    for seed in range(DRAWS):
        rng = np.random.default_rng(seed)
        calibration, fresh = table(draw(rng, 50)), table(draw(rng, 200))
        batch = replace(calibrate.certified_batch(calibrate.geometric)(COSTS, BUDGET, calibration), salt=seed)
        size = int(rng.integers(1, 201))
        decisions = replay(batch, fresh.take(slice(0, size)))
        counts = zip(np.bincount(decisions.exits, minlength=len(COSTS)).tolist(), COSTS.tolist(), strict=True)
        overspent += sum(count * Fraction(cost) for count, cost in counts) > size * Fraction(BUDGET)
        stream = certified_stream(calibrate.geometric, seed=seed)(COSTS, BUDGET, calibration)
        step = int(rng.choice([1, 3, 20, 100]))
        spent = np.cumsum(replay(stream, fresh.take(slice(0, 100)), batch_size=step).spent)
        ends = np.unique(np.append(np.arange(step, 101, step), 100))
        ahead = max(ahead, float((spent[ends - 1] - ends * BUDGET).max()) / COSTS[-1])
        used.append(float(spent[-1]) / (100 * BUDGET))
    common: Row = {"distribution": draw.__name__, "samples": 50, "draws": DRAWS}
    yield common | {
        "claim": "batch, 1 to 200 samples",
        "measured": f"{overspent} of {DRAWS} batches overspend",
        "guaranteed": "none",
        "holds": str(overspent == 0),
    }
    yield common | {
        "claim": "stream, batches of 1 to 100",
        "measured": f"ahead by {ahead:.4f} of the last exit at most; {np.mean(used):.4f} of the budget used",
        "guaranteed": "ahead by at most 1",
        "holds": str(bool(ahead <= 1)),
    }


def _labelled(rng: np.random.Generator, size: int) -> HeadOutputs:
    """Tied scores, and exits that are right the more often the higher the score and the later the exit."""
    scores = tied(rng, size)
    right = rng.uniform(size=scores.shape) < 0.35 + 0.09 * scores + 0.05 * np.arange(len(COSTS))
    return HeadOutputs(scores, (~right).astype(np.int64), np.zeros(size, dtype=np.int64))


def _salted_risks() -> Iterator[Row]:
    """Yield how often an issued certificate on the error, alone and beside one on cost, is false."""
    fresh = [_labelled(np.random.default_rng(10**6 + number), FRESH) for number in range(FRESH_TABLES)]
    alpha, delta = 0.31, 0.1
    for kind, budget in (("risk, the cheapest policy", None), ("risk and cost", 6.5)):
        broken = issued = 0
        for seed in range(DRAWS):
            labelled = _labelled(np.random.default_rng(seed), 600)
            method = calibrate.certified_risk(
                calibrate.geometric,
                risk="error",
                alpha=alpha,
                delta=delta,
                seed=seed,
                cost=None if budget is None else "probability",
            )
            try:
                policy = method(COSTS, budget, labelled)
            except BadInput:  # no policy can be certified
                continue
            issued += 1
            decisions = replay(policy, fresh[seed % FRESH_TABLES])
            error = 1 - decisions.accuracy(fresh[seed % FRESH_TABLES].known_labels("a risk"))
            broken += error > alpha or (budget is not None and decisions.mean_cost > budget)
        yield {
            "claim": kind,
            "distribution": "tied, with labels",
            "samples": 600,
            "draws": DRAWS,
            "measured": f"{broken / DRAWS:.4f} of draws false; issued in {issued / DRAWS:.4f}",
            "guaranteed": f"at most {delta:g} of draws",
            "holds": str(bool(broken <= binom.ppf(0.999, DRAWS, delta))),
        }


def tight() -> Iterator[Row]:
    """How much of the budget is used with 5,000 samples: law, betting, Hoeffding-Bentkus and the paper's slack."""
    for name, draw in DISTRIBUTIONS.items():
        fresh, fitting = truth(name)[0], table(draw(np.random.default_rng(10**5), 500))
        sure = partial(certified_probability, delta=DELTA, seed=0)
        ways: dict[str, Callable[[HeadOutputs], Policy]] = {
            "mean, exact law": partial(certified_mean(calibrate.geometric, seed=0), COSTS, BUDGET, fitting),
            "probability, exact law": partial(sure(calibrate.geometric), COSTS, BUDGET, fitting),
            "probability, betting": partial(sure(_marked), COSTS, BUDGET, fitting),
            "probability, Hoeffding-Bentkus": partial(sure(_marked, bound="hoeffding_bentkus"), COSTS, BUDGET, fitting),
            "the paper's slack": lambda drawn: calibrate.geometric(COSTS, BUDGET, drawn, slack="paper"),
            "the proof's slack": lambda drawn: calibrate.geometric(COSTS, BUDGET, drawn, slack=2.507),
        }
        for way, make in ways.items():
            spent, deviations = [], []
            for seed in range(200):
                decisions = replay(make(table(draw(np.random.default_rng(seed), 5000))), fresh[seed % len(fresh)])
                spent.append(decisions.mean_cost)
                deviations.append(float(decisions.spent.std()))
            required = 0.99 if way.startswith("mean") else 1 - 2.5 * np.mean(deviations) / (BUDGET * np.sqrt(5000))
            judged = way in ("mean, exact law", "probability, exact law")
            yield {
                "claim": way,
                "distribution": name,
                "samples": 5000,
                "draws": 200,
                "measured": f"{np.mean(spent) / BUDGET:.4f} used; {np.mean(np.array(spent) > BUDGET):.3f} overspend",
                "guaranteed": f"at least {required:.4f}" if judged else "for comparison",
                "holds": str(bool(np.mean(spent) / BUDGET >= required)) if judged else "",
            }


def _marked(costs: Any, budget: Any, labelled: HeadOutputs, unlabelled: HeadOutputs | None = None) -> Policy:
    """Geometric rates as a policy that hides them, so that it is certified by its thresholds alone."""
    policy = calibrate.geometric(costs, budget, labelled, unlabelled)
    return Threshold(policy.thresholds, policy.tie_shares, costs=policy.costs, budget=policy.budget, score=policy.score)


def quota() -> Iterator[Row]:
    """Batches of any size, rates, costs and scores: do any overspend, and how much of the budget is used?"""
    rng = np.random.default_rng(0)
    overspent, use, beyond, draws = 0, [], 0, 100_000
    for _ in range(draws):
        exits, total = int(rng.integers(1, 13)), int(rng.integers(1, 5001))
        costs, rates = np.cumsum(rng.uniform(0.01, 1, exits)), rng.dirichlet(np.full(exits, 0.5))
        budget = float(rates @ costs) * (1.0 if rng.uniform() < 0.5 else float(rng.uniform(0.5, 1.5)))
        allowed = max(budget, float(costs[0]))
        policy = Quota(costs=tuple(costs.tolist()), exit_rates=tuple(rates.tolist()), budget=allowed)
        scores = rng.uniform(size=(total, exits))
        if rng.uniform() < 0.3:
            scores = np.round(scores, 1)
        decisions = replay(policy, table(scores))
        shares = zip(np.bincount(decisions.exits, minlength=exits).tolist(), costs.tolist(), strict=True)
        overspent += sum(count * Fraction(cost) for count, cost in shares) > total * Fraction(allowed)  # exactly
        planned = min(allowed, float(rates @ costs))  # a plan may leave some of the budget
        beyond += total * (planned - decisions.mean_cost) > float(np.ptp(costs)) + 1e-9 * total * planned
        if total >= 1000:
            use.append(decisions.mean_cost / planned)
    yield {
        "claim": "batches that overspend",
        "draws": draws,
        "measured": overspent,
        "guaranteed": 0,
        "holds": str(overspent == 0),
    }
    yield {
        "claim": "budget used by batches of 1,000 and more",
        "draws": len(use),
        "measured": f"{np.mean(use):.5f} on average, {min(use):.4f} at least",
        "guaranteed": "",
        "holds": "",
    }
    yield {
        "claim": "batches that leave more than one sample's way to the last exit unspent",
        "draws": draws,
        "measured": beyond,
        "guaranteed": 0,
        "holds": str(beyond == 0),
    }


def streams(rng: np.random.Generator, length: int) -> dict[str, Floats]:
    """Scores of streams that drift, jump, alternate or mean harm; (length, 8 exits)."""
    base = RECORDING.test.scores[rng.integers(len(RECORDING.test), size=length)]
    along = np.linspace(0, 1, length)[:, None]
    hard = np.where(rng.uniform(size=(length, 1)) < 0.5, 0.02, 1.0)
    return {
        "as calibrated": base,
        "drift to hard": base * (1 - 0.9 * along),
        "drift to easy": base + along,
        "sudden": np.where(along < 0.5, base, 0.2 * base),
        "alternating": np.where(np.arange(length)[:, None] % 2000 < 1000, base, 0.1 * base),
        "all unsure": 1e-9 * base,
        "all sure": 1 + base,
        "all equal": np.full_like(base, 0.5),
        "every second unsure": base * hard,
        "sure early, unsure late": np.where(along < 0.3, 1 + base, 1e-6 * base),
    }


def paced() -> Iterator[Row]:
    """Streams of 20,000 samples: is the bound ever broken, and how much of the budget is used?"""
    length, count = 20_000, 100  # of each of ten kinds
    worst: dict[str, float] = {}
    use: dict[str, list[float]] = {}
    for seed in range(count):
        rng = np.random.default_rng(seed)
        budget = f"{rng.integers(25, 86)}%"
        method = certified_stream(calibrate.eero, seed=seed)
        policy = method(RECORDING.costs, budget, RECORDING.labelled, spend_all=True)
        size = int(rng.choice([1, 7, 50, 200, 1000], p=[0.02, 0.08, 0.3, 0.3, 0.3]))
        for kind, scores in streams(rng, length).items():
            spent = np.cumsum(replay(policy, table(scores), batch_size=size).spent)
            ends = np.unique(np.append(np.arange(size, length + 1, size), length))
            excess = (spent[ends - 1] - ends * (policy.budget or 0.0)) / policy.costs[-1]
            worst[kind] = max(worst.get(kind, -np.inf), float(excess.max()))
            use.setdefault(kind, []).append(float(spent[-1] / (length * (policy.budget or 1.0))))
    for kind, excess in worst.items():
        demanding = kind not in ("drift to easy", "all sure", "all equal")  # these leave early by themselves
        yield {
            "claim": f"stream, {kind}",
            "draws": count,
            "measured": f"ahead by {excess:.4f} of the last exit; {min(use[kind]):.4f} of the budget used at least",
            "guaranteed": "ahead by at most 1" + ("; 0.99 used" if demanding else ""),
            "holds": str(bool(excess <= 1 and (min(use[kind]) >= 0.99 or not demanding))),
        }


def alarm() -> Iterator[Row]:
    """Yield how often the alarm is raised without a shift, and how soon after one that adds 20 % to the mean cost."""
    for percent in (30, 50, 70):
        everything = _pooled()
        false, delays = 0, []
        for seed in range(STREAMS):  # each with its own calibration
            rng = np.random.default_rng(seed)
            calibration, rest = everything.split(1 / 3, rng)
            first, second = calibration.split(0.1, rng)
            given = (RECORDING.costs, f"{percent}%", first, second)
            policy = certified_stream(calibrate.eero, seed=seed)(*given, spend_all=True)
            plain = certified_mean(calibrate.eero, seed=seed)(*given, spend_all=True)
            spent = replay(plain, rest).spent
            calm = rng.integers(len(spent), size=100_000)
            _, (state, *_) = replay_on(policy, rest.take(calm), batch_size=200)
            false += int(state.alarmed)
            weights = _harder(spent, 1.2)
            rows = np.concatenate([rng.integers(len(spent), size=5000), rng.choice(len(spent), size=5000, p=weights)])
            _, (state, *_) = replay_on(policy, rest.take(rows), batch_size=20)
            delays.append(state.alarmed_at - 5000 if state.alarmed else np.inf)
        yield {
            "claim": f"false alarms at {percent} %",
            "samples": len(second),
            "draws": STREAMS,
            "measured": false,
            "guaranteed": "at most 0.01 of streams of 100,000",
            "holds": str(bool(false <= binom.ppf(0.999, STREAMS, 0.01))),
        }
        yield {
            "claim": f"delay of the alarm at {percent} % after a shift that costs 20 % more",
            "samples": len(second),
            "draws": STREAMS,
            "measured": f"median {np.median(delays):.0f}, all within {max(delays):.0f}",
            "guaranteed": "2,000 samples",
            "holds": str(bool(max(delays) <= 2000)),
        }


def _pooled() -> HeadOutputs:
    """All recorded samples, to draw calibrations and streams from."""
    tables = (RECORDING.labelled, RECORDING.test)
    return HeadOutputs(
        np.concatenate([each.scores for each in tables]),
        np.concatenate([each.predictions for each in tables]),
        np.concatenate([each.known_labels("the alarm") for each in tables]),
    )


def _harder(spent: Floats, factor: float) -> Floats:
    """Return weights that draw expensive samples more often, so that the mean cost grows by this factor."""
    low, high = 0.0, 60.0
    for _ in range(60):
        tilt = (low + high) / 2
        weights = np.exp(tilt * spent / spent.max())
        weights /= weights.sum()
        low, high = (tilt, high) if weights @ spent < factor * spent.mean() else (low, tilt)
    return weights


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    each.__name__: each for each in (contracts, calls, salts, tight, quota, paced, alarm)
}


def main(parts: list[str]) -> None:
    for part in parts or list(PARTS):
        start, rows = time.perf_counter(), []
        for row in PARTS[part]():
            empty: Row = {"claim": "", "distribution": "", "samples": "", "draws": ""}
            rows.append(empty | row)
            print(" | ".join(str(cell) for cell in row.values()), flush=True)
        made: Row = {**provenance("numpy", "scipy", folder=ROOT)}
        write_rows(ROOT / f"results/guarantees_{part}.csv", [row | made for row in rows])
        print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
