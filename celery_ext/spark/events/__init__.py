"""Lifecycle events as a stream, and their archive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .archive import ArchiveError, compact, log_events, read_archive, watch

_HOMES = {
    "ArchiveError": "archive",
    "compact": "archive",
    "log_events": "archive",
    "read_archive": "archive",
    "watch": "archive",
}

__all__ = [
    "ArchiveError",
    "compact",
    "log_events",
    "read_archive",
    "watch",
]


def __getattr__(name: str) -> Any:
    # Spark imports modules of this package in each of its workers: only what they use.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
