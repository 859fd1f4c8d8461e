"""The backlog in Parquet files and back, and what was missed meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .replaying import missed, replay
    from .transfer import backup, copy, read_backup, restore

_HOMES = {
    "backup": "transfer",
    "copy": "transfer",
    "missed": "replaying",
    "read_backup": "transfer",
    "replay": "replaying",
    "restore": "transfer",
}

__all__ = [
    "backup",
    "copy",
    "missed",
    "read_backup",
    "replay",
    "restore",
]


def __getattr__(name: str) -> Any:
    # Spark imports modules of this package in each of its workers: only what they use.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
