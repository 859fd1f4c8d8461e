"""Reclaims what other consumers of the same queues have left when they died."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

from kombu_delayed.connection.native import get_logger
from kombu_delayed.store.leases import Other, Renewal
from kombu_delayed.store.store import Store

from .consumer_id import lease_seconds_of
from .contact import Contact
from .keeper import keeper

logger = get_logger(__name__)

#: A lease that ends is checked this long after its end.
JUST_AFTER_SECONDS = 0.01


#: A step reclaims for this fraction of a lease at most: its own lease must be renewed in between.
LONGEST_STEP = 1 / 6


class Reclaimer:
    """Watches the leases of others over one contact with the server.

    `seconds` is the length of its own lease, and of leases of consumers whose ids contain none.
    """

    def __init__(self, store: Store, seconds: float, server: Hashable, contact: Contact) -> None:
        self._store = store
        self._seconds = seconds
        self._server = server
        self._contact = contact
        #: Leases granted by a clock that was ahead -> when they were first seen.
        self._late: dict[Other, float] = {}

    def step(self, renewal: Renewal, clock: Callable[[], float]) -> float:
        """Reclaim what dead consumers left; returns seconds until another may count as dead."""
        wait = math.inf
        if renewal.next_end_ms is not None:
            wait = (renewal.next_end_ms - renewal.now_ms) / 1000 + JUST_AFTER_SECONDS
        until = clock() + self._seconds * LONGEST_STEP
        for other in renewal.others:
            if clock() >= until:
                return 0.0
            if other.end_ms > renewal.now_ms:
                self._late.setdefault(other, clock())
                continue
            seconds = self._seconds_to_live(other, renewal, clock())
            wait = min(wait, self._reclaim_after(other, seconds))
        for other, since in [*self._late.items()]:
            now = clock()
            left = self._length_of(other) - min(self._contact.steady_seconds(now), now - since)
            if left <= 0:
                del self._late[other]
            wait = min(wait, self._reclaim_after(other, left))
        return wait

    def _seconds_to_live(self, other: Other, renewal: Renewal, now: float) -> float:
        """How long a consumer still counts as alive that was not seen to renew its lease."""
        if other.end_ms == 0:  # it was found dead before
            return 0
        needed = self._length_of(other)
        if self._has_just_started and renewal.now_ms - other.end_ms >= needed * 1000:
            needed /= 2
        return needed - self._contact.steady_seconds(now)

    def _length_of(self, other: Other) -> float:
        return lease_seconds_of(other.consumer) or self._seconds

    @property
    def _has_just_started(self) -> bool:
        """Whether this contact is the first that its process has had with the server."""
        began_at, since = keeper(self._server).began_at, self._contact.since
        return began_at is not None and since is not None and since <= began_at + self._seconds / 3

    def _reclaim_after(self, other: Other, seconds: float) -> float:
        """Reclaim what a consumer left, if it counts as dead; returns seconds until the next look.

        Nothing is reclaimed if its lease was renewed since. The next look follows at once, because
        one look finds only some of many dead consumers.
        """
        if seconds > 0:
            return seconds + JUST_AFTER_SECONDS
        count = self._store.leases.reclaim(other.queue, other.consumer, other.end_ms)
        if count:
            logger.warning(
                "Consumer %s has stopped answering: its %d unacknowledged messages are back in "
                "queue %r",
                other.consumer.encode(errors="surrogateescape").decode(errors="backslashreplace"),
                count,
                other.queue,
            )
        return 0.0
