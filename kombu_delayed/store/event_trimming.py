"""Which calls look after the stream of events that they write to: cut it, and let it live on."""

from __future__ import annotations

from time import monotonic

#: One call in so many does. Each tells of a few hundred messages at the most: far fewer in all than
#: the ten thousand that the server cuts off at once.
CALLS = 10

#: So does the first one after so long, for a queue of which little is told.
SECONDS = 1.0

#: So many streams are remembered.
STREAMS = 4096


class Upkeep:
    """What a process knows of the streams that it writes to. Threads may share it."""

    def __init__(self) -> None:
        self._rests: dict[str, tuple[int, float]] = {}

    def bound(self, stream: str, limit: int) -> int:
        """The limit of a stream for the next script: below 0 where that need not look after it."""
        calls, until = self._rests.get(stream, (0, 0.0))
        now = monotonic()
        if calls and now < until:
            self._rests[stream] = calls - 1, until
            return -limit
        if len(self._rests) >= STREAMS:
            self._rests.clear()
        self._rests[stream] = CALLS - 1, now + SECONDS
        return limit
