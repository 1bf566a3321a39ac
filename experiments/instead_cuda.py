"""What a user would pick instead on a GPU, on trained networks: the full network at its fastest, or smaller images.

    PYTHONPATH=src:benchmarks python experiments/instead_cuda.py resnet18 DATA STATE     # 32 px, 2 minutes, H200
    PYTHONPATH=src:benchmarks python experiments/instead_cuda.py resnet50 DATA MODELS    # 224 px, 3 minutes

DATA is CIFAR-100 (see cifar100_data.py). `resnet18` was trained with its exits (STATE holds results of
cifar100_train.py). `resnet50` was trained on ImageNet (see imagenet_networks.py for MODELS) and is first trained on
CIFAR-100 at 224 px together with its exits. Policies are calibrated on 2,000 test images and everything is measured on
the others: accuracy, the share of images whose exit and class are those of a replay of the recording in the same
precision, throughput in batches, and latency of single images, all interleaved, medians with the lowest and highest of
the rounds. The full network is the fastest of the ways in benchmarks/runtime_cuda.py. Writes
results/instead_cuda.csv.
"""

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cifar100_data import Batches, Pictures
from cifar100_train import CLASSES
from imagenet_networks import CAFFE, resnet50
from runtime import clocked
from runtime_cuda import Full, compile_always, compiled_once, parts_for
from safetensors.torch import load_file
from torch import Tensor, nn

from alight import (
    MultiExitModel,
    Normalisation,
    Policy,
    Predictor,
    RunSettings,
    TrainingSettings,
    attach_heads,
    calibrate,
    fingerprint,
    measure_costs,
    record,
    replay,
    train_heads,
)
from alight.calibrate.crossval import on_exits
from alight.engine.backends import torch as stages
from alight.engine.backends.torch.prepare import placed
from alight.files import write_rows
from alight.networks.zoo import CIFAR, ResNet, resnet18_cifar
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
LABELLED = 2000  # images to calibrate on
SINGLE, MANY = 400, 4096  # images that are timed one by one, and in batches
BUDGETS = ("50%", "70%")
FEW = 6  # exits; of more, every other one is open
TUNING = TrainingSettings(
    mode="joint", epochs=5, optimizer="adamw", learning_rate=2e-4, weight_decay=0.05, schedule="onecycle", clip=1.0
)
Row = dict[str, str | float | int]
Images = tuple[Tensor, np.ndarray]  # as a network takes them, and their classes


@dataclass
class Resized:
    """Batches of images of another size."""

    batches: Any
    size: int

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for images, labels in self.batches:
            yield resized(images, self.size), labels


def resized(images: Tensor, size: int) -> Tensor:
    return images if images.shape[-1] == size else nn.functional.interpolate(images, (size, size), mode="bilinear")


def pictures(path: Path) -> Pictures:
    """Return the images of a file in random order."""
    with np.load(path, allow_pickle=False) as file:
        order = np.random.default_rng(0).permutation(len(file["labels"]))
        return Pictures(*(torch.from_numpy(file[name][order]) for name in ("images", "labels")))


def trained_resnet18(_: Path, state: Path, options: argparse.Namespace) -> tuple[nn.Module, MultiExitModel]:
    """Return a full network, and the same with exits."""
    whole = ResNet(CLASSES)
    model = resnet18_cifar(CLASSES, backbone=whole, head="separable")  # shares its weights with `whole`
    result = state / "resnet18_mixed_distilled-0" / "result"
    weights = [load_file(path) for path in sorted(result.glob("*.safetensors"))]
    model.load_state_dict({name: tensor for part in weights for name, tensor in part.items()})
    if fingerprint(model) != json.loads((result / "run.json").read_text())["fingerprint"]:
        raise SystemExit(f"{result} is damaged: its weights are not those that were recorded")
    return whole.eval(), model.eval()


def trained_resnet50(data: Path, models: Path, options: argparse.Namespace) -> tuple[nn.Module, MultiExitModel]:
    """Return a full network trained with its exits on CIFAR-100, and the same with them."""
    torch.manual_seed(0)
    whole = resnet50(models)
    assert isinstance(whole, nn.Sequential)
    whole[-1] = nn.Linear(2048, CLASSES)
    model = attach_heads(whole, after=4, example=torch.zeros(2, 3, options.size, options.size), head="separable")
    train = pictures(data / "train.npz").to(torch.device(options.device))
    batches = Resized(Batches(train, CAFFE, 256, training=True), options.size)
    on_gpu = options.device == "cuda"
    settings = replace(TUNING, epochs=options.epochs, channels_last=on_gpu, amp="bf16" if on_gpu else None)
    print(train_heads(model, batches, settings, device=options.device, progress=False))
    return whole.cpu().eval(), model.cpu().eval()


NETWORKS: dict[str, tuple[Callable[..., tuple[nn.Module, MultiExitModel]], Normalisation]] = {
    "resnet18": (trained_resnet18, CIFAR),
    "resnet50": (trained_resnet50, CAFFE),
}


def policies(model: MultiExitModel, images: Images, settings: RunSettings) -> dict[str, Policy]:
    """Return a policy for every budget, a share of the multiply-adds."""
    labelled = record(model, images, settings=settings, progress=False)
    costs, kept = measure_costs(model, images[0][:1].float().cpu()), range(model.num_exits)
    method = on_exits(calibrate.auto, kept if len(kept) < FEW else kept[1::2])
    return {budget: method(costs, budget, labelled) for budget in BUDGETS}


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of every batch size."""
    make, normalisation = NETWORKS[options.network]
    whole, model = make(options.data, options.weights, options)
    settings = RunSettings(options.device, options.dtype, channels_last=options.device == "cuda")
    test = pictures(options.data / "test.npz").to(torch.device(options.device))
    loaded = [resized(images, options.size) for images, _ in Batches(test, normalisation, 500)]
    (every,) = placed((torch.cat(loaded),), torch.device(options.device), settings)
    labels, given = test.labels.cpu().numpy(), slice(LABELLED, options.limit)
    first, others = (every[:LABELLED], labels[:LABELLED]), (every[given], labels[given])
    rules, recorded = policies(model, first, settings), record(model, others, settings=settings, progress=False)
    whole = copy.deepcopy(whole).to(options.device, every.dtype).to(memory_format=torch.channels_last)
    full = Full(whole, (), compiles=True)
    small = resized(others[0].float(), options.size * 5 // 7 // 32 * 32 or options.size).to(others[0].dtype)
    compilers = {rule.open_exits: compiled_once() for rule in rules.values()}
    for batch_size in map(int, options.batch_sizes.split(",")):
        count = min(SINGLE if batch_size == 1 else MANY, len(others[0]) // batch_size * batch_size)
        works: dict[str, tuple[Callable[[Tensor], np.ndarray], Tensor, Row]] = {}
        with torch.inference_mode():
            works["full network"] = fastest(full, others, batch_size, count)
            if small.shape != others[0].shape:
                works[f"{small.shape[-1]} px"] = fastest(full, (small, others[1]), batch_size, count)
        for budget, rule in rules.items():
            for mode in ("eager", "compiled"):
                chosen = RunSettings(options.device, options.dtype, settings.channels_last, compile=mode == "compiled")
                stages.compiled_stage = compilers[rule.open_exits]  # type: ignore[attr-defined, assignment]
                predictor = Predictor(model, rule, settings=chosen, batch_size=batch_size)
                works[f"exits, {budget}, {mode}"] = deciding(predictor, recorded, others, batch_size)
        yield from timed(works, batch_size, count, options.rounds, options.device)


def fastest(full: Any, images: Images, batch_size: int, count: int) -> Any:
    """Return the fastest way of the full network, what it answers, and how accurate that is."""
    part, labels = images[0][:count], images[1]
    ways = {name: partial(classes, run, batch_size) for name, run in full.ways(batch_size).items()}
    taken = {name: min(clocked(partial(run, part), part.device.type) for _ in range(3)) for name, run in ways.items()}
    best = min(taken, key=taken.__getitem__)
    accuracy = float((classes(full.forward, 500, images[0]) == labels).mean())
    return (
        ways[best],
        images[0],
        {"way": best, "accuracy": accuracy, "replayed": "", "same": "", "open_exits": "", "combination": ""},
    )


def classes(run: Callable[..., Any], batch_size: int, images: Tensor) -> np.ndarray:
    """Return the classes by a full network; a single image's is waited for, those of batches once."""
    found = [run(*part).argmax(-1) for part in parts_for(run, (images,), batch_size)]
    answers: np.ndarray = torch.cat(found).cpu().numpy()
    return answers


def deciding(predictor: Predictor, recorded: Any, images: Images, batch_size: int, single: int = SINGLE) -> Any:
    """Return a predictor, and how accurate it is, beside a replay: on `single` images where they come one by one."""
    every, labels = images
    if batch_size == 1:
        every, labels = every[:single], labels[:single]
        for index in range(8):  # who decides is found out
            predictor(every[index : index + 1], [index])
        made = [predictor(every[index : index + 1], [index]) for index in range(len(every))]
        exits, answers = (np.concatenate([getattr(each, name) for each in made]) for name in ("exits", "predictions"))
    else:
        predictor(every[: 16 * batch_size])
        decisions = predictor(every, np.arange(len(every)))
        exits, answers = decisions.exits, decisions.predictions
    expected = replay(predictor.policy, recorded.take(np.arange(len(every))))
    same = (exits == expected.exits) & (answers == expected.predictions)
    return (
        lambda part: predictor(part).predictions,
        images[0],
        {
            "way": "device" if "the device decides" in predictor.decided_by else "host",
            "accuracy": float((answers == labels).mean()),
            "replayed": expected.accuracy(labels),
            "same": float(same.mean()),
            "open_exits": " ".join(map(str, predictor.policy.open_exits)),
            "combination": type(predictor.policy.combination).__name__ if predictor.policy.combination else "",
        },
    )


@torch.inference_mode()
def timed(works: dict[str, Any], batch_size: int, count: int, rounds: int, device: str) -> Iterator[Row]:
    """Yield a row for each, timed interleaved: image by image, or pass by pass."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        parts = [slice(at, at + 1) for at in range(count)] if batch_size == 1 else [slice(count)]
        for index, part in enumerate(parts):
            names = [*works]
            for name in names[(turn + index) % len(names) :] + names[: (turn + index) % len(names)]:
                run, images, _ = works[name]
                seconds = clocked(partial(run, images[part]), device)
                if turn:
                    taken[name].append(seconds)
    best = np.array(taken["full network"])
    for name, (_, _, about) in works.items():
        own = np.array(taken[name])
        ratios = (best.reshape(rounds, -1).mean(1) / own.reshape(rounds, -1).mean(1)).tolist()
        row: Row = {"contender": name, "batch_size": batch_size, "images": count, **about}
        row |= {"speedup": float(np.median(ratios)), "speedup_low": min(ratios), "speedup_high": max(ratios)}
        row["per_second"] = count / float(np.median(own.reshape(rounds, -1).sum(1)))
        for percent in (50, 99):
            row[f"p{percent}_ms"] = 1e3 * float(np.percentile(own, percent)) if batch_size == 1 else ""
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("data", type=Path, help="folder with train.npz and test.npz of CIFAR-100")
    parser.add_argument("weights", type=Path, help="STATE, or MODELS")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--batch-sizes", default="1,32,256")
    parser.add_argument("--size", type=int, help="of images: 32 or 224 pixels by default")
    parser.add_argument("--epochs", type=int, default=TUNING.epochs)
    parser.add_argument("--limit", type=int, help="images, for a rehearsal")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "results/instead_cuda.csv")
    options = parser.parse_args()
    options.size = options.size or (32 if options.network == "resnet18" else 224)
    torch.backends.cudnn.benchmark = True
    compile_always()
    made = provenance("numpy", "torch", folder=ROOT)
    if options.device == "cuda":
        made["hardware"] = torch.cuda.get_device_name()
    rows: list[Row] = []
    for row in measure(options):
        rows.append({"network": f"{options.network}, {options.size} px", "dtype": options.dtype, **row, **made})
        print({name: value for name, value in rows[-1].items() if name not in made}, flush=True)
        write_rows(options.output, rows)


if __name__ == "__main__":
    main()
