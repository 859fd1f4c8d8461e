"""One queue whose shards are on all nodes of a Cluster: spread evenly, and looked after as one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from celery import Celery
from kombu import Queue
from redis.crc import key_slot
from redis.exceptions import ResponseError

from celery_ext import Delayed, Query
from celery_ext.control.changes.revoked import Revoked
from celery_ext.control.unique import AlreadyDelayed, unique_headers
from celery_ext.http.auth.tokens import Tokens
from kombu_delayed.errors import OptionError, UrlError
from kombu_delayed.inspection.backlog import queues as queues_with_messages
from kombu_delayed.inspection.doctor import examine_queues, examine_server
from kombu_delayed.migrate import Migration
from kombu_delayed.store.calls.shard_placement import hash_tag
from kombu_delayed.store.calls.shards import shard_name
from kombu_delayed.store.ledgers import Job, LedgerStore
from kombu_delayed.store.store import Entry
from tests.kit.clusters import Cluster
from tests.kit.http import api_client
from tests.kit.http import make_app as make_shop
from tests.kit.inbox import Connect, Inbox
from tests.kit.mail import MAIL
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until

pytestmark = pytest.mark.thorough

SHARDS = 12


@pytest.fixture
def app(cluster: Cluster) -> Iterator[Celery]:
    options = {"delayed_shards": {"mail": SHARDS}}
    with make_app(Settings(f"delayed+{cluster.url}", transport_options=options)) as app:
        yield app


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
    assert examine_queues(delayed.store, shards) == []
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


def test_consumers_learn_of_the_shards_of_a_job(
    app: Celery, delayed: Delayed, connect_cluster: Connect
) -> None:
    job = LedgerStore(delayed.store, Job("job", "run", 60))
    entries = [Entry(f"{n}", 0, "{}", f"+{n + 600_000}") for n in range(60)]
    for entry in entries:
        job.schedule(job.shards.home("mail", entry.id), [entry])
    store = connect_cluster().default_channel.store  # without the option
    assert sum(map(store.delayed_count, store.shards.all("mail"))) == 60


def bury(delayed: Delayed, ids: list[str]) -> None:
    """Bury messages as a worker that rejects them."""
    store = delayed.store
    for shard in delayed.shards("mail"):
        found = store.deliver(shard, "C", 100, 1, lease_ms=60_000)
        assert found is not None
        there = [json.loads(record[1:])["headers"]["id"] for record in found.records]
        store.bury(shard, "C", [(tag, id, "because", b"") for tag, id in enumerate(there, 1)])
    assert delayed.counts()["mail"].dead == len(ids)


def test_messages_are_spread_evenly(app: Celery, delayed: Delayed) -> None:
    rows = [app.signature("noop", countdown=3600, queue="mail") for _ in range(12_000)]
    assert delayed.schedule_many(rows).delayed == 12_000
    shards, messages = Counter[str](), Counter[str]()
    by_shard = delayed.metrics_by_shard("mail")["mail"]
    for shard, found in zip(delayed.shards("mail"), by_shard, strict=True):
        node = str(delayed.store.node_of(shard))
        shards[node] += 1
        messages[node] += found.delayed
    assert [*shards.values()] == [4, 4, 4]
    assert messages.total() == 12_000
    assert all(abs(count - 4_000) <= 400 for count in messages.values())
    assert queues_with_messages(delayed.store) == {*delayed.shards("mail")}
    assert len(delayed.shards("mail")) == SHARDS
    assert delayed.queues() == ["celery", "mail"]
    assert delayed.metrics()["mail"].due_within_day == 12_000


def test_a_queue_cannot_have_the_keys_of_a_shard(connect_cluster: Connect) -> None:
    name = hash_tag(shard_name("mail", 1))
    with pytest.raises(OptionError, match=r"a shard of queue 'mail' has keys of that name"):
        Queue(name)(connect_cluster().default_channel).declare()


def test_dead_letters(app: Celery, delayed: Delayed) -> None:
    ids = [app.send_task("noop", queue="mail").id for _ in range(60)]
    bury(delayed, ids)
    dead = delayed.dead
    assert sorted(each.letter.id for each in dead.list("mail")) == sorted(ids)
    shown = dead.show(ids[0])
    assert shown is not None
    assert (shown.info.queue, shown.letter.reason) == ("mail", "because")
    assert dead.replay(ids[:10]) == 10
    assert dead.purge(ids[10:20], "mail") == 10
    assert dead.replay(queue="mail") == 40
    assert delayed.counts()["mail"].ready == 50
    bury(delayed, ids[:10] + ids[20:])
    assert dead.purge() == 50


@pytest.mark.parametrize("conflict", ["refuse", "replace", "debounce"])
def test_unique_tasks(conflict: str, app: Celery, delayed: Delayed) -> None:
    """They work on every node that their key may be on."""
    for n in range(SHARDS):
        options = {"headers": unique_headers(f"user {n}", conflict), "queue": "mail"}
        first = app.send_task("noop", countdown=600, **options)
        expected = first.id
        if conflict == "refuse":
            with pytest.raises(AlreadyDelayed) as caught:
                app.send_task("noop", countdown=900, **options)
            assert caught.value.task_id == first.id
        else:
            second = app.send_task("noop", countdown=900, **options)
            expected = first.id if conflict == "debounce" else second.id
        found = delayed.get(expected)
        assert found is not None
        assert found.remaining is not None
        assert (found.remaining > timedelta(seconds=700)) == (conflict != "refuse")
    assert delayed.counts()["mail"].delayed == SHARDS


def test_a_slot_that_the_servers_move_at_once(connect_cluster: Connect, cluster: Cluster) -> None:
    """It moves while a consumer waits there, with messages ready, held and delayed."""
    connection = connect_cluster(delayed_shards={"mail": 3})
    inbox = Inbox(connection, MAIL)
    inbox.drain(0.05)
    shard = hash_tag(shard_name("mail", 1))
    home = cluster.master_of(f"{{{shard}}}")
    away = next(master for master in cluster.masters() if master is not home)
    producer = connection.Producer(exchange=MAIL.exchange, routing_key="mail")
    sent = 0
    for target in (away, home):
        for _ in range(60):
            producer.publish(sent, headers={"x-delay": 300 if sent % 2 else 0}, declare=[MAIL])
            sent += 1
        migrate_slot(cluster, f"{{{shard}}}", target)
        producer.publish(sent, declare=[MAIL])
        sent += 1
        assert sorted(inbox.receive(sent, 10)) == [*range(sent)]
    inbox.drain(0.1)
    assert len(inbox.messages) == sent


def migrate_slot(cluster: Cluster, key: str, target: Server) -> None:
    """Move a slot; skips the test if the servers cannot do it. Valkey 9 can."""
    slot = key_slot(key.encode())
    with cluster.client(cluster.master_of(key)) as client:
        where = "SLOTSRANGE", slot, slot, "NODE", cluster.id_of(target)
        try:
            client.execute_command("CLUSTER MIGRATESLOTS", *where)
        except ResponseError as error:
            if "unknown subcommand" not in str(error).lower():
                raise
            pytest.skip(f"the server has no CLUSTER MIGRATESLOTS: {error}")
    wait_until(lambda: cluster.master_of(key) is target, f"{key!r} has moved", 20)
    wait_until(cluster.is_whole, "all nodes know", 20)


def test_ready_tasks_in_all_shards(app: Celery, delayed: Delayed) -> None:
    ids = {f"t{n}" for n in range(30)}
    for id in ids:
        app.send_task("record", task_id=id, queue="mail")
    assert {info.id for info in delayed.find(state="ready")} == ids
    assert delayed.reschedule("t0", countdown=3_600)
    assert delayed.change("t1", args=["changed"])
    assert delayed.run_now("t2")
    assert delayed.cancel("t3")
    assert not delayed.cancel("t3")
    assert delayed.cancel_many(Query(state="ready", queue="mail")).changed == 28
    assert [info.id for info in delayed.find()] == ["t0"]
    remembered = Revoked(delayed)
    remembered.remember(["a", "b"])
    assert remembered.since(0) == ["a", "b"]
