"""Backup of the whole backlog to a file, and restore."""

from __future__ import annotations

from .transfer import BackupReport, RestoreReport, backup, inspect, restore

__all__ = ["BackupReport", "RestoreReport", "backup", "inspect", "restore"]
