"""Looks for what contradicts itself in a queue's keys, and puts it right.

All is read in bounded pages beside running producers and consumers. What looks wrong in a page is
looked at once more by the script that repairs it, so that nothing is called wrong for having moved.
"""

from __future__ import annotations

from ...store.store import Store
from .consumers import PATIENCE_SECONDS, Consumers
from .examination import Examination, Progress
from .faults import Finding
from .messages import Messages
from .server import examine_format, examine_server, examine_types, upgrade

__all__ = ["Doctor", "Finding", "examine_format", "examine_server", "examine_types", "upgrade"]


class Doctor:
    """Examines one queue; with `fix` it repairs what it finds, in the same pass.

    `progress` is called with the number of messages that were looked at.
    """

    def __init__(
        self,
        store: Store,
        queue: str,
        *,
        fix: bool = False,
        progress: Progress | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._case = Examination(store, queue, fix, progress or (lambda count: None))
        self._patience_seconds = patience_seconds

    def examine(self) -> list[Finding]:
        """All kinds of faults that there are."""
        Messages(self._case).examine()
        # After the messages: who is told of them depends on where they are.
        Consumers(self._case, self._patience_seconds).examine()
        return list(self._case.found.values())
