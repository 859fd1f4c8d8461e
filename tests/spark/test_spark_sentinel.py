"""A broker behind Sentinels: written, read, followed and backed up, before and after a failover."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from celery_ext.spark import backlog, cancel, job_report, reschedule, schedule
from celery_ext.spark.backup.transfer import backup, read_backup, restore, summary
from celery_ext.spark.events.archive import log_events, read_archive
from tests.kit.sentinels import PASSWORD, SENTINEL_PASSWORD, Group, start_group
from tests.kit.servers import available_kinds

pytestmark = pytest.mark.thorough

JAN = datetime(2100, 1, 1, tzinfo=timezone.utc)
COUNT = 100


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with start_group(available_kinds()[0], tmp_path_factory.mktemp("sentinel")) as group:
        yield group


@pytest.fixture
def broker(group: Group) -> dict[str, Any]:
    return {"broker": f"delayed+{group.url}", "transport_options": group.options}


def frame(spark: SparkSession, first: int = 0, last: int = COUNT) -> DataFrame:
    return spark.range(first, last, numPartitions=2).select(
        F.col("id").cast("string"), F.lit("work").alias("task"), F.lit(JAN).alias("eta")
    )


def archived(spark: SparkSession, broker: dict[str, Any], path: Path) -> dict[str, int]:
    log_events(spark, path=str(path), queues="celery", **broker).awaitTermination()
    counts = read_archive(spark, str(path)).groupBy("event").count().collect()
    return {row.event: row["count"] for row in counts}


def test_there_and_back(
    spark: SparkSession,
    group: Group,
    broker: dict[str, Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    rows = frame(spark)
    assert schedule(rows, job_id="first", **broker).accepted == COUNT
    found = backlog(spark, **broker)
    assert found.count() == COUNT
    kept = backup(spark, str(tmp_path / "backup"), **broker)
    assert archived(spark, broker, tmp_path / "events") == {"scheduled": COUNT}

    group.fail_over()
    again = schedule(frame(spark, 0, COUNT + 20), job_id="first", **broker)
    assert (again.accepted, again.already) == (20, COUNT)
    assert job_report("first", **broker) == again
    ids = frame(spark, 0, 30).select("id")
    moved = reschedule(ids.withColumn("countdown", F.lit(3600)), queue="celery", **broker)
    assert (moved.accepted, cancel(ids, queue="celery", **broker).accepted) == (30, 30)
    restored = restore(read_backup(spark, str(tmp_path / "backup")), **broker)
    assert (restored.accepted, restored.already) == (30, COUNT - 30)
    assert backlog(spark, columns=["id"], **broker).distinct().count() == COUNT + 20
    told = archived(spark, broker, tmp_path / "events")
    assert told == {"scheduled": COUNT + 50, "rescheduled": 30, "cancelled": 30}

    texts = [found._jdf.queryExecution().toString(), str(kept), *capfd.readouterr()]
    texts.append(str(summary(spark, str(tmp_path / "backup"))))
    assert [text for text in texts if f":{PASSWORD}@" in text or SENTINEL_PASSWORD in text] == []


def test_a_master_that_nobody_knows(spark: SparkSession, broker: dict[str, Any]) -> None:
    options = {**broker["transport_options"], "master_name": "other"}
    unknown = {**broker, "transport_options": options}
    with pytest.raises(AnalysisException, match="Sentinels know no master 'other'") as raised:
        backlog(spark, **unknown).count()
    assert f":{PASSWORD}@" not in str(raised.value)
    assert SENTINEL_PASSWORD not in str(raised.value)
