"""How much of the possible speed-up the predictor reaches, beside the full network, on this machine.

    python benchmarks/runtime.py --device cpu  --models resnet18_cifar --batch-sizes 1,64 --images 512
    python benchmarks/runtime.py --device cuda --models convnext_tiny,resnet50 --batch-sizes 256,1024,2048
    python benchmarks/runtime.py --device cpu --models minilm --batch-sizes 64 --mixes never --images 128 --rounds 28

Random weights; samples leave at random, so that the mix of exits is what the row says: uniform, early (most leave
early), or never (every head and score is evaluated and no sample leaves early). `speedup` is the full network's time
over the predictor's, interleaved, medians with quartiles over rounds; `reached` is the time that stages and heads alone
would take for the exits taken, each timed at the full batch size in the same round, over the predictor's time;
`heads_share` is the time of the auxiliary heads over the full network's. On a CPU heads are timed where they run,
between the stages, since they find the caches full of other data there. Single samples on a CPU are timed one by one:
the full network, the predictor and the stages in all orders in turn, since each finds what the one before has left in
the caches. Compiled or replayed as CUDA graphs (the full network is too), the scores are part of the stages and timed
with them. The speed of a shared machine varies: few images in many rounds, as in the last line above, bring what is
compared closer together. Writes results/runtime_<device>.csv. `benchmarks/before_after.py` compares two checkouts.
"""

import argparse
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
from alight.engine.backends.torch.prepare import graphed, placed
from alight.engine.predictor import Predictor
from alight.engine.settings import RunSettings
from alight.files import write_rows
from alight.networks.attach import attach_heads
from alight.networks.multi_exit import advance, read
from alight.policies.policy import Lottery, Policy, Threshold
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
ROUNDS = 7
WALKS = 3  # of one batch through all stages in every round
TOKENS = 32  # of a text
Row = dict[str, str | float | int]


def network(name: str, tokens: int = TOKENS) -> tuple[nn.Module, Any]:
    """Return a full network, and one random input as it takes it."""
    if name == "minilm":
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
        text = torch.randint(1000, 20_000, (1, tokens))
        full = BertForSequenceClassification(BertConfig(num_labels=77, **sizes))
        return full.eval(), {"input_ids": text, "attention_mask": torch.ones_like(text)}
    if name == "resnet18_cifar":
        from alight.networks.zoo import ResNet

        return ResNet(num_classes=100).eval(), torch.randn(1, 3, 32, 32)
    import timm
    from torchvision.models import resnet50

    full = resnet50() if name == "resnet50" else timm.create_model(name, num_classes=1000)
    return full.eval(), torch.randn(1, 3, 224, 224)


def random_inputs(example: Any, total: int, settings: RunSettings) -> State:
    """Return so many random inputs like the example, where and as the network takes them."""
    parts = list(example.values()) if isinstance(example, dict) else [example]
    kind = settings.dtype and getattr(torch, settings.dtype)

    def drawn(part: Tensor) -> Tensor:
        shape = (total, *part.shape[1:])
        if part.is_floating_point():
            return torch.randn(shape, device=settings.device, dtype=kind)
        return torch.randint(1000, 20_000, shape) if part.max() > 1 else torch.ones(shape, dtype=part.dtype)

    return placed(tuple(map(drawn, parts)), torch.device(settings.device), settings)


def with_settings(network: nn.Module, settings: RunSettings) -> Any:
    """Return the full network on its device, in its dtype and memory layout."""
    network = network.to(device=settings.device, dtype=settings.dtype and getattr(torch, settings.dtype))
    return network.to(memory_format=torch.channels_last) if settings.channels_last else network


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
    for open_index, part in enumerate(backend.stages):
        if device == "cuda" or backend.settings.compile:
            run = partial(backend.runs[open_index], *carried)
            repeat = max(3, int(0.03 / max(clocked(run, device), 1e-6)))
            found.append((clocked(partial(_again, run, repeat), device) / repeat, 0.0))
            carried = run()[0]
        else:
            start = time.perf_counter()
            for stage in part.stages:
                carried = advance(stage, carried)
            middle = time.perf_counter()
            read(part.head, carried)
            found.append((middle - start, time.perf_counter() - middle))
    return np.array(found)


def _again(work: Callable[[], object], count: int) -> None:
    for _ in range(count):
        work()


def measure(options: argparse.Namespace, name: str, count: int, mode: str) -> Iterator[Row]:
    device, settings = options.device, options.settings
    torch.manual_seed(0)
    backbone, example = network(name)
    model = attach_heads(backbone, after=count, example=example)
    full = with_settings(backbone, settings)
    if mode == "compiled":
        full = torch.compile(full, dynamic=False)
    shared = Predictor(model, policy_for("uniform", count + 1), settings=replace(settings, compile=mode == "compiled"))
    for batch_size in map(int, options.batch_sizes.split(",")):
        if mode == "graphs":  # each for batches of one size
            shared = Predictor(model, shared.policy, batch_size=batch_size, settings=replace(settings, graphs=True))
            (full,) = graphed([backbone], torch.device(device), batch_size)
        total = max(batch_size, min(options.images, batch_size * 64 if device == "cpu" else options.images))
        inputs = random_inputs(example, total, settings)
        for mix in options.mixes.split(","):
            predictor = shared.with_policy(policy_for(mix, count + 1))
            predictor.batch_size = batch_size
            with torch.inference_mode():
                measured = compare(full, predictor, inputs, model.input_names, batch_size, device, options.rounds)
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
    full: Any, predictor: Predictor, inputs: State, names: Sequence[str], batch_size: int, device: str, rounds: int
) -> Row:
    """Compare the full network and the predictor, interleaved, and what stages and heads alone would take."""
    parts = in_parts(inputs, batch_size)

    def run_full(batch: State) -> None:
        full(**dict(zip(names, batch, strict=True))) if names else full(*batch)

    for part in parts[:8]:
        run_full(part)
    exits = predictor(inputs).exits
    seconds = interleaved_timings if device == "cpu" and batch_size == 1 else by_rounds
    timed = [seconds(run_full, predictor, parts, inputs, exits, device, turn) for turn in range(rounds)]
    theirs, ours, ideal, heads = np.array(timed).T
    return speeds(len(inputs[0]), theirs, ours, ideal) | {"heads_share": float(np.median(heads / theirs))}


def in_parts(inputs: State, batch_size: int) -> list[State]:
    """Return the inputs in batches."""
    starts = range(0, len(inputs[0]), batch_size)
    return [tuple(each[start : start + batch_size] for each in inputs) for start in starts]


def speeds(total: int, theirs: np.ndarray, ours: np.ndarray, ideal: np.ndarray) -> Row:
    """Return the columns of a comparison, from seconds per round for so many samples.

    `theirs` are the full network's, `ours` the predictor's, `ideal` those of stages and heads alone.
    """
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
    }


def described(row: Row) -> str:
    """Return the speeds of a row in words."""
    return (
        f"{row['speedup']:.3f}x ({row['speedup_low']:.3f} to {row['speedup_high']:.3f}),"
        f" possible {row['possible']:.3f},"
        f" reached {row['reached']:.1%} ({row['reached_low']:.1%} to {row['reached_high']:.1%}),"
        f" {row['per_second']:.0f}/s"
    )


Seconds = tuple[float, float, float, float]  # of the full network, the predictor, stages and heads alone, heads alone


def by_rounds(
    full: Callable[[State], None],
    predictor: Predictor,
    parts: Sequence[State],
    inputs: State,
    exits: np.ndarray,
    device: str,
    turn: int,
) -> Seconds:
    """Return seconds of all samples by the full network, by the predictor, and by the stages, from some batches."""

    def full_pass() -> None:
        for part in parts:
            full(part)

    passes: list[Callable[[], object]] = [full_pass, partial(predictor, inputs)]
    taken = {index: clocked(passes[index], device) for index in (turn % 2, 1 - turn % 2)}
    walks = [
        stage_seconds(predictor, parts[index % len(parts)], device) for index in range(1 if device == "cuda" else WALKS)
    ]
    alone = reaching(exits, len(walks[0]))[:, None] / len(parts[0][0]) * np.median(walks, axis=0)
    return taken[0], taken[1], float(alone.sum()), float(alone[:-1, 1].sum())


def reaching(exits: np.ndarray, stages: int) -> np.ndarray:
    """Return how many samples reach every stage."""
    return np.array([(exits >= index).sum() for index in range(stages)])


def interleaved_timings(
    full: Callable[[State], None],
    predictor: Predictor,
    parts: Sequence[State],
    inputs: State,
    exits: np.ndarray,
    device: str,
    turn: int,
) -> Seconds:
    """Return seconds of sample after sample, each by the full network, by the predictor and through every stage."""
    auxiliary = len(predictor.policy.costs) - 1  # heads

    def seconds(runner: int, index: int) -> list[float]:
        if runner == 0:
            return [clocked(partial(full, parts[index]), device)]
        if runner == 1:
            return [clocked(partial(predictor, parts[index], [index]), device)]
        alone = stage_seconds(predictor, parts[index], device)[: exits[index] + 1]
        return [alone.sum(), alone[:auxiliary, 1].sum()]

    rounds, orders = [], [*permutations(range(3))]
    for index in range(len(parts)):
        taken = {runner: seconds(runner, index) for runner in orders[(index + turn) % len(orders)]}
        rounds.append([*taken[0], *taken[1], *taken[2]])
    theirs, ours, ideal, heads = np.array(rounds).sum(axis=0).tolist()
    return theirs, ours, ideal, heads


def device_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that benchmarks of a device share; `parsed` completes them."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", default="resnet18_cifar")
    parser.add_argument("--batch-sizes", default="64")
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--dtype", help="default: bf16 on a GPU, else fp32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    return parser


def parsed(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return the options with their settings, and what the rows say of the machine."""
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    options.dtype = options.dtype or ("bf16" if on_gpu else "fp32")
    options.device_name = torch.cuda.get_device_name() if on_gpu else "cpu"
    options.settings = RunSettings(options.device, options.dtype, channels_last=on_gpu)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.backends.cudnn.benchmark = on_gpu
    versions = provenance("numpy", "torch", "torchvision", "timm", folder=ROOT)
    return options, versions | {"threads": str(torch.get_num_threads())}


def main() -> None:
    parser = device_parser(__doc__)
    parser.add_argument("--exits", default="4", help="numbers of auxiliary exits")
    parser.add_argument("--modes", default="eager", help="of eager, compiled, graphs")
    parser.add_argument("--mixes", default="uniform,early,never")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.set_defaults(batch_sizes="1,64")
    options, machine = parsed(parser)
    rows: list[Row] = []
    for name in options.models.split(","):
        for count in map(int, options.exits.split(",")):
            for mode in options.modes.split(","):
                for row in measure(options, name, count, mode):
                    rows.append({**row, **machine})
                    case = f"{name} {count} exits, {row['mix']}, batch {row['batch_size']}, {mode}"
                    print(f"{case}: {described(row)}", flush=True)
                    write_rows(options.output or ROOT / f"results/runtime_{options.device}.csv", rows)


if __name__ == "__main__":
    main()
