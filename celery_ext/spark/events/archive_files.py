"""The directories of an archive of lifecycle events, wherever Spark can read.

A batch is `batch=<number>`. Some of them may be merged into `batch=<first>-<last>`: a line in
`_ranges` says that this one is whole.
"""

from __future__ import annotations

import os.path
import posixpath
from urllib.parse import urlsplit

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructType

from kombu_delayed.errors import DelayedError

from .batches import SCHEMA

#: What a batch's directory is called; zeros in front keep the names in order.
BATCH = "batch={:08d}"

#: By which files are split; the day is that of the event, in the session's time zone.
PARTITIONS = ("date", "queue")

#: Has a line for each range of batches that was merged as a whole.
RANGES = "_ranges"


class ArchiveError(DelayedError):
    """An archive of lifecycle events is missing, or would be overwritten."""


def spelled(path: str) -> str:
    """A path in the one form that all its spellings have in common, without a slash at its end."""
    url = urlsplit(path)
    if url.scheme in ("", "file"):
        return os.path.realpath(url.path if url.scheme else path)
    return f"{url.scheme}://{url.netloc}{posixpath.normpath(url.path or '/')}".rstrip("/")


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


def merged(spark: SparkSession, path: str) -> list[str]:
    """The ranges of batches that were merged as a whole, such as "00000000-00000041"."""
    if not exists(spark, f"{path}/{RANGES}"):
        return []
    return sorted({row.value for row in spark.read.text(f"{path}/{RANGES}").collect()})


def batches_of(spark: SparkSession, path: str) -> DataFrame:
    """The events of all batches, those that were merged from their ranges alone."""
    schema = StructType([*SCHEMA.fields]).add("batch", StringType())
    found = spark.read.schema(schema).option("basePath", path).parquet(f"{path}/batch=*")
    # A condition on directories: what it leaves out is not read.
    return found.where(_counts(merged(spark, path))).select(*SCHEMA.names)


def _counts(ranges: list[str]) -> Column:
    """Whether a directory counts: one that has been merged, or that is being written, does not."""
    is_new = ~F.col("batch").contains("-")
    if not ranges:
        return is_new
    newest = max(int(each.partition("-")[2]) for each in ranges)
    return F.col("batch").isin(ranges) | (is_new & (F.expr("try_cast(batch AS long)") > newest))


def by_day(events: DataFrame) -> DataFrame:
    return events.withColumn("date", F.to_date("at"))
