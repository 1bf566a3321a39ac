"""Who may do what: tokens with roles and tenants, hosts that the service answers to, and pages that may call it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from alight.errors import BadFile, BadInput
from alight.serve.requests import RequestRefused

ROLES = ("predict", "metrics", "admin")  # admin may do everything
PUBLIC = ("/", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")  # the page, which holds no data; probes
PROBES = PUBLIC[1:]  # which load balancers send to addresses, not names
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
EXAMPLE = '{"tokens": [{"token": "...", "role": "predict", "tenant": "shop"}], "tenants": {"shop": "2 TFLOPs"}}'
SHORTEST = 16  # characters of a token


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
    caps: Mapping[str, str | float] = field(default_factory=dict)  # per hour, by tenant

    @classmethod
    def of(cls, token: str) -> Self:
        """Return one token that may do everything."""
        return cls({_digest(token): Caller()})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load a file with one token, or with JSON such as docs/service.md shows."""
        text = path.read_text(encoding="utf-8").strip()
        if not text.startswith("{"):
            return cls.of(text)
        try:
            content = json.loads(text)
            caps = {str(name): cap for name, cap in content.pop("tenants", {}).items()}
            entries = content.pop("tokens")
            if content:
                raise ValueError(f"unknown {', '.join(content)}")
            callers = dict(_entry(path, caps, **each) for each in entries)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, BadInput):
                raise
            problem = f"it does not list tokens ({type(error).__name__}: {error})"
            raise BadFile(path, problem, f"write {EXAMPLE}") from error
        if len(callers) < len(entries):
            raise BadFile(path, f"of {len(entries)} tokens {len(callers)} differ", "give each entry a token of its own")
        return cls(callers, caps)

    def caller(self, authorization: bytes) -> Caller | None:
        """Return who brings this header; None if it has no token that is known."""
        scheme, _, token = authorization.partition(b" ")
        return self.callers.get(hashlib.sha256(token.strip()).digest()) if scheme.lower() == b"bearer" else None


def _digest(token: str) -> bytes:
    if len(token) < SHORTEST or not token.isascii() or any(character.isspace() for character in token):
        raise BadInput(f"a token of {len(token)} characters: give {SHORTEST} or more of ASCII, without spaces")
    return hashlib.sha256(token.encode()).digest()


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

    def check(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> Caller:
        """Return who sent a request, or refuse it."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if path not in PROBES and self.hosts and _without_port(host) not in self.hosts:
            raise RequestRefused(
                403, f"requests to {_without_port(host)[:100]!r} are not taken: allow the name with --allowed-hosts"
            )
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if origin and origin not in self.origins and origin.partition("://")[2] != host:
            raise RequestRefused(
                403, f"pages of {origin[:100]!r} may not call this service: allow them with --allowed-origins"
            )
        if self.tokens is None or path in PUBLIC:
            return Caller()
        caller = self.tokens.caller(headers.get(b"authorization", b""))
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
