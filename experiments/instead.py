"""What a user would pick instead: the full network, compiled, a smaller one, or `earlyon`, beside alight; one machine.

    pip install earlyon
    python experiments/instead.py STATE DATA         # 12 minutes on two cores, a third of it compiling

STATE holds results of cifar100_train.py, DATA is CIFAR-100 (see cifar100_data.py). The early exits are those of the
ResNet-18 that was trained with them (mixed, distilled), for alight and for earlyon alike: the same weights, the same
heads, thresholds calibrated by each on the same 1,000 images for half of the FLOPs. Single images are interleaved
between all contenders, batches of 64 too. Writes results/instead.csv: accuracy on 2,000 test images, latency of single
images (median and 99th percentile), and throughput in batches, the median of the rounds with the lowest and the
highest.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cifar100_data import Batches, read
from cifar100_train import CLASSES, Job, load_result
from earlyon.core.thresholds import calibrate_thresholds_for_budget
from earlyon.core.types import EarlyExitConfig, ExitPoint
from earlyon.core.wrappers import EarlyExitWrapper
from torch import Tensor, nn

from alight import Costs, MultiExitModel, Predictor, RunSettings, calibrate, measure_costs, plan, record
from alight.files import write_rows
from alight.networks.zoo import CIFAR, RESNET_EXITS, ResNet, resnet18_cifar
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
EXITS = Job("resnet18_mixed_distilled")
IMAGES, LATENCIES, BATCHED = 2000, 1000, 1024  # for accuracy, for single images, for batches
BATCH = 64
COMPILED = RunSettings(compile=True)
ROUNDS = 3
WARM = 20
Row = dict[str, str | float | int]


@dataclass
class Contender:
    """Something that labels images: one alone, or a batch."""

    name: str
    weights: str
    one: Callable[[Tensor], int]
    many: Callable[[Tensor], np.ndarray]


def plain(name: str, weights: str, network: nn.Module) -> Contender:
    """Return a network without exits."""

    @torch.inference_mode()
    def many(images: Tensor) -> np.ndarray:
        answers: np.ndarray = torch.cat([network(part).argmax(-1) for part in torch.split(images, BATCH)]).numpy()
        return answers

    @torch.inference_mode()
    def one(image: Tensor) -> int:
        return int(network(image).argmax(-1))

    return Contender(name, weights, one, many)


def ours(name: str, predictor: Predictor) -> Contender:
    """Return exits by alight."""
    return Contender(
        name,
        EXITS.run,
        lambda image: int(predictor(image).predictions[0]),
        lambda images: predictor(images).predictions,
    )


def earlyon(network: nn.Module, model: MultiExitModel, calibration: Any) -> Contender:
    """Return exits by earlyon on the same backbone and heads; it lets a batch leave only as a whole."""
    names = [name.replace(".", "_") for name in RESNET_EXITS]
    channels = [64, 64, 128, 128, 256, 256, 512]
    points = [ExitPoint(name, layer, width) for name, layer, width in zip(names, RESNET_EXITS, channels, strict=True)]
    config = EarlyExitConfig(backbone="custom", num_classes=CLASSES, exit_points=points)
    heads = dict(zip(names, model.heads, strict=False))
    wrapper = EarlyExitWrapper(network, heads, lambda logits: logits, config, input_shape=(1, 3, 32, 32)).eval()
    found = calibrate_thresholds_for_budget(wrapper, calibration, target_computation=0.5)
    print(f"earlyon's thresholds {found.thresholds}: {found.avg_computation_used:.3f} of the FLOPs by its count")

    def many(images: Tensor) -> np.ndarray:
        parts = [wrapper.forward_inference_batched(part).predictions.argmax(-1) for part in torch.split(images, BATCH)]
        answers: np.ndarray = torch.cat(parts).numpy()
        return answers

    def one(image: Tensor) -> int:
        return int(wrapper(image).prediction.argmax(-1))

    return Contender("earlyon, half of the FLOPs", EXITS.run, one, many)


def contenders(state: Path, data: Path, compiled: bool) -> list[Contender]:
    """Return all contenders."""
    networks = {}
    for name in ("resnet18_plain", "resnet10_plain"):
        networks[name] = load_result(Job(name), state).stages[0].eval()
    whole = ResNet(CLASSES)
    model = resnet18_cifar(CLASSES, backbone=whole, head="separable")  # shares its weights with `whole`
    model.load_state_dict(load_result(EXITS, state).state_dict())
    model, whole = model.eval(), whole.eval()
    loader = [*Batches(read(data, 0, 1000).calibration, CIFAR, 250)]
    labelled = record(model, loader, features=["max_probability"], progress=False)
    example = loader[0][0][:1]
    costs: Costs = measure_costs(model, example)
    half = calibrate.eero(costs, "50%", labelled)
    planned = plan(model, labelled, example=example, batch_size=BATCH, max_accuracy_loss=0.01)
    print(planned)
    made = [
        plain("ResNet-18", "resnet18_plain", networks["resnet18_plain"]),
        plain("ResNet-10", "resnet10_plain", networks["resnet10_plain"]),
        plain("ResNet-18 with exits, all of it", EXITS.run, whole),
        earlyon(whole, model, split(loader)),
        ours("alight, half of the FLOPs", Predictor(model, half, batch_size=BATCH)),
        ours("alight, planned to lose 0.01", planned.predictor()),
    ]
    if compiled:
        made += [
            plain("ResNet-18, compiled", "resnet18_plain", compiled_(networks["resnet18_plain"])),
            plain("ResNet-10, compiled", "resnet10_plain", compiled_(networks["resnet10_plain"])),
            ours("alight, half of the FLOPs, compiled", Predictor(model, half, batch_size=BATCH, settings=COMPILED)),
        ]
    return made


def split(loader: list[Any]) -> list[tuple[Tensor, Tensor]]:
    """Return the images of a loader one by one."""
    return [(images[row : row + 1], labels[row : row + 1]) for images, labels in loader for row in range(len(labels))]


def compiled_(network: nn.Module) -> Any:
    return torch.compile(network, dynamic=False)


def latencies(everyone: list[Contender], images: Tensor) -> dict[str, np.ndarray]:
    """Return milliseconds of every contender for every image, interleaved, after a few that warm up."""
    found: dict[str, list[float]] = {each.name: [] for each in everyone}
    for index in range(-WARM, len(images)):
        image = images[index : index + 1] if index >= 0 else images[:1]
        for each in everyone:
            start = time.perf_counter()
            each.one(image)
            if index >= 0:
                found[each.name].append(1e3 * (time.perf_counter() - start))
    return {name: np.array(values) for name, values in found.items()}


def throughputs(everyone: list[Contender], images: Tensor) -> dict[str, np.ndarray]:
    """Return images per second of every contender in every round, interleaved."""
    found: dict[str, list[float]] = {each.name: [] for each in everyone}
    for _ in range(ROUNDS):
        for each in everyone:
            start = time.perf_counter()
            each.many(images)
            found[each.name].append(len(images) / (time.perf_counter() - start))
    return {name: np.array(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="leave the compiled ones out")
    parser.add_argument("--limit", type=int, default=IMAGES, help="images at most, for a rehearsal")
    parser.add_argument("--output", type=Path, default=ROOT / "results/instead.csv")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    test = read(options.data, 0, 1000).test
    rows = torch.from_numpy(np.random.default_rng(0).permutation(len(test))[: options.limit])
    images = torch.cat([part for part, _ in Batches(test, CIFAR, 1000)])[rows]
    labels = test.labels[rows].numpy()
    everyone = contenders(options.state, options.data, not options.eager)
    answers = {each.name: np.array([each.one(image[None]) for image in images]) for each in everyone}
    singles = latencies(everyone, images[:LATENCIES])
    for each in everyone:
        each.many(images[: 2 * BATCH])  # compiles for batches, where it has to
    batched = throughputs(everyone, images[:BATCHED])
    made = provenance("numpy", "torch", folder=ROOT) | {"threads": str(torch.get_num_threads())}
    table: list[Row] = [
        {
            "name": each.name,
            "weights": each.weights,
            "accuracy": float(np.mean(answers[each.name] == labels)),
            "p50_ms": float(np.median(singles[each.name])),
            "p99_ms": float(np.quantile(singles[each.name], 0.99)),
            "mean_ms": float(singles[each.name].mean()),
            "per_second": float(np.median(batched[each.name])),
            "per_second_low": float(batched[each.name].min()),
            "per_second_high": float(batched[each.name].max()),
            "speedup": float(np.median(batched[each.name]) / np.median(batched[everyone[0].name])),
            "batch_size": BATCH,
            "images": len(images),
            "earlyon": version("earlyon"),
            **made,
        }
        for each in everyone
    ]
    for row in table:
        print(
            f"{row['name']:38} {row['accuracy']:.3f}  {row['p50_ms']:6.2f} ms {row['p99_ms']:6.2f} ms"
            f"  {row['per_second']:6.1f}/s"
        )
    write_rows(options.output, table)


if __name__ == "__main__":
    main()
