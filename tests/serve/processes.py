"""The service as a process of its own, as people run it."""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx2 as httpx
from waiting import wait_until

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """A script of the folder of benchmarks, which imports others of it."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)


@dataclass
class Service:
    """A process, its address, and the lines that it has logged."""

    process: "subprocess.Popen[str]"
    verify: Any = True  # certificates that its client trusts
    url: str = ""
    lines: list[dict[str, Any]] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        """Keep what it logs, until it ends."""
        for text in self.process.stderr:
            line = json.loads(text) if text.startswith("{") else {"event": text.strip(), "level": "error"}
            self.lines.append(line)
            if line["event"] == "serving":
                self.url = line["url"]
                self.ready.set()
        self.ready.set()

    def is_ready(self) -> bool:
        """Whether it answers requests."""
        try:
            return httpx.get(f"{self.url}/readyz", verify=self.verify).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self, kind: signal.Signals = signal.SIGTERM) -> int:
        """The exit status, once it has ended."""
        self.process.send_signal(kind)
        return self.process.wait(60)


@contextmanager
def service(line: str, cwd: Path, verify: Any = True, **environment: str) -> Iterator[Service]:
    """A service that answers, stopped afterwards if it has not been."""
    process = subprocess.Popen(
        [sys.executable, "-m", "alight", "serve", *line.split(), "--port", "0", "--threads", "1"],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    started = Service(process, verify)
    reader = threading.Thread(target=started.read, daemon=True)
    reader.start()
    try:
        assert started.ready.wait(120)
        assert started.url, started.lines
        wait_until(started.is_ready)
        yield started
    finally:
        if process.poll() is None:
            started.stop(signal.SIGKILL)
        reader.join()
        process.stderr.close()
