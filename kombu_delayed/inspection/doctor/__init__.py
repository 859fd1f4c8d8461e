"""Finds and repairs inconsistent keys of a queue.

Keys are read in bounded pages while producers and consumers run. The script that repairs something
checks it again, so that a message that has only moved since it was read counts as no fault.
"""

from __future__ import annotations

from collections.abc import Collection

from ...store.store import Store
from .consumers import PATIENCE_SECONDS, Consumers
from .examination import Examination, Finding, Progress
from .messages import Messages
from .server import examine_format, examine_server, examine_types, upgrade
from .survey import survey

__all__ = [
    "Finding",
    "examine_format",
    "examine_queues",
    "examine_server",
    "examine_types",
    "upgrade",
]


def examine_queues(
    store: Store,
    queues: Collection[str],
    *,
    fix: bool = False,
    progress: Progress = lambda count: None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> list[Finding]:
    """Return all kinds of faults of these queues. With `fix`, repair them in the same pass.

    `progress` is called with the number of messages that were looked at. The names of all keys are
    scanned once.
    """
    findings: list[Finding] = []
    for queue, names in survey(store, queues).items():
        case = Examination(store, queue, names, fix, progress)
        Messages(case).examine()
        # After the messages: which consumers must be told depends on where the messages are.
        Consumers(case, patience_seconds).examine()
        findings += case.found.values()
    return findings
