"""Where, when and with what a number was measured: what stands beside every result."""

import os
import platform
import subprocess
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def provenance(*packages: str, folder: str | os.PathLike[str] = ".") -> dict[str, str]:
    """Hardware, versions, date and commit of this run, as text; `packages` are those whose versions matter.

    >>> sorted(provenance("numpy"))
    ['commit', 'date', 'hardware', 'versions']
    """
    versions = {"python": platform.python_version()} | {name: _version(name) for name in ("alight", *packages)}
    return {
        "hardware": f"{processor()}, {os.cpu_count()} cores",
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "date": date.today().isoformat(),
        "commit": _commit(folder),
    }


def processor() -> str:
    """The processor's own name, where the system tells."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    named = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit(folder: str | os.PathLike[str]) -> str:
    try:
        told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True)
    except OSError:
        return ""
    return told.stdout.strip()
