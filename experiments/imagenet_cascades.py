"""Cascades of pretrained ImageNet networks against each alone: multiply-adds, milliseconds of two cores and of a GPU.

    python experiments/imagenet_record.py DATA MODELS MOBILENETS --output imagenet.npz
    python experiments/imagenet_cascades.py imagenet.npz time DATA MODELS MOBILENETS   # 2 minutes on two idle cores
    PYTHONPATH=src:benchmarks python experiments/imagenet_cascades.py gpu.npz device DATA MODELS   # 2 minutes, H200
    python experiments/imagenet_cascades.py imagenet.npz sweep                         # 10 minutes on one core
    python experiments/imagenet_cascades.py results/recordings exits                   # a minute

`time` writes results/imagenet_networks.csv: what each network takes for an image, from its bytes to its answer, and
what the cascade takes that `sweep` chooses, run beside the network that it replaces. `device` writes
results/imagenet_cuda.csv: networks of torch in half precision, whose pixels lie on the GPU, each alone in the fastest
of four ways (eager or compiled, launched or as one CUDA graph with its preprocessing), and cascades as a `Predictor`
runs them. It makes a recording there, in the same precision: half of the images calibrate, the others test. `sweep`
writes
results/imagenet_cascades.csv; its splits are kept beside the recording, so that it may be stopped. The 5,000 images
are split 20 times. One half chooses among five networks, their order and thresholds, for budgets of 40 to 100 % of
EfficientNet-lite2, by `choose_members` and `eero`; every pair of networks gets the threshold that spends the budget,
which needs no labels. The other half tests. Rows "as accurate as NAME" take the smallest budget at which the first
half is as accurate as NAME alone, which the other half then tests too.

`exits` compares exits inside a network with a smaller network before it, at equal FLOPs: results/exits_or_cascade.csv.
No ImageNet network with trained exits is at hand, so these are networks for CIFAR-100 that ship as recordings: a
ResNet-18 and an MSDNet. 20 splits, as above.
"""

import argparse
import csv
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import numpy as np

import alight
from alight import Costs, HeadOutputs, Policy, calibrate, replay
from alight.calibrate import choose_members, combined
from alight.costs import Amount
from alight.errors import BudgetTooSmall
from alight.files import write_rows
from alight.policies.policy import ExitAt
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
NETWORKS, CASCADES, CUDA = (ROOT / "results" / f"imagenet_{name}.csv" for name in ("networks", "cascades", "cuda"))
EXITS = ROOT / "results" / "exits_or_cascade.csv"
REFERENCE = "lite2"
MATCHED = ("lite1", "lite2", "resnet50")  # the most accurate, the largest EfficientNet, the largest
SHARES = (0.4, 0.5, 0.6, 0.7, 0.85, 1.0)  # of the reference's cost
SPLITS = 20
STRIDE, ROUNDS = 20, 5  # every 20th image is timed, in so many runs
UNITS = {"MACs": "multiply-adds", "ms": "ms, two cores", "H200": "ms, H200, batches of 32"}
CANDIDATES = ("v1-0.5@160 int8", "v2@224 int8", "lite0", "lite1", "lite2")  # that are chosen from
SPENDING = partial(calibrate.eero, spend_all=True)
Recorded = tuple[str, int | None]  # a recording, and one of its exits, or all
SMALL, LARGE = ("msdnet_joint_0", -1), ("resnet18_frozen_0", -1)
CONTENDERS: dict[str, list[Recorded]] = {
    "exits on the trained network": [("resnet18_frozen_separable_0", None)],
    "exits, trained together": [("resnet18_mixed_distilled_0", None)],
    "cascade: MSDNet, ResNet-18": [SMALL, LARGE],
    "cascade: MSDNet with exits, ResNet-18": [(SMALL[0], None), LARGE],
}
COMPARED = (0.15, 0.2, 0.3, 0.4, 0.5, 0.7)  # of the FLOPs of the ResNet-18 alone
Row = dict[str, Any]
Members = tuple[int, ...]
Fit = Callable[[Costs, float, HeadOutputs], tuple[Policy, Members]]


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, none where it does not exist."""
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def member_costs(outputs: HeadOutputs, unit: str, recording: Path) -> Costs:
    """Return the costs of every network alone."""
    if unit == "H200":
        on_gpu = {row["contender"]: float(row["ms"]) for row in read_rows(CUDA) if row["batch_size"] == "32"}
        costs = [on_gpu[name] for name in outputs.exits]
        unit = "ms"
    elif unit == "ms":
        rows = {row["network"]: float(row["ms"]) for row in read_rows(NETWORKS) if row["run"] == "alone"}
        costs = [rows[name] for name in outputs.exits]
    else:
        counted = json.loads(recording.with_suffix(".json").read_text())
        costs = [counted[name] / 2 for name in outputs.exits]
    return Costs([0.0] * len(costs), costs, unit, range(len(costs)))


def taken(costs: Costs, members: Members) -> Costs:
    """Return the costs of some networks, in this order."""
    return Costs([0.0] * len(members), costs.heads[[*members]], costs.unit, range(len(members)))


def fitted(method: Callable[..., Policy], costs: Costs, budget: float, table: HeadOutputs, members: Members) -> Policy:
    """Return the policy of some networks for a budget, or for the most that they can spend."""
    own = taken(costs, members)
    return method(own, Amount(min(budget, own.cumulative()[-1])), table.at_exits(members))


def of_pair(members: Members, costs: Costs, budget: float, labelled: HeadOutputs) -> tuple[Policy, Members]:
    """Return the policy of two networks."""
    return fitted(SPENDING, costs, budget, labelled, members), members


def chosen(costs: Costs, budget: float, outputs: HeadOutputs) -> Members:
    """Return the networks to call, of the candidates."""
    candidates = [outputs.exits.index(name) for name in CANDIDATES if name in outputs.exits]
    found = choose_members(taken(costs, tuple(candidates)), Amount(budget), outputs.at_exits(candidates))
    return tuple(candidates[index] for index in found)


def as_accurate(costs: Costs, half: HeadOutputs, pair: Members = ()) -> tuple[Policy, Members]:
    """Return the policy of the smallest budget that is as accurate as the reference, of two networks or of a choice."""
    reference = half.exits.index(REFERENCE)
    for share in SHARES:
        budget = share * costs.heads[reference]
        try:
            members = pair or chosen(costs, budget, half)
            policy = fitted(SPENDING, costs, budget, half, members)
        except BudgetTooSmall:
            continue
        if replay(policy, half.at_exits(members)).accuracy(half.truth()) >= half.correct()[:, reference].mean():
            break
    return policy, members


def ways(outputs: HeadOutputs) -> Iterator[tuple[str, Fit]]:
    """Yield names of what is compared, and how a policy is made of a budget."""
    for pair in combinations(range(outputs.num_exits), 2):
        yield " + ".join(outputs.exits[index] for index in pair), partial(of_pair, pair)
    found: dict[float, Members] = {}

    def of_choice(
        method: Callable[..., Policy], costs: Costs, budget: float, table: HeadOutputs
    ) -> tuple[Policy, Members]:
        if budget not in found:
            found[budget] = chosen(costs, budget, table)
        return fitted(method, costs, budget, table, found[budget]), found[budget]

    yield "chosen, margin", partial(of_choice, SPENDING)
    yield "chosen, agreement", partial(of_choice, combined(SPENDING, "agreement"))


def split_rows(outputs: HeadOutputs, costs: Costs, seed: int) -> Iterator[Row]:
    """Yield a row for every way and budget on one split, and for every network alone."""
    half, test = outputs.split(0.5, np.random.default_rng(seed))
    alone = costs.heads[outputs.exits.index(REFERENCE)]
    right = {name: (half.correct()[:, i].mean(), test.correct()[:, i].mean()) for i, name in enumerate(outputs.exits)}
    for name, cost in zip(outputs.exits, costs.heads, strict=True):
        yield {"networks": name, "budget": "alone", "accuracy": right[name][1], "spent": cost / alone, "members": name}
    for name, fit in ways(outputs):
        waiting, is_choice = [each for each in MATCHED if each in right], name.startswith("chosen")
        for share in SHARES:
            if is_choice and not waiting:
                break  # a choice takes a second
            try:
                policy, members = fit(costs, share * alone, half)
            except BudgetTooSmall:
                continue
            called = " + ".join(outputs.exits[index] for index in members)
            decisions, own = replay(policy, test.at_exits(members)), replay(policy, half.at_exits(members))
            spent, accuracy = decisions.mean_cost / alone, decisions.accuracy(test.truth())
            row = {"networks": name, "accuracy": accuracy, "spent": spent, "members": called}
            if not is_choice:
                yield {**row, "budget": f"{share:.0%}"}
            for other in [*waiting]:
                if own.accuracy(half.truth()) >= right[other][0]:
                    waiting.remove(other)
                    of_other = alone / costs.heads[outputs.exits.index(other)]
                    lost = {"difference": accuracy - right[other][1], "of_matched": spent * of_other}
                    yield {**row, "budget": f"as accurate as {other}", **lost}


def summary(rows: list[Row], unit: str) -> Iterator[Row]:
    """Yield means over the splits, and between which values 95 % of the splits are."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["networks"], row["budget"]].append(row)
    for (networks, budget), found in groups.items():
        usual = max({row["members"] for row in found}, key=[row["members"] for row in found].count)
        made: Row = {"unit": UNITS[unit], "networks": networks, "budget": budget, "splits": len(found), "mostly": usual}
        for name in ("accuracy", "spent", "difference", "of_matched"):
            values = np.array([row[name] for row in found if name in row])
            empty = not len(values)
            made[name] = "" if empty else f"{values.mean():.4f}"
            low, high = (0, 0) if empty else np.quantile(values, [0.025, 0.975])
            made |= {f"{name}_low": "" if empty else f"{low:.4f}", f"{name}_high": "" if empty else f"{high:.4f}"}
        yield made


def sweep(options: argparse.Namespace) -> None:
    """Write the table of all ways, budgets and units."""
    outputs, done = HeadOutputs.load(options.recording), options.recording.with_suffix(".rows.jsonl")
    done.touch()
    every, of_torch = outputs, [index for index, name in enumerate(outputs.exits) if name.startswith("lite")]
    for unit in options.units:
        outputs = every.at_exits(of_torch) if unit == "H200" else every  # the networks that ran there
        costs = member_costs(outputs, unit, options.recording)
        known = [json.loads(line) for line in done.read_text().splitlines()]
        for seed in sorted({*range(options.splits)} - {row["seed"] for row in known if row["unit"] == unit}):
            rows = [{**row, "unit": unit, "seed": seed} for row in split_rows(outputs, costs, seed)]
            with done.open("a") as file:  # a run that was stopped goes on here
                file.write("".join(json.dumps(row) + "\n" for row in rows))
            print(unit, seed, flush=True)
    known = [json.loads(line) for line in done.read_text().splitlines()]
    told = provenance("numpy", folder=ROOT)
    found = [row for unit in UNITS for row in summary([each for each in known if each["unit"] == unit], unit)]
    made = {row["unit"] for row in found}
    others = [row for row in read_rows(CASCADES) if row["unit"] not in made]  # as they were measured
    write_rows(CASCADES, [*others, *({**row, "images": len(every), **told} for row in found)])


def measure(options: argparse.Namespace) -> None:
    """Time all networks, then the chosen cascade beside the reference."""
    from imagenet_networks import images
    from imagenet_record import PIXELS, networks

    outputs = HeadOutputs.load(options.recording)
    chain = alight.cascade(networks(options.models, options.mobilenets), image_size=PIXELS)
    timed = np.arange(0, len(outputs), STRIDE)
    drawn, labels = zip(*islice(images(options.data), 0, None, STRIDE), strict=True)
    pixels = np.stack(drawn)
    told = provenance("numpy", "onnxruntime", "ai-edge-litert", folder=ROOT)
    rows: list[Row] = []
    timings = alight.time_stages(chain, pixels[:1], 1, repeats=20, warmup=3, progress=False)
    for name, values in zip(chain.exits, (timings.stages + timings.heads).T, strict=True):
        low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
        accuracy = float(outputs.correct()[:, outputs.exits.index(name)].mean())
        spread = {"ms": f"{middle:.2f}", "ms_low": f"{low:.2f}", "ms_high": f"{high:.2f}"}
        rows.append({"network": name, "run": "alone", "accuracy": f"{accuracy:.4f}", **spread, "share": "", **told})
    write_rows(NETWORKS, rows)
    costs = member_costs(outputs, "ms", options.recording)
    others, reference = np.setdiff1d(np.arange(len(outputs)), timed), outputs.exits.index(REFERENCE)
    half, test = outputs.take(others), outputs.take(timed)
    policy, members = as_accurate(costs, half)
    whole = ExitAt(costs=(costs.heads[reference],), open_exits=(reference,), num_exits=len(outputs.exits))
    short = chain.take(members)
    name = " + ".join(short.exits)
    runs = {
        name: alight.Predictor(short, replace(policy, fingerprint=""), batch_size=1),
        REFERENCE: alight.Predictor(chain, whole, batch_size=1),
    }
    taken_times, answers = defaultdict(list), {}
    for _ in range(ROUNDS):
        for each, predictor in runs.items():
            start = time.perf_counter()
            answers[each] = predictor(pixels)
            taken_times[each].append(1e3 * (time.perf_counter() - start) / len(pixels))
    same = replay(policy, test.at_exits(members))
    assert (answers[name].predictions == same.predictions).mean() > 0.99
    shares = np.array(taken_times[name]) / np.array(taken_times[REFERENCE])
    for each, times in taken_times.items():
        low, middle, high = np.min(times), np.median(times), np.max(times)
        right = f"{(answers[each].predictions == np.array(labels)).mean():.4f}"
        share_text = f"{np.median(shares):.3f}" if each == name else "1.000"
        spread = {"ms": f"{middle:.2f}", "ms_low": f"{low:.2f}", "ms_high": f"{high:.2f}", "share": share_text}
        rows.append(
            {"network": each, "run": f"{len(pixels)} images, one at a time", "accuracy": right, **spread, **told}
        )
    write_rows(NETWORKS, rows)


def device(options: argparse.Namespace) -> None:
    """Time networks alone and cascades on a GPU, batch size by batch size."""
    import torch
    from imagenet_networks import load_images
    from runtime_cuda import compile_always

    from alight.engine.backends import torch as stages

    torch.backends.cudnn.benchmark = True
    compile_always()
    stages.compiled_stage = compiled_once()  # type: ignore[attr-defined, assignment]
    began, told = time.perf_counter(), provenance("numpy", "torch", folder=ROOT)
    if options.device == "cuda":
        told["hardware"] = torch.cuda.get_device_name()
    settings = alight.RunSettings(options.device, options.dtype, channels_last=True)
    chain = torch_chain(options, settings)
    pixels, labels = load_images(options.data, options.limit)
    outputs = alight.record(chain, (pixels, labels), batch_size=250, progress=False)
    outputs.save(options.recording)
    seen = dict(zip(outputs.exits, (1 - outputs.risks()).round(4).tolist(), strict=True))
    print(f"{time.perf_counter() - began:.0f} s: {len(labels)} images recorded, {seen}", flush=True)
    order = np.random.default_rng(0).permutation(len(labels))
    half, test = order[: len(labels) // 2], order[len(labels) // 2 :]
    test = np.tile(test, -(-options.images // len(test)))  # few images again and again fill as many batches
    data = (torch.from_numpy(pixels[test]).to(options.device), labels[test])
    rows: list[Row] = []
    for batch_size in map(int, options.batch_sizes.split(",")):
        if time.perf_counter() - began > options.seconds:
            break
        for row in device_rows(options, chain, (outputs.take(half), outputs.take(test)), data, batch_size):
            rows.append({**row, "dtype": options.dtype, "recorded": len(labels), **told})
            print(f"{time.perf_counter() - began:.0f} s", {key: row[key] for key in row if key not in told}, flush=True)
        write_rows(options.output, rows)


def chained(folder: Path, parts: Sequence[Recorded]) -> tuple[HeadOutputs, Costs]:
    """Return the outputs and costs of recorded networks in a chain, each with all of its exits or with one."""
    tables, costs = [], []
    for name, exit_index in parts:
        table, cost = HeadOutputs.load(folder / name / "test.npz"), Costs.load(folder / name / "costs.json")
        kept = [*range(len(cost))] if exit_index is None else [len(cost) + exit_index]
        tables.append(table.at_exits(kept))
        costs.append(cost.at_exits(kept))
    assert all(np.array_equal(each.truth(), tables[0].truth()) for each in tables)  # the same images
    columns: dict[str, Any] = {
        name: np.hstack([getattr(each, name) for each in tables]) for name in ("scores", "predictions")
    }
    spent: dict[str, Any] = {
        name: np.concatenate([getattr(each, name) for each in costs]) for name in ("stages", "heads")
    }
    owners = [index for index, each in enumerate(costs) for _ in range(len(each))]
    return HeadOutputs(**columns, labels=tables[0].truth()), Costs(**spent, members=owners)


def compare_exits(options: argparse.Namespace) -> None:
    """Write how accurate exits and cascades are for the same FLOPs."""
    full = chained(options.recording, [LARGE])[1].full
    rows, told = [], provenance("numpy", folder=ROOT)
    for name, parts in CONTENDERS.items():
        outputs, costs = chained(options.recording, parts)
        last = 1 - outputs.risks()[-1]
        for share in COMPARED:
            found = []
            for seed in range(SPLITS):
                half, test = outputs.split(0.5, np.random.default_rng(seed))
                try:
                    decisions = replay(SPENDING(costs, Amount(share * full), half), test)
                except BudgetTooSmall:
                    break
                found.append((decisions.accuracy(test.truth()), decisions.mean_cost / full))
            if found:
                accuracy, spent = np.array(found).T
                low, high = np.quantile(accuracy, [0.025, 0.975])
                row = {"contender": name, "budget": f"{share:.0%}", "splits": SPLITS, "accuracy": accuracy.mean()}
                row |= {"accuracy_low": low, "accuracy_high": high, "spent": spent.mean(), "last_alone": last}
                rows.append({**{key: _text(value) for key, value in row.items()}, **told})
    write_rows(EXITS, rows)


def _text(value: Any) -> Any:
    return f"{value:.4f}" if isinstance(value, float) else value


def torch_chain(options: argparse.Namespace, settings: Any) -> Any:
    """Return the cascade of all networks of torch for which there are weights, on their device."""
    import torch
    from imagenet_networks import CAFFE, LITE, SIZES, efficientnet_lite, folded, resnet50
    from imagenet_record import PIXELS, SEEN, USUAL

    from alight.engine.backends.torch.prepare import prepared

    members = []
    for name in (*SIZES, *["resnet50"] * (options.models / "package").exists()):
        network = efficientnet_lite(options.models, name) if name in SIZES else resnet50(options.models / "package")
        example = torch.zeros(2, 3, SIZES.get(name, 224), SIZES.get(name, 224))
        whole = folded(network, example)
        model = alight.attach_heads(whole, (), example=example, normalisation=LITE if name in SIZES else CAFFE)
        members.append(
            alight.Member(prepared(model, settings), name, crop=SEEN.get(name, USUAL), bicubic=True, settings=settings)
        )
    return alight.cascade(members, image_size=PIXELS)


def compiled_once() -> Callable[[int, Any], Callable[..., Any]]:
    """Return what compiles every network once for what is read of it, whatever the batch size."""
    from alight.engine.backends.torch.prepare import compiled_stage

    made: dict[Any, Callable[..., Any]] = {}

    def compiled(index: int, stage: Any) -> Callable[..., Any]:
        key = (id(stage.stages[0]), stage.reads)
        if key not in made:
            made[key] = compiled_stage(index, stage)
        return made[key]

    return compiled


class Alone:
    """One network from pixels to logits, in all ways in which one would run it."""

    def __init__(self, chain: Any, member: int, compiles: bool) -> None:
        from alight.engine.backends import Reads

        own = chain.members[member]
        backends = {
            name: own.backend((0,), replace(own.member.settings, compile=name == "compiled"), None).with_reads(
                [Reads(())]
            )
            for name in ("eager", *["compiled"] * compiles)
        }
        self.device = backends["eager"].device
        self.plain: dict[str, Callable[..., Any]] = {
            name: partial(self._run, each, chain.views[member]) for name, each in backends.items()
        }
        self.forward: Callable[..., Any] = self.plain["eager"]

    @staticmethod
    def _run(backend: Any, view: Any, pixels: Any) -> Any:
        return backend.runs[0](*backend.admit(view((pixels,))))[1]

    def ways(self, batch_size: int) -> dict[str, Callable[..., Any]]:
        """Return the ways to run batches of a size."""
        if self.device.type == "cpu":
            return self.plain
        from alight.engine.backends.torch.prepare import graphed

        captured = graphed([*self.plain.values()], self.device, batch_size)
        graphs = zip(self.plain, captured, strict=True)
        return self.plain | {f"{name} graphs".removeprefix("eager "): run for name, run in graphs}


def device_rows(
    options: argparse.Namespace, chain: Any, tables: tuple[HeadOutputs, HeadOutputs], data: Any, batch_size: int
) -> Iterator[Row]:
    """Yield a row for every network alone, and for two cascades that are as accurate as the reference."""
    import torch
    from instead_cuda import deciding, fastest, timed
    from runtime import clocked

    half, test = tables
    count = min(options.single if batch_size == 1 else options.images, len(test)) // batch_size * batch_size
    works: dict[str, Any] = {}
    with torch.inference_mode():
        for member, name in enumerate(chain.exits):
            works[name] = fastest(Alone(chain, member, options.compile), data, batch_size, count)
        taken = [
            min(clocked(partial(run, given[:count]), options.device) for _ in range(3))
            for run, given, _ in works.values()
        ]
    costs = Costs([0.0] * len(taken), 1e3 * np.array(taken) / count, "ms", range(len(taken)))
    on_gpu = options.device == "cuda"
    settings = alight.RunSettings(compile=options.compile, graphs=on_gpu)
    for pair in ((), tuple(map(chain.exits.index, ("lite0", REFERENCE)))):
        policy, members = as_accurate(costs, half, pair)
        name = " + ".join(chain.exits[index] for index in members)
        if len(members) > 1 and name not in works:
            predictor = alight.Predictor(
                chain.take(members), replace(policy, fingerprint=""), settings=settings, batch_size=batch_size
            )
            works[name] = deciding(predictor, test.at_exits(members), data, batch_size, options.single)
    works["full network"] = works.pop(REFERENCE)  # as others are compared with
    for row in timed(works, batch_size, count, options.rounds, options.device):
        if row["contender"] == "full network":
            row["contender"] = REFERENCE
        yield {**row, "ms": 1e3 / float(row["per_second"]), "share": 1 / float(row["speedup"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recording", type=Path)
    commands = parser.add_subparsers(required=True)
    timing = commands.add_parser("time")
    for name in ("data", "models", "mobilenets"):
        timing.add_argument(name, type=Path)
    timing.set_defaults(run=measure)
    gpu = commands.add_parser("device")
    for name in ("data", "models"):
        gpu.add_argument(name, type=Path)
    gpu.add_argument("--device", default="cuda")
    gpu.add_argument("--dtype", default="fp16")
    gpu.add_argument("--batch-sizes", default="256,32,1")
    gpu.add_argument("--limit", type=int, help="images that are loaded, for a rehearsal")
    gpu.add_argument("--images", type=int, default=4096, help="that are timed in batches")
    gpu.add_argument("--single", type=int, default=625, help="that are timed one by one")
    gpu.add_argument("--rounds", type=int, default=5)
    gpu.add_argument("--seconds", type=float, default=110.0, help="after which no further batch size is begun")
    gpu.add_argument("--no-compile", dest="compile", action="store_false")
    gpu.add_argument("--output", type=Path, default=CUDA)
    gpu.set_defaults(run=device)
    commands.add_parser("exits").set_defaults(run=compare_exits)
    sweeping = commands.add_parser("sweep")
    sweeping.add_argument("--units", nargs="+", choices=UNITS, default=[*UNITS])
    sweeping.add_argument("--splits", type=int, default=SPLITS)
    sweeping.set_defaults(run=sweep)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
