"""Lifecycle events as Arrow columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import pyarrow as pa
from pyspark.sql.types import IntegerType, StringType, StructType, TimestampType

from celery_ext.tasks.history import worker_name
from celery_ext.tasks.times import LATEST_MS
from kombu_delayed.inspection.events import entry_rows
from kombu_delayed.store.calls.shards import queue_of
from kombu_delayed.store.store import Store

from .positions import Piece

#: The columns of a reader by default.
SCHEMA = StructType()
for _name in ("stream_id", "event", "id", "task", "tenant", "queue"):
    SCHEMA.add(_name, StringType())
SCHEMA.add("due", TimestampType()).add("at", TimestampType())
SCHEMA.add("consumer", StringType()).add("worker", StringType()).add("deliveries", IntegerType())
SCHEMA.add("reason", StringType()).add("job", StringType())

#: Events per call, and calls per batch.
PAGE_SIZE, PAGES = 1_000, 5

#: After a page with more bytes, the next pages are shorter: a job's entry has many events.
PAGE_BYTES, LEAST_PAGE = 500_000, 20

_FIELDS = (
    *("stream_id", "event", "id", "task", "tenant", "due_ms", "consumer", "deliveries", "reason"),
    "job",
)

#: The values of an event, in the order above.
Row = list[Any]


def batches(
    store: Store, queue: str, piece: Piece, schema: pa.Schema
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """A piece of a queue's events with the columns of a schema, and the number of its entries.

    Raises DelayedError.
    """
    rows: list[Row] = []
    entries = 0
    for entry in chain.from_iterable(_pages(store, queue, piece)):
        rows += entry_rows(queue, entry)
        entries += 1
        if len(rows) >= PAGES * PAGE_SIZE:
            yield entries, to_batch(queue, rows, schema)
            rows, entries = [], 0
    if rows:
        yield entries, to_batch(queue, rows, schema)


def _pages(store: Store, queue: str, piece: Piece) -> Iterator[list[Any]]:
    key, after, size = store.keys(queue).events, piece.after, PAGE_SIZE // 5
    while True:
        page = store.run("XRANGE", key, f"({after}", piece.upto, "COUNT", size)
        if page:
            yield page
        if len(page) < size:
            return
        after = page[-1][0].decode()
        is_large = sum(len(entry[1][-1]) for entry in page) > PAGE_BYTES
        size = max(LEAST_PAGE, size // 2) if is_large else min(PAGE_SIZE, size * 2)


def to_batch(queue: str, rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    given = dict(zip(_FIELDS, zip(*rows, strict=True), strict=True))
    arrays = [_COLUMNS[field.name](queue, given) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


Given = dict[str, tuple[Any, ...]]


def _queue(queue: str, given: Given) -> pa.Array:
    return pa.repeat(pa.scalar(queue_of(queue), pa.string()), len(given["stream_id"]))


def _due(queue: str, given: Given) -> pa.Array:
    return _times([ms if ms is None else min(ms, LATEST_MS) for ms in given["due_ms"]])


def _at(queue: str, given: Given) -> pa.Array:
    return _times([int(id.partition("-")[0]) for id in given["stream_id"]])


def _times(values_ms: list[int | None] | list[int]) -> pa.Array:
    in_ms = pa.array(values_ms, pa.int64()).cast(pa.timestamp("ms", "UTC"))
    return in_ms.cast(pa.timestamp("us", "UTC"))


def _worker(queue: str, given: Given) -> pa.Array:
    consumers = given["consumer"]
    workers = {each: worker_name(each) for each in set(consumers)}
    return pa.array([workers[each] for each in consumers], pa.string())


def _given(name: str, type_: pa.DataType) -> Callable[[str, Given], pa.Array]:
    return lambda queue, given: pa.array(given[name], type_)


_TEXTS = ("stream_id", "event", "id", "task", "tenant", "consumer", "reason", "job")
_COLUMNS: dict[str, Callable[[str, Given], pa.Array]] = {
    **{name: _given(name, pa.string()) for name in _TEXTS},
    "queue": _queue,
    "due": _due,
    "at": _at,
    "worker": _worker,
    "deliveries": _given("deliveries", pa.int32()),
}
