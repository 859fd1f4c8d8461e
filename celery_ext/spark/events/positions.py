"""The position of a reader in a stream of lifecycle events, and the events that it missed.

Streams are trimmed at their old end while they are read. Redis counts all events that were ever
added, so a position with that count shows how many events were missed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from kombu_delayed.connection.commands import pairs
from kombu_delayed.errors import DelayedError
from kombu_delayed.inspection.events import KEPT_MS
from kombu_delayed.store.calls.scripts import script
from kombu_delayed.store.calls.shards import label
from kombu_delayed.store.store import Store

#: Events that one call scans to find the end of a piece, which takes the server a millisecond.
STEP_SIZE = 500

#: An unknown count: at the beginning of a stream, and on servers before Redis 7.
UNKNOWN = -1

BEGINNING = "0-0"


class EventsLost(DelayedError):
    """Lifecycle events were trimmed before they were read."""


@dataclass(frozen=True)
class Position:
    """The position after the event `id`, the `n`th that was ever added to its stream."""

    id: str = BEGINNING
    n: int = UNKNOWN

    def __str__(self) -> str:
        return self.id if self.n == UNKNOWN else f"{self.id} (event {self.n:,})"

    @property
    def key(self) -> tuple[int, int]:
        ms, _, number = self.id.partition("-")
        return int(ms), int(number)


@dataclass(frozen=True)
class Stream:
    """The current state of a queue's stream; `first_id` is empty if it has no event."""

    length: int
    first_id: str
    end: Position

    @property
    def trimmed(self) -> int:
        return UNKNOWN if self.end.n == UNKNOWN else self.end.n - self.length


#: A stream that was deleted.
GONE = Stream(0, "", Position())


@dataclass(frozen=True)
class Piece:
    """The events after `after` up to `upto`; `count` is their number, if known."""

    after: str
    upto: str
    count: int


def look(store: Store, queue: str) -> Stream | None:
    try:
        answer = store.run("XINFO", "STREAM", store.keys(queue).events)
    except ResponseError as error:
        if "no such key" in str(error):
            return None
        raise
    info: dict[str, Any] = {name.decode(): value for name, value in pairs(answer)}
    first = info.get("first-entry")
    return Stream(
        info["length"],
        first[0].decode() if first else "",
        Position(info["last-generated-id"].decode(), info.get("entries-added", UNKNOWN)),
    )


@dataclass(frozen=True)
class Loss:
    """Missed events: their number (or UNKNOWN), or a stream that was replaced."""

    queue: str
    position: Position
    stream: Stream
    count: int
    anew: bool = False

    def __str__(self) -> str:
        return self._of_another() if self.anew else self._of_trimmed()

    def _of_trimmed(self) -> str:
        count = "Some" if self.count == UNKNOWN else f"{self.count:,}"
        oldest, queue = self.stream.first_id or "none", label(self.queue)
        return (
            f"{count} lifecycle events of queue {queue!r} were trimmed before they were read: "
            f"the checkpoint is at {self.position.id}, and the oldest that is kept is {oldest}. "
            f"Read more often, or raise the transport option delayed_events of all processes (the "
            f"queue has {self.stream.length:,} events now)"
        )

    def _of_another(self) -> str:
        return (
            f"the lifecycle events of queue {label(self.queue)!r} were deleted and started again, "
            "or a failover or restart of the server lost the newest ones: the checkpoint is at "
            f"{self.position}, and the last one is {self.stream.end} now. Events in between are "
            "lost"
        )


def renewed(position: Position, stream: Stream) -> Position:
    """The same position, if the stream was idle, then deleted, and has begun anew."""
    if stream.trimmed or not _is_another(position, stream):
        return position
    idle_ms = Position(stream.first_id).key[0] - position.key[0] if stream.first_id else 0
    return Position(position.id, 0) if idle_ms >= KEPT_MS else position


def _is_another(position: Position, stream: Stream) -> bool:
    """Whether the event of a position cannot belong to this stream."""
    if stream.end.key < position.key:
        return True
    if UNKNOWN in (position.n, stream.end.n):
        return False
    is_kept = stream.trimmed < position.n and stream.length > 0
    is_behind = is_kept and Position(stream.first_id).key > position.key
    return stream.end.n < position.n or is_behind


def loss(queue: str, position: Position, stream: Stream) -> Loss | None:
    """The events missing between a position and the current stream; None if none are."""
    if _is_another(position, stream):
        return Loss(queue, position, stream, UNKNOWN, anew=True)
    if UNKNOWN not in (position.n, stream.end.n):
        count = stream.trimmed - position.n
        return Loss(queue, position, stream, count) if count > 0 else None
    if position.id == BEGINNING or not stream.first_id:
        return None
    gone = Position(stream.first_id).key > position.key
    return Loss(queue, position, stream, UNKNOWN) if gone else None


def after_loss(loss: Loss) -> Position:
    """The position at which a reader continues that ignores losses."""
    if not loss.anew:
        n = UNKNOWN if loss.count == UNKNOWN else loss.position.n + loss.count
        return Position(loss.position.id, n)
    end, position = loss.stream.end, loss.position
    # A server that lost its newest events has fewer than before, and all of them were read.
    is_new = end.n > position.n and position.n != UNKNOWN
    return Position() if is_new and end.key < position.key else Position(position.id)


def pieces(
    store: Store, queue: str, start: Position, end: Position, limit: int, size: int
) -> tuple[list[Piece], Position, int]:
    """At most `limit` events from a position up to another, in pieces of about `size`.

    Returns the pieces, their end, and the number of events trimmed meanwhile. Each call scans at
    most STEP_SIZE events.
    """
    found: list[Piece] = []
    after, at, n, count, lost = start.id, start.id, start.n, 0, 0
    while limit > 0:
        step = min(STEP_SIZE, limit, size - count)
        got, last, trimmed = _step(store, queue, at, end.id, step)
        if n == UNKNOWN and at == BEGINNING:
            n = trimmed
        elif UNKNOWN not in (n, trimmed) and trimmed > n:
            lost, n = lost + trimmed - n, trimmed
        if not got:
            break
        n = n if n == UNKNOWN else n + got
        at, count, limit = last, count + got, limit - got
        if count >= size:
            found.append(Piece(after, at, count))
            after, count = at, 0
    if count:
        found.append(Piece(after, at, count))
    return found, Position(at, n), lost


def _step(store: Store, queue: str, after: str, upto: str, limit: int) -> tuple[int, str, int]:
    count, last, trimmed = script("events_step")(
        store.run, events=store.keys(queue).events, after=after, upto=upto, limit=limit
    )
    return count, last.decode(), trimmed


def shares(pending: Mapping[str, int], limit: int) -> dict[str, int]:
    """Divide a limit on events among queues. Large queues get the rest of small ones."""
    given: dict[str, int] = {}
    for at, queue in enumerate(sorted(pending, key=pending.__getitem__)):
        # Rounded up, because a limit below the number of queues must not stop all of them.
        given[queue] = min(pending[queue], -(-limit // (len(pending) - at)))
        limit -= given[queue]
    return given
