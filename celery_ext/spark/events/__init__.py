"""Lifecycle events as a stream, and their archive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_ext.app.lazy import names_of

if TYPE_CHECKING:
    from .archive import log_events, read_archive, watch
    from .archive_files import ArchiveError
    from .compaction import Compacted, compact, compact_archive

__all__ = [
    "ArchiveError",
    "Compacted",
    "compact",
    "compact_archive",
    "log_events",
    "read_archive",
    "watch",
]

_HOMES = {
    "archive": ["log_events", "read_archive", "watch"],
    "archive_files": ["ArchiveError"],
    "compaction": ["Compacted", "compact", "compact_archive"],
}

# Lazy, because Spark's workers import modules of this package and need few of them.
__getattr__ = names_of(__name__, _HOMES)
