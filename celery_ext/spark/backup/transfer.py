"""Writes a backlog to Parquet files, and restores it into the same or another broker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from celery_ext import Delayed
from celery_ext.errors import BackupError
from kombu_delayed.message.compressing import MARK
from kombu_delayed.store.ledgers import RESTORE, Job, LedgerStore, dealt_with

from .. import backlog, run_job
from ..connect import app_of, connected
from ..events.archive_files import exists, pattern_in
from ..options import ReadOptions, WriteOptions
from ..sink.backup_rows import COLUMNS, VERSION, check_version
from ..sink.registry import JobReport

SCHEMA = ", ".join(f"{name} {type_}" for name, type_ in COLUMNS.items())

#: Written last, so a backup with it is complete. Readers of Parquet ignore it.
_SUMMARY = "_summary"

#: How messages are written. After each one Parquet looks at how long they are, and not only after
#: a hundred, which Java may have no memory for.
_PARQUET = {
    "compression": "zstd",
    "parquet.page.size.row.check.min": "1",
    "parquet.block.size.row.check.min": "1",
}


@dataclass(frozen=True)
class Summary:
    """The content of a backup: messages by queue, when it was made, and of which server.

    `undecodable` counts messages that are compressed with a dictionary that their queue has lost.
    No program can read them, not even after a restore. Only `backup` sets it.
    """

    version: int
    made_at: str
    made_by: str
    server: str
    messages: int
    queues: dict[str, int] = field(default_factory=dict)
    undecodable: int = 0


def delayed_rows(spark: SparkSession, **options: Any) -> DataFrame:
    """The backlog with the columns of a backup. `options` are those of `ReadOptions`."""
    names = [name for name in COLUMNS if name != "version"]
    frame = backlog(spark, columns=names, **options)
    return frame.select(F.lit(VERSION).alias("version"), *names)


def _source(options: Mapping[str, Any]) -> str:
    """The address of the source broker. Raises QueryError for a queue that it does not have."""
    with connected(given := ReadOptions.parse(options), waits=True) as delayed:
        for queue in given.queues:
            delayed.check_queue(queue)
        return delayed.connection.as_uri()


def backup(spark: SparkSession, path: str, *, overwrite: bool = False, **options: Any) -> Summary:
    """Write the delayed messages to Parquet, each once, while the broker continues.

    With `overwrite` an older backup at `path` is deleted first. `options` are those of
    `ReadOptions`. Raises OptionError, QueryError for a queue that does not exist, BackupError if
    `path` is not empty or has characters of patterns, and Spark's error if the broker fails.
    """
    if fault := pattern_in(path):
        raise BackupError(fault)
    server = _source(options)
    if not overwrite and exists(spark, path):
        raise BackupError(f"there is something at {path}: give another path, or overwrite it")
    rows = delayed_rows(spark, **options)
    made_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    mode = "overwrite" if overwrite else "errorifexists"
    seen = Observation()
    is_undecodable = F.contains("payload", F.lit(MARK))
    rows = rows.observe(seen, F.count_if(is_undecodable).alias("undecodable"))
    rows.write.mode(mode).options(**_PARQUET).parquet(path)
    queues = counts(spark.read.schema(SCHEMA).parquet(path))
    made_by = f"kombu-delayed {version('kombu-delayed')}"
    # Older versions of this package refuse a file with any other field.
    facts: dict[str, Any] = {
        "version": VERSION,
        "made_at": made_at,
        "made_by": made_by,
        "server": server,
        "messages": sum(queues.values()),
        "queues": queues,
    }
    text = spark.createDataFrame([(json.dumps(facts),)], "value string")
    text.coalesce(1).write.mode("overwrite").text(f"{path}/{_SUMMARY}")
    return Summary(**facts, undecodable=seen.get["undecodable"])


def counts(rows: DataFrame) -> dict[str, int]:
    """The number of messages by queue. Raises BackupError for other versions."""
    found = rows.groupBy("queue", "version").count().orderBy("queue").collect()
    for row in found:
        check_version(row["version"], "a part of the backup")
    return {row["queue"]: row["count"] for row in found}


def summary(spark: SparkSession, path: str) -> Summary:
    """The summary of a backup.

    Raises BackupError if there is none, or it has another version.
    """
    try:
        text = "".join(row.value for row in spark.read.text(f"{path}/{_SUMMARY}").collect())
        found = json.loads(text)
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        raise BackupError(
            f"there is no whole backup at {path}: {_SUMMARY}, which is written last, is missing"
        ) from error
    except ValueError as error:
        raise BackupError(f"{path}/{_SUMMARY} is damaged: {error}") from error
    check_version(found.get("version"), f"the backup at {path}")
    return Summary(**found)


def read_backup(spark: SparkSession, path: str) -> DataFrame:
    """The messages of a backup. Raises BackupError if it is incomplete or of another version."""
    before = summary(spark, path)
    rows = spark.read.schema(SCHEMA).parquet(path)
    if (found := counts(rows)) != before.queues:
        raise BackupError(
            f"the backup at {path} has {sum(found.values()):,} messages where it had "
            f"{before.messages:,}: files are missing, or are there twice"
            f"{_difference(found, before)}"
        )
    return rows


def _difference(found: Mapping[str, int], before: Summary) -> str:
    wrong = [q for q in {**before.queues, **found} if found.get(q) != before.queues.get(q)]
    return f" (queue {', '.join(sorted(wrong)[:3])}{', …' if len(wrong) > 3 else ''})"


def restore(rows: DataFrame, **options: Any) -> JobReport:
    """Restore messages that do not exist, with their ids and due times.

    Existing messages stay as they are, and a job restores each message once. A due message runs at
    once. A unique task holds its key again unless another task has it. `rows` have the columns of a
    backup, `options` are those of `WriteOptions`. Raises BackupError for another version, and like
    `celery_ext.spark.schedule`.
    """
    return run_job(rows, RESTORE, options)


@contextmanager
def counting(queues: Iterable[str], **options: Any) -> Iterator[Callable[[], int]]:
    """Yields a function that returns about how many messages a restore has processed so far.

    It counts the entries of the job's ledgers, which include earlier runs and a few other fields.
    `options` are those of `restore`, with a `job_id`. Raises Kombu's OperationalError.
    """
    given = WriteOptions.parse({**options, "operation": RESTORE})
    job = Job(given.job_id, "", given.ledger_seconds, RESTORE)
    # Not `connected`: the progress bar reads while this process may use that connection.
    delayed = Delayed(app_of(given, waits=True))
    store = LedgerStore(delayed.store, job)
    shards = [shard for queue in queues for shard in store.shards.all(queue)]
    try:
        yield lambda: sum(dealt_with(delayed.store, job, shard) for shard in shards)
    finally:
        delayed.close()


def copy(spark: SparkSession, source: Mapping[str, Any], target: Mapping[str, Any]) -> JobReport:
    """Copy one broker's backlog to another broker. The first one does not change.

    `source` are `ReadOptions`, `target` are `WriteOptions`. Raises like `restore`, and QueryError
    for a queue that does not exist.
    """
    _source(source)
    return restore(delayed_rows(spark, **source), **target)
