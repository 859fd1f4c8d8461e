"""Queues of replies. A reply that comes when nobody waits for it any more must expire."""

from __future__ import annotations

import re

#: How long a late reply to remote control stays.
LATE_REPLY_MS = 60_000

_REMOTE_CONTROL = re.compile(r"\.reply\.[^.]+\.pidbox$")

#: How many queues are remembered. Only recent ones matter.
_LIMIT = 10_000


class Lifetimes(dict[str, int]):
    """Queue -> how many milliseconds a reply stays in it; 0: it gets no replies."""

    def __missing__(self, queue: str) -> int:
        return self.note(queue, LATE_REPLY_MS if _REMOTE_CONTROL.search(queue) else 0)

    def note(self, queue: str, expires_ms: int) -> int:
        """Set how long this process's messages stay in a queue. Safe from any thread."""
        if len(self) >= _LIMIT:
            self.clear()
        self[queue] = expires_ms
        return expires_ms


#: The lifetimes in this process.
lifetimes = Lifetimes()
