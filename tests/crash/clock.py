"""The servers' clock: faults step it, and the verdict knows its readings."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from redis.exceptions import RedisError

from tests.kit import clock_steps
from tests.kit.servers import Server
from tests.kit.wait import wait_until

NEVER = float("inf")
#: A server shows its new time after at most one turn of its event loop. Some show the old one
#: for one more command.
SHOWN_SECONDS = 0.5


class Span(NamedTuple):
    """The time in which the server's clock may have been this far ahead of this machine's."""

    since: float
    until: float
    ahead_seconds: float


@dataclass
class Readings:
    """The readings of the server's clock. Neighbouring spans overlap while a step was under way."""

    spans: list[Span] = field(default_factory=lambda: [Span(-NEVER, NEVER, 0.0)])

    @property
    def ahead_seconds(self) -> float:
        return self.spans[-1].ahead_seconds

    def stepped(self, since: float, until: float, ahead_seconds: float) -> None:
        """The clock was stepped at some time between these two."""
        self.spans[-1] = self.spans[-1]._replace(until=until)
        self.spans.append(Span(since, NEVER, ahead_seconds))

    def least_ahead(self, since: float, until: float) -> float:
        """How far the clock was ahead, at its lowest, between two moments."""
        known = (span for span in self.spans if span.since <= until and since <= span.until)
        return min(span.ahead_seconds for span in known)

    def reached(self, due: float, since: float = -NEVER) -> float:
        """When the clock may first have shown `due`, or a later time, at or after `since`."""
        found = ((max(s.since, since, due - s.ahead_seconds), s.until) for s in self.spans)
        return min((at for at, until in found if at < until), default=NEVER)

    def steps(self, since: float, until: float) -> int:
        """How often the clock was stepped between two moments."""
        return sum(since <= s.since + SHOWN_SECONDS and s.since <= until for s in self.spans)


class Clock(clock_steps.Clock):
    """One clock for all servers of a run; Sentinels use the real one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.readings = Readings()

    def show(self, ahead_seconds: float, running: list[Server], password: str = "") -> None:
        """Step the clock; returns when all running servers show the new time."""
        before = time.time()
        self.set(ahead_seconds)
        for server in running:
            wait_until(
                lambda server=server: _shows(server, password, ahead_seconds),
                f"the clock of {server.port} is {ahead_seconds:+.0f} s ahead",
            )
        self.readings.stepped(before, time.time(), ahead_seconds)


def _shows(server: Server, password: str, ahead_seconds: float) -> bool:
    options = {"password": password} if password else {}
    try:
        with server.client(socket_timeout=5, **options) as client:
            seconds, _ = client.time()
    except RedisError:
        return False
    return abs(seconds - time.time() - ahead_seconds) < 5
