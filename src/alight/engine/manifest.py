"""What an exported network is, besides its stages and its policy: `manifest.json` in its folder."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from alight.data.preprocess import InputSpec, Normalisation, TensorSpec
from alight.data.tokens import CONFIG, TOKENIZER
from alight.data.tokens import FILE as VOCABULARY
from alight.errors import BadFile, BadInput
from alight.files import MANIFEST, PathLike, read_json, write_json

KIND = "Deployment"
POLICY = "policy.json"
ONNX, AOTI = "onnx", "aoti"
SUFFIXES = {ONNX: ".onnx", AOTI: ".pt2"}


@dataclass(frozen=True)
class StageFile:
    """A stage's file and its SHA-256, the exit that it ends with, and what it gives beside the logits."""

    file: str
    checksum: str
    exit: int
    carries: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Manifest:
    """All that is known of an exported network: what it takes, what its stages are, and which policy came with it.

    >>> images = TensorSpec("images", (None, 3, 32, 32), "float32")
    >>> stage = StageFile("stage_0.onnx", 64 * "0", 0, ())
    >>> Manifest("onnx", "5e88", ("end",), (images,), (), (stage,), 64 * "1").input_spec.image_shape
    (3, 32, 32)
    """

    format: str  # "onnx", or "aoti" of stages that torch compiled
    fingerprint: str  # of the network
    exits: tuple[str, ...]  # names of all its exits, open or closed
    inputs: tuple[TensorSpec, ...]
    input_names: tuple[str, ...]  # of a network whose input is a dict of tensors
    stages: tuple[StageFile, ...]  # one for each open exit
    policy_checksum: str
    num_classes: int | None = None
    classes: tuple[str, ...] = ()  # their names, where known
    normalisation: Normalisation | None = None  # of its images; None where it is unknown
    lengths: tuple[int, int] | None = None  # shortest and longest texts for which it was compared with the network
    further: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of other files, as those of a tokenizer, by path
    made_with: Mapping[str, str] = field(default_factory=dict)  # versions, and how far the stages are from torch

    @property
    def input_spec(self) -> InputSpec:
        """What the network takes, as pictures, pixels and texts are made into it."""
        return InputSpec(self.inputs, self.input_names, self.normalisation, self.classes, self.num_classes)

    @property
    def open_exits(self) -> tuple[int, ...]:
        """Indices of the exits that have a head."""
        return tuple(stage.exit for stage in self.stages)

    def save(self, folder: PathLike) -> Path:
        """The path of the manifest, written whole."""
        return write_json(Path(folder) / MANIFEST, KIND, asdict(self))

    @classmethod
    def load(cls, folder: PathLike) -> "Manifest":
        """The manifest of a folder that was exported."""
        path = Path(folder) / MANIFEST
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"there is no folder {folder}")
        if not path.is_file():
            raise BadFile(folder, f"it has no {MANIFEST}", "give a folder that `alight export` wrote")
        content = read_json(path, KIND)
        try:
            return cls._from(content)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise BadFile(path, f"its content is not usable ({reason})", "export the network again") from error

    @classmethod
    def _from(cls, content: Mapping[str, Any]) -> "Manifest":
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
        }
        values["inputs"] = tuple(map(_described, content["inputs"]))
        values["stages"] = tuple(map(_stage, content["stages"]))
        values["normalisation"] = content["normalisation"] and Normalisation(**content["normalisation"])
        made = cls(**values)
        if outside := [file for file in made.further if Path(file).is_absolute() or ".." in Path(file).parts]:
            raise ValueError(f"a file {outside[0]!r} outside its folder")
        if made.format not in SUFFIXES or not made.stages or not made.inputs:
            raise ValueError(f"format {made.format!r}, {len(made.stages)} stages, {len(made.inputs)} inputs")
        exits = made.open_exits
        if list(exits) != sorted({*exits}) or not 0 <= exits[0] <= exits[-1] < len(made.exits):
            raise ValueError(f"stages for exits {exits} of {len(made.exits)}")
        return made


def checksum(content: bytes) -> str:
    """SHA-256 of a file's content."""
    return hashlib.sha256(content).hexdigest()


def verified(folder: Path, file: str, expected: str) -> bytes:
    """The content of a file of the folder, which is as it was when it was exported."""
    path = folder / file
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise BadFile(folder, f"its manifest names {file}, which is not there", "export the network again") from error
    if (found := checksum(content)) != expected:
        raise BadFile(
            path, f"it was changed or damaged (SHA-256 {found}, the manifest says {expected})", "export it again"
        )
    return content


def exported_tokenizer(folder: PathLike, manifest: Manifest) -> Path:
    """Return the folder of the tokenizer that a network was exported with, once its files are verified."""
    files = {name: f"{TOKENIZER}/{name}" for name in (VOCABULARY, CONFIG)}
    if missing := [name for name in files.values() if name not in manifest.further]:
        raise BadInput(f"{folder} has no {missing[0]}: export the network with its tokenizer")
    for file, expected in manifest.further.items():
        verified(Path(folder), file, expected)
    return Path(folder) / TOKENIZER


def exported_spec(folder: PathLike, manifest: Manifest) -> InputSpec:
    """Return what an exported network takes, with the tokenizer of its folder where it has one."""
    spec = manifest.input_spec
    if not spec.takes_texts or f"{TOKENIZER}/{VOCABULARY}" not in manifest.further:
        return spec
    return replace(spec, tokenizer=exported_tokenizer(folder, manifest))


def _described(content: Mapping[str, Any]) -> TensorSpec:
    shape, dtype = content["shape"], content["dtype"]
    if np.dtype(dtype).kind not in "biuf":
        raise ValueError(f"a tensor of {dtype}")
    if not shape or not all(size is None or (type(size) is int and size > 0) for size in shape):
        raise ValueError(f"a tensor of shape {shape}")
    return TensorSpec(str(content["name"]), tuple(shape), dtype)


def _stage(content: Mapping[str, Any]) -> StageFile:
    file = content["file"]
    if Path(file).name != file or not file.endswith(tuple(SUFFIXES.values())):  # nothing outside the folder
        raise ValueError(f"a stage in {file!r}")
    return StageFile(file, content["checksum"], int(content["exit"]), tuple(map(_described, content["carries"])))
