"""Commands to begin with: demo, and doctor, which looks at what is installed and what is missing for what."""

import argparse
import importlib
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from alight import __version__
from alight.cli.arguments import FORCE, check_unused, folder_option, new_folder
from alight.cli.command import Command, CommandResult
from alight.cli.tables import FAST_METHODS
from alight.demo import RecordedDemo, run_recorded
from alight.files import WEIGHTS
from alight.provenance import installed_version, processor
from alight.report import write_report

if TYPE_CHECKING:
    from alight.demo.live import LiveDemo


class Extra(NamedTuple):
    """An optional part of alight: what it is for, and its modules."""

    purpose: str
    modules: tuple[str, ...]

    @property
    def packages(self) -> list[str]:
        """The names under which the modules are installed."""
        return [RENAMED.get(module, module.replace("_", "-")) for module in self.modules]


TITLE = "Early exit on digits and CIFAR-100"
BUDGETS = tuple(f"{percent}%" for percent in range(20, 101, 10))
LONG = ("auto", "search", "optimal_stopping", "learned_stopping")  # methods that take half of the time of all
CORE = ("numpy", "scipy", "tqdm")
RENAMED = {"ai_edge_litert": "ai-edge-litert", "PIL": "pillow", "sklearn": "scikit-learn"}
EXTRAS = {
    "torch": Extra("networks: attach, train, record, predict", ("torch", "safetensors")),
    "vision": Extra("networks of timm and torchvision, image files", ("torchvision", "timm", "PIL")),
    "text": Extra("networks of Hugging Face that read text", ("transformers",)),
    "deploy": Extra("exported networks, without PyTorch: run", ("onnxruntime",)),
    "openvino": Extra("exported networks by OpenVINO", ("openvino",)),
    "litert": Extra("networks of LiteRT in a cascade", ("ai_edge_litert", "PIL")),
    "export": Extra("networks to ONNX: export", ("onnx", "onnxscript")),
    "ray": Extra("many machines: predict and record --engine ray", ("ray", "pyarrow")),
    "figures": Extra("figures of the experiments", ("matplotlib",)),
    "learn": Extra("learned scores, and the digits that come with scikit-learn", ("sklearn",)),
    "serve": Extra("the HTTP service", ("fastapi", "uvicorn", "prometheus_client", "python_multipart", "PIL")),
    "completion": Extra("completion of commands in your shell", ("shtab",)),
}
OTHERS = {"pyarrow": "answers as Parquet", "datasets": "data sets of Hugging Face"}  # installed by their own name


def extra_of(module: str) -> str | None:
    """Return the extra that brings a module, None where none does.

    >>> extra_of("timm.layers"), extra_of("nonsense")
    ('vision', None)
    """
    top = module.partition(".")[0]
    return next((name for name, extra in EXTRAS.items() if top in extra.modules), None)


def missing_for(*extras: str) -> str:
    """Return which packages of these extras are missing and how to install them, in a line; empty if none is.

    >>> missing_for()
    ''
    """
    missing: dict[str, str] = {}  # packages, and the extra of each
    for name in extras:
        pairs = zip(EXTRAS[name].modules, EXTRAS[name].packages, strict=True)
        missing |= {package: name for module, package in pairs if find_spec(module) is None}
    of_extras = ",".join(dict.fromkeys(missing.values()))
    return f'{", ".join(missing)} missing: pip install "alight[{of_extras}]"' if missing else ""


@dataclass(frozen=True)
class Finding:
    """One thing that was checked: whether it is there, and if not, what to do."""

    name: str
    ok: bool
    detail: str
    advice: str = ""

    def __str__(self) -> str:
        line = f"{'ok     ' if self.ok else 'missing'}  {self.name:<10}  {self.detail}"
        return f"{line}\n{'':21}{self.advice}" if self.advice else line


def run_demo(options: argparse.Namespace) -> CommandResult:
    """Train a network with exits on digits, run it on half of its compute, and write a report."""
    start, missing = time.monotonic(), missing_for("torch", "learn")
    check_unused(str(Path(options.output) / "digits"), options.force or bool(missing), WEIGHTS)

    def say(step: str) -> None:
        if not options.quiet:
            print(f"[{time.monotonic() - start:3.0f} s] {step}", file=sys.stderr)

    methods = {name: method for name, method in FAST_METHODS.items() if name not in LONG}
    parts: list[LiveDemo | RecordedDemo] = []
    with new_folder(Path(options.output)) as folder:
        if missing:
            say(f"digits are not live: {missing}")
        else:
            say("loading PyTorch and scikit-learn")
            from alight.demo.live import run_live

            parts.append(run_live(say, methods, progress=not options.quiet))
        parts.append(run_recorded(say, methods, BUDGETS, progress=not options.quiet))
        say("writing the report")
        for part in parts:
            part.write(folder)
        networks = {name: network for part in parts for name, network in part.networks.items()}
        report = write_report(networks, folder / "report.html", title=TITLE).resolve()
    values = {"report": report, "folder": folder.resolve(), "missing": missing}
    for part in parts:
        values |= part.values()
    last = f"report: {report}\n" + (f"digits are not live: {missing}" if missing else f"next: {_next(folder)}")
    return CommandResult("\n\n".join([*(part.text() for part in parts), last]), values)


def _next(folder: Path) -> str:
    """Return the command to try next, as it can be typed here."""
    alight = ["alight"] if shutil.which("alight") else [sys.executable, "-m", "alight"]
    return shlex.join([*alight, "bench", str(folder / "digits"), str(folder / "digits" / "test.npz")])


def run_doctor(options: argparse.Namespace) -> CommandResult:
    """Show what is installed here, which devices there are, and what is missing for what."""
    findings = [_core(), *map(_extra, EXTRAS), *map(_other, OTHERS), *_devices(), _compiler()]
    return CommandResult("\n".join(map(str, findings)), {"alight": __version__, "findings": findings})


def _core() -> Finding:
    versions = [f"Python {platform.python_version()}", *(f"{name} {installed_version(name)}" for name in CORE)]
    return Finding("alight", True, f"{__version__}, {', '.join(versions)}: calibrate, sweep, report, demo")


def _extra(name: str) -> Finding:
    extra = EXTRAS[name]
    versions = {package: installed_version(package) for package in extra.packages}
    missing = [package for package, number in versions.items() if number is None]
    advice = f'pip install "alight[{name}]"' if missing else ""
    if not missing and (error := _import_error(extra.modules)):
        missing, advice = [error], f'pip install --force-reinstall "alight[{name}]"'
    detail = ", ".join(f"{package} {number}" for package, number in versions.items())
    return Finding(
        name, not missing, f"{extra.purpose} ({'without ' + ', '.join(missing) if missing else detail})", advice
    )


def _other(name: str) -> Finding:
    number = installed_version(name)
    detail = f"{OTHERS[name]} ({number or 'not installed'})"
    return Finding(name, number is not None, detail, "" if number else f"pip install {name}")


def _devices() -> list[Finding]:
    system = f"{platform.system()} {platform.machine()}"
    host = Finding("processor", True, f"{processor()}, {os.cpu_count()} cores, {system}")
    if installed_version("torch") is None or _import_error(["torch"]):
        return [host]
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        advice = "networks run on the processor" + ("" if built else ": this torch was built without GPU support")
        return [host, Finding("GPU", False, "none that torch can use", advice)]
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [host, *(Finding("GPU", True, f"{each.name}, {each.total_memory / 2**30:.0f} GiB") for each in devices)]


def _compiler() -> Finding:
    name = next((each for each in ("c++", "g++", "clang++", "cl") if shutil.which(each)), None)
    advice = "" if name else "install one (apt install g++), or leave --compile out"
    return Finding("compiler", name is not None, f"--compile on a processor ({name or 'no C++ compiler'})", advice)


def _import_error(modules: Iterable[str]) -> str | None:
    """Return the error of the first module that cannot be imported, in a line; None if all can."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken installation fails in a dozen ways
            return f"{module}, which fails: {str(error).partition(chr(10))[0]}"
    return None


COMMANDS = (
    Command(
        run_demo, [folder_option("alight-demo", "folder for the report, the network and the policies"), FORCE], ["demo"]
    ),
    Command(run_doctor, [], ["doctor", "doctor --json"]),
)
