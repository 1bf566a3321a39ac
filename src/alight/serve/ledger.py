"""Spend under the policy in force, and what of it is on the disk.

A stream that keeps to its budget must not forget what it has spent. The state is written before samples that it does
not count yet are admitted, together with the number of samples reserved for. A service that starts after a crash
assumes that all reserved samples came and cost as much as the bound allows, so the bound holds over both runs. While
the state cannot be written, samples leave at exits that the budget covers on its own, which needs no state. A file that
is damaged, which its checksum shows, is replaced by the worst that the bound allows: one full-cost sample is owed.
"""

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from alight.errors import BadFile, BadInput, Mismatch
from alight.files import read_json, write_json
from alight.policies.paced import Pace, Paced, most_owed
from alight.policies.policy import Policy
from alight.serve.monitoring import error_type, log_event

KIND = "SpendState"
RESERVE = 256  # samples that may be admitted between two writes: about a second of a small network
HOUR = 3600.0  # seconds of the window of a cap
BEGINNING = b'{\n  "alight": "SpendState"'  # of a file of ours, damaged or not; others are left alone


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


Lease = Callable[[str, float, float, float], tuple[float, float]]  # `Ledger.lease`


class Ledger(Protocol):
    """Where the spend of a stream is kept: in a file, or in a ledger that replicas share."""

    state: SpendState
    wanted: str | None  # the policy that others have put in force meanwhile, None where it is this one

    def admit(self, count: int) -> None:
        """Make sure that so many samples more may be decided; an OSError says why not."""

    def settle(self, pace: Pace) -> None:
        """Take over the pace after a batch."""

    def change(self, name: str, policy: Policy) -> None:
        """Put another policy in force; after an OSError nothing has changed."""

    def lease(self, tenant: str, cap: float, need: float, want: float) -> tuple[float, float]:
        """Take cost units from the cap of a tenant for this hour: as many as it needs, up to `want`, or none.

        Returned are the cost units, and the seconds until the next hour begins. An OSError says why none is known.
        """

    def close(self) -> None:
        """Keep the final state."""


class SpendLedger:
    """The spend of a service, kept in a file of its own; without a path it is forgotten when the service ends."""

    wanted: str | None = None

    def __init__(self, path: Path | None, policies: Mapping[str, Policy], reserve: int = RESERVE) -> None:
        self.path, self._reserve = path, reserve
        self._free = 0  # samples that may still be admitted before the next write
        self._running = 0  # samples that are admitted, and not in the state yet
        self._writing, self._locked = threading.RLock(), None if path is None else _locked(path)
        self._leases: dict[str, tuple[int, float]] = {}  # by tenant: the hour, and cost units taken of its cap
        self._unknown_hour: int | None = None  # whose leases were lost
        try:
            self.state = self._resumed(policies)
            if isinstance(self.state.policy, Paced):
                self._write(self.state, 0)  # so that a file that cannot be written is noticed at once
        except BaseException:
            self._unlock()
            raise

    def _resumed(self, policies: Mapping[str, Policy]) -> SpendState:
        """Return the state that the file holds under one of these policies, a fresh one if there is no file."""
        fresh = SpendState(first := next(iter(policies)), policies[first], Pace())
        if self.path is None or not self.path.is_file():
            return fresh
        content = _read(self.path)
        if content is None:
            most = max(policy.costs[-1] for policy in policies.values())
            log_event("state damaged", logging.ERROR, path=str(self.path), assumed="one full-cost sample is owed")
            self._unknown_hour = int(time.time() // HOUR)
            return replace(fresh, pace=Pace(spent=most))
        self._leases = {tenant: (int(hour), float(used)) for tenant, (hour, used) in content["leases"].items()}
        return _resumed_under(policies, fresh, content, self.path)

    def admit(self, count: int) -> None:
        """Make sure that the file allows for so many samples more; an OSError says why it does not."""
        if self.path is None or not isinstance(self.state.policy, Paced):
            return
        with self._writing:
            if count > self._free:
                self._free = 0
                self._write(self.state, reserved := max(count, self._reserve))
                self._free = reserved
            self._free -= count
            self._running = count

    def settle(self, pace: Pace) -> None:
        """Take over the pace after a batch."""
        with self._writing:
            self.state, self._running = replace(self.state, pace=pace), 0

    def change(self, name: str, policy: Policy) -> None:
        """Put another policy in force, in the file first; after an OSError nothing has changed."""
        changed = self.state.under(name, policy)
        with self._writing:
            self._write(changed, 0)
            self.state, self._free = changed, 0

    def lease(self, tenant: str, cap: float, need: float, want: float) -> tuple[float, float]:
        """Take cost units from a tenant's cap, in the file first."""
        now = time.time()
        hour = int(now // HOUR)
        with self._writing:
            since, used = self._leases.get(tenant, (hour, cap if hour == self._unknown_hour else 0.0))
            if since == hour + 1:  # the clock was set back: the hour does not begin anew
                hour = since
            used = used if since >= hour else 0.0  # also if it was set back by hours
            taken = granted(cap - used, need, want)
            self._leases[tenant] = (hour, used + taken)
            try:
                self._write(self.state, self._free + self._running)
            except OSError as error:
                self._leases[tenant] = (hour, used)
                log_event("state not written", logging.ERROR, path=str(self.path), error=error_type(error))
                raise
        return taken, (hour + 1) * HOUR - now

    def close(self) -> None:
        """Write the final state, with nothing reserved."""
        with self._writing:
            if isinstance(self.state.policy, Paced):
                self._write(self.state, 0)
        self._unlock()

    def _unlock(self) -> None:
        if self._locked is not None:
            os.close(self._locked)
            self._locked = None

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
                "leases": {tenant: [*lease] for tenant, lease in self._leases.items()},  # of caps: the hour, cost units
            }
            write_json(self.path, KIND, content | {"checksum": _checksum(content)})
            _sync_folder(self.path.resolve().parent)


def granted(left: float, need: float, want: float) -> float:
    """Return the cost units that a lease takes of those left: a part of what is wanted, so that others find some.

    >>> granted(left=100.0, need=1.0, want=50.0), granted(left=3.0, need=2.0, want=50.0), granted(1.0, 2.0, 50.0)
    (12.5, 2.0, 0.0)
    """
    return max(need, min(want, left / 8)) if need <= left else 0.0


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _locked(path: Path) -> int | None:
    """Return a file beside the path that stays locked while it is open: two services would spend one budget twice."""
    if os.name != "posix" or (path.exists() and not path.is_file()):
        return None
    import fcntl

    opened = os.open(path.with_name(f".{path.name}.lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(opened)
        raise BadInput(
            f"another service keeps its spend in {path}: give each a file of its own with --state, or one budget to all"
            " with --ledger"
        ) from error
    return opened


def _sync_folder(folder: Path) -> None:
    """Sync the names in a folder, where the system can: a power cut must not bring back the old file."""
    if os.name == "posix":
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _resumed_under(
    policies: Mapping[str, Policy], fresh: SpendState, content: Mapping[str, Any], path: Path
) -> SpendState:
    """Return the state of a file's content; if its policy is not there, or has changed, `fresh` owes what was owed."""
    pace, name, reserved = Pace.from_dict(content["pace"]), str(content["policy"]), int(content["reserved"])
    budget, costs, unit = content["budget"], [float(cost) for cost in content["costs"]], str(content["unit"])
    policy = policies.get(name)
    if isinstance(policy, Paced) and (policy.budget, [*policy.costs], policy.unit) == (budget, costs, unit):
        if pace.recent and len(pace.recent) != len(policy.recent):
            raise BadFile(path, f"it is of {len(pace.recent) + 1} exits", "start from a fresh state")
        return SpendState(name, policy, policy.owing(pace, reserved))
    if unit != fresh.policy.unit:
        raise Mismatch(f"{path} has costs in {unit!r}, the policies in {fresh.policy.unit!r}: start from a fresh state")
    owed = 0.0 if budget is None else max(0.0, most_owed(pace, float(budget), costs[-1], reserved))
    return replace(fresh, pace=Pace(spent=owed))


def _read(path: Path) -> dict[str, Any] | None:
    """Return the content of a file of ours, None where it is damaged; other files are an error."""
    text = path.read_bytes()
    try:
        content = read_json(path, KIND, text)
    except BadFile:
        if not BEGINNING.startswith(text[: len(BEGINNING)]):
            raise
        return None
    return content if content.pop("checksum", None) == _checksum(content) else None
