"""Stages that torch compiles ahead of time (AOTInductor), and what runs them: for those who keep PyTorch."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alight.deploy.deployed import Deployed
from alight.deploy.folder import saved_policy
from alight.engine.prepare import threads
from alight.errors import AlightError, BadInput
from alight.export.manifest import AOTI, Manifest, verified
from alight.export.programs import quietly
from alight.files import PathLike
from alight.policies.policy import Policy

SETTINGS = {"cpp.dynamic_threads": True}  # as many threads as where it runs, not as where it was compiled
COMPILERS = ("c++", "g++", "clang++", "cl")


def check_compiler() -> None:
    """That this machine can compile packages."""
    if not hasattr(torch._inductor, "aoti_compile_and_package"):
        raise AlightError(f"torch {torch.__version__} compiles no packages: use torch 2.6 or newer, or format='onnx'")
    if not any(map(shutil.which, (os.environ.get("CXX", ""), *COMPILERS))):
        raise AlightError("there is no C++ compiler: install one (apt install g++), or use format='onnx'")


def write_package(program: Any, path: Path) -> None:
    """Compile a captured part into a .pt2 package; takes a C++ compiler and most of a minute."""
    with quietly():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=SETTINGS)


class Package:
    """One compiled stage: takes what is carried, in order, and gives the logits and what is carried on."""

    def __init__(self, path: Path, num_threads: int | None = None) -> None:
        self._num_threads = num_threads
        with quietly():
            self._run = torch._inductor.aoti_load_package(str(path))

    def __call__(self, carried: Any, rows: Any) -> tuple[np.ndarray, tuple[torch.Tensor, ...]]:
        """Logits of those in these rows, None is everyone, and what is carried on."""
        tensors = tuple(torch.as_tensor(each) for each in carried)
        if rows is not None:
            chosen = torch.from_numpy(rows)
            tensors = tuple(each.index_select(0, chosen) for each in tensors)
        with torch.inference_mode(), threads(self._num_threads):
            logits, *others = self._run(*tensors)
        return logits.numpy(), tuple(others)


def load_compiled(
    folder: PathLike,
    policy: Policy | None = None,
    *,
    batch_size: int = 256,
    probabilities: bool = False,
    num_threads: int | None = None,
    allow_mismatch: bool = False,
) -> Deployed:
    """The network of a folder that `export_model(..., format="aoti")` wrote, to be called as any other deployed one.

    The packages hold machine code: load only those that you or people whom you trust have compiled.

    >>> import tempfile
    >>> try:
    ...     load_compiled(tempfile.mkdtemp())
    ... except AlightError as error:
    ...     print(str(error).partition(": ")[2])
    it has no manifest.json; give a folder that `alight export` wrote
    """
    folder, manifest = Path(folder), Manifest.load(folder)
    if manifest.format != AOTI:
        raise BadInput(f"{folder} holds stages for onnxruntime: load them with alight.deploy.load")
    policy = saved_policy(folder, manifest) if policy is None else policy
    for stage in manifest.stages:
        verified(folder, stage.file, stage.checksum)
    stages = [Package(folder / stage.file, num_threads) for stage in manifest.stages]
    return Deployed(
        stages,
        policy,
        manifest,
        batch_size=batch_size,
        probabilities=probabilities,
        allow_mismatch=allow_mismatch,
    )
