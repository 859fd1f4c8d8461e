"""Slots come back when tasks end, however they end, and not when their worker reconnects."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any
from unittest.mock import Mock

import pytest
import redis
from celery.contrib.testing.worker import start_worker
from kombu import Queue

from celery_ext import install
from celery_ext.policies import Limit
from kombu_delayed.consumer import outliving_tasks
from kombu_delayed.consumer.lease.lease import Lease
from kombu_delayed.consumer.outbox import Outbox
from kombu_delayed.consumer.outliving_tasks import Remaining
from kombu_delayed.inspection.gate_usage import slots_in_use, waiting_count
from kombu_delayed.message.ticket import Gate, LimitNumbers, Ticket, Use, put_ticket
from kombu_delayed.store.leases import Leases
from kombu_delayed.store.store import Entry, Store
from tests.kit.inbox import Connect, Inbox
from tests.kit.ledger import Ledger
from tests.kit.limits_app import make_limited_app
from tests.kit.proxy import Proxy
from tests.kit.servers import Server
from tests.kit.state import message
from tests.kit.tasks_app import Settings, make_app
from tests.kit.wait import wait_until
from tests.kit.workers import Worker

SLOTS = "{celery}:gate:slots"
QUIET: dict[str, Any] = {"perform_ping_check": False}


@pytest.mark.parametrize("acks_late", [False, True])
def test_a_task_that_runs_on_keeps_its_slot(
    proxy: Proxy, store: Store, client: redis.Redis, acks_late: bool
) -> None:
    options = {
        "delayed_policies": {"celery": [Limit(concurrency=1)]},
        "delayed_reconnect_seconds": 0,
        "delayed_lease_seconds": 60,
    }
    url = f"delayed+redis://127.0.0.1:{proxy.port}/0"
    app = make_app(Settings(url, None, options))
    begun: list[str | None] = []
    may_end = threading.Event()

    @app.task(bind=True, name="waits", shared=False, acks_late=acks_late)
    def waits(self: object, name: str) -> None:
        begun.append(name)
        may_end.wait(30)

    def consumers() -> set[str]:
        return {name for name, _, _ in store.leases.consumers("celery")}

    with app, ExitStack() as stack:
        stack.callback(install(app).close)
        for name in ("first", "second"):
            waits.delay(name)
        stack.enter_context(start_worker(app, pool="threads", concurrency=4, **QUIET))
        stack.callback(may_end.set)
        wait_until(lambda: begun == ["first"], "it runs")
        (old,) = consumers()
        unacked = f"{{celery}}:unacked:{old}"
        wait_until(lambda: client.hlen(unacked) == acks_late, "an early ack was heard")
        wait_until(
            lambda: any("b" in each["flags"] for each in client.client_list()),
            "it waits for more, and so has a connection to lose",
        )
        proxy.cut()
        proxy.heal()
        wait_until(lambda: len(consumers()) == 2, "it consumes again", 30)
        wait_until(lambda: waiting_count(store, "celery") == 1 + acks_late, "the others wait", 30)
        assert client.hgetall(SLOTS) == {b"queue:": b"1"}
        assert client.hlen(f"{{celery}}:gate:slots:{old}") == 1
        assert begun == ["first"]
        may_end.set()
        wait_until(lambda: len(begun) == 2 + acks_late, "the others run", 30)
        wait_until(lambda: not client.exists(SLOTS), "all slots are free")
        wait_until(lambda: old not in consumers(), "the old one is gone")


def test_its_lease_lasts_until_the_last_task_has_ended(store: Store) -> None:
    store.now = "1000"
    gate = Gate("v", (LimitNumbers("all", 3),))
    store.publish("q", [gated(id) for id in "abc"])
    lease = Lease(store, 30)
    store.deliver("q", lease.consumer, 2, 1, lease_ms=lease.ms, gate=gate)
    running = [1, 2]
    remaining = Remaining(lease, ["q"], Outbox(), lambda queue: list(running))
    for now_ms in (1_000, 21_000, 41_000):
        store.now = str(now_ms)
        assert remaining.step() == 10
    assert slots_in_use(store, "q") == {"all:": 2}
    assert store.leases.consumers("q") == [(lease.consumer, 30_000, 0)]
    running.remove(1)
    remaining.step()
    assert slots_in_use(store, "q") == {"all:": 1}
    running.clear()
    remaining.step()
    assert (slots_in_use(store, "q"), store.leases.consumers("q")) == ({}, [])


def test_what_could_not_be_given_back_is_left_to_others_in_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish("q", [Entry("a", 0, message("a"))])
    lease = Lease(store, 30)
    assert store.deliver("q", lease.consumer, 1, 1, lease_ms=lease.ms)
    remaining, other = (Remaining(lease, ["q"], Outbox(), lambda queue: ()) for _ in range(2))
    with monkeypatch.context() as away:
        away.setattr(Leases, "leave", Mock(side_effect=redis.ConnectionError("away")))
        with pytest.raises(redis.ConnectionError):
            remaining.step()
        away.setattr(outliving_tasks, "monotonic", lambda: monotonic() + 31)
        assert other.step() == 10  # an expired lease cannot be given back
    assert store.leases.consumers("q") != []
    remaining.step()
    assert (store.leases.consumers("q"), store.run("LLEN", "q")) == ([], 1)


def gated(id: str) -> Entry:
    text = put_ticket(message(id), Ticket(uses=(Use("all"),)).text("v", id))
    return Entry(id, 0, text)


@pytest.mark.thorough
def test_slots_come_back_from_processes(
    server: Server, client: redis.Redis, ledger: Ledger, tmp_path: Path
) -> None:
    def begun() -> list[str]:
        return [entry["id"] for entry in ledger.entries() if entry["at"] == "begin"]

    results = f"redis://127.0.0.1:{server.port}/1"
    settings = Settings(f"delayed+{server.url}", results, ledger=str(ledger.path))
    app = make_limited_app(settings)
    hold = app.tasks["hold"]
    ways = {"done": (0.05, ""), "fail": (0.05, "fail"), "kill": (0.05, "kill")}
    for id in ways:
        hold.apply_async(ways[id], task_id=id)
    hold.apply_async((60,), task_id="hard", time_limit=1)
    hold.apply_async((60,), task_id="terminated")
    hold.apply_async((0.05,), task_id="revoked", expires=-1)
    hold.apply_async((0.05,), task_id="last")
    with Worker(settings, tmp_path, module="tests.kit.limits_app", pool="prefork", concurrency=3):
        wait_until(lambda: "terminated" in begun(), "it runs", 30)
        assert client.hgetall(SLOTS) == {b"queue:": b"1"}
        app.control.revoke("terminated", terminate=True, signal="KILL")
        wait_until(lambda: "last" in begun(), "the last one runs", 30)
        wait_until(lambda: not client.exists(SLOTS), "all slots are free")
    expected = ["done", "fail", "kill", "hard", "terminated", "last"]
    assert [id for id in begun() if id in expected] == expected
    entries = ledger.entries()
    assert [entry["id"] for entry in entries if entry["at"] == "end"] == ["done", "fail", "last"]


def test_a_program_that_recovers_its_messages_gets_them_again(
    connect: Connect, client: redis.Redis
) -> None:
    connection = connect(delayed_policies={"mail": [Limit(concurrency=1)]})
    inbox = Inbox(connection, Queue("mail"), prefetch_count=3, ack=False)
    for body in "ab":
        connection.Producer().publish(body, routing_key="mail")
    inbox.receive(1)
    for count in (2, 3):
        inbox.consumer.recover(requeue=True)
        assert inbox.receive(count) == ["a"] * count
    inbox.messages[-1].ack()
    assert inbox.receive(4)[-1] == "b"
    assert client.hgetall("{mail}:gate:slots") == {b"queue:": b"1"}
