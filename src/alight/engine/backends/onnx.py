"""Stages that ONNX Runtime runs, on NumPy arrays."""

import copy
import importlib
import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

import numpy as np

from alight.data.batches import fitted
from alight.data.preprocess import first_unusable
from alight.engine.backends import HeadValues, Integers, Reads, State, score_one, score_rows
from alight.engine.manifest import Manifest, exported_spec, verified
from alight.errors import BadFile, BadInput

SPIN = {"session.force_spinning_stop": "1"}  # threads of one stage must not keep a core busy while the next one works
# how Protobuf writes the name of a file with weights: a field "location", in any encoding of its tag and length
ELSEWHERE = re.compile(rb"(?:\x0a|\x8a\x80*\x00)(?:\x08|\x88\x80*\x00)location")
TELEMETRY = "ORT_DISABLE_TELEMETRY"  # from 1.29 on it reports every network to its makers, unless this is set before


class OnnxBackend:
    """The stages of an exported folder, run by ONNX Runtime without PyTorch."""

    name = "onnxruntime"
    in_flight = 0
    supports_single_sample = True
    lengths: tuple[int, int] | None = None  # of texts for which it was compared with the network

    def __init__(self, folder: Path, manifest: Manifest, threads: int | None = None) -> None:
        self.threads, self.stages = threads, self._load(folder, manifest, threads)
        self.reads = [Reads(())] * len(self.stages)  # until a policy asks for more
        self.inputs, self.exits = exported_spec(folder, manifest), manifest.exits
        self.open_exits, self.fingerprint = manifest.open_exits, manifest.fingerprint
        self.lengths = manifest.lengths

    def _load(self, folder: Path, manifest: Manifest, threads: int | None) -> list[Any]:
        return [
            Session(verified(folder, stage.file, stage.checksum), f"{folder / stage.file}", threads)
            for stage in manifest.stages
        ]

    def with_reads(self, reads: Sequence[Reads]) -> Self:
        other = copy.copy(self)
        other.reads = [*reads]
        return other

    def admit(self, inputs: State) -> State:
        arrays = fitted(inputs, self.inputs)
        if self.lengths and not self.lengths[0] <= arrays[0].shape[1] <= self.lengths[1]:
            shortest, longest = self.lengths
            raise BadInput(
                f"texts of {arrays[0].shape[1]} tokens, and the exported network was seen to be the original for"
                f" {shortest} to {longest}: give such texts, or run the network with PyTorch"
            )
        return arrays

    def pin(self, inputs: State) -> State:
        return inputs

    def run(self, stage: int, state: State) -> tuple[HeadValues, State]:
        logits, state = self.stages[stage](state)
        return score_rows(logits, self.reads[stage]), state

    def run_one(self, stage: int, state: State) -> tuple[HeadValues, State]:
        logits, state = self.stages[stage](state)
        return score_one(logits, self.reads[stage]), state

    def take(self, state: State, rows: Integers) -> State:
        return tuple(each[rows] for each in state)

    def allocate(self, size: int, like: State) -> State:
        return tuple(np.empty((size, *each.shape[1:]), each.dtype) for each in like)

    def move(self, source: State, rows: Integers, target: State, slots: Integers) -> None:
        for one, other in zip(source, target, strict=True):
            other[slots] = one[rows]

    def owns(self, made: State, given: State) -> bool:
        return all(each.flags.writeable for each in made)  # ONNX Runtime gives every output memory of its own

    def first_unusable(self, state: State) -> int | None:
        return first_unusable(state)

    def running(self) -> AbstractContextManager[Any]:
        return nullcontext()  # sessions know their threads


class Session:
    """One stage: its graph takes the state, in order, and returns logits and the next state."""

    def __init__(self, content: bytes, name: str, threads: int | None = None) -> None:
        if ELSEWHERE.search(content):
            raise BadFile(
                name, "it names another file for its weights, which nothing verifies", "export it in one file"
            )
        runtime = _onnxruntime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = available_cores() if threads is None else threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors, which are raised as well
        for key, value in SPIN.items():
            options.add_session_config_entry(key, value)
        try:
            self._session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            problem = f"onnxruntime {runtime.__version__} cannot load it ({_first_line(error)})"
            raise BadFile(name, problem, "upgrade onnxruntime, or export it again") from error
        self._name, self._inputs = name, [each.name for each in self._session.get_inputs()]
        self._outputs = [each.name for each in self._session.get_outputs()]

    def __call__(self, state: State) -> tuple[np.ndarray, State]:
        """Return the logits and the next state."""
        try:
            logits, *others = self._session.run(self._outputs, dict(zip(self._inputs, state, strict=True)))
        except Exception as error:  # of several types, none of which onnxruntime exports
            raise BadInput(
                f"{self._name} cannot take these {len(state[0])} samples ({_first_line(error)}): look for indices of"
                " tokens that the network does not know, or for texts that are too long"
            ) from error
        return logits, tuple(others)


def available_cores() -> int:
    """Return the number of processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _onnxruntime() -> Any:
    os.environ.setdefault(TELEMETRY, "1")
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise BadInput('onnxruntime is not installed: pip install "alight[deploy]"') from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
