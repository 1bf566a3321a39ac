"""A model repository for Triton Inference Server: a model for every stage, and a Python model that decides."""

import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from alight.data.preprocess import InputSpec
from alight.engine.backends.onnx import Session
from alight.engine.backends.triton import KIND, STAGES
from alight.engine.manifest import FLOAT32, ONNX, Manifest
from alight.engine.predictor import Predictor
from alight.engine.settings import ONNXRUNTIME
from alight.errors import BadInput
from alight.files import CASCADE, MANIFEST, PathLike, whole_folder, write_json

BATCH = 64  # samples that a stage executes at once
TYPES = {"tensor(float)": "TYPE_FP32", "tensor(double)": "TYPE_FP64", "tensor(int64)": "TYPE_INT64"}
TYPES |= {"tensor(bool)": "TYPE_BOOL", "tensor(uint8)": "TYPE_UINT8", "tensor(int32)": "TYPE_INT32"}
NUMPY = {
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "int64": "TYPE_INT64",
    "uint8": "TYPE_UINT8",
    "bool": "TYPE_BOOL",
}
ANSWERS = (("predictions", "TYPE_INT64", [-1]), ("exits", "TYPE_INT64", [-1]), ("spent", "TYPE_FP64", [-1]))
MODEL = '''"""Runs the stages beside it as models of Triton, for survivors alone; the server's image needs alight."""

from pathlib import Path

import triton_python_backend_utils as pb_utils
from alight.engine.backends.triton import PythonModel


class TritonPythonModel:
    def initialize(self, args):
        self.model = PythonModel(Path(args["model_repository"]) / args["model_version"], pb_utils)

    def execute(self, requests):
        return self.model.execute(requests)
'''

Tensor = tuple[str, str, Sequence[int]]  # name, type and sizes, -1 where they are free


def write_triton(exported: PathLike, repository: PathLike, name: str = "alight") -> Path:
    """Write a model repository of a folder that `export_model` wrote, and return it: whole, or not at all.

    Every stage is a model that Triton batches and executes, on a GPU where it has one; `name` is the Python model which
    clients ask. Networks of a cascade that are .onnx or .tflite files run in the Python model itself.
    """
    exported, repository = Path(exported), Path(repository)
    if not re.fullmatch(r"[\w.-]*\w", name):
        raise BadInput(f"name {name!r} of a model of Triton: give letters, digits, '_', '-' and '.'")
    if repository.exists():
        raise BadInput(f"{repository} exists: give a new folder")
    is_network = (exported / MANIFEST).is_file()
    folders = {"": exported} if is_network else {each.name: each for each in _exported_members(exported)}
    spec = Predictor.load(exported).backend.inputs
    repository.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(repository) as filling:
        own = filling / name / "1"
        shutil.copytree(exported, own, ignore=lambda place, files: _stage_files(Path(place), files))
        stages: dict[str, dict[str, Any]] = {}
        for key, folder in folders.items():
            manifest = Manifest.load(folder)
            if manifest.format != ONNX:
                raise BadInput(f"{folder} holds stages as {manifest.format}: export it as ONNX")
            if manifest.precision != FLOAT32 and manifest.runtime != ONNXRUNTIME:
                raise BadInput(
                    f"{folder} was calibrated with {manifest.runtime} in {manifest.precision}, and Triton runs stages"
                    f" by {ONNXRUNTIME}: export it for that"
                )
            prefix = "_".join(filter(None, (name, key)))
            stages[key] = {
                each.file: _write_stage(folder / each.file, filling, f"{prefix}_{Path(each.file).stem}")
                for each in manifest.stages
            }
        write_json(own / STAGES, KIND, {"stages": stages})
        (own / "model.py").write_text(MODEL)
        config = _config(name, _inputs(spec), ANSWERS, 'backend: "python"\nmax_batch_size: 0')
        (filling / name / "config.pbtxt").write_text(config)
    return repository


def _exported_members(folder: Path) -> Iterable[Path]:
    if not (folder / CASCADE).is_file():
        raise BadInput(f"{folder} is not an exported network or cascade: give what `alight export` wrote")
    return sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))


def _stage_files(folder: Path, files: Sequence[str]) -> list[str]:
    """Return the files of stages in a folder, which are models of their own."""
    if not (folder / MANIFEST).is_file():
        return []
    own = {stage.file for stage in Manifest.load(folder).stages}
    return [file for file in files if file in own]


def _write_stage(path: Path, repository: Path, model: str) -> dict[str, Any]:
    """Write a stage as a model, and return what the Python model needs to know of it."""
    session = Session(path.read_bytes(), str(path), threads=1)._session
    inputs, outputs = ([_described(each) for each in group] for group in (session.get_inputs(), session.get_outputs()))
    (repository / model / "1").mkdir(parents=True)
    shutil.copy(path, repository / model / "1" / "model.onnx")
    how = f'backend: "onnxruntime"\nmax_batch_size: {BATCH}\ndynamic_batching {{ }}'
    (repository / model / "config.pbtxt").write_text(_config(model, inputs, outputs, how))
    names = [[name for name, _, _ in group] for group in (inputs, outputs)]
    return {"model": model, "batch": BATCH, "inputs": names[0], "outputs": names[1]}


def _described(tensor: Any) -> Tensor:
    """Return an input or output of ONNX without its axis of samples."""
    if tensor.type not in TYPES:
        raise BadInput(f"{tensor.name} is a {tensor.type}, which Triton does not run: export it in float32")
    return tensor.name, TYPES[tensor.type], [size if isinstance(size, int) else -1 for size in tensor.shape[1:]]


def _inputs(spec: InputSpec) -> list[Tensor]:
    if spec.takes_texts and spec.tokenizer:
        return [("texts", "TYPE_STRING", [-1])]
    return [
        (each.name, NUMPY[each.dtype], [-1 if size is None else size for size in each.shape]) for each in spec.tensors
    ]


def _config(name: str, inputs: Iterable[Tensor], outputs: Iterable[Tensor], how: str) -> str:
    """Return the text of a config.pbtxt."""
    lines = [f'name: "{name}"', how]
    for kind, tensors in (("input", inputs), ("output", outputs)):
        listed = [
            f'  {{ name: "{each}", data_type: {dtype}, dims: {[*dims] or [1]} }}' for each, dtype, dims in tensors
        ]
        lines += [f"{kind} [", ",\n".join(listed), "]"]
    return "\n".join(lines) + "\n"
