"""Train one network in one way with one seed on CIFAR-100, and record its exits on images it has not seen.

    python experiments/cifar100_train.py resnet18_plain DATA STATE --seed 0

DATA holds train.npz and test.npz (see cifar100_data.py). Writes the folder STATE/resnet18_plain-0/result: weights in
half precision, calibration.npz and test.npz (`HeadOutputs`), costs.json, history.csv, and run.json with settings,
hardware and accuracy. With --short it is trained for fewer epochs (SHORT), no further scores are recorded, and the
first seed records changed test images, too (see shift.py). A training that was stopped resumes from its checkpoint. A
run that starts from the backbone of another needs that one's result in STATE. `cifar100_all.py` runs them all.
"""

import argparse
import csv
import io
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from cifar100_data import Batches, Pictures, Split, changed, changes, read
from cifar100_ship import narrow
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from alight import (
    HeadOutputs,
    MultiExitModel,
    RunSettings,
    TrainingSettings,
    attach_heads,
    fingerprint,
    measure_costs,
    record,
    train_heads,
)
from alight.files import write_arrays, write_text
from alight.networks.zoo import CIFAR, ResNet, msdnet_cifar, resnet18_cifar
from alight.provenance import provenance
from alight.training.metrics import History

ROOT = Path(__file__).parent.parent
CLASSES = 100
CALIBRATION = 1000  # images, as in the paper; the other 49,000 are trained on
RECORDED = 1000  # images at a time
PART = 14 * 2**20  # bytes of a file of weights at most
SCORES = ("max_probability", "negative_entropy", "logit_margin")  # beside the margin
STOPPED = 75  # exit status of a training that got SIGTERM


@dataclass(frozen=True)
class Run:
    """How a network is trained."""

    network: str  # in BACKBONES or WITH_EXITS
    training: TrainingSettings
    head: str = ""  # of its exits; none: the backbone alone
    start: str = ""  # the run whose trained backbone it starts from
    batch_size: int = 512
    checkpoint_every: int = 5
    all_scores: bool = False  # record SCORES beside the margin
    mixing: float = 0.0  # probability that a picture is mixed with another
    smoothing: float = 0.0  # share of a label that all classes get
    ships: str = ""  # which weights are worth keeping: "heads", "everything"
    about: str = field(default="", compare=False)


def convnext(widths: Sequence[int] = (40, 80, 160, 320), patch: int = 1) -> nn.Module:
    """Return a small ConvNeXt of timm for images of 32 x 32."""
    from timm.models.convnext import ConvNeXt

    sizes: dict[str, Any] = {"depths": (2, 2, 6, 2), "dims": tuple(widths), "patch_size": patch}
    return ConvNeXt(num_classes=CLASSES, drop_path_rate=0.1, **sizes)


def convnext_with_exits(num_classes: int, *, backbone: nn.Module, head: str) -> MultiExitModel:
    """Return a ConvNeXt with an exit after every block: 11 heads and its own."""
    from timm.models.convnext import ConvNeXtBlock

    blocks = [name for name, part in backbone.named_modules() if isinstance(part, ConvNeXtBlock)]
    settings: dict[str, Any] = {"num_classes": num_classes, "head": head, "normalisation": CIFAR}
    return attach_heads(backbone, blocks[:-1], example=torch.zeros(2, 3, 32, 32), **settings)


BACKBONES: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: ResNet(CLASSES),
    "resnet10": lambda: ResNet(CLASSES, blocks=(1, 1, 1, 1)),
    "convnext": convnext,
}
WITH_EXITS: dict[str, Callable[..., MultiExitModel]] = {
    "resnet18": resnet18_cifar,
    "convnext": convnext_with_exits,
    "msdnet": msdnet_cifar,
}

SGD = TrainingSettings(mode="joint", optimizer="sgd", momentum=0.9, nesterov=True, schedule="onecycle", clip=5.0)
RESNET = replace(SGD, weight_decay=5e-4)
FRESH = replace(RESNET, epochs=100, learning_rate=0.4)  # 0.1 for a batch of 128, four times as much for 512
ON = replace(RESNET, epochs=60, learning_rate=0.2)  # from a trained backbone
EXITS = replace(ON, loss_weights=[0.5] * 7 + [1.0])
FROZEN = replace(RESNET, mode="frozen", epochs=30, learning_rate=0.2)
CONVNEXT = TrainingSettings(
    mode="joint",
    epochs=100,
    optimizer="adamw",
    learning_rate=2e-3,
    weight_decay=0.05,
    schedule="onecycle",
    clip=1.0,
    ema=0.999,
)
MSDNET = replace(SGD, epochs=150, learning_rate=0.4, weight_decay=4e-4)
PAPER = TrainingSettings(mode="frozen", optimizer="sgd", momentum=0.9, schedule="cosine", clip=5.0)
RESNET_PAPER = replace(PAPER, epochs=20, learning_rate=3e-3, weight_decay=0.0)
CONVNEXT_PAPER = replace(PAPER, epochs=30, learning_rate=3e-2, weight_decay=1e-4)
SOFT: dict[str, Any] = {"mixing": 0.5, "smoothing": 0.1}  # without, a ConvNeXt knows its training images by heart

RUNS = {
    "resnet18_plain": Run("resnet18", FRESH, ships="everything", about="the backbone alone"),
    "resnet18_longer": Run("resnet18", ON, start="resnet18_plain", about="as long as mixed, the last exit alone"),
    "resnet18_frozen": Run(
        "resnet18",
        RESNET_PAPER,
        "flatten_linear",
        "resnet18_plain",
        batch_size=128,
        all_scores=True,
        about="the paper's heads",
    ),
    "resnet18_frozen_separable": Run(
        "resnet18", FROZEN, "separable", "resnet18_plain", ships="heads", about="better heads, frozen backbone"
    ),
    "resnet18_joint": Run(
        "resnet18", replace(EXITS, epochs=100), "separable", ships="everything", about="everything from the start"
    ),
    "resnet18_mixed": Run(
        "resnet18", EXITS, "separable", "resnet18_plain", ships="everything", about="the backbone, then everything"
    ),
    "resnet18_mixed_distilled": Run(
        "resnet18",
        replace(EXITS, distill=0.5, temperature=3.0),
        "separable",
        "resnet18_plain",
        all_scores=True,
        ships="everything",
        about="mixed, and earlier exits learn from the last",
    ),
    "resnet10_plain": Run("resnet10", FRESH, ships="everything", about="a smaller network instead of exits"),
    "msdnet_joint": Run(
        "msdnet", MSDNET, "own", checkpoint_every=2, all_scores=True, ships="everything", about="made for exits"
    ),
    "convnext_plain": Run(
        "convnext", CONVNEXT, checkpoint_every=2, ships="everything", about="the backbone alone", **SOFT
    ),
    "convnext_frozen": Run(
        "convnext",
        CONVNEXT_PAPER,
        "pooled_linear",
        "convnext_plain",
        all_scores=True,
        ships="heads",
        about="the paper's heads",
    ),
    "convnext_joint": Run(
        "convnext",
        replace(CONVNEXT, loss_weights=[0.5] * 11 + [1.0]),
        "separable",
        checkpoint_every=2,
        about="everything from the start",
        **SOFT,
    ),
}


@dataclass(frozen=True)
class Job:
    """A run with one seed and one number of calibration images."""

    run: str
    seed: int = 0
    calibration: int = CALIBRATION

    @classmethod
    def named(cls, name: str) -> "Job":
        """Return the job of a name: "resnet18_plain-0", or "resnet18_plain-0-5000" with 5,000 calibration images."""
        run, *numbers = name.split("-")
        if run not in RUNS or not 1 <= len(numbers) <= 2 or not all(each.isdigit() for each in numbers):
            raise SystemExit(f"{name!r} is not RUN-SEED or RUN-SEED-CALIBRATION with a run of {', '.join(RUNS)}")
        return cls(run, *map(int, numbers))

    @property
    def name(self) -> str:
        """Name of the job's folder."""
        return f"{self.run}-{self.seed}" + ("" if self.calibration == CALIBRATION else f"-{self.calibration}")

    @property
    def start(self) -> "Job | None":
        """Job whose trained backbone this one starts from."""
        before = RUNS[self.run].start
        return Job(before, self.seed, self.calibration) if before else None


@dataclass(frozen=True)
class Sizes:
    """Changes to a run: less for a rehearsal, larger batches for a fast device."""

    limit: int | None = None  # images of each part
    epochs: int | None = None
    batch_size: int | None = None  # the learning rate changes by the root of the ratio

    def of(self, run: Run) -> Run:
        """Return the run with these changes."""
        size = self.batch_size or run.batch_size
        rate = (run.training.learning_rate or 0.0) * (size / run.batch_size) ** 0.5
        training = replace(run.training, learning_rate=rate, epochs=self.epochs or run.training.epochs)
        return replace(run, batch_size=size, training=training)


# Epochs for the recordings of the benchmark, which needs realistic networks, not the best ones: all of them take about
# nine minutes on an H200, five trainings at a time.
SHORT = {
    "resnet18_plain": Sizes(epochs=50),
    "resnet10_plain": Sizes(epochs=50),
    "resnet18_frozen": Sizes(epochs=15),
    "resnet18_frozen_separable": Sizes(epochs=15),
    "resnet18_mixed_distilled": Sizes(epochs=25),
    "msdnet_joint": Sizes(epochs=60, batch_size=1024),
    "convnext_plain": Sizes(epochs=40),
    "convnext_frozen": Sizes(epochs=15),
}


def build(job: Job, state: Path, *, started: bool = True) -> MultiExitModel:
    """Return the network before its training, with the trained backbone that the run starts from, if any."""
    run = RUNS[job.run]
    torch.manual_seed(job.seed)
    backbone = load_result(job.start, state).stages[0] if job.start and started else None
    if not run.head:
        return _one_exit(backbone or BACKBONES[run.network]())
    if run.head == "own":
        return WITH_EXITS[run.network](CLASSES)
    return WITH_EXITS[run.network](CLASSES, backbone=backbone or BACKBONES[run.network](), head=run.head)


def _one_exit(network: nn.Module) -> MultiExitModel:
    return MultiExitModel([network], [nn.Identity()], ["end"], num_classes=CLASSES, normalisation=CIFAR)


def train(
    job: Job,
    data: Path,
    state: Path,
    device: torch.device,
    sizes: Sizes | None = None,
    commit: str = "",
    *,
    short: bool = False,
) -> Path:
    """Return the folder of the job's result, after training unless it exists."""
    folder, sizes = state / job.name, sizes or Sizes()
    result, partial = folder / "result", folder / "partial"
    if result.exists():
        return result
    folder.mkdir(parents=True, exist_ok=True)
    run, split, model = sizes.of(RUNS[job.run]), read(data, job.seed, job.calibration, sizes.limit), build(job, state)
    on_gpu = device.type == "cuda"
    amp = "bf16" if on_gpu else None
    training = replace(run.training, seed=job.seed, channels_last=on_gpu, amp=amp)
    run = replace(run, training=training)
    progress = Progress(folder / "progress.csv")
    history = train_heads(
        model,
        Batches(
            split.train.to(device),
            CIFAR,
            run.batch_size,
            training=True,
            mixing=run.mixing,
            smoothing=run.smoothing,
            on_epoch=progress.note,
        ),
        training,
        validation=Batches(split.calibration.to(device), CIFAR, RECORDED),
        checkpoint=folder / "checkpoint.safetensors",
        checkpoint_every=run.checkpoint_every,
        device=device,
        progress=False,
    )
    progress.note(len(history.epochs))
    model = model.cpu().eval()
    round_weights(model)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    save_weights(model, partial)
    accuracies = _record(model, split, device, partial, SCORES if run.all_scores and not short else ())
    if short and not job.seed and model.num_exits > 1:
        _record_changed(model, split.test.to(device), device, partial)
    measure_costs(model, torch.zeros(1, 3, 32, 32)).save(partial / "costs.json")
    write_text(partial / "history.csv", history_csv(history))
    about: dict[str, Any] = {
        "run": job.run,
        "seed": job.seed,
        "calibration": job.calibration,
        "fingerprint": fingerprint(model),
    }
    about |= {"exits": list(model.exits), **accuracies, "settings": asdict(run)}
    about |= {"images": {part: len(getattr(split, part)) for part in ("train", "calibration", "test")}}
    about |= {"seconds": round(progress.seconds(), 1), **_made(device, commit)}
    write_text(partial / "run.json", json.dumps(about, indent=2) + "\n")
    partial.rename(result)
    (folder / "checkpoint.safetensors").unlink()
    return result


def _record(
    model: MultiExitModel, split: Split, device: torch.device, folder: Path, scores: tuple[str, ...]
) -> dict[str, list[float]]:
    """Record all exits into the folder in full single precision; return test and calibration accuracy."""
    torch.backends.cudnn.allow_tf32 = False
    accuracies = {}
    for part in ("calibration", "test"):
        pictures: Pictures = getattr(split, part)
        loader = Batches(pictures, CIFAR, RECORDED)
        outputs: HeadOutputs = record(model, loader, features=scores, settings=RunSettings(device), progress=False)
        outputs.save(folder / f"{part}.npz")
        accuracies[f"{part}_accuracy"] = [round(1 - float(risk), 6) for risk in outputs.risks()]
    return accuracies


def _record_changed(model: MultiExitModel, test: Pictures, device: torch.device, folder: Path) -> None:
    """Record the test images after every change of `changes`, without log-probabilities."""
    for kind, strength, name in changes():
        loader = Batches(changed(test, kind, strength), CIFAR, RECORDED)
        outputs = record(model, loader, settings=RunSettings(device), progress=False)
        kept = {each: array for each, array in narrow(outputs, ()).items() if not each.startswith("top")}
        write_arrays(folder / f"{name}.npz", "HeadOutputs", kept)


def _made(device: torch.device, commit: str) -> dict[str, str]:
    made = provenance("torch", "numpy", folder=ROOT)
    if device.type == "cuda":
        made["hardware"] = f"{torch.cuda.get_device_name(device)}, {made['hardware']}"
    return made | ({"commit": commit} if commit else {})


class Progress:
    """A log of when epochs began, over all processes that worked on a job; it survives when one is stopped."""

    def __init__(self, path: Path) -> None:
        self.path, self.begin = path, time.monotonic()
        with self.path.open("a") as file:
            file.write("begin\n")

    def note(self, epoch: int) -> None:
        """Log that an epoch begins; the one after the last is the end."""
        with self.path.open("a") as file:
            file.write(f"{epoch},{time.monotonic() - self.begin:.2f}\n")

    def seconds(self) -> float:
        """Return the seconds of training in all processes, up to the last epoch that each began."""
        return sum(rows[-1][1] for rows in self.read(self.path) if rows)

    @staticmethod
    def read(path: Path) -> list[list[tuple[int, float]]]:
        """Return for each process the epochs that it began and the seconds since its start."""
        runs = path.read_text().split("begin\n")[1:] if path.exists() else []
        return [
            [(int(epoch), float(seconds)) for epoch, seconds in (line.split(",") for line in lines.splitlines())]
            for lines in runs
        ]


def history_csv(history: History) -> str:
    """Return the loss and accuracy of every epoch and exit as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = ("losses", "accuracies", "validation_losses", "validation_accuracies")
    writer.writerow(["epoch", "exit", "loss", "accuracy", "validation_loss", "validation_accuracy"])
    for number, epoch in enumerate(history.epochs, start=1):
        for index, exit_name in enumerate(history.exits):
            values = (getattr(epoch, name)[index] for name in names)
            writer.writerow([number, exit_name, *("" if each is None else f"{each:.5f}" for each in values)])
    return text.getvalue()


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """Round every matrix and kernel to values that half precision can hold."""
    for tensor in model.state_dict().values():
        if _is_halved(tensor):
            tensor.copy_(tensor.half())


def _is_halved(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.ndim >= 2  # norms and their statistics are small and need the range


def save_weights(model: nn.Module, folder: Path) -> None:
    """Write the weights of stages and of heads, each in files that are not too large."""
    state = {
        name: (tensor.half() if _is_halved(tensor) else tensor).contiguous()
        for name, tensor in model.state_dict().items()
    }
    for kind in ("stages", "heads"):
        own = {name: tensor for name, tensor in state.items() if name.startswith(f"{kind}.")}
        for number, part in enumerate(_parts(own)):
            save_file(part, folder / f"{kind}-{number}.safetensors")


def _parts(state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    parts: list[dict[str, Tensor]] = []
    room = 0
    for name, tensor in state.items():
        if tensor.nbytes > room:
            parts.append({})
            room = PART
        parts[-1][name] = tensor
        room -= tensor.nbytes
    return parts


def load_result(job: Job, state: Path) -> MultiExitModel:
    """Return the trained network of a job, in single precision and evaluation mode: the one that was recorded.

    Where the weights of a frozen backbone are not beside those of its heads, they are those of the run it started from.
    """
    result = state / job.name / "result"
    about = json.loads((result / "run.json").read_text())
    frozen = about["settings"]["training"]["mode"] == "frozen"
    model = build(job, state, started=frozen)  # all other weights are the result's own
    found: dict[str, Tensor] = {}
    for path in sorted(result.glob("*.safetensors")):
        found |= load_file(path)
    own = {name: tensor for name, tensor in model.state_dict().items() if frozen and name.startswith("stages.")}
    model.load_state_dict({**own, **found})
    if (found_print := fingerprint(model)) != about["fingerprint"]:
        raise SystemExit(f"{result} is damaged: fingerprint {found_print}, recorded as {about['fingerprint']}")
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("data", type=Path, help="folder with train.npz and test.npz")
    parser.add_argument("state", type=Path, help="folder for checkpoints and results")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calibration", type=int, default=CALIBRATION, help="images that are not trained on")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default="", help="of this code, where it is not a git repository")
    parser.add_argument("--limit", type=int, help="images of each part, for a rehearsal")
    parser.add_argument("--epochs", type=int, help="for a rehearsal")
    parser.add_argument("--batch-size", type=int, help="other than the run's; the learning rate follows")
    parser.add_argument("--short", action="store_true", help="for the benchmark's recordings: fewer epochs")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1 if device.type == "cpu" else 4)
    torch.backends.cudnn.benchmark = True
    signal.signal(signal.SIGTERM, _stop)
    job = Job(options.run, options.seed, options.calibration)
    short = SHORT[options.run] if options.short else Sizes()
    sizes = Sizes(options.limit, options.epochs or short.epochs, options.batch_size or short.batch_size)
    try:
        result = train(job, options.data, options.state, device, sizes, options.commit, short=options.short)
    except KeyboardInterrupt:
        if device.type == "cuda":
            torch.cuda.synchronize()  # so that no kernel is cut off on a device that others use
        sys.exit(STOPPED)
    about = json.loads((result / "run.json").read_text())
    shown = " ".join(f"{100 * each:.1f}" for each in about["test_accuracy"])
    print(f"{job.name}: test accuracy % {shown}, {about['seconds']:.0f} s")


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
