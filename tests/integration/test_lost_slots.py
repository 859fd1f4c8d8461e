"""Slots of limits on a server that has lost data or has older data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection, Consumer, Queue

from celery_ext.policies import Limit
from tests.kit.policed import OpenApp
from tests.kit.wait import wait_until


class Taker:
    """Consumes the queue of an app, and acks on demand."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.messages: list[Any] = []
        self.consumer = Consumer(connection, [Queue("celery")], on_message=self.messages.append)
        self.consumer.qos(prefetch_count=4)
        self.consumer.consume()

    @property
    def ids(self) -> list[str]:
        return [message.headers["id"] for message in self.messages]

    def drain(self) -> None:
        with suppress(TimeoutError):
            self.connection.drain_events(timeout=0.05)

    def drain_until(self, is_so: Callable[[], Any], what: str) -> None:
        def look() -> Any:
            self.drain()
            return is_so()

        wait_until(look, what, 30)

    def ack_all(self) -> None:
        for message in self.messages:
            if not message.acknowledged:
                message.ack()


@pytest.fixture
def app(open_app: OpenApp) -> Celery:
    return open_app(Limit(concurrency=1, name="one"), delayed_lease_seconds=3)


@pytest.fixture
def taker(app: Celery) -> Iterator[Taker]:
    with ExitStack() as stack:
        taker = Taker(stack.enter_context(app.connection_for_read()))
        yield taker


def send(app: Celery, *ids: str) -> None:
    for id in ids:
        app.send_task("add", (1, 2), task_id=id)


def slots(client: redis.Redis) -> dict[bytes, bytes]:
    return client.hgetall("{celery}:gate:slots")


def test_a_server_that_has_lost_them_hears_of_them(
    app: Celery, taker: Taker, client: redis.Redis
) -> None:
    send(app, "first")
    taker.drain_until(lambda: taker.ids == ["first"], "it has the first")
    assert slots(client) == {b"one:": b"1"}
    client.flushall()
    taker.drain_until(lambda: slots(client) == {b"one:": b"1"}, "its slot is known again")
    send(app, "second")
    with app.connection_for_read() as other:
        assert other.default_channel.basic_get("celery") is None
    taker.ack_all()
    taker.drain_until(lambda: taker.ids == ["first", "second"], "the second one has its turn")
    taker.ack_all()
    taker.drain_until(lambda: slots(client) == {}, "all slots are free")


def test_what_ended_long_ago_has_none(app: Celery, taker: Taker, client: redis.Redis) -> None:
    """The server has older data, and this consumer does not repeat all of its acks."""
    send(app, "old")
    taker.drain_until(lambda: taker.ids == ["old"], "it has the message")
    before = {key: client.dump(key) for key in client.keys("*{celery}*")}
    taker.ack_all()
    taker.drain_until(lambda: slots(client) == {}, "its slot is free")
    outbox = taker.consumer.channel.qos.outbox
    outbox._done_lately.clear()
    outbox._freed_lately.clear()
    for key, text in before.items():
        client.restore(key, 0, text, replace=True)
    assert slots(client) == {b"one:": b"1"}
    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    # As documented: messages acknowledged since then run again.
    taker.drain_until(lambda: taker.ids == ["old", "old"], "it comes again")
    assert taker.messages[1].delivery_info["redelivered"]
    taker.ack_all()
    send(app, "new")
    taker.drain_until(lambda: taker.ids[2:] == ["new"], "the queue goes on")
    taker.ack_all()
    taker.drain_until(lambda: slots(client) == {}, "all slots are free")
