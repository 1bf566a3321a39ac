"""What is spent under the policy in force, and what of it is on the disk.

A stream that keeps to its budget must not forget what it has spent. The state is written before the samples that it
does not know of yet are admitted, together with how many of those there may be. Whoever reads it after a stop without
goodbye takes it that all of them came and cost what the bound lets them: the bound holds over both runs. While it
cannot be written, samples leave at exits that the budget covers on its own, of which nothing has to be remembered.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from alight.errors import BadFile, Mismatch
from alight.files import read_json, write_json
from alight.policies.paced import Pace, Paced, most_owed
from alight.policies.policy import Policy

KIND = "Spending"
AHEAD = 256  # samples that may be admitted between two writes: about a second of a small network


@dataclass(frozen=True)
class Spending:
    """The policy in force and the pace of its stream."""

    name: str
    policy: Policy
    pace: Pace
    ahead: int = 0  # samples that may have been admitted since it was written

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        return {
            "policy": self.name,
            "budget": self.policy.budget,
            "costs": list(self.policy.costs),
            "unit": self.policy.unit,
            "fingerprint": self.policy.fingerprint,
            "ahead": self.ahead,
            "pace": self.pace.to_dict(),
        }

    @property
    def owed(self) -> float:
        """By how much it may be ahead of its budget; 0 where it is not, or keeps none."""
        if not isinstance(self.policy, Paced) or self.policy.budget is None:
            return 0.0
        return max(0.0, most_owed(self.pace, self.policy.budget, self.policy.costs[-1], self.ahead))

    def under(self, name: str, policy: Policy) -> "Spending":
        """The beginning of another policy: what is owed goes along, what was saved does not."""
        return Spending(name, policy, Pace(spent=self.owed))


class Book:
    """The spending of a service, kept in a file; without a path it is forgotten when the service ends."""

    def __init__(self, spending: Spending, path: Path | None, ahead: int = AHEAD) -> None:
        self.spending, self.path, self._most = spending, path, ahead
        self._free = 0  # samples that may still be admitted before the next write
        if isinstance(spending.policy, Paced):
            self._write(0)  # what cannot be written is told at once

    def admit(self, count: int) -> None:
        """Make sure that the file knows of so many samples more; an OSError says why it does not."""
        if self.path is None or not isinstance(self.spending.policy, Paced):
            return
        if count > self._free:
            self._free = 0
            self._write(max(count, self._most))
        self._free -= count

    def settle(self, pace: Pace) -> None:
        """Take over what a batch has left."""
        self.spending = replace(self.spending, pace=pace)

    def change(self, name: str, policy: Policy) -> None:
        """Let another policy be in force, in the file first; an OSError leaves all as it is."""
        before, free = self.spending, self._free
        self.spending, self._free = before.under(name, policy), 0
        try:
            self._write(0)
        except OSError:
            self.spending, self._free = before, free
            raise

    def close(self) -> None:
        """Write it down for the last time: nobody comes any more."""
        if isinstance(self.spending.policy, Paced):
            self._write(0)

    def _write(self, ahead: int) -> None:
        if self.path is not None:
            write_json(self.path, KIND, replace(self.spending, ahead=ahead).to_dict())
            _keep_names(self.path.resolve().parent)
        self._free = ahead


def _keep_names(folder: Path) -> None:
    """Have the names of a folder on the disk, where that can be asked for: a power cut must not bring back the old."""
    if os.name == "posix":
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def resumed(path: Path | None, policies: Mapping[str, Policy]) -> Spending:
    """The spending that a file tells of, under one of these policies; a fresh one of the first where there is no file.

    Of a policy that is not among them, or has changed, the first takes over what is owed.
    """
    first = next(iter(policies))
    fresh = Spending(first, policies[first], Pace())
    if path is None or not path.is_file():
        return fresh
    content = read_json(path, KIND)
    try:
        pace, name, ahead = Pace.from_dict(content["pace"]), str(content["policy"]), int(content["ahead"])
        budget, costs, unit = content["budget"], [float(cost) for cost in content["costs"]], str(content["unit"])
        owed = 0.0 if budget is None else max(0.0, most_owed(pace, float(budget), costs[-1], ahead))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BadFile(path, f"its content is not usable ({error})", "start from a fresh state") from error
    policy = policies.get(name)
    if isinstance(policy, Paced) and (policy.budget, [*policy.costs], policy.unit) == (budget, costs, unit):
        if pace.recent and len(pace.recent) != len(policy.recent):
            raise BadFile(path, f"it is of {len(pace.recent) + 1} exits", "start from a fresh state")
        return Spending(name, policy, policy.owing(pace, ahead))
    if unit != fresh.policy.unit:
        raise Mismatch(
            f"{path} tells of costs in {unit!r} and the policies of {fresh.policy.unit!r}: start from a fresh state"
        )
    return Spending(first, fresh.policy, Pace(spent=owed))
