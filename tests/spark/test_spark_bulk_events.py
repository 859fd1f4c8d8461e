"""A large job under default settings, and its history."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from celery_ext import Delayed
from celery_ext.spark import cancel, schedule
from celery_ext.spark.backup import missed, replay
from celery_ext.spark.backup.transfer import backup, read_backup
from celery_ext.spark.events.archive import log_events, read_archive, watch
from celery_ext.spark.reports import queries
from tests.kit.backlog import check_backlog
from tests.kit.spark import JAN, counts, numbered

pytestmark = pytest.mark.thorough

COUNT, DUE, GONE, TAKEN = 60_000, 1_000, 500, 100
PAST = datetime(2026, 11, 1, tzinfo=timezone.utc)
CONSUMER = "w1@host:7:abcd"


def test_a_job_that_would_not_fit_into_its_stream(
    spark: SparkSession, delayed: Delayed, url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """More messages than a queue keeps events: all of them are in the archive, and add up."""
    is_past = F.col("id").cast("int") < DUE
    rows = numbered(spark, COUNT, eta=F.when(is_past, F.lit(PAST)).otherwise(F.lit(JAN)))
    schedule(rows, broker=url, job_id="many", latency_budget_ms=0)
    last = numbered(spark, COUNT, first=COUNT - GONE).select("id")
    assert cancel(last, broker=url, queue="celery", job_id="less").accepted == GONE
    assert client.xlen("{celery}:events") < 1_000

    store = delayed.store
    delivered = store.deliver("celery", CONSUMER, TAKEN, 1, lease_ms=3_600_000)
    assert delivered is not None
    store.ack("celery", CONSUMER, [*range(1, TAKEN // 2 + 1)], lambda: None)
    path = str(tmp_path / "events")
    query = log_events(spark, path=path, broker=url, queues="celery")
    assert watch(query, lambda more: None) == COUNT + GONE + TAKEN + TAKEN // 2

    events = read_archive(spark, path)
    told = events.groupBy("event", "job").count().collect()
    assert {(row.event, row.job): row["count"] for row in told} == {
        ("scheduled", "many"): COUNT,
        ("cancelled", "less"): GONE,
        ("delivered", ""): TAKEN,
        ("acked", ""): TAKEN // 2,
    }
    assert queries.never_delivered(events).count() == DUE - TAKEN
    assert queries.never_delivered(events, JAN).count() == COUNT - GONE - TAKEN
    [late] = queries.lateness(queries.deliveries(events), "queue").collect()
    assert late.messages == TAKEN
    assert late.p50_seconds > (datetime.now(timezone.utc) - PAST).total_seconds() - 3_600

    lost = missed(events, until=datetime(2101, 1, 1, tzinfo=timezone.utc))
    assert lost.count() == COUNT - GONE - TAKEN
    where = str(tmp_path / "backup")
    backup(spark, where, broker=url)
    client.flushall()
    future = lost.where(F.col("due") == F.lit(JAN))
    report = replay(future, read_backup(spark, where), broker=url, latency_budget_ms=0)
    assert counts(report) == (COUNT - GONE - DUE, 0, 0)
    assert len(check_backlog(client, "celery")) == COUNT - GONE - DUE
