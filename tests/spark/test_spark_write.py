"""Rows of DataFrames become the messages that apply_async would send, each once."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import redis
from celery import Celery
from pyspark import TaskContext
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from celery_ext.spark import backlog, cancel, job_report, jobs, reschedule, schedule
from celery_ext.spark.sink import hadoop_rejects
from kombu_delayed.errors import OptionError
from tests.kit.backlog import check_backlog
from tests.kit.ledger import Ledger
from tests.kit.servers import Server
from tests.kit.spark import counts, numbered
from tests.kit.state import state
from tests.kit.tasks_app import Settings
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough

ETA = datetime(2100, 1, 2, 3, 4, 5, 678901, timezone.utc)


def messages(client: redis.Redis) -> dict[str, Any]:
    """All messages, parsed, without the parts that differ each time."""
    found = {}
    for key, value in state(client).items():
        if key.endswith("}:messages"):
            found |= {f"{key} {id}": _parsed(text[1:]) for id, text in value.items()}  # type: ignore[union-attr]
        elif isinstance(value, list) and not key.startswith("_kombu"):
            found |= {f"{key} {n}": _parsed(text) for n, text in enumerate(value)}
    return found


def _parsed(text: str) -> Any:
    payload = json.loads(text)
    payload.pop("due_ms", None)  # a job's messages that were due already have it, like delayed ones
    del payload["headers"]["origin"], payload["properties"]["delivery_tag"]
    payload["properties"].pop("reply_to", None)
    return payload


def test_as_apply_async_sends(
    spark: SparkSession, url: str, server: Server, client: redis.Redis
) -> None:
    rows = [
        ("a", "t", '[1, "é"]', '{"x": null}', ETA, None, None, None, '{"tenant": "acme"}'),
        ("b", "t", None, None, None, 0, "far", 5, None),
        ("c", "u", "[]", "{}", datetime(2020, 1, 1, tzinfo=timezone.utc), None, "far", 0, "{}"),
        ("d", "t", '[{"y": [2.5]}]', None, ETA, None, "far", 9, '{"n": 1}'),
    ]
    names = (
        "id string, task string, args string, kwargs string, eta timestamp, countdown int, "
        "queue string, priority int, headers string"
    )
    frame = spark.createDataFrame(rows, names).coalesce(1)
    with Celery("tests", broker=url, set_as_current=False) as app:
        for id, task, args, kwargs, eta, countdown, queue, priority, headers in rows:
            options = {"queue": queue, "priority": priority, "headers": headers}
            options = {name: value for name, value in options.items() if value is not None}
            if headers:
                options["headers"] = json.loads(headers)
            options |= {"task_id": id, "eta": eta, "countdown": countdown}
            app.send_task(task, json.loads(args or "[]"), json.loads(kwargs or "{}"), **options)
    sent = messages(client)
    client.flushall()
    report = schedule(frame, broker=url)
    assert messages(client) == sent
    assert counts(report) == (4, 0, 0)
    assert report.queues == {"celery": 1, "far": 3}


def test_a_worker_runs_what_was_scheduled(
    spark: SparkSession, url: str, client: redis.Redis, tmp_path: Path
) -> None:
    schedule(numbered(spark, 40, args=F.array("id")), broker=url)
    waiting = backlog(spark, broker=url, columns=["id", "queue"])
    assert waiting.count() == 40
    assert reschedule(waiting.withColumn("countdown", F.lit(0)), broker=url).accepted == 40
    overdue = numbered(spark, 50, first=40, eta=F.lit("2020-01-01"), args=F.array("id"))
    assert schedule(overdue, broker=url).accepted == 10
    ledger = Ledger(tmp_path / "ledger")
    with Worker(Settings(url, ledger=str(ledger.path)), tmp_path):
        ledger.wait_for(50)
    assert sorted(each["args"] for each in ledger.entries()) == sorted([f"{n}"] for n in range(50))
    assert set(ledger.runs().values()) == {1}


# Once.


@pytest.mark.parametrize("eta", [ETA, datetime(2020, 1, 1, tzinfo=timezone.utc)])
def test_the_same_job_after_its_tasks_have_run(
    eta: datetime, spark: SparkSession, url: str, client: redis.Redis
) -> None:
    frame, more = (numbered(spark, count, eta=F.lit(eta)) for count in (20, 30))
    assert counts(schedule(frame, broker=url, job_id="j")) == (20, 0, 0)
    for key in client.keys("*"):
        if b":job:" not in key:
            client.delete(key)
    assert counts(schedule(more, broker=url, job_id="j", ledger_seconds=600)) == (10, 20, 0)
    assert len(messages(client)) == 10
    until_ms = client.zscore("{celery}:ledgers-until", "{celery}:job:j")
    assert time.time() < until_ms / 1000 <= time.time() + 600
    assert counts(schedule(frame, broker=url, job_id="other")) == (20, 0, 0)


@pytest.mark.parametrize("dies", ["what reads", "what writes"])
def test_a_task_that_dies_half_way(
    dies: str, spark: SparkSession, url: str, server: Server, client: redis.Redis
) -> None:
    port = server.port or 0

    def others() -> list[str]:
        """The other Python processes of the executor: one parent forks them all."""
        parent = os.getppid()
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return [pid for pid in children if int(pid) != os.getpid()]

    @F.udf(useArrow=False)
    def dying(id: str) -> str:
        """The id, padded so that buffers hold only few rows.

        At the first attempt one of its processes is killed when some of its rows are stored.
        """
        context = TaskContext.get()
        if context is not None and context.attemptNumber() == 0 and int(id) % 2000 == 1500:
            with redis.Redis(port=port) as own:
                wait_until(lambda: own.hlen("{celery}:messages") > 200, "rows are stored")
                victims = [str(os.getpid())] if dies == "what reads" else others()
                own.incrby("test:killed", len(victims))
            for pid in victims:
                os.kill(int(pid), signal.SIGKILL)
        return f"{id} {'x' * 500}"

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "50")
    try:
        frame = numbered(spark, 4000, args=F.array(F.lit("x" * 500)))
        id = dying.asNondeterministic()("id")
        frame = frame.withColumn("id", F.substring_index(id, " ", 1))
        client.config_resetstat()
        # Without pauses, as an attempt that lives on would write into the next test.
        report = schedule(frame, broker=url, batch_size=50, latency_budget_ms=0)
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert int(client.get("test:killed") or 0) > 0
    # Each row is added to its ledger and to the backlog, and a few once more, to another bucket of
    # these: some rows were written twice.
    assert client.info("commandstats")["cmdstat_hsetnx"]["calls"] > 2 * 4000 + 100
    assert counts(report) == (4000, 0, 0)
    assert set(check_backlog(client, "celery")) == {f"{n}" for n in range(4000)}


# Refused rows.


def refusing(spark: SparkSession, partitions: int = 2) -> DataFrame:
    return numbered(
        spark,
        100,
        partitions=partitions,
        args=F.when(F.col("id") % 10 == 3, F.lit("no json")).otherwise(F.lit("[]")),
        eta=F.when(F.col("id") == "8", "soon").when(F.col("id") != "7", "2100-01-01"),
    )


def test_rejects(spark: SparkSession, url: str, client: redis.Redis, tmp_path: Path) -> None:
    directory = tmp_path / "rejects"
    report = schedule(refusing(spark), broker=url, rejects=directory)
    assert counts(report) == (88, 0, 12)
    assert client.hlen("{celery}:messages") == 88
    found = spark.read.json(str(directory)).orderBy(F.col("row.id").cast("int")).collect()
    assert [int(each.row.id) for each in found] == [3, 7, 8, *range(13, 100, 10)]
    assert found[1].reason.startswith("the row has neither eta nor countdown")
    assert found[2].reason == "eta takes a datetime or ISO 8601, not 'soon'"  # the text is Celery's
    assert found[2].row.asDict() == {"id": "8", "task": "record", "eta": "soon", "args": "[]"}
    assert len(list(directory.iterdir())) == 2


def test_rejects_to_where_only_spark_can_write(
    spark: SparkSession, url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """By Spark's own writer, to any file system that it knows."""
    conf = spark._jsc.hadoopConfiguration()
    conf.set("fs.viewfs.mounttable.lake.link./data", tmp_path.as_uri())
    where = "viewfs://lake/data/rejects"
    with pytest.raises(Exception, match="No FileSystem for scheme"):
        schedule(refusing(spark), broker=url, rejects="nofs://bucket/rejects")
    assert jobs(broker=url) == []
    report = schedule(refusing(spark), broker=url, rejects=where, job_id="j")
    assert (counts(report), job_report("j", broker=url)) == ((88, 0, 12), report)
    assert client.hlen("{celery}:messages") == 88
    found = spark.read.json(where).orderBy(F.col("row.id").cast("int")).collect()
    assert [int(each.row.id) for each in found] == [3, 7, 8, *range(13, 100, 10)]
    assert found[2].row.asDict() == {"id": "8", "task": "record", "eta": "soon", "args": "[]"}
    assert (tmp_path / "rejects" / "_SUCCESS").exists()
    [job] = jobs(broker=url)
    assert (job.state, job.accepted, job.refused) == ("ended", 88, 12)

    again = schedule(numbered(spark, 20), broker=url, rejects=where, job_id="j")
    assert counts(again) == (4, 16, 0)
    assert spark.read.json(where).count() == 12
    assert cancel(numbered(spark, 5), broker=url, rejects=where, queue="celery").accepted == 5
    writer = numbered(spark, 1).write.format("kombu_delayed").mode("append").option("broker", url)
    with pytest.raises(AnalysisException, match="is written by Spark itself: call schedule"):
        writer.option("rejects", where).save()


def test_rejects_of_columns_with_any_name(
    spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = numbered(spark, 3, **{"a`b.c": F.lit(1)})
    given = {"broker": url, "rejects": f"file://{tmp_path}/rejects", "extra_columns": "kwargs"}
    assert counts(schedule(frame, **given)) == (3, 0, 0)
    monkeypatch.setattr(hadoop_rejects, "_mapped", Mock(side_effect=ValueError("no such plan")))
    with pytest.raises(ValueError, match="no such plan"):
        schedule(frame, **given)
    assert [job.state for job in jobs(broker=url)] == ["failed", "ended"]


def test_more_rejects_than_allowed(spark: SparkSession, url: str, client: redis.Redis) -> None:
    frame = refusing(spark, 1)
    with pytest.raises(PythonException, match="1 rows are refused, and max_rejects is 0") as caught:
        schedule(frame, broker=url, job_id="j")
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__[0].startswith("The finished rows of job 'j' stay")
    stored = client.hlen("{celery}:messages")
    report = schedule(frame, broker=url, job_id="j", max_rejects=12)
    assert counts(report) == (88 - stored, stored, 12)


def test_options_are_checked_on_the_driver(spark: SparkSession, url: str) -> None:
    frame = numbered(spark, 1)
    with pytest.raises(OptionError, match="unknown option 'job'; did you mean 'job_id'"):
        schedule(frame, broker=url, job="j")
    writer = frame.write.format("kombu_delayed").option("broker", url)
    with pytest.raises(AnalysisException, match="a backlog is not overwritten: use mode"):
        writer.mode("overwrite").save()
    with pytest.raises(AnalysisException, match="unknown option 'job'; did you mean 'job_id'"):
        writer.mode("append").option("job", "j").save()
    with pytest.raises(AnalysisException, match=r"no column task, .*; did you mean 'tsk'"):
        schedule(frame.withColumnRenamed("task", "tsk"), broker=url)
    with pytest.raises(AnalysisException, match="schedule knows no column 'etaa'; did you mean"):
        schedule(frame.withColumn("etaa", F.lit(1)), broker=url, extra_columns="fail")
    with pytest.raises(AnalysisException, match=r"keeps no backlog: put delayed\+ in front"):
        schedule(frame, broker=url.removeprefix("delayed+"))


def test_a_source_that_spark_does_not_find(
    spark: SparkSession, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Python lacks the package, or the process that looked for it was killed."""
    monkeypatch.setattr("celery_ext.spark.FORMAT", "no_such_source")
    advice = rf"set PYSPARK_PYTHON to {sys.executable} .* spark.dataSource.register\("
    with pytest.raises(OptionError, match=advice):
        schedule(numbered(spark, 1), broker=url)
    with pytest.raises(OptionError, match=advice):
        backlog(spark, broker=url)


def test_any_thread_may_write(spark: SparkSession, url: str, client: redis.Redis) -> None:
    rows = numbered(spark, 4)
    with ThreadPoolExecutor() as threads:
        found = threads.submit(schedule, rows, broker=url).result()
        assert counts(found) == (4, 0, 0)
        found = threads.submit(cancel, rows, broker=url, queue="celery").result()
    assert counts(found) == (4, 0, 0)
    assert check_backlog(client, "celery") == {}
