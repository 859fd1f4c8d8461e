"""Reading without waiting: what an event loop may do with a connection of redis-py.

redis-py waits for the rest of a reply that has begun to come, for as long as the socket's timeout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from ..errors import ServerFull
from .commands import read

#: The shortest time a socket can wait for: the rest of a reply that has begun to come.
REST_SECONDS = 0.001


class NotYet(Exception):
    """A reply has not come, or not all of it."""


def can_read(connection: Any) -> bool:
    """Whether something has come. Raises redis-py's connection errors."""
    try:
        return bool(connection.can_read(timeout=0))
    except (AttributeError, TypeError, ValueError) as error:
        # Somebody has emptied the pool meanwhile: redis-py has looked at no socket.
        raise ConnectionError(f"the connection was closed: {error}") from error


def read_now(connection: Any, told: bool = False, **options: Any) -> Any:
    """The next reply, which stays where it is until all of it has come.

    Call it with `told` where a poller has said that something has come: eventlet's `select` without
    a timeout may miss that. Raises NotYet, and redis-py's errors.
    """
    sock = connection._sock
    if sock is None:
        raise ConnectionError("the connection was closed")
    if not told and not can_read(connection):
        raise NotYet
    before = sock.gettimeout()
    sock.settimeout(REST_SECONDS)
    try:
        return connection.read_response(disconnect_on_error=False, **options)
    except TimeoutError as error:
        raise NotYet from error
    finally:
        if connection._sock is sock:
            sock.settimeout(before)


class Unread(deque[Callable[[], None]]):
    """For each answer that nobody waits for, in order, what to call where the command has failed.

    Whoever has the connection reads them.
    """

    def read(
        self,
        connection: Any,
        on_refusal: Callable[[Exception], None],
        reader: Callable[[Any], Any] | None = None,
    ) -> None:
        """Read all of them. Raises redis-py's connection errors, and what the `reader` raises."""
        while self:
            try:
                read(connection, reader)
            except (ResponseError, ServerFull) as error:
                on_refusal(error)
                self[0]()
            self.popleft()

    def fail(self) -> None:
        """Nobody will read them any more."""
        while self:
            self.popleft()()
