"""Lifecycle events as Arrow columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.types import IntegerType, StringType, StructType, TimestampType

from celery_ext.times import LATEST_MS
from kombu_delayed.events import VERSION, Event
from kombu_delayed.shards import queue_of
from kombu_delayed.store import Store

from .event_positions import Piece

#: The columns that a reader gives where it is not asked for some of them.
SCHEMA = StructType()
for _name in ("stream_id", "event", "id", "task", "tenant", "queue"):
    SCHEMA.add(_name, StringType())
SCHEMA.add("due", TimestampType()).add("at", TimestampType())
SCHEMA.add("consumer", StringType()).add("worker", StringType()).add("deliveries", IntegerType())

#: Events that one call reads, and calls that make one batch.
PAGE_SIZE, PAGES = 1_000, 5

_FIELDS = [b"v", b"event", b"id", b"task", b"tenant", b"due_ms", b"consumer", b"deliveries"]
_VERSION = str(VERSION).encode()

#: An entry's id and its fields in the order above.
Row = tuple[bytes, ...]


def batches(store: Store, queue: str, piece: Piece, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """A piece of a queue's events, with the columns of a schema. Raises DelayedError."""
    rows: list[Row] = []
    for page in _pages(store, queue, piece):
        rows += _rows(queue, page)
        if len(rows) >= PAGES * PAGE_SIZE:
            yield to_batch(queue, rows, schema)
            rows = []
    if rows:
        yield to_batch(queue, rows, schema)


def _pages(store: Store, queue: str, piece: Piece) -> Iterator[list[Any]]:
    key, after = store.keys(queue).events, piece.after
    while True:
        page = store.run("XRANGE", key, f"({after}", piece.upto, "COUNT", PAGE_SIZE)
        if page:
            yield page
        if len(page) < PAGE_SIZE:
            return
        after = page[-1][0].decode()


def _rows(queue: str, page: Sequence[Any]) -> Iterator[Row]:
    for entry in page:
        stream_id, flat = entry
        if flat[::2] == _FIELDS and flat[1] == _VERSION:
            yield (stream_id, *flat[1::2])
        else:
            yield _by_name(Event.of(queue, entry))


def _by_name(event: Event) -> Row:
    due = "" if event.due_ms is None else event.due_ms
    texts = (
        *(event.stream_id, VERSION, event.event, event.id, event.task, event.tenant, due),
        *(event.consumer, event.deliveries),
    )
    return tuple(str(text).encode() for text in texts)


def to_batch(queue: str, rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    """Rows as the columns of a schema, in its order."""
    given = dict(zip([b"stream_id", *_FIELDS], zip(*rows, strict=True), strict=True))
    arrays = [_COLUMNS[field.name](queue, given) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


Given = dict[bytes, tuple[bytes, ...]]


def _text(name: bytes) -> Callable[[str, Given], pa.Array]:
    def column(queue: str, given: Given) -> pa.Array:
        return _texts(given[name])

    return column


def _texts(values: Sequence[bytes]) -> pa.Array:
    try:
        return pa.array(values, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:  # what was in Redis is not all UTF-8
        return pa.array([value.decode(errors="replace") for value in values], pa.string())


def _queue(queue: str, given: Given) -> pa.Array:
    return pa.repeat(pa.scalar(queue_of(queue), pa.string()), len(given[b"stream_id"]))


def _due(queue: str, given: Given) -> pa.Array:
    return _times([min(int(value), LATEST_MS) if value else None for value in given[b"due_ms"]])


def _at(queue: str, given: Given) -> pa.Array:
    return _times([int(id.partition(b"-")[0]) for id in given[b"stream_id"]])


def _times(values_ms: list[int | None] | list[int]) -> pa.Array:
    in_ms = pa.array(values_ms, pa.int64()).cast(pa.timestamp("ms", "UTC"))
    return in_ms.cast(pa.timestamp("us", "UTC"))


def _worker(queue: str, given: Given) -> pa.Array:
    consumers = given[b"consumer"]
    workers = {each: each.rsplit(b":", 2)[0] for each in set(consumers)}
    return _texts([workers[each] for each in consumers])


def _deliveries(queue: str, given: Given) -> pa.Array:
    return pa.array([int(value) for value in given[b"deliveries"]], pa.int32())


_COLUMNS: dict[str, Callable[[str, Given], pa.Array]] = {
    "stream_id": _text(b"stream_id"),
    "event": _text(b"event"),
    "id": _text(b"id"),
    "task": _text(b"task"),
    "tenant": _text(b"tenant"),
    "queue": _queue,
    "due": _due,
    "at": _at,
    "consumer": _text(b"consumer"),
    "worker": _worker,
    "deliveries": _deliveries,
}
