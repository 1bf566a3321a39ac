"""Stages that Triton Inference Server runs, called from a Python model of it (business logic scripting).

`alight export --triton` writes the models. Decisions are made here, by the policy, so that a stage is executed for
survivors alone; Triton batches the survivors of several requests.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from alight.engine.backends import Backend, State
from alight.engine.backends.cascade import Cascade, OpenMember, saved_members
from alight.engine.backends.onnx import OnnxBackend
from alight.engine.manifest import Manifest
from alight.engine.predictor import Predictor
from alight.errors import AlightError
from alight.files import MANIFEST, POLICY, read_json
from alight.policies import load_policy

STAGES, KIND = "stages.json", "TritonStages"  # names of models, inputs and outputs, beside the Python model


class Execute(Protocol):
    """Executes a model of the server: arrays by the names of its inputs, to those of its outputs, in order."""

    def __call__(self, model: str, inputs: Mapping[str, np.ndarray], outputs: list[str]) -> list[np.ndarray]: ...


def execute_by(utils: Any) -> Execute:
    """Return what executes models by `triton_python_backend_utils`, which exists inside Triton alone.

    Outputs of a model that runs on a GPU come to the host, where a decision is made; Triton before 23.04 cannot do so.
    """
    wanted: dict[str, Any] = {}
    if hasattr(utils, "PreferredMemory"):
        wanted["preferred_memory"] = utils.PreferredMemory(utils.TRITONSERVER_MEMORY_CPU, 0)

    def execute(model: str, inputs: Mapping[str, np.ndarray], outputs: list[str]) -> list[np.ndarray]:
        tensors = [utils.Tensor(name, np.ascontiguousarray(values)) for name, values in inputs.items()]
        request = utils.InferenceRequest(model_name=model, requested_output_names=outputs, inputs=tensors, **wanted)
        response = request.exec()
        if response.has_error():
            raise AlightError(f"Triton could not execute {model}: {response.error().message()}")
        return [utils.get_output_tensor_by_name(response, name).as_numpy() for name in outputs]

    return execute


class TritonStages(OnnxBackend):
    """The stages of an exported network, which Triton executes."""

    name = "Triton"
    probes = False  # a model of Triton may not execute others before its first request

    def __init__(self, folder: Path, manifest: Manifest, stages: Mapping[str, Any], execute: Execute) -> None:
        self._described, self._execute = stages, execute
        super().__init__(folder, manifest)

    def _load(self, folder: Path, manifest: Manifest) -> list[Any]:
        return [partial(self._run_stage, self._described[stage.file]) for stage in manifest.stages]

    def _run_stage(self, stage: Mapping[str, Any], state: State) -> tuple[np.ndarray, State]:
        """Execute a stage in batches that Triton takes."""
        parts = []
        for start in range(0, len(state[0]), stage["batch"]):
            rows = [each[start : start + stage["batch"]] for each in state]
            parts.append(self._execute(stage["model"], dict(zip(stage["inputs"], rows, strict=True)), stage["outputs"]))
        logits, *others = (np.concatenate(each) for each in zip(*parts, strict=True))
        return logits, tuple(others)


def triton_predictor(folder: Path, execute: Execute) -> Predictor:
    """Return the predictor of the folder beside a Python model, whose stages the server executes."""
    stages = read_json(folder / STAGES, KIND)["stages"]
    policy = load_policy(folder / POLICY)
    if (folder / MANIFEST).is_file():
        backend: Backend | Cascade = TritonStages(folder, Manifest.load(folder), stages[""], execute)
    else:
        members, image_size, _ = saved_members(folder)
        opened = [
            OpenMember(
                replace(each, network=TritonStages(place, Manifest.load(place), stages[place.name], execute)), each.name
            )
            if (place := Path(each.network)).name in stages
            else OpenMember(each, each.name)
            for each in members
        ]
        backend = Cascade(opened, image_size)
    return Predictor(backend, policy)


class PythonModel:
    """What a Python model of Triton does: inputs of a request in, class, exit and cost of every sample out."""

    def __init__(self, folder: Path, utils: Any) -> None:
        self.utils, self.predictor = utils, triton_predictor(folder, execute_by(utils))
        spec = self.predictor.backend.inputs
        self.names = ["texts"] if spec.takes_texts and spec.tokenizer else [each.name for each in spec.tensors]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return a response to every request, an error to those that cannot be answered."""
        return [self._response(request) for request in requests]

    def _response(self, request: Any) -> Any:
        try:
            arrays = [self.utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.names]
            if self.names == ["texts"]:
                decisions = self.predictor([text.decode() for text in arrays[0].ravel()])
            else:
                decisions = self.predictor(
                    arrays[0] if len(arrays) == 1 else dict(zip(self.names, arrays, strict=True))
                )
        except (AlightError, UnicodeDecodeError) as error:  # of this request: others are answered
            return self.utils.InferenceResponse(error=self.utils.TritonError(str(error)))
        columns = {"predictions": decisions.predictions, "exits": decisions.exits, "spent": decisions.spent}
        return self.utils.InferenceResponse([self.utils.Tensor(name, values) for name, values in columns.items()])
