"""Waiting for something that another thread or process does."""

import threading
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until a condition holds; fail if it does not hold in time."""
    end, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < end, f"{condition} does not hold after {seconds:g} seconds"
        pause.wait(0.02)
