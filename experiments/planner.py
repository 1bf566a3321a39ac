"""Are plans right? Predicted against measured, on trained networks and images they have not seen.

    python experiments/planner.py STATE IMAGES --device cuda --dtype bf16 --batch-sizes 256,2048   # 4 minutes, H200
    python experiments/planner.py STATE IMAGES --device cuda --dtype bf16 --batch-sizes 256 --speed auto
    python experiments/planner.py STATE IMAGES --batch-sizes 1,16 --threads 1

STATE holds results of cifar100_train.py, IMAGES is CIFAR-100's test.npz (see cifar100_data.py): the plan is made with
2,000 of its images and measured on the others. For every network, batch size and question (a budget, or a largest loss
of accuracy) the plan's predictor and the full network run interleaved over the same images; images are repeated where
eight batches need more. Writes results/planner_<device>.csv: `faster` is the time of the full network in a bare loop
over that of the plan, median and quartiles over rounds; `over_full` is the same with the full network run by a
predictor of the plan's settings, which is what the plan compares with, and `predicted_speedup` is its prediction;
`predicted` over `measured` is in images per second, which assumes a machine as fast as when the plan was made.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cifar100_data import Batches, Pictures
from cifar100_train import Job, load_result
from torch import Tensor

from alight import HeadOutputs, MultiExitModel, Plan, Predictor, RunSettings, plan, record
from alight.engine.backends.torch.prepare import placed, prepared
from alight.errors import BudgetTooSmall
from alight.files import write_rows
from alight.networks.multi_exit import advance, read
from alight.networks.zoo import CIFAR
from alight.planning.timing import full_network
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
NETWORKS = "resnet18_mixed_distilled-0,msdnet_joint-0"
LABELLED = 2000  # images
LEAST = 400  # images: with fewer, the sample says more than the plan
SECONDS = 0.4  # of a run of the full network, at least
QUESTIONS: dict[str, dict[str, Any]] = {
    "60%": {"budget": "60%"},
    "85%": {"budget": "85%"},
    "loss 0.01": {"max_accuracy_loss": 0.01},
}
Row = dict[str, str | float | int]


def images_of(path: Path) -> tuple[Pictures, Pictures]:
    """Return the images to plan with, and those to measure on."""
    with np.load(path, allow_pickle=False) as file:
        pixels, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"])
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    parts = order[:LABELLED], order[LABELLED:]
    first, second = (Pictures(pixels[rows], labels[rows]) for rows in parts)
    return first, second


def measure(
    model: MultiExitModel, labelled: HeadOutputs, images: Tensor, labels: np.ndarray, options: argparse.Namespace
) -> Iterator[Row]:
    """Yield a row for each batch size and question."""
    network = prepared(model, options.settings)
    for batch_size in map(int, options.batch_sizes.split(",")):
        for question in options.questions.split(","):
            start = time.perf_counter()
            terms: dict[str, Any] = {"batch_size": batch_size, "speed": options.speed, "settings": options.settings}
            try:
                planned = plan(model, labelled, example=images[:1].cpu(), **terms, **QUESTIONS[question])
            except BudgetTooSmall as error:  # the heads included, on this machine
                print(f"batch {batch_size}, {question}: {error}", flush=True)
                continue
            seconds = time.perf_counter() - start
            row: Row = {"batch_size": batch_size, "question": question, "planning_seconds": seconds}
            row["graphs"] = str(planned.settings.graphs)
            yield row | compare(planned, network, images, labels, options.rounds)


def compare(planned: Plan, network: MultiExitModel, images: Tensor, labels: np.ndarray, rounds: int) -> Row:
    """Time the full network in a bare loop, by a predictor, and the planned predictor, interleaved."""
    predictor, batch_size = planned.predictor(), planned.batch_size
    full = Predictor(planned.model, full_network(network), batch_size=batch_size, settings=planned.settings)
    once = min(clocked(partial(classes, network, images[:batch_size], batch_size)) for _ in range(2))
    count = max(LEAST, batch_size * max(8, min(int(SECONDS / once), len(images) // batch_size)))
    rows = torch.arange(count) % len(images)
    chosen, labels = images[rows.to(images.device)], labels[rows.numpy()]
    decisions = predictor(chosen)
    runs: list[Callable[[], object]] = [partial(classes, network, chosen, batch_size)]
    runs += [partial(full, chosen), partial(predictor, chosen)]
    seconds = np.array([[clocked(run) for run in runs] for _ in range(rounds + 1)])[1:]
    low, middle, high = np.quantile(seconds[:, 0] / seconds[:, 2], [0.25, 0.5, 0.75]).tolist()
    measured = count / float(np.median(seconds[:, 2]))
    return {
        "pays": str(planned.pays),
        "open_exits": " ".join(map(str, planned.open_exits)),
        "images": count,
        "rounds": rounds,
        "dense": count / float(np.median(seconds[:, 0])),
        "measured": measured,
        "predicted": planned.throughput,
        "predicted_over_measured": planned.throughput / measured,
        "predicted_speedup": planned.speedup,
        "over_full": float(np.median(seconds[:, 1] / seconds[:, 2])),
        "faster": middle,
        "faster_low": low,
        "faster_high": high,
        "accuracy": decisions.accuracy(labels),
        "full_accuracy": full(chosen).accuracy(labels),
        "predicted_accuracy": planned.accuracy,
        "dense_accuracy": planned.full_accuracy,
        "largest_loss": planned.largest_loss,
    }


@torch.inference_mode()
def classes(model: MultiExitModel, images: Tensor, batch_size: int) -> np.ndarray:
    """Return the classes by the full network, fetched once."""
    answers = []
    for batch in torch.split(images, batch_size):
        carried: tuple[Tensor, ...] = (batch,)
        for stage in model.stages:
            carried = advance(stage, carried)
        answers.append(read(model.heads[-1], carried).argmax(-1))
    found: np.ndarray = torch.cat(answers).cpu().numpy()
    return found


def clocked(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()  # its answers are on the host, so all work is done
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--networks", default=NETWORKS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype")
    parser.add_argument("--batch-sizes", default="1,16,256,2048")
    parser.add_argument("--questions", default=",".join(QUESTIONS))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=7, help="runs of each (default: 7)")
    parser.add_argument("--speed", choices=["auto"], help="let the plan choose switches for speed")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.settings = RunSettings(options.device, options.dtype, channels_last=options.device == "cuda")
    torch.backends.cudnn.benchmark = options.device == "cuda"
    if options.threads:
        torch.set_num_threads(options.threads)
    made = provenance("numpy", "torch", folder=ROOT) | {"threads": str(torch.get_num_threads())}
    if options.device == "cuda":
        made["hardware"] = torch.cuda.get_device_name()
    first, second = images_of(options.images)
    rows: list[Row] = []
    for name in options.networks.split(","):
        model = load_result(Job.named(name), options.state)
        labelled = record(model, Batches(first, CIFAR, 500), settings=options.settings, progress=False)
        whole = torch.cat([images for images, _ in Batches(second, CIFAR, 1000)])
        (images,) = placed((whole,), torch.device(options.device), options.settings)
        for row in measure(model, labelled, images, second.labels.numpy(), options):
            rows.append({"network": name, "device": options.device, "dtype": options.dtype or "fp32", **row, **made})
            print(
                f"{name}, batch {row['batch_size']}, {row['question']}: exits {row['open_exits']}, {row['faster']:.3f}"
                f" times as fast ({row['faster_low']:.3f} to {row['faster_high']:.3f}; over the full network"
                f" {row['over_full']:.3f}, predicted {row['predicted_speedup']:.3f}), graphs {row['graphs']},"
                f" predicted over measured {row['predicted_over_measured']:.3f}, accuracy {row['accuracy']:.3f}"
                f" (full {row['full_accuracy']:.3f}, predicted {row['predicted_accuracy']:.3f}),"
                f" planned in {row['planning_seconds']:.1f} s",
                flush=True,
            )
            write_rows(options.output or ROOT / f"results/planner_{options.device}.csv", rows)


if __name__ == "__main__":
    main()
