"""A service as a process of its own, on a port that was free."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

READY = 60.0  # seconds until it listens, and then until it is ready


class Process(NamedTuple):
    """Where a service answers, and its process."""

    port: int
    pid: int


@contextmanager
def served(folder: Path, policy: Path, *options: str, core: int | None = None) -> Iterator[Process]:
    """Run a service of a network under a policy, with one thread, perhaps on one core, for as long as needed."""
    line = [sys.executable, "-m", "alight", "serve", str(folder.resolve()), str(policy.resolve()), *options]
    pin = ["taskset", "-c", str(core)] if core is not None else []
    with tempfile.TemporaryDirectory() as home:
        process = subprocess.Popen(
            [*pin, *line, "--port", "0", "--threads", "1"],
            cwd=home,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        lines: list[dict[str, Any]] = []
        begun = threading.Event()
        reader = threading.Thread(target=_listen, args=(process, lines, begun), daemon=True)
        reader.start()
        try:
            if not begun.wait(READY):
                raise SystemExit(f"the service does not say after {READY:.0f} seconds where it listens: {lines}")
            if process.poll() is not None:
                raise SystemExit(f"the service has ended with {process.returncode}: {lines}")
            yield Process(_ready(lines), process.pid)
        finally:
            process.terminate()
            process.wait()
            reader.join()


def _listen(process: "subprocess.Popen[str]", lines: list[dict[str, Any]], begun: threading.Event) -> None:
    """Read what it logs, so that it never waits for a reader; the first lines are kept."""
    logged: Sequence[str] | Any = process.stderr
    for line in logged:
        if not begun.is_set():
            lines.append(json.loads(line) if line.startswith("{") else {"event": line.strip()})
            if lines[-1]["event"] == "serving":
                begun.set()
    process.wait()
    begun.set()


def _ready(lines: Sequence[dict[str, Any]]) -> int:
    """The port, once the service is ready."""
    url = str(lines[-1]["url"])
    end = time.monotonic() + READY
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/readyz"):
                return int(url.rpartition(":")[2])
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"the service is not ready after {READY:.0f} seconds")
