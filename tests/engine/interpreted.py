"""What runs without a GPU of a walk that one decides: programs by Python, kernels by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from alight.engine.backends.torch.conditional import Run
from alight.engine.backends.torch.device_walk import Executor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # which Triton looks at when it is imported
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")


def skip_without_loops() -> None:
    """Skip a test where Triton's interpreter cannot count loops, as that of 3.2: NumPy warns of it, or refuses it."""
    interpreter = Path(pytest.importorskip("triton").__file__).parent / "runtime" / "interpreter.py"
    if "__index__ = lambda self: int(self.handle.data)\n" in interpreter.read_text():
        pytest.skip(f"this Triton's interpreter counts no loops with NumPy {np.__version__}: take a newer Triton")


def passed_in_a_process_of_their_own(file, those=""):
    """The summary of a file's tests, run with Triton's interpreter; `those` chooses them by their marks."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-m", those]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


class ByPython:
    """A program whose conditions are looked at by the host."""

    def __init__(self, program, graphs, counters):
        self.program, self.graphs, self.counters = program, graphs, counters

    def launch(self):
        self.run(self.program)

    def run(self, steps):
        for step in steps:
            if isinstance(step, Run):
                self.graphs[step.key].replay()
                continue
            chosen = [body for condition, body in step.branches if self.holds(condition)]
            assert len(chosen) <= 1
            self.run(chosen[0] if chosen else [])

    def holds(self, condition):
        return condition.above < int(self.counters[condition.counter]) <= condition.upto

    def wait(self, is_done):
        assert is_done()

    def finish(self):
        """Nothing runs."""


class Captured:
    """Work that is done again."""

    def __init__(self, work):
        self.replay = work


EXECUTOR = Executor(Captured, ByPython)
