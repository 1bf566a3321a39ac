"""EERO against geometric, Gaussian and patience on frozen heads: every seed that was trained, and the package's own.

    python experiments/paper_seeds.py STATE      # a folder that cifar100_pack.py unpacked; two minutes on one core

Writes results/paper/frozen_seeds.csv: what EERO gains at equal spent budget on each of the three and on the best of
them, seed by seed with paired intervals over test images, as the mean of all seeds, and when other calibration images
are drawn; and on the best, what EERO would gain with a flat prior, with the first half of the exits closed, and with
the risks of the test images in place of those estimated. Writes results/paper/frozen_shares.csv: who leaves where at
the budgets of WATCHED, and how many of them are right; and results/paper/frozen_seeds.json (how it was made).
Recordings of seeds after the first are not in the repository, so `make figures` takes these files unchanged.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from paper_tables import FOLDER, SEED, Floats, Row, curve, draws_of_test, interpolated, text_of
from recorded_cifar100 import FROZEN, PACKAGED, PUBLISHED, RESULTS, Result

from alight import Costs, HeadOutputs, calibrate, recordings, replay
from alight.budgeting.rates import inverse_cost_prior
from alight.errors import BudgetTooSmall
from alight.files import write_text
from alight.policies.policy import Threshold
from alight.provenance import provenance

BEST = "best"  # of the rivals, at each spent budget anew
ALL = "mean"  # of the seeds
SPENDS = tuple(percent / 100 for percent in range(20, 101, 5))  # of the full network
REDRAWS = 20  # of calibration images, as many as there were
WATCHED = {"convnext_frozen": "90%", "resnet18_cifar100_frozen": "80%"}  # budgets for which exit shares are written


def first_half_closed(costs: Costs, budget: str, labelled: HeadOutputs) -> Threshold:
    """EERO that plans nothing for the first half of the exits, unless the budget asks for them."""
    prior = inverse_cost_prior(costs.cumulative())
    prior[: len(prior) // 2] = 0
    try:
        return calibrate.eero(costs, budget, labelled, prior=prior / prior.sum())
    except BudgetTooSmall:
        return calibrate.eero(costs, budget, labelled)


def ways(result: Result) -> dict[str, Callable[..., object]]:
    """Return EERO unchanged, and variants that show where it loses; the last knows the test set: not for use."""
    return {
        "eero": calibrate.eero,
        "eero, flat prior": partial(calibrate.eero, prior="uniform"),
        "eero, first half closed": first_half_closed,
        "eero, risks of the test": partial(_with_risks_of, result.test),
    }


def _with_risks_of(test: HeadOutputs, costs: Costs, budget: str, labelled: HeadOutputs) -> Threshold:
    """EERO whose risks are those of other images; its thresholds are still those of the calibration images."""
    return calibrate.eero(costs, budget, test, labelled.unlabelled())


def gains(result: Result, draws: Floats) -> dict[tuple[str, str], Floats]:
    """What EERO gains on each rival and every way on the best, (draws, spends), NaN where one never spends so much."""
    reached = {name: _at_spends(method, result, draws) for name, method in ways(result).items()}
    others = {name: _at_spends(calibrate.METHODS[name], result, draws) for name in PUBLISHED}
    best = np.fmax.reduce(list(others.values()))
    over_each = {("eero", rival): reached["eero"] - theirs for rival, theirs in others.items()}
    return over_each | {(name, BEST): mine - best for name, mine in reached.items()}


def _at_spends(method: Callable[..., object], result: Result, draws: Floats) -> Floats:
    accuracy, spent = curve(method, result, draws)
    found = np.array([[interpolated(spend, *each) for spend in SPENDS] for each in zip(accuracy, spent, strict=True)])
    never = [not spent[0].min() <= spend <= spent[0].max() for spend in SPENDS]
    found[:, never] = np.nan
    return found


def redrawn_gains(result: Result, redraws: int) -> list[dict[tuple[str, str], Floats]]:
    """The gains when calibration images are drawn from all that no network was trained on, the rest tested on."""
    pool, size = HeadOutputs.joined([result.calibration, result.test]), len(result.calibration)
    dice = np.random.default_rng(SEED)
    found = []
    for _ in range(redraws):
        order = dice.permutation(len(pool))
        other = Result(result.run, pool.take(order[:size]), pool.take(order[size:]), result.costs)
        found.append(gains(other, np.full((1, len(other.test)), 1 / len(other.test))))
    return found


def seed_rows(network: str, results: Sequence[Result], redraws: int = REDRAWS) -> Iterator[Row]:
    """One row for each seed and for the mean of all, method, rival and spent budget that is reached."""
    draws = draws_of_test(len(results[0].test))  # the seeds share their test images, and so the draws
    own = {str(result.run["seed"]): gains(result, draws) for result in results}
    other = {str(result.run["seed"]): redrawn_gains(result, redraws) for result in results}
    for method, rival in next(iter(own.values())):
        gained = {seed: found[method, rival] for seed, found in own.items()}
        redrawn = {seed: np.concatenate([each[method, rival] for each in found]) for seed, found in other.items()}
        gained[ALL] = np.mean(list(gained.values()), axis=0)
        redrawn[ALL] = np.concatenate(list(redrawn.values()))
        for seed, values in gained.items():
            for at, spend in enumerate(SPENDS):
                if np.isfinite(values[0, at]):
                    named = {"network": network, "seed": seed, "method": method, "rival": rival, "spent": spend}
                    yield named | _gain_columns(values[:, at]) | _redrawn_columns(redrawn[seed][:, at])


def _gain_columns(values: Floats) -> Row:
    gain, *drawn = values
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"gain": gain, "low": low, "high": high}


def _redrawn_columns(values: Floats) -> Row:
    """Return the columns of redrawn calibration images, empty where not every draw spends so much."""
    cells = (values.mean(), values.std(ddof=1), (values < 0).mean()) if np.isfinite(values).all() else ("", "", "")
    return dict(zip(("redrawn", "redrawn_deviation", "redrawn_below"), cells, strict=True))


def share_rows(network: str, result: Result) -> Iterator[Row]:
    """Yield planned and observed share of every exit, and the accuracy of its samples, there and at the last exit."""
    labels = result.test.known_labels("a comparison")
    at_end = result.test.correct()[:, -1]
    for name in ("eero", "geometric", "gaussian"):
        policy = calibrate.METHODS[name](result.costs, WATCHED[network], result.calibration)
        decisions = replay(policy, result.test)
        for index, planned in enumerate(policy.exit_rates):
            left = decisions.exits == index
            yield {
                "network": network,
                "seed": result.run["seed"],
                "method": name,
                "budget": WATCHED[network],
                "spent": decisions.mean_cost / result.costs.full,
                "exit": index + 1,
                "planned": float(planned),
                "observed": float(left.mean()),
                "right": float(((decisions.predictions == labels) & left).mean()),
                "right_at_end": float((at_end & left).mean()),
            }


def found(state: Path) -> dict[str, list[Result]]:
    """The seeds of every network."""
    trained = {
        network: [Result.of(folder / "result") for folder in sorted(state.glob(f"{network}-[0-9]"))]
        for network in FROZEN
    }
    for network, results in trained.items():
        if not results:
            raise SystemExit(f"{state} has no folder {network}-0: name one that cifar100_pack.py unpacked")
    return trained | {name: [Result({"seed": 0}, *recordings.load(name))] for name in PACKAGED}


def main(state: Path) -> None:
    begin = time.perf_counter()
    networks = found(state)
    seeds = [row for network, results in networks.items() for row in seed_rows(network, results)]
    shares = [row for network in WATCHED for result in networks[network] for row in share_rows(network, result)]
    write_text(FOLDER / "frozen_seeds.csv", text_of(seeds))
    write_text(FOLDER / "frozen_shares.csv", text_of(shares))
    prints = {
        f"{network}-{each.run['seed']}": each.run["fingerprint"] for network in FROZEN for each in networks[network]
    }
    made = provenance("numpy", "scipy", folder=RESULTS) | {"seed": SEED, "redraws": REDRAWS, "fingerprints": prints}
    made |= {"seconds": round(time.perf_counter() - begin, 1)}
    write_text(FOLDER / "frozen_seeds.json", json.dumps(made, indent=2) + "\n")
    print(f"{len(seeds)} rows of gains, {len(shares)} of shares: {made['seconds']} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
