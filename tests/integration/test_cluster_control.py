"""Who looks after a Cluster's queues: the same calls as with one server, over all nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from celery_ext import Delayed, Query
from celery_ext.http.auth.tokens import Tokens
from kombu_delayed.errors import UrlError
from kombu_delayed.inspection.backlog import queues as queues_with_messages
from kombu_delayed.inspection.doctor import Doctor, examine_server
from kombu_delayed.migrate import Migration
from tests.kit.clusters import Cluster
from tests.kit.http import api_client
from tests.kit.http import make_app as make_shop
from tests.kit.tasks_app import Settings, make_app

SHARDED = {"delayed_shards": {"mail": 6}}


@pytest.fixture
def app(cluster: Cluster) -> Iterator[Celery]:
    settings = Settings(f"delayed+{cluster.url}", transport_options=SHARDED)
    with make_app(settings) as app:
        yield app


@pytest.fixture
def delayed(app: Celery) -> Iterator[Delayed]:
    delayed = Delayed(app)
    yield delayed
    delayed.close()


def schedule(app: Celery, count: int = 12, queue: str = "mail") -> list[str]:
    return [app.send_task("noop", countdown=600 + n, queue=queue).id for n in range(count)]


def test_tasks_of_all_nodes(app: Celery, delayed: Delayed) -> None:
    ids = schedule(app)
    schedule(app, 3, "other")
    assert {"mail", "other"} <= {*delayed.queues()}
    shards = delayed.shards("mail")
    assert len({delayed.store.node_of(shard) for shard in shards}) == 3
    assert queues_with_messages(delayed.store) <= {*shards, "other"}
    assert {info.id for info in delayed.find(queue="mail")} == {*ids}
    assert delayed.counts()["mail"].delayed == 12
    assert delayed.forecast(queue="mail").total == 12
    assert delayed.get(ids[0]).queue == "mail"
    assert {event.id for event in delayed.events(queue="mail")} == {*ids}
    assert delayed.consumers() == []
    assert examine_server(delayed.store) is None
    assert [fault for each in shards for fault in Doctor(delayed.store, each).examine()] == []
    assert delayed.cancel(ids[0])
    assert delayed.reschedule(ids[1], countdown=1200)
    assert delayed.run_now(ids[2])
    assert delayed.cancel_many(Query(queue="mail")).changed == 10


def test_bulk_and_backup(app: Celery, delayed: Delayed, cluster: Cluster, tmp_path: Path) -> None:
    rows = [app.signature("noop", countdown=3600, queue="mail") for _ in range(60)]
    assert delayed.schedule_many(rows).delayed == 60
    assert delayed.backup(tmp_path / "backup").messages == 60
    cluster.flush()
    assert delayed.restore(tmp_path / "backup").messages == 60
    assert delayed.counts()["mail"].delayed == 60


def test_the_http_api(cluster: Cluster, delayed: Delayed) -> None:
    tokens = Tokens(delayed)
    token, text = tokens.create("till", ["read"])
    assert tokens.list() == [token] == [tokens.look(text)]
    with make_shop(cluster.url) as shop, api_client(shop) as api:
        assert api.get("/healthz").status_code == 200
        for queue in cluster.queues_apart():
            task = {"task": "till.charge", "queue": queue, "delay": "1h"}
            assert api.put(f"/v1/tasks/{queue}", json=task).status_code == 201
            assert api.patch(f"/v1/tasks/{queue}", json={"delay": "2h"}).status_code == 200
            assert api.get(f"/v1/tasks/{queue}").json()["status"] == "scheduled"
        payload = {"topics": "mail", "callbackFuncName": "send", "args": []}
        sent = {"id": 1, "namespace": "n", "delay": 0, "score": 1, "payload": payload}
        assert api.put("/v1/delayedqueue", json=sent).status_code == 201
        (got,) = api.get("/v1/delayedqueue/poll?namespace=n&topics=mail").json()["tasks"]
        assert api.post("/v1/delayedqueue/ack", json={"acks": [got["ack"]]}).json()["acked"] == 1


def test_nothing_to_migrate(app: Celery) -> None:
    with app.connection_for_write() as connection, pytest.raises(UrlError, match="no stock"):
        Migration(connection.default_channel)
