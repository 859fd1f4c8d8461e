"""When to try again after a lost connection, and when to tell Kombu."""

from __future__ import annotations

import math
from time import monotonic

from ..connection.native import get_logger
from .unacked import QoS

logger = get_logger(__name__)

FIRST_RETRY_SECONDS = 0.05
LONGEST_RETRY_SECONDS = 1.0

#: The longest wait with an ack to send: its task runs again if this process dies before that.
ACK_RETRY_SECONDS = 0.2


class Retry:
    """Waits longer after each failure, until the connection is back."""

    def __init__(self, qos: QoS) -> None:
        self._qos = qos
        self.broken_since: float | None = None
        #: When to try again if there is no ack to send.
        self.at = -math.inf
        #: Nothing is handed out before this time.
        self.hold_until = -math.inf
        self._ack_at = -math.inf
        self._seconds = FIRST_RETRY_SECONDS

    @property
    def next_at(self) -> float:
        """When to try again."""
        return self._ack_at if self._qos.outbox.has_any else self.at

    def failed(self, error: BaseException, patience_seconds: float) -> float:
        """Returns when to try again. Raises the error if the connection is lost for too long."""
        now = monotonic()
        if self.broken_since is None:
            self.broken_since = now
            logger.warning("Lost the broker, trying again: %s", error)
        if now - self.broken_since >= patience_seconds:
            self.broken_since = None
            raise error
        self.at = now + self._seconds
        self._ack_at = now + min(self._seconds, ACK_RETRY_SECONDS)
        self._seconds = min(self._seconds * 2, LONGEST_RETRY_SECONDS)
        return self.at

    def mended(self) -> None:
        """Note that the server has answered."""
        if self.broken_since is not None:
            logger.warning("The broker is back after %.1f s", monotonic() - self.broken_since)
            self.broken_since = None
            self._seconds = FIRST_RETRY_SECONDS

    def hurry(self) -> None:
        """Retry at once, because the broker may be back. Safe from any thread."""
        self.at = self._ack_at = self.hold_until = -math.inf
