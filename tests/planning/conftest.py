import time
from types import SimpleNamespace

import pytest

from alight.planning import timing


@pytest.fixture
def work_clock(monkeypatch):
    """Trials are short and timed by the work of this thread, so that other work on this machine changes no result."""
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=time.thread_time))
    monkeypatch.setattr(timing, "SECONDS", 0.02)
