"""The order of polled tasks: by score, then by due time, exactly.

A task has its score in a ticket, so that the scripts sort due tasks at the gate of their queue. A
task without a ticket (of version 0.1, or changed since) is read once and then gets one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kombu_delayed.message.envelope import Entry
from kombu_delayed.message.ticket import Gate, Ticket, put_ticket
from kombu_delayed.store.calls.scripts import Call

from ..service.create_once import OnceStore

#: Scores are from -LIMIT to LIMIT. Redis sorts by floats, which are exact up to here.
LIMIT = 2**51

#: The gate of these tickets. No consumer declares it, so that servers of version 0.1 may poll, too.
GATE = Gate("http-score")


def ticket_of(id: str, score: int) -> str:
    """The ticket with which a task waits for its turn."""
    return Ticket(rank=score).text(GATE.version, id)


def score_in(job: dict[str, Any]) -> int:
    """The score of a task; 0 for one that has none."""
    score = job.get("score")
    return max(-LIMIT, min(score, LIMIT)) if type(score) is int else 0


class ScoredStore(OnceStore):
    """Accepts a task once, and gives it its ticket."""

    score = 0

    def schedule_call(self, queue: str, entries: Sequence[Entry], expires_ms: int = 0) -> Call:
        """As in any store, with tickets."""
        return super().schedule_call(queue, [*map(self._with_ticket, entries)], expires_ms)

    def _with_ticket(self, entry: Entry) -> Entry:
        return entry._replace(message=put_ticket(entry.message, ticket_of(entry.id, self.score)))
