"""Stages that ONNX Runtime runs, on NumPy arrays; nothing is copied between two stages."""

import copy
import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import local
from typing import Any, Self

import numpy as np

from alight.data.batches import fitted
from alight.data.preprocess import first_unusable
from alight.data.tokens import library
from alight.engine.backends import HeadValues, Integers, Reads, State, score_one, score_rows
from alight.engine.manifest import Manifest, check_probe, exported_spec, verified
from alight.engine.settings import PROVIDER, RunSettings
from alight.errors import BadFile, BadInput

SPIN = {"session.force_spinning_stop": "1"}  # threads of one stage must not keep a core busy while the next one works
# how Protobuf writes the name of a file with weights: a field "location", in any encoding of its tag and length; what
# does not fit into 32 bits is dropped from the fifth byte of a tag, though not of a length; as `check_whole` in C++
ELSEWHERE = re.compile(
    rb"(?:\x0a|\x8a(?:\x80*\x00|\x80{3}[\x10\x20\x30\x40\x50\x60\x70]))(?:\x08|\x88\x80*\x00)location"
)
TELEMETRY = "ORT_DISABLE_TELEMETRY"  # from 1.29 on it reports every network to its makers, unless this is set before
CPU = "CPU" + PROVIDER
MEMORY = {"CUDA" + PROVIDER: "cuda", "Tensorrt" + PROVIDER: "cuda"}  # of providers whose states are not the host's


class OnnxBackend:
    """The stages of an exported folder, run by ONNX Runtime without PyTorch."""

    name = "onnxruntime"
    in_flight = 0
    supports_single_sample = True
    probes = True  # stages are run once when they are loaded, to compare them with those that were exported
    lengths: tuple[int, int] | None = None  # of texts for which it was compared with the network

    def __init__(
        self, folder: Path, manifest: Manifest, settings: RunSettings | None = None, batch_size: int | None = None
    ) -> None:
        self.settings, self.batch_size = settings or RunSettings(), batch_size
        self.stages = self._load(folder, manifest)
        self.reads = [Reads(())] * len(self.stages)  # until a policy asks for more
        self.inputs, self.exits = exported_spec(folder, manifest), manifest.exits
        self.open_exits, self.fingerprint = manifest.open_exits, manifest.fingerprint
        self.lengths = manifest.lengths
        if self.probes:
            check_probe(folder, manifest, self.stages)

    def _load(self, folder: Path, manifest: Manifest) -> list[Any]:
        threads, providers = self.settings.threads, self.settings.providers
        return [
            Session(verified(folder, stage.file, stage.checksum), f"{folder / stage.file}", threads, providers)
            for stage in manifest.stages
        ]

    def with_reads(self, reads: Sequence[Reads]) -> Self:
        other = copy.copy(self)
        other.reads = [*reads]
        return other

    def admit(self, inputs: State) -> State:
        arrays = fitted(inputs, self.inputs)
        if self.lengths:
            self._check_lengths(arrays, self.lengths)
        return arrays

    def _check_lengths(self, arrays: Sequence[np.ndarray], known: tuple[int, int]) -> None:
        """Check that texts are as long as their masks, which OpenVINO does not, and no longer than was compared."""
        tensors = self.inputs.tensors
        own = [
            (each.name, array.shape[1]) for each, array in zip(tensors, arrays, strict=True) if None in each.shape[1:2]
        ]
        (name, length), *others = own
        if odd := [each for each in others if each[1] != length]:
            raise BadInput(
                f"{name} has {length} tokens and {odd[0][0]} {odd[0][1]}: give every input of a text one length"
            )
        if not known[0] <= length <= known[1]:
            raise BadInput(
                f"texts of {length} tokens, and the exported network was seen to be the original for {known[0]} to"
                f" {known[1]}: give such texts, or run the network with PyTorch"
            )

    def pin(self, inputs: State) -> State:
        return inputs

    def run(self, stage: int, state: State) -> tuple[HeadValues, State]:
        logits, state = self.stages[stage](state)
        return score_rows(logits, self.reads[stage]), state

    def run_one(self, stage: int, state: State) -> tuple[HeadValues, State]:
        run = getattr(self.stages[stage], "run_one", self.stages[stage])
        logits, state = run(state)
        return score_one(logits, self.reads[stage]), state

    def take(self, state: State, rows: Integers) -> State:
        return tuple(each[rows] for each in state)

    def allocate(self, size: int, like: State) -> State:
        return tuple(np.empty((size, *each.shape[1:]), each.dtype) for each in like)

    def move(self, source: State, rows: Integers, target: State, slots: Integers) -> None:
        for one, other in zip(source, target, strict=True):
            other[slots] = one[rows]

    def owns(self, made: State, given: State) -> bool:
        return all(each.flags.writeable for each in made)  # every output has memory of its own

    def first_unusable(self, state: State) -> int | None:
        return first_unusable(state)

    def running(self) -> AbstractContextManager[Any]:
        return nullcontext()  # sessions know their threads


class Session:
    """One stage: its graph takes the state, in order, and returns logits and the next state."""

    def __init__(self, content: bytes, name: str, threads: int | None = None, providers: Sequence[str] = ()) -> None:
        check_whole(content, name)
        runtime = _onnxruntime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = available_cores() if threads is None else threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # errors are raised
        for key, value in SPIN.items():
            options.add_session_config_entry(key, value)
        chosen = chosen_providers(providers)
        try:
            self._session = runtime.InferenceSession(content, options, providers=chosen)
        except Exception as error:
            problem = f"onnxruntime {runtime.__version__} cannot load it ({first_line(error)})"
            raise BadFile(name, problem, "upgrade onnxruntime, or export it again") from error
        given, made = self._session.get_inputs(), self._session.get_outputs()
        self._name, self.inputs, self._outputs = name, [each.name for each in given], [each.name for each in made]
        self._is_fixed = all(isinstance(size, int) for each in (*given, *made) for size in each.shape[1:])
        self._memory = MEMORY.get(chosen[0], "cpu")
        self._bound = local()  # each thread has memory of its own

    def __call__(self, state: State) -> tuple[np.ndarray, State]:
        """Return the logits and the next state, in the memory where ONNX Runtime wrote them."""
        try:
            logits, *others = self._session.run(self._outputs, dict(zip(self.inputs, state, strict=True)))
        except Exception as error:  # of several types, none of which onnxruntime exports
            raise BadInput(refusal(self._name, len(state[0]), error)) from error
        return logits, tuple(others)

    def run_one(self, state: State) -> tuple[np.ndarray, State]:
        """Return the logits and the next state of a single sample, in memory that the next sample overwrites."""
        run: Binding | None = getattr(self._bound, "run", None)
        if run is None:
            made = logits, others = self(tuple(map(on_host, state)))
            if self._is_fixed:
                self._bound.run = Binding(self._session, self.inputs, self._outputs, (logits, *others), self._memory)
            return made
        try:
            return run(state)
        except Exception as error:
            self._bound.run = None
            raise BadInput(refusal(self._name, 1, error)) from error


class Binding:
    """Runs a session for single samples, in memory that is bound to it once: nothing is copied between two stages."""

    def __init__(
        self, session: Any, inputs: Sequence[str], outputs: Sequence[str], made: Sequence[np.ndarray], memory: str
    ) -> None:
        values = _onnxruntime().OrtValue
        self._session, self._binding, self._inputs = session, session.io_binding(), inputs
        self._given: list[Any] = [None] * len(inputs)  # what is bound, and so must not be freed
        self._logits = np.empty_like(made[0])
        place = self._logits.ctypes.data
        self._binding.bind_output(outputs[0], "cpu", 0, self._logits.dtype, self._logits.shape, place)
        self._state = tuple(values.ortvalue_from_shape_and_type(each.shape, each.dtype, memory) for each in made[1:])
        for name, each in zip(outputs[1:], self._state, strict=True):
            self._binding.bind_ortvalue_output(name, each)

    def __call__(self, state: State) -> tuple[np.ndarray, State]:
        """Return the logits and the next state, in memory that the next run overwrites."""
        for index, each in enumerate(state):
            if isinstance(each, np.ndarray):
                self._given[index] = each = np.ascontiguousarray(each)
                self._binding.bind_cpu_input(self._inputs[index], each)
            elif each is not self._given[index]:
                self._given[index] = each
                self._binding.bind_ortvalue_input(self._inputs[index], each)
        self._session.run_with_iobinding(self._binding)
        return self._logits, self._state


def on_host(tensor: Any) -> np.ndarray:
    """Return a part of a state that `run_one` gives as an array."""
    made: np.ndarray = tensor.numpy() if hasattr(tensor, "numpy") else np.asarray(getattr(tensor, "data", tensor))
    return made


def check_whole(content: bytes, name: str) -> None:
    """Refuse a stage that reads its weights from elsewhere."""
    if ELSEWHERE.search(content):
        raise BadFile(name, "it names another file for its weights, which nothing verifies", "export it in one file")


def chosen_providers(names: Sequence[str]) -> list[str]:
    """Return providers as ONNX Runtime spells them, the CPU last: it runs what the others cannot."""
    known = {each.removesuffix(PROVIDER).lower(): each for each in _onnxruntime().get_available_providers()}
    chosen = [known.get(name) for name in names]
    if None in chosen:
        raise BadInput(
            f"this onnxruntime has no provider {names[chosen.index(None)]!r}: choose among {', '.join(known)}, or"
            " install the build of onnxruntime that has it, such as onnxruntime-gpu"
        )
    return [*dict.fromkeys([*filter(None, chosen), CPU])]


def available_cores() -> int:
    """Return the number of processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def refusal(name: str, samples: int, error: Exception) -> str:
    """Return why a stage cannot take its inputs, and what to look for."""
    return (
        f"{name} cannot take these {samples} samples ({first_line(error)}): look for indices of tokens that the"
        " network does not know, or for texts that are too long"
    )


def first_line(error: Exception) -> str:
    """Return the first line of an error's text that says more than where OpenVINO raised it."""
    lines = str(error).strip().splitlines()
    return next((each for each in lines if each and "Exception from " not in each), "no reason is given")


def _onnxruntime() -> Any:
    os.environ.setdefault(TELEMETRY, "1")
    return library("onnxruntime", '"alight[deploy]"')
