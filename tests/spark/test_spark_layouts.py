"""Servers, shards, Sentinels and a Cluster, with a user limited as in docs/operations.md."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from pyspark.sql import SparkSession

from celery_ext import Delayed
from celery_ext.spark import backlog, schedule
from celery_ext.spark.backup.transfer import read_backup, restore
from celery_ext.spark.source.paging import Pager, Span
from kombu_delayed.store.calls.shards import shard_name
from tests.kit.clusters import Cluster, start_cluster
from tests.kit.limited import OPTIONS, PASSWORD, USER, limited
from tests.kit.sentinels import SENTINEL_PASSWORD, Group, start_group
from tests.kit.servers import Server, available_kinds
from tests.kit.spark import COUNT, counts, numbered, there_and_back
from tests.kit.state import entry
from tests.kit.wait import wait_until

pytestmark = pytest.mark.thorough


def over(shards: int) -> dict[str, Any]:
    """Transport options for this many shards."""
    return {**OPTIONS, "delayed_shards": {"celery": shards}}


def used(client: redis.Redis) -> int:
    """The number of shards with messages."""
    return len(client.keys("*}:messages"))


def test_a_server(spark: SparkSession, server: Server, client: redis.Redis, tmp_path: Path) -> None:
    """A queue that is spread over shards is one queue, even for readers without shards."""
    url = f"delayed+redis://{USER}:{PASSWORD}@127.0.0.1:{server.port}/0"
    with limited([client]):
        there_and_back(spark, tmp_path, lambda: None, broker=url, transport_options=over(3))
        assert backlog(spark, broker=url, transport_options=OPTIONS).count() == COUNT + 20
        assert used(client) == 3
        client.flushdb()
        saved = read_backup(spark, str(tmp_path / "backup"))
        report = restore(saved, broker=url, transport_options=over(5))
        assert (report.accepted, report.queues) == (COUNT, {"celery": COUNT})
        assert used(client) == 5


def test_a_job_keeps_its_shards(spark: SparkSession, url: str, client: redis.Redis) -> None:
    """The ledger is per shard: with other shards, rows that have run meanwhile would run again."""
    rows = numbered(spark, COUNT)
    for shards, report in ((2, (COUNT, 0, 0)), (5, (0, COUNT, 0))):
        found = schedule(rows, job_id="j", broker=url, transport_options=over(shards))
        assert counts(found) == report
        for key in client.keys("*"):
            if key.endswith((b"}:messages", b"}:partitions", b"}:wake")):
                client.delete(key)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with start_group(available_kinds()[0], tmp_path_factory.mktemp("sentinel")) as group:
        yield group


@pytest.fixture
def broker(group: Group) -> dict[str, Any]:
    hosts = group.url.partition("@")[2]
    options = {**OPTIONS, **group.options}
    return {
        "broker": f"delayed+sentinel://{USER}:{PASSWORD}@{hosts}",
        "transport_options": options,
    }


def test_sentinels_with_a_failover(
    spark: SparkSession,
    group: Group,
    broker: dict[str, Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(group.client(server)) for server in group.servers]
        stack.enter_context(limited(clients))
        shown = there_and_back(spark, tmp_path, group.fail_over, **broker)
    for text in (shown, *capfd.readouterr()):
        assert f":{PASSWORD}@" not in text
        assert SENTINEL_PASSWORD not in text


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
def cluster_url(cluster: Cluster) -> str:
    return f"delayed+{cluster.url}"


def test_a_cluster(
    spark: SparkSession, cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The queue is spread over shards, and the shards over the nodes."""
    hosts = cluster.url.partition("@")[2]
    broker = f"delayed+rediscluster://{USER}:{PASSWORD}@{hosts}"
    options = {**OPTIONS, "delayed_shards": {"celery": SHARDS}}
    with limited(cluster.client(server) for server in cluster.servers):
        shown = there_and_back(
            spark, tmp_path, lambda: None, broker=broker, transport_options=options
        )
    used = {cluster.master_of(shard_name("celery", n)).pid for n in range(SHARDS)}
    assert len(used) == 3
    assert [text for text in (shown, *capfd.readouterr()) if f":{PASSWORD}@" in text] == []


def test_after_a_failover(spark: SparkSession, cluster: Cluster, cluster_url: str) -> None:
    """Spark's processes keep connections to the nodes they knew before."""
    old = cluster.master_of("celery")
    assert schedule(numbered(spark, COUNT), broker=cluster_url, job_id="j").accepted == COUNT
    old.stop()
    try:
        cluster.wait_for_failover("celery", old)
        again = schedule(numbered(spark, 2 * COUNT), broker=cluster_url, job_id="j")
        assert counts(again) == (COUNT, COUNT, 0)
        assert backlog(spark, columns=["id"], broker=cluster_url).distinct().count() == 2 * COUNT
    finally:
        cluster.heal()


@pytest.mark.parametrize("messages", [True, False])
def test_a_slot_that_moves_while_it_is_read(
    messages: bool, cluster: Cluster, cluster_url: str
) -> None:
    source = cluster.master_of("q")
    target = next(each for each in cluster.masters() if each is not source)
    app = Celery("tests", broker=cluster_url, set_as_current=False)
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
