"""Connections of redis-py: watched by a poller, closed by other greenlets, or with TLS."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from redis import SSLConnection
from redis.exceptions import ConnectionError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .commands import NotYet, read_now

_NOTHING: Any = object()

#: The limit for a TLS handshake: a server without TLS silently waits for the end of a command.
HANDSHAKE_SECONDS = 3.0


class Watched:
    """A mixin for a class of connections that keeps a reply which was read ahead."""

    _before_closing: Callable[[Any], None]
    _sock: Any
    _ahead: Any = _NOTHING
    #: Whether the poller has reported something to read that was not there.
    false_alarm = False

    def disconnect(self, *args: Any, **kwargs: Any) -> None:
        # A closed socket cannot be removed from an epoll, and a forked child keeps it there.
        if self._sock is not None:
            self._before_closing(self)
        self._ahead = _NOTHING
        super().disconnect(*args, **kwargs)  # type: ignore[misc]

    def read_ahead(self, polled: bool = False, **options: Any) -> bool:
        """Read the next reply for `read_response`, if all of it has arrived."""
        self.false_alarm = False
        if self._ahead is _NOTHING:
            try:
                self._ahead = read_now(self, polled, **options)
            except NotYet:
                self.false_alarm = polled
                return False
            except ResponseError as error:
                self._ahead = error
        return True

    def can_read(self, *args: Any, **kwargs: Any) -> bool:
        return self._ahead is not _NOTHING or bool(
            super().can_read(*args, **kwargs)  # type: ignore[misc]
        )

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        ahead, self._ahead = self._ahead, _NOTHING
        if ahead is _NOTHING:
            return super().read_response(*args, **kwargs)  # type: ignore[misc]
        if isinstance(ahead, ResponseError):
            raise ahead
        return ahead


def watched(connection_class: type, before_closing: Callable[[Any], None]) -> type:
    """Return a class of connections for a poller. `before_closing` is called before one closes."""
    given = {"_before_closing": staticmethod(before_closing)}
    return type("Watched", (Watched, connection_class), given)


class ClosedByOthers:
    """A mixin for a class of connections under eventlet.

    There a read fails with EOFError if another greenlet closes the socket, an error that redis-py
    and Kombu do not expect.
    """

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().read_response(*args, **kwargs)  # type: ignore[misc]
        except EOFError as error:
            raise ConnectionError("another greenlet has closed the connection") from error


def closed_by_others(connection_class: type) -> type:
    """Return the class with EOFError turned into an error of the connection."""
    return type("ClosedByOthers", (ClosedByOthers, connection_class), {})


class TlsConnection(SSLConnection):
    """A TLS connection whose handshake has a time limit of its own."""

    def _wrap_socket_with_ssl(self, sock: Any) -> Any:
        sock.settimeout(min(self.socket_timeout or HANDSHAKE_SECONDS, HANDSHAKE_SECONDS))
        try:
            wrapped = super()._wrap_socket_with_ssl(sock)
        except TimeoutError:
            raise RedisTimeoutError(
                f"no answer to a TLS handshake from {self.host}:{self.port} within "
                f"{HANDSHAKE_SECONDS:g} s: does this port speak TLS, as the broker URL says?"
            ) from None
        except (FileNotFoundError, PermissionError) as error:
            raise ConnectionError(f"{self._unreadable()}: {error.strerror}") from error
        wrapped.settimeout(self.socket_timeout)
        return wrapped

    def _unreadable(self) -> str:
        # The error of `ssl` does not name the file.
        paths = {f"ssl_{name}": getattr(self, name) for name in ("ca_certs", "certfile", "keyfile")}
        found = [f"{each} {p}" for each, p in paths.items() if p and not os.access(p, os.R_OK)]
        return f"cannot read {', '.join(found) or 'a file for TLS'}"
