"""A network and a policy become a folder: a file per open exit, the policy, and a manifest that describes them."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from alight.data.preprocess import Normalisation, TensorSpec
from alight.data.tokens import TOKENIZER, save_tokenizer
from alight.engine.backends.cascade import Cascade, OpenMember, check_cascade_folder
from alight.engine.backends.torch.prepare import prepared
from alight.engine.manifest import (
    AOTI,
    ONNX,
    SUFFIXES,
    Manifest,
    StageFile,
    check_loses_nothing,
    checksum,
    relative_gap,
)
from alight.engine.predictor import check_exits, check_fingerprint
from alight.engine.settings import RunSettings
from alight.errors import AlightError, BadInput
from alight.export.precision import probed
from alight.export.programs import (
    BATCHES,
    LENGTHS,
    TOKENS,
    ExportedStage,
    ExportJob,
    StageRuns,
    branches_on_data,
    check_compiler,
    exported_stages,
    quietly,
    random_inputs,
    reason,
    run_stages,
    spec_of,
    write_onnx,
    write_package,
    write_traced,
)
from alight.files import POLICY, PathLike, whole_folder
from alight.networks.multi_exit import MultiExitModel, example_of, same_classes
from alight.networks.store import fingerprint
from alight.policies.policy import Policy, Threshold
from alight.provenance import installed_versions

TOLERANCE = 1e-4  # of the largest number that a stage gives: a hundred times what float32 loses, far less than a fault
LIBRARIES = ("alight", "torch", "onnx", "onnxscript", "onnxruntime")
WRITERS: dict[str, dict[str, Callable[[ExportJob], None]]] = {  # what writes a format, the first that can
    ONNX: {"export": write_onnx, "trace": write_traced},  # with some pairs of libraries only the second can
    AOTI: {"export": write_package},
}


def export_model(
    model: MultiExitModel | Cascade,
    policy: Policy,
    folder: PathLike,
    *,
    example: Any = None,
    tokenizer: Any = None,
    normalisation: Normalisation | None = None,
    format: str = ONNX,  # noqa: A002  # the manifest's own word for it
    allow_mismatch: bool = False,
    progress: bool = True,
) -> Path:
    """Write every stage up to the policy's last open exit, with its head, into a folder: whole, or not at all.

    `Predictor.load` runs it without PyTorch. Each file is compared with the network on random inputs before it is kept.

    Args:
        model: The network, or a cascade, of which the networks of torch are exported.
        policy: Says which exits are open.
        folder: To write.
        example: A batch as the network takes it; None: like the one that heads were attached with.
        tokenizer: Saved beside the stages; None: the model's own.
        normalisation: Of a network that does not say its own; where neither is known, it takes floats alone.
        format: "onnx", or "aoti": compiled for a machine like this one that has PyTorch.
        allow_mismatch: Export with the policy of another network.
        progress: Show a bar.

    >>> import tempfile
    >>> from torch import nn
    >>> from alight import Predictor, Threshold
    >>> model = MultiExitModel([nn.Linear(4, 8), nn.Linear(8, 8)], [nn.Linear(8, 3), nn.Linear(8, 3)])
    >>> policy = Threshold(thresholds=(0.5,), costs=(1.0, 3.0))
    >>> folder = export_model(model, policy, f"{tempfile.mkdtemp()}/exported", example=torch.zeros(1, 4))
    >>> sorted(path.name for path in folder.iterdir())
    ['manifest.json', 'policy.json', 'stage_0.onnx', 'stage_1.onnx']
    >>> len(Predictor.load(folder)(np.zeros((5, 4))))
    5
    """
    folder = Path(folder)
    if isinstance(model, Cascade):
        if format != ONNX or (example, tokenizer, normalisation) != (None, None, None):
            raise BadInput("the networks of a cascade say themselves what they take, and are exported as ONNX")
        return _export_cascade(model, policy, folder, allow_mismatch=allow_mismatch)
    own = fingerprint(model)
    _check(model, policy, format, "" if allow_mismatch else own)
    check_normalisation(normalisation, model.normalisation)
    check_loses_nothing(folder)
    ready = prepared(model, RunSettings(device="cpu"))
    stages = exported_stages(ready, policy)
    example = example_of(ready) if example is None else example
    runs = run_stages(stages, ready, example)
    _check_logits(runs, [model.exits[each.exit_index] for each in stages])
    specs = _specs(model, runs)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(folder) as filling:
        files, notes = [], []
        for index, (stage, run) in enumerate(tqdm([*zip(stages, runs, strict=True)], "export", disable=not progress)):
            path = filling / f"stage_{index}{SUFFIXES[format]}"
            job = ExportJob(stage, run, path, specs[index], specs[index + 1])
            notes.append(_write(job, format, model.exits[stage.exit_index]))
            files.append(StageFile(path.name, checksum(path.read_bytes()), stage.exit_index, specs[index + 1]))
        policy.save(filling / POLICY)
        others = _write_tokenizer(model.tokenizer if tokenizer is None else tokenizer, filling / TOKENIZER)
        gap, ways = max(gap for gap, _ in notes), ", ".join(way for _, way in notes)
        takes_any_length = specs[0][0].shape[1:2] == (None,)
        lengths = _lengths(ready, stages, example, filling, files, format) if takes_any_length else None
        manifest = Manifest(
            format=format,
            fingerprint=own,
            exits=model.exits,
            inputs=specs[0],
            input_names=model.input_names,
            stages=tuple(files),
            policy_checksum=checksum((filling / POLICY).read_bytes()),
            num_classes=model.num_classes or runs[-1].outputs[0][0].shape[1],
            classes=model.classes,
            normalisation=normalisation or model.normalisation,
            lengths=lengths,
            further={path.relative_to(filling).as_posix(): checksum(path.read_bytes()) for path in others},
            made_with=installed_versions(*LIBRARIES) | {"largest difference": f"{gap:.1e}", "captured by": ways},
        )
        probed(manifest, filling).save(filling)
    return folder


def _export_cascade(network: Cascade, policy: Policy, folder: Path, *, allow_mismatch: bool) -> Path:
    """Write the networks that a policy opens into a folder without PyTorch: those of torch are exported, files copied.

    A network without an open exit is left out, and the exits of the policy are numbered without it.
    """
    folder = check_cascade_folder(folder)
    check_exits(policy, network.num_exits)
    if not allow_mismatch:
        check_fingerprint(policy, network.fingerprint)
    owners = network.members_of_exits
    members = sorted({owners[index] for index in policy.open_exits})
    kept = [index for index, owner in enumerate(owners) if owner in members]
    with tempfile.TemporaryDirectory() as name:
        made = []
        for member in members:
            start, opened = owners.index(member), network.members[member]
            own = [index - start for index in policy.open_exits if owners[index] == member]
            made.append(_exported_member(opened, own, Path(name) / str(member)))
        smaller = Cascade(made, network.image_size)
        smaller.save(folder)
    terms = {"num_exits": len(kept), "exits": smaller.exits, "fingerprint": policy.fingerprint and smaller.fingerprint}
    policy.renumbered({index: place for place, index in enumerate(kept)}, **terms).save(folder / POLICY)
    return folder


def _exported_member(opened: OpenMember, open_exits: Sequence[int], folder: Path) -> OpenMember:
    """Return a member that needs no torch: its network exported with these exits, or the file that it is."""
    if not opened.is_torch:
        return opened
    if opened.member.settings.dtype:
        raise BadInput(f"{opened.name} runs in {opened.member.settings.dtype}, and exported networks in float32")
    steps = tuple(float(index + 1) for index in range(len(open_exits)))
    terms: dict[str, Any] = {"open_exits": tuple(open_exits), "num_exits": len(opened.exits)}
    policy = Threshold(thresholds=(0.0,) * (len(steps) - 1), costs=steps, **terms)  # says which exits are open
    export_model(opened.network, policy, folder, normalisation=opened.member.normalisation, progress=False)
    settings = replace(opened.member.settings, device=None, channels_last=False, compile=False, graphs=False)
    return OpenMember(replace(opened.member, network=folder, normalisation=None, settings=settings), opened.name)


def check_normalisation(given: Normalisation | None, own: Normalisation | None) -> None:
    """Raise if a network is to be exported with another normalisation than its own."""
    if None not in (given, own) and given != own:
        raise BadInput(f"{given}, and the network has {own}: leave it out, or change the network's")


def _write_tokenizer(tokenizer: Any, folder: Path) -> list[Path]:
    """Write the tokenizer of a network that has one, and return its files."""
    if tokenizer is None:
        return []
    folder.mkdir()
    save_tokenizer(tokenizer, folder)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _lengths(
    model: MultiExitModel,
    stages: Sequence[ExportedStage],
    example: Any,
    folder: Path,
    files: Sequence[StageFile],
    format: str,  # noqa: A002
) -> tuple[int, int]:
    """Return the shortest and the longest of the tried texts, from those that were exported up and down."""
    proven, runners = [*TOKENS], [_runner(folder / each.file, format) for each in files]
    for tried in ([each for each in LENGTHS if each > TOKENS[1]], [each for each in LENGTHS[::-1] if each < TOKENS[0]]):
        for length in tried:
            if not _is_same_at(model, stages, example, length, runners):
                break
            proven.append(length)
    return min(proven), max(proven)


def _is_same_at(
    model: MultiExitModel, stages: Sequence[ExportedStage], example: Any, length: int, runners: Sequence[Any]
) -> bool:
    """Check whether the exported stages give what the network gives for texts of this length."""
    try:
        given = model.proven(random_inputs(model, example, BATCHES[0], length, torch.Generator().manual_seed(length)))
        state: Any = tuple(each.numpy() for each in given)
        with torch.inference_mode():
            for stage, run in zip(stages, runners, strict=True):
                wanted, *given = stage(*given)
                logits, state = run(state)
                if not _difference_of(np.asarray(logits), wanted.numpy()) <= TOLERANCE:
                    return False
    except Exception:  # the network takes no such texts, or the file does not
        return False
    return True


def _check_logits(runs: Sequence[StageRuns], exits: Sequence[str]) -> None:
    """Raise unless all heads give finite logits of the same classes."""
    same_classes([run.outputs[0][0] for run in runs], "open exits")
    for name, run in zip(exits, runs, strict=True):
        if not all(made[0].isfinite().all() for made in run.outputs):
            raise BadInput(
                f"the head at {name} gives NaN or infinite logits for normally distributed inputs, with which its file"
                " is compared: clamp what a logarithm, a root or a division takes, and mask classes by -1e4"
            )


def _specs(model: MultiExitModel, runs: list[StageRuns]) -> list[tuple[TensorSpec, ...]]:
    """Return what the first stage takes, and what every stage hands to the next."""
    names = model.input_names or tuple(f"input_{index}" for index in range(len(runs[0].inputs[0])))
    specs = [tuple(map(spec_of, names, zip(*runs[0].inputs, strict=True)))]
    for stage, run in enumerate(runs):
        outputs = enumerate(zip(*run.outputs, strict=True))
        specs.append(tuple(spec_of(f"stage_{stage}_{index}", each) for index, each in outputs)[1:])
    return specs


def _write(job: ExportJob, format: str, exit_name: str) -> tuple[float, str]:  # noqa: A002
    """Write a stage's file, and return how far it is from the network and which of torch's exporters wrote it."""
    reasons = []
    for name, write in WRITERS[format].items():
        try:
            with quietly():
                write(job)
            return _difference(job, format), name
        except ImportError as error:
            raise AlightError(f'{error}: pip install "alight[export]"') from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno:  # a full disk, not the network
                raise OSError(error.errno, error.strerror, error.filename or job.path.name) from error
            reasons.append(error)
            if branches_on_data(error):
                break
    raise AlightError(
        f"the stage that ends at {exit_name} cannot be exported ({reason(reasons[0])}): rewrite what it names,"
        " open only exits before it, or run the network with PyTorch"
    ) from reasons[0]


def _difference(job: ExportJob, format: str) -> float:  # noqa: A002
    """Return the largest difference from the network, over its largest number; an error if that is too large."""
    run = _runner(job.path, format)
    worst = 0.0
    for given, expected in zip(job.runs.inputs, job.runs.outputs, strict=True):
        logits, others = run(tuple(each.numpy() for each in given))
        for found, wanted in zip((logits, *others), expected, strict=True):
            gap = _difference_of(np.asarray(found), wanted.numpy())
            if not gap <= TOLERANCE:  # also where it is NaN
                raise AlightError(f"{job.path.name} differs from the network by {gap:.1e} of its largest number")
            worst = max(worst, gap)
    return worst


def _runner(path: Path, format: str) -> Any:  # noqa: A002
    """Return the stage of a file, ready to run."""
    if format == AOTI:
        from alight.engine.backends.aoti import Package

        return Package(path)
    from alight.engine.backends.onnx import Session

    return Session(path.read_bytes(), path.name, 1)


def _difference_of(found: np.ndarray, wanted: np.ndarray) -> float:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise AlightError(f"{found.dtype} of shape {found.shape} instead of {wanted.dtype} of {wanted.shape}")
    return relative_gap(found, wanted)


def _check(model: MultiExitModel, policy: Policy, format: str, own: str) -> None:  # noqa: A002
    if format not in SUFFIXES:
        raise BadInput(f"there is no format {format!r}: choose {' or '.join(SUFFIXES)}")
    check_exits(policy, model.num_exits)
    if own:
        check_fingerprint(policy, own)
    if format == AOTI:
        check_compiler()
    check_weights(model)


def check_weights(model: MultiExitModel) -> None:
    """Raise if the weights of a network are not float32."""
    odd = {each.dtype for each in model.state_dict().values() if each.is_floating_point()} - {torch.float32}
    if odd:
        raise BadInput(f"the network's weights are {odd.pop()}: export it in float32, as model.float()")
