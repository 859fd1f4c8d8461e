"""Rows of Spark's jobs, and their results."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from celery_ext import Delayed
from celery_ext.spark import (
    JobReport,
    backlog,
    cancel,
    connect,
    forget_job,
    job_report,
    jobs,
    reschedule,
    schedule,
)
from celery_ext.spark.backup.transfer import backup, read_backup, restore, summary
from celery_ext.spark.events.archive import log_events, read_archive
from tests.kit.servers import Server
from tests.kit.workers import ROOT

JAN = datetime(2100, 1, 1, tzinfo=timezone.utc)
JAN_MS = 4_102_444_800_000
COUNT = 60

#: Runs `python -m celery_ext.spark` with arguments.
Run = Callable[..., Result]


def numbered(
    spark: SparkSession, count: int, *, first: int = 0, partitions: int = 2, **columns: Any
) -> DataFrame:
    """Rows with ids up to `count` for the task `record` in January 2100, or with other columns."""
    frame = spark.range(first, count, numPartitions=partitions)
    given = {"task": F.lit("record"), "eta": F.lit(JAN), **columns}
    return frame.select(F.col("id").cast("string")).withColumns(given)


def counts(report: JobReport) -> tuple[int, int, int]:
    return report.accepted, report.already, report.refused


def run_examples(page: str, **places: str) -> dict[str, Any]:
    """Run the Python examples of a guide, with some texts replaced; returns their names."""
    text = (ROOT / "docs" / "guides" / page).read_text("utf-8")
    found: dict[str, Any] = {}
    for block in re.findall(r"^```python[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for there, here in places.items():
            block = block.replace(there, here)
        exec(block, found)
    return found


def start_when_awaited(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, a server that has ended starts again as soon as Spark waits for it."""
    wait = connect._await

    def start(delayed: Delayed, *, writes: bool) -> None:
        if not server.running:
            server.start()
        wait(delayed, writes=writes)

    monkeypatch.setattr(connect, "_await", start)


def there_and_back(
    spark: SparkSession, directory: Path, between: Callable[[], object], **broker: Any
) -> str:
    """Write, read, change, follow and back up a queue; returns Spark's view of it."""
    report = schedule(numbered(spark, COUNT), job_id="j", **broker)
    assert (counts(report), report.queues) == ((COUNT, 0, 0), {"celery": COUNT})
    found = backlog(spark, **broker)
    rows = {(row.queue, row.id) for row in found.select("queue", "id").collect()}
    assert rows == {("celery", f"{n}") for n in range(COUNT)}
    path = str(directory / "backup")
    made = backup(spark, path, **broker)
    assert _archived(spark, directory / "events", **broker) == {"scheduled": COUNT}

    between()
    again = schedule(numbered(spark, COUNT + 20), job_id="j", **broker)
    assert (counts(again), job_report("j", **broker)) == ((20, COUNT, 0), again)
    ids = numbered(spark, 30).select("id")
    moved = reschedule(ids.withColumn("countdown", F.lit(3600)), queue="celery", **broker)
    gone = cancel(ids, queue="celery", **broker)
    assert (counts(moved), counts(gone), gone.queues) == ((30, 0, 0), (30, 0, 0), {"celery": 30})
    assert counts(restore(read_backup(spark, path), **broker)) == (30, COUNT - 30, 0)
    assert backlog(spark, columns=["id"], **broker).distinct().count() == COUNT + 20
    told = {"scheduled": COUNT + 50, "rescheduled": 30, "cancelled": 30}
    assert _archived(spark, directory / "events", **broker) == told
    told_of = {job.job_id: job.state for job in jobs(**broker)}
    assert (told_of.pop("j"), set(told_of.values())) == ("ended", {"ended"})
    assert forget_job("j", **broker) > 0
    assert (forget_job("j", **broker), job_report("j", **broker)) == (0, None)
    assert {job.job_id for job in jobs(**broker)} == told_of.keys()
    return f"{found._jdf.queryExecution().toString()} {made} {summary(spark, path)}"


def _archived(spark: SparkSession, path: Path, **broker: Any) -> dict[str, int]:
    """Event counts by kind, all of one queue, after new events were added to the archive."""
    log_events(spark, path=str(path), queues="celery", **broker).awaitTermination()
    counted = read_archive(spark, str(path)).groupBy("queue", "event").count().collect()
    assert {row.queue for row in counted} == {"celery"}
    return {row.event: row["count"] for row in counted}
