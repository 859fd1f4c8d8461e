"""Queues of replies. A reply that comes when nobody waits any more must not stay for ever."""

from __future__ import annotations

import re

#: So long a late reply to remote control stays.
LATE_REPLY_MS = 60_000

_REMOTE_CONTROL = re.compile(r"\.reply\.[^.]+\.pidbox$")

#: Queues that are remembered. Only who was answered lately matters.
_LIMIT = 10_000


class Lifetimes(dict[str, int]):
    """Queue -> how many milliseconds a reply stays in it; 0: what it gets are no replies."""

    def __missing__(self, queue: str) -> int:
        return self.note(queue, LATE_REPLY_MS if _REMOTE_CONTROL.search(queue) else 0)

    def note(self, queue: str, expires_ms: int) -> int:
        """What this process puts into a queue from now on stays so long. From any thread."""
        if len(self) >= _LIMIT:
            self.clear()
        self[queue] = expires_ms
        return expires_ms


#: Those of this process.
lifetimes = Lifetimes()
