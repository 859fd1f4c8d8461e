"""How commands are written, what their answers say, and how an event loop reads those.

redis-py waits for the rest of a reply that has begun to come, for as long as the socket's timeout.
"""

from __future__ import annotations

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

#: The shortest time a socket can wait for: the rest of a reply that has begun to come.
REST_SECONDS = 0.001

#: What is in front of a part, by its length: most are short.
_LENGTHS = [b"$%d" % length for length in range(256)]


def pack(command: Sequence[Any]) -> bytes:
    """A command for the wire. redis-py checks each part of it, and cuts it into small ones."""
    if _pack_in_c is not None:
        try:
            return _pack_in_c(tuple(command))
        except (TypeError, UnicodeEncodeError):  # it takes text, bytes and plain numbers
            pass
    raws = [
        each
        if isinstance(each, bytes)
        else str(each).encode(errors="surrogateescape")  # names that a server has need not be text
        for each in command
    ]
    known = len(_LENGTHS)
    parts = [b""] * (2 * len(raws) + 2)
    parts[0] = b"*%d" % len(raws)
    parts[1:-1:2] = [_LENGTHS[n] if (n := len(raw)) < known else b"$%d" % n for raw in raws]
    parts[2:-1:2] = raws
    return b"\r\n".join(parts)


def pairs(answer: Any) -> list[tuple[bytes, bytes]]:
    """The fields and values of a hash, which newer versions of redis-py give as a dict."""
    if isinstance(answer, dict):
        return list(answer.items())
    return list(zip(answer[::2], answer[1::2], strict=True))


def scored(answer: list[Any]) -> list[tuple[Any, Any]]:
    """Members with scores, which RESP3 has in pairs already."""
    if answer and isinstance(answer[0], list):
        return [(member, score) for member, score in answer]
    return pairs(answer)


def numbers(answer: bytes) -> list[int]:
    """What a script has counted, which it returns as text."""
    return list(map(int, answer.split()))


def keys_like(send: Callable[..., Any], pattern: str, count: int) -> Iterator[bytes]:
    """Keys of one server that a pattern of SCAN matches, about `count` a call; some repeatedly."""
    cursor, more = b"0", True
    while more:
        cursor, page = send("SCAN", cursor, "MATCH", pattern, "COUNT", count)
        yield from page
        more = int(cursor) != 0


def hash_pages(
    send: Callable[..., Any], key: str, count: int
) -> Iterator[list[tuple[bytes, bytes]]]:
    """Fields and values of a hash, about `count` a call; some repeatedly."""
    cursor, more = b"0", True
    while more:
        cursor, page = send("HSCAN", key, cursor, "COUNT", count)
        yield pairs(page)
        more = int(cursor) != 0


@dataclass(frozen=True)
class Replicas:
    """How many replicas are to have what was written, and how long that may take."""

    count: int
    timeout_ms: int

    @property
    def command(self) -> tuple[str, int, int]:
        """What asks for it, after a write on the same connection."""
        return ("WAIT", self.count, self.timeout_ms)

    def check(self, reached: int) -> None:
        """Raise NotReplicated where these were too few."""
        if reached < self.count:
            raise NotReplicated(
                f"the message is stored on the master, but only {reached} of {self.count} replicas "
                f"have it after {self.timeout_ms / 1000:g} s (delayed_replicas_to_wait); a delayed "
                "one with a task id may be sent again"
            )


def pack_both(command: tuple[Any, ...], replicas: Replicas | None) -> bytes:
    """A command for the wire, and what asks for the replicas that are to have what it writes."""
    # In one go: another connection would know nothing of the write.
    return pack(command) + pack(replicas.command) if replicas else pack(command)


@contextmanager
def given_back(connection: Any, pool: ConnectionPool) -> Iterator[None]:
    """Give a connection back to its pool, but not with an answer that is yet to come."""
    try:
        yield
    except (ResponseError, ServerFull, NotReplicated):
        raise
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


def or_error(read: Callable[[], Any]) -> Any:
    """The answer, or the error that the server has refused the command with."""
    try:
        return read()
    except (ResponseError, ServerFull, ServerNotReady) as error:
        return error


def read_both(connection: Any, replicas: Replicas | None) -> Any:
    """The answer to a command. Raises NotReplicated where too few `replicas` have what it wrote."""
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
    """The next answer, by `reader` where one is given. Raises the server's complaint as meant."""
    try:
        return connection.read_response() if reader is None else reader(connection)
    except ResponseError as error:
        meaning = translate(error)
        if meaning is error:
            raise
        raise meaning from error


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


def ignore(answer: Any) -> None:
    """Nobody asks for it."""


class Posted(NamedTuple):
    """A command that was sent, and whose answer nobody waits for."""

    #: Called where the command has failed, or nobody knows.
    on_error: Callable[[], None]
    on_answer: Callable[[Any], None] = ignore


class Unread(deque[Posted]):
    """For each answer that nobody waits for, in order, what to call with it.

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
                answer = read(connection, reader)
            except (ResponseError, ServerFull) as error:
                on_refusal(error)
                self[0].on_error()
            else:
                self[0].on_answer(answer)
            self.popleft()

    def fail(self) -> None:
        """Nobody will read them any more."""
        while self:
            self.popleft().on_error()
