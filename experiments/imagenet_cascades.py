"""Cascades of pretrained ImageNet networks against each alone, on multiply-adds and on milliseconds of two cores.

    python experiments/imagenet_record.py DATA MODELS MOBILENETS --output imagenet.npz
    python experiments/imagenet_cascades.py imagenet.npz time DATA MODELS MOBILENETS   # 2 minutes on two idle cores
    python experiments/imagenet_cascades.py imagenet.npz sweep                         # 10 minutes on one core

`time` writes results/imagenet_networks.csv: what each network takes for an image, from its bytes to its answer, and
what the cascade takes that `sweep` chooses, run beside the network that it replaces. `sweep` writes
results/imagenet_cascades.csv; its splits are kept beside the recording, so that it may be stopped. The 5,000 images
are split 20 times. One half chooses among five networks, their order and thresholds, for budgets of 40 to 100 % of
EfficientNet-lite2, by `choose_members` and `eero`; every pair of networks gets the threshold that spends the budget,
which needs no labels. The other half tests. Rows "as accurate as NAME" take the smallest budget at which the first
half is as accurate as NAME alone, which the other half then tests too.
"""

import argparse
import csv
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
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
NETWORKS, CASCADES = (ROOT / "results" / f"imagenet_{name}.csv" for name in ("networks", "cascades"))
REFERENCE = "lite2"
MATCHED = ("lite1", "lite2", "resnet50")  # the most accurate, the largest EfficientNet, the largest
SHARES = (0.4, 0.5, 0.6, 0.7, 0.85, 1.0)  # of the reference's cost
SPLITS = 20
STRIDE, ROUNDS = 20, 5  # every 20th image is timed, in so many runs
UNITS = {"MACs": "multiply-adds", "ms": "ms, two cores"}
CANDIDATES = ("v1-0.5@160 int8", "v2@224 int8", "lite0", "lite1", "lite2")  # that are chosen from
SPENDING = partial(calibrate.eero, spend_all=True)
Row = dict[str, Any]
Members = tuple[int, ...]
Fit = Callable[[Costs, float, HeadOutputs], tuple[Policy, Members]]


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, none where it does not exist."""
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def member_costs(outputs: HeadOutputs, unit: str, recording: Path) -> Costs:
    """Return the costs of every network alone."""
    if unit == "ms":
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
    candidates = [outputs.exits.index(name) for name in CANDIDATES]
    found = choose_members(taken(costs, tuple(candidates)), Amount(budget), outputs.at_exits(candidates))
    return tuple(candidates[index] for index in found)


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
        waiting, is_choice = [*MATCHED], name.startswith("chosen")
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
    for unit in options.units:
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
    write_rows(CASCADES, [{**row, **told} for row in found])


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
    for share in SHARES:
        members = chosen(costs, share * costs.heads[reference], half)
        policy = fitted(SPENDING, costs, share * costs.heads[reference], half, members)
        if replay(policy, half.at_exits(members)).accuracy(half.truth()) >= half.correct()[:, reference].mean():
            break
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recording", type=Path)
    commands = parser.add_subparsers(required=True)
    timing = commands.add_parser("time")
    for name in ("data", "models", "mobilenets"):
        timing.add_argument(name, type=Path)
    timing.set_defaults(run=measure)
    sweeping = commands.add_parser("sweep")
    sweeping.add_argument("--units", nargs="+", choices=UNITS, default=[*UNITS])
    sweeping.add_argument("--splits", type=int, default=SPLITS)
    sweeping.set_defaults(run=sweep)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
