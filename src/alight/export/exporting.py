"""A network and a policy become a folder: a file per open exit, the policy, and a manifest that says what they are."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from alight.data.spec import TensorSpec
from alight.engine.backends.onnx import Session
from alight.engine.prepare import prepared
from alight.errors import AlightError, BadInput, Mismatch
from alight.export.manifest import (
    AOTI,
    MANIFEST,
    ONNX,
    POLICY,
    SUFFIXES,
    TOKENIZER,
    Manifest,
    Stage,
    checksum,
)
from alight.export.packages import Package, check_compiler, write_package
from alight.export.parts import Part, Seen, described, parts_of, seen
from alight.export.programs import captured, goes_by_data, reason, write_onnx, write_traced
from alight.files import PathLike, whole_folder
from alight.networks.multi_exit import MultiExitModel, example_of
from alight.networks.store import fingerprint
from alight.policies.policy import Policy

TOLERANCE = 1e-4  # of the largest number that a stage gives: a hundred times what float32 loses, and no wrong graph
LEAST = 1e-2  # what a largest number counts at least: below, float32 loses too much of what it adds up to tell a graph
LIBRARIES = ("alight", "torch", "onnx", "onnxscript", "onnxruntime")


def export_model(
    model: MultiExitModel,
    policy: Policy,
    folder: PathLike,
    *,
    example: Any = None,
    tokenizer: PathLike | None = None,
    format: str = ONNX,  # noqa: A002  # the manifest's own word for it
    allow_mismatch: bool = False,
    progress: bool = False,
) -> Path:
    """The folder, once every stage up to the policy's last open exit is in it with its head, whole or not at all.

    `alight.deploy.load` runs it without PyTorch. With `format="aoti"` the stages are compiled ahead of time instead,
    for `load_compiled` on a machine like this one that has PyTorch. `example` is a batch as the network takes it, by
    default the one that it was built with. Each file is compared with the network on random inputs before it is kept.
    The folder of a `tokenizer` is copied, so that texts can be cut into tokens where the stages run.

    >>> import tempfile
    >>> from torch import nn
    >>> from alight.policies.policy import Threshold
    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> policy = Threshold(thresholds=(0.5,), costs=(1.0, 3.0))
    >>> folder = export_model(model, policy, f"{tempfile.mkdtemp()}/exported", example=torch.zeros(1, 4))
    >>> sorted(path.name for path in folder.iterdir())
    ['manifest.json', 'policy.json', 'stage_0.onnx', 'stage_1.onnx']
    >>> from alight import deploy
    >>> len(deploy.load(folder)(np.zeros((5, 4))))
    5
    """
    folder = Path(folder)
    own = fingerprint(model)
    _check(model, policy, format, "" if allow_mismatch else own)
    _check_replaceable(folder)
    ready = prepared(model, device="cpu")
    parts = parts_of(ready, policy)
    runs = seen(parts, ready, example_of(ready) if example is None else example)
    names = model.input_names or tuple(f"input_{index}" for index in range(len(runs[0].given[0])))
    tensors = [tuple(map(described, names, zip(*runs[0].given, strict=True)))]
    tensors += [
        tuple(described(f"stage_{stage}_{index}", each) for index, each in enumerate(zip(*run.made, strict=True)))[1:]
        for stage, run in enumerate(runs)
    ]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(folder) as filling:
        stages, gaps, used = [], [], []
        for index, (part, run) in enumerate(tqdm([*zip(parts, runs, strict=True)], "export", disable=not progress)):
            path = filling / f"stage_{index}{SUFFIXES[format]}"
            job = Job(part, run, path, tensors[index], tensors[index + 1])
            gap, way = job.written(format)
            gaps.append(gap)
            used.append(way)
            stages.append(Stage(path.name, checksum(path.read_bytes()), part.exit_index, tensors[index + 1]))
        policy.save(filling / POLICY)
        if tokenizer is not None:
            shutil.copytree(tokenizer, filling / TOKENIZER)
        beside = sorted(path for path in (filling / TOKENIZER).rglob("*") if path.is_file())
        Manifest(
            format=format,
            fingerprint=own,
            exits=model.exits,
            inputs=tensors[0],
            input_names=model.input_names,
            stages=tuple(stages),
            policy_checksum=checksum((filling / POLICY).read_bytes()),
            num_classes=model.num_classes,
            classes=model.classes,
            mean=model.normalisation.mean if model.normalisation else (),
            std=model.normalisation.std if model.normalisation else (),
            further={path.relative_to(filling).as_posix(): checksum(path.read_bytes()) for path in beside},
            made_with=_versions() | {"largest difference": f"{max(gaps):.1e}", "captured by": ", ".join(used)},
        ).save(filling)
    return folder


@dataclass(frozen=True)
class Job:
    """One part that becomes one file."""

    part: Part
    seen: Seen
    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def written(self, format: str) -> tuple[float, str]:  # noqa: A002
        """How far the file is from the network, and the first of torch's ways that wrote one that is near enough."""
        ways: Mapping[str, Mapping[str, Callable[[], None]]] = {
            ONNX: {"export": self._onnx, "trace": self._traced},  # with some pairs of libraries only the second can
            AOTI: {"export": self._package},
        }
        reasons = []
        for name, way in ways[format].items():
            try:
                way()
                return self._difference(format), name
            except ImportError as error:
                raise AlightError(f'{error}: pip install "alight[export]"') from error
            except Exception as error:
                reasons.append(error)
                if goes_by_data(error):
                    break
        raise AlightError(
            f"the stage of exit {self.part.exit_index} cannot be exported ({reason(reasons[0])}): rewrite what it"
            " names, open only exits before it, or run the network with PyTorch"
        ) from reasons[0]

    def _onnx(self) -> None:
        write_onnx(captured(self.part, self.seen, self.inputs), self.path, self.inputs, self.outputs)

    def _traced(self) -> None:
        write_traced(self.part, self.seen, self.path, self.inputs, self.outputs)

    def _package(self) -> None:
        write_package(captured(self.part, self.seen, self.inputs), self.path)

    def _difference(self, format: str) -> float:  # noqa: A002
        """The largest difference from the network, over its largest number; an error if that is too large."""
        kind = Session(self.path.read_bytes(), self.path.name, 1) if format == ONNX else Package(self.path)
        worst = 0.0
        for given, expected in zip(self.seen.given, self.seen.made, strict=True):
            logits, others = kind(tuple(each.numpy() for each in given), None)
            for made, wanted in zip((logits, *others), expected, strict=True):
                worst = max(worst, _apart(np.asarray(made), wanted.numpy()))
        if not worst <= TOLERANCE:
            raise AlightError(f"{self.path.name} differs from the network by {worst:.1e} of its largest number")
        return worst


def _apart(made: np.ndarray, wanted: np.ndarray) -> float:
    if made.shape != wanted.shape or made.dtype != wanted.dtype:
        raise AlightError(f"{made.dtype} of shape {made.shape} instead of {wanted.dtype} of {wanted.shape}")
    largest = max(LEAST, float(np.abs(wanted).max()))
    return float(np.abs(made.astype(np.float64) - wanted).max()) / largest


def _check(model: MultiExitModel, policy: Policy, format: str, own: str) -> None:  # noqa: A002
    if format not in SUFFIXES:
        raise BadInput(f"there is no format {format!r}: choose {' or '.join(SUFFIXES)}")
    if policy.num_exits != model.num_exits:
        raise Mismatch(
            f"the policy is for {policy.num_exits} exits and the network has {model.num_exits}:"
            " calibrate on outputs of this network"
        )
    if own and policy.fingerprint not in ("", own):
        raise Mismatch(
            f"the policy was calibrated on outputs of the network {policy.fingerprint} and this is {own}:"
            " record and calibrate again, or allow_mismatch=True"
        )
    if format == AOTI:
        check_compiler()
    odd = {each.dtype for each in model.state_dict().values() if each.is_floating_point()} - {torch.float32}
    if odd:
        raise BadInput(f"the network's weights are {odd.pop()}: export it in float32, as model.float()")


def _check_replaceable(folder: Path) -> None:
    """That nothing is lost but an earlier export."""
    if not folder.exists():
        return
    known = {MANIFEST, POLICY, TOKENIZER}
    if (folder / MANIFEST).is_file():
        known |= {stage.file for stage in Manifest.load(folder).stages}
    if foreign := sorted(path.name for path in folder.iterdir() if path.name not in known):
        raise BadInput(f"{folder} holds {foreign[0]}, which would be lost: give a new folder")


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
