"""A cascade and its policy become a folder without PyTorch: networks of torch are exported, files are copied."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from alight.engine.backends.cascade import Cascade, OpenMember, check_cascade_folder
from alight.engine.predictor import check_exits, check_fingerprint
from alight.errors import BadInput
from alight.files import POLICY, PathLike
from alight.policies.policy import Policy, Threshold


def export_cascade(
    network: Cascade,
    policy: Policy,
    folder: PathLike,
    export: Callable[..., Path],
    *,
    allow_mismatch: bool = False,
) -> Path:
    """Write the networks that a policy opens into a folder, with the policy; `export` writes one network of torch.

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
            made.append(_exported(opened, own, Path(name) / str(member), export))
        smaller = Cascade(made, network.image_size)
        smaller.save(folder)
    terms = {"num_exits": len(kept), "exits": smaller.exits, "fingerprint": policy.fingerprint and smaller.fingerprint}
    policy.renumbered({index: place for place, index in enumerate(kept)}, **terms).save(folder / POLICY)
    return folder


def _exported(opened: OpenMember, open_exits: Sequence[int], folder: Path, export: Callable[..., Path]) -> OpenMember:
    """Return a member that needs no torch: its network exported with these exits, or the file that it is."""
    if not opened.is_torch:
        return opened
    if opened.member.settings.dtype:
        raise BadInput(f"{opened.name} runs in {opened.member.settings.dtype}, and exported networks in float32")
    steps = tuple(float(index + 1) for index in range(len(open_exits)))
    terms: dict[str, Any] = {"open_exits": tuple(open_exits), "num_exits": len(opened.exits)}
    policy = Threshold(thresholds=(0.0,) * (len(steps) - 1), costs=steps, **terms)  # says which exits are open
    export(opened.network, policy, folder, normalisation=opened.member.normalisation, progress=False)
    settings = replace(opened.member.settings, device=None, channels_last=False, compile=False, graphs=False)
    return OpenMember(replace(opened.member, network=folder, normalisation=None, settings=settings), opened.name)
