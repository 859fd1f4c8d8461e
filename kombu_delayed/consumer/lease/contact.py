"""Measures how long a process was in unbroken contact with a server whose clock ran evenly.

Leases end at absolute times of the server's clock. An expired lease shows that a consumer is dead
only to an observer that saw the clock run, and could have seen a renewal, for a whole lease.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

#: A silence that is longer than this fraction of a lease breaks the contact.
LONGEST_SILENCE = 1 / 2

#: How far the server's clock may move against ours within a lease: this fraction of the lease …
CLOCK_TOLERANCE = 1 / 20

#: … but at least this many seconds.
CLOCK_TOLERANCE_SECONDS = 0.05


class Sample(NamedTuple):
    """How far the server's clock was ahead of ours, at least and at most."""

    at: float
    low: float
    high: float


class Contact:
    """Watches the calls to one server. Times are seconds of a clock that is never set."""

    def __init__(self, lease_seconds: float) -> None:
        self._longest_silence = lease_seconds * LONGEST_SILENCE
        self._tolerance = max(CLOCK_TOLERANCE_SECONDS, lease_seconds * CLOCK_TOLERANCE)
        self._lease_seconds = lease_seconds
        self._samples: deque[Sample] = deque()
        #: When the contact began; None if there is none.
        self.since: float | None = None

    def heard(self, asked_at: float, heard_at: float, server_ms: int) -> bool:
        """Note that a call was answered; returns False if the contact was broken before it."""
        sample = Sample(heard_at, server_ms / 1000 - heard_at, (server_ms + 1) / 1000 - asked_at)
        goes_on = self.since is None or self._goes_on(sample)
        if not goes_on:
            self.broke()
        if self.since is None:
            self.since = heard_at
        self._samples.append(sample)
        while self._samples[0].at < heard_at - 2 * self._lease_seconds:
            self._samples.popleft()
        return goes_on

    def broke(self) -> None:
        """End the contact after a failed call: the server, its clock, anything may have changed."""
        self.since = None
        self._samples.clear()

    def steady_seconds(self, now: float) -> float:
        """How long the contact has lasted."""
        return 0.0 if self.since is None else now - self.since

    def _goes_on(self, sample: Sample) -> bool:
        # Closing an idle connection and opening it again does not break the contact.
        return sample.at - self._samples[-1].at <= self._longest_silence and all(
            sample.low - self._tolerance <= known.high
            and known.low <= sample.high + self._tolerance
            for known in self._samples
        )
