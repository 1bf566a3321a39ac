import gc
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings

from alight import recordings
from alight.outputs import HeadOutputs

gc.disable()  # until all tests are collected: modules stay, and looking at them again takes seconds
os.environ["OMP_NUM_THREADS"] = "1"  # torch, imported later, is slower with more on a busy machine

settings.register_profile("alight", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("alight")


def pytest_collection_finish() -> None:
    """Let the garbage collector look at what tests make, not at a million objects of the libraries each time."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Freeze again what a service that ended has unfrozen: the next one collects garbage when it starts."""
    if item.path.parent.name == "serve":
        gc.collect(1)
        gc.freeze()


def made_up(seed: int, samples: int, exits: int, *, classes: int = 5, ties: bool = False) -> HeadOutputs:
    """Outputs of an imaginary network whose later exits know more and whose scores know when they are right."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=samples)
    hardness = rng.uniform(size=(samples, 1))
    skill = np.linspace(0.3, 1.0, exits)[None, :]
    right = rng.uniform(size=(samples, exits)) < np.clip(1.4 * skill - hardness, 0.05, 0.98)
    predictions = np.where(
        right, labels[:, None], (labels[:, None] + 1 + rng.integers(classes - 1, size=(samples, exits))) % classes
    )
    scores = np.clip(0.5 * right + 0.5 * (1 - hardness) + 0.2 * rng.normal(size=(samples, exits)), -1, 2)
    return HeadOutputs(np.round(scores, 1) if ties else scores, predictions, labels)


@pytest.fixture
def clock_of_this_thread(monkeypatch) -> Callable[[ModuleType], None]:
    """A function that lets a module time the work of this thread, which other work on the machine does not slow."""
    clock = SimpleNamespace(perf_counter=time.thread_time)
    return lambda module: monkeypatch.setattr(module, "time", clock)


@pytest.fixture
def short_trials(clock_of_this_thread, monkeypatch) -> None:
    """Trials of plans and switches are short and timed by the work of this thread."""
    from alight.costing import measure
    from alight.planning import timing

    clock_of_this_thread(timing)
    clock_of_this_thread(measure)
    monkeypatch.setattr(timing, "SECONDS", 0.02)


@pytest.fixture(scope="session")
def frozen() -> recordings.Recording:
    return recordings.load("resnet18_cifar100_frozen")


@pytest.fixture(scope="session", autouse=True)
def session_folder(tmp_path_factory) -> None:
    """Where functions that are not fixtures keep what all tests share."""
    os.environ["SESSION_FOLDER"] = str(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def network(tmp_path_factory) -> Path:
    """A folder with a small network `model`, and digits as `train.npz` and `test.npz`; to be read only."""
    from commands import make_network, shared_folder

    return shared_folder(tmp_path_factory.getbasetemp(), "network", make_network)


@pytest.fixture(scope="session")
def chain(tmp_path_factory, network) -> Path:
    """A folder in which a chain of commands has trained, recorded, measured, calibrated; to be read only."""
    from commands import run_chain, shared_folder

    return shared_folder(tmp_path_factory.getbasetemp(), "chain", partial(run_chain, network))


@pytest.fixture(scope="session")
def example_files(tmp_path_factory) -> Path:
    """A folder with every file that examples of the commands read; to be copied."""
    from commands import shared_folder, write_example_files

    return shared_folder(tmp_path_factory.getbasetemp(), "example_files", write_example_files)
