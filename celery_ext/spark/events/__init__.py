"""Lifecycle events as a stream, and their archive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_ext.lazy import names_of

if TYPE_CHECKING:
    from .archive import ArchiveError, compact, log_events, read_archive, watch

__all__ = ["ArchiveError", "compact", "log_events", "read_archive", "watch"]

# Spark imports modules of this package in each of its workers: only what they use.
__getattr__ = names_of(__name__, {"archive": __all__})
