"""Faults of the server's clock."""

from __future__ import annotations

import time

from tests.crash.faults import Window
from tests.crash.network_faults import AHEAD_SECONDS, NetworkFaults

#: So long each step lasts, in leases.
HOLD_LEASES = 1.2


class ClockFaults(NetworkFaults):
    """The clock steps ahead, back beyond the right time, and to the right time again."""

    def finish(self) -> None:
        super().finish()
        self._step(0)

    def go_to_latest(self) -> None:
        """Show the latest time that was ever shown: what was to wait from then on falls due."""
        if self.field.clock is not None:
            began = time.time()
            self._step(max(span.ahead_seconds for span in self.field.clock.readings.spans))
            self.windows.append(Window("clock hour", began, time.time()))

    def _clock_minute(self) -> str | None:
        return self._clock("clock minute", 60)

    def _clock_hour(self) -> str | None:
        return self._clock("clock hour", 3600)

    def _clock(self, kind: str, seconds: float) -> str | None:
        if self.field.clock is None or self._is_on("clock minute", "clock hour"):
            return None
        hold = HOLD_LEASES * self.lease_seconds
        self._running(2 * hold)

        def begin() -> None:
            self._step(seconds)
            self._in(hold, lambda: self._step(-seconds))

        self._in(AHEAD_SECONDS, begin)
        self._lasts(kind, AHEAD_SECONDS + 2 * hold, lambda: self._step(0))
        return "clock"

    def _step(self, ahead_seconds: float) -> None:
        clock = self.field.clock
        if clock is not None and clock.readings.ahead_seconds != ahead_seconds:
            clock.step(ahead_seconds, self.servers, self.password)
