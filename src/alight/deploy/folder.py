"""An exported folder becomes something that answers."""

from pathlib import Path

from alight.deploy.deployed import Deployed
from alight.engine.backends.onnx import Session
from alight.errors import BadInput
from alight.export.manifest import AOTI, POLICY, Manifest, verified
from alight.files import PathLike
from alight.policies.policy import Policy
from alight.policies.saved import load_policy


def load(
    folder: PathLike,
    policy: Policy | None = None,
    *,
    batch_size: int = 256,
    probabilities: bool = False,
    num_threads: int | None = None,
    allow_mismatch: bool = False,
) -> Deployed:
    """The network of a folder that `alight export` wrote, under the policy that came with it or another one.

    Every file is compared with the manifest's SHA-256 first. `num_threads` are onnxruntime's, by default one for each
    processor that this process may use.
    """
    if num_threads is not None and num_threads < 1:
        raise BadInput(f"{num_threads} threads: give 1 or more")
    folder, manifest = Path(folder), Manifest.load(folder)
    if manifest.format == AOTI:
        raise BadInput(f"{folder} holds stages that torch compiled: load them with alight.load_compiled")
    policy = saved_policy(folder, manifest) if policy is None else policy
    stages = [
        Session(verified(folder, stage.file, stage.checksum), f"{folder / stage.file}", num_threads)
        for stage in manifest.stages
    ]
    return Deployed(
        stages,
        policy,
        manifest,
        batch_size=batch_size,
        probabilities=probabilities,
        allow_mismatch=allow_mismatch,
    )


def saved_policy(folder: Path, manifest: Manifest) -> Policy:
    """The policy that a network was exported with."""
    verified(folder, POLICY, manifest.policy_checksum)
    return load_policy(folder / POLICY)
