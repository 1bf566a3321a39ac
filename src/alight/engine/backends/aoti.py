"""Stages that torch compiled ahead of time (AOTInductor) and runs."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alight.data.batches import as_tensor
from alight.engine.backends import State
from alight.engine.backends.onnx import OnnxBackend
from alight.engine.backends.torch import rows
from alight.engine.backends.torch.prepare import running
from alight.engine.manifest import Manifest, verified


class AotiBackend(OnnxBackend):
    """The compiled stages of an exported folder: values are computed on the host as with ONNX Runtime."""

    name = "PyTorch, compiled ahead of time"

    def _load(self, folder: Path, manifest: Manifest) -> list[Any]:
        for stage in manifest.stages:
            verified(folder, stage.file, stage.checksum)
        return [Package(folder / stage.file) for stage in manifest.stages]

    take = staticmethod(rows.take)
    allocate = staticmethod(rows.allocate)
    move = staticmethod(rows.move)
    owns = staticmethod(rows.owns)

    def admit(self, inputs: State) -> State:
        return tuple(map(as_tensor, super().admit(inputs)))

    def first_unusable(self, state: State) -> int | None:
        return super().first_unusable(tuple(each.numpy() for each in state))

    def running(self) -> AbstractContextManager[Any]:
        return running(self.settings.threads)


class Package:
    """One compiled stage: takes the state, in order, and returns logits and the next state."""

    def __init__(self, path: Path) -> None:
        self._run = torch._inductor.aoti_load_package(str(path))

    def __call__(self, state: State) -> tuple[np.ndarray, State]:
        """Return the logits and the next state."""
        with torch.inference_mode():
            logits, *others = self._run(*map(as_tensor, state))
        return logits.numpy(), tuple(others)
