"""Reading without waiting: what an event loop may do with a connection of redis-py.

redis-py waits for the rest of a reply that has begun to come, for as long as the socket's timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.exceptions import ConnectionError, ResponseError, TimeoutError

#: The shortest time a socket can wait for: the rest of a reply that has begun to come.
REST_SECONDS = 0.001

_NOTHING: Any = object()


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


def watched(connection_class: type, before_closing: Callable[[Any], None]) -> type:
    """A class of connections that a poller watches."""

    class Watched(connection_class):
        _ahead: Any = _NOTHING
        #: Whether the poller has told of something that was not there.
        told_in_vain = False

        def disconnect(self, *args: Any, **kwargs: Any) -> None:
            # A closed socket cannot be taken out of an epoll, and a forked child keeps it there.
            if self._sock is not None:
                before_closing(self)
            self._ahead = _NOTHING
            super().disconnect(*args, **kwargs)

        def read_ahead(self, told: bool = False, **options: Any) -> bool:
            """Read the next reply for `read_response`, if all of it has come."""
            self.told_in_vain = False
            if self._ahead is _NOTHING:
                try:
                    self._ahead = read_now(self, told, **options)
                except NotYet:
                    self.told_in_vain = told
                    return False
                except ResponseError as error:
                    self._ahead = error
            return True

        def can_read(self, *args: Any, **kwargs: Any) -> bool:
            return self._ahead is not _NOTHING or bool(super().can_read(*args, **kwargs))

        def read_response(self, *args: Any, **kwargs: Any) -> Any:
            ahead, self._ahead = self._ahead, _NOTHING
            if ahead is _NOTHING:
                return super().read_response(*args, **kwargs)
            if isinstance(ahead, ResponseError):
                raise ahead
            return ahead

    return Watched
