"""Spend under the policy in force, and what of it is on the disk.

A stream that keeps to its budget must not forget what it has spent. The state is written before samples that it does
not count yet are admitted, together with the number of samples reserved for. A service that starts after a crash
assumes that all reserved samples came and cost as much as the bound allows, so the bound holds over both runs. While
the state cannot be written, samples leave at exits that the budget covers on its own, which needs no state.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from alight.errors import BadFile, Mismatch
from alight.files import read_json, write_json
from alight.policies.paced import Pace, Paced, most_owed
from alight.policies.policy import Policy

KIND = "SpendState"
RESERVE = 256  # samples that may be admitted between two writes: about a second of a small network


@dataclass(frozen=True)
class SpendState:
    """The policy in force and the pace of its stream."""

    name: str
    policy: Policy
    pace: Pace

    @property
    def owed(self) -> float:
        """By how much the spend may exceed the budget; 0 where it does not, or where the policy keeps none."""
        if not isinstance(self.policy, Paced) or self.policy.budget is None:
            return 0.0
        return max(0.0, most_owed(self.pace, self.policy.budget, self.policy.costs[-1], 0))

    def under(self, name: str, policy: Policy) -> "SpendState":
        """Return the first state of another policy, which takes over what is owed and not what was saved."""
        return SpendState(name, policy, Pace(spent=self.owed))


class SpendLedger:
    """The spend of a service, kept in a file; without a path it is forgotten when the service ends."""

    def __init__(self, state: SpendState, path: Path | None, reserve: int = RESERVE) -> None:
        self.state, self.path, self._reserve = state, path, reserve
        self._free = 0  # samples that may still be admitted before the next write
        if isinstance(state.policy, Paced):
            self._write(state, 0)  # so that a file that cannot be written is noticed at once

    def admit(self, count: int) -> None:
        """Make sure that the file allows for so many samples more; an OSError says why it does not."""
        if self.path is None or not isinstance(self.state.policy, Paced):
            return
        if count > self._free:
            self._free = 0
            self._write(self.state, max(count, self._reserve))
        self._free -= count

    def settle(self, pace: Pace) -> None:
        """Take over the pace after a batch."""
        self.state = replace(self.state, pace=pace)

    def change(self, name: str, policy: Policy) -> None:
        """Put another policy in force, in the file first; after an OSError nothing has changed."""
        changed = self.state.under(name, policy)
        self._write(changed, 0)
        self.state = changed

    def close(self) -> None:
        """Write the final state, with nothing reserved."""
        if isinstance(self.state.policy, Paced):
            self._write(self.state, 0)

    def _write(self, state: SpendState, reserved: int) -> None:
        if self.path is not None:
            content = {
                "policy": state.name,
                "budget": state.policy.budget,
                "costs": list(state.policy.costs),
                "unit": state.policy.unit,
                "fingerprint": state.policy.fingerprint,
                "reserved": reserved,  # samples that may be admitted before the next write
                "pace": state.pace.to_dict(),
            }
            write_json(self.path, KIND, content)
            _sync_folder(self.path.resolve().parent)
        self._free = reserved


def _sync_folder(folder: Path) -> None:
    """Sync the names in a folder, where the system can: a power cut must not bring back the old file."""
    if os.name == "posix":
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def resume_state(path: Path | None, policies: Mapping[str, Policy]) -> SpendState:
    """Return the state in a file under one of these policies; a fresh one of the first policy if there is no file.

    If the file's policy is not among them, or has changed, the first policy takes over what is owed.
    """
    first = next(iter(policies))
    fresh = SpendState(first, policies[first], Pace())
    if path is None or not path.is_file():
        return fresh
    content = read_json(path, KIND)
    try:
        pace, name, reserved = Pace.from_dict(content["pace"]), str(content["policy"]), int(content["reserved"])
        budget, costs, unit = content["budget"], [float(cost) for cost in content["costs"]], str(content["unit"])
        owed = 0.0 if budget is None else max(0.0, most_owed(pace, float(budget), costs[-1], reserved))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BadFile(path, f"its content is not usable ({error})", "start from a fresh state") from error
    policy = policies.get(name)
    if isinstance(policy, Paced) and (policy.budget, [*policy.costs], policy.unit) == (budget, costs, unit):
        if pace.recent and len(pace.recent) != len(policy.recent):
            raise BadFile(path, f"it is of {len(pace.recent) + 1} exits", "start from a fresh state")
        return SpendState(name, policy, policy.owing(pace, reserved))
    if unit != fresh.policy.unit:
        raise Mismatch(f"{path} has costs in {unit!r}, the policies in {fresh.policy.unit!r}: start from a fresh state")
    return SpendState(first, fresh.policy, Pace(spent=owed))
