"""Finds a message by its id, in whatever state it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .backlog import Backlog
from .errors import MessageError
from .message import open_envelope
from .store import Store

#: Messages that one call looks at.
PAGE_SIZE = 1_000

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Found:
    """A message, where it is, and what is known of it there.

    `state` is "delayed", "ready", "unacked" or "dead". `due_ms` is None for what was never delayed,
    `at_ms` the time of burial. `deliveries` is how often a dead one was delivered in vain, None for
    others, whose messages say it.
    """

    state: str
    queue: str
    step: int
    message: bytes
    due_ms: int | None = None
    consumer: str = ""
    reason: str = ""
    at_ms: int | None = None
    deliveries: int | None = None


def lookup_by_id(store: Store, queue: str, id: str) -> Iterator[Found]:
    """The messages with this id that are delayed or dead: these are kept by their ids."""
    for waiting in Backlog(store, queue).get(id):
        kept = waiting.kept
        yield Found("delayed", queue, kept.step, kept.message, kept.due_ms)
    for letter in store.dead_letters(queue, [id]):
        yield Found(
            "dead",
            queue,
            0,
            letter.message,
            consumer=letter.consumer,
            reason=letter.reason,
            at_ms=letter.at_ms,
            deliveries=letter.deliveries,
        )


def lookup_by_reading(
    store: Store, queue: str, id: str, progress: Progress = lambda count: None
) -> Iterator[Found]:
    """The messages with this id that are ready or unacked: all of them are read, page by page.

    In this order, which is their way: one that is delivered meanwhile is met at least once.
    `progress` is called with the number of messages that were read.
    """
    yield from _ready(store, queue, id, progress)
    yield from _unacked(store, queue, id, progress)


def _unacked(store: Store, queue: str, id: str, progress: Progress) -> Iterator[Found]:
    keys = store.keys(queue)
    for name in store.run("ZRANGE", keys.consumers, 0, -1):
        consumer = name.decode(errors="replace")
        cursor = b"0"
        while True:
            cursor, page = store.run("HSCAN", keys.unacked(consumer), cursor, "COUNT", PAGE_SIZE)
            records = page.values() if isinstance(page, dict) else page[1::2]
            progress(len(records))
            for record in records:
                if _is(record[1:], id):
                    message = record[1:]
                    due_ms = open_envelope(message, 0).due_ms
                    yield Found("unacked", queue, record[0] - 48, message, due_ms, consumer)
            if int(cursor) == 0:
                break


def _ready(store: Store, queue: str, id: str, progress: Progress) -> Iterator[Found]:
    keys = store.keys(queue)
    for key, step in zip(keys.ready, keys.steps, strict=True):
        for page in _pages(store, key):
            progress(len(page))
            for message in page:
                if _is(message, id):
                    due_ms = open_envelope(message, 0).due_ms
                    yield Found("ready", queue, ord(step) - 48, message, due_ms)


def _pages(store: Store, key: str) -> Iterator[list[bytes]]:
    # Towards the head: what comes meanwhile moves the others on, never past this reader.
    start = 0
    while page := store.run("LRANGE", key, start, start + PAGE_SIZE - 1):
        yield page
        start += PAGE_SIZE


def _is(message: bytes, id: str) -> bool:
    if json.dumps(id).encode() not in message:
        return False
    try:
        return open_envelope(message, 0).id == id
    except MessageError:
        return False
