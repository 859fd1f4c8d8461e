"""One connection, kept: what a move costs is the round trip and little else.

redis-py's client takes a connection from its pool for each command, wraps it in its retry, metrics
and callback machinery and gives it back: a quarter of the processor time of scheduling a message.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

from redis import ConnectionPool
from redis.exceptions import ResponseError

from .errors import UNREACHABLE, ServerFull, translate

#: Answers that nobody has waited for are read at the latest when so many are on their way.
UNREAD_LIMIT = 64

#: A connection that has been idle for longer is looked at before it is used.
IDLE_SECONDS = 0.1


def pack(command: Sequence[Any]) -> bytes:
    """A command for the wire. redis-py checks each part of it, and cuts it into small ones."""
    parts = [b"*%d" % len(command)]
    for each in command:
        raw = each if type(each) is bytes else str(each).encode()
        parts += (b"$%d" % len(raw), raw)
    parts.append(b"")
    return b"\r\n".join(parts)


def pairs(answer: Any) -> list[tuple[bytes, bytes]]:
    """The fields and values of a hash, which newer versions of redis-py give as a dict."""
    if isinstance(answer, dict):
        return list(answer.items())
    return list(zip(answer[::2], answer[1::2], strict=True))


class Wire:
    """Sends commands in order, from any thread, each once: who retries must know what it did."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # for a signal handler, in the moment before `_owner`
        self._owner: int | None = None
        self._connection: Any = None
        self._used_at = monotonic()
        self._unread: deque[Callable[[], None]] = deque()
        #: Of the connections so far: another one may be to a server that knows no script of ours.
        self.generation = 0

    def __call__(self, *command: Any) -> Any:
        """Send one command and return its answer. Raises redis-py's errors."""
        if self._pid != os.getpid():
            self._start()
        if self._owner == threading.get_ident():
            return self._aside(command)
        with self._held():
            try:
                self._send(command)
                self._read_posted()
                return _read(self._connection)
            except (ResponseError, ServerFull):
                raise
            except BaseException:
                self._fail_posted()
                raise

    def post(self, *command: Any, on_error: Callable[[], None]) -> None:
        """Send one command and do not wait for its answer.

        `on_error` is called, at the latest with the next command, where the server has refused it
        or the connection broke before it answered. Raises redis-py's connection errors.
        """
        if self._pid != os.getpid():
            self._start()
        if self._owner == threading.get_ident():
            self._post_aside(command, on_error)
            return
        with self._held():
            try:
                self._send(command)
            except BaseException:
                self._fail_posted()
                raise
            self._unread.append(on_error)
            if len(self._unread) >= UNREAD_LIMIT:
                self._read_in_passing()

    def settle(self) -> None:
        """Read the answers of all that was posted. Raises redis-py's connection errors."""
        if self._pid != os.getpid() or self._owner == threading.get_ident():
            return
        with self._held():
            try:
                self._read_posted()
            except BaseException:
                self._fail_posted()
                raise

    def _post_aside(self, command: tuple[Any, ...], on_error: Callable[[], None]) -> None:
        try:
            self._aside(command)
        except (ResponseError, ServerFull):
            on_error()

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    def _aside(self, command: tuple[Any, ...]) -> Any:
        """A signal handler has interrupted this very thread between a command and its answer."""
        connection = self._pool.get_connection()
        try:
            connection.send_command(*command)
            return _read(connection)
        finally:
            self._pool.release(connection)

    def _read_in_passing(self) -> None:
        try:
            self._read_posted()
        except UNREACHABLE:
            self._fail_posted()  # and so everybody knows

    def _send(self, command: tuple[Any, ...]) -> None:
        if self._connection is None:
            self._connection = self._pool.get_connection()
        elif not self._unread and monotonic() - self._used_at > IDLE_SECONDS:
            self._drop_closed()
        self._used_at = monotonic()
        if not self._unread and getattr(self._connection, "_re_auth_token", None) is not None:
            self._connection.re_auth()
        # A check of the connection's health would take the answer of a posted command for its own.
        self._connection.send_packed_command([pack(command)], check_health=not self._unread)

    def _drop_closed(self) -> None:
        """Nothing was sent yet, so the server's closing of an idle connection need not show."""
        try:
            closed = self._connection.can_read(timeout=0)
        except UNREACHABLE:
            closed = True
        if closed:
            self._disconnect()

    def _read_posted(self) -> None:
        while self._unread:
            try:
                _read(self._connection)
            except (ResponseError, ServerFull):
                self._unread[0]()
            self._unread.popleft()

    def _fail_posted(self) -> None:
        if self._connection is not None:
            self._disconnect()
        while self._unread:
            self._unread.popleft()()

    def _disconnect(self) -> None:
        self._connection.disconnect()
        self.generation += 1


def _read(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        meaning = translate(error)
        if meaning is error:
            raise
        raise meaning from error
