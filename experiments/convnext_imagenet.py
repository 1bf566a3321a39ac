"""Train 20 heads on a frozen, pretrained ConvNeXt for ImageNet with the paper's settings, then test every policy.

    python experiments/convnext_imagenet.py IMAGENET OUT                              # the paper's, on a GPU
    python experiments/convnext_imagenet.py FOLDER OUT --weights random --limit 64    # a rehearsal

IMAGENET holds train/CLASS/*.JPEG and val/CLASS/*.JPEG. Heads are an average over the map and a linear layer, after
every block but the last and after every halving of the map (the paper says 19 positions, its table of weights has 21
exits; --positions blocks leaves the halvings out: 17 heads). They are trained for 300 epochs by SGD with momentum 0.9
and weight decay 1e-4 on the whole training set. 5,000 validation images, drawn by the seed, calibrate; the other
45,000 test.

Writes to OUT: heads.safetensors, calibration.npz, test.npz, costs.json, points.csv, report.html and run.json; a
training that was stopped resumes from OUT/checkpoint.safetensors. Its cost was not measured, since ImageNet was not at
hand: an epoch is a pass of the full network over 1.28 million images, with gradients for the heads alone.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.models.convnext import CNBlock

from alight import (
    MultiExitModel,
    Normalisation,
    RunSettings,
    TrainingSettings,
    attach_heads,
    calibrate,
    measure_costs,
    record,
    sweep,
    train_heads,
    write_points,
    write_report,
)
from alight.files import write_text
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
NORMALISATION = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    name: getattr(torchvision.models, name)
    for name in ("convnext_tiny", "convnext_small", "convnext_base", "convnext_large")
}
PAPER = TrainingSettings(
    mode="frozen",
    epochs=300,
    optimizer="sgd",
    momentum=0.9,
    weight_decay=1e-4,
    learning_rate=0.1,  # for a batch of 256; the paper names none
    schedule="cosine",
)
CALIBRATION = 5000
SCORES = ("max_probability", "negative_entropy")  # beside the margin
BUDGETS = [f"{percent}%" for percent in range(10, 101, 5)]


def places(network: nn.Module, positions: str = "all") -> list[str]:
    """Return where heads are: after every block but the last and, unless `positions` is "blocks", every halving."""
    blocks = [name for name, part in network.named_modules() if isinstance(part, CNBlock)]
    halvings = [f"features.{index}" for index in range(2, len(network.features), 2)]  # type: ignore[arg-type]
    named = [name for name, _ in network.named_modules()]
    chosen = blocks[:-1] + ([] if positions == "blocks" else halvings)
    return sorted(chosen, key=lambda name: _order(name, named))


def _order(name: str, named: Sequence[str]) -> tuple[int, ...]:
    """Return the indices in a module's name, by which modules are sorted."""
    if name not in named:
        raise SystemExit(f"the network has no module {name!r}: give one of {', '.join(NETWORKS)}")
    return tuple(int(part) for part in name.split(".")[1:])


def build(name: str, weights: str, num_classes: int, size: int, positions: str) -> MultiExitModel:
    """Return the network with untrained heads; weights are "pretrained", "random" or a safetensors file."""
    if weights == "pretrained":
        backbone = NETWORKS[name](weights="IMAGENET1K_V1")
    else:
        backbone = NETWORKS[name](num_classes=num_classes)
    if weights not in ("pretrained", "random"):
        backbone.load_state_dict(load_file(weights))
    return attach_heads(
        backbone.eval(),
        places(backbone, positions),
        example=torch.zeros(2, 3, size, size),
        num_classes=num_classes,
        head="pooled_linear",
        normalisation=NORMALISATION,
    )


def folders(root: Path, size: int) -> tuple[ImageFolder, ImageFolder]:
    """Return training and validation images, preprocessed like those of torchvision's weights."""
    normalise = [transforms.ToTensor(), transforms.Normalize(NORMALISATION.mean, NORMALISATION.std)]
    training = transforms.Compose([transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), *normalise])
    evaluation = transforms.Compose(
        [transforms.Resize(round(size * 236 / 224)), transforms.CenterCrop(size), *normalise]
    )
    train, val = ImageFolder(str(root / "train"), training), ImageFolder(str(root / "val"), evaluation)
    if train.classes != val.classes:
        raise SystemExit(f"{root}/train has {len(train.classes)} classes, val {len(val.classes)}: give them the same")
    return train, val


def split(val: Dataset[Any], calibration: int, seed: int) -> tuple[Subset[Any], Subset[Any]]:
    """Return the images to calibrate on and those to test on."""
    count = len(val)  # type: ignore[arg-type]
    if not 0 < calibration < count:
        raise SystemExit(f"{calibration} of {count} validation images to calibrate on leave none: choose fewer")
    order = np.random.default_rng(seed).permutation(count).tolist()
    return Subset(val, order[:calibration]), Subset(val, order[calibration:])


def run(options: argparse.Namespace) -> None:
    """Train, record, calibrate, test."""
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    train, val = folders(options.imagenet, options.size)
    calibration, test = split(val, options.calibration, options.seed)
    parts: dict[str, Dataset[Any]] = {"train": train, "calibration": calibration, "test": test}
    if options.limit:
        chosen = np.random.default_rng(options.seed).permutation(len(train))[: options.limit]
        parts["train"] = Subset(train, chosen.tolist())
    given: dict[str, Any] = {"batch_size": options.batch_size, "num_workers": options.workers, "pin_memory": False}
    loaders = {name: DataLoader(part, shuffle=name == "train", **given) for name, part in parts.items()}
    model = build(options.network, options.weights, len(train.classes), options.size, options.positions)
    on_gpu = torch.device(options.device).type == "cuda"
    settings = replace(
        PAPER, epochs=options.epochs, seed=options.seed, amp="bf16" if on_gpu else None, channels_last=on_gpu
    )
    checkpoint = out / "checkpoint.safetensors"
    history = train_heads(model, loaders["train"], settings, checkpoint=checkpoint, device=options.device)
    save_file(
        {name: tensor.contiguous() for name, tensor in model.heads.state_dict().items()}, out / "heads.safetensors"
    )
    here = RunSettings(options.device)
    tables = {name: record(model, loaders[name], features=SCORES, settings=here) for name in ("calibration", "test")}
    for name, table in tables.items():
        table.save(out / f"{name}.npz")
    costs = measure_costs(model.cpu(), torch.zeros(1, 3, options.size, options.size))
    costs.save(out / "costs.json")
    affordable = [budget for budget in BUDGETS if costs.budget(budget) >= costs.cumulative()[0]]
    methods = {name: calibrate.METHODS[name] for name in options.methods}
    points = sweep(methods, costs, affordable, labelled=tables["calibration"], test=tables["test"])
    write_points(points, out / "points.csv")
    write_report(points, out / "report.html", title=f"{options.network} on ImageNet")
    about: dict[str, Any] = {name: str(value) for name, value in vars(options).items()}
    about |= provenance("torch", "torchvision", folder=ROOT) | {"training": asdict(settings)}
    about |= {"test_accuracy": " ".join(f"{1 - risk:.4f}" for risk in tables["test"].risks()), "history": str(history)}
    write_text(out / "run.json", json.dumps(about, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("imagenet", type=Path, help="folder with train and val")
    parser.add_argument("out", type=Path, help="folder for results")
    parser.add_argument("--network", choices=NETWORKS, default="convnext_tiny")
    parser.add_argument("--weights", default="pretrained", help="pretrained, random, or a safetensors file")
    parser.add_argument("--positions", choices=("all", "blocks"), default="all")
    parser.add_argument("--epochs", type=int, default=PAPER.epochs)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--calibration", type=int, default=CALIBRATION)
    parser.add_argument("--size", type=int, default=224, help="of the images")
    parser.add_argument("--methods", nargs="+", choices=calibrate.METHODS, default=list(calibrate.METHODS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int, help="training images, for a rehearsal")
    run(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
