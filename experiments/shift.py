"""What do contracts keep under real shift? CIFAR-100 with blur, noise and darkness at three strengths each.

    python experiments/shift.py STATE    # a minute; a folder that cifar100_pack.py unpacked

The trainings of `cifar100_all.py --recordings` record what the first seed of each network says about the changed test
images. This calibrates every contract on the unchanged calibration images for half of the FLOPs, and writes
results/shift.csv: what a policy spends of its budget, its accuracy beside that of the full network, whether the
stream's alarm was raised and after how many samples, and what the comparison of the two tables says before anything is
run. Rows of networks that STATE does not have stay.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from cifar100_data import changes
from recorded_cifar100 import RESULTS, Result, rows

from alight import HeadOutputs, calibrate, diagnose_shift
from alight.files import write_rows
from alight.policies.route import replay_on
from alight.provenance import provenance

BUDGET = "50%"
BATCH = 50  # samples of a stream at a time
SEED = 0


def rows_of(folder: Path) -> Iterator[dict[str, str]]:
    """Yield what every contract keeps on every change of one network's test images."""
    result = Result.of(folder)
    tables = {("none", 0.0): result.test}
    tables |= {(kind, strength): HeadOutputs.load(folder / f"{case}.npz") for kind, strength, case in changes()}
    order = np.random.default_rng(SEED).permutation(len(result.test))
    for contract, certified in calibrate.CONTRACTS.items():
        policy = certified(calibrate.eero, **{} if contract == "batch" else {"seed": SEED})(
            result.costs, BUDGET, result.calibration, spend_all=True
        )
        for (kind, strength), table in tables.items():
            labels = table.known_labels("a comparison")[order]
            decisions, memory = replay_on(policy, table.take(order), batch_size=BATCH)
            alarmed = getattr(memory[0] if memory else None, "alarmed_at", -1)
            shift = diagnose_shift(result.calibration, table.unlabelled())  # as new samples come
            yield {
                "network": result.run["run"],
                "contract": contract,
                "change": kind,
                "strength": f"{strength:g}",
                "spent": f"{decisions.mean_cost / (policy.budget or np.nan):.4f}",
                "accuracy": f"{decisions.accuracy(labels):.4f}",
                "full_accuracy": f"{1 - table.risks()[-1]:.4f}",
                "alarm_after": str(alarmed) if alarmed >= 0 else "",
                "p_value": f"{shift.p_value:.2g}",
                "found_before": str(shift) if shift.is_significant else "",
            }


def main(state: Path) -> None:
    path = RESULTS / "shift.csv"
    made = provenance("numpy", "scipy", folder=RESULTS.parent)
    folders = sorted({each.parent for _, _, case in changes() for each in state.glob(f"*/result/{case}.npz")})
    found = [row | made for folder in folders for row in rows_of(folder)]
    new = {row["network"] for row in found}
    write_rows(path, [row for row in rows(path) if row["network"] not in new] + found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
