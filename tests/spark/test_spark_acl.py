"""A user with the rights that docs/operations.md names can do with Spark what there is to do."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from celery_ext.spark import backlog, cancel, job_report, reschedule, schedule
from celery_ext.spark.backup.transfer import backup, read_backup, restore
from celery_ext.spark.events.archive import log_events, read_archive
from tests.kit.clusters import start_cluster
from tests.kit.limited import OPTIONS, PASSWORD, USER, limited
from tests.kit.sentinels import start_group
from tests.kit.servers import Server, available_kinds

pytestmark = pytest.mark.thorough

COUNT = 20


def use_all(spark: SparkSession, url: str, options: dict[str, Any], directory: Path) -> None:
    """Writes of each kind, and reads of the backlog and of events; of a queue over two shards."""
    spread = {**OPTIONS, **options, "delayed_shards": 2}
    broker = {"broker": url, "transport_options": spread}
    rows = spark.range(COUNT, numPartitions=2).select(
        F.col("id").cast("string"),
        F.lit("work").alias("task"),
        F.lit(datetime(2100, 1, 1, tzinfo=timezone.utc)).alias("eta"),
    )
    report = schedule(rows, job_id="j", **broker)
    assert (report.accepted, job_report("j", **broker)) == (COUNT, report)
    assert backlog(spark, **broker).count() == COUNT
    backup(spark, str(directory / "backup"), **broker)
    ids = rows.where("id < 5").select("id")
    moves = ids.withColumn("countdown", F.lit(3600))
    assert reschedule(moves, queue="celery", **broker).accepted == 5
    assert cancel(ids, queue="celery", **broker).accepted == 5
    assert restore(read_backup(spark, str(directory / "backup")), **broker).accepted == 5
    log_events(spark, path=str(directory / "events"), **broker).awaitTermination()
    counts = read_archive(spark, str(directory / "events")).groupBy("event").count().collect()
    told = {"scheduled": COUNT + 5, "rescheduled": 5, "cancelled": 5}
    assert {row.event: row["count"] for row in counts} == told


def test_a_single_server(
    spark: SparkSession, server: Server, client: redis.Redis, tmp_path: Path
) -> None:
    url = f"delayed+redis://{USER}:{PASSWORD}@127.0.0.1:{server.port}/0"
    with limited([client]):
        use_all(spark, url, {}, tmp_path)


def test_a_cluster(spark: SparkSession, tmp_path: Path) -> None:
    with start_cluster(available_kinds()[0], tmp_path / "cluster") as cluster:
        first, second = (server.port for server in cluster.servers[:2])
        url = f"delayed+rediscluster://{USER}:{PASSWORD}@127.0.0.1:{first};127.0.0.1:{second}"
        with limited(cluster.client(server) for server in cluster.servers):
            use_all(spark, url, {}, tmp_path)


def test_the_master_of_sentinels(spark: SparkSession, tmp_path: Path) -> None:
    with ExitStack() as stack:
        group = stack.enter_context(start_group(available_kinds()[0], tmp_path / "group"))
        client = stack.enter_context(group.client())
        hosts = group.url.partition("@")[2]
        url = f"delayed+sentinel://{USER}:{PASSWORD}@{hosts}"
        with limited([client]):
            use_all(spark, url, group.options, tmp_path)
