"""Cancelling and rescheduling what the rows of a DataFrame name."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from celery_ext.spark import backlog, cancel, reschedule, schedule
from tests.kit.backlog import check_backlog
from tests.kit.servers import Server

pytestmark = pytest.mark.thorough

JAN = datetime(2100, 1, 1, tzinfo=timezone.utc)
JAN_MS = 4102444800000
HOUR_MS = 3_600_000


@pytest.fixture
def url(server: Server) -> str:
    return f"delayed+{server.url}"


def fill(spark: SparkSession, url: str, count: int, **options: Any) -> None:
    """Tasks, one an hour from January 2100 on."""
    frame = spark.range(count, numPartitions=2).select(
        F.col("id").cast("string"),
        F.lit("work").alias("task"),
        (F.lit(JAN) + F.make_dt_interval(hours=F.col("id").cast("int"))).alias("eta"),
    )
    assert schedule(frame, broker=url, **options).accepted == count


def test_cancel(spark: SparkSession, url: str, client: redis.Redis) -> None:
    fill(spark, url, 600)
    frame = spark.range(400, 700).select(F.col("id").cast("string"))
    report = cancel(frame, broker=url, queue="celery", batch_size=70)
    assert (report.accepted, report.already, report.queues) == (200, 100, {"celery": 200})
    assert set(check_backlog(client, "celery")) == {f"{n}" for n in range(400)}
    assert cancel(frame, broker=url, queue="celery").accepted == 0


def test_cancel_by_key_columns(spark: SparkSession, url: str, client: redis.Redis) -> None:
    frame = spark.range(20).select(
        F.col("id").alias("user"), F.lit("work").alias("task"), F.lit(JAN).alias("eta")
    )
    schedule(frame, broker=url, key_columns="user", queue="far")
    some = frame.where("user < 5").select("user")
    assert cancel(some, broker=url, key_columns="user", queue="far").accepted == 5
    assert len(check_backlog(client, "far")) == 15


def test_cancel_what_the_backlog_has(spark: SparkSession, url: str, client: redis.Redis) -> None:
    """It is read while it goes."""
    fill(spark, url, 1000)
    frame = backlog(spark, columns=["id", "queue"], broker=url, rows_per_task=200)
    assert cancel(frame, broker=url).accepted == 1000
    assert check_backlog(client, "celery") == {}


def test_reschedule_relative(spark: SparkSession, url: str, client: redis.Redis) -> None:
    """Each once, also where the new place is still to be read and where the job runs again."""
    fill(spark, url, 1000)
    waiting = backlog(spark, columns=["id", "queue", "due"], broker=url, rows_per_task=100)
    later = waiting.select(
        "id", "queue", (F.col("due") + F.expr("INTERVAL 100 HOURS")).alias("eta")
    )
    report = reschedule(later, broker=url, job_id="j")
    assert (report.accepted, report.already) == (1000, 0)
    expected = {f"{n}": JAN_MS + (n + 100) * HOUR_MS for n in range(1000)}
    assert check_backlog(client, "celery") == expected
    record = client.hget("{celery}:messages", "0")
    assert record is not None
    eta = json.loads(record[record.index(b"{") :])["headers"]["eta"]
    assert eta == "2100-01-05T04:00:00+00:00"
    assert reschedule(later, broker=url, job_id="j").accepted == 0
    assert check_backlog(client, "celery") == expected


def test_reschedule_to_a_time(spark: SparkSession, url: str, client: redis.Redis) -> None:
    fill(spark, url, 4, queue="far")
    rows = [("0", "2100-02-01", "far"), ("1", "2020-01-01", "far"), ("x", "2100-02-01", "none")]
    report = reschedule(spark.createDataFrame(rows, ["id", "eta", "queue"]), broker=url)
    assert (report.accepted, report.already) == (2, 1)
    assert report.queues == {"far": 2, "none": 0}
    assert check_backlog(client, "far")["0"] == JAN_MS + 31 * 24 * HOUR_MS
    assert client.llen("far") == 1


def test_another_operation_is_another_job(
    spark: SparkSession, url: str, client: redis.Redis
) -> None:
    fill(spark, url, 4, job_id="j")
    frame = spark.range(2).select(F.col("id").cast("string"), F.lit("2100-02-01").alias("eta"))
    for accepted in (2, 0):
        assert reschedule(frame, broker=url, queue="celery", job_id="j").accepted == accepted
