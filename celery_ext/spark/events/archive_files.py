"""The directories of an archive of lifecycle events, in any file system that Spark can read.

A batch is `batch=<number>`. Several may be merged into `batch=<first>-<last>`. A line in `_ranges`
says that this directory is complete.
"""

from __future__ import annotations

import os.path
import posixpath
import re
from typing import Any
from urllib.parse import urlsplit

from pyspark.errors import AnalysisException, PySparkAttributeError
from pyspark.sql import Column, DataFrame, DataFrameWriter, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructType

from kombu_delayed.errors import DelayedError

from .batches import SCHEMA

#: The name of a batch's directory; leading zeros keep the names in order.
BATCH = "batch={:08d}"

#: The columns that split files; the date is that of the event, in UTC.
PARTITIONS = ("date", "queue")

#: Characters that Spark reads as a pattern of names.
_PATTERN = re.compile(r"[\[\]{}*?\\]")

#: Spark reads a directory of this name as null, but it is a queue of that name.
_NO_NAME = "__HIVE_DEFAULT_PARTITION__"

#: The directory with a line for each completely merged range of batches.
RANGES = "_ranges"


class ArchiveError(DelayedError):
    """An archive of lifecycle events is missing, or would be overwritten."""


def spelled(path: str) -> str:
    """A path in one canonical form, without a slash at its end."""
    url = urlsplit(path)
    if url.scheme in ("", "file"):
        return os.path.realpath(url.path if url.scheme else path)
    return f"{url.scheme}://{url.netloc}{posixpath.normpath(url.path or '/')}".rstrip("/")


def pattern_in(path: str) -> str:
    """Why files that are written to a path are not found there; "" if they are."""
    match = _PATTERN.search(path)
    return f"{path} has {match[0]!r}, with which Spark would read it as a pattern" if match else ""


def exists(spark: SparkSession, pattern: str) -> bool:
    """Whether a file or a directory exists, in any file system that Spark can read."""
    try:
        # This looks at names only, and not at the content or the partitions of the files.
        spark.read.option("recursiveFileLookup", "true").text(pattern)
    except AnalysisException as error:
        if error.getCondition() == "PATH_NOT_FOUND":
            return False
        raise
    return True


def merged(spark: SparkSession, path: str) -> list[str]:
    """The completely merged ranges of batches, such as "00000000-00000041"."""
    if not exists(spark, f"{path}/{RANGES}"):
        return []
    return sorted({row.value for row in spark.read.text(f"{path}/{RANGES}").collect()})


def batches_of(spark: SparkSession, path: str) -> DataFrame:
    """The events of all batches; merged batches are only read from their ranges."""
    schema = StructType([*SCHEMA.fields]).add("batch", StringType())
    ranges, before = merged(spark, path), None
    while ranges != before:  # a merge that ended while Spark listed the files
        found = spark.read.schema(schema).option("basePath", path).parquet(f"{path}/batch=*")
        before, ranges = ranges, merged(spark, path)
    # A condition on directories, so Spark does not read the others.
    return events_in(found.where(_counts(ranges)))


def events_in(found: DataFrame) -> DataFrame:
    """The columns of events, from files that are split by queue."""
    queue = F.coalesce("queue", F.lit(_NO_NAME))
    return found.withColumn("queue", queue).select(*SCHEMA.names)


def _counts(ranges: list[str]) -> Column:
    """Whether a directory counts: not if it was merged, or is still being written."""
    is_new = ~F.col("batch").contains("-")
    if not ranges:
        return is_new
    newest = max(int(each.partition("-")[2]) for each in ranges)
    return F.col("batch").isin(ranges) | (is_new & (F.expr("try_cast(batch AS long)") > newest))


def by_day(events: DataFrame) -> DataFrame:
    # Not to_date, which has the days of the session's time zone.
    return events.withColumn("date", F.expr("date_from_unix_date(int(unix_seconds(at) div 86400))"))


def replacing(days: DataFrame) -> DataFrameWriter:
    """A writer that replaces all files of a directory, in any mode of the session."""
    writer = days.write.mode("overwrite").option("partitionOverwriteMode", "static")
    return writer.partitionBy(*PARTITIONS)


class Files:
    """Operations on the files of an archive that Spark's own functions do not have."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        try:
            jvm: Any = spark._jvm
            conf = spark._jsc.hadoopConfiguration()
        except PySparkAttributeError:
            raise ArchiveError(
                "compact deletes files, which Spark Connect does not offer: run it where Spark's "
                "driver runs"
            ) from None
        self._base = path
        self._path = jvm.org.apache.hadoop.fs.Path
        self._system = self._path(path).getFileSystem(conf)

    def names(self, pattern: str) -> list[str]:
        found = self._system.globStatus(self._path(f"{self._base}/{pattern}"))
        return sorted(each.getPath().getName() for each in found or ())

    def delete(self, name: str) -> None:
        self._system.delete(self._path(f"{self._base}/{name}"), True)

    def read(self, name: str) -> str | None:
        """The text of a small file; None if there is none. Raises Java's errors."""
        path = self._path(f"{self._base}/{name}")
        if not self._system.exists(path):
            return None
        stream = self._system.open(path)
        try:
            return str(stream.readUTF())
        finally:
            stream.close()

    def write(self, name: str, text: str) -> None:
        stream = self._system.create(self._path(f"{self._base}/{name}"), True)
        stream.writeUTF(text)
        stream.close()
