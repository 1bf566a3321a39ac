"""How much of the worst class's loss is real? EERO at half of the FLOPs, class by class, against chance.

    python experiments/worst_class.py    # seconds

Writes results/worst_class.csv: for every recording of 100 classes the mean change of accuracy against the full network
in points, that of the worst class, what the worst class of shuffled labels shows on average, and how the class that is
worst on one half of the test samples does on the other half.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from recorded_cifar100 import FOLDER, NETWORKS, RESULTS, Result

from alight import calibrate, replay
from alight.files import write_rows
from alight.provenance import provenance

DRAWS = 500


def row_of(result: Result) -> dict[str, str]:
    test = result.test
    labels = test.known_labels("a comparison")
    decisions = replay(calibrate.eero(result.costs, "50%", result.calibration), test)
    change = 100 * (decisions.correct() - test.correct()[:, -1].astype(np.float64))
    rng = np.random.default_rng(0)
    shuffled = [by_class(change, rng.permutation(labels)).min() for _ in range(DRAWS)]
    again = []
    for _ in range(DRAWS):
        half = rng.uniform(size=len(labels)) < 0.5
        again.append(by_class(change[~half], labels[~half])[int(np.argmin(by_class(change[half], labels[half])))])
    return {
        "mean": f"{change.mean():.1f}",
        "worst_class": f"{by_class(change, labels).min():.1f}",
        "worst_of_shuffled_labels": f"{np.mean(shuffled):.1f}",
        "worst_on_other_half": f"{np.mean(again):.1f}",
    }


def by_class(values: npt.NDArray[np.float64], labels: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the mean of the values in every class."""
    return np.bincount(labels, values) / np.maximum(np.bincount(labels), 1)


def rows() -> Iterator[dict[str, str]]:
    made = provenance("numpy", folder=RESULTS.parent)
    for name, title in NETWORKS.items():
        yield {"network": title, **row_of(Result.of(FOLDER / name)), **made}


if __name__ == "__main__":
    write_rows(RESULTS / "worst_class.csv", list(rows()))
