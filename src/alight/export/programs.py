"""Stages as programs that torch has captured, and those as ONNX files or compiled packages."""

import logging
import os
import shutil
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from alight.data.spec import TensorSpec
from alight.errors import AlightError
from alight.export.stages import ExportedStage, StageRuns

Tensors = tuple[TensorSpec, ...]

LOGITS = TensorSpec("logits", (None, None), "float32")
PACKAGE_SETTINGS = {"cpp.dynamic_threads": True}  # as many threads as where it runs, not where it was compiled
COMPILERS = ("c++", "g++", "clang++", "cl")
OPSET = 18  # of ONNX, from 2022: old enough for runtimes on devices, new enough for torch


def captured(stage: ExportedStage, runs: StageRuns, inputs: Tensors) -> Any:
    """Return the stage as torch.export captures it, for batches of any size, and texts of any length where free."""
    sizes = tuple(
        {axis: torch.export.Dim.DYNAMIC for axis, size in enumerate(each.shape) if size is None} for each in inputs
    )
    with quietly(), torch.no_grad():
        return torch.export.export(stage, tuple(runs.inputs[0]), dynamic_shapes=(sizes,), strict=False)


def write_onnx(program: Any, path: Path, inputs: Tensors, outputs: Tensors) -> None:
    """Write a captured stage as one ONNX file."""
    with quietly():
        torch.onnx.export(program, (), str(path), dynamo=True, external_data=False, **_named(inputs, outputs))


def write_traced(stage: ExportedStage, runs: StageRuns, path: Path, inputs: Tensors, outputs: Tensors) -> None:
    """Write a stage as one ONNX file by torch's older exporter, which records one run: for what the other cannot do."""
    named = _named(inputs, outputs)
    shapes = zip((*named["input_names"], *named["output_names"]), (*inputs, LOGITS, *outputs), strict=True)
    axes = {
        name: {axis: f"{name}_{axis}" if axis else "samples" for axis, size in enumerate(spec.shape) if size is None}
        for name, spec in shapes
    }
    given = tuple(runs.inputs[0])
    with quietly(), torch.no_grad():
        torch.onnx.export(stage, given, str(path), dynamo=False, dynamic_axes=axes, **named)


def _named(inputs: Tensors, outputs: Tensors) -> dict[str, Any]:
    names = {"input_names": [each.name for each in inputs], "output_names": [each.name for each in (LOGITS, *outputs)]}
    return {**names, "opset_version": OPSET, "verbose": False}


def check_compiler() -> None:
    """Check that this machine can compile packages."""
    if not hasattr(torch._inductor, "aoti_compile_and_package"):
        raise AlightError(f"torch {torch.__version__} compiles no packages: use torch 2.6 or newer, or format='onnx'")
    if not any(map(shutil.which, (os.environ.get("CXX", ""), *COMPILERS))):
        raise AlightError("there is no C++ compiler: install one (apt install g++), or use format='onnx'")


def write_package(program: Any, path: Path) -> None:
    """Compile a captured stage into a .pt2 package; takes a C++ compiler and most of a minute."""
    with quietly():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=PACKAGE_SETTINGS)


@contextmanager
def quietly() -> Iterator[None]:
    """Silence the warnings and notes that torch's compilers write about themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def branches_on_data(error: Exception) -> bool:
    """Return whether a stage branches on its data: a trace would keep only the branch that it saw."""
    return any(isinstance(each, GuardOnDataDependentSymNode) for each in _causes(error))


def reason(error: Exception) -> str:
    """Return the cause of an error of torch's compilers, in a line: the first, since the others refer to it."""
    *_, first = _causes(error)
    text = " ".join(str(first).split())
    if isinstance(first, GuardOnDataDependentSymNode):
        return f"it branches on its data, {_place(first)}"
    return text[:300] if isinstance(first, AlightError) else f"{type(first).__name__}: {text[:300]}"


def _place(error: BaseException) -> str:
    """Return the innermost line of the network that was running, not of torch itself."""
    own = str(Path(torch.__file__).parent)
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(own)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "in a layer of torch's own"


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
