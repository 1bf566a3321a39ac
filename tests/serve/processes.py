"""The service as a process of its own, as people run it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx


@dataclass
class Service:
    """A process, where it answers, and what it has logged."""

    process: "subprocess.Popen[str]"
    url: str = ""
    lines: list[dict[str, Any]] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        """Take over what it logs, until it ends."""
        for text in self.process.stderr:
            line = json.loads(text)
            self.lines.append(line)
            if line["event"] == "serving":
                self.url = line["url"]
                self.ready.set()
        self.ready.set()

    def stop(self, kind: signal.Signals = signal.SIGTERM) -> int:
        """The exit status, once it has ended."""
        self.process.send_signal(kind)
        return self.process.wait(60)


@contextmanager
def service(line: str, cwd: Path, **environment: str) -> Iterator[Service]:
    """A service that answers, stopped afterwards if it has not been."""
    process = subprocess.Popen(
        [sys.executable, "-m", "alight.cli", "serve", *line.split(), "--port", "0", "--threads", "1"],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    made = Service(process)
    reader = threading.Thread(target=made.read, daemon=True)
    reader.start()
    try:
        assert made.ready.wait(120)
        assert made.url, made.lines
        for _ in range(600):
            try:
                if httpx.get(f"{made.url}/readyz").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.05)
        yield made
    finally:
        if process.poll() is None:
            made.stop(signal.SIGKILL)
        reader.join()
        process.stderr.close()
