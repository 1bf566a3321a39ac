"""Stages that OpenVINO runs, on NumPy arrays."""

import io
from functools import cache
from pathlib import Path
from threading import local
from typing import Any

import numpy as np

from alight.data.tokens import library
from alight.engine.backends import HeadValues, State, score_one
from alight.engine.backends.onnx import OnnxBackend, available_cores, check_whole, first_line, refusal
from alight.engine.manifest import BFLOAT16, Manifest, verified
from alight.errors import BadFile, BadInput

PRECISION = "INFERENCE_PRECISION_HINT"  # else it takes bf16 for float32 on processors that have it


class OpenVinoBackend(OnnxBackend):
    """The ONNX stages of an exported folder, run by OpenVINO: with bf16 arithmetic, where the folder says so."""

    name = "OpenVINO"

    def _load(self, folder: Path, manifest: Manifest) -> list[Any]:
        if self.settings.providers:
            raise BadInput("providers are those of ONNX Runtime: leave them out, or choose runtime='onnxruntime'")
        core = _core()
        threads = self.settings.threads or available_cores()
        config = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, PRECISION: "f32"}
        if manifest.precision == BFLOAT16:
            if "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
                raise BadInput(f"{folder} computes in bf16, which this processor has not: export it as int8 or float32")
            config[PRECISION] = "bf16"
        contents = [(verified(folder, each.file, each.checksum), f"{folder / each.file}") for each in manifest.stages]
        return [Compiled(core, *each, config) for each in contents]

    def run_one(self, stage: int, state: State) -> tuple[HeadValues, State]:
        logits, state = self.stages[stage].run_one(state)
        return score_one(logits, self.reads[stage]), state


class Compiled:
    """One stage, compiled for batches of any size, and once more for single samples; each when it is first needed."""

    def __init__(self, core: Any, content: bytes, name: str, config: dict[str, Any]) -> None:
        check_whole(content, name)
        self._core, self._name, self._config = core, name, config
        try:
            self._model = core.read_model(io.BytesIO(content))
        except Exception as error:
            problem = f"OpenVINO cannot load it ({first_line(error)})"
            raise BadFile(name, problem, "upgrade openvino, or run it by onnxruntime") from error
        self._compiled: dict[bool, Any] = {}  # for single samples, or not
        self._requests = local()  # each thread has its own: a request runs once at a time

    def __call__(self, state: State) -> tuple[np.ndarray, State]:
        """Return the logits and the next state, in memory of their own."""
        logits, *others = (np.array(each.data) for each in self._run(state, alone=False))
        return logits, tuple(others)

    def run_one(self, state: State) -> tuple[np.ndarray, State]:
        """Return the logits and the next state of a single sample, in memory that the next sample overwrites."""
        logits, *others = self._run(state, alone=True)
        return logits.data, tuple(others)

    def _run(self, state: State, *, alone: bool) -> list[Any]:
        request = getattr(self._requests, str(alone), None)
        if request is None:
            request = self._request(alone)
            setattr(self._requests, str(alone), request)
        try:
            for index, each in enumerate(state):
                request.set_input_tensor(index, _tensor(each) if isinstance(each, np.ndarray) else each)
            request.infer()
        except Exception as error:
            raise BadInput(refusal(self._name, state[0].shape[0], error)) from error
        return [request.get_output_tensor(index) for index in range(len(request.results))]

    def _request(self, alone: bool) -> Any:
        if alone not in self._compiled:
            model = self._model.clone() if alone else self._model
            if alone:
                model.reshape({each: [1, *[*each.partial_shape][1:]] for each in model.inputs})
            self._compiled[alone] = self._core.compile_model(model, "CPU", self._config)
        return self._compiled[alone].create_infer_request()


def openvino_library() -> Any:
    """Return the library, if it is installed."""
    return library("openvino", '"alight[openvino]"')


@cache
def _core() -> Any:
    """Return the one core of this process: dropped in another thread, it would unmap the signal stack of this one."""
    return openvino_library().Core()


def _tensor(array: np.ndarray) -> Any:
    return openvino_library().Tensor(np.ascontiguousarray(array), shared_memory=True)
