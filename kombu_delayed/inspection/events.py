"""Reads lifecycle events of messages from the streams that the moves write.

Each queue has one, capped at the transport option `delayed_events`. docs/events.md is its format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DelayedError
from ..store.shards import number_of, queue_of, shard_name
from ..store.store import Store

__all__ = ["EVENTS", "VERSION", "Event", "newest", "pages", "read"]

#: The version of the format that this module reads and the scripts write.
VERSION = 2

_VERSION = str(VERSION).encode()

#: So many members an event has, the last one, its reason, only where there is one; versions of the
#: package may append others.
FACTS = 8

EVENTS = (
    "scheduled",
    "rescheduled",
    "cancelled",
    "waiting",
    "delivered",
    "acked",
    "dropped",
    "released",
    "reclaimed",
    "buried",
    "replayed",
)

#: A stream to which nothing was added for so long goes; as include/events.lua has it.
KEPT_MS = 7 * 86_400_000

PAGE_SIZE = 1_000


@dataclass(frozen=True)
class Event:
    """A lifecycle event of a message.

    `stream_id` orders the events of a queue. Times are ms since the epoch by the server's clock;
    `due_ms` is None for a message that was never delayed. `deliveries` counts those in vain.
    """

    stream_id: str
    event: str
    queue: str
    id: str
    task: str
    tenant: str
    due_ms: int | None
    consumer: str
    deliveries: int
    #: Which of the queue's shards; each has a stream of its own.
    shard: int = 0
    #: Why it waits, was dropped or was buried; empty where there is none.
    reason: str = ""

    @property
    def stream(self) -> str:
        """Whose `stream_id` it is: the queue's, or one of its shards'."""
        return shard_name(self.queue, self.shard)

    @property
    def at_ms(self) -> int:
        """When it has happened."""
        return int(self.stream_id.partition("-")[0])

    @property
    def worker(self) -> str:
        """The worker whose consumer it was, or the host where the worker has not named itself."""
        return self.consumer.rsplit(":", 2)[0]

    @classmethod
    def of(cls, queue: str, entry: Sequence[Any]) -> Event:
        """Read an entry of a stream. Raises DelayedError for a version that is not known here."""
        stream_id, event, id, task, tenant, due_ms, consumer, count, reason = told(queue, entry)
        facts = id, task, tenant, due_ms, consumer, count
        return cls(stream_id, event, queue_of(queue), *facts, number_of(queue), reason)


def told(queue: str, entry: Sequence[Any]) -> list[Any]:
    """What an entry of a stream says: stream id, event, id, task, tenant, due_ms, consumer,
    deliveries and reason. Raises DelayedError for a version that is not known here.
    """
    stream_id, flat = entry
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    if fields.get(b"v") != _VERSION:
        version = fields.get(b"v", b"").decode(errors="replace")
        raise DelayedError(
            f"lifecycle event {stream_id.decode()} of queue {queue!r} has version {version!r}, and "
            f"{VERSION} is what is known here: update kombu-delayed"
        )
    facts = json.loads(fields[b"event"].decode(errors="replace"))
    return [stream_id.decode(), *facts[:FACTS], *[""] * (FACTS - len(facts))]


def read(store: Store, queue: str, after: str = "-", count: int = PAGE_SIZE) -> list[Event]:
    """The events of a queue after a stream id, the oldest first. "-" returns all."""
    start = after if after == "-" else f"({after}"
    found = store.run("XRANGE", store.keys(queue).events, start, "+", "COUNT", count)
    return [Event.of(queue, entry) for entry in found]


def pages(store: Store, queue: str, after: str = "-") -> Iterator[list[Event]]:
    """All events of a queue after a stream id, in pages, like `read`."""
    while page := read(store, queue, after):
        after = page[-1].stream_id
        yield page


def newest(store: Store, queue: str, count: int = 1) -> list[Event]:
    """The newest events of a queue, the oldest of them first."""
    found = store.run("XREVRANGE", store.keys(queue).events, "+", "-", "COUNT", count)
    return [Event.of(queue, entry) for entry in reversed(found)]
