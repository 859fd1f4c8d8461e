"""Merges the files of an archive of lifecycle events, and deletes old days.

Batches are merged into a directory `batch=<first>-<last>` beside them. A line in `_ranges` says
that it is complete; only then are its batches deleted. So even if a merge is killed, a reader of
these lines finds each event once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date, datetime, timezone
from urllib.parse import unquote

from pyspark.sql import DataFrame, SparkSession

from kombu_delayed.errors import OptionError

from .archive_files import (
    BATCH,
    PARTITIONS,
    RANGES,
    ArchiveError,
    Files,
    by_day,
    merged,
    pattern_in,
    replacing,
    spelled,
)
from .archive_lock import CompactionLock
from .batches import SCHEMA

#: A batch, or the first and last one of a range.
_NAME = re.compile(r"batch=(\d+)(?:-(\d+))?")

#: The end of the root of an archive or of a copy, in the path of one of its files.
_PARTITION = re.compile(r"/(?:batch|date)=")

#: The least number of batches to merge; fewer are left for the next time.
LEAST_BATCHES = 2


@dataclass(frozen=True)
class Compacted:
    """The batches that were merged, and the days of a queue that were deleted."""

    batches: int
    days: int


def compact(events: DataFrame, path: str) -> None:
    """Write a copy of events for reading: a directory for each day and queue, few large files.

    Replaces the content of `path`. Raises OptionError if `events` are read from there, or from an
    archive that it is in, and for characters of patterns.
    """
    if fault := pattern_in(path):
        raise OptionError(fault)
    target = f"{spelled(path).rstrip('/')}/"
    for place in {_PARTITION.split(unquote(file))[0] for file in events.inputFiles()}:
        archive = f"{spelled(place)}/"
        if archive.startswith(target):
            raise OptionError(
                f"{path} has the archive that is copied, and would be replaced: give another "
                "directory"
            )
        if target.startswith(archive):
            raise OptionError(f"{path} is in the archive that is copied: give another directory")
    _write(events, path)


def _write(events: DataFrame, path: str) -> None:
    files = by_day(events).repartition(*PARTITIONS).sortWithinPartitions(*PARTITIONS, "at")
    replacing(files).parquet(path)


def compact_archive(
    spark: SparkSession, path: str, *, keep_days: int | None = None, today: date | None = None
) -> Compacted:
    """Merge the batches that are new since the last time, and delete days older than `keep_days`.

    `archive` may run at the same time, but only one compaction. The newest batch stays as it is,
    because a job that was killed writes it again. Raises ArchiveError if there is no archive, if
    another compaction is running, or if Spark's driver is not on this machine (Spark Connect), and
    OptionError.
    """
    if keep_days is not None and keep_days < 1:
        raise OptionError(f"keep_days is a number of days from 1 on, not {keep_days!r}")
    files = Files(spark, path)
    if not _numbers(files):
        raise ArchiveError(f"{path} has no archive of lifecycle events, or only a compact copy")
    lock = CompactionLock(files, path)
    lock.keep(lambda: True, lambda: None)
    try:
        *numbers, newest = _numbers(files)
        done, days = _merge_new(spark, path, files, numbers, lock), 0
        if keep_days is not None:
            first = (today or _today()).toordinal() - keep_days
            days = _forget(files, BATCH.format(newest), date.fromordinal(max(first, 1)))
        return Compacted(done, days)
    finally:
        lock.free()


def _numbers(files: Files) -> list[int]:
    """The numbers of the batches that are not merged, or not deleted yet."""
    names = map(_NAME.fullmatch, files.names("batch=*"))
    return sorted(int(name[1]) for name in names if name and not name[2])


def _merge_new(
    spark: SparkSession, path: str, files: Files, numbers: list[int], lock: CompactionLock
) -> int:
    """Merge new batches; returns their number. Deletes leftovers of a merge that was killed."""
    ranges = merged(spark, path)
    done = max((int(each.partition("-")[2]) for each in ranges), default=-1)
    new = [number for number in numbers if number > done]
    if len(new) < LEAST_BATCHES:
        new = []
    if new:
        ranges.append(_merge(spark, path, new, lock))
        done = new[-1]
    lock.check()
    for name in files.names("batch=*"):
        found = _NAME.fullmatch(name)
        if found and _is_left_over(found, ranges, done):
            files.delete(name)
    return len(new)


def _today() -> date:
    return datetime.now(timezone.utc).date()


def _is_left_over(name: re.Match[str], ranges: list[str], done: int) -> bool:
    """Whether a directory is left over from this merge, or from one that was killed."""
    return name[0][len("batch=") :] not in ranges if name[2] else int(name[1]) <= done


def _merge(spark: SparkSession, path: str, numbers: list[int], lock: CompactionLock) -> str:
    given = [f"{path}/{BATCH.format(number)}" for number in numbers]
    events = spark.read.schema(SCHEMA).option("basePath", path).parquet(*given)
    name = f"{numbers[0]:08d}-{numbers[-1]:08d}"
    _write(events.select(*SCHEMA.names), f"{path}/batch={name}")
    lock.check()
    spark.createDataFrame([(name,)], "value string").coalesce(1).write.mode("append").text(
        f"{path}/{RANGES}"
    )
    return name


def _forget(files: Files, newest: str, before: date) -> int:
    """Delete old days of all batches before the newest, and directories that are empty then.

    Batches after the newest are still being written.
    """
    count = 0
    for name in files.names("batch=*"):
        if name >= newest:
            continue
        days = files.names(f"{name}/date=*")
        past = [day for day in days if day.removeprefix("date=") < before.isoformat()]
        for day in past:
            count += len(files.names(f"{name}/{day}/queue=*"))
            files.delete(f"{name}/{day}")
        if len(past) == len(days):
            files.delete(name)
    return count
