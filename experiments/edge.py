"""Everything that a user could do instead of early exit, on the same images and one machine, interleaved.

    pip install -e ".[export,openvino]" earlyon
    python experiments/edge.py prepare WORK --state STATE --data DATA       # 25 minutes on one core
    python experiments/edge.py measure WORK                                 # 12 minutes on two

    python experiments/edge.py imagenet WORK --state MODELS --data IMAGENET --images 1000 --calibration 500
    python experiments/edge.py measure WORK --images 1000 --latencies 400 --without lite1 \\
        --output results/edge_imagenet.csv      # a process takes 2 GB: these need 23, all at once 34; with bf16, more

STATE holds results of cifar100_train.py, DATA is CIFAR-100 (see cifar100_data.py). `prepare` exports, quantises and
calibrates all contenders into WORK, on test images; `measure` runs them on 2,000 others: each in a process of its own
(edge_worker.py), single images in turns of 20, batches of 64 in rounds. With --paused it waits for a line of input
before each part. Writes results/edge.csv: accuracy, milliseconds of single images (mean, median, 99th percentile),
images per second in batches of 64, memory; rows of other machines stay. `over_best` is the time of the fastest full
network whose accuracy is at most half a point lower, over that of the contender; empty where there is none. "cut
after" is the network with exits without what comes after one of them: the same accuracy for every image, at a lower
price. Exits "as accurate" have the smallest budget in milliseconds at which they lose a quarter of a point of the
samples they were made with. Networks without weights in STATE are timed with random ones, and their accuracy is that
of results/cifar100_runs.csv, in float32; without those of resnet18_plain there is no cascade, and no full network in
PyTorch.

`imagenet` prepares three EfficientNet-lite networks (see imagenet_networks.py) alone, and a cascade of the smallest
and the largest that spends 70 % of the time of the latter, from images of 256 pixels to answers; in bf16, too, on a
processor that has it.
"""

import argparse
import csv
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

ROOT = Path(__file__).parent.parent
EXITS = "resnet18_mixed_distilled"
FULL = {"resnet18_plain": "ResNet-18", "resnet10_plain": "ResNet-10"}  # networks without exits, by their run
CUTS = ("layer3.1", "layer2.1", "layer3.0")  # exits after which the network with exits ends, as a smaller one
IMAGES, CALIBRATION = 2000, 2400
LATENCIES, PART, TURN = 400, 100, 20  # single images, in parts, and how many of them one contender has in turn
ROUNDS = 4  # in which all images are run in batches
LOSSES = (0.025,)
SHARES = (0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 1.0)  # of the full network's time: the first that suffices
SPENT = 0.7  # of the time of the large network, by a cascade for ImageNet
TORCH = "PyTorch compiled"
EQUAL = 0.005  # accuracy by which a full network may be below a contender and count as equally accurate
Row = dict[str, str | float | int]
Contenders = dict[str, dict[str, Any]]


# ------------------------------------------------------------------------------------------------ prepare


class Preparation:
    """The contenders, written into a folder one by one; what is there already is not made again."""

    def __init__(self, work: Path, threads: int) -> None:
        self.work, self.threads = work, threads
        self.path = work / "contenders.json"
        self.found: Contenders = json.loads(self.path.read_text()) if self.path.exists() else {}
        work.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, make: Callable[[], dict[str, Any]], **about: Any) -> None:
        """Add a contender, unless it is there."""
        if name in self.found:
            return
        start = time.perf_counter()
        self.found[name] = {"images": "images.npz", **about, **make()}
        self.path.write_text(json.dumps(self.found, indent=1))
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)

    def folder(self, name: str, make: Callable[[Path], object]) -> Path:
        """Return a folder that is made once."""
        place = self.work / name
        if not place.exists():
            make(place)
        return place


def prepare(options: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(options.threads)
    from cifar100_data import read
    from cifar100_train import Job, build, load_result

    from alight import HeadOutputs
    from alight.networks.zoo import CIFAR

    made = Preparation(options.work, options.threads)
    test = read(options.data, 0, 1000).test
    order = np.random.default_rng(0).permutation(len(test))
    rows = order[: options.images], order[options.images : options.images + options.calibration]
    (pixels, labels), data = ((test.pixels[each].numpy(), test.labels[each].numpy()) for each in rows)
    mean, std = (np.array(each, dtype=np.float32) for each in (CIFAR.mean, CIFAR.std))
    np.savez(made.work / "images.npz", images=pixels, labels=labels, mean=mean, std=std)
    np.savez(made.work / "calibration.npz", images=data[0], labels=data[1], mean=mean, std=std)
    model = load_result(Job(EXITS), options.state)
    result = options.state / Job(EXITS).name / "result"
    labelled = HeadOutputs.load(result / "test.npz").take(rows[1])  # what its training recorded, in the file's order
    full_network(made, EXITS, "ResNet-18 trained with exits", model, data)
    for runtime, title in (("onnxruntime", "ONNX Runtime"), ("openvino", "OpenVINO")):
        deployed(made, model, data, labelled, runtime, f"{title} int8")
    for run, name in FULL.items():
        trained = (options.state / Job(run).name / "result").exists()
        network = load_result(Job(run), options.state) if trained else build(Job(run), options.state).eval()
        about: dict[str, Any] = {} if trained else {"accuracy": recorded_accuracy(run)}
        full_network(made, run, name, network, data, **about)
    plain = (options.state / Job("resnet18_plain").name / "result").exists()  # random weights would say nothing
    if plain:
        torch_networks(made, options.state)
    for name in CUTS:
        cut = model.exits.index(name)
        full_network(made, f"{EXITS}_{name}", f"cut after {name}", model, data, exit_index=cut, full=False)
    exits_in_torch(made, model, labelled, options.state)
    for runtime, title in (("openvino", "OpenVINO"), ("onnxruntime", "ONNX Runtime")):
        deployed(made, model, data, labelled, runtime, title, "float32", LOSSES[:1])
    if plain:
        cascade_of_two(made, data)


def recorded_accuracy(run: str) -> float:
    """Return the test accuracy of a run as its training recorded it."""
    with (ROOT / "results/cifar100_runs.csv").open() as file:
        return next(float(row["test_accuracy"]) for row in csv.DictReader(file) if row["run"] == run)


def full_network(
    made: Preparation, run: str, title: str, model: Any, data: Any, exit_index: int | None = None, **about: Any
) -> None:
    """Add a network up to one exit in one ONNX file, float32 and int8, by ONNX Runtime and OpenVINO."""
    import torch

    from alight import export_model
    from alight.export.precision import lower
    from alight.policies.policy import ExitAt

    last = model.num_exits - 1
    alone = ExitAt(costs=(1.0,), open_exits=(last if exit_index is None else exit_index,), num_exits=last + 1)
    example = torch.zeros(2, 3, 32, 32)
    plain = made.folder(
        f"{run}_float32", lambda place: export_model(model, alone, place, example=example, progress=False)
    )
    small = made.folder(f"{run}_int8", lambda place: lower(plain, place, "int8", ranged(data)))
    kinds = {
        "ONNX Runtime": ("onnxruntime", plain),
        "ONNX Runtime int8": ("onnxruntime", small),
        "OpenVINO": ("openvino", plain),
        "OpenVINO int8": ("openvino", small),
    }
    for engine, (kind, place) in kinds.items():
        if exit_index is not None and "int8" not in engine:
            continue  # the slower ones
        terms = {"kind": kind, "file": str(place / "stage_0.onnx"), "weights": run, "full": True, **about}
        made.add(f"{title}, {engine}", dict, **terms)


def ranged(data: Any, count: int = 128) -> list[Any]:
    """Return some images as the network takes them, for the ranges of int8."""
    from alight.networks.zoo import CIFAR

    mean, std = (np.array(each, dtype=np.float32) for each in (CIFAR.mean, CIFAR.std))
    floats = (data[0][:count] / np.float32(255) - mean) / std
    return [(np.ascontiguousarray(floats.transpose(0, 3, 1, 2), dtype=np.float32),)]


def torch_networks(made: Preparation, state: Path) -> None:
    """Add the full network in PyTorch."""
    modes: dict[str, dict[str, bool]] = {"PyTorch": {}, "PyTorch compiled": {"compile": True}}
    modes["PyTorch compiled int8"] = {"compile": True, "int8": True}
    for mode, settings in modes.items():
        about = {"kind": "torch", "what": "full", "state": str(state), "weights": "resnet18_plain", **settings}
        made.add(f"ResNet-18, {mode}", dict, **about, calibration=str(made.work / "calibration.npz"), full=True)


def exits_in_torch(made: Preparation, model: Any, labelled: Any, state: Path) -> None:
    """Add early exit in PyTorch, by alight and by earlyon, on the same network."""
    for mode, compiled in (("PyTorch", False), ("PyTorch compiled", True)):
        about = {"kind": "torch", "what": "exits", "state": str(state), "weights": EXITS, "compile": compiled}
        made.add(f"exits, {mode}", partial(planned, made, model, labelled), **about, loss=LOSSES[0])
    about = {"kind": "torch", "what": "earlyon", "state": str(state), "weights": EXITS, "budget": 0.5}
    made.add("exits by earlyon, PyTorch", dict, **about, calibration=str(made.work / "calibration.npz"))


def planned(made: Preparation, model: Any, labelled: Any) -> dict[str, Any]:
    """Return the plan for single images in PyTorch; compiled stages run under the plan of those that are not."""
    from alight import RunSettings, plan

    path = made.work / "plan.json"
    if not path.exists():
        terms: dict[str, Any] = {"settings": RunSettings(threads=made.threads), "progress": False}
        plan(model, labelled, batch_size=1, max_accuracy_loss=LOSSES[0], **terms).policy.save(path)
    return {"policy": str(path)}


def deployed(
    made: Preparation,
    model: Any,
    data: Any,
    labelled: Any,
    runtime: str,
    title: str,
    precision: str = "int8",
    losses: Sequence[float] = LOSSES,
) -> None:
    """Add exported exits that lose so much accuracy at most, and the same folders in C++."""
    from alight import RunSettings
    from alight.fitting.deploying import Deployment
    from alight.fitting.steps import Goal

    names = {loss: f"exits, {title}, loses {100 * loss:g} points" for loss in losses}
    settings = RunSettings(threads=made.threads, runtime=runtime)
    with tempfile.TemporaryDirectory() as temporary:
        terms = Path(temporary), False, labelled
        work = cache(lambda: Deployment(model, data, precision, settings, 1, *terms))
        for loss, name in names.items():
            folder = made.work / f"exits_{runtime}_{precision}_{loss:g}"

            def one(folder: Path = folder, loss: float = loss) -> dict[str, Any]:
                found = work().deployed(folder, Goal(max_accuracy_loss=loss))
                print(found, flush=True)
                return {"folder": str(folder), "open": len(found.exits), "bytes": found.sizes[1]}

            made.add(name, one, kind="exported", weights=EXITS, loss=loss)
            if runtime == "onnxruntime" and precision == "int8":
                in_cpp(made, name, folder)
        if precision == "int8":
            name, equal = f"exits, {title}, as accurate", made.work / f"exits_{runtime}_{precision}_equal"
            made.add(name, lambda: as_accurate(work(), equal), kind="exported", weights=EXITS)
            if runtime == "onnxruntime":
                in_cpp(made, name, Path(made.found[name]["folder"]))


def as_accurate(work: Any, folder: Path) -> dict[str, Any]:
    """Deploy exits for the smallest budget in milliseconds that loses a quarter of a point at most; for all, at last.

    The budget is chosen by the samples that calibrate for it, so the folder's guarantee does not hold with 95 %.
    """
    from alight.fitting.steps import Goal

    last = (work.model.num_exits - 1,)
    full = work.costs(work.lowered(last)[0], last, "ms").full
    for share in SHARES:
        place = folder.with_name(f"{folder.name}_{share:g}")
        found = work.deployed(place, Goal(budget=f"{share * full:.3g} ms"))
        print(found, flush=True)
        if found.full_accuracy - found.decisions.accuracy() <= EQUAL / 2:
            break
    return {"folder": str(place), "open": len(found.exits), "bytes": found.sizes[1]}


def in_cpp(made: Preparation, name: str, folder: Path) -> None:
    """Add the same folder, run by the program in C++, if that takes its policy."""
    combination = json.loads((folder / "policy.json").read_text()).get("combination") or {}
    if shutil.which("cmake") is None or combination.get("kind") == "GeometricMean":
        return
    about = {"kind": "c++", "weights": EXITS, **cpp_program(made.work)}
    made.add(name.replace("ONNX Runtime", "C++, ONNX Runtime"), lambda: {"folder": str(folder)}, **about)


def cpp_program(work: Path) -> dict[str, str]:
    """Return the program in C++, built where its sources have changed, and ONNX Runtime's library."""
    import onnxruntime

    build = work / "cpp"
    for step in (["-S", ROOT / "cpp", "-B", build], ["--build", build]):
        subprocess.run(["cmake", *map(str, step)], check=True, capture_output=True)
    library = next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so*"))
    return {"program": str(build / "alight_example"), "library": str(library)}


def cascade_of_two(made: Preparation, data: Any) -> None:
    """Add a small network first, and the large one where it is not sure, both in int8."""
    from alight import Member, RunSettings, cascade, export_model, plan, record
    from alight.networks.zoo import CIFAR

    def make() -> dict[str, Any]:
        runs = f"{EXITS}_{CUTS[-1]}", "resnet18_plain"
        files = [made.work / f"{run}_int8" / "stage_0.onnx" for run in runs]
        settings = RunSettings(threads=made.threads)
        members = [Member(str(file), normalisation=CIFAR, settings=settings) for file in files]
        model = cascade(members, names=["small", "large"])
        labelled = record(model, data, settings=settings, progress=False)
        found = plan(model, labelled, batch_size=1, max_accuracy_loss=LOSSES[0], settings=settings, progress=False)
        print(found, flush=True)
        folder = export_model(model, found.policy, made.work / "cascade_int8", progress=False)
        return {"folder": str(folder)}

    made.add(f"cascade of cut after {CUTS[-1]} and ResNet-18, ONNX Runtime int8", make, kind="exported", weights="two")


def imagenet(options: argparse.Namespace) -> None:
    """Prepare networks for ImageNet, each alone and as a cascade, by every runtime in float32 and lower precision."""
    from edge_worker import chain
    from imagenet_networks import LITE, SIZES, load_images
    from imagenet_record import SEEN, USUAL, exported
    from PIL import Image

    from alight import Costs, calibrate, record, time_stages
    from alight.costs import Amount
    from alight.export.precision import lower
    from alight.policies.policy import ExitAt

    made, total = Preparation(options.work, options.threads), options.images + options.calibration
    pixels, labels = (each[np.random.default_rng(0).permutation(len(each))] for each in load_images(options.data))
    pixels, data = pixels[: options.images], (pixels[options.images : total], labels[options.images : total])
    np.savez(made.work / "images.npz", images=pixels, labels=labels[: options.images])

    def seen(name: str) -> np.ndarray:
        edge = 128 * (1 - SEEN.get(name, USUAL))
        pictures = [Image.fromarray(each.transpose(1, 2, 0)) for each in data[0][:128]]
        whole, size = (edge, edge, 256 - edge, 256 - edge), (SIZES[name],) * 2
        resized = np.stack([np.asarray(each.resize(size, Image.Resampling.BICUBIC, whole)) for each in pictures])
        return (resized.transpose(0, 3, 1, 2) / np.float32(255) - np.float32(LITE.mean[0])) / np.float32(LITE.std[0])

    for runtime, precision in precisions():
        folders = [options.state if runtime == TORCH else exported(options.state, name) for name in SIZES]
        for index, name in enumerate(SIZES if runtime != TORCH and precision != "float32" else ()):
            write = partial(lower, folders[index], precision=precision, samples=[(seen(name),)], runtime=runtime)
            folders[index] = made.folder(f"{name}_{runtime}_{precision}", write)
        about: dict[str, Any] = {"kind": "cascade", "members": dict(zip(SIZES, map(str, folders), strict=True))}
        about |= {"runtime": runtime, "weights": precision}

        def policy(name: str, found: Any, about: dict[str, Any] = about) -> dict[str, Any]:
            found.save(made.work / f"{name}_{about['runtime']}_{about['weights']}.json")
            return {"policy": str(made.work / f"{name}_{about['runtime']}_{about['weights']}.json")}

        for index, name in enumerate(SIZES):
            alone = ExitAt(costs=(1.0,), open_exits=(index,), num_exits=len(SIZES))
            made.add(f"EfficientNet-{name}, {runtime} {precision}", partial(policy, name, alone), **about, full=True)

        def of_two(about: dict[str, Any] = about) -> dict[str, Any]:
            model, opened = chain(about, made.threads), (0, len(SIZES) - 1)
            labelled = record(model, data, batch_size=16, progress=False).at_exits(opened)
            timed = time_stages(model, data[0][:1], 1, repeats=20, warmup=3, progress=False)
            alone = np.median(timed.stages + timed.heads, axis=0)[[*opened]]
            costs = Costs([0.0, 0.0], alone, "ms", range(2))
            fitted = calibrate.eero(costs, Amount(SPENT * alone[-1]), labelled, spend_all=True)
            terms = {"num_exits": len(SIZES), "exits": model.exits, "full_cost": alone[-1]}
            return policy("cascade", fitted.renumbered(opened, **terms), about)

        if runtime != TORCH:  # each of its networks is slower than the cascades of the others
            made.add(f"cascade of lite0 and lite2, {runtime} {precision}", of_two, **about)


def precisions() -> list[tuple[str, str]]:
    """Return runtimes and the precisions of each that are fast on this processor."""
    import openvino  # type: ignore[import-untyped]

    made = [*itertools.product(("onnxruntime", "openvino"), ("float32", "int8")), (TORCH, "float32")]
    has_bf16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return made + [(runtime, "bfloat16") for runtime in ("openvino", TORCH) if has_bf16]


def torch_contender(about: dict[str, Any]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the classes of one image and of many, by PyTorch; for edge_worker.py."""
    import torch
    from cifar100_train import Job, load_result
    from edge_worker import BATCH

    model = load_result(Job(about["weights"]), Path(about["state"]))
    if about["what"] == "exits":
        from alight import Predictor, RunSettings, load_policy

        settings = RunSettings(compile=about["compile"], threads=torch.get_num_threads())
        predictor = Predictor(model, load_policy(about["policy"]), settings=settings, batch_size=BATCH)
        return lambda image: predictor(image).predictions, lambda images: predictor(images).predictions
    if about["what"] == "earlyon":
        return earlyon(model, about)
    network: Any = model.stages[0]
    network = quantised(network, about) if about.get("int8") else network
    network = torch.compile(network, dynamic=False) if about.get("compile") else network

    @torch.inference_mode()
    def one(images: Any) -> Any:
        return network(images).argmax(-1).numpy()

    def many(images: Any) -> Any:
        last = images[len(images) - len(images) % BATCH :]  # another size would be compiled anew
        padded = torch.cat([images, last.new_zeros(-len(last) % BATCH, *images.shape[1:])])
        return np.concatenate([one(part) for part in torch.split(padded, BATCH)])[: len(images)]

    return one, many


def quantised(network: Any, about: dict[str, Any]) -> Any:
    """Return a network in int8 by torchao, static and per channel, for the processor that torch.compile writes for."""
    import torch
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    with np.load(about["calibration"]) as file:
        images = torch.from_numpy(file["images"][:128]).permute(0, 3, 1, 2).float() / 255
        images = (images - torch.from_numpy(file["mean"])[:, None, None]) / torch.from_numpy(file["std"])[:, None, None]
    dynamic = {0: torch.export.Dim("batch")}
    graph = torch.export.export(network, (images[:2],), dynamic_shapes=(dynamic,)).module()
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(graph, quantizer)
    prepared(images)
    return convert_pt2e(prepared)


def earlyon(model: Any, about: dict[str, Any]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return exits by earlyon on the same backbone and heads; it lets a batch leave only as a whole."""
    import torch
    from cifar100_train import CLASSES
    from earlyon.core.thresholds import calibrate_thresholds_for_budget
    from earlyon.core.types import EarlyExitConfig, ExitPoint
    from earlyon.core.wrappers import EarlyExitWrapper
    from edge_worker import BATCH

    from alight.networks.zoo import RESNET_EXITS, ResNet, resnet18_cifar

    whole = ResNet(CLASSES)
    shared = resnet18_cifar(CLASSES, backbone=whole, head="separable")  # shares its weights with `whole`
    shared.load_state_dict(model.state_dict())
    names, channels = [name.replace(".", "_") for name in RESNET_EXITS], [64, 64, 128, 128, 256, 256, 512]
    points = [ExitPoint(name, layer, width) for name, layer, width in zip(names, RESNET_EXITS, channels, strict=True)]
    config = EarlyExitConfig(backbone="custom", num_classes=CLASSES, exit_points=points)
    heads = dict(zip(names, shared.eval().heads, strict=False))
    wrapper = EarlyExitWrapper(whole.eval(), heads, lambda logits: logits, config, input_shape=(1, 3, 32, 32)).eval()
    with np.load(about["calibration"]) as file:
        images, labels = torch.from_numpy(file["images"][:1000]).permute(0, 3, 1, 2).float() / 255, file["labels"]
        images = (images - torch.from_numpy(file["mean"])[:, None, None]) / torch.from_numpy(file["std"])[:, None, None]
    labels = torch.from_numpy(labels[:1000])
    pairs = [(images[row : row + 1], labels[row : row + 1]) for row in range(len(labels))]
    calibrate_thresholds_for_budget(wrapper, pairs, target_computation=about["budget"])

    def many(images: Any) -> Any:
        parts = [wrapper.forward_inference_batched(part).predictions.argmax(-1) for part in torch.split(images, BATCH)]
        return torch.cat(parts).numpy()

    return lambda image: wrapper(image).prediction.argmax(-1).numpy(), many


# ------------------------------------------------------------------------------------------------ measure


class Worker:
    """A contender in a process of its own."""

    def __init__(self, work: Path, name: str, threads: int) -> None:
        self.name = name
        command = [sys.executable, str(Path(__file__).with_name("edge_worker.py")), str(work), name, str(threads)]
        with (work / "workers.log").open("a") as log:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
            self.process: subprocess.Popen[str] = subprocess.Popen(command, **pipes)
        self.asks, self.answers = cast(IO[str], self.process.stdin), cast(IO[str], self.process.stdout)

    def is_ready(self) -> bool:
        """Return whether it has started, when it has or has failed."""
        while (line := self.answers.readline()) and line != "ready\n":  # a library may print something
            pass
        return bool(line)

    def ask(self, **what: Any) -> Any:
        """Return the answer to a request."""
        self.asks.write(json.dumps(what) + "\n")
        self.asks.flush()
        while not (line := self.answers.readline()).startswith(("[", *"0123456789")):
            if not line:
                raise RuntimeError(f"{self.name} ended: see workers.log")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self.asks.close()
        self.process.wait(30)


def measure(options: argparse.Namespace) -> None:
    from alight.files import write_rows
    from alight.provenance import provenance

    about: Contenders = json.loads((options.work / "contenders.json").read_text())
    about = {name: each for name, each in about.items() if not any(word in name for word in options.without)}
    with np.load(options.work / "images.npz") as file:
        labels = file["labels"][: options.images]
    waits = partial(wait_for_a_line, options.paused)
    waits("start all contenders")
    workers = [Worker(options.work, name, options.threads) for name in about]
    ready = [each.is_ready() for each in workers]
    for each in itertools.compress(workers, np.logical_not(ready)):
        print(f"{each.name} does not run: see {options.work}/workers.log", flush=True)
    workers = [*itertools.compress(workers, ready)]
    for each in workers:  # compile for batches, where they have to
        each.ask(do="many", rows=[*range(min(128, len(labels)))])
    answers: dict[str, list[int]] = {each.name: [] for each in workers}
    batched: dict[str, list[float]] = {each.name: [] for each in workers}
    for part in np.array_split(np.arange(len(labels)), options.rounds):
        waits(f"run batches of images from {part[0]}")
        for each in workers:
            found, seconds = each.ask(do="many", rows=part.tolist())
            answers[each.name] += found
            batched[each.name].append(len(part) / seconds)
    singles: dict[str, list[float]] = {each.name: [] for each in workers}
    count = min(options.latencies, len(labels))
    for start in range(0, count, PART):
        waits(f"run single images from {start}")
        for name, taken in in_turns(workers, start, min(start + PART, count)).items():
            singles[name] += taken
    memory = {each.name: each.ask(do="memory") for each in workers}
    made = provenance("torch", "onnxruntime", "openvino", "numpy", folder=ROOT) | {"threads": str(options.threads)}
    rows: list[Row] = []
    for each in workers:
        times, rates = np.array(singles[each.name]), np.array(batched[each.name])
        row: Row = {
            "name": each.name,
            "kind": about[each.name]["kind"],
            "weights": about[each.name]["weights"],
            "full": int(about[each.name].get("full", False)),
            "open_exits": about[each.name].get("open", ""),
            "accuracy": about[each.name].get("accuracy", float((np.array(answers[each.name]) == labels).mean())),
            "mean_ms": float(times.mean()),
            "p50_ms": float(np.median(times)),
            "p99_ms": float(np.quantile(times, 0.99)),
            "per_second": float(np.median(rates)),
            "per_second_low": float(rates.min()),
            "per_second_high": float(rates.max()),
            "memory_mib": memory[each.name],
            "bytes": about[each.name].get("bytes", size_of(about[each.name])),
            "images": len(labels),
            "latencies": len(times),
        }
        rows.append(row)
        each.close()
    for row in rows:
        row |= over_best(row, rows)
        print(
            f"{row['name']:58} {row['accuracy']:.3f}  {row['mean_ms']:7.3f} ms  99 % {row['p99_ms']:7.3f} ms"
            f"  {row['per_second']:7.1f}/s  over best: {row['over_best']} / {row['over_best_batched']}"
        )
    others = of_other_machines(options.output, made["hardware"])
    write_rows(options.output, [*others, *({**row, **made} for row in rows)])


def of_other_machines(path: Path, hardware: str) -> list[Row]:
    """Return the rows of a file that were measured elsewhere."""
    rows = csv.DictReader(path.read_text().splitlines()) if path.exists() else ()
    return [dict(row) for row in rows if row["hardware"] != hardware]


def wait_for_a_line(paused: bool, what: str) -> None:
    """Wait until somebody says that the machine is quiet, where that was asked for."""
    if paused:
        print(f"waiting to {what}", flush=True)
        sys.stdin.readline()


def size_of(about: dict[str, Any]) -> int | str:
    """Return the bytes of a network in one file, nothing for others."""
    return Path(about["file"]).stat().st_size if "file" in about else ""


def in_turns(workers: list[Worker], first: int, end: int) -> dict[str, list[float]]:
    """Return milliseconds of single images, contenders in turns and in another order every time."""
    found: dict[str, list[float]] = {each.name: [] for each in workers}
    rng = np.random.default_rng(first)
    for start in range(first, end, TURN):
        for index in rng.permutation(len(workers)):
            rows = [*range(start, min(start + TURN, end))]
            found[workers[index].name] += workers[index].ask(do="one", rows=rows)[1]
    return found


def over_best(row: Row, rows: list[Row]) -> Row:
    """Return how many times as fast the row is as the fastest full network that is about as accurate, or more.

    `over_cut` is that over the fastest network that treats every image alike, full or cut after an exit.
    """
    alike = [each for each in rows if each["full"] or str(each["name"]).startswith("cut")]
    equal = [each for each in alike if float(each["accuracy"]) >= float(row["accuracy"]) - EQUAL]
    full = [each for each in equal if each["full"]]
    if not full:
        return {"over_best": "", "over_best_batched": "", "over_cut": "", "best_equal": "none"}
    best = min(full, key=lambda each: float(each["mean_ms"]))
    return {
        "over_best": float(best["mean_ms"]) / float(row["mean_ms"]),
        "over_best_batched": float(row["per_second"]) / max(float(each["per_second"]) for each in full),
        "over_cut": min(float(each["mean_ms"]) for each in equal) / float(row["mean_ms"]),
        "best_equal": str(best["name"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["prepare", "imagenet", "measure"])
    parser.add_argument("work", type=Path)
    parser.add_argument("--state", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--images", type=int, default=IMAGES, help="for accuracy; fewer for a rehearsal")
    parser.add_argument("--calibration", type=int, default=CALIBRATION)
    parser.add_argument("--latencies", type=int, default=LATENCIES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--without", nargs="*", default=[], help="leave out contenders whose names hold these words")
    parser.add_argument("--paused", action="store_true", help="wait for a line of input before each part")
    parser.add_argument("--output", type=Path, default=ROOT / "results/edge.csv")
    options = parser.parse_args()
    {"prepare": prepare, "imagenet": imagenet, "measure": measure}[options.step](options)


if __name__ == "__main__":
    main()
