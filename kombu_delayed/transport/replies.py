"""Queues of replies. A reply that comes when nobody waits any more must not stay for ever."""

from __future__ import annotations

import re

#: So long a late reply to remote control stays.
LATE_REPLY_MS = 60_000

_REMOTE_CONTROL = re.compile(r"\.reply\.[^.]+\.pidbox$")

#: Only who has answered lately matters.
_KNOWN_LIMIT = 10_000
_known: dict[str, int] = {}


def note(queue: str, expires_ms: int) -> None:
    """What this process sends to a queue from now on is a reply, and expires. From any thread."""
    if queue not in _known and len(_known) >= _KNOWN_LIMIT:
        _known.clear()
    _known[queue] = expires_ms


def expires_ms(queue: str) -> int:
    """How long a reply stays that is put into a queue; 0: it is no queue of replies."""
    return _known.get(queue) or (LATE_REPLY_MS if _REMOTE_CONTROL.search(queue) else 0)
