import pytest

from alight.costing import measure
from alight.planning import timing


@pytest.fixture
def work_clock(clock_of_this_thread, monkeypatch):
    """Trials are short and timed by the work of this thread."""
    clock_of_this_thread(timing)
    clock_of_this_thread(measure)
    monkeypatch.setattr(timing, "SECONDS", 0.02)
