"""`alight demo`: the whole main job, live on digits, all methods on recordings, and a report to look at."""

import argparse
import shlex
import shutil
import sys
import time
from pathlib import Path

from alight import calibrate
from alight.cli.command import Command, Found
from alight.cli.extras import missing_for
from alight.cli.given import new_folder
from alight.cli.options import output_folder
from alight.cli.tables import SLOW
from alight.demo.chapter import Chapter, Say
from alight.demo.recorded import run_recorded
from alight.report import write_report

METHODS = {name: method for name, method in calibrate.METHODS.items() if name not in SLOW}
BUDGETS = [f"{percent}%" for percent in range(20, 101, 10)]
TITLE = "Early exit: digits on this machine, CIFAR-100 as recorded"


def run_demo(options: argparse.Namespace) -> Found:
    """Train a network with exits on digits, run it on half of its compute, and write a report."""
    say, missing = _teller(options.quiet), missing_for("torch", "learn")
    with new_folder(Path(options.output)) as folder:
        chapters = [*_live(say, missing, not options.quiet), run_recorded(say, METHODS, BUDGETS, not options.quiet)]
        say("writing the report")
        for chapter in chapters:
            chapter.write(folder)
        networks = {name: network for chapter in chapters for name, network in chapter.networks.items()}
        promises = [promise for chapter in chapters for promise in chapter.promises]
        report = write_report(networks, folder / "report.html", title=TITLE, guarantees=promises).resolve()
    rows = {"digits": f"not live: {missing}"} if missing else {}
    for chapter in chapters:
        rows |= chapter.rows()
    rows |= {"report": str(report)} | ({} if missing else {"go on": _next(folder / "digits")})
    values = {name: found for chapter in chapters for name, found in chapter.values().items()}
    text = "\n".join(f"{name:<{max(map(len, rows))}}  {told}" for name, told in rows.items())
    return Found(text, {"report": report, "folder": folder.resolve(), "missing": missing, **values})


def _live(say: Say, missing: str, progress: bool) -> list[Chapter]:
    """The chapter that needs torch and scikit-learn, where both are there."""
    if missing:
        say(f"digits are not live: {missing}")
        return []
    say("loading PyTorch and scikit-learn")
    from alight.demo.live import run_live

    return [run_live(say, METHODS, BUDGETS, progress)]


def _next(folder: Path) -> str:
    """What to try then, as it can be typed here."""
    alight = ["alight"] if shutil.which("alight") else [sys.executable, "-m", "alight.cli"]
    return shlex.join([*alight, "bench", *(str(folder / name) for name in ("network", "policy.json", "test.npz"))])


def _teller(quiet: bool) -> Say:
    """Says what is done next, and how many seconds it has been."""
    start = time.monotonic()

    def say(what: str) -> None:
        if not quiet:
            print(f"[{time.monotonic() - start:3.0f} s] {what}", file=sys.stderr)

    return say


def _arguments(parser: argparse.ArgumentParser) -> None:
    folder = "folder for the report, the network and the policies (default: alight-demo)"
    parser.add_argument("-o", "--output", metavar="FOLDER", type=output_folder, default="alight-demo", help=folder)


COMMANDS = (Command("demo", run_demo, _arguments, ("demo",)),)
