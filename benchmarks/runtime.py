"""How much of the possible speed-up the predictor reaches, beside the plain network, on this machine.

    python benchmarks/runtime.py --device cpu  --models resnet18_cifar --batch-sizes 1,64 --images 512
    python benchmarks/runtime.py --device cuda --models convnext_tiny,resnet50 --batch-sizes 256,1024,2048

Random weights; samples leave by lot, so that the mix of exits is what the row says: uniform, early (most leave early),
or never (every head and score is evaluated and nobody leaves). `speedup` is the plain network's time over the
predictor's, taken by turns, medians with quartiles; `reached` is the time that stages and heads alone would take for
the exits taken, each timed at the full batch size in the same run, over the predictor's time. Compiled, the scores are
fused into the heads and timed with them. Writes results/runtime_<device>.csv.
"""

import argparse
import csv
import io
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from alight.files import write_text
from alight.models.attach import attach_heads
from alight.models.places import suggest_exits
from alight.policies.policy import Lottery, Policy, Threshold
from alight.provenance import provenance
from alight.runtime.predictor import Predictor

ROOT = Path(__file__).parent.parent
ROUNDS = 7
Row = dict[str, str | float | int]


def network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A plain network and the shape of an image."""
    import timm
    from torchvision.models import resnet50

    if name == "resnet50":
        plain, shape = resnet50(), (3, 224, 224)
    elif name == "resnet18_cifar":
        from alight.models.resnet import ResNet18

        plain, shape = ResNet18(num_classes=100), (3, 32, 32)
    else:
        plain, shape = timm.create_model(name, num_classes=1000), (3, 224, 224)
    return plain.eval(), shape


def rates(mix: str, exits: int) -> tuple[float, ...]:
    weights = np.ones(exits) if mix == "uniform" else 0.6 ** np.arange(exits)
    return tuple((weights / weights.sum()).tolist())


def policy_for(mix: str, exits: int) -> Policy:
    costs = tuple(float(index + 1) for index in range(exits))
    if mix == "never":
        return Threshold((np.inf,) * (exits - 1), costs=costs)
    return Lottery(costs=costs, exit_rates=rates(mix, exits))


def clocked(work: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def segment_seconds(predictor: Predictor, images: Tensor, batch_size: int, device: str) -> list[float]:
    """Median seconds of every segment for one full batch: stages and head, and fused scores if compiled."""
    found: list[float] = []
    engine = predictor.engine
    carried: Any = (images[:batch_size],)
    for position, segment in enumerate(engine.segments):
        run = engine.runs[position] if engine.runs else segment.logits
        for _ in range(3):
            once = clocked(partial(run, *carried), device)
        repeat = max(1, int(0.02 / max(once, 1e-6))) if device == "cuda" else 1
        several = partial(_again, partial(run, *carried), repeat)
        rounds = 9 if device == "cuda" else 15
        found.append(float(np.median([clocked(several, device) for _ in range(rounds)])) / repeat)
        carried = run(*carried)[0]
    return found


def _again(work: Callable[[], object], count: int) -> None:
    for _ in range(count):
        work()


def measure(options: argparse.Namespace, name: str, count: int, mode: str) -> Iterator[Row]:
    device, kind = options.device, (torch.bfloat16 if options.dtype == "bf16" else torch.float32)
    torch.manual_seed(0)
    plain, shape = network(name)
    example = torch.randn(1, *shape)
    model = attach_heads(
        plain, after=suggest_exits(plain, example, count), num_classes=_classes(plain, example), example=example
    )
    last = options.channels_last
    dense: Any = plain.to(device=device, dtype=kind)
    if last:
        dense = dense.to(memory_format=torch.channels_last)
    if mode == "compiled":
        dense = torch.compile(dense, dynamic=False)
    settings: dict[str, Any] = {"device": device, "dtype": options.dtype, "channels_last": last}
    shared = Predictor(model, policy_for("uniform", count + 1), compile=mode == "compiled", **settings)
    for batch_size in map(int, options.batch_sizes.split(",")):
        total = max(batch_size, min(options.images, batch_size * 64 if device == "cpu" else options.images))
        images = torch.randn(total, *shape, device=device, dtype=kind)
        if last:
            images = images.contiguous(memory_format=torch.channels_last)
        for mix in options.mixes.split(","):
            predictor = shared.with_policy(policy_for(mix, count + 1))
            predictor.batch_size = batch_size
            with torch.inference_mode():
                measured = compare(dense, predictor, images, batch_size, device)
            yield {
                "device": options.device_name,
                "model": name,
                "exits": count,
                "mix": mix,
                "batch_size": batch_size,
                "mode": mode,
                "dtype": options.dtype,
                "images": total,
            } | measured


def compare(dense: Any, predictor: Predictor, images: Tensor, batch_size: int, device: str) -> Row:
    """The plain network and the predictor, by turns, and what stages and heads alone would take."""
    total = len(images)

    def run_dense() -> None:
        for start in range(0, total, batch_size):
            dense(images[start : start + batch_size])

    run_dense()
    decisions = predictor(images)
    predictor(images)
    seconds = segment_seconds(predictor, images, batch_size, device)
    reach = 1 - np.concatenate([[0.0], np.cumsum(decisions.exit_shares)[:-1]])
    ideal = float(total / batch_size * (reach @ seconds))
    pairs = np.array([(clocked(run_dense, device), clocked(lambda: predictor(images), device)) for _ in range(ROUNDS)])
    theirs, ours = np.median(pairs, axis=0).tolist()
    low, middle, high = np.quantile(pairs[:, 0] / pairs[:, 1], [0.25, 0.5, 0.75]).tolist()
    return {
        "dense_per_second": total / theirs,
        "per_second": total / ours,
        "speedup": middle,
        "speedup_low": low,
        "speedup_high": high,
        "possible": theirs / ideal,
        "reached": ideal / ours,
    }


def _classes(plain: nn.Module, example: Tensor) -> int:
    with torch.inference_mode():
        return int(plain(example).shape[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", default="resnet18_cifar")
    parser.add_argument("--exits", default="4", help="numbers of auxiliary exits")
    parser.add_argument("--batch-sizes", default="1,64")
    parser.add_argument("--modes", default="eager")
    parser.add_argument("--mixes", default="uniform,early,never")
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    options.dtype = options.dtype or ("bf16" if on_gpu else "fp32")
    options.channels_last = on_gpu
    options.device_name = torch.cuda.get_device_name() if on_gpu else "cpu"
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.backends.cudnn.benchmark = on_gpu
    made = provenance("numpy", "torch", "torchvision", "timm", folder=ROOT) | {"threads": str(torch.get_num_threads())}
    rows: list[Row] = []
    for name in options.models.split(","):
        for count in map(int, options.exits.split(",")):
            for mode in options.modes.split(","):
                for row in measure(options, name, count, mode):
                    rows.append({**row, **made})
                    print(
                        f"{name} {count} exits, {row['mix']}, batch {row['batch_size']}, {mode}: {row['speedup']:.3f}x"
                        f" ({row['speedup_low']:.3f} to {row['speedup_high']:.3f}), possible {row['possible']:.3f},"
                        f" reached {row['reached']:.1%}, {row['per_second']:.0f}/s",
                        flush=True,
                    )
                    _write(options.output or ROOT / f"results/runtime_{options.device}.csv", rows)


def _write(path: Path, rows: list[Row]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: f"{cell:.4f}" if isinstance(cell, float) else cell for name, cell in row.items()} for row in rows
    )
    write_text(path, text.getvalue())


if __name__ == "__main__":
    main()
