from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from celery_ext.spark import backlog, cancel, reschedule, schedule
from kombu_delayed.store.store import Store
from tests.kit.backlog import check_backlog
from tests.kit.spark import JAN, JAN_MS, counts, numbered

pytestmark = pytest.mark.thorough

HOUR_MS = 3_600_000


def test_cancel_what_the_backlog_has(spark: SparkSession, url: str, client: redis.Redis) -> None:
    """The backlog is read while messages leave it."""
    schedule(numbered(spark, 1000), broker=url)
    frame = backlog(spark, columns=["id", "queue"], broker=url, rows_per_task=200)
    assert cancel(frame, broker=url).accepted == 1000
    assert check_backlog(client, "celery") == {}


def test_reschedule_relative(spark: SparkSession, url: str, client: redis.Redis) -> None:
    """Each message moves once, even if its new place is yet to be read or the job runs again."""
    hour = F.make_dt_interval(hours=F.col("id").cast("int"))
    schedule(numbered(spark, 1000, eta=F.lit(JAN) + hour), broker=url)
    waiting = backlog(spark, columns=["id", "queue", "due"], broker=url, rows_per_task=100)
    later = waiting.selectExpr("id", "queue", "due + INTERVAL 100 HOURS AS eta")
    assert counts(reschedule(later, broker=url, job_id="j")) == (1000, 0, 0)
    expected = {f"{n}": JAN_MS + (n + 100) * HOUR_MS for n in range(1000)}
    assert check_backlog(client, "celery") == expected
    [record] = Store(client).records("celery", [b"0"])
    assert record is not None
    eta = json.loads(record[record.index(b"{") :])["headers"]["eta"]
    assert eta == "2100-01-05T04:00:00+00:00"
    assert reschedule(later, broker=url, job_id="j").accepted == 0
    assert check_backlog(client, "celery") == expected


def test_rows_to_reschedule_are_kept_where_spark_keeps_them(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    """Rows that an executor keeps are lost with it."""
    schedule(numbered(spark, 10), broker=url)
    later = numbered(spark, 10, eta=F.lit("2100-02-01")).drop("task")
    spark.sparkContext.setCheckpointDir(str(tmp_path))
    try:
        assert reschedule(later, broker=url, queue="celery").accepted == 10
    finally:
        spark.sparkContext._jsc.sc().setCheckpointDir(None)  # type: ignore[union-attr]
    assert [*tmp_path.rglob("part-*")]


def test_another_operation_is_another_job(
    spark: SparkSession, url: str, client: redis.Redis
) -> None:
    schedule(numbered(spark, 4), broker=url, job_id="j")
    later = numbered(spark, 2, eta=F.lit("2100-02-01")).drop("task")
    for accepted in (2, 0):
        assert reschedule(later, broker=url, queue="celery", job_id="j").accepted == accepted
