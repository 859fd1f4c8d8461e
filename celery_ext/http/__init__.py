"""The backlog over HTTP: an ASGI application, and jobs that are HTTP calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import Api
    from .callbacks.signature import SignatureError, sign, verify
    from .options import HttpOptions

_HOMES = {
    "Api": "app",
    "HttpOptions": "options",
    "SignatureError": "callbacks.signature",
    "sign": "callbacks.signature",
    "verify": "callbacks.signature",
}

__all__ = ["Api", "HttpOptions", "SignatureError", "sign", "verify"]


def __getattr__(name: str) -> Any:
    # Workers import this package for HTTP jobs: no web framework there.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
