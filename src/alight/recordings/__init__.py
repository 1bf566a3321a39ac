"""Recorded outputs of real networks, to try everything on without a network.

| name | network | test accuracy per exit |
|---|---|---|
| `resnet18_cifar100_frozen` | ResNet-18, trained first; linear heads on the frozen backbone | 11.7 16.6 24.3 29.8 41.8 53.6 69.4 75.1 % |
| `resnet18_cifar100_joint` | ResNet-18 with small conv heads, all losses together | 49.2 55.9 65.7 69.7 72.6 73.3 74.2 74.1 % |

Both ship with alight and have 8 exits; 5,000 held-out training images are `labelled`, the 10,000 test images of
CIFAR-100 are `test`. Costs are the FLOPs of the trunk up to each exit, heads not counted. The package
`alight-recordings` (`make recordings` builds it) brings those of the benchmark, which have the most probable classes,
too.

>>> labelled, test, costs = load("resnet18_cifar100_joint")
>>> len(labelled), len(test), len(costs)
(5000, 10000, 8)
"""  # noqa: E501

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from alight.costs import Costs
from alight.errors import BadFile, BadInput
from alight.files import PathLike, read_arrays, write_arrays
from alight.outputs import HeadOutputs, as_bad_file

FOLDER = Path(__file__).parent
NAMES = ("resnet18_cifar100_frozen", "resnet18_cifar100_joint")  # those that ship with alight
PACKAGE = "alight_recordings"


class Recording(NamedTuple):
    """What a network said about samples to calibrate on and samples to test on, and what its exits cost."""

    labelled: HeadOutputs
    test: HeadOutputs
    costs: Costs

    def save(self, path: PathLike) -> Path:
        """Write the recording as one .npz file, whole or not at all, and return its path."""
        arrays = {"stages": self.costs.stages, "heads": self.costs.heads, "unit": np.array(self.costs.unit)}
        for part, table in (("labelled", self.labelled), ("test", self.test)):
            arrays |= {f"{part}_{name}": each for name, each in {**table.rows(), **table.metadata()}.items()}
        return write_arrays(path, "Recording", arrays)

    @classmethod
    def load(cls, path: PathLike) -> "Recording":
        """Load the recording of an .npz file that `save` wrote."""
        arrays = read_arrays(path, "Recording")
        with as_bad_file(path):
            labelled, test = (
                HeadOutputs.from_arrays(
                    {name.removeprefix(part): each for name, each in arrays.items() if name.startswith(part)}
                )
                for part in ("labelled_", "test_")
            )
            costs = Costs(arrays["stages"], arrays["heads"], unit=str(arrays["unit"]))
        if not labelled.num_exits == test.num_exits == len(costs):
            counts = f"{labelled.num_exits} and {test.num_exits} exits in its tables and {len(costs)} costs"
            raise BadFile(path, f"it has {counts}", "save it again, of one network")
        return cls(labelled, test, costs)


def names() -> list[str]:
    """Return the names of all recordings at hand: those of alight, then those of alight-recordings if installed.

    >>> names()[:2]
    ['resnet18_cifar100_frozen', 'resnet18_cifar100_joint']
    """
    return [*_paths()]


def load(name: str = NAMES[0]) -> Recording:
    """Load the recording of this name.

    >>> load("resnet18_cifar100_frozen").labelled
    HeadOutputs(5000 samples, 8 exits, score 'margin', labelled)
    """
    paths = _paths()
    if name not in paths:
        raise BadInput(f"there is no recording {name!r}: choose one of {', '.join(paths)}")
    return Recording.load(paths[name])


def _paths() -> dict[str, Path]:
    found = find_spec(PACKAGE)
    further = sorted(Path(str(found.origin)).parent.glob("*.npz")) if found else []
    return {name: FOLDER / f"{name}.npz" for name in NAMES} | {path.stem: path for path in further}
