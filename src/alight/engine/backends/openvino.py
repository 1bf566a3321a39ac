"""Stages that OpenVINO runs, on NumPy arrays."""

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import local
from typing import Any

import numpy as np

from alight.data.preprocess import TensorSpec
from alight.data.tokens import library
from alight.engine.backends import HeadValues, State, score_one
from alight.engine.backends.onnx import OnnxBackend, available_cores, check_whole, first_line, refusal
from alight.engine.manifest import BFLOAT16, INT8, Manifest, verified
from alight.errors import BadFile, BadInput

PRECISION = "INFERENCE_PRECISION_HINT"  # else it takes bf16 for float32 on processors that have it
SNIPPETS = "SNIPPETS_MODE"  # kernels made for fixed sizes: they round pixels to other bytes than those for any size do
SUMS = ("ReduceMean", "ReduceSum")


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
        if manifest.precision == INT8:
            config[SNIPPETS] = "DISABLE"
        given = [manifest.inputs, *(stage.carries for stage in manifest.stages)]
        return [
            Compiled(core, verified(folder, stage.file, stage.checksum), f"{folder / stage.file}", config, state)
            for stage, state in zip(manifest.stages, given, strict=False)
        ]

    def run_one(self, stage: int, state: State) -> tuple[HeadValues, State]:
        logits, state = self.stages[stage].run_one(state)
        return score_one(logits, self.reads[stage]), state


class Compiled:
    """One stage, compiled for batches of any size, and once more for single samples; each when it is first needed."""

    def __init__(
        self, core: Any, content: bytes, name: str, config: dict[str, Any], state: Sequence[TensorSpec]
    ) -> None:
        check_whole(content, name)
        self._core, self._name, self._config = core, name, config
        try:
            self._model = core.read_model(io.BytesIO(content))
            _widen_sums(self._model)
        except Exception as error:
            problem = f"OpenVINO cannot load it ({first_line(error)})"
            raise BadFile(name, problem, "upgrade openvino, or run it by onnxruntime") from error
        names = [each.name for each in state]
        self._read = [names.index(each.any_name) for each in self._model.inputs]  # what no node reads is left out there
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
            for index, place in enumerate(self._read):
                each = state[place]
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


def _widen_sums(model: Any) -> None:
    """Give sums over tensors of three axes a fourth one of size 1.

    OpenVINO 2026.4 reads the scales of quantised ones beyond their end, from some row of a batch on.
    """
    openvino = openvino_library()
    for node in model.get_ordered_ops():
        if node.get_type_name() not in SUMS or node.input(0).get_partial_shape().rank != openvino.Dimension(3):
            continue
        axes = node.input_value(1).get_node()
        if axes.get_type_name() != "Constant":
            continue
        opset = openvino.opset13
        made = {"ReduceMean": opset.reduce_mean, "ReduceSum": opset.reduce_sum}[node.get_type_name()]
        last, four = np.array([3]), [*(axes.get_vector() % 3), 3]
        keeps = node.get_attributes()["keep_dims"]
        found = made(opset.unsqueeze(node.input_value(0), last), np.array(four), keep_dims=keeps)
        node.output(0).replace((opset.squeeze(found, last) if keeps else found).output(0))


def openvino_library() -> Any:
    """Return the library, if it is installed."""
    return library("openvino", '"alight[openvino]"')


@cache
def _core() -> Any:
    """Return the one core of this process: dropped in another thread, it would unmap the signal stack of this one."""
    return openvino_library().Core()


def _tensor(array: np.ndarray) -> Any:
    return openvino_library().Tensor(np.ascontiguousarray(array), shared_memory=True)
