"""The clock of the server, as a consumer knows it."""

from __future__ import annotations

import math
from time import monotonic, time

#: More between the server's clock and ours means that one of them was set.
CLOCK_JUMP_MS = 20

#: How far the two clocks run apart in a second.
CLOCK_DRIFT_MS = 0.2


class ServerClock:
    """The server's time, by what its answers say."""

    def __init__(self) -> None:
        self._ahead_ms = -math.inf
        self._compared_at = 0.0

    def now_ms(self) -> float:
        """The server's time; before the first answer it is this machine's."""
        # There may be messages then: those of a lost answer, or from where their queue was.
        found = monotonic() * 1000 + self._ahead_ms
        return found if math.isfinite(found) else time() * 1000

    def compare(self, server_ms: int) -> None:
        """The server's time comes late and in whole milliseconds: the most advanced is nearest."""
        now = monotonic()
        ahead_ms = server_ms - now * 1000
        known_ms = self._ahead_ms - (now - self._compared_at) * CLOCK_DRIFT_MS
        set_back = known_ms - ahead_ms > CLOCK_JUMP_MS
        self._ahead_ms = ahead_ms if set_back else max(known_ms, ahead_ms)
        self._compared_at = now
