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

__all__ = [
    "Finding",
    "examine_format",
    "examine_queue",
    "examine_server",
    "examine_types",
    "upgrade",
]


def examine_queue(
    store: Store,
    queue: str,
    *,
    fix: bool = False,
    progress: Progress = lambda count: None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> list[Finding]:
    """All kinds of faults that a queue has; with `fix` it repairs them in the same pass.

    `progress` is called with the number of messages that were looked at.
    """
    case = Examination(store, queue, fix, progress)
    Messages(case).examine()
    # After the messages: who is told of them depends on where they are.
    Consumers(case, patience_seconds).examine()
    return list(case.found.values())
