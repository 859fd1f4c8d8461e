"""The connection on which a consumer blocks for wake tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

from kombu.utils.eventio import READ, poll
from redis import exceptions

from .commands import NotYet, pack, read_now
from .native import get_logger

logger = get_logger(__name__)

#: Seconds beyond the server's own limit after which an answer is overdue.
GRACE_SECONDS = 10


class WakeConnection:
    """Sends BZPOPMIN and reads its answer when the poller reports it.

    The server answers at least every `limit_seconds`: longer silence means a half-open connection.
    """

    def __init__(
        self,
        acquire: Callable[[], Any],
        wake_key: Callable[[str], str],
        limit_seconds: float,
    ) -> None:
        self._acquire = acquire
        self._wake_key = wake_key
        self._limit_seconds = limit_seconds
        self._queues: dict[bytes, str] = {}
        self._started_with: tuple[str, ...] = ()
        self._command = b""
        self.grace_seconds: float = GRACE_SECONDS
        self.connection: Any = None
        self.overdue_at = math.inf
        #: The socket over which it has asked, which other code may close.
        self._asked_over: Any = None

    @property
    def socket(self) -> Any:
        """The socket to poll, or None."""
        return getattr(self.connection, "_sock", None)

    def listens(self, queue: str) -> bool:
        """Return whether tokens of a queue are sent to this consumer, rather than taken by it."""
        return False

    @property
    def waiting(self) -> bool:
        """Whether an answer is outstanding."""
        return self.overdue_at != math.inf and self._is_same

    @property
    def _is_same(self) -> bool:
        sock = getattr(self.connection, "_sock", None)
        return sock is not None and sock is self._asked_over

    def start(self, queues: Iterable[str]) -> None:
        """Block for a token of any of the queues, unless it does so already."""
        if self.waiting:
            return
        if self.connection is None:
            self.connection = self._acquire()
        if (names := tuple(queues)) != self._started_with:
            keys = {self._wake_key(queue): queue for queue in names}
            self._queues = {key.encode(): queue for key, queue in keys.items()}
            self._command = pack(("BZPOPMIN", *keys, self._limit_seconds))
            self._started_with = names
        self.connection.send_packed_command([self._command])
        self._asked_over = self.socket
        self.overdue_at = monotonic() + self._limit_seconds + self.grace_seconds

    def read(self) -> tuple[str, int] | None:
        """Return the token that has arrived, as (queue, when in ms; 0: now), or None."""
        connection = self.connection
        if self.overdue_at == math.inf or connection._sock is not self._asked_over:
            self.reset()  # an idle connection was closed by the server
            return None
        connection.false_alarm = False
        try:
            answer = read_now(connection, polled=True)
        except NotYet:
            connection.false_alarm = True
            return None
        except exceptions.ResponseError as error:
            # Unblocked by a failover, still loading …: the connection is not usable.
            raise exceptions.ConnectionError(str(error)) from error
        self.overdue_at = math.inf
        if not answer:
            return None
        key, _, at_ms = answer
        return self._queues[key if isinstance(key, bytes) else key.encode()], int(float(at_ms))

    def check(self, now: float) -> bool:
        """Drop a connection whose answer is overdue. Returns whether a token may be lost."""
        if self.overdue_at == math.inf:
            return False
        if self.connection._sock is self._asked_over:
            if now < self.overdue_at or self._is_readable():
                return False
            logger.warning("The broker has not answered on a waiting connection; reconnecting")
        self.reset()
        return True

    def _is_readable(self) -> bool:
        poller = poll()
        try:
            poller.register(self.socket, READ)
            return bool(poller.poll(0))
        finally:
            poller.close()

    def reset(self) -> None:
        """Disconnect. A token on its way is lost, so the caller must claim."""
        self.overdue_at, self._asked_over = math.inf, None
        if self.connection is not None:
            self.connection.disconnect()

    def close(self) -> None:
        """Disconnect for good."""
        self.reset()
        self.connection = None
