"""What do contracts keep under real shift? CIFAR-100 with blur, noise and darkness at three strengths each.

    python experiments/shift.py record DATA STATE SHIFTED    # minutes on a GPU, after cifar100_all.py
    python experiments/shift.py table SHIFTED                # a minute

`record` writes what those of NETWORKS that are trained say about the changed test images. `table` calibrates every
contract on the unchanged calibration images for half of the FLOPs, and writes results/shift.csv: what a policy spends
of its budget, its accuracy beside that of the full network, whether the stream's alarm was raised and after how many
samples, and what the comparison of the two tables says before anything is run.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from cifar100_data import Batches, Pictures, read
from cifar100_ship import narrow
from cifar100_train import CALIBRATION, RECORDED, Job, load_result
from recorded_cifar100 import Result
from torch import Tensor
from torchvision.transforms import functional

from alight import HeadOutputs, RunSettings, calibrate, diagnose_shift, record
from alight.files import write_arrays, write_rows
from alight.networks.zoo import CIFAR
from alight.policies.route import replay_on
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
NETWORKS = ("resnet18_frozen", "resnet18_mixed_distilled", "msdnet_joint")
BUDGET = "50%"
BATCH = 50  # samples of a stream at a time
SEED = 0


def blurred(pixels: Tensor, width: float) -> Tensor:
    """Return images (samples, channels, rows, columns) under a Gaussian blur of so many pixels."""
    return functional.gaussian_blur(pixels, [7, 7], [width, width])


def noisy(pixels: Tensor, width: float) -> Tensor:
    """Return images with Gaussian noise of this standard deviation, drawn from torch's generator."""
    return pixels + width * torch.randn_like(pixels)


def darker(pixels: Tensor, share: float) -> Tensor:
    """Return images with this share of their light."""
    return pixels * share


CHANGES: dict[str, tuple[Callable[[Tensor, float], Tensor], tuple[float, ...]]] = {
    "blur": (blurred, (0.5, 0.75, 1.25)),  # pixels
    "noise": (noisy, (5.0, 12.0, 25.0)),  # of 255
    "darkness": (darker, (0.6, 0.3, 0.15)),  # of the light is left
}


def changed(pictures: Pictures, kind: str, strength: float) -> Pictures:
    """Return the pictures after one change, in whole numbers again."""
    change, _ = CHANGES[kind]
    torch.manual_seed(SEED)
    pixels = change(pictures.pixels.permute(0, 3, 1, 2).float(), strength)
    return Pictures(pixels.round().clamp(0, 255).byte().permute(0, 2, 3, 1), pictures.labels)


def cases() -> Iterator[tuple[str, float, str]]:
    """Yield kind, strength and name of every change."""
    for kind, (_, strengths) in CHANGES.items():
        for number, strength in enumerate(strengths, 1):
            yield kind, strength, f"{kind}-{number}"


def record_all(data: Path, state: Path, out: Path) -> None:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.allow_tf32 = False
    test = read(data, SEED, CALIBRATION).test
    for job in (Job(name, SEED) for name in NETWORKS):
        folder, result = out / job.run, state / job.name / "result"
        if not result.exists():
            print(f"{job.name} is not trained")
            continue
        model = load_result(job, state)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("calibration.npz", "test.npz", "costs.json", "run.json"):
            shutil.copy(result / name, folder)
        for kind, strength, case in cases():
            loader = Batches(changed(test, kind, strength).to(device), CIFAR, RECORDED)
            outputs = record(model, loader, settings=RunSettings(str(device)), progress=False)
            kept = {name: each for name, each in narrow(outputs, ()).items() if not name.startswith("top")}
            write_arrays(folder / f"{case}.npz", "HeadOutputs", kept)
            print(job.run, case, " ".join(f"{1 - risk:.3f}" for risk in outputs.risks()), flush=True)


def rows_of(folder: Path) -> Iterator[dict[str, str]]:
    """Yield what every contract keeps on every change of one network's test images."""
    result = Result.of(folder)
    tables = {("none", 0.0): result.test}
    tables |= {(kind, strength): HeadOutputs.load(folder / f"{case}.npz") for kind, strength, case in cases()}
    order = np.random.default_rng(SEED).permutation(len(result.test))
    for contract, certified in calibrate.CONTRACTS.items():
        policy = certified(calibrate.eero, **{} if contract == "batch" else {"seed": SEED})(
            result.costs, BUDGET, result.calibration, spend_all=True
        )
        for (kind, strength), table in tables.items():
            labels = table.known_labels("a comparison")[order]
            decisions, memory = replay_on(policy, table.take(order), batch_size=BATCH)
            alarmed = getattr(memory[0] if memory else None, "alarmed_at", -1)
            shift = diagnose_shift(result.calibration, table)
            yield {
                "network": folder.name,
                "contract": contract,
                "change": kind,
                "strength": f"{strength:g}",
                "spent": f"{decisions.mean_cost / (policy.budget or np.nan):.4f}",
                "accuracy": f"{decisions.accuracy(labels):.4f}",
                "full_accuracy": f"{1 - table.risks()[-1]:.4f}",
                "alarm_after": str(alarmed) if alarmed >= 0 else "",
                "p_value": f"{shift.p_value:.2g}",
                "found_before": str(shift) if shift.is_significant else "",
            }


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["record"] and len(arguments) == 4:
        record_all(*map(Path, arguments[1:]))
    elif arguments[:1] == ["table"] and len(arguments) == 2:
        made = provenance("numpy", "scipy", folder=ROOT)
        folders = [folder for folder in sorted(Path(arguments[1]).iterdir()) if (folder / "run.json").exists()]
        rows = [row | made for folder in folders for row in rows_of(folder)]
        write_rows(ROOT / "results" / "shift.csv", rows)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
