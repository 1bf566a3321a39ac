"""What heads cost, and whether our counts equal those of fvcore: results/head_overhead.csv.

About half a minute; `pip install fvcore` first. ResNet-18 (32 x 32) with flatten-linear heads after its first seven
blocks needs 4.3 % more, ConvNeXt-T (224 x 224) with pooled linear heads after its first seventeen 0.13 %.
"""

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from fvcore.nn import FlopCountAnalysis
from torch import nn

from alight.costing.measure import head_overhead, measure_costs
from alight.files import write_rows
from alight.networks.heads import make_head
from alight.networks.multi_exit import MultiExitModel, head_settings
from alight.networks.zoo import convnext_tiny, resnet18_cifar
from alight.networks.zoo.convnext import ConvNeXt
from alight.networks.zoo.resnet import ResNet
from alight.provenance import provenance

RESULTS = Path(__file__).parent.parent / "results" / "head_overhead.csv"
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[..., MultiExitModel], int, int, float]] = {
    "ResNet-18": (lambda: ResNet(100), resnet18_cifar, 32, 100, 4.0),
    "ConvNeXt-T": (lambda: ConvNeXt((3, 3, 9, 3), (96, 192, 384, 768), 1000), convnext_tiny, 224, 1000, 2.5),
}  # name: the full network, the one with exits, image size, classes, and the percentage in the paper


def main() -> None:
    rows = [row for name in NETWORKS for row in _rows(name)]
    write_rows(RESULTS, rows)


def _rows(name: str) -> list[dict[str, str | float | int]]:
    full, with_exits, size, classes, claimed = NETWORKS[name]
    backbone, image = full().eval(), torch.zeros(1, 3, size, size)
    model = with_exits(classes, backbone=backbone, head="pooled_linear")
    theirs = _fvcore(backbone, image)
    rows: list[dict[str, str | float | int]] = []
    for kind in ("pooled_linear", "flatten_linear"):
        costs = measure_costs(_with_heads(model, kind, classes), image)
        rows.append(
            {
                "network": name,
                "image": size,
                "classes": classes,
                "head": kind,
                "heads": model.num_exits - 1,
                "full_mflops": f"{costs.full / 1e6:.2f}",
                "fvcore_mmacs": f"{theirs / 1e6:.2f}",
                "over_twice_fvcore": f"{costs.full / theirs / 2:.4f}",
                "heads_mflops": f"{costs.heads[:-1].sum() / 1e6:.2f}",
                "all_heads_percent": f"{100 * head_overhead(costs):.3f}",
                "most_expensive_head_percent": f"{100 * costs.heads[:-1].max() / costs.full:.3f}",
                "paper_percent": f"{claimed}",
                **provenance("torch", "fvcore", folder=RESULTS.parent),
            }
        )
        print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    return rows


def _with_heads(model: MultiExitModel, kind: str, classes: int) -> MultiExitModel:
    """Return the same stages with heads of this kind, whose weights take no memory: some have two billion."""
    shapes = [head_settings(head)["shape"] for head in model.heads[:-1]]
    with torch.device("meta"):
        heads = [make_head(kind, shape, classes) for shape in shapes]
    return MultiExitModel([*model.stages], [*heads, nn.Identity()], model.exits)


def _fvcore(network: nn.Module, image: torch.Tensor) -> float:
    """Return multiply-adds as fvcore counts them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(FlopCountAnalysis(network, image).unsupported_ops_warnings(False).total())


if __name__ == "__main__":
    main()
