"""Parts of a network as programs that torch has captured, and those as ONNX files."""

import logging
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
from alight.export.parts import Part, Seen

Tensors = tuple[TensorSpec, ...]

LOGITS = TensorSpec("logits", (None, None), "float32")
OPSET = 18  # of ONNX, from 2022: old enough for runtimes on devices, new enough for torch


def captured(part: Part, seen: Seen, inputs: Tensors) -> Any:
    """The part as torch.export sees it, for batches of any size, and texts of any length where they may differ."""
    sizes = tuple(
        {axis: torch.export.Dim.DYNAMIC for axis, size in enumerate(each.shape) if size is None} for each in inputs
    )
    with quietly(), torch.no_grad():
        return torch.export.export(part, tuple(seen.given[0]), dynamic_shapes=(sizes,), strict=False)


def write_onnx(program: Any, path: Path, inputs: Tensors, outputs: Tensors) -> None:
    """Write a captured part as one ONNX file."""
    with quietly():
        torch.onnx.export(program, (), str(path), dynamo=True, external_data=False, **_named(inputs, outputs))


def write_traced(part: Part, seen: Seen, path: Path, inputs: Tensors, outputs: Tensors) -> None:
    """Write a part as one ONNX file by torch's older exporter, which records one run: for what the other cannot do."""
    named = _named(inputs, outputs)
    shapes = zip((*named["input_names"], *named["output_names"]), (*inputs, LOGITS, *outputs), strict=True)
    axes = {
        name: {axis: f"{name}_{axis}" if axis else "samples" for axis, size in enumerate(told.shape) if size is None}
        for name, told in shapes
    }
    given = tuple(seen.given[0])
    with quietly(), torch.no_grad():
        torch.onnx.export(part, given, str(path), dynamo=False, dynamic_axes=axes, **named)


def _named(inputs: Tensors, outputs: Tensors) -> dict[str, Any]:
    names = {"input_names": [each.name for each in inputs], "output_names": [each.name for each in (LOGITS, *outputs)]}
    return {**names, "opset_version": OPSET, "verbose": False}


@contextmanager
def quietly() -> Iterator[None]:
    """Without the warnings and notes that torch's compilers write about themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def goes_by_data(error: Exception) -> bool:
    """Whether a part takes another way for other data: of that, a trace would keep the one way that it saw."""
    return any(isinstance(each, GuardOnDataDependentSymNode) for each in _causes(error))


def reason(error: Exception) -> str:
    """What torch's compilers ran into, in a line: the first cause, since the others tell of one another."""
    *_, first = _causes(error)
    told = " ".join(str(first).split())
    if isinstance(first, GuardOnDataDependentSymNode):
        return f"it takes another way for other data, {_place(first)}"
    return told[:300] if isinstance(first, AlightError) else f"{type(first).__name__}: {told[:300]}"


def _place(error: BaseException) -> str:
    """The innermost line of a network that was running, none of torch's own."""
    own = str(Path(torch.__file__).parent)
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(own)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "in a layer of torch's own"


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
