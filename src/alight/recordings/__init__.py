"""Recorded outputs of real networks that ship with alight, to try everything on without a network.

| name | network | test accuracy per exit |
|---|---|---|
| `resnet18_cifar100_frozen` | ResNet-18, trained first; linear heads on the frozen backbone | 11.7 16.6 24.3 29.8 41.8 53.6 69.4 75.1 % |
| `resnet18_cifar100_joint` | ResNet-18 with small conv heads, all losses together | 49.2 55.9 65.7 69.7 72.6 73.3 74.2 74.1 % |

Both have 8 exits; 5,000 held-out training images are `labelled`, the 10,000 test images of CIFAR-100 are `test`.
Costs are the FLOPs of the trunk up to each exit, heads not counted.

>>> labelled, test, costs = load("resnet18_cifar100_joint")
>>> len(labelled), len(test), len(costs)
(5000, 10000, 8)
"""  # noqa: E501

from pathlib import Path
from typing import NamedTuple

from alight.costs import Costs
from alight.errors import BadInput
from alight.outputs import HeadOutputs

FOLDER = Path(__file__).parent
NAMES = ("resnet18_cifar100_frozen", "resnet18_cifar100_joint")


class Recording(NamedTuple):
    """What a network said about images to calibrate on and images to test on, and what its exits cost."""

    labelled: HeadOutputs
    test: HeadOutputs
    costs: Costs


def load(name: str = NAMES[0]) -> Recording:
    """The recording of this name.

    >>> load("resnet18_cifar100_frozen").labelled
    HeadOutputs(5000 samples, 8 exits, score 'margin', labelled)
    """
    if name not in NAMES:
        raise BadInput(f"there is no recording {name!r}: choose one of {', '.join(NAMES)}")
    return Recording(
        labelled=HeadOutputs.load(FOLDER / f"{name}_labelled.npz"),
        test=HeadOutputs.load(FOLDER / f"{name}_test.npz"),
        costs=Costs.load(FOLDER / f"{name}_costs.json"),
    )
