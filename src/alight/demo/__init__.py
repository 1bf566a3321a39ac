"""The main job in a minute: digits live, all methods on recordings, and a report."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alight import calibrate
from alight.demo.recorded import RecordedDemo, run_recorded
from alight.report import write_report

if TYPE_CHECKING:
    from alight.demo.live import LiveDemo

TITLE = "Early exit: digits on this machine, CIFAR-100 as recorded"
BUDGETS = tuple(f"{percent}%" for percent in range(20, 101, 10))


@dataclass(frozen=True)
class DemoResult:
    """Results of the demo: lines by name for people, values for programs, and the path of the report."""

    lines: dict[str, str]
    values: dict[str, Any]
    report: Path


def run_demo(
    folder: Path, methods: Mapping[str, calibrate.Method], missing: str, say: Callable[[str], None], progress: bool
) -> DemoResult:
    """Run both parts, write their files and the report to the folder, and return what was measured.

    `missing` says which packages the live part lacks: it runs only where this is empty. `say` receives what is done
    next, in a line.
    """
    parts: list[LiveDemo | RecordedDemo] = []
    if missing:
        say(f"digits are not live: {missing}")
    else:
        say("loading PyTorch and scikit-learn")
        from alight.demo.live import run_live

        parts.append(run_live(say, methods, BUDGETS, progress))
    parts.append(run_recorded(say, methods, BUDGETS, progress))
    say("writing the report")
    for part in parts:
        part.write(folder)
    networks = {name: network for part in parts for name, network in part.networks.items()}
    guarantees = [sentence for part in parts for sentence in part.guarantees]
    report = write_report(networks, folder / "report.html", title=TITLE, guarantees=guarantees).resolve()
    lines = {"digits": f"not live: {missing}"} if missing else {}
    for part in parts:
        lines |= part.lines()
    return DemoResult(lines, {name: value for part in parts for name, value in part.values().items()}, report)
