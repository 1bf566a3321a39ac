"""Write what the repository keeps of the trainings on CIFAR-100: recordings of some networks, all others as CSV.

    python experiments/cifar100_ship.py STATE                   # a folder that cifar100_pack.py unpacked; seconds
    python experiments/cifar100_ship.py STATE --recordings      # of `cifar100_all.py --recordings`

Writes for each network of NETWORKS that was trained a folder results/recordings/NAME (calibration.npz and test.npz,
scores in single precision, costs.json, run.json, and policy_50.json, what `eero` fits for half of the FLOPs),
results/cifar100_runs.csv (accuracy and cost of every exit of every training, with its seconds, hardware and commit) and
results/cifar100_modes.csv (accuracy and cost of policies on the exits of every training). Rows of trainings that STATE
does not have stay. To replace a training by a better one, run this again, then `make figures`.

With --recordings, writes for each network and seed of BENCHMARKED a folder results/recordings/NAME_SEED, and its row of
results/benchmark_recordings.csv. These are shorter trainings, so they have no rows in the other tables.

Weights are not kept: heads are worth nothing without their backbone, and the smallest network is 6.3 MB.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from recorded_cifar100 import BENCHMARKED, FOLDER, MODES, NETWORKS, RESULTS, RUNS, Result, budgets, rows

from alight import HeadOutputs, calibrate, replay, sweep
from alight.files import write_arrays, write_rows, write_text

FURTHER = {"resnet18_frozen": ("max_probability", "negative_entropy")}  # scores beside the margin
METHODS = ("eero", "eero_marginal", "geometric", "gaussian", "patience", "best_single_exit")


def ship(state: Path) -> None:
    results = [Result.of(folder / "result") for folder in sorted(state.iterdir()) if (folder / "result").is_dir()]
    write_beside(RUNS, [row for result in results for row in run_rows(result)])
    write_beside(MODES, [row for result in results if len(result.costs) > 1 for row in mode_rows(result)])
    for name in NETWORKS:
        keep_trained(state / f"{name}-0", FOLDER / name, FURTHER.get(name, ()))


def ship_recordings(state: Path) -> None:
    """Write the recordings of the benchmark, and a row for each."""
    for name, seeds in BENCHMARKED.items():
        for seed in range(seeds):
            keep_trained(state / f"{name}-{seed}", FOLDER / f"{name}_{seed}", ())
    kept = [path for path in sorted(FOLDER.glob("*_[0-9]")) if path.is_dir()]
    write_rows(RESULTS / "benchmark_recordings.csv", [recording_row(path.name, Result.of(path)) for path in kept])


def keep_trained(source: Path, target: Path, further: Sequence[str]) -> None:
    """Write the recording of a training if there is one."""
    if (source / "result").is_dir():
        keep(source / "result", target, further)
    else:
        print(f"{source.name} is not trained: a recording {target.name} stays as it was")


def recording_row(name: str, result: Result) -> dict[str, str | float | int]:
    """Return what the benchmark's page says about a recording."""
    run = result.run
    return {
        "recording": name,
        "exits": len(run["exits"]),
        "epochs": run["settings"]["training"]["epochs"],
        "first_accuracy": run["test_accuracy"][0],
        "best_accuracy": max(run["test_accuracy"]),
        "last_accuracy": run["test_accuracy"][-1],
        **{name: run[name] for name in ("seconds", "hardware", "versions", "date", "commit", "fingerprint")},
    }


def keep(source: Path, target: Path, further: Sequence[str]) -> None:
    """Write the recording of a training, and print how many decisions rounding its scores changes."""
    result = Result.of(source)
    target.mkdir(parents=True, exist_ok=True)
    for name, table in {"calibration": result.calibration, "test": result.test}.items():
        write_arrays(target / f"{name}.npz", "HeadOutputs", narrow(table, further))
    result.costs.save(target / "costs.json")
    result.run["settings"].pop("epochs", None)  # as planned; `training` has what was done
    write_text(target / "run.json", json.dumps(result.run, indent=2) + "\n")
    kept = Result.of(target)
    policy = calibrate.eero(kept.costs, "50%", kept.calibration)
    policy.save(target / "policy_50.json")
    changed, of = _changed(result, kept)
    size = sum(path.stat().st_size for path in target.iterdir())
    print(f"{target.name}: {size / 1e6:.2f} MB, {changed} of {of} decisions differ from those on unrounded scores")


def narrow(table: HeadOutputs, further: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the arrays of a table's file: scores in single precision, classes (at most 256) in bytes."""
    top = {} if table.top_classes is None else {"top_classes": table.top_classes.astype(np.uint8)}
    return {
        "scores": table.scores.astype(np.float32),
        "predictions": table.predictions.astype(np.uint8),
        "labels": table.known_labels("a recording").astype(np.uint8),
        **{f"feature_{name}": table.features[name].astype(np.float32) for name in further},
        **{name: each for name, each in table.rows().items() if name == "top_log_probabilities"},
        **top,
        **table.metadata(),
    }


def _changed(whole: Result, kept: Result) -> tuple[int, int]:
    """Count the decisions of `eero` and `global_threshold` at all budgets, and how many differ after rounding."""
    changed = of = 0
    for method in (calibrate.eero, calibrate.global_threshold):
        for budget in budgets(whole.costs):
            exits = [replay(method(each.costs, budget, each.calibration), each.test).exits for each in (whole, kept)]
            changed, of = changed + int((exits[0] != exits[1]).sum()), of + len(exits[0])
    return changed, of


def run_rows(result: Result) -> Iterator[dict[str, object]]:
    """Yield one row per exit of a training."""
    run, alone = result.run, result.costs.alone
    for index, name in enumerate(run["exits"]):
        yield {
            "run": run["run"],
            "seed": run["seed"],
            "calibration_images": run["calibration"],
            "epochs": run["settings"]["training"]["epochs"],
            "exit": name,
            "flops_alone": round(alone[index]),
            "share_alone": f"{alone[index] / result.costs.full:.5f}",
            "test_accuracy": run["test_accuracy"][index],
            "calibration_accuracy": run["calibration_accuracy"][index],
            **{name: run[name] for name in ("seconds", "hardware", "versions", "date", "commit", "fingerprint")},
        }


def mode_rows(result: Result) -> Iterator[dict[str, object]]:
    """Yield one row per method and budget of a training with exits."""
    costs = result.costs
    methods = {name: calibrate.METHODS[name] for name in METHODS}
    points = sweep(methods, costs, budgets(costs), labelled=result.calibration, test=result.test, references=False)
    for point in points:
        yield {
            "run": result.run["run"],
            "seed": result.run["seed"],
            "calibration_images": result.run["calibration"],
            "method": point.method,
            "allowed": f"{point.budget / costs.full:.4f}",
            "spent": f"{point.mean_cost / costs.full:.6f}",
            "accuracy": f"{point.accuracy:.6f}",
            "low": f"{point.accuracy_low:.6f}",
            "high": f"{point.accuracy_high:.6f}",
        }


def write_beside(path: Path, found: list[dict[str, Any]]) -> None:
    """Write the rows of these trainings, beside those of others that the file has."""
    texts = [{name: str(cell) for name, cell in row.items()} for row in found]  # all digits of fractions
    made = {_training(row) for row in texts}
    kept = [row for row in rows(path) if _training(row) not in made] if path.exists() else []
    write_rows(path, kept + texts)
    print(f"{path.name}: {len(texts)} rows, beside {len(kept)} of other trainings")


def _training(row: dict[str, str]) -> tuple[str, ...]:
    return row["run"], row["seed"], row["calibration_images"]


if __name__ == "__main__":
    (ship_recordings if "--recordings" in sys.argv[2:] else ship)(Path(sys.argv[1]))
