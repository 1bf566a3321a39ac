"""Which networks are exported to ONNX, by which of torch's two exporters, and how far the files are from the network.

python benchmarks/export_coverage.py        # about three minutes on one core; writes results/export_coverage.csv

Random weights, small sizes, the first exit and the last of each; files are compared with torch on batches of 1 and 3.
Batch normalisation takes its statistics from random images first: without, untrained networks give numbers so small
that every file would be near enough.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from alight import MultiExitModel, export_model, from_timm, from_torchvision, from_transformers, zoo
from alight.engine.manifest import Manifest
from alight.files import write_rows
from alight.networks.multi_exit import example_of
from alight.policies.policy import Threshold
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
IMAGES = 16  # that statistics are taken from
WIDTHS = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64}


def bert(kind: str) -> MultiExitModel:
    from transformers import AutoConfig

    widths = WIDTHS if kind != "distilbert" else {"dim": 32, "n_heads": 2, "n_layers": 2, "hidden_dim": 64}
    return from_transformers(AutoConfig.for_model(kind, vocab_size=100, **widths), num_classes=5, count=1)


NETWORKS: dict[str, Callable[[], MultiExitModel]] = {
    "zoo:resnet18_cifar": lambda: zoo.resnet18_cifar(10),
    "zoo:msdnet_cifar": lambda: zoo.msdnet_cifar(10, blocks=3, channels=4),
    "torchvision:resnet18": lambda: from_torchvision("resnet18", num_classes=10, image_size=64, count=1),
    "torchvision:mobilenet_v3_small": lambda: from_torchvision("mobilenet_v3_small", image_size=64, count=1),
    "torchvision:efficientnet_b0": lambda: from_torchvision("efficientnet_b0", image_size=64, count=1),
    "torchvision:densenet121": lambda: from_torchvision("densenet121", image_size=64, count=1),
    "timm:convnext_atto": lambda: from_timm("convnext_atto", image_size=64, count=1),
    "timm:vit_tiny_patch16_224": lambda: from_timm("vit_tiny_patch16_224", count=1, depth=4),
    "timm:swin_tiny_patch4_window7_224": lambda: from_timm(
        "swin_tiny_patch4_window7_224", count=1, depths=(1, 1, 1, 1)
    ),
    "timm:mobilevit_xxs": lambda: from_timm("mobilevit_xxs", image_size=64, count=1),
    "transformers:bert": lambda: bert("bert"),
    "transformers:roberta": lambda: bert("roberta"),
    "transformers:distilbert": lambda: bert("distilbert"),
    "transformers:mpnet": lambda: bert("mpnet"),
}


def settled(model: MultiExitModel) -> MultiExitModel:
    """The network, with statistics of its batch normalisations from random images."""
    layers = [each for each in model.eval().modules() if isinstance(each, nn.BatchNorm2d)]
    for layer in layers:
        layer.train().momentum = None  # the average of what it sees
    if layers:
        with torch.no_grad():
            model(torch.randn(IMAGES, *example_of(model).shape[1:]))
    return model.eval()


def exported(name: str) -> dict[str, str | float | int]:
    """How one network was exported."""
    torch.manual_seed(0)
    model = settled(NETWORKS[name]())
    opened = (0, model.num_exits - 1)  # large networks have many more
    rule = Threshold((0.5,), costs=(1.0, 2.0), open_exits=opened, num_exits=model.num_exits)
    begin = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = export_model(model, rule, Path(temporary) / "exported")
            manifest = Manifest.load(folder)
            lengths = "any" if any(None in each.shape[1:] for each in manifest.inputs) else "fixed"
            made, problem = manifest.made_with, ""
    except Exception as error:
        made, problem, lengths = {}, " ".join(str(error).split())[:200], ""
    return {
        "network": name,
        "ok": str(not problem),
        "stages": len(opened),
        "captured_by": made.get("captured by", ""),
        "sizes": lengths,
        "largest_difference": made.get("largest difference", ""),
        "seconds": time.perf_counter() - begin,
        "problem": problem,
    }


def main() -> None:
    torch.set_num_threads(1)
    made = provenance("torch", "torchvision", "timm", "transformers", "onnx", "onnxscript", "onnxruntime", folder=ROOT)
    rows = []
    for name in NETWORKS:
        rows.append({**exported(name), **made})
        print(", ".join(f"{key} {value}" for key, value in [*rows[-1].items()][:8]), flush=True)
        write_rows(ROOT / "results/export_coverage.csv", rows)


if __name__ == "__main__":
    main()
