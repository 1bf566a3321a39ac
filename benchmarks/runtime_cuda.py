"""Early exit on a GPU beside the fastest full network, and beside what the stages alone would take.

    python benchmarks/runtime_cuda.py --models resnet18_cifar,resnet50 --batch-sizes 1,8,32,128,256,1024,2048
    python benchmarks/runtime_cuda.py --modes eager,compiled --seconds 500      # stops before the next case then

Random weights; samples leave at random, in exactly the shares of the mix (uniform, or early: most leave early). All is
timed interleaved, medians with quartiles over rounds, for the same images, which lie on the device:

- `best_full` is the fastest full network of eager, graphs, compiled, and compiled with graphs, and of four batches that
  are branches of one graph, so that they run concurrently; `speedup_over_best` is its time over that of the
  predictor, which decides on the device or the host, whichever it found to be faster (`decided`);
- `possible` is the same ratio for stages alone: the replayed graph of every stage with its head and scores at the full
  batch size, for the samples that reach it, one after the other; `reached` is their time over the predictor's, more
  than 1 where concurrent batches save more than decisions cost;
- `over_host` is the time of a predictor whose host decides (CUDA graphs of stages) over the predictor's.

Batches of 1 are single images, each waited for: their latency, median and 99th percentile, and that of the fastest full
network. Writes results/runtime_cuda.csv.
"""

import copy
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from runtime import ROOT, Row, clocked, device_parser, in_parts, network, parsed, policy_for, random_inputs, reaching
from torch import Tensor, nn

from alight.engine.backends import State
from alight.engine.backends import torch as stages
from alight.engine.backends.torch.captures import Captures
from alight.engine.backends.torch.prepare import compiled_stage, graphed, prepared
from alight.engine.predictor import Predictor
from alight.engine.settings import RunSettings
from alight.errors import AlightError
from alight.files import write_rows
from alight.networks.attach import attach_heads
from alight.planning.timing import as_planned

ROUNDS = 5
IMAGES = {1: 64, 8: 2048, 32: 4096, 64: 4096, 128: 8192, 256: 8192, 1024: 8192, 2048: 16384}
TOKENS = 64  # of a text
LARGEST_CONCURRENT = 512  # samples of a batch: larger ones fill a GPU
Work = Callable[[], object]


class Concurrent:
    """Batches that run concurrently, as branches of one CUDA graph."""

    batches = 4

    def __init__(self, run: Callable[..., Any], size: int) -> None:
        self.run, self.size, self.captures = run, size, Captures(0, self.batches)
        self.graph: Any = None

    def __call__(self, *inputs: Tensor) -> Any:
        """Return the logits of so many batches."""
        if len(inputs[0]) != self.batches * self.size:
            return self.run(*inputs)
        if self.graph is None:
            self.given = tuple(each.clone() for each in inputs)
            parts = in_parts(self.given, self.size)
            self.graph = self.captures.capture(partial(self._all, [partial(self.run, *part) for part in parts]))
        for there, each in zip(self.given, inputs, strict=True):
            there.copy_(each)
        self.graph.replay()
        return self.made.clone()

    def _all(self, works: list[Callable[[], Any]]) -> None:
        self.made = torch.cat(self.captures.run_concurrently(works))


class Full:
    """A full network, run in all ways in which one would."""

    def __init__(self, backbone: nn.Module, names: tuple[str, ...], compiles: bool) -> None:
        def forward(*batch: Any) -> Any:
            made = backbone(**dict(zip(names, batch, strict=True))) if names else backbone(*batch)
            return getattr(made, "logits", made)

        self.forward = forward
        self.compiled = torch.compile(forward, dynamic=None) if compiles else None

    def ways(self, batch_size: int) -> dict[str, Callable[..., Any]]:
        """Return the ways to run batches of a size."""
        plain = {"eager": self.forward} | ({"compiled": self._dynamic} if self.compiled else {})
        device = torch.device("cuda", 0)
        captured = graphed([*plain.values()], device, batch_size)
        ways = plain | {f"{name} graphs".removeprefix("eager "): run for name, run in zip(plain, captured, strict=True)}
        if 1 < batch_size <= LARGEST_CONCURRENT:
            ways |= {
                f"four {name} graphs".replace("eager ", ""): Concurrent(run, batch_size) for name, run in plain.items()
            }
        return ways

    def _dynamic(self, *batch: Any) -> Any:
        for each in batch:
            if len(each) > 1:
                torch._dynamo.maybe_mark_dynamic(each, 0)
        assert self.compiled is not None
        return self.compiled(*batch)


def parts_for(run: Callable[..., Any], inputs: State, batch_size: int) -> list[State]:
    """Return inputs as a way of the full network takes them: a batch, or those that run concurrently."""
    return in_parts(inputs, batch_size * getattr(run, "batches", 1))


def passes(run: Callable[..., Any], parts: list[State]) -> Work:
    """Return a pass over all batches; single images are waited for."""

    def work() -> None:
        for part in parts:
            logits = run(*part)
            if len(part[0]) == 1:
                logits.argmax().item()

    return work


def predicting(predictor: Predictor, parts: list[State], inputs: State, samples: Any) -> Work:
    """Return a pass of the predictor: all images at once, single ones one by one."""
    if len(parts[0][0]) > 1:
        return partial(predictor, inputs, samples)

    def work() -> None:
        for part, sample in zip(map(_as_given, parts), samples.tolist(), strict=True):
            predictor(part, [sample])

    return work


def _as_given(part: State) -> Any:
    """Return inputs as a user has them: one tensor by itself."""
    return part[0] if len(part) == 1 else part


def stage_seconds(predictor: Predictor) -> np.ndarray:
    """Return the seconds of the replayed graph of every stage."""
    found = []
    for run in predictor.backend.runs:  # type: ignore[attr-defined]
        replay = next(iter(run.captured.values())).graph.replay
        count = max(5, int(0.01 / max(clocked(replay, "cuda"), 1e-6)))
        found.append(clocked(partial(_again, replay, count), "cuda") / count)
    return np.array(found)


def _again(work: Work, count: int) -> None:
    for _ in range(count):
        work()


def compile_always() -> None:
    """Let torch compile again for every batch size: the full network is compiled, or there is no row."""
    for name, value in {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}.items():
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, value)


def compiled_once() -> Callable[[int, Any], Callable[..., Any]]:
    """Return what compiles the stages of a network once, for all batch sizes and predictors."""
    made: dict[Any, Callable[..., Any]] = {}

    def compiled(index: int, stage: Any) -> Callable[..., Any]:
        return made.setdefault((index, stage.reads), compiled_stage(index, stage))

    return compiled


def measure(options: Any, name: str, modes: list[str]) -> Iterator[Row]:
    settings = options.settings
    torch.manual_seed(0)
    torch._dynamo.reset()  # it counts how often code was compiled, whatever the network, and gives up in the end
    backbone, example = network(name, TOKENS)
    model = prepared(attach_heads(backbone, after=options.exits, example=example), settings)
    stages.compiled_stage = compiled_once()  # type: ignore[attr-defined, assignment]
    whole = copy.deepcopy(backbone).to(device="cuda", dtype=getattr(torch, settings.dtype))
    full = Full(whole.to(memory_format=torch.channels_last), model.input_names, compiles="compiled" in options.full)
    for batch_size in map(int, options.batch_sizes.split(",")):
        if batch_size > options.largest.get(name, batch_size):
            continue
        inputs = random_inputs(example, IMAGES.get(batch_size, 8 * batch_size), settings)
        ways = full.ways(batch_size)
        works = {way: passes(run, parts_for(run, inputs, batch_size)) for way, run in ways.items()}
        with torch.inference_mode():
            taken = {way: min(clocked(work, "cuda") for _ in range(3)) for way, work in works.items()}
        best = min(taken, key=taken.__getitem__)
        for mode in modes:
            try:
                yield from cases(options, name, model, inputs, batch_size, mode, (best, ways[best]))
            except AlightError as error:
                print(f"{name}, batches of {batch_size}, {mode}: {error}", flush=True)
            gc.collect()  # predictors, whose rooms are large
            torch.cuda.empty_cache()


def cases(
    options: Any, name: str, model: Any, inputs: State, batch_size: int, mode: str, best: tuple[str, Any]
) -> Iterator[Row]:
    base = RunSettings("cuda", options.dtype, channels_last=True, compile=mode == "compiled")
    rule = policy_for("uniform", options.exits + 1)
    ours = Predictor(model, rule, settings=base, batch_size=batch_size)
    theirs = Predictor(model, rule, settings=replace(base, graphs=True, decide="host"), batch_size=batch_size)
    parts = in_parts(inputs, batch_size)
    for predictor in (ours, theirs):
        for _ in range(2):
            predictor(inputs) if batch_size > 1 else [predictor(part) for part in parts[:8]]
    never = theirs.with_policy(policy_for("never", options.exits + 1))  # captures every stage
    never(inputs if batch_size > 1 else parts[0])
    for mix in options.mixes.split(","):
        policy = policy_for(mix, options.exits + 1)
        samples = as_planned(policy, len(inputs[0]))
        pair = [each.with_policy(policy) for each in (ours, theirs)]
        exits = pair[0](inputs, samples).exits
        full = passes(best[1], parts_for(best[1], inputs, batch_size))
        works = [full, *(predicting(each, parts, inputs, samples) for each in pair)]
        with torch.inference_mode():
            rounds = np.array([_round(works, turn) for turn in range(options.rounds + 1)])[1:]
            alone = stage_seconds(theirs)
        ideal = float((reaching(exits, len(alone)) / batch_size * alone).sum())
        yield {
            "device": options.device_name,
            "model": name,
            "exits": options.exits,
            "mix": mix,
            "batch_size": batch_size,
            "mode": mode,
            "decided": "device" if "the device decides" in ours.decided_by else "host",
            "best_full": best[0],
            **_quartiles("speedup_over_best", rounds[:, 0] / rounds[:, 1]),
            "possible": float(np.median(rounds[:, 0])) / ideal,
            **_quartiles("reached", ideal / rounds[:, 1]),
            "over_host": float(np.median(rounds[:, 2] / rounds[:, 1])),
            "full_ms": 1e3 * float(np.median(rounds[:, 0])),
            "predictor_ms": 1e3 * float(np.median(rounds[:, 1])),
            **_latencies(best[1], pair[0], parts, samples),
            "dtype": options.dtype,
            "images": len(inputs[0]),
            "why": ours.decided_by,
        }


def _round(works: list[Work], turn: int) -> list[float]:
    order = [(turn + index) % len(works) for index in range(len(works))]
    taken = {index: clocked(works[index], "cuda") for index in order}
    return [taken[index] for index in range(len(works))]


def _quartiles(name: str, ratios: np.ndarray) -> Row:
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
    return {name: middle, f"{name}_low": low, f"{name}_high": high}


def _latencies(full: Any, predictor: Predictor, parts: list[State], samples: Any) -> Row:
    """Return milliseconds of one image, end to end: median and 99th percentile over many; nothing for batches."""
    if len(parts[0][0]) > 1:
        return dict.fromkeys(("full_p50_ms", "full_p99_ms", "predictor_p50_ms", "predictor_p99_ms"), "")
    found: Row = {}
    with torch.inference_mode():
        works: dict[str, list[Work]] = {
            "full": [passes(full, [part]) for part in parts],
            "predictor": [
                partial(predictor, _as_given(part), [each]) for part, each in zip(parts, samples.tolist(), strict=True)
            ],
        }
        for name, singles in works.items():
            taken = 1e3 * np.array([clocked(work, "cuda") for _ in range(5) for work in singles])
            found |= {f"{name}_p50_ms": float(np.median(taken)), f"{name}_p99_ms": float(np.quantile(taken, 0.99))}
    return found


def main() -> None:
    parser = device_parser(__doc__)
    parser.set_defaults(device="cuda", models="resnet18_cifar,resnet50,convnext_tiny,minilm", images=0)
    parser.set_defaults(batch_sizes="32,1,256,8,128,1024,2048")
    parser.add_argument("--exits", type=int, default=4, help="auxiliary exits (default: 4)")
    parser.add_argument("--modes", default="eager", help="of eager, compiled")
    parser.add_argument("--mixes", default="uniform,early")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--full", default="eager,compiled", help="ways of the full network; each also as CUDA graphs")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no further case is begun")
    options, machine = parsed(parser)
    compile_always()
    has_room = torch.cuda.get_device_properties(0).total_memory > 100e9  # for batches of 2,048 at 224 px
    options.largest = {} if has_room else {"resnet50": 1024, "convnext_tiny": 1024}
    rows: list[Row] = []
    began = time.perf_counter()
    for name in options.models.split(","):
        for row in measure(options, name, options.modes.split(",")):
            rows.append({**row, **machine})
            print(
                f"{time.perf_counter() - began:5.0f} s  {name} {row['mix']} batch {row['batch_size']} {row['mode']}:"
                f" {row['speedup_over_best']:.2f}x of {row['best_full']}, possible {row['possible']:.2f}, reached"
                f" {row['reached']:.2f}, {row['over_host']:.2f} over host; {row['decided']}, {row['full_ms']:.2f} /"
                f" {row['predictor_ms']:.2f} ms",
                flush=True,
            )
            write_rows(options.output or ROOT / "results/runtime_cuda.csv", rows)
            if time.perf_counter() - began > options.seconds:
                return


if __name__ == "__main__":
    main()
