"""How many labels does `auto` need to choose a better method than `eero`? Calibrations with few samples of recordings.

    pip install ./packages/recordings
    python experiments/few_labels.py                    # ten minutes on one core

So many samples of a recording calibrate a policy with contract "probability", as `alight.fit` does; its accuracy is
that on the test samples. Writes results/few_labels.csv: one row per recording and number of samples, means over budgets
and draws, and the difference of the two methods on the same draws with its standard error.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from alight import calibrate, recordings, replay
from alight.files import write_rows
from alight.provenance import provenance
from alight.recordings import Recording

ROOT = Path(__file__).parent.parent
NETWORKS = ("convnext_frozen_0", "minilm_banking77", "minilm_clinc150", "msdnet_joint_0", "resnet18_mixed_distilled_0")
SAMPLES, BUDGETS, DRAWS = (300, 600, 1000, 2000), ("35%", "50%", "70%"), 10
METHODS = ("eero", "auto")
Row = dict[str, str | float | int]


def rows() -> Iterator[Row]:
    """Yield both methods, recording by recording."""
    for samples in SAMPLES:
        for name in (*recordings.NAMES, *NETWORKS):
            recording = recordings.load(name)
            if len(recording.labelled) < samples:
                continue
            found = np.array([[drawn(recording, method, samples, draw) for method in METHODS] for draw in range(DRAWS)])
            differences = found[:, 1, 0] - found[:, 0, 0]
            (eero, eero_spent), (auto, auto_spent) = found.mean(axis=0)
            yield {
                "recording": name,
                "samples": samples,
                "draws": DRAWS,
                "eero": float(eero),
                "auto": float(auto),
                "difference": float(differences.mean()),
                "standard_error": float(differences.std(ddof=1) / np.sqrt(DRAWS)),
                "eero_spent": float(eero_spent),
                "auto_spent": float(auto_spent),
            }


def drawn(recording: Recording, method: str, samples: int, seed: int) -> tuple[float, float]:
    """Return accuracy on the test samples and what is spent, as a share of the full network: means over budgets."""
    labelled, test, costs = recording
    few = labelled.take(np.random.default_rng(seed).permutation(len(labelled))[:samples])
    fit = calibrate.certified_probability(calibrate.METHODS[method], seed=seed)
    decisions = [replay(fit(costs, budget, few), test) for budget in BUDGETS]
    accuracy = np.mean([each.accuracy(test.truth()) for each in decisions])
    return float(accuracy), float(np.mean([each.mean_cost for each in decisions]) / costs.full)


if __name__ == "__main__":
    made = provenance("numpy", "scipy")
    found = []
    for row in rows():
        print(row, flush=True)
        found.append({**row, **made})
        write_rows(ROOT / "results" / "few_labels.csv", found)
