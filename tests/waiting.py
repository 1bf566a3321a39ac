"""Waiting for something that another thread or process does."""

import threading
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until a condition holds; fail if it does not hold in time."""
    end, never, pause = time.monotonic() + seconds, threading.Event(), 0.001
    while not condition():
        assert time.monotonic() < end, f"{condition} does not hold after {seconds:g} seconds"
        never.wait(pause)
        pause = min(2 * pause, 0.02)
