"""`alight doctor`: what is installed here, what runs, and what is missing for what."""

import argparse
import importlib
import os
import platform
import shutil
from dataclasses import dataclass

from alight import __version__
from alight.cli.command import Command, Found
from alight.cli.extras import BESIDE, EXTRAS
from alight.provenance import installed_version, processor

CORE = ("numpy", "scipy", "tqdm")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: whether it is there, and if not, what to do."""

    name: str
    fine: bool
    told: str
    advice: str = ""

    def __str__(self) -> str:
        told = f"{'ok     ' if self.fine else 'missing'}  {self.name:<10}  {self.told}"
        return f"{told}\n{'':21}{self.advice}" if self.advice else told


def run_doctor(options: argparse.Namespace) -> Found:
    """Say what is installed here, which devices there are, and what is missing for what."""
    findings = [_core(), *map(_extra, EXTRAS), *_beside(), *_devices(), _compiler()]
    return Found("\n".join(map(str, findings)), {"alight": __version__, "findings": findings})


def _core() -> Finding:
    told = [f"Python {platform.python_version()}", *(f"{name} {installed_version(name)}" for name in CORE)]
    return Finding("alight", True, f"{__version__}, {', '.join(told)}: calibrate, sweep, report, demo")


def _extra(name: str) -> Finding:
    extra = EXTRAS[name]
    found = {module: installed_version(package) for module, package in extra.packages.items()}
    missing = [extra.packages[module] for module, number in found.items() if number is None]
    advice = f'pip install "alight[{name}]"' if missing else ""
    broken = None if missing else _trouble(found)
    if broken:
        missing, advice = [broken], f'pip install --force-reinstall "alight[{name}]"'
    told = ", ".join(f"{extra.packages[module]} {number}" for module, number in found.items() if number)
    return Finding(
        name, not missing, f"{extra.purpose} ({'without ' + ', '.join(missing) if missing else told})", advice
    )


def _beside() -> list[Finding]:
    found = {name: installed_version(name) for name in BESIDE}
    return [
        Finding(
            name,
            number is not None,
            f"{BESIDE[name]} ({number or 'not installed'})",
            "" if number else f"pip install {name}",
        )
        for name, number in found.items()
    ]


def _devices() -> list[Finding]:
    host = Finding(
        "processor", True, f"{processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    )
    if installed_version("torch") is None or _trouble(["torch"]):
        return [host]
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        advice = "networks run on the processor" + ("" if built else ": this torch was built without GPU support")
        return [host, Finding("GPU", False, "none that torch can use", advice)]
    names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    told = [f"{each.name}, {each.total_memory / 2**30:.0f} GiB" for each in names]
    return [host, *(Finding("GPU", True, each) for each in told)]


def _compiler() -> Finding:
    found = next((each for each in ("c++", "g++", "clang++", "cl") if shutil.which(each)), None)
    advice = "" if found else "install one (apt install g++), or leave --compile out"
    return Finding("compiler", found is not None, f"--compile on a processor ({found or 'no C++ compiler'})", advice)


def _trouble(modules: "list[str] | dict[str, str | None]") -> str | None:
    """What goes wrong when they are imported, in a line; None if nothing does."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken installation fails in a dozen ways
            return f"{module}, which fails: {str(error).partition(chr(10))[0]}"
    return None


COMMANDS = (Command("doctor", run_doctor, lambda parser: None, ("doctor", "doctor --json")),)
