"""What runs without a GPU of a walk that one decides: programs by Python, kernels by Triton's interpreter."""

import os
import subprocess
import sys

import pytest

from alight.engine.backends.torch.conditional import Loop, Run
from alight.engine.backends.torch.device_walk import Executor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # which Triton looks at when it is imported
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own")


def passed_in_a_process_of_their_own(file, those=""):
    """The summary of a file's tests, run with Triton's interpreter; `those` chooses them by their marks."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-m", those]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def by_python(program, graphs, counters, updated):
    """What launches a program: its conditions are looked at by the host."""

    def holds(condition):
        return condition.above < int(counters[condition.counter]) <= condition.upto

    def run(steps):
        for step in steps:
            if isinstance(step, Run):
                graphs[step.key]()
                counters.copy_(updated)
            elif isinstance(step, Loop):
                while holds(step.condition):
                    run(step.body)
            else:
                for body in [body for condition, body in step.branches if holds(condition)]:
                    run(body)

    def launch():
        counters.copy_(updated)
        run(program)

    return launch


EXECUTOR = Executor(lambda work: work, by_python)
