"""Who may do what: tokens with roles, hosts and pages; and what each tenant may spend in an hour.

Cost units are taken from the cap of a tenant before its samples are decided.
"""

import hashlib
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Self

from anyio.to_thread import run_sync

from alight.errors import AlightError, BadFile, BadInput
from alight.policies.policy import Policy
from alight.serve.ledger import Lease
from alight.serve.requests import RequestRefused, retry_after

ROLES = ("predict", "metrics", "admin")  # admin may do everything
PUBLIC = ("/", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")  # the page, which holds no data; probes
PROBES = PUBLIC[1:]  # which load balancers send to addresses, not names
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
ONCE = ("authorization", "content-encoding", "content-type", "inference-header-content-length", "origin")  # headers
LENGTHS = ("content-length", "transfer-encoding")
EXAMPLE = '{"tokens": [{"token": "...", "role": "predict", "tenant": "shop"}], "tenants": {"shop": "2 TFLOPs"}}'
SHORTEST = 16  # characters of a token
EVERYBODY = "*"  # the tenant whose cap is that of all requests together
SAME_HOUR = 10.0  # seconds that two leases may differ about the end of the hour: the ledger takes a while to answer
AHEAD = 16  # times what a request needs is leased at once, so that few requests wait for the ledger


@dataclass(frozen=True)
class Caller:
    """Who sent a request: a role, and the tenant that pays for it."""

    role: str = "admin"
    tenant: str = ""

    def may(self, method: str, path: str) -> bool:
        """Return whether the caller may use a path.

        >>> Caller("predict").may("POST", "/predict"), Caller("predict").may("PUT", "/budget")
        (True, False)
        """
        if self.role == "admin":
            return True
        if path == "/metrics":
            return self.role == "metrics"
        if method in ("GET", "HEAD"):
            return True
        return self.role == "predict" and (path.startswith("/predict") or path.endswith("/infer"))


@dataclass(frozen=True)
class Tokens:
    """Tokens by their SHA-256, so that looking one up takes the same time for all, and what tenants may spend."""

    callers: Mapping[bytes, Caller] = field(default_factory=dict)
    caps: Mapping[str, str | float | None] = field(default_factory=dict)  # per hour, by tenant

    @classmethod
    def of(cls, token: str) -> Self:
        """Return one token that may do everything."""
        return cls({_digest(token): Caller()})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load a file with one token, or with JSON such as docs/service.md shows."""
        text = path.read_text(encoding="utf-8").strip()
        if not text.startswith(("{", "[")):
            return cls.of(text)
        try:
            content = json.loads(text)
            caps = {name: _cap(path, name, cap) for name, cap in content.pop("tenants", {}).items()}
            entries = content.pop("tokens")
            if content:
                raise ValueError(f"unknown {', '.join(content)}")
            callers = dict(_entry(path, caps, **each) for each in entries)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, BadInput):
                raise
            problem = f"it does not list tokens ({type(error).__name__}: {error})"
            raise BadFile(path, problem, f"write {EXAMPLE}") from error
        if len(callers) < len(entries):
            raise BadFile(path, f"of {len(entries)} tokens {len(callers)} differ", "give each entry a token of its own")
        return cls(callers, caps)

    def caller(self, authorization: str) -> Caller | None:
        """Return who brings this header; None if it has no token that is known."""
        scheme, _, token = authorization.partition(" ")
        return self.callers.get(hashlib.sha256(token.strip().encode()).digest()) if scheme.lower() == "bearer" else None


def _digest(token: str) -> bytes:
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise BadInput(f"a token of {len(token)} characters: give {SHORTEST} or more of ASCII, without spaces")
    return hashlib.sha256(token.encode()).digest()


def _cap(path: Path, tenant: str, cap: Any) -> str | float | None:
    """Return what a tenant may spend in an hour, None where nothing limits it."""
    if tenant == EVERYBODY:
        raise BadInput(f"{path} has a tenant {tenant!r}, which stands for all: give it a name, and --per-hour the cap")
    if isinstance(cap, bool) or not (cap is None or isinstance(cap, str) or (cap > 0 and math.isfinite(cap))):
        raise BadInput(f"{path} has a cap {cap!r} of tenant {tenant!r}: give '2 PFLOPs', a positive number, or null")
    return cap


def _entry(path: Path, caps: Mapping[str, Any], token: str, role: str, tenant: str = "") -> tuple[bytes, Caller]:
    if role not in ROLES:
        raise BadInput(f"{path} has a role {role!r}: give one of {', '.join(ROLES)}")
    if tenant and tenant not in caps:
        raise BadInput(f"{path} has no cap for tenant {tenant!r}: list it under tenants, null for none")
    return _digest(token), Caller(role, tenant)


@dataclass
class Access:
    """Tokens, hosts and origins; tokens are replaced when they are loaded again."""

    tokens: Tokens | None = None  # None: every caller may do everything
    hosts: Sequence[str] = ()  # names that requests may use for the service, without ports; () takes any
    origins: Sequence[str] = ()  # of pages that may call it beside its own, as https://example.org

    def caps(self, everybody: Mapping[str, Any]) -> dict[str, Any]:
        """Return the caps of tenants, beside those of everybody."""
        return {**everybody, **(self.tokens.caps if self.tokens else {})}

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> Caller:
        """Return who sent a request, or refuse it; also one that a proxy may have read otherwise when it checked it."""
        names = [*headers]
        if twice := [name for name in ONCE if names.count(name) > 1]:
            raise RequestRefused(400, f"the header {twice[0]}, {names.count(twice[0])} times: send it once")
        if {*LENGTHS} <= {*names}:
            raise RequestRefused(400, "Content-Length and Transfer-Encoding say two lengths: send one of them")
        host = headers.get("host", "").lower()
        if path not in PROBES and self.hosts and (name := _without_port(host)) not in self.hosts:
            raise RequestRefused(403, f"requests to {name[:100]!r} are not taken: allow the name with --allowed-hosts")
        origin = headers.get("origin", "").lower()
        if origin and origin not in self.origins and origin.partition("://")[2] != host:
            raise RequestRefused(
                403, f"pages of {origin[:100]!r} may not call this service: allow them with --allowed-origins"
            )
        if self.tokens is None or path in PUBLIC:
            return Caller()
        caller = self.tokens.caller(headers.get("authorization", ""))
        if caller is None:
            raise RequestRefused(401, "a bearer token is needed: send the header Authorization: Bearer TOKEN")
        if not caller.may(method, path):
            raise RequestRefused(403, f"a token with the role {caller.role} may not {method} {path[:100]}")
        return caller


def allowed_hosts(host: str, named: Sequence[str], has_tokens: bool) -> tuple[str, ...]:
    """Return the names that requests may use: those that are named, and of a service for one machine its own.

    Without tokens a page that has rebound its name to this machine could do everything, so names have to be known.

    >>> allowed_hosts("127.0.0.1", [], has_tokens=False)
    ('localhost', '127.0.0.1', '[::1]')
    """
    own = f"[{host}]" if ":" in host else host
    if named:
        return () if "*" in named else tuple(name.lower() for name in (*named, *LOOPBACK))
    if own in LOOPBACK:
        return LOOPBACK
    if has_tokens:
        return ()
    if host in ("0.0.0.0", "::"):
        raise BadInput(
            f"a service without tokens on all addresses ({host}): give --token-file, or the names that requests use"
            " with --allowed-hosts ('*' for any, behind a proxy that checks them)"
        )
    return (*LOOPBACK, own.lower())


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


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


def check_caps(caps: Mapping[str, str | float | None], policies: Sequence[Policy]) -> None:
    """Raise if a cap cannot be used with one of these policies, or every request would be refused."""
    stated = {name: cap for name, cap in caps.items() if cap is not None}
    for (name, cap), policy in product(stated.items(), policies):
        try:
            policy.in_own_unit(cap)
        except AlightError as error:
            whose = "all requests (--per-hour)" if name == EVERYBODY else f"{name!r}"
            raise BadInput(f"the cap {cap!r} of {whose} cannot be used: {error}") from error


def _amount(name: str, cap: str | float | None, policy: Policy) -> float:
    assert cap is not None  # chosen before
    try:
        return float(policy.in_own_unit(cap))
    except AlightError as error:
        raise RequestRefused(503, f"the cap of {name!r} cannot be used: {error}", 60) from error
