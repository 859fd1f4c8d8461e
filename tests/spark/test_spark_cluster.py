"""A broker on a Redis Cluster: written, read, changed, run, followed and backed up."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from celery_ext import Delayed
from celery_ext.spark import backlog, cancel, connect, job_report, reschedule, schedule
from celery_ext.spark.backup.transfer import backup, read_backup, restore
from celery_ext.spark.events.archive import log_events, read_archive
from celery_ext.spark.options import BrokerOptions
from celery_ext.spark.source.paging import Pager, Span
from kombu_delayed.store.shards import shard_name
from tests.kit.clusters import PASSWORD, Cluster, start_cluster
from tests.kit.ledger import Ledger
from tests.kit.servers import available_kinds
from tests.kit.state import entry
from tests.kit.tasks_app import Settings
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

pytestmark = pytest.mark.thorough

JAN = datetime(2100, 1, 1, tzinfo=timezone.utc)
COUNT = 120
SHARDS = 6


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with start_cluster(available_kinds()[0], directory) as cluster:
        yield cluster


@pytest.fixture
def cluster(whole: Cluster) -> Cluster:
    whole.flush()
    return whole


@pytest.fixture
def url(cluster: Cluster) -> str:
    return f"delayed+{cluster.url}"


def numbered(spark: SparkSession, queue: Any, first: int = 0, last: int = COUNT) -> DataFrame:
    return spark.range(first, last, numPartitions=2).select(
        F.col("id").cast("string"),
        F.lit("record").alias("task"),
        F.array("id").alias("args"),
        F.lit(JAN).alias("eta"),
        queue.alias("queue"),
    )


def archived(spark: SparkSession, url: str, path: Path) -> dict[tuple[str, str], int]:
    """Events by queue and kind that an archive has, after what is new is in it."""
    log_events(spark, url, path=str(path)).awaitTermination()
    counts = read_archive(spark, str(path)).groupBy("queue", "event").count().collect()
    return {(row.queue, row.event): row["count"] for row in counts}


def test_queues_on_all_nodes(
    spark: SparkSession,
    cluster: Cluster,
    url: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    names = cluster.queues_apart(3)
    queue = F.element_at(F.array(*map(F.lit, names)), (F.col("id") % 3 + 1).cast("int"))
    rows = numbered(spark, queue)
    report = schedule(rows, broker=url, job_id="j")
    assert (report.accepted, report.queues) == (COUNT, dict.fromkeys(names, COUNT // 3))
    again = schedule(numbered(spark, queue, 0, COUNT + 30), broker=url, job_id="j")
    assert (again.accepted, again.already) == (30, COUNT)
    assert job_report("j", broker=url) == again

    found = backlog(spark, broker=url)
    ids = {(row.queue, row.id) for row in found.select("queue", "id").collect()}
    assert ids == {(names[n % 3], f"{n}") for n in range(COUNT + 30)}
    kept = backup(spark, str(tmp_path / "backup"), broker=url)

    some = numbered(spark, queue, 0, 30).select("id", "queue")
    moved = reschedule(some.withColumn("countdown", F.lit(3600)), broker=url)
    assert (moved.accepted, moved.already) == (30, 0)
    gone = cancel(some, broker=url)
    assert (gone.accepted, gone.queues) == (30, dict.fromkeys(names, 10))
    restored = restore(read_backup(spark, str(tmp_path / "backup")), broker=url)
    assert (restored.accepted, restored.already) == (30, COUNT)

    each = (COUNT + 30) // 3
    told = {"scheduled": each + 10, "rescheduled": 10, "cancelled": 10}
    expected = {(name, event): count for name in names for event, count in told.items()}
    assert archived(spark, url, tmp_path / "events") == expected

    shown = [found._jdf.queryExecution().toString(), str(kept), *capfd.readouterr()]
    assert [text for text in shown if f":{PASSWORD}@" in text] == []


def test_a_worker_runs_what_was_scheduled(
    spark: SparkSession, cluster: Cluster, url: str, tmp_path: Path
) -> None:
    """The queue is spread over shards, and they over the nodes."""
    spread = {"broker": url, "transport_options": {"delayed_shards": {"celery": SHARDS}}}
    assert schedule(numbered(spark, F.lit("celery")), **spread).accepted == COUNT
    used = {cluster.master_of(shard_name("celery", n)).pid for n in range(SHARDS)}
    assert len(used) == 3
    for master in cluster.masters():
        with cluster.client(master) as client:
            assert len(client.keys("{*}:messages")) > 0

    waiting = backlog(spark, columns=["id", "queue"], **spread)
    assert waiting.distinct().count() == COUNT
    moved = reschedule(waiting.withColumn("countdown", F.lit(0)), **spread)
    assert (moved.accepted, moved.queues) == (COUNT, {"celery": COUNT})
    ledger = Ledger(tmp_path / "ledger")
    options = spread["transport_options"]
    with Worker(Settings(url, transport_options=options, ledger=str(ledger.path)), tmp_path):
        ledger.wait_for(COUNT)
    assert sorted(each["args"] for each in ledger.entries()) == sorted([n] for n in range(COUNT))
    assert set(ledger.runs().values()) == {1}
    assert archived(spark, url, tmp_path / "events")["celery", "delivered"] == COUNT


def test_after_a_failover(spark: SparkSession, cluster: Cluster, url: str) -> None:
    """Spark's processes keep connections to the nodes that there were."""
    rows, old = numbered(spark, F.lit("celery")), cluster.master_of("celery")
    assert schedule(rows, broker=url, job_id="j").accepted == COUNT
    old.stop()
    try:
        cluster.wait_for_failover("celery", old)
        again = schedule(numbered(spark, F.lit("celery"), 0, 2 * COUNT), broker=url, job_id="j")
        assert (again.accepted, again.already) == (COUNT, COUNT)
        assert backlog(spark, columns=["id"], broker=url).distinct().count() == 2 * COUNT
    finally:
        cluster.heal()


def test_a_task_that_runs_again_waits_for_a_failover(
    cluster: Cluster, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = BrokerOptions.parse({"broker": url})
    context = SimpleNamespace(attemptNumber=lambda: 1)
    monkeypatch.setattr(connect, "_kept", {})
    monkeypatch.setattr(TaskContext, "get", lambda: context)
    with connect.connected(options) as delayed:
        delayed.store.schedule("celery", [entry("a", 4_102_444_800_000)])
    old = cluster.master_of("celery")
    old.stop()
    try:
        with connect.connected(options) as again:
            assert again.store.size("celery").delayed == 1
            again.close()
        assert cluster.master_of("celery") is not old
    finally:
        cluster.heal()


@pytest.mark.parametrize("messages", [True, False])
def test_a_slot_that_moves_while_it_is_read(messages: bool, cluster: Cluster, url: str) -> None:
    source = cluster.master_of("q")
    target = next(each for each in cluster.masters() if each is not source)
    app = Celery("tests", broker=url, set_as_current=False)
    with closing(Delayed(app)) as delayed, ThreadPoolExecutor(1) as pool:
        delayed.store.now = "1000"
        delayed.store.schedule("q", [entry(f"{n}", 2000 + n) for n in range(200)])
        pages = iter(Pager(delayed.store, Span("q"), 10, reads_messages=messages))
        found = [place.member for place in next(pages).places]
        assert 0 < len(found) < 200

        def when_half() -> None:
            """Its keys are there already, its slot is not."""
            with cluster.client(source) as client:
                client.config_resetstat()
                rest.append(pool.submit(lambda: [p.member for page in pages for p in page.places]))
                wait_until(lambda: "errorstat_ASK" in client.info("errorstats"), "it is sent on")

        rest: list[Future[list[bytes]]] = []
        cluster.move("q", target, on_half=when_half)
        found += rest[0].result(30)
    app.close()
    assert found == [b"%d" % n for n in range(200)]
