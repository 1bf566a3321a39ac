"""`alight demo`: the main job in a minute."""

import argparse
import shlex
import shutil
import sys
import time
from pathlib import Path

from alight import demo
from alight.cli.arguments import new_folder
from alight.cli.command import Command, CommandResult
from alight.cli.doctor import missing_for
from alight.cli.options import folder_option
from alight.cli.tables import FAST_METHODS


def run_demo(options: argparse.Namespace) -> CommandResult:
    """Train a network with exits on digits, run it on half of its compute, and write a report."""
    start, missing = time.monotonic(), missing_for("torch", "learn")

    def say(step: str) -> None:
        if not options.quiet:
            print(f"[{time.monotonic() - start:3.0f} s] {step}", file=sys.stderr)

    with new_folder(Path(options.output)) as folder:
        result = demo.run_demo(folder, FAST_METHODS, missing, say, progress=not options.quiet)
    lines = result.lines | {"report": str(result.report)} | ({} if missing else {"next": _next(folder / "digits")})
    text = "\n".join(f"{name:<{max(map(len, lines))}}  {line}" for name, line in lines.items())
    values = {"report": result.report, "folder": folder.resolve(), "missing": missing, **result.values}
    return CommandResult(text, values)


def _next(folder: Path) -> str:
    """Return the command to try next, as it can be typed here."""
    alight = ["alight"] if shutil.which("alight") else [sys.executable, "-m", "alight.cli"]
    return shlex.join([*alight, "bench", *(str(folder / name) for name in ("network", "policy.json", "test.npz"))])


def _arguments(parser: argparse.ArgumentParser) -> None:
    folder_option(parser, "alight-demo", "folder for the report, the network and the policies")


COMMANDS = (Command("demo", run_demo, _arguments, ("demo",)),)
