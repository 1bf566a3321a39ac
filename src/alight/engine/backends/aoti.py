"""Stages that torch compiled ahead of time (AOTInductor) and runs."""

from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alight.data.batches import as_tensor
from alight.engine.backends import Integers, State
from alight.engine.backends.onnx import OnnxBackend
from alight.engine.backends.torch import rows
from alight.engine.backends.torch.prepare import threads
from alight.engine.manifest import Manifest, verified


class AotiBackend(OnnxBackend):
    """The compiled stages of an exported folder: values are computed on the host as with ONNX Runtime."""

    name = "PyTorch, compiled ahead of time"

    def __init__(self, folder: Path, manifest: Manifest, threads: int | None = None) -> None:
        super().__init__(folder, manifest, threads)
        self.threads = threads

    def _load(self, folder: Path, manifest: Manifest, threads: int | None) -> list[Any]:
        for stage in manifest.stages:
            verified(folder, stage.file, stage.checksum)
        return [Package(folder / stage.file) for stage in manifest.stages]

    def take(self, state: State, chosen: Integers) -> State:
        """Return the rows of survivors, compacted into new memory."""
        return rows.take(tuple(map(as_tensor, state)), chosen)

    def allocate(self, size: int, like: State) -> State:
        """Return memory for so many samples."""
        return rows.allocate(size, tuple(map(as_tensor, like)))

    def move(self, source: State, chosen: Integers, target: State, slots: Integers) -> None:
        """Copy rows of one state into slots of another."""
        rows.move(tuple(map(as_tensor, source)), chosen, target, slots)

    def owns(self, made: State, given: State) -> bool:
        """Return whether the tensors lie in memory of their own."""
        return rows.owns(made, tuple(map(as_tensor, given)))

    def running(self) -> AbstractContextManager[Any]:
        """Return the context in which stages run: inference mode, and as many threads as asked for."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode())
        stack.enter_context(threads(self.threads))
        return stack


class Package:
    """One compiled stage: takes the state, in order, and returns logits and the next state."""

    def __init__(self, path: Path) -> None:
        self._run = torch._inductor.aoti_load_package(str(path))

    def __call__(self, state: State) -> tuple[np.ndarray, State]:
        """Return the logits and the next state."""
        with torch.inference_mode():
            logits, *others = self._run(*map(as_tensor, state))
        return logits.numpy(), tuple(others)
