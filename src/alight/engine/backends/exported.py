"""Which runtime executes the stages of an exported folder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from alight.engine.manifest import AOTI, FLOAT32, Manifest
from alight.engine.settings import ONNXRUNTIME, OPENVINO, TORCH, RunSettings
from alight.errors import BadInput, Mismatch


def exported_backend(
    folder: Path,
    manifest: Manifest,
    settings: RunSettings,
    *,
    batch_size: int | None = None,
    allow_mismatch: bool = False,
    allow_compiled: bool = False,
) -> Any:
    """Return the backend of a folder that `alight export` wrote: the runtime it was exported for, or another one.

    With a batch size it may prepare for full batches. Stages of float32 run by any runtime. In lower precision each
    rounds otherwise, so that the policy, which was calibrated with one of them and its providers, holds for that alone.
    """
    check_settings(f"{folder} was exported", settings)
    if manifest.format == AOTI:
        if not allow_compiled:
            raise BadInput(
                f"{folder} holds machine code that torch compiled: load it with allow_compiled=True if you or"
                " people you trust compiled it"
            )
        from alight.engine.backends.aoti import AotiBackend

        return AotiBackend(folder, manifest, settings)
    runtime = settings.runtime or manifest.runtime
    if runtime == TORCH:
        raise BadInput(f"{folder} was exported: run it by {ONNXRUNTIME} or {OPENVINO}, or give the network itself")
    settings = replace(settings, providers=settings.providers or manifest.providers)
    if manifest.precision != FLOAT32 and not allow_mismatch:
        _check_rounding(folder, manifest, runtime, settings.providers)
    if runtime == OPENVINO:
        from alight.engine.backends.openvino import OpenVinoBackend

        return OpenVinoBackend(folder, manifest, settings, batch_size)
    from alight.engine.backends.onnx import OnnxBackend

    return OnnxBackend(folder, manifest, settings)


def check_settings(what: str, settings: RunSettings) -> None:
    """Raise if settings are for networks that PyTorch runs; `what` says what was exported, or will be."""
    others = replace(settings, threads=None, runtime=None, providers=())
    others = replace(others, device=None if settings.device == "cpu" else settings.device)
    if odd := [name for name, value in vars(others).items() if value != getattr(RunSettings(), name)]:
        raise BadInput(f"{what}, and {odd[0]} is for networks that were not: leave it out")


def _check_rounding(folder: Path, manifest: Manifest, runtime: str, providers: tuple[str, ...]) -> None:
    """Check that a folder of lower precision runs as it did when it was recorded and calibrated."""
    if runtime != manifest.runtime:
        raise Mismatch(
            f"{folder} was recorded and calibrated with {manifest.runtime} in {manifest.precision}, and {runtime}"
            f" rounds otherwise: export it for {runtime}, or allow_mismatch=True (--allow-mismatch)"
        )
    own, other = (", ".join(dict.fromkeys([*each, "cpu"])) for each in (manifest.providers, providers))
    if own != other:
        if runtime == ONNXRUNTIME:
            from alight.engine.backends.onnx import chosen_providers

            chosen_providers(providers)  # raises where one is misspelt
        raise Mismatch(
            f"{folder} was recorded and calibrated by {own}, and {other} rounds otherwise: export it for that, or"
            " allow_mismatch=True (--allow-mismatch)"
        )
