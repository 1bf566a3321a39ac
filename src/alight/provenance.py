"""Where, when and with what a number was measured."""

import os
import platform
import subprocess
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def provenance(*packages: str, folder: str | os.PathLike[str] = ".") -> dict[str, str]:
    """Return hardware, versions, date and commit of this run as text; `packages` are those whose versions matter.

    >>> sorted(provenance("numpy"))
    ['commit', 'date', 'hardware', 'versions']
    """
    versions = [f"{name} {installed_version(name) or 'not installed'}" for name in ("alight", *packages)]
    return {
        "hardware": f"{processor()}, {os.cpu_count()} cores",
        "versions": ", ".join([f"python {platform.python_version()}", *versions]),
        "date": date.today().isoformat(),
        "commit": _commit(folder),
    }


def measured_on(*packages: str) -> str:
    """Return where, with which versions of these packages and when something was measured, as a note.

    >>> measured_on("numpy").startswith("measured on ")
    True
    """
    about = provenance(*packages)
    return f"measured on {about['hardware']}, {about['versions']}, {about['date']}"


def processor() -> str:
    """Return the processor's name, where the system gives one."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def installed_version(package: str) -> str | None:
    """Return the version of a package, None where it is not installed.

    >>> installed_version("nonsense") is None
    True
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    return {name: number for name in packages if (number := installed_version(name))}


def _commit(folder: str | os.PathLike[str]) -> str:
    try:
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True)
    except OSError:
        return ""
    return git.stdout.strip()
