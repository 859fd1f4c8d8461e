"""Finds a message by its id, in any state."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..connection.commands import hash_pages
from ..errors import MessageError
from ..message.envelope import open_envelope
from ..store.calls.scripts import Call
from ..store.keys import QueueKeys
from ..store.store import Store
from .backlog import Backlog, Waiting, reasons, waiting_of

#: How many messages one call looks at, and about how many bytes.
PAGE_SIZE, PAGE_BYTES = 1_000, 1_000_000

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Found:
    """A message, its place, and the facts that are known there.

    `state` is "delayed", "waiting" (due, at the gate), "ready", "unacked" or "dead". `due_ms` is
    None if it was never delayed, `at_ms` is the time of burial. `deliveries` counts how often a
    dead letter was delivered in vain. It is None for others, whose messages contain it.
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
    """Yield the messages with this id that are delayed or dead, which are stored by id."""
    backlog = Backlog(store, queue)
    for waiting in backlog.get(id):
        yield _waiting(queue, waiting, backlog.reason(waiting.member))
    for letter in store.dead.letters(queue, [id]):
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


def kept_calls(store: Store, ids: Mapping[str, Sequence[str]]) -> list[Call]:
    """Return the scripts that ask each queue for delayed and dead messages with some ids."""
    return [
        store.call("records", queue, hash=hash, fields=names)
        for queue, names in ids.items()
        for hash in _hashes(store.keys(queue))
    ]


def kept_in(
    store: Store, ids: Mapping[str, Sequence[str]], answers: Sequence[Any]
) -> dict[tuple[str, str], list[Found]]:
    """Return the messages in the answers to `kept_calls`, by queue and id."""
    left, found = iter(answers), dict[tuple[str, str], list[Found]]()
    waiting: list[Waiting] = []
    for queue, names in ids.items():
        columns = [next(left) for _ in _hashes(store.keys(queue))]
        for id, kept, *others in zip(names, *columns, strict=True):
            if any(others):
                found[queue, id] = [*lookup_by_id(store, queue, id)]
            elif kept:  # the usual case: the only one with its id
                found[queue, id] = []
                waiting.append(waiting_of(store, queue, id, kept))
    alone = [key for key, messages in found.items() if not messages]
    keys = [(queue, each.member) for (queue, _), each in zip(alone, waiting, strict=True)]
    for (queue, id), each, reason in zip(alone, waiting, reasons(store, keys), strict=True):
        found[queue, id].append(_waiting(queue, each, reason))
    return found


def _hashes(keys: QueueKeys) -> tuple[str, str, str]:
    return keys.messages, keys.duplicates, keys.dead_messages


def _waiting(queue: str, waiting: Waiting, reason: str | None) -> Found:
    kept = waiting.kept
    state = "delayed" if reason is None else "waiting"
    return Found(state, queue, kept.step, kept.message, kept.due_ms, reason=reason or "")


def lookup_by_reading(
    store: Store, queue: str, id: str, progress: Progress = lambda count: None
) -> Iterator[Found]:
    """Yield the messages with this id that are ready or unacked, by reading all, page by page.

    Ready ones are read first, so that one which is delivered meanwhile is met at least once.
    `progress` is called with the number of messages that were read.
    """
    for state, step, message, consumer in _held(store, queue, progress):
        if _is(message, id):
            due_ms = open_envelope(message, 0).due_ms
            yield Found(state, queue, step, message, due_ms, consumer)


def held_ids(store: Store, queue: str) -> Iterator[str]:
    """Yield the ids of all messages that are ready or unacked, read like `lookup_by_reading`."""
    for _, _, message, _ in _held(store, queue, lambda count: None):
        with suppress(MessageError):
            yield open_envelope(message, 0).id


def _held(store: Store, queue: str, progress: Progress) -> Iterator[tuple[str, int, bytes, str]]:
    """Yield the state, step, message and consumer of each."""
    keys = store.keys(queue)
    for key, step in zip(keys.ready, keys.priority_steps, strict=True):
        for page in _pages(store, queue, key):
            progress(len(page))
            for message in page:
                yield "ready", step, store.readable(queue, message), ""
    for name in store.run("ZRANGE", keys.consumers, 0, -1):
        consumer = name.decode(errors="surrogateescape")
        for records in hash_pages(store.run, keys.unacked(consumer), PAGE_SIZE):
            progress(len(records))
            for _, record in records:
                yield "unacked", record[0] - 48, store.readable(queue, record[1:]), consumer


def _pages(store: Store, queue: str, key: str) -> Iterator[list[bytes]]:
    # From the left, where messages are added: that moves the others on, never past this reader.
    start, more = 0, 1
    while more:
        count, more, *found = store.ask(
            "ready_page",
            queue,
            list=key,
            start=start,
            limit=PAGE_SIZE,
            limit_bytes=PAGE_BYTES,
            needles=(),
        )
        yield found[1::2]
        start += count


def _is(message: bytes, id: str) -> bool:
    if json.dumps(id).encode() not in message:
        return False
    try:
        return open_envelope(message, 0).id == id
    except MessageError:
        return False
