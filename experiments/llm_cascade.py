"""Recorded answers of five Llama models to MMLU questions: what a certified cascade saves; minutes on one core.

    python experiments/llm_cascade.py ../shared/data/llm/mmlu_llama.csv

The log has a row per question and model: question, model, confidence, correct, cost_usd. Every split calibrates on one
half and tests on the other, for budgets of 15, 30 and 50 % of the dollars of the largest model alone. Beside the
certified policies of alight stand the same without a certificate, a threshold search as in FrugalGPT (Chen et al. 2023)
and the models alone. Writes results/llm_cascade.csv: one row per method and budget, aggregates alone.
"""

import argparse
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

from alight import Costs, HeadOutputs, Policy, calibrate, read_log, replay
from alight.calibrate import certified_mean, certified_probability
from alight.errors import BadInput
from alight.files import write_rows
from alight.policies.policy import ExitAt, Threshold
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
Floats = npt.NDArray[np.float64]
Row = dict[str, str | float | int]
BUDGETS = (0.15, 0.3, 0.5)
SPLITS, DELTA = 200, 0.05
LONGEST, GRID = 3, 20  # members of a searched cascade, and thresholds that are tried for each: quantiles of its score


def threshold_search(costs: Costs, budget: float, labelled: HeadOutputs) -> Policy:
    """Return the most accurate cascade on these requests whose mean cost on them is within the budget.

    As in FrugalGPT: every choice of up to three members, cheapest first, and a grid of thresholds for each of them.
    """
    assert labelled.costs is not None
    quality, best, chosen = labelled.correct(), -1.0, None
    grids = [np.append(np.quantile(scores, np.linspace(0, 1, GRID)), np.inf) for scores in labelled.scores.T]
    for size in range(1, LONGEST + 1):
        for members in combinations(range(len(costs)), size):
            paid = np.cumsum(labelled.costs[:, list(members)], axis=1)
            for thresholds in product(*(grids[index] for index in members[:-1])):
                position = np.full(len(labelled), size - 1)
                for place in reversed(range(size - 1)):
                    position[labelled.scores[:, members[place]] >= thresholds[place]] = place
                rows = np.arange(len(labelled))
                if paid[rows, position].mean() > budget:
                    continue
                accuracy = quality[rows, np.array(members)[position]].mean()
                if accuracy > best:
                    best, chosen = accuracy, (members, thresholds)
    assert chosen is not None
    members, thresholds = chosen
    terms: dict[str, Any] = {"costs": tuple(costs.cumulative(members)), "open_exits": members, "num_exits": len(costs)}
    return Threshold(thresholds=thresholds, budget=budget, score=labelled.score, **terms)


def alone(costs: Costs, labelled: HeadOutputs, member: int) -> Policy:
    terms: dict[str, Any] = {"open_exits": (member,), "num_exits": len(costs), "score": labelled.score}
    return ExitAt(costs=(float(costs.cumulative([member])[0]),), **terms)


def methods(caps: Floats, seed: int) -> dict[str, Callable[[Costs, float, HeadOutputs], Policy]]:
    certified: dict[str, Any] = {"max_costs": caps, "seed": seed}
    return {
        "alight, 95 % confidence": certified_probability(calibrate.search, delta=DELTA, **certified),
        "alight, on average": certified_mean(calibrate.search, **certified),
        "alight, not certified": calibrate.search,
        "threshold search": threshold_search,
    }


def measured(log: HeadOutputs, costs: Costs, splits: int) -> list[Row]:
    """Return a row for every method and budget: accuracy, spend and how often the budget was exceeded."""
    assert log.costs is not None
    caps = log.costs.max(axis=0)  # of all questions that there are: prompts are no longer than the longest
    full = alone(costs, log, len(costs) - 1)
    found: dict[tuple[str, float], list[tuple[float, float, float, float]]] = {}
    for seed in range(splits):
        calibration, test = log.split(0.5, np.random.default_rng(seed))
        largest = replay(full, test)
        for share in BUDGETS:
            for name, method in methods(caps, seed).items():
                try:
                    policy = method(costs, share * costs.full, calibration)
                except BadInput:  # no policy can be certified: counted, and neither accurate nor expensive
                    found.setdefault((name, share), []).append((np.nan, np.nan, 0.0, 0.0))
                    continue
                on_test, on_all = replay(policy, test), replay(policy, log)
                over = [float(each.mean_cost > share * costs.full) for each in (on_test, on_all)]
                spend = on_test.mean_cost / largest.mean_cost
                found.setdefault((name, share), []).append((on_test.accuracy(), spend, over[0], over[1]))
        for member, name in enumerate(log.exits):
            decisions = replay(alone(costs, log, member), test)
            figures = (decisions.accuracy(), decisions.mean_cost / largest.mean_cost, 0.0, 0.0)
            found.setdefault((f"{name} alone", 0.0), []).append(figures)
    return [_row(name, share, np.array(figures), costs) for (name, share), figures in found.items()]


def _row(name: str, share: float, figures: Floats, costs: Costs) -> Row:
    accuracy, spend, on_test, on_all = np.nanmean(figures, axis=0).tolist()
    refused = int(np.isnan(figures[:, 0]).sum())
    row: Row = {"method": name, "budget": f"{share:.0%}" if share else "-", "splits": len(figures)}
    row |= {"accuracy": accuracy, "accuracy_deviation": float(np.nanstd(figures[:, 0])), "spend": spend}
    row |= {"refused": refused}
    row |= {"usd_per_1000": f"{1000 * spend * costs.full:.3f}"}
    if not share:
        return row | {"over_on_test": "-", "over_on_all": "-", "holds": "-"}
    over: Row = {"over_on_test": f"{on_test:.1%}", "over_on_all": f"{on_all:.1%}", "holds": "-"}
    if "confidence" in name:  # the log is what requests are drawn from, so its mean cost is the true one
        over["holds"] = str(bool(figures[:, 3].sum() <= binom.ppf(0.999, len(figures), DELTA)))
    return row | over


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("log", help="CSV with question, model, confidence, correct and cost_usd")
    parser.add_argument("--splits", type=int, default=SPLITS)
    options = parser.parse_args()
    log, costs = read_log(options.log)
    rows = measured(log, costs, options.splits)
    for row in rows:
        print(*row.values(), sep=" | ")
    if options.splits == SPLITS:
        about = provenance("numpy", "scipy", folder=ROOT)
        write_rows(ROOT / "results" / "llm_cascade.csv", [{**row, **about} for row in rows])


if __name__ == "__main__":
    main()
