"""A Kombu transport that keeps delayed messages in Redis until they are due."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .registration import register

if TYPE_CHECKING:
    from .connection.options import Options
    from .errors import DelayedError
    from .inspection.dead_letters import DeadLetters
    from .store.store import Store
    from .transport.transport import Transport

__version__ = "0.2.0"
__all__ = ["DeadLetters", "DelayedError", "Options", "Store", "Transport", "__version__"]

_HOMES = {
    "DeadLetters": "inspection.dead_letters",
    "DelayedError": "errors",
    "Options": "connection.options",
    "Store": "store.store",
    "Transport": "transport.transport",
}

register()


def __getattr__(name: str) -> Any:
    # Kombu imports this package while being imported itself: load nothing heavy before its use.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
