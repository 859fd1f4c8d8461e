"""Writes commands and reads their answers, with support for an event loop.

redis-py waits for the rest of a reply that has begun to arrive, for as long as the socket's
timeout.
"""

from __future__ import annotations

import math
import selectors
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from redis import ConnectionPool
from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from ..errors import NotReplicated, ServerFull, ServerNotReady, translate

_pack_in_c: Callable[[tuple[Any, ...]], bytes] | None
try:
    from hiredis import pack_command as _pack_in_c
except ImportError:  # it comes with the extra `spark` only
    _pack_in_c = None

#: How long to wait for the rest of a reply that has begun to arrive: a socket's shortest timeout.
REST_SECONDS = 0.001

#: How long a signal handler waits at most for the command that it has interrupted.
ASIDE_SECONDS = 0.5

#: The prefix of a part, by its length: most parts are short.
_LENGTHS = [b"$%d" % length for length in range(256)]


def pack(command: Sequence[Any]) -> bytes:
    """Encode a command. redis-py would check each part of it and cut it into small pieces."""
    if _pack_in_c is not None:
        try:
            return _pack_in_c(tuple(command))
        except (TypeError, UnicodeEncodeError):  # hiredis takes text, bytes and plain numbers
            pass
    raws = [
        each
        if isinstance(each, bytes)
        else str(each).encode(errors="surrogateescape")  # names in Redis need not be text
        for each in command
    ]
    known = len(_LENGTHS)
    parts = [b""] * (2 * len(raws) + 2)
    parts[0] = b"*%d" % len(raws)
    parts[1:-1:2] = [_LENGTHS[n] if (n := len(raw)) < known else b"$%d" % n for raw in raws]
    parts[2:-1:2] = raws
    return b"\r\n".join(parts)


def pairs(answer: Any) -> list[tuple[bytes, bytes]]:
    """Return the fields and values of a hash, which newer versions of redis-py give as a dict."""
    if isinstance(answer, dict):
        return list(answer.items())
    return list(zip(answer[::2], answer[1::2], strict=True))


def scored(answer: list[Any]) -> list[tuple[Any, Any]]:
    """Return members with their scores, which come in pairs already with RESP3."""
    if answer and isinstance(answer[0], list):
        return [(member, score) for member, score in answer]
    return pairs(answer)


def numbers(answer: bytes) -> list[int]:
    """Return the numbers that a script has returned as text."""
    return list(map(int, answer.split()))


def keys_like(send: Callable[..., Any], pattern: str, count: int) -> Iterator[bytes]:
    """Yield the keys of a server that match a SCAN pattern, about `count` a call; some repeat."""
    cursor, more = b"0", True
    while more:
        cursor, page = send("SCAN", cursor, "MATCH", pattern, "COUNT", count)
        yield from page
        more = int(cursor) != 0


def hash_pages(
    send: Callable[..., Any], key: str, count: int
) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yield pages of fields and values of a hash, about `count` a call; some repeat."""
    cursor, more = b"0", True
    while more:
        cursor, page = send("HSCAN", key, cursor, "COUNT", count)
        yield pairs(page)
        more = int(cursor) != 0


@dataclass(frozen=True)
class Replicas:
    """How many replicas must have a write, and how long that may take."""

    count: int
    timeout_ms: int

    @property
    def command(self) -> tuple[str, int, int]:
        """The command that waits for the replicas, after a write on the same connection."""
        return ("WAIT", self.count, self.timeout_ms)

    def check_before(self, reached: int) -> None:
        """Raise ServerNotReady if there are too few replicas for a message to be sent."""
        if reached < self.count:
            raise ServerNotReady(
                f"the master has {reached} of {self.count} replicas after "
                f"{self.timeout_ms / 1000:g} s (delayed_replicas_to_wait); nothing was stored"
            )

    def check(self, reached: int) -> None:
        """Raise NotReplicated if too few replicas were reached."""
        if reached < self.count:
            raise NotReplicated(
                f"the message is stored on the master, but only {reached} of {self.count} replicas "
                f"have it after {self.timeout_ms / 1000:g} s (delayed_replicas_to_wait); a delayed "
                "one with a task id may be sent again"
            )


class AwaitsReplicas:
    """A mixin for connections to a server that a failover may have made the master just now.

    Before the first message that replicas must have, it waits for them: a new master has none at
    first. Storing nothing is better than storing a message that may be sent again.
    """

    _connection: Any
    _read_posted: Any
    generation: int
    #: The generation whose master has been found to have enough replicas.
    _replicated_over = -1

    def _start(self) -> None:
        super()._start()  # type: ignore[misc]
        self._replicated_over = -1

    def _open(self, replicas: Replicas | None = None) -> None:
        super()._open(replicas)  # type: ignore[misc]
        if replicas is None or self._replicated_over == self.generation:
            return
        self._read_posted()
        self._connection.send_packed_command([pack(replicas.command)])
        replicas.check_before(read(self._connection))
        self._replicated_over = self.generation


def pack_both(command: tuple[Any, ...], replicas: Replicas | None) -> bytes:
    """Encode a command, and the one that waits for the replicas that must have its write."""
    # Together: on another connection the server would not know which write to wait for.
    return pack(command) + pack(replicas.command) if replicas else pack(command)


@contextmanager
def given_back(connection: Any, pool: ConnectionPool) -> Iterator[None]:
    """Return a connection to its pool. Disconnect it first if an answer may be outstanding."""
    try:
        yield
    except (ResponseError, ServerFull, NotReplicated):
        raise
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


class Doubts:
    """Knows which connections of this process may be half open: nothing that they send arrives.

    If one has got no answer, the others to its server that have not been used since are closed
    rather than used. Otherwise each of them would wait for its own timeout.
    """

    def __init__(self) -> None:
        self._since: dict[Any, float] = {}

    def note(self, pool: ConnectionPool, sent_at: float) -> None:
        """Doubt the connections to a server that were not used after this time."""
        server = _server(pool)
        self._since[server] = max(sent_at, self._since.get(server, -math.inf))

    def has(self, pool: ConnectionPool, used_at: float) -> bool:
        """Return whether a connection is in doubt that was last used at this time."""
        return used_at < self._since.get(_server(pool), -math.inf)

    def drop_idle(self, pool: Any) -> None:
        """Close the idle connections of a pool, once for each doubt. They reopen when taken."""
        since = self._since.get(_server(pool))
        if since is not None and since != getattr(pool, "doubted_since", None):
            pool.doubted_since = since
            pool.disconnect(inuse_connections=False)


def _server(pool: ConnectionPool) -> tuple[Any, ...]:
    """Return the address of a pool's server, or the name by which Sentinels know it."""
    address = map(pool.connection_kwargs.get, ("host", "port", "path"))
    return (*address, getattr(pool, "service_name", None))


doubts = Doubts()


def or_error(read: Callable[[], Any]) -> Any:
    """Return the answer, or the error with which the server has refused the command."""
    try:
        return read()
    except (ResponseError, ServerFull, ServerNotReady) as error:
        return error


def read_both(connection: Any, replicas: Replicas | None) -> Any:
    """Return the answer to a command. Raises NotReplicated if too few `replicas` have its write."""
    if replicas is None:
        return read(connection)
    try:
        answer = read(connection)
    except (ResponseError, ServerFull, ServerNotReady):
        with suppress(ResponseError):
            connection.read_response()
        raise
    replicas.check(read(connection))
    return answer


def read(connection: Any, reader: Callable[[Any], Any] | None = None) -> Any:
    """Return the next answer, with `reader` if given. Raises the server's error, translated."""
    try:
        return connection.read_response() if reader is None else reader(connection)
    except ResponseError as error:
        meaning = translate(error)
        if meaning is error:
            raise
        raise meaning from error


class NotYet(Exception):
    """A reply has not arrived, or only a part of it."""


def can_read(connection: Any) -> bool:
    """Return whether there is something to read. Raises redis-py's connection errors."""
    try:
        return bool(connection.can_read(timeout=0))
    except (AttributeError, TypeError, ValueError) as error:
        # The pool was emptied meanwhile, so redis-py found no socket.
        raise ConnectionError(f"the connection was closed: {error}") from error


def wait_readable(connection: Any) -> None:
    """Wait until something can be read from the socket, but not for long."""
    if (socket := getattr(connection, "_sock", None)) is not None:
        with selectors.DefaultSelector() as selector:
            selector.register(socket, selectors.EVENT_READ)
            selector.select(ASIDE_SECONDS)


def read_now(connection: Any, polled: bool = False, **options: Any) -> Any:
    """Return the next reply. A reply that is not complete yet stays buffered.

    Pass `polled` if a poller has reported that there is something to read: eventlet's `select`
    without a timeout may miss that. Raises NotYet, and redis-py's errors.
    """
    sock = connection._sock
    if sock is None:
        raise ConnectionError("the connection was closed")
    if not polled and not can_read(connection):
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


def ignore(answer: Any) -> None:
    """Ignore an answer."""


class Posted(NamedTuple):
    """A command that was sent without waiting for its answer."""

    #: Called if the command has failed or its outcome is unknown.
    on_error: Callable[[], None]
    on_answer: Callable[[Any], None] = ignore


class Unread(deque[Posted]):
    """The posted commands whose answers have not been read, in order.

    The thread that holds the connection reads the answers.
    """

    def read(
        self,
        connection: Any,
        on_refusal: Callable[[Exception], None],
        reader: Callable[[Any], Any] | None = None,
    ) -> None:
        """Read all answers. Raises redis-py's connection errors, and those of the `reader`."""
        while self:
            try:
                answer = read(connection, reader)
            except (ResponseError, ServerFull) as error:
                on_refusal(error)
                self[0].on_error()
            else:
                self[0].on_answer(answer)
            self.popleft()

    def fail(self) -> None:
        """Fail all commands: their answers will not be read any more."""
        while self:
            self.popleft().on_error()
