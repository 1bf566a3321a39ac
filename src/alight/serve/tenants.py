"""What each tenant may spend in an hour: cost units are taken from its cap before its samples are decided."""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from anyio.to_thread import run_sync

from alight.costs import Costs
from alight.errors import AlightError
from alight.policies.policy import Policy
from alight.serve.admission import retry_after
from alight.serve.ledger import Lease
from alight.serve.requests import RequestRefused

EVERYBODY = "*"  # the tenant whose cap is that of all requests together
SAME_HOUR = 10.0  # seconds that two leases may differ about the end of the hour: the ledger takes a while to answer
AHEAD = 16  # times what a request needs is leased at once, so that few requests wait for the ledger


@dataclass
class Wallet:
    """Cost units that were leased for a tenant and not spent yet, until their hour ends."""

    left: float = 0.0
    ends: float = 0.0  # on the clock of time.monotonic


@dataclass
class Charge:
    """What a request may cost per sample, None where nothing limits it; and what it did cost, None if not known."""

    cap: float | None = None
    spent: float | None = 0.0


class TenantCaps:
    """The wallets of all tenants of one model; it belongs to the event loop's thread."""

    def __init__(self, lease: Lease, caps: Callable[[], Mapping[str, str | float | None]]) -> None:
        self._lease, self._caps = lease, caps
        self._wallets: dict[str, Wallet] = {}

    @asynccontextmanager
    async def charged(self, tenant: str, policy: Policy, count: int) -> AsyncIterator[Charge]:
        """Take what so many samples may cost from the wallets, and give back what the request did not cost."""
        caps = self._caps()
        names = [name for name in (tenant, EVERYBODY) if caps.get(name) is not None]
        if not names:
            yield Charge()
            return
        amounts = {name: _amount(name, caps[name], policy) for name in names}
        cost, wallets = await self._affordable(amounts, policy, count)
        taken, ends = count * cost, min(wallet.ends for wallet in wallets)
        for wallet in wallets:
            wallet.left -= taken
        charge = Charge(cost)
        try:
            yield charge
        finally:
            if charge.spent is not None and time.monotonic() < ends:
                for wallet in wallets:
                    wallet.left += taken - charge.spent

    async def _affordable(self, caps: Mapping[str, float], policy: Policy, count: int) -> tuple[float, list[Wallet]]:
        """Return the most that a sample may cost, and the wallets, once all are filled at the same time."""
        while True:
            wallets = [await self._filled(*each, policy.costs, count) for each in caps.items()]
            least = min(wallet.left for wallet in wallets)
            if affordable := [cost for cost in policy.costs if count * cost <= least]:
                return affordable[-1], wallets

    async def _filled(self, name: str, cap: float, costs: Sequence[float], count: int) -> Wallet:
        """Return the wallet of a tenant with enough for so many samples at the first exit, at the last if possible."""
        wallet, now = self._wallets.setdefault(name, Wallet()), time.monotonic()
        if now >= wallet.ends:
            wallet.left = 0.0
        for need in (count * costs[-1], count * costs[0]):
            if wallet.left >= need:
                return wallet
            try:
                taken, seconds = await run_sync(self._lease, name, cap, need, AHEAD * need)
            except OSError as error:
                raise RequestRefused(503, f"what {name!r} has spent cannot be kept ({error})", 1) from error
            ends = time.monotonic() + seconds
            kept = wallet.left if ends < wallet.ends + SAME_HOUR else 0.0  # of an hour that ended meanwhile nothing is
            wallet.left, wallet.ends = kept + taken, ends
            if wallet.left >= need:
                return wallet
        raise RequestRefused(
            429, f"{name!r} has spent what it may in this hour: come again in the next", retry_after(seconds)
        )


def _amount(name: str, cap: str | float | None, policy: Policy) -> float:
    assert cap is not None  # chosen before
    try:
        return float(Costs.from_cumulative(policy.costs, unit=policy.unit).budget(cap))
    except AlightError as error:
        raise RequestRefused(503, f"the cap of {name!r} cannot be used: {error}", 60) from error
