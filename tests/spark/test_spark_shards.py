"""A queue that is spread over shards is one queue here too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from celery_ext import Delayed
from celery_ext.spark import backlog, cancel, reschedule, schedule
from celery_ext.spark.backup.transfer import backup, read_backup, restore
from celery_ext.spark.events.archive import log_events, read_archive
from kombu_delayed.store.keys import QueueKeys
from kombu_delayed.store.shards import shard_name
from tests.kit.servers import Server

pytestmark = pytest.mark.thorough

JAN = datetime(2100, 1, 1, tzinfo=timezone.utc)
COUNT = 60


def over(shards: int) -> dict[str, Any]:
    """Transport options."""
    return {"delayed_shards": {"celery": shards}}


@pytest.fixture
def broker(server: Server) -> dict[str, Any]:
    return {"broker": f"delayed+{server.url}"}


@pytest.fixture
def delayed(server: Server) -> Iterator[Delayed]:
    """Who looks at the queue, and has not been told how many shards it has."""
    app = Celery("look", broker=f"delayed+{server.url}", set_as_current=False)
    with closing(Delayed(app)) as delayed:
        yield delayed
    app.close()


def frame(spark: SparkSession, count: int = COUNT) -> DataFrame:
    return spark.range(count, numPartitions=2).select(
        F.col("id").cast("string"), F.lit("work").alias("task"), F.lit(JAN).alias("eta")
    )


def sizes(delayed: Delayed) -> list[int]:
    names = [shard_name("celery", n) for n in range(5)]
    return [delayed.store.size(name).delayed for name in names]


def test_there_and_back(
    spark: SparkSession, broker: dict[str, Any], delayed: Delayed, tmp_path: Path
) -> None:
    spread = {**broker, "transport_options": over(3)}
    report = schedule(frame(spark), **spread)
    assert (report.accepted, report.queues) == (COUNT, {"celery": COUNT})
    assert [count > 0 for count in sizes(delayed)] == [True] * 3 + [False] * 2

    rows = backlog(spark, columns=["queue", "id"], queues=["celery"], **broker)
    found = [(row.queue, row.id) for row in rows.collect()]
    assert sorted(found) == sorted(("celery", str(n)) for n in range(COUNT))

    ids = frame(spark, 20).select("id")
    report = reschedule(ids.withColumn("countdown", F.lit(10)), queue="celery", **broker)
    assert (report.accepted, report.already) == (20, 0)
    report = cancel(ids, queue="celery", **broker)
    assert (report.accepted, report.already, report.queues) == (20, 0, {"celery": 20})

    backup(spark, str(tmp_path / "backup"), **broker)
    assert delayed.cancel("30")
    other = {**broker, "transport_options": over(5)}
    report = restore(read_backup(spark, str(tmp_path / "backup")), **other)
    assert (report.accepted, report.already) == (1, COUNT - 21)
    delayed.store.client.flushdb()
    report = restore(read_backup(spark, str(tmp_path / "backup")), **other)
    assert (report.accepted, report.queues) == (COUNT - 20, {"celery": COUNT - 20})
    assert min(sizes(delayed)) > 0


def test_a_job_keeps_its_shards(
    spark: SparkSession, broker: dict[str, Any], delayed: Delayed
) -> None:
    """Its ledger is by shard: with other ones, what has run meanwhile would run again."""
    rows = frame(spark)
    assert schedule(rows, job_id="j", **broker, transport_options=over(2)).accepted == COUNT
    for shard in delayed.shards("celery"):
        keys = QueueKeys(shard)
        delayed.store.client.delete(keys.messages, keys.partitions, keys.wake)
    again = schedule(rows, job_id="j", **broker, transport_options=over(5))
    assert (again.accepted, again.already) == (0, COUNT)
    assert sum(sizes(delayed)) == 0


def test_events(spark: SparkSession, broker: dict[str, Any], tmp_path: Path) -> None:
    # With options of their own, since Spark's processes keep connections that know their shards.
    schedule(frame(spark), **broker, transport_options=over(4))
    query = log_events(spark, path=str(tmp_path), queues="celery", **broker)
    query.awaitTermination()
    events = read_archive(spark, str(tmp_path))
    assert events.groupBy("queue", "event").count().collect() == [("celery", "scheduled", COUNT)]
    assert events.select("id").distinct().count() == COUNT
