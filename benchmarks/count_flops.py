"""Count what heads cost, and compare the counts of full networks with fvcore's: results/head_overhead.csv.

About half a minute; `pip install fvcore` first. ResNet-18 (32 x 32) with flatten-linear heads after its first seven
blocks needs 4.3 % more, ConvNeXt-T (224 x 224) with pooled linear heads after its first seventeen 0.13 %.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import timm
import torch
from timm.models.convnext import ConvNeXtBlock
from torch import nn

from alight.costing.measure import head_overhead, measure_costs
from alight.costs import Costs
from alight.files import write_rows
from alight.networks.attach import attach_heads
from alight.networks.heads import make_head
from alight.networks.multi_exit import MultiExitModel, structure
from alight.networks.zoo import ResNet, resnet18_cifar
from alight.provenance import provenance

RESULTS = Path(__file__).parent.parent / "results" / "head_overhead.csv"
HEADS = ("pooled_linear", "flatten_linear")


class Network(NamedTuple):
    """A network with and without exits, and what the paper says that its heads cost."""

    backbone: Callable[[], nn.Module]
    with_exits: Callable[..., MultiExitModel]
    image_size: int
    classes: int
    paper_percent: float


def convnext_with_exits(classes: int, *, backbone: nn.Module, head: str) -> MultiExitModel:
    """Return a ConvNeXt of timm with an exit after every block."""
    blocks = [name for name, part in backbone.named_modules() if isinstance(part, ConvNeXtBlock)]
    return attach_heads(backbone, blocks[:-1], example=torch.zeros(2, 3, 224, 224), num_classes=classes, head=head)


NETWORKS = {
    "ResNet-18": Network(lambda: ResNet(100), resnet18_cifar, 32, 100, 4.0),
    "ConvNeXt-T": Network(partial(timm.create_model, "convnext_tiny"), convnext_with_exits, 224, 1000, 2.5),
}


def main() -> None:
    write_rows(RESULTS, [row for name in NETWORKS for row in _rows(name)])


def _rows(name: str) -> Iterator[dict[str, str | int]]:
    network = NETWORKS[name]
    backbone = network.backbone().eval()
    theirs = _fvcore(backbone, torch.zeros(1, 3, network.image_size, network.image_size))
    for kind, costs in costs_by_head(network, backbone).items():
        row: dict[str, str | int] = {
            "network": name,
            "image": network.image_size,
            "classes": network.classes,
            "head": kind,
            "heads": len(costs) - 1,
            "full_mflops": f"{costs.full / 1e6:.2f}",
            "fvcore_mmacs": f"{theirs / 1e6:.2f}",
            "over_twice_fvcore": f"{costs.full / theirs / 2:.4f}",
            "heads_mflops": f"{costs.heads[:-1].sum() / 1e6:.2f}",
            "all_heads_percent": f"{100 * head_overhead(costs):.3f}",
            "most_expensive_head_percent": f"{100 * costs.heads[:-1].max() / costs.full:.3f}",
            "paper_percent": f"{network.paper_percent}",
            **provenance("torch", "fvcore", folder=RESULTS.parent),
        }
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        yield row


def costs_by_head(network: Network, backbone: nn.Module) -> dict[str, Costs]:
    """Count the costs of a network with heads of every kind."""
    model = network.with_exits(network.classes, backbone=backbone, head="pooled_linear")
    image = torch.zeros(1, 3, network.image_size, network.image_size)
    return {kind: measure_costs(_with_heads(model, kind, network.classes), image) for kind in HEADS}


def _with_heads(model: MultiExitModel, kind: str, classes: int) -> MultiExitModel:
    """Return the same stages with heads of this kind, whose weights need no memory: some have two billion."""
    shapes = [head["shape"] for head in structure(model)["heads"][:-1]]
    with torch.device("meta"):
        heads = [make_head(kind, shape, classes) for shape in shapes]
    return MultiExitModel([*model.stages], [*heads, nn.Identity()], model.exits)


def _fvcore(network: nn.Module, image: torch.Tensor) -> float:
    """Return the multiply-adds that fvcore counts."""
    from fvcore.nn import FlopCountAnalysis

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(FlopCountAnalysis(network, image).unsupported_ops_warnings(False).total())


if __name__ == "__main__":
    main()
