"""Lifecycle events as Parquet files, each event once, also after a crash.

Each batch is a directory `batch=<number>`, with one for each day and queue in it, that is written
as a whole. One that was being written when the job died is written again under the same number
with the same events, which a log of files such as Spark's own file sink would need a reader of its
own for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kombu_delayed.errors import DelayedError

from ..options import as_texts
from .batches import SCHEMA
from .stream import NAME, EventOptions

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery

#: What a batch's directory is called; zeros in front keep the names in order.
_BATCH = "batch={:08d}"

#: By which files are split; the day is that of the event, in the session's time zone.
_PARTITIONS = ("date", "queue")

#: Seconds between two looks at how far a query is.
_LOOK_SECONDS = 0.5


class ArchiveError(DelayedError):
    """An archive of lifecycle events is missing, or would be overwritten."""


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
    those of the source. Raises OptionError, and ArchiveError if batches would be overwritten.
    """
    options = {"broker": broker, **options}
    EventOptions.parse(options)
    checkpoint = checkpoint or f"{path}/_checkpoint"
    _check(spark, path, checkpoint)
    trigger: dict[str, Any] = {"processingTime": interval} if interval else {"availableNow": True}
    events = spark.readStream.format(NAME).options(**as_texts(options)).load()
    return (
        events.writeStream.foreachBatch(_writer(path))
        .option("checkpointLocation", checkpoint)
        .queryName(f"archive {path}")
        .trigger(**trigger)
        .start()
    )


def _check(spark: SparkSession, path: str, checkpoint: str) -> None:
    """A query without a checkpoint would number its batches from 0 on."""
    if exists(spark, f"{path}/batch=*") and not exists(spark, f"{checkpoint}/metadata"):
        raise ArchiveError(
            f"{path} has an archive, and there is no checkpoint at {checkpoint}: give the one that "
            "it was written with. A new one would overwrite it; to begin anew, give another path"
        )


def exists(spark: SparkSession, pattern: str) -> bool:
    """Whether there is a file or a directory, wherever Spark can read."""
    try:
        # Only names are looked at, whatever is in the files and however they are partitioned.
        spark.read.option("recursiveFileLookup", "true").text(pattern)
    except AnalysisException as error:
        if error.getCondition() == "PATH_NOT_FOUND":
            return False
        raise
    return True


def _writer(path: str) -> Callable[[DataFrame, int], None]:
    def write(events: DataFrame, number: int) -> None:
        batch = _by_day(events).write.mode("overwrite")
        batch.partitionBy(*_PARTITIONS).parquet(f"{path}/{_BATCH.format(number)}")

    return write


def watch(query: StreamingQuery, progress: Callable[[int], Any]) -> int:
    """Wait for the end of a query. Returns the number of events that it read.

    `progress` is given how many more there are. Raises what the query fails with.
    """
    count, last, of_last, ended = 0, -1, 0, False
    while not ended:
        ended, before = bool(query.awaitTermination(_LOOK_SECONDS)), count
        for each in query.recentProgress:  # some of it for the second time
            number, rows = each["batchId"], each["numInputRows"]
            if number > last:
                last, of_last = number, 0
            if number == last and rows > of_last:
                count, of_last = count + rows - of_last, rows
        progress(count - before)
    return count


def read_archive(spark: SparkSession, path: str) -> DataFrame:
    """The events of an archive or of a compact copy, with the columns of the source.

    Raises ArchiveError where there is none.
    """
    for pattern in (f"{path}/batch=*", f"{path}/date=*"):
        if exists(spark, pattern):
            found = spark.read.schema(SCHEMA).option("basePath", path).parquet(pattern)
            return found.select(*SCHEMA.names)
    raise ArchiveError(f"{path} has no archive of lifecycle events: write one with the job archive")


def compact(events: DataFrame, path: str) -> None:
    """Write a copy of events for reading: a directory for each day and queue, few large files.

    Replaces the content of `path`. `events` must not be read from `path`.
    """
    files = _by_day(events).repartition(*_PARTITIONS).sortWithinPartitions(*_PARTITIONS, "at")
    files.write.mode("overwrite").partitionBy(*_PARTITIONS).parquet(path)


def _by_day(events: DataFrame) -> DataFrame:
    return events.withColumn("date", F.to_date("at"))
