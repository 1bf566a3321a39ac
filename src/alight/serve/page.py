"""The page at /: one document of `assets/` that asks nothing of any other host."""

import base64
import hashlib
from functools import cache
from importlib.resources import files
from string import Template


@cache
def page() -> str:
    """The page, whole.

    >>> "<title>alight</title>" in page()
    True
    """
    return Template(_asset("page.html")).substitute(style=_asset("page.css"), script=_asset("page.js"))


def _asset(name: str) -> str:
    return (files("alight.serve") / "assets" / name).read_text(encoding="utf-8")


def _hash(name: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode()}'"


POLICY = "; ".join(  # what a browser lets the page do: its own style and script, and requests to this service
    [
        "default-src 'none'",
        f"style-src {_hash('page.css')}",
        f"script-src {_hash('page.js')}",
        "connect-src 'self'",
        "img-src data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
