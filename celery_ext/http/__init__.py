"""The backlog over HTTP: an ASGI application, and jobs that are HTTP calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..app.lazy import names_of

if TYPE_CHECKING:
    from .app import Api
    from .callbacks.signature import SignatureError, sign, verify
    from .options import HttpOptions

__all__ = ["Api", "HttpOptions", "SignatureError", "sign", "verify"]

# Workers import this package for HTTP jobs, and need no web framework: names are loaded lazily.
__getattr__ = names_of(
    __name__,
    {
        "app": ["Api"],
        "callbacks.signature": ["SignatureError", "sign", "verify"],
        "options": ["HttpOptions"],
    },
    extra="http",
)
