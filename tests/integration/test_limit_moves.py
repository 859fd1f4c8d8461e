"""Messages that wait at a gate are moved, shown and dropped like all other delayed messages."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection, Exchange, Queue

from celery_ext import Query
from celery_ext.policies import Limit
from kombu_delayed import migrate
from kombu_delayed.inspection.gate_usage import waiting_count
from kombu_delayed.migrate import ToDelayed, ToStock
from tests.kit.policed import OpenApp
from tests.kit.servers import Server
from tests.kit.wait import wait_until

IDS = [f"t{n}" for n in range(12)]
HELD, WAITING = IDS[0], IDS[1:]


@pytest.fixture
def app(open_app: OpenApp) -> Celery:
    return open_app(Limit(concurrency=1))


@pytest.fixture
def held(app: Celery) -> Iterator[Any]:
    """A message that has the only slot, while the others of `IDS` wait at the gate."""

    def send(n: int, **options: Any) -> None:
        headers = {"tenant": f"tenant{n % 2}"}
        app.send_task("record", [n], task_id=IDS[n], headers=headers, **options)

    send(0)
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        message = channel.basic_get("celery")
        assert message.headers["id"] == HELD
        for n in range(1, len(IDS)):
            send(n, countdown=0.001 * (n % 3))

        def all_wait() -> bool:
            assert channel.basic_get("celery") is None
            return waiting_count(app.delayed.store, "celery") == len(WAITING)

        wait_until(all_wait, "those with a countdown are due")
        yield message


def rest(app: Celery, held: Any) -> list[str]:
    """The ids of the messages that arrive once the slot is free, in order."""
    found, message = [], held
    while message is not None:
        channel = message.channel
        message.ack()
        message = channel.basic_get("celery")
        found += [message.headers["id"]] if message is not None else []
    return found


def test_found_and_counted_once(app: Celery, held: Any) -> None:
    assert Counter(info.id for info in app.delayed.find(queue="celery")) == Counter(WAITING)
    some = app.delayed.find(queue="celery", tenant="tenant1")
    assert {info.id for info in some} == set(WAITING[::2])
    counts = app.delayed.counts("celery")["celery"]
    assert (counts.delayed + counts.ready, counts.unacked) == (11, 1)
    states = {app.delayed.get(id).state for id in WAITING}
    assert states == {"waiting"}


def test_cancelled_one_by_one_and_together(app: Celery, held: Any, client: redis.Redis) -> None:
    assert app.delayed.cancel("t1")
    assert not app.delayed.cancel("t1")
    report = app.delayed.cancel_many(Query(queue="celery", tenant="tenant0"))
    assert report.changed == 5
    assert Counter(rest(app, held)) == Counter(WAITING[2::2])
    assert client.keys("*gate*") == []


def test_moved_to_another_time_and_to_now(app: Celery, held: Any) -> None:
    assert app.delayed.reschedule("t1", countdown=3_600)
    assert app.delayed.get("t1").state == "delayed"
    assert app.delayed.run_now("t2")
    assert not app.delayed.run_now("gone")
    found = rest(app, held)
    assert Counter(found) == Counter(set(WAITING) - {"t1"})
    assert app.delayed.run_now("t1")
    with app.connection_for_read() as connection:
        assert connection.default_channel.basic_get("celery").headers["id"] == "t1"


@pytest.mark.parametrize("purged", [False, True])
def test_a_backup_has_them_once(app: Celery, held: Any, tmp_path: Path, purged: bool) -> None:
    path = tmp_path / "backup"
    assert app.delayed.backup(path).messages == len(WAITING)
    if purged:
        held.channel.queue_purge("celery")
        assert waiting_count(app.delayed.store, "celery") == 0
    report = app.delayed.restore(path)
    assert report.messages == (len(WAITING) if purged else 0)
    assert Counter(rest(app, held)) == Counter(WAITING)


def test_to_the_stock_transport_and_back(app: Celery, held: Any, server: Server) -> None:
    held.ack()
    held.channel.connection.client.close()
    del held
    gc.collect()
    with migrate.open_channel(server.url) as channel:
        assert ToStock(channel).run().moved >= len(WAITING)
    with Connection(server.url) as stock:
        inbox = stock.default_channel
        found = [inbox.basic_get("celery") for _ in range(len(WAITING) + 1)]
        assert Counter(m.headers["id"] for m in found if m) == Counter(WAITING)
        stock.default_channel.do_restore = False
    with migrate.open_channel(server.url) as channel:
        assert ToDelayed(channel, older_than_seconds=0).run().moved == len(WAITING)
    with app.connection_for_read() as connection:
        first = connection.default_channel.basic_get("celery")
        assert connection.default_channel.basic_get("celery") is None
        assert Counter([first.headers["id"], *rest(app, first)]) == Counter(WAITING)


def test_replayed_dead_letters_wait_like_others(app: Celery, held: Any) -> None:
    channel = held.channel
    held.reject()
    second = channel.basic_get("celery")
    (letter,) = app.delayed.dead.list()
    assert letter.info.id == HELD
    assert app.delayed.dead.replay([letter.info.id]) == 1
    assert channel.basic_get("celery") is None
    assert app.delayed.get(HELD).state == "waiting"
    found = [second.headers["id"], *rest(app, second)]
    assert Counter(found) == Counter(IDS)


def test_a_queue_that_expires_keeps_what_waits(open_app: OpenApp, client: redis.Redis) -> None:
    """A consumer had moved the messages to the gate, and only ready lists expire."""
    queue = Queue("short", Exchange("short"), "short", expires=0.2)
    app = open_app(Limit(concurrency=1), queue="short")
    with app.connection_for_write() as connection:
        for id in IDS[:3]:
            app.send_task("record", [id], task_id=id, queue=queue)
        bound = queue(connection.default_channel)
        first = bound.get()
        assert bound.get() is None
        assert not [key for key in client.keys("*:gate*") if client.pttl(key) != -1]
        wait_until(lambda: not client.exists("short"), "the ready list has expired")
        first.ack()
        assert bound.get().headers["id"] == IDS[1]


def test_replies_do_not_wait_where_tasks_have_limits(
    open_app: OpenApp, client: redis.Redis
) -> None:
    app = open_app()

    @app.task(name="scarce", shared=False, policies=[Limit(concurrency=1)])
    def scarce() -> None: ...

    with app.connection_for_write() as connection:
        queue = connection.SimpleQueue("replies", no_ack=True)
        for n in range(3):
            queue.put({"n": n})
        assert queue.get().payload == {"n": 0}
        assert client.llen("replies") == 2
        assert client.keys("{replies}:gate*") == []
        queue.close()
