"""Compressed queues on Clusters, behind Sentinels, and with workers of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from celery_ext import Delayed
from celery_ext.tasks.body import read_body
from kombu_delayed.inspection.doctor import examine_queues
from kombu_delayed.message import compressing, zstd
from tests.kit.clusters import Cluster
from tests.kit.compressed import dictionary, entries, make_large
from tests.kit.http import api_client
from tests.kit.ledger import Ledger
from tests.kit.pages import Visitor
from tests.kit.previous import install_previous
from tests.kit.sentinels import Group
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

FAR_MS = 4_000_000_000_000
#: The message that each queue has from the beginning.
FIRST = entries(1, FAR_MS, seed=2)[0]
OPTIONS = {"delayed_compression": "zstd"}

Open = Callable[[Settings], tuple[Celery, Delayed]]


@pytest.fixture
def open_app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """An app whose queue `celery` is compressed in each of its shards."""
    monkeypatch.setattr(zstd, "train", lambda samples: dictionary())
    monkeypatch.setattr(compressing, "_codecs", {})
    with ExitStack() as stack:

        def start(settings: Settings) -> tuple[Celery, Delayed]:
            app = stack.enter_context(make_app(settings))
            delayed = stack.enter_context(closing(Delayed(app)))
            for shard in delayed.shards("celery"):
                make_large(delayed.store, shard, FAR_MS)
            return app, delayed

        yield start


def send(app: Celery, count: int) -> list[str]:
    return [app.send_task("record", (n, "order" * 20), countdown=3600).id for n in range(count)]


def compressed_ids(delayed: Delayed) -> set[str]:
    """The ids of the tasks that are compressed in the backlog."""
    return {
        waiting.id
        for shard in delayed.shards("celery")
        for page in delayed.backlog(shard).pages()
        for waiting in page
        if waiting.compressed
    }


def args(app: Celery, delayed: Delayed, id: str) -> Any:
    return (read_body(app, delayed.get(id)) or ())[0]


def settings_of(cluster: Cluster, ledger: Ledger) -> Settings:
    options = {**OPTIONS, "delayed_shards": {"celery": 3}}
    return Settings(f"delayed+{cluster.url}", None, options, str(ledger.path))


def test_a_cluster(cluster: Cluster, open_app: Open, ledger: Ledger, tmp_path: Path) -> None:
    """Each shard has a dictionary of its own, where its messages are."""
    settings = settings_of(cluster, ledger)
    app, delayed = open_app(settings)
    ids = send(app, 24)
    compressed = compressed_ids(delayed)
    assert len(compressed & {*ids}) >= 24 - 3, "all but the first one of each shard"
    assert {info.id for info in delayed.find(task="rec*")} == {*ids}
    one, two, three, *rest = [id for id in ids if id in compressed]
    assert args(app, delayed, one)[1] == "order" * 20
    assert delayed.change(two, args=[7])
    assert delayed.cancel(three)
    before = {info.message for info in delayed.find()}
    assert len(before) == 23 + 1
    assert delayed.backup(tmp_path / "all").messages == 23 + 3, "the first one is in each shard"
    with Worker(settings, tmp_path):
        assert {*map(delayed.run_now, [one, two, *rest])} == {True}
        ledger.wait_for_all([one, two, *rest])
    cluster.flush()
    assert delayed.restore(tmp_path / "all").messages == len(before)
    assert {info.message for info in delayed.find()} == before


def test_a_slot_of_a_cluster_moves_with_its_dictionary(
    cluster: Cluster, open_app: Open, ledger: Ledger
) -> None:
    app, delayed = open_app(settings_of(cluster, ledger))
    ids = send(app, 12)
    (shard, *_) = delayed.shards("celery")
    before = {info.id: info.message for info in delayed.find()}
    key = delayed.store.keys(shard).dictionaries
    cluster.move(
        key, next(each for each in cluster.masters() if each is not cluster.master_of(key))
    )
    compressing._codecs.clear()
    assert {info.id: info.message for info in delayed.find()} == before
    ids += send(app, 12)
    assert len(compressed_ids(delayed) & {*ids}) >= len(ids) - 3
    found = examine_queues(delayed.store, delayed.shards("celery"))
    assert not [each for each in found if each.is_wrong]


@pytest.mark.thorough
@pytest.mark.crash
def test_a_master_behind_sentinels_is_killed(
    group: Group, open_app: Open, ledger: Ledger, tmp_path: Path
) -> None:
    options = {**group.options, **OPTIONS, "delayed_replicas_to_wait": 1}
    settings = Settings(f"delayed+{group.url}", None, options, str(ledger.path))
    app, delayed = open_app(settings)
    ids = send(app, 12)
    assert {*ids[1:]} <= compressed_ids(delayed)
    before = {info.id: info.message for info in delayed.find()}
    with group.client() as client:
        assert client.wait(2, 30_000) == 2
    with Worker(settings, tmp_path) as worker:
        old = group.kill_master()
        group.wait_for_failover(old)
        compressing._codecs.clear()
        wait_until(lambda: _found(delayed) == before, "the next master has all of it", 60)
        assert {*map(delayed.run_now, ids)} == {True}
        ledger.wait_for_all(ids)
        assert "lost" not in worker.log
    more = send(app, 3)
    assert {*more} <= compressed_ids(delayed), "it has the dictionary, too"


def _found(delayed: Delayed) -> dict[str, bytes]:
    try:
        return {info.id: info.message for info in delayed.find()}
    except redis.RedisError:
        return {}


@pytest.mark.thorough
@pytest.mark.parametrize("pool", ["gevent", "eventlet", "threads", "prefork"])
def test_pools_of_workers(
    server: Server, open_app: Open, ledger: Ledger, tmp_path: Path, pool: str
) -> None:
    """Their tasks send tasks, which are compressed as well."""
    settings = Settings(f"delayed+{server.url}", None, OPTIONS, str(ledger.path))
    app, delayed = open_app(settings)
    ids = send(app, 8)
    assert {*ids[1:]} <= compressed_ids(delayed)
    with Worker(settings, tmp_path, pool=pool, concurrency=4) as worker:
        assert {*map(delayed.run_now, ids)} == {True}
        ledger.wait_for_all(ids)
        assert "Traceback" not in worker.log


@pytest.mark.thorough
def test_a_worker_of_0_1_0_that_is_started_later(
    server: Server, open_app: Open, ledger: Ledger, tmp_path: Path, client: redis.Redis
) -> None:
    """It buries messages it cannot read, and none is lost."""
    settings = Settings(f"delayed+{server.url}", None, {}, str(ledger.path))
    app, delayed = open_app(Settings(settings.broker_url, None, OPTIONS, settings.ledger))
    ids = send(app, 4)
    compressed = compressed_ids(delayed) & {*ids}
    assert len(compressed) >= 3
    assert {*map(delayed.run_now, ids)} == {True}
    with install_previous().worker(settings, tmp_path, name="old"):
        wait_until(lambda: client.zcard("{celery}:dead") == len(compressed), "they are buried")
    letters = {each.letter.id: each.info for each in delayed.dead.list()}
    assert {each.headers["id"] for each in letters.values()} == compressed
    assert {(read_body(app, each) or ())[0][1] for each in letters.values()} == {"order" * 20}
    with Worker(settings, tmp_path, name="new"):
        assert delayed.dead.replay(letters) == len(compressed)
        ledger.wait_for_all(ids)


def test_a_dashboard_shows_it(server: Server, open_app: Open, client: redis.Redis) -> None:
    app, delayed = open_app(Settings(f"delayed+{server.url}", None, OPTIONS))
    _, id, other = send(app, 3)
    with api_client(app) as api, Visitor(api) as visitor:
        assert "orderorder" in visitor.get(f"/task?id={id}").text
        assert f"/task?id={other}" in "".join(visitor.get("/backlog?task=record").links())
        found = api.get("/v1/tasks", params={"task": "record"}).json()["tasks"]
        assert {each["id"]: each["args"][:4] for each in found}[other] == "(2, "
        assert api.patch(f"/v1/tasks/{id}", json={"args": [7]}).status_code == 200
        assert args(app, delayed, id) == [7]


def test_a_broker_that_moves_to_the_next_server(
    server: Server, open_app: Open, client: redis.Redis
) -> None:
    app, delayed = open_app(Settings(f"delayed+{server.url}", None, OPTIONS))
    ids = send(app, 3)
    before = {info.id: info.message for info in delayed.find()}
    saved = {key: client.dump(key) for key in client.scan_iter()}
    client.flushall()
    compressing._codecs.clear()
    for key, text in saved.items():
        client.restore(key, 0, text)
    assert {info.id: info.message for info in delayed.find()} == before
    assert {*ids} < before.keys()
