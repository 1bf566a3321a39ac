"""Quantised exits beyond their speed: the same decisions everywhere, guarantees, size, start-up and memory.

    python experiments/edge_checks.py decisions WORK --state STATE      # 3 minutes on one core
    python experiments/edge_checks.py certificates WORK --state STATE --data DATA     # 4 minutes
    python experiments/edge_checks.py footprint WORK         # 1 minute
    python experiments/edge_checks.py asking WORK --state STATE   # 8 minutes on two cores

WORK was written by `edge.py prepare`. `decisions` runs an int8 folder with every exit open, at half of the FLOPs, on
the 2,000 images in Python, in batches and one by one, in C++, and in the HTTP service: results/edge_decisions.csv; a
sample is `near` if a score lies within 1e-5 of its threshold. `certificates` records 5,000 images by the same stages
once, calibrates with a guarantee on 1,000 draws of 1,000 and counts the draws whose policy breaks it on the others:
results/edge_certificates.csv. `footprint` starts each program anew, also on one core with 512 MiB:
results/edge_footprint.csv. `asking` times single images through three exits at which nobody leaves, beside the same
network in one piece, and in one piece with all heads, each in a process of its own, in turns, and then batches of 64 in
rounds: results/edge_asking.csv; without STATE and without a prepared WORK the weights and images are random, which take
as long.
"""

import argparse
import csv
import io
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from alight import HeadOutputs, Policy, Predictor, RunSettings, calibrate, record, replay
from alight.costs import Costs
from alight.data.preprocess import TensorSpec
from alight.engine.manifest import Manifest, checksum
from alight.files import write_rows
from alight.policies.policy import Threshold
from alight.provenance import provenance

ROOT = Path(__file__).parent.parent
FOLDER, CHECKED = "exits_onnxruntime_int8_0.025", "exits_onnxruntime_int8_half"
NEAR = 1e-5
DRAWS, CALIBRATION, RECORDED = 1000, 1000, 5000
LIMIT = 512 * 2**20  # bytes
ONE = RunSettings(threads=1)
ASKED = 400  # images that pass three exits
BATCHED, ROUNDS = 384, 7  # images in batches of 64, and how often
Row = dict[str, str | float | int]
Answers = tuple[np.ndarray, np.ndarray]  # labels and exits


def checked(work: Path, state: Path) -> Path:
    """Return the folder in int8 that is checked, made once: every exit open, at half of the FLOPs."""
    if (folder := work / CHECKED).exists():
        return folder
    import torch
    from cifar100_train import Job, load_result
    from edge import EXITS, IMAGES

    from alight import deploy, measure_costs

    torch.set_num_threads(1)
    model = load_result(Job(EXITS), state)
    with np.load(work / "calibration.npz") as file:
        data = file["images"], file["labels"]
    table = HeadOutputs.load(state / Job(EXITS).name / "result" / "test.npz")
    order = np.random.default_rng(0).permutation(len(table))[IMAGES : IMAGES + len(data[1])]  # as edge.py draws them
    costs = measure_costs(model, torch.zeros(1, 3, 32, 32), progress=False)
    policy = calibrate.certified_probability(calibrate.eero)(costs, "50%", table.take(order))
    print(deploy(model, data, folder, policy=policy, settings=ONE, progress=False), flush=True)
    return folder


def decisions(work: Path, state: Path) -> list[Row]:
    """Return a row for every way to run the int8 folder, beside Python in batches of 32."""
    from served_answers import as_png, ask_service

    with np.load(work / "images.npz") as file:
        pixels = file["images"]
    folder, samples = checked(work, state), np.arange(len(pixels))
    predictor = Predictor.load(folder, settings=ONE, batch_size=32)
    policy = predictor.policy
    first = predictor(pixels, samples)
    near = near_a_threshold(policy, record(predictor.backend, pixels, progress=False).scores)
    found: dict[str, Answers] = {}
    alone = [predictor(pixels[row : row + 1], [row]) for row in range(len(pixels))]
    found["Python, one by one"] = (
        np.array([each.predictions[0] for each in alone]),
        np.array([each.exits[0] for each in alone]),
    )
    for batch in (1, 64):
        found[f"C++, batches of {batch}"] = in_cpp(work, folder, pixels, batch)
    images = [as_png(image) for image in pixels]
    answers = ask_service(folder, folder / "policy.json", "images", images, ["--no-state"])
    found["service"] = np.array([each["index"] for each in answers]), np.array([each["exit"] for each in answers])
    rows: list[Row] = []
    for name, (labels, exits) in found.items():
        other = (labels != first.predictions) | (exits != first.exits)
        row: Row = {"engine": name, "samples": len(pixels), "exits_taken": len({*first.exits.tolist()})}
        row |= {
            "other_labels": int((labels != first.predictions).sum()),
            "other_exits": int((exits != first.exits).sum()),
        }
        rows.append(row | {"near": int((other & near).sum()), "different": int((other & ~near).sum())})
    return rows


def near_a_threshold(policy: Policy, scores: np.ndarray) -> np.ndarray:
    """Return which samples have a score that the last bits could move over its threshold."""
    assert isinstance(policy, Threshold)
    return np.asarray((np.abs(scores[:, :-1] - np.array(policy.thresholds)) <= NEAR).any(axis=1))


def in_cpp(work: Path, folder: Path, pixels: np.ndarray, batch: int) -> Answers:
    """Return what the program in C++ decides."""
    with tempfile.TemporaryDirectory() as temporary:
        np.save(f"{temporary}/images.npy", pixels)
        command = [*program(work), str(folder), f"{temporary}/images.npy", "--batch", str(batch), "--indices"]
        done = subprocess.run([*command, "--library", library()], capture_output=True, text=True, check=True)
    rows = [*csv.DictReader(io.StringIO(done.stdout))]
    names = Manifest.load(folder).exits
    return np.array([int(row["prediction"]) for row in rows]), np.array([names.index(row["exit"]) for row in rows])


def program(work: Path) -> list[str]:
    return [str(work / "cpp" / "alight_example")]


def library() -> str:
    import onnxruntime

    return str(next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so*")))


def certificates(work: Path, state: Path, data: Path) -> list[Row]:
    """Return how often guarantees of policies that were calibrated on the int8 stages are broken, in 1,000 draws."""
    with np.load(data / "test.npz") as file:
        order = np.random.default_rng(0).permutation(len(file["labels"]))[2000 : 2000 + RECORDED]
        pixels, labels = file["images"][order], file["labels"][order]
    predictor = Predictor.load(checked(work, state), settings=ONE)
    path = work / "int8_labelled.npz"
    if not path.exists():
        record(predictor.backend, (pixels, labels), batch_size=32, progress=False).save(path)
    table = HeadOutputs.load(path)
    costs = Costs.from_cumulative(predictor.policy.costs, predictor.policy.unit)
    rng = np.random.default_rng(1)
    costly, lossy = [], []
    for _ in range(DRAWS):
        drawn = rng.permutation(len(table))
        own, others = table.take(drawn[:CALIBRATION]), table.take(drawn[CALIBRATION:])
        spent = (
            replay(calibrate.certified_probability(calibrate.eero)(costs, "50%", own), others).mean_cost / costs.full
        )
        risk = calibrate.certified_risk(calibrate.eero, risk="excess_error", alpha=0.02)
        lost = float(others.correct()[:, -1].mean()) - replay(risk(costs, None, own), others).accuracy()
        costly.append(spent)
        lossy.append(lost)
    rows: list[Row] = []
    for name, values, limit in zip(("mean cost", "lost accuracy"), (costly, lossy), (0.5, 0.02), strict=True):
        found = np.array(values)
        row: Row = {"guarantee": name, "draws": DRAWS, "calibration": CALIBRATION, "others": len(table) - CALIBRATION}
        row |= {"broken": int((found > limit).sum()), "allowed": 0.05 * DRAWS, "mean": float(found.mean())}
        rows.append(row | {"largest": float(found.max()), "limit": limit})
    return rows


def footprint(work: Path) -> Iterator[Row]:
    """Yield size, start-up, time per image and memory of the int8 folder, in Python and C++, free and limited."""
    folder = work / FOLDER
    size = sum(path.stat().st_size for path in folder.iterdir())
    with np.load(work / "images.npz") as file, tempfile.TemporaryDirectory() as temporary:
        np.save(f"{temporary}/images.npy", file["images"][:500])
        ways = {
            "Python": [sys.executable, __file__, "one", str(folder), f"{temporary}/images.npy"],
            "C++": [*program(work), str(folder), f"{temporary}/images.npy", "--library", library()],
        }
        for name, command in ways.items():
            for limited in (False, True):
                about = {"engine": name, "one_core_512_mib": "yes" if limited else "no", "bytes": size}
                yield {**about, **started(command, limited)}


def started(command: list[str], limited: bool) -> Row:
    """Return seconds until a program has loaded the folder, milliseconds per image, and the most memory it had."""
    start = time.perf_counter()
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, preexec_fn=limit if limited else None, **pipes)
    text = process.stderr.read() if process.stderr else ""
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise SystemExit(f"{command[0]} ended with {status}: {text[-500:]}")
    numbers = json.loads(text.splitlines()[-1]) if text.startswith("{") else from_example(text)
    return {**numbers, "seconds_with_500_images": seconds, "memory_mib": used.ru_maxrss / 1024}


def from_example(text: str) -> Row:
    """Return the numbers of the example's last line."""
    words = text.split()
    return {"load_ms": float(words[words.index("in") + 1]), "mean_ms": float(words[words.index("mean") + 1])}


def limit() -> None:
    """Leave one core and 512 MiB of data to this process."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))


def one(folder: Path, path: Path) -> None:
    """Run images one by one, and print how long loading and one image take."""
    start = time.perf_counter()
    predictor = Predictor.load(folder, settings=ONE)
    loaded, pixels = time.perf_counter(), np.load(path)
    for row in range(len(pixels)):
        predictor(pixels[row : row + 1])
    each = 1e3 * (time.perf_counter() - loaded) / len(pixels)
    print(json.dumps({"load_ms": 1e3 * (loaded - start), "mean_ms": each}), file=sys.stderr)


def asking(work: Path, state: Path | None) -> Iterator[Row]:
    """Yield what three exits cost at which nobody leaves, over the same network in one piece; one image.

    `heads` is what one graph costs that computes all four heads, `rest` what cutting, sessions and decisions add to it.
    """
    from edge import PART, TURN, Worker, cpp_program, in_turns

    folder = work / "asking"
    for runtime, precision in itertools.product(("onnxruntime", "openvino"), ("float32", "int8")):
        places = asked_folders(work, state, runtime, precision)
        kinds: dict[str, Any] = {"Python": {"kind": "exported", "runtime": runtime}}
        if runtime == "onnxruntime":
            kinds["C++"] = {"kind": "c++", **cpp_program(work)}
        for (engine, about), threads in itertools.product(kinds.items(), (1, 2)):
            known = {name: {**about, "folder": str(place), "images": "../images.npz"} for name, place in places.items()}
            (folder / "contenders.json").write_text(json.dumps(known))
            workers = [Worker(folder, name, threads) for name in places]
            if not all(each.is_ready() for each in workers):
                raise SystemExit(f"a contender does not run: see {folder}/workers.log")
            parts = [in_turns(workers, start, start + PART) for start in range(0, ASKED, PART)]
            rounds = [[each.ask(do="many", rows=[*range(BATCHED)])[1] for each in workers] for _ in range(ROUNDS + 1)]
            for each in workers:
                each.close()
            batched = dict(zip(places, 1e3 * np.array(rounds[1:]).T / BATCHED, strict=True))  # the first warms up
            turns = {
                name: np.concatenate([part[name] for part in parts]).reshape(-1, TURN).mean(axis=1) for name in places
            }
            whole, heads, asked = (turns[name] for name in ("whole", "heads", "asked"))
            many = {name: batched[name] for name in ("whole", "heads", "asked")}
            row: Row = {"engine": engine, "runtime": runtime, "precision": precision, "threads": threads}
            row |= {"exits_asked": 3, "images": ASKED}
            row |= {f"{name}_ms": float(np.median(times)) for name, times in turns.items()}
            row |= {f"batched_{name}_ms": float(np.median(times)) for name, times in many.items()}
            for name, ratios in {
                "over": asked / whole - 1,
                "heads": heads / whole - 1,
                "rest": (asked - heads) / whole,
                "batched_rest": (many["asked"] - many["heads"]) / many["whole"],
            }.items():
                low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
                row |= {name: middle, f"{name}_low": low, f"{name}_high": high}
            yield row


def asked_folders(work: Path, state: Path | None, runtime: str, precision: str) -> dict[str, Path]:
    """Return folders, made once: the network in one piece, one graph with four heads, and three exits for nobody."""
    import torch
    from cifar100_train import Job, build, load_result
    from edge import EXITS

    from alight import export_model
    from alight.export.precision import lower, put_policy
    from alight.networks.zoo import CIFAR
    from alight.policies.policy import ExitAt

    folder = work / "asking"
    folder.mkdir(parents=True, exist_ok=True)
    if not (work / "images.npz").exists():
        noise = np.random.default_rng(0).integers(256, size=(ASKED, 32, 32, 3), dtype=np.uint8)
        mean, std = (np.array(each, dtype=np.float32) for each in (CIFAR.mean, CIFAR.std))
        np.savez(work / "images.npz", images=noise, mean=mean, std=std)
    with np.load(work / "images.npz") as file:
        images = ((file["images"][:128] / np.float32(255) - file["mean"]) / file["std"]).transpose(0, 3, 1, 2)
    terms: dict[str, Any] = {"num_exits": 8}
    policies = {
        "whole": ExitAt(costs=(4.0,), open_exits=(7,), **terms),
        "asked": Threshold((np.inf,) * 3, costs=(1.0, 2.0, 3.0, 4.0), open_exits=(1, 3, 5, 7), **terms),
    }
    found = {}
    for name, policy in policies.items():
        plain, found[name] = folder / name, folder / f"{name}_{precision}_{runtime}"
        if not plain.exists():
            model = load_result(Job(EXITS), state) if state else build(Job(EXITS), work, started=False).eval()
            export_model(model, policy, plain, example=torch.zeros(2, 3, 32, 32), progress=False)
        if not found[name].exists():
            lower(plain, found[name], precision, [(np.ascontiguousarray(images),)], runtime=runtime)
            put_policy(found[name], policy)
    found["heads"] = folder / f"heads_{precision}_{runtime}"
    if not found["heads"].exists():
        join_stages(found["asked"], found["whole"], found["heads"])
    return found


def join_stages(asked: Path, whole: Path, folder: Path) -> None:
    """Write one graph that gives the logits of every stage, as a folder for the policy of the whole network."""
    import onnx
    import onnx.compose

    stages = []
    for index, stage in enumerate(Manifest.load(asked).stages):
        model = onnx.load(asked / stage.file)
        stages.append(onnx.compose.add_prefix(model, f"{index}/", rename_inputs=index > 0))
        del stages[-1].graph.value_info[:]
    joined = stages[0]
    for model in stages[1:]:
        states = [each.name for each in joined.graph.output if not each.name.endswith("/logits")]
        names = zip(states, [each.name for each in model.graph.input], strict=True)
        joined = onnx.compose.merge_models(joined, model, io_map=[*names])
    *heads, last = joined.graph.output
    del joined.graph.output[:]
    joined.graph.output.extend([last, *heads])
    manifest = Manifest.load(whole)
    shutil.copytree(whole, folder)
    onnx.save(joined, folder / manifest.stages[0].file)
    carries = tuple(TensorSpec(each.name, (None, 100), "float32") for each in heads)
    known = checksum((folder / manifest.stages[0].file).read_bytes())
    replace(manifest, stages=(replace(manifest.stages[0], checksum=known, carries=carries),)).save(folder)


def main() -> None:
    if sys.argv[1:2] == ["one"]:
        one(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["decisions", "certificates", "footprint", "asking"])
    parser.add_argument("work", type=Path)
    parser.add_argument("--data", type=Path, help="CIFAR-100, for certificates")
    parser.add_argument("--state", type=Path, help="results of cifar100_train.py")
    options = parser.parse_args()
    steps: dict[str, Any] = {"decisions": partial(decisions, state=options.state), "footprint": footprint}
    steps["certificates"] = partial(certificates, state=options.state, data=options.data)
    steps["asking"] = partial(asking, state=options.state)
    made = provenance("onnxruntime", "numpy", folder=ROOT)
    rows = [{**row, **made} for row in steps[options.step](options.work)]
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items() if name not in made))
    write_rows(ROOT / f"results/edge_{options.step}.csv", rows)


if __name__ == "__main__":
    main()
