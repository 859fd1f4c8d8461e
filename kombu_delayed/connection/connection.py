"""One connection that is kept, so that a move costs little more than the round trip.

redis-py's client takes a connection from its pool for each command, wraps it in its retry, metrics
and callback machinery and gives it back: a quarter of the processor time of scheduling a message.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any

from redis import ConnectionPool
from redis.exceptions import ConnectionError, ResponseError

from ..errors import UNREACHABLE, NotReplicated, ServerFull, ServerNotReady
from .commands import (
    NotYet,
    Posted,
    Replicas,
    Unread,
    can_read,
    doubts,
    given_back,
    ignore,
    or_error,
    pack,
    pack_both,
    read,
    read_both,
    read_now,
    wait_readable,
)
from .format import LOOK_SECONDS as FORMAT_SECONDS
from .format import Format

#: Answers to posted commands are read at the latest when this many are outstanding.
UNREAD_LIMIT = 64

#: The maximum number of commands that are sent together.
TOGETHER_LIMIT = 250

#: How long after posting a command a waiting consumer looks for its answer.
LOOK_SECONDS = 0.02

#: A connection that has been idle for longer is checked before it is used.
IDLE_SECONDS = 0.1


class ServerConnection:
    """Sends commands in order, from any thread, each once.

    A caller that retries must know what the command did.
    """

    #: The Cluster that the connection leads to, if it does.
    cluster: Any = None

    #: Whether a consumer uses it, whose signal handler gives back what an interrupted claim brings.
    is_consumers = False

    #: Whether the poller has reported something to read that was not there.
    false_alarm = False

    #: Checks whether this package knows the version of the server's data; None: no check.
    format: Format | None = None

    def __init__(self, pool: ConnectionPool, format: Format | None = None) -> None:
        self.pool = pool
        self.format = format
        self._start()

    def to(self, command: Sequence[Any]) -> ServerConnection:
        """Return the connection for a command: a Cluster has one for each node."""
        return self

    def everywhere(self) -> Sequence[ServerConnection]:
        """Return one connection for each server."""
        return [self]

    def connect(self) -> Any:
        """Take another connection, which the caller returns to the pool."""
        doubts.drop_idle(self.pool)
        try:
            return self.pool.get_connection()
        except (TypeError, ValueError) as error:  # another thread has closed it meanwhile
            raise ConnectionError(f"a connection was closed as it was opened: {error}") from error

    def refresh(self, connection: Any, is_idle: bool) -> None:
        """Make sure that a connection from `connect` still leads to the right server."""

    def insist(self, *command: Any, replicas: Replicas | None = None) -> Any:
        """Like a call, for a sender that would rather wait a moment than retry after an error."""
        return self(*command, replicas=replicas)

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # reentrant: a signal may arrive just before `_owner` is set
        self._owner: int | None = None
        #: Whether the owner has sent a command and waits for its answer.
        self._is_sent = False
        self._connection: Any = None
        #: The socket of the connection that `lend` has returned to the pool, until the next one.
        self._lent: Any = None
        self._used_at = monotonic()
        self._format_at = -math.inf
        self._format_over: Any = None
        #: When to `look`, by the monotonic clock.
        self.look_at = math.inf
        self._unread = Unread()
        #: Posted commands that go out in front of the next one, or with `push`.
        self._unsent: list[bytes] = []
        self._holds_back = False
        #: Counts connections: a new one may lead to a server that does not have our scripts.
        self.generation = 0

    def __call__(self, *command: Any, replicas: Replicas | None = None) -> Any:
        """Send one command and return its answer. Raises redis-py's errors.

        With `replicas`, wait until they have it. Raises NotReplicated if too few have it in time.
        """
        if self._pid != os.getpid():
            self._start()
        if self._owner == threading.get_ident():
            return self._aside(command, replicas)
        with self._lock:  # as `_held` does it, which costs a microsecond more
            try:
                self._owner = threading.get_ident()
                if replicas is None:
                    self._send(pack(command))
                else:
                    self._send(pack_both(command, replicas), replicas)
                self._is_sent = True
                if self._unread:
                    self._read_posted()
                if replicas is None:
                    return read(self._connection)
                return read_both(self._connection, replicas)
            except (ResponseError, ServerFull, NotReplicated):
                raise
            except BaseException:
                self._fail_posted()
                raise
            finally:
                self._owner, self._is_sent = None, False

    def many(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands together and return their answers; a refused command's is its error.

        Raises redis-py's connection errors. Some of the commands may have been carried out then.
        """
        answers: list[Any] = []
        for at in range(0, len(commands), TOGETHER_LIMIT):
            answers += self._many(commands[at : at + TOGETHER_LIMIT])
        return answers

    def _many(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        if self._pid != os.getpid():
            self._start()
        if self._owner == threading.get_ident():
            return [or_error(partial(self._aside, tuple(each))) for each in commands]
        with self._held():
            try:
                self._send(b"".join(map(pack, commands)))
                self._is_sent = True
                self._read_posted()
                answers = [or_error(partial(read, self._connection)) for _ in commands]
            except BaseException:
                self._fail_posted()
                raise
            if any(isinstance(answer, ServerNotReady) for answer in answers):
                self._fail_posted()  # another connection may lead to a server that is ready
            return answers

    def post(
        self,
        *command: Any,
        on_error: Callable[[], None],
        on_answer: Callable[[Any], None] = ignore,
    ) -> None:
        """Send one command and do not wait for its answer.

        `on_answer` is called with the answer, during the next command or `look`. If the server has
        refused the command or the connection broke before the answer, `on_error` is called instead.
        Raises redis-py's connection errors.
        """
        if self._pid != os.getpid():
            self._start()
        if self._owner == threading.get_ident():
            try:
                answer = self._aside(command)
            except (ResponseError, ServerFull):
                on_error()
            else:
                on_answer(answer)
            return
        with self._lock:  # as in a call
            try:
                self._owner = threading.get_ident()
                if self._holds_back:
                    self._open()
                    self._unsent.append(pack(command))
                else:
                    self._send(pack(command))
                if not self._unread:
                    self.look_at = self._used_at + LOOK_SECONDS
                self._unread.append(Posted(on_error, on_answer))
                if len(self._unread) >= UNREAD_LIMIT:
                    self._read_in_passing()
            except BaseException:
                self._fail_posted()
                raise
            finally:
                self._owner = None

    def hold_back(self) -> None:
        """Until `push`, send posted commands with the next command, in one packet."""
        self._holds_back = True

    def push(self) -> None:
        """Send the commands that were held back and not sent with another one."""
        self._holds_back = False
        if not self._unsent or self._pid != os.getpid() or self._owner == threading.get_ident():
            return
        with self._lock:  # as in a call
            try:
                self._owner = threading.get_ident()
                self._send_unsent()
            except BaseException:
                self._fail_posted()
                raise
            finally:
                self._owner = None

    @property
    def _sock(self) -> Any:
        """The socket of the answers, for a poller; None while there is no connection."""
        return getattr(self._connection, "_sock", None)

    def look(self) -> None:
        """Read the answers to posted commands that have arrived. Never waits or raises."""
        self._look()

    def hear(self) -> None:
        """Like `look`, after a poller has reported something. Detects a closed connection, too."""
        before = len(self._unread), self._sock
        self._look(polled=True)
        self.false_alarm = before == (len(self._unread), self._sock)

    def _look(self, polled: bool = False) -> None:
        if self._pid != os.getpid():
            self._start()
        self.look_at = monotonic() + LOOK_SECONDS if self._unread else math.inf
        if self._owner == threading.get_ident() or not self._lock.acquire(blocking=False):
            return
        try:
            with self._held():
                if self._unread:
                    self._read_in_passing(read_now)
                elif polled and self._sock is not None and self._was_closed():
                    self._disconnect()
        finally:
            self._lock.release()

    def settle(self) -> None:
        """Read the answers to all posted commands. Raises redis-py's connection errors."""
        if self._pid != os.getpid() or self._owner == threading.get_ident():
            return
        with self._held():
            try:
                self._read_posted()
            except BaseException:
                self._fail_posted()
                raise

    def lend(self) -> None:
        """Return the connection to its pool, for redis-py's client, until the next command."""
        if self._pid != os.getpid() or self._owner == threading.get_ident():
            return
        with self._held():
            if self._connection is None:
                return
            self._read_in_passing()
            connection, self._connection = self._connection, None
            self._lent = connection._sock
            self.pool.release(connection)

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._lock:
            try:
                self._owner = threading.get_ident()
                yield
            finally:
                self._owner, self._is_sent = None, False

    def _aside(self, command: tuple[Any, ...], replicas: Replicas | None = None) -> Any:
        """Send a command of a signal handler that interrupted this thread before its answer came.

        That of a consumer waits until the interrupted command is done: until its answer arrives.
        """
        connection = self.connect()
        with given_back(connection, self.pool):
            if self._is_sent and self.is_consumers:
                self._is_sent = False
                wait_readable(self._connection)
            connection.send_packed_command([pack_both(command, replicas)])
            return read_both(connection, replicas)

    def _read_in_passing(self, reader: Callable[[Any], Any] | None = None) -> None:
        try:
            self._read_posted(reader)
        except NotYet:
            return
        except UNREACHABLE:
            self._fail_posted()  # so their callers know
        except BaseException:
            self._fail_posted()
            raise

    def _read_posted(self, reader: Callable[[Any], Any] | None = None) -> None:
        self._send_unsent()
        self._unread.read(self._connection, self._refused, reader)
        self.look_at = math.inf

    def _send_unsent(self) -> None:
        if self._unsent:
            packed, self._unsent = [b"".join(self._unsent)], []
            self._connection.send_packed_command(packed, check_health=False)

    def _look_at_format(self, format: Format) -> None:
        """Check the format before a command, over its connection. Raises FormatError."""

        def send(*command: Any) -> Any:
            self._connection.send_packed_command([pack(command)])
            return read(self._connection)

        self._read_posted()
        format.look(send)
        self._format_at = self._used_at + FORMAT_SECONDS
        self._format_over = self._connection._sock

    def _send(self, packed: bytes, replicas: Replicas | None = None) -> None:
        self._open(replicas)
        if self._unsent:
            packed, self._unsent = b"".join([*self._unsent, packed]), []
        # A health check of the connection would take a posted command's answer for its own.
        self._connection.send_packed_command([packed], check_health=not self._unread)

    def _open(self, replicas: Replicas | None = None) -> None:
        """Make sure that there is a connection for a command that `replicas` must have."""
        if self._connection is None:
            self._connection = self.connect()
            if self._lent is not None and self._connection._sock is not self._lent:
                self.generation += 1
            self._lent = None
        elif self._unread:
            if self._connection._sock is None:  # the pool was emptied meanwhile
                self._fail_posted()
        elif monotonic() - self._used_at > IDLE_SECONDS:
            self._drop_closed()
        self._used_at = monotonic()
        if not self._unread and getattr(self._connection, "_re_auth_token", None) is not None:
            self._connection.re_auth()
        if self.format is not None and (
            self._used_at >= self._format_at or self._connection._sock is not self._format_over
        ):
            self._look_at_format(self.format)

    def _drop_closed(self) -> None:
        """Drop an idle connection that is closed or in doubt. Nothing was sent, so none fails."""
        if self._sock is None or doubts.has(self.pool, self._used_at) or self._was_closed():
            self._disconnect()

    def _was_closed(self) -> bool:
        """Return whether the server has closed it: there is nothing else to read when idle."""
        try:
            return can_read(self._connection)
        except UNREACHABLE:
            return True

    def _refused(self, error: Exception) -> None:
        """Handle the server's refusal of a posted command."""

    def _fail_posted(self) -> None:
        if self._connection is not None:
            doubts.note(self.pool, self._used_at)
            self._disconnect()
        self._unsent.clear()
        self.look_at = math.inf
        self._unread.fail()

    def _disconnect(self) -> None:
        self._connection.disconnect()
        self.generation += 1
