"""Stages between open exits as modules, as programs that torch captures, and as ONNX files or compiled packages."""

import logging
import os
import shutil
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from alight.data.preprocess import TensorSpec
from alight.data.tokens import mask_meaning
from alight.engine.backends import Reads, State
from alight.engine.backends.torch import OpenStage, open_stages
from alight.errors import AlightError, BadInput
from alight.networks.multi_exit import MultiExitModel
from alight.policies.policy import Policy

BATCHES = (3, 1)  # samples in the examples: the first is traced, all are compared
TOKENS = (7, 10)  # of texts in them, so that no size is that of another axis
LENGTHS = (1, 2, 4, *TOKENS, 16, 32, 64, 128, 256, 512)  # of texts for which all stages are compared with the network
LOGITS = TensorSpec("logits", (None, None), "float32")
OPSET = 18  # of ONNX, from 2022: old enough for runtimes on devices, new enough for torch
PACKAGE_SETTINGS = {"cpp.dynamic_threads": True}  # as many threads as where it runs, not where it was compiled
EMBEDDINGS = {torch.nn.functional.embedding: ("input", "weight"), torch.embedding: ("weight", "indices")}  # arguments
COMPILERS = ("c++", "g++", "clang++", "cl")


class ExportedStage(nn.Module):
    """The stages up to an open exit and its head: gives logits first, then the next state."""

    def __init__(self, stage: OpenStage, exit_index: int) -> None:
        super().__init__()
        self.stage, self.exit_index = stage, exit_index

    def forward(self, *state: Tensor) -> tuple[Tensor, ...]:
        """Return the logits, then the next state."""
        with _RefusedNegatives():
            made, logits = self.stage.logits(*state)
        # A tensor that is handed on has another name behind the stage, where torch 2.6 would rename the input, too.
        return logits, *(each.clone() if any(each is one for one in state) else each for each in made)


class _RefusedNegatives(TorchFunctionMode):
    """Makes negative indices of embeddings too large: torch refuses both, the runtimes count negative ones back."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if names := EMBEDDINGS.get(func):
            given |= dict(zip(names, args, strict=False))
            name = names[names[0] == "weight"]  # of the indices
            given[name] = torch.where(given[name] < 0, given["weight"].shape[0], given[name])
            args = (*(given.pop(name) for name in names), *args[2:])
        return func(*args, **given)


@dataclass(frozen=True)
class StageRuns:
    """What went into a stage in several runs of the whole network, and what came out."""

    inputs: Sequence[State]
    outputs: Sequence[State]


@dataclass(frozen=True)
class ExportJob:
    """One stage that becomes one file."""

    stage: ExportedStage
    runs: StageRuns
    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def captured(self) -> Any:
        """Return the stage as torch.export captures it, for batches of any size, and texts of any length where free."""
        sizes = tuple(
            {axis: torch.export.Dim.DYNAMIC for axis, size in enumerate(each.shape) if size is None}
            for each in self.inputs
        )
        with torch.no_grad():
            return torch.export.export(self.stage, tuple(self.runs.inputs[0]), dynamic_shapes=(sizes,), strict=False)

    def onnx_arguments(self) -> dict[str, Any]:
        """Return the arguments of both ONNX exporters of torch: names of tensors, and the version of operators."""
        names = [each.name for each in self.inputs], [LOGITS.name, *(each.name for each in self.outputs)]
        return {"input_names": names[0], "output_names": names[1], "opset_version": OPSET, "verbose": False}


def exported_stages(model: MultiExitModel, policy: Policy) -> list[ExportedStage]:
    """Return the network as the policy opens it: without closed heads, and nothing after the last open exit."""
    stages = open_stages(model, policy.open_exits, [Reads(())] * len(policy.open_exits))
    pairs = zip(stages, policy.open_exits, strict=True)
    return [ExportedStage(stage, exit_index).eval() for stage, exit_index in pairs]


def run_stages(stages: Sequence[ExportedStage], model: MultiExitModel, example: Any) -> list[StageRuns]:
    """Return the inputs and outputs of every stage on random inputs like the example, at several batch sizes.

    Texts have several lengths, but for a network that was cut for one length.
    """
    rng = torch.Generator().manual_seed(0)
    try:
        return _runs(
            stages, [random_inputs(model, example, *sizes, rng) for sizes in zip(BATCHES, TOKENS, strict=True)]
        )
    except Exception:
        if not model.input_names:
            raise
        return _runs(stages, [random_inputs(model, example, count, None, rng) for count in BATCHES])


def spec_of(name: str, tensors: Sequence[Tensor]) -> TensorSpec:
    """Return the description of a tensor from several runs: sizes that differed are free."""
    if [each.shape[:1] for each in tensors] != [(count,) for count in BATCHES]:
        shape = tuple(tensors[0].shape)
        raise BadInput(f"{name} has shape {shape} for {BATCHES[0]} samples: every tensor must have one row per sample")
    _, *sizes = zip(*(each.shape for each in tensors), strict=True)
    others = (None if len({*each}) > 1 else each[0] for each in sizes)
    return TensorSpec(name, (None, *others), str(tensors[0].dtype).removeprefix("torch."))


def _runs(stages: Sequence[ExportedStage], inputs: Sequence[State]) -> list[StageRuns]:
    runs = []
    for stage in stages:
        with torch.no_grad():
            outputs = [stage(*state) for state in inputs]
        runs.append(StageRuns(inputs, outputs))
        # New tensors: a trace would keep what a stage noted about its own.
        inputs = [tuple(each.detach() for each in made[1:]) for made in outputs]
    return runs


def random_inputs(model: MultiExitModel, example: Any, count: int, tokens: int | None, rng: torch.Generator) -> State:
    """Return `count` random inputs like the example; texts of so many tokens, None is as many as there.

    The first two of three are full texts of one token each, so that positions which are counted from tokens or from a
    mask go as far as they can.
    """
    names = model.input_names or ("",) * len(model.admit(example))
    text, extremes = isinstance(example, Mapping), torch.arange(2 if count > 2 else 0)

    def drawn(name: str, like: Tensor) -> Tensor:
        shape = (count, tokens, *like.shape[2:]) if text and tokens and like.ndim > 1 else (count, *like.shape[1:])
        if like.is_floating_point():
            return torch.randn(shape, generator=rng, dtype=like.dtype)
        if meaning := mask_meaning(name):
            lengths = torch.randint(1, shape[1] + 1, (count, 1), generator=rng)
            lengths[: len(extremes)] = shape[1]
            kept = torch.arange(shape[1]) < lengths
            return (kept if meaning == "tokens" else ~kept).to(like.dtype)
        indices = torch.randint(0, 2, shape, generator=rng)  # the only ones that every network knows
        indices[: len(extremes)] = extremes.reshape(-1, *[1] * (len(shape) - 1))
        return indices.to(like.dtype)

    return tuple(drawn(*pair) for pair in zip(names, model.admit(example), strict=True))


def write_onnx(job: ExportJob) -> None:
    """Write a stage as one ONNX file."""
    path, program = str(job.path), job.captured()
    torch.onnx.export(program, (), path, dynamo=True, external_data=False, **job.onnx_arguments())


def write_traced(job: ExportJob) -> None:
    """Write a stage as one ONNX file by torch's older exporter, which records one run: for what the other cannot do."""
    axes = {
        each.name: {
            axis: f"{each.name}_{axis}" if axis else "samples" for axis, size in enumerate(each.shape) if size is None
        }
        for each in (*job.inputs, LOGITS, *job.outputs)
    }
    given, path = tuple(job.runs.inputs[0]), str(job.path)
    with torch.no_grad():
        torch.onnx.export(job.stage, given, path, dynamo=False, dynamic_axes=axes, **job.onnx_arguments())


def write_package(job: ExportJob) -> None:
    """Compile a stage into a .pt2 package; takes a C++ compiler and most of a minute."""
    path, program = str(job.path), job.captured()
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=PACKAGE_SETTINGS)


def check_compiler() -> None:
    """Check that this machine can compile packages."""
    if not hasattr(torch._inductor, "aoti_compile_and_package"):
        raise AlightError(f"torch {torch.__version__} compiles no packages: use torch 2.6 or newer, or format='onnx'")
    if not any(map(shutil.which, (os.environ.get("CXX", ""), *COMPILERS))):
        raise AlightError("there is no C++ compiler: install one (apt install g++), or use format='onnx'")


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
    """Return the innermost line of the network that was running, not of torch itself or of this file."""
    own = str(Path(torch.__file__).parent), __file__
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(own)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "in a layer of torch's own"


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
