"""Backup of the backlog to Parquet, restore, and replay of missed messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_ext.app.lazy import names_of

if TYPE_CHECKING:
    from .replaying import missed, newest_first, replay
    from .transfer import backup, copy, read_backup, restore

__all__ = ["backup", "copy", "missed", "newest_first", "read_backup", "replay", "restore"]

# Lazy, because Spark's workers import modules of this package and need few of them.
__getattr__ = names_of(
    __name__,
    {
        "replaying": ["missed", "newest_first", "replay"],
        "transfer": ["backup", "copy", "read_backup", "restore"],
    },
)
