"""One contender of experiments/edge.py in a process of its own: thread pools of engines disturb each other in one.

    python experiments/edge_worker.py WORK NAME THREADS

Reads lines of JSON, {"do": "one", "rows": [...]}, {"do": "many", "rows": [...]} or {"do": "memory"}, and answers each
with a line: classes and milliseconds of single images, or classes and seconds of all of them in batches of 64.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

BATCH = 64
WARM = 20  # single images before those that are timed
Labels = Callable[[np.ndarray], np.ndarray]  # classes of a batch of images, as the network takes them


def in_batches(labels: Labels) -> Labels:
    """Return classes of many images, in batches."""

    def of_all(images: np.ndarray) -> np.ndarray:
        parts = [images[start : start + BATCH] for start in range(0, len(images), BATCH)]
        return np.concatenate([labels(part) for part in parts])

    return of_all


def onnxruntime_network(about: dict[str, Any], threads: int) -> tuple[Labels, Labels]:
    """Return a full network in one ONNX file, run by ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(about["file"], options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def labels(images: np.ndarray) -> np.ndarray:
        found: np.ndarray = session.run(["logits"], {name: images})[0].argmax(-1)
        return found

    return labels, in_batches(labels)


def openvino_network(about: dict[str, Any], threads: int) -> tuple[Labels, Labels]:
    """Return a full network in one ONNX file, compiled by OpenVINO for one image and for 64."""
    import openvino  # type: ignore[import-untyped]

    core = openvino.Core()
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}

    def compiled(count: int) -> Labels:
        model = core.read_model(about["file"])
        model.reshape([count, *list(model.inputs[0].partial_shape)[1:]])
        request = core.compile_model(model, "CPU", settings).create_infer_request()

        def labels(images: np.ndarray) -> np.ndarray:
            if len(images) < count:  # the last batch
                return labels(np.resize(images, (count, *images.shape[1:])))[: len(images)]
            found: np.ndarray = request.infer([images], share_inputs=True, share_outputs=True)[0].argmax(-1)
            return found

        return labels

    return compiled(1), in_batches(compiled(BATCH))


def exported(about: dict[str, Any], threads: int) -> tuple[Labels, Labels]:
    """Return exits by alight, in an exported folder."""
    from alight import Predictor, RunSettings

    settings = RunSettings(threads=threads, runtime=about.get("runtime"))
    predictor = Predictor.load(about["folder"], settings=settings, batch_size=BATCH)
    return lambda images: predictor(images).predictions, lambda images: predictor(images).predictions


def with_torch(about: dict[str, Any], threads: int) -> tuple[Labels, Labels]:
    """Return a full network, exits by alight or exits by earlyon, in PyTorch."""
    import torch

    torch.set_num_threads(threads)
    from edge import torch_contender

    one, many = torch_contender(about)
    return (
        lambda images: one(torch.from_numpy(images)),
        lambda images: many(torch.from_numpy(images)),
    )


def chain(about: dict[str, Any], threads: int) -> Any:
    """Return networks for ImageNet as one with an exit after each."""
    from imagenet_record import SEEN, USUAL

    from alight import Member, RunSettings, cascade

    members = []
    for name, place in about["members"].items():
        terms: dict[str, Any] = {"crop": SEEN.get(name, USUAL), "bicubic": True}
        if about["runtime"] == "PyTorch compiled":
            from imagenet_networks import LITE, SIZES, efficientnet_lite

            settings = RunSettings(threads=threads, dtype=about["weights"], channels_last=True, compile=True)
            terms |= {"settings": settings, "normalisation": LITE, "image_size": SIZES[name]}
            members.append(Member(efficientnet_lite(Path(place), name), name, **terms))
        else:
            settings = RunSettings(threads=threads, runtime=about["runtime"])
            members.append(Member(Path(place), name, settings=settings, **terms))
    return cascade(members, image_size=256)


def cascade_of_networks(about: dict[str, Any], threads: int) -> tuple[Labels, Labels]:
    """Return one of several networks, or a cascade of some, as the policy says."""
    from alight import Predictor, load_policy

    policy = replace(load_policy(about["policy"]), fingerprint="")
    predictor = Predictor(chain(about, threads), policy, batch_size=BATCH)
    return lambda images: predictor(images).predictions, lambda images: predictor(images).predictions


class Program:
    """The walk in C++, which reads images from a file and prints what it decides."""

    def __init__(self, about: dict[str, Any], threads: int) -> None:
        self.about, self.threads = about, threads

    def run(self, images: np.ndarray, batch: int) -> tuple[list[int], list[float]]:
        """Return classes, and milliseconds of every batch."""
        path = Path(self.about["folder"]).with_suffix(".npy")
        np.save(path, images)
        options = ["--batch", batch, "--threads", self.threads, "--library", self.about["library"]]
        command = [self.about["program"], self.about["folder"], path, *options]
        command += ["--times", "--indices", "--warm", max(WARM, 10 * batch)]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
        rows = [line.split(",") for line in done.stdout.splitlines()[1:]]
        return [int(row[1]) for row in rows], [float(line) for line in done.stderr.split()]

    def classes(self, images: np.ndarray) -> np.ndarray:
        """Return classes alone."""
        return np.array(self.run(images, BATCH)[0])


KINDS: dict[str, Callable[[dict[str, Any], int], tuple[Labels, Labels]]] = {
    "onnxruntime": onnxruntime_network,
    "openvino": openvino_network,
    "exported": exported,
    "cascade": cascade_of_networks,
    "torch": with_torch,
}


def main() -> None:
    work, name, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    about = json.loads((work / "contenders.json").read_text())[name]
    with np.load(work / about["images"]) as file:
        pixels = file["images"]
        known = (file["mean"], file["std"]) if "mean" in file else None

    def inputs(rows: list[int]) -> np.ndarray:
        if known is None:
            return pixels[rows]  # bytes, which networks make fit
        floats = pixels[rows].transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)
        mean, std = (each[:, None, None] for each in known)
        return np.ascontiguousarray((floats - mean) / std)

    program = Program(about, threads) if about["kind"] == "c++" else None
    one, many = KINDS[about["kind"]](about, threads) if program is None else (program.classes, program.classes)
    warm = inputs([*range(min(len(pixels), 2 * BATCH))])
    for each in range(WARM) if program is None else ():
        one(warm[each : each + 1])
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "memory":
            who = resource.RUSAGE_SELF if program is None else resource.RUSAGE_CHILDREN
            print(json.dumps(resource.getrusage(who).ru_maxrss / 1024), flush=True)
            continue
        single, images = asked["do"] == "one", inputs(asked["rows"])
        if program:
            labels, times = program.run(images, 1 if single else BATCH)
            print(json.dumps([labels, times if single else sum(times) / 1e3]), flush=True)
        elif single:
            labels, times = [], []
            for row in range(len(images)):
                start = time.perf_counter()
                found = one(images[row : row + 1])
                times.append(1e3 * (time.perf_counter() - start))
                labels.append(int(found[0]))
            print(json.dumps([labels, times]), flush=True)
        else:
            start = time.perf_counter()
            found = many(images)
            print(json.dumps([found.tolist(), time.perf_counter() - start]), flush=True)


if __name__ == "__main__":
    main()
