"""Reads lifecycle events of messages from the streams that the moves write.

Each queue has one, capped at the transport option `delayed_events`. docs/events.md has the format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

from ..errors import DelayedError
from ..store.calls.shards import number_of, queue_of, shard_name
from ..store.store import Store

__all__ = ["EVENTS", "VERSION", "Event", "merged", "newest", "pages", "read"]

#: The version of the format that this module reads and the scripts write.
VERSION = 2

#: The version of an entry with all events of one call of a job.
JOB_VERSION = 3

#: How many members an event has. The last one, its reason, may be missing. Other versions of the
#: package may append more.
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

#: How long a stream stays after its last event. The same as in include/events.lua.
KEPT_MS = 7 * 86_400_000

PAGE_SIZE = 1_000

#: How many entries are read first. One may have the 250 events of a job's call, so that the next
#: ones are as many as have `PAGE_SIZE` events.
FIRST_ENTRIES = 20


@dataclass(frozen=True)
class Event:
    """A lifecycle event of a message.

    `stream_id` orders the events of a queue. Times are ms since the epoch by the server's clock;
    `due_ms` is None for a message that was never delayed. `deliveries` counts earlier failed ones.
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
    #: The job that did it; empty if it was no job.
    job: str = ""

    @property
    def stream(self) -> str:
        """The stream of `stream_id`: the queue's, or that of one of its shards."""
        return shard_name(self.queue, self.shard)

    @property
    def at_ms(self) -> int:
        """When it has happened."""
        return int(self.stream_id.partition("-")[0])

    @property
    def worker(self) -> str:
        """The worker of its consumer, or the host if the worker has no name."""
        return self.consumer.rsplit(":", 2)[0]

    @classmethod
    def of(cls, queue: str, entry: Sequence[Any]) -> list[Event]:
        """Read an entry of a stream. Raises DelayedError for an unknown version."""
        name, number = queue_of(queue), number_of(queue)
        return [
            cls(stream_id, event, name, id, task, tenant, due_ms, by, count, number, reason, job)
            for stream_id, event, id, task, tenant, due_ms, by, count, reason, job in entry_rows(
                queue, entry
            )
        ]


def entry_rows(queue: str, entry: Sequence[Any]) -> list[list[Any]]:
    """Return the events in an entry of a stream: one, or those of a job's call. Each has stream id,
    event, id, task, tenant, due_ms, consumer, deliveries, reason and job.

    Raises DelayedError for an unknown version.
    """
    stream_id, flat = entry
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    version, id = fields.get(b"v", b"").decode(errors="replace"), stream_id.decode()
    if version == str(VERSION):
        facts = json.loads(fields[b"event"].decode(errors="replace"))
        return [[id, *facts[:FACTS], *[""] * (FACTS - len(facts)), ""]]
    if version == str(JOB_VERSION):
        of_job = json.loads(fields[b"events"].decode(errors="replace"))
        return [
            [id, event, message, task, tenant, due_ms, "", 0, "", of_job["job"]]
            for event, task, tenant, messages in of_job["events"]
            for message, due_ms in zip(messages[::2], messages[1::2], strict=True)
        ]
    raise DelayedError(
        f"lifecycle event {id} of queue {queue!r} has version {version!r}, but this program "
        f"knows {VERSION} and {JOB_VERSION}: update kombu-delayed"
    )


def read(store: Store, queue: str, after: str = "-", count: int = PAGE_SIZE) -> list[Event]:
    """The events of a queue after a stream id, the oldest first, in whole entries. "-" returns all.

    It may return more than `count` events, if the last entry is one of a Spark job.
    """
    return [*chain(*_entries_after(store, queue, after, count))]


def _entries_after(store: Store, queue: str, after: str, count: float) -> Iterator[list[Event]]:
    start = after if after == "-" else f"({after}"
    return _entries(store, queue, "XRANGE", start, "+", count)


def _entries(
    store: Store, queue: str, command: str, start: str, stop: str, count: float
) -> Iterator[list[Event]]:
    """Yield the events of one entry after the other, until there are `count` or more."""
    size, key = FIRST_ENTRIES, store.keys(queue).events
    while count > 0:
        size = int(min(count, size))
        page = store.run(command, key, start, stop, "COUNT", size)
        number = 0
        for entry in page:
            found = Event.of(queue, entry)
            yield found
            number += len(found)
            if number >= count:
                return
        if len(page) < size:
            return
        start = f"({page[-1][0].decode()}"
        count -= number
        size = max(PAGE_SIZE * size // max(number, 1), 1)


def pages(store: Store, queue: str, after: str = "-") -> Iterator[list[Event]]:
    """All events of a queue after a stream id, in pages of whole entries, like `read`."""
    page: list[Event] = []
    for events in _entries_after(store, queue, after, math.inf):
        page += events
        if len(page) >= PAGE_SIZE:
            yield page
            page = []
    if page:
        yield page


def merged(
    store: Store, after: Mapping[str, str], until: Mapping[str, str] | None = None
) -> Iterator[list[Event]]:
    """The events of several streams, each after a stream id, an entry at a time.

    They are in the order of their ids, so that an id says up to where all streams were read. Of
    each stream only a page is read ahead. With `until` no stream is read beyond an id of its own.
    """

    def entries(stream: str, position: str) -> Iterator[list[Event]]:
        last = until and _order_of(until[stream])
        for page in pages(store, stream, position):
            for id, entry in groupby(page, attrgetter("stream_id")):
                if last and _order_of(id) > last:
                    return
                yield [*entry]

    streams = [entries(*each) for each in after.items()]
    return merge(*streams, key=lambda entry: _order_of(entry[0].stream_id))


def _order_of(stream_id: str) -> tuple[int, ...]:
    """Return a stream id in a form that can be compared."""
    return tuple(map(int, stream_id.split("-")))


def newest(store: Store, queue: str, count: int = 1) -> list[Event]:
    """The newest events of a queue, the oldest of them first."""
    entries = [*_entries(store, queue, "XREVRANGE", "+", "-", count)]
    return [*chain(*reversed(entries))][-count:] if count else []
