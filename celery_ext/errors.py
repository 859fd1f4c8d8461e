"""What this extension raises, beyond what kombu_delayed does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kombu.exceptions import OperationalError

from kombu_delayed.errors import DelayedError

if TYPE_CHECKING:
    from .bulk import BulkReport


class BrokerError(DelayedError):
    """The app's broker keeps no backlog: put `delayed+` in front of its URL."""


class QueryError(DelayedError, ValueError):
    """A query has a criterion that cannot be meant."""


class BulkError(DelayedError, OperationalError):
    """The broker failed in the middle of bulk scheduling.

    `report` says what is stored for certain; what was on its way may be stored as well.
    """

    def __init__(self, message: str, report: BulkReport | None = None) -> None:
        super().__init__(message, report)
        self.report = report

    def __str__(self) -> str:
        return str(self.args[0])


class BackupError(DelayedError, ValueError):
    """A file is no backup, or is damaged or cut short."""
