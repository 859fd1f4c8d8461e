"""Lifecycle events as Parquet files, each event once, also after a crash.

Each batch is a directory `batch=<number>`, with a directory for each day and queue in it. A batch
that was incomplete when the job died is written again under the same number with the same events.
Spark's own file sink would keep a log of files instead, which other readers do not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession

from ..options import as_texts
from .archive_files import (
    BATCH,
    RANGES,
    ArchiveError,
    batches_of,
    by_day,
    events_in,
    exists,
    pattern_in,
    replacing,
)
from .archive_lock import ArchiveLock
from .batches import SCHEMA
from .stream import NAME, EventOptions

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery

#: The locks of this process's queries, by the ids of their runs.
_locks: dict[str, ArchiveLock] = {}

#: Seconds between two looks at the progress of a query.
_LOOK_SECONDS = 0.5


def log_events(
    spark: SparkSession,
    broker: str | None = None,
    *,
    path: str,
    checkpoint: str | None = None,
    interval: str | None = None,
    **options: Any,
) -> StreamingQuery:
    """Start to write lifecycle events to an archive. Returns the query.

    It continues after the last archived event. It ends when it has written all current events, or
    runs until you stop it with an `interval` such as "30 seconds". The `checkpoint`
    (`path/_checkpoint`) belongs to the archive: if you lose it, use another path. `options` are
    those of the source. Raises OptionError, and ArchiveError if batches would be overwritten,
    another job writes the archive, or a path has characters of patterns.
    """
    options = {"broker": broker, **options}
    given = EventOptions.parse(options)
    checkpoint = checkpoint or f"{path}/_checkpoint"
    _check(spark, path, checkpoint)
    trigger: dict[str, Any] = {"processingTime": interval} if interval else {"availableNow": True}
    events = spark.readStream.format(NAME).options(**as_texts(options)).load()
    lock = ArchiveLock(given, path)
    try:
        query = (
            events.writeStream.foreachBatch(_writer(path))
            .option("checkpointLocation", checkpoint)
            .queryName(f"archive {path}")
            .trigger(**trigger)
            .start()
        )
    except BaseException:
        lock.free()
        raise
    lock.keep(lambda: bool(query.isActive), query.stop)
    _locks[query.runId] = lock
    return query


def _check(spark: SparkSession, path: str, checkpoint: str) -> None:
    """Raises ArchiveError for a pattern, and without a checkpoint if there is an archive.

    A query without a checkpoint would number its batches from 0. Readers would ignore those in
    merged ranges, and those of deleted batches, too.
    """
    if fault := pattern_in(path) or pattern_in(checkpoint):
        raise ArchiveError(fault)
    if exists(spark, f"{path}/date=*"):
        raise ArchiveError(f"{path} has a compact copy of an archive: give another path")
    is_there = exists(spark, f"{path}/batch=*") or exists(spark, f"{path}/{RANGES}")
    if is_there and not exists(spark, f"{checkpoint}/metadata"):
        raise ArchiveError(
            f"{path} has an archive, and there is no checkpoint at {checkpoint}: give the one that "
            "it was written with. A new one would overwrite it; to begin anew, give another path"
        )


def _writer(path: str) -> Callable[[DataFrame, int], None]:
    def write(events: DataFrame, number: int) -> None:
        place = f"{path}/{BATCH.format(number)}"
        if exists(events.sparkSession, f"{place}/_SUCCESS"):
            return  # the job died after this batch; some of its events may be trimmed by now
        replacing(by_day(events)).parquet(place)

    return write


def watch(query: StreamingQuery, progress: Callable[[int], Any]) -> int:
    """Wait for the end of a query. Returns the number of events that it read.

    `progress` is called with the number of new events. Raises the error of a failed query.
    """
    try:
        return _watch(query, progress)
    finally:
        if not query.isActive and (lock := _locks.pop(query.runId, None)):
            lock.free()


def _watch(query: StreamingQuery, progress: Callable[[int], Any]) -> int:
    count, last, of_last, ended = 0, -1, 0, False
    while not ended:
        ended, before = bool(query.awaitTermination(_LOOK_SECONDS)), count
        for each in query.recentProgress:  # some of them for the second time
            number, rows = each["batchId"], each["numInputRows"]
            if number > last:
                last, of_last = number, 0
            if number == last and rows > of_last:
                count, of_last = count + rows - of_last, rows
        progress(count - before)
    return count


def read_archive(spark: SparkSession, path: str) -> DataFrame:
    """The events of an archive, merged or not, or of a compact copy, with the source's columns.

    Raises ArchiveError if there is none.
    """
    if exists(spark, f"{path}/batch=*"):
        return batches_of(spark, path)
    if exists(spark, f"{path}/date=*"):
        found = spark.read.schema(SCHEMA).option("basePath", path).parquet(f"{path}/date=*")
        return events_in(found)
    raise ArchiveError(f"{path} has no archive of lifecycle events: write one with the job archive")
