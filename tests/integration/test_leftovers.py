"""Queues that expire or auto-delete leave no key behind, however their messages end."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Connection, Exchange, Queue
from kombu.transport import redis as stock

from kombu_delayed import DeadLetters
from kombu_delayed.store.keys import format_version
from kombu_delayed.transport.channel.publishing import lifetimes
from tests.kit.inbox import Connect, Inbox
from tests.kit.servers import Server
from tests.kit.tasks_app import Settings
from tests.kit.wait import wait_until
from tests.kit.workers import ROOT, Worker

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        not hasattr(stock.Channel, "_maybe_update_queues_expire"), reason="new in Kombu 5.6"
    ),
]

#: Queues use the default exchange: Kombu manages bindings, which have a separate expiry.
BRIEF_SECONDS = 0.5


def brief() -> Queue:
    return Queue("brief", Exchange(""), routing_key="brief", expires=BRIEF_SECONDS)


def send(connection: Connection, queue: Queue, *bodies: Any, **headers: Any) -> None:
    for body in bodies:
        connection.Producer().publish(
            body, routing_key=queue.name, headers=headers, declare=[queue]
        )


def keys(client: redis.Redis) -> set[str]:
    """All keys except the version of the format, which belongs to the whole database."""
    return {key.decode() for key in client.keys("*")} - {format_version()}


def everlasting(client: redis.Redis) -> list[str]:
    return [key for key in keys(client) if client.pttl(key) == -1]


def all_expire(client: redis.Redis) -> None:
    """Wait until all keys have expired; notes on the expiry and on dead consumers expire later."""
    assert everlasting(client) == []
    wait_until(
        lambda: all(key == "{brief}:expires" or ":reclaimed:" in key for key in keys(client)),
        "every key has expired",
        60,
    )
    assert client.pttl("{brief}:expires") <= 10_000 + BRIEF_SECONDS * 1_000


@pytest.mark.parametrize("how", ["ack", "requeue", "cancel", "give back"])
def test_however_a_consumer_ends(how: str, connect: Connect, client: redis.Redis) -> None:
    connection, queue = connect(delayed_lease_seconds=1), brief()
    for priority in (0, 3, 6, 9):
        connection.Producer().publish("x", routing_key="brief", priority=priority, declare=[queue])
    inbox = Inbox(connection, queue, prefetch_count=3, ack=False)
    inbox.receive(2)
    if how == "cancel":
        inbox.consumer.cancel()
    elif how != "give back":
        for message in inbox.messages:
            getattr(message, how)()
    connection.close()
    all_expire(client)


def test_what_is_not_yet_due_outlasts_the_queue(connect: Connect, client: redis.Redis) -> None:
    connection, queue = connect(delayed_lease_seconds=1), brief()
    send(connection, queue, "now")
    send(connection, queue, "later", **{"x-delay": 2_500})
    inbox = Inbox(connection, queue, ack=False)
    inbox.receive(1)
    connection.close()
    wait_until(lambda: not client.exists("brief", "{brief}:wake"), "the queue has expired")
    assert Inbox(connect(), queue).receive(1) == ["later"]


def die_with_messages(url: str, way: str) -> None:
    connection = Connection(f"delayed+{url}", transport_options={"delayed_lease_seconds": 1})
    send(connection, brief(), 0, 1)
    if way == "drain":
        Inbox(connection, brief(), ack=False).receive(2)
    else:
        bound = brief()(connection.default_channel)
        assert bound.get()
        assert bound.get()
    os._exit(1)


@pytest.mark.crash
@pytest.mark.parametrize("way", ["drain", "get"])
def test_a_consumer_that_was_killed(server: Server, client: redis.Redis, way: str) -> None:
    process = get_context("spawn").Process(target=die_with_messages, args=(server.url, way))
    process.start()
    process.join()
    assert client.hlen(next(iter(client.keys("*:unacked:*")))) == 2
    all_expire(client)


def test_a_long_task_keeps_its_message(connect: Connect, client: redis.Redis) -> None:
    connection, queue = connect(delayed_lease_seconds=1), brief()
    send(connection, queue, "held")
    inbox = Inbox(connection, queue, ack=False)
    inbox.receive(1)
    (unacked,) = client.keys("*:unacked:*")
    client.pexpire("{brief}:consumers", 2_000)
    client.pexpire(unacked, 2_000)
    # Its thread waits for no messages now, yet its lease is renewed.
    wait_until(
        lambda: min(client.pttl(unacked), client.pttl("{brief}:consumers")) > 2_000,
        "the renewal has made them last",
    )
    inbox.messages[0].requeue()
    connection.close()
    all_expire(client)


def test_a_reply_to_remote_control_that_comes_too_late(
    connect: Connect, client: redis.Redis
) -> None:
    """Nothing on the server records any more that its queue should expire."""
    connect().Producer().publish("pong", routing_key="1f2e.reply.celery.pidbox")
    assert client.llen("1f2e.reply.celery.pidbox") == 1
    assert {key for key in client.keys("*1f2e*") if client.pttl(key) < 0} == set()


SEND_AND_DIE = """
import os, sys
from tests.kit.tasks_app import Settings, make_app
app = make_app(Settings.from_environment())
result = app.send_task("add", (1, 2))
print(result.backend.oid, flush=True)
os._exit(0)
"""


def test_a_result_for_a_client_that_is_gone(
    server: Server, client: redis.Redis, tmp_path: Path
) -> None:
    """A cron job that does not wait for the results of its tasks, with `rpc://`."""
    settings = Settings(f"delayed+{server.url}", "rpc://")
    command = [sys.executable, "-c", SEND_AND_DIE]
    environment = {**os.environ, **settings.environment()}
    oid = subprocess.check_output(command, env=environment, cwd=ROOT, text=True).strip()
    with Worker(settings, tmp_path, pool="prefork", concurrency=1):
        wait_until(lambda: client.llen(oid) == 1, "the result is there")
    assert [key for key in client.keys(f"*{oid}*") if client.pttl(key) == -1] == []


def test_dead_letters_expire_too(connect: Connect, client: redis.Redis) -> None:
    connection, queue = connect(delayed_lease_seconds=1, delayed_dead_seconds=60), brief()
    send(connection, queue, "bad")
    inbox = Inbox(connection, queue, ack=False)
    inbox.receive(1)
    inbox.messages[0].reject()
    wait_until(lambda: client.exists("{brief}:dead"), "it is buried")
    connection.close()
    assert everlasting(client) == []
    replaying = connect()
    assert DeadLetters(replaying, "brief").replay() == 1
    replaying.close()
    all_expire(client)


def auto_delete() -> Queue:
    return Queue("reply", Exchange(""), routing_key="reply", auto_delete=True)


def test_an_auto_delete_queue_that_is_empty(connect: Connect, client: redis.Redis) -> None:
    connection, other = connect(), connect()
    send(connection, auto_delete(), 0)
    inbox, second = Inbox(connection, auto_delete()), Inbox(other, auto_delete())
    inbox.receive(1)
    second.drain(0.05)
    connection.close()
    assert keys(client)  # another consumes it
    other.close()
    assert not keys(client)


def die_as_its_only_consumer(url: str, is_idle: bool, way: str) -> None:
    connection = Connection(f"delayed+{url}", transport_options={"delayed_lease_seconds": 1})
    send(connection, auto_delete(), 0)
    if way == "drain":
        Inbox(connection, auto_delete(), ack=is_idle).receive(1)
    else:
        auto_delete()(connection.default_channel).get().ack()
    client = redis.Redis.from_url(url)
    if is_idle:
        wait_until(lambda: client.pttl("{reply}:consumers") > 0, "the lease expires by itself")
    os._exit(9)


@pytest.mark.crash
@pytest.mark.parametrize(("is_idle", "way"), [(True, "drain"), (False, "drain"), (True, "get")])
def test_the_only_consumer_of_an_auto_delete_queue_is_killed(
    is_idle: bool, way: str, server: Server, connect: Connect, client: redis.Redis
) -> None:
    process = get_context("spawn").Process(
        target=die_as_its_only_consumer, args=(server.url, is_idle, way)
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    if not is_idle:
        assert client.pttl("{reply}:consumers") == -1
        connection = connect(delayed_lease_seconds=1)
        Inbox(connection, auto_delete()).receive(1)
        connection.close()
    wait_until(lambda: not everlasting(client), "every key expires", 60)


def test_an_auto_delete_queue_keeps_messages_as_in_the_stock_transport(
    server: Server, connect: Connect, client: redis.Redis
) -> None:
    left = {}
    for name, connection in {"stock": Connection(server.url), "ours": connect()}.items():
        send(connection, auto_delete(), 0, 1)
        Inbox(connection, auto_delete(), ack=False).receive(2)
        connection.close()
        left[name] = client.lrange("reply", 0, -1)
        client.flushall()
    assert len(left["ours"]) == len(left["stock"]) == 2


def test_a_result_does_not_outlast_the_queue_that_its_client_has_declared(
    connect: Connect, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, queue = connect(), brief()
    monkeypatch.setitem(lifetimes, queue.name, 3_600_000)
    connect().Producer().publish("result that came first", routing_key=queue.name)
    send(connection, queue, "question")
    connect().Producer().publish("result", routing_key=queue.name)
    all_expire(client)
