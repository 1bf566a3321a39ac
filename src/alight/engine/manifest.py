"""What an exported network is, besides its stages and its policy: `manifest.json` in its folder."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from alight.data.preprocess import InputSpec, Normalisation, TensorSpec
from alight.data.tokens import CONFIG, TOKENIZER, mask_meaning
from alight.data.tokens import FILE as VOCABULARY
from alight.engine.settings import ONNXRUNTIME, OPENVINO
from alight.errors import BadFile, BadInput, Mismatch
from alight.files import FIRST_STAGES, MANIFEST, POLICY, PathLike, read_json, write_json

KIND = "Deployment"
ONNX, AOTI = "onnx", "aoti"
SUFFIXES = {ONNX: ".onnx", AOTI: ".pt2"}
FLOAT32, FLOAT16, BFLOAT16, INT8 = "float32", "float16", "bfloat16", "int8"
PRECISIONS = (FLOAT32, FLOAT16, BFLOAT16, INT8)
PROBED_LOGITS, PROBED_TOKENS = 8, 7  # logits of each exit that the probe keeps; tokens of its text
GAPS = {INT8: 0.05, BFLOAT16: 0.05}  # of the largest logit, by which a probe may differ: rounding is coarse there
SMALL_GAP = 1e-3
HUGE = 1e9  # numbers from here on stand for infinity, as in masks: others are not compared in parts of them
LEAST = 1e-2  # what a largest number counts at least: below, rounding is too coarse for the comparison to mean a thing
AGAIN = "export the network again"
STAGE = re.compile(r"stage_\d+\.(onnx|pt2)")
GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples fill an interval evenly, and every language computes them alike


@dataclass(frozen=True)
class StageFile:
    """A stage's file and its SHA-256, the exit that it ends with, and what it gives beside the logits."""

    file: str
    checksum: str
    exit: int
    carries: tuple[TensorSpec, ...]
    precision: str = FLOAT32  # of its arithmetic or weights; "int8, head float32" where the head is not quantised
    probe: tuple[float, ...] = ()  # first logits for the probe's input


@dataclass(frozen=True)
class Manifest:
    """All that is known of an exported network: what it takes, what its stages are, and which policy came with it.

    >>> images = TensorSpec("images", (None, 3, 32, 32), "float32")
    >>> stage = StageFile("stage_0.onnx", 64 * "0", 0, ())
    >>> Manifest("onnx", "5e88", ("end",), (images,), (), (stage,), 64 * "1").input_spec.image_shape
    (3, 32, 32)
    """

    format: str  # "onnx", or "aoti" of stages that torch compiled
    fingerprint: str  # of the network; in lower precision, of these files and their engine
    exits: tuple[str, ...]  # names of all its exits, open or closed
    inputs: tuple[TensorSpec, ...]
    input_names: tuple[str, ...]  # of a network whose input is a dict of tensors
    stages: tuple[StageFile, ...]  # one for each open exit
    policy_checksum: str
    num_classes: int | None = None
    classes: tuple[str, ...] = ()  # their names, where known
    normalisation: Normalisation | None = None  # of its images; None where it is unknown
    lengths: tuple[int, int] | None = None  # shortest and longest texts for which it was compared with the network
    runtime: str = ONNXRUNTIME  # that runs it; in lower precision each engine rounds otherwise, so no other may
    providers: tuple[str, ...] = ()  # of ONNX Runtime; in lower precision no others may run it
    precision: str = FLOAT32
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
            is_rest = any((path.parent / name).is_file() for name in FIRST_STAGES)
            remedy = AGAIN if is_rest else "give a folder that `alight export` wrote"
            raise BadFile(folder, f"it has no {MANIFEST}", remedy)
        content = read_json(path, KIND, remedy=AGAIN)
        try:
            return cls._from(content)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise BadFile(path, f"its content is not usable ({reason})", AGAIN) from error

    @classmethod
    def _from(cls, content: Mapping[str, Any]) -> "Manifest":
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
        }
        values["inputs"] = tuple(map(_described, content["inputs"]))
        values["stages"] = tuple(map(_stage, content["stages"]))
        values["normalisation"] = content["normalisation"] and Normalisation(**content["normalisation"])
        made = cls(**values)
        made._check_files()
        made._check_stages()
        return made

    def _check_files(self) -> None:
        if outside := [file for file in self.further if Path(file).is_absolute() or ".." in Path(file).parts]:
            raise ValueError(f"a file {outside[0]!r} outside its folder")
        if self.format not in SUFFIXES or not self.stages or not self.inputs:
            raise ValueError(f"format {self.format!r}, {len(self.stages)} stages, {len(self.inputs)} inputs")
        if self.precision not in PRECISIONS or self.runtime not in (ONNXRUNTIME, OPENVINO):
            raise ValueError(f"precision {self.precision!r}, runtime {self.runtime!r}")
        if not isinstance(self.providers, tuple) or not all(isinstance(each, str) for each in self.providers):
            raise ValueError(f"providers {self.providers!r}")

    def _check_stages(self) -> None:
        if len({bool(stage.probe) for stage in self.stages}) > 1:
            raise ValueError("a probe of some stages alone")
        exits = self.open_exits
        if list(exits) != sorted({*exits}) or not 0 <= exits[0] <= exits[-1] < len(self.exits):
            raise ValueError(f"stages for exits {exits} of {len(self.exits)}")


def check_loses_nothing(folder: Path) -> None:
    """Check that a folder which an export takes the place of holds nothing but an earlier export, or what is left."""
    if not folder.exists():
        return
    names, known = (path.name for path in folder.iterdir()), (MANIFEST, POLICY, TOKENIZER)
    if foreign := sorted(name for name in names if name not in known and not STAGE.fullmatch(name)):
        raise BadInput(f"{folder} holds {foreign[0]}, which would be lost: give a new folder")


def checksum(content: bytes) -> str:
    """SHA-256 of a file's content."""
    return hashlib.sha256(content).hexdigest()


def verified(folder: Path, file: str, expected: str) -> bytes:
    """The content of a file of the folder, which is as it was when it was exported."""
    path = folder / file
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise BadFile(folder, f"its manifest names {file}, which is not there", AGAIN) from error
    except OSError as error:
        raise BadFile(path, f"it cannot be read ({error.strerror})", AGAIN) from error
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


def probe_inputs(inputs: Sequence[TensorSpec]) -> tuple[np.ndarray, ...]:
    """Return one sample that every machine makes alike: floats spread over -2 to 2, tokens 0 and 1, nothing masked.

    >>> probe_inputs([TensorSpec("images", (None, 1, 1, 3), "float64")])[0].round(2).tolist()
    [[[[-2.0, 0.47, -1.06]]]]
    """
    made = []
    for each in inputs:
        shape = (1, *(PROBED_TOKENS if size is None else size for size in each.shape[1:]))
        steps = np.arange(math.prod(shape)).reshape(shape)
        values: Any = {"tokens": 1, "padding": 0, None: steps % 2}[mask_meaning(each.name)]
        if each.dtype.startswith("float"):
            values = 4 * (GOLDEN * steps % 1) - 2
        made.append(np.broadcast_to(values, shape).astype(each.dtype))
    return tuple(made)


def check_probe(folder: Path, manifest: Manifest, stages: Sequence[Any]) -> None:
    """Check that loaded stages compute here what they computed where they were exported, on the probe."""
    if not manifest.stages[-1].probe:
        return
    state, allowed = probe_inputs(manifest.inputs), GAPS.get(manifest.precision, SMALL_GAP)
    for index, (run, stage) in enumerate(zip(stages, manifest.stages, strict=True)):
        logits, state = run(state)
        gap = relative_gap(np.asarray(logits)[0, : len(stage.probe)], np.array(stage.probe))
        if not gap <= allowed:  # also where it is NaN
            raise Mismatch(
                f"{folder / stage.file} gives other logits here than where it was exported (by {gap:.2g} of the largest"
                f" at exit {index}, {allowed:g} allowed): this processor, engine or provider computes otherwise; export"
                " the network here, with the engine and providers that will run it"
            )


def relative_gap(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest difference between numbers, in parts of the largest; NaN where one is NaN.

    Numbers that stand for infinity, as in masks, are compared in parts of themselves alone.

    >>> relative_gap(np.array([4.5, -1e9]), np.array([5.0, -1e9]))
    0.1
    """
    sizes, differ = np.abs(wanted.astype(np.float64)), found != wanted  # equal infinities do not
    sizes = np.maximum(sizes, sizes[sizes < HUGE].max(initial=LEAST))
    with np.errstate(invalid="ignore"):  # of an infinity where none is wanted
        return float((np.abs(found.astype(np.float64) - wanted)[differ] / sizes[differ]).max(initial=0.0))


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
    carries, probe = tuple(map(_described, content["carries"])), tuple(map(float, content.get("probe", ())))
    return StageFile(
        file, content["checksum"], int(content["exit"]), carries, str(content.get("precision", FLOAT32)), probe
    )
