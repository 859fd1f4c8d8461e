"""Queues as a whole, with plain Kombu: order, key prefix, size, purge, delete, expiry."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import redis
from kombu import VERSION, Connection, Exchange, Producer, Queue
from kombu.transport import redis as stock
from kombu.transport.virtual.base import UndeliverableWarning

from tests.kit.inbox import Connect, Inbox
from tests.kit.mail import publish
from tests.kit.wait import wait_until

LONG_MS = 3_600_000


def named(name: str, **options: Any) -> Queue:
    return Queue(name, Exchange(name), routing_key=name, **options)


# Order over several queues.


@pytest.mark.parametrize("delay_ms", [None, 50])
@pytest.mark.parametrize(
    ("strategy", "order"),
    [
        ("round_robin", ["b0", "a0", "c0", "b1", "a1", "c1", "b2", "a2", "c2"]),
        ("sorted", ["a0", "a1", "a2", "b0", "b1", "b2", "c0", "c1", "c2"]),
        ("priority", ["b0", "b1", "b2", "a0", "a1", "a2", "c0", "c1", "c2"]),
    ],
)
def test_queue_order_strategy(
    connect: Connect, strategy: str, order: list[str], delay_ms: int | None
) -> None:
    if VERSION < (5, 7) and strategy != "sorted":
        pytest.skip("older Kombu keeps the queues of a channel in a set")
    connection = connect(queue_order_strategy=strategy)
    queues = [named(name) for name in "bac"]
    for queue in queues:
        publish(connection, *(f"{queue.name}{n}" for n in range(3)), queue=queue, delay_ms=delay_ms)
    store = connection.default_channel.store
    wait_until(lambda: sum(sum(store.size(n)[:2]) for n in "abc") == 9, "all can be delivered")
    inbox = Inbox(connection, *queues, prefetch_count=1)
    received = inbox.receive(9)
    if delay_ms:  # due in one and the same millisecond: their order among themselves is open
        assert [body[0] for body in received] == [body[0] for body in order]
    else:
        assert received == order


# The key prefix.


def foreign_keys(client: redis.Redis, prefix: bytes) -> list[bytes]:
    return [key for key in client.keys("*") if not key.startswith(prefix)]


def test_no_key_is_without_the_prefix(connect: Connect, client: redis.Redis) -> None:
    connection = connect(global_keyprefix="shop:", priority_steps=[0, 5])
    queue, expiring = named("mail"), named("expiring", expires=60)
    inbox = Inbox(connection, queue, expiring, prefetch_count=2, ack=False)
    publish(connection, "now", "held", queue=queue)
    publish(connection, "later", queue=queue, delay_ms=LONG_MS)
    publish(connection, "x", "y", queue=expiring)
    publish(connection, "y", queue=expiring, delay_ms=20)
    connection.Producer().publish("low", routing_key="mail", priority=7)
    inbox.receive(2)
    inbox.messages[0].reject()
    inbox.messages[1].requeue()
    inbox.receive(3)
    assert foreign_keys(client, b"shop:") == []
    assert client.exists("shop:{mail}:messages", "shop:mail\x06\x165") == 2
    kinds = [key for key in client.keys("shop:*unacked:*") if client.hlen(key)]
    assert kinds


def test_size_purge_and_delete_know_the_prefix(connect: Connect, client: redis.Redis) -> None:
    connection, other = connect(global_keyprefix="shop:"), connect()
    queue = named("mail")
    for each in (connection, other):
        publish(each, "a", "b", queue=queue)
        publish(each, "c", queue=queue, delay_ms=LONG_MS)
    channel = connection.default_channel
    assert queue(channel).queue_declare(passive=True).message_count == 2
    assert queue(channel).purge() == 3
    publish(connection, "d", queue=queue, delay_ms=LONG_MS)
    queue(channel).delete()
    assert [key for key in client.keys("shop:*mail*") if b"binding" not in key] == []
    assert other.default_channel.store.size("mail") == (2, 0, 1)


def test_fanout_stays_within_the_prefix(connect: Connect) -> None:
    news = Queue("reader", Exchange("news", type="fanout"))
    prefixes = ("", "shop:", "bank:")
    inboxes = [Inbox(connect(global_keyprefix=prefix), news) for prefix in prefixes]
    for inbox in inboxes:
        inbox.drain(0.05)
    for prefix in prefixes:
        for text in ("first", "last"):
            producer = connect(global_keyprefix=prefix).Producer(exchange=news.exchange)
            producer.publish(f"{text} for {prefix}")
    for prefix, inbox in zip(prefixes, inboxes, strict=True):
        assert inbox.receive(2) == [f"first for {prefix}", f"last for {prefix}"]


# Size, purge, delete.


@pytest.mark.parametrize("delay_ms", [None, LONG_MS])
@pytest.mark.parametrize("exchange", ["bound", "mistyped"])
def test_a_message_that_leads_to_no_queue_goes_to_the_one_for_such_messages(
    connect: Connect, client: redis.Redis, exchange: str, delay_ms: int | None
) -> None:
    headers = {} if delay_ms is None else {"x-delay": delay_ms}
    for options, kept in (({}, 0), ({"deadletter_queue": "lost"}, 1)):
        channel = connect(**options).default_channel
        Queue("a", Exchange("bound"), routing_key="a")(channel).declare()
        warns = pytest.warns(UndeliverableWarning, match=exchange) if kept else nullcontext()
        with warns:
            Producer(channel).publish({}, exchange=exchange, routing_key="x", headers=headers)
        assert client.exists("lost", "{lost}:messages") == kept
        assert not client.exists("a", "{a}:messages", "x", "{x}:messages")


def test_a_consumer_goes_on_after_a_purge(connection: Connection) -> None:
    queue = named("mail")
    inbox = Inbox(connection, queue)
    publish(connection, "dropped", queue=queue, delay_ms=500)
    inbox.drain(0.03)
    queue(connection).purge()
    assert inbox.drain(0.6) == []
    publish(connection, "later", queue=queue, delay_ms=50)
    publish(connection, "now", queue=queue)
    assert inbox.receive(2) == ["now", "later"]


@pytest.mark.parametrize("delay_ms", [None, LONG_MS])
def test_delete_if_empty_keeps_a_queue_with_messages(
    connection: Connection, delay_ms: int | None
) -> None:
    queue = named("mail")
    publish(connection, "x", queue=queue, delay_ms=delay_ms)
    bound = queue(connection)
    assert bound.queue_declare(passive=True).message_count == (0 if delay_ms else 1)
    bound.delete(if_empty=True)
    assert sum(connection.default_channel.store.size("mail")) == 1
    assert bound.purge() == 1
    bound.delete(if_empty=True)
    assert connection.default_channel.get_table("mail") == []


@pytest.mark.skipif(
    not hasattr(stock.Channel, "_maybe_update_queues_expire"), reason="new in Kombu 5.6"
)
@pytest.mark.parametrize("way", ["consume", "get"])
def test_who_has_done_with_a_queue_leaves_it(
    way: str, connection: Connection, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a program that visits many queues in its life renews its lease in all of them."""
    monkeypatch.setattr("kombu_delayed.transport.channel.consuming.LOOK_SECONDS", 0)
    channel, held = connection.default_channel, []
    for name in ("q0", "q1", "q2"):
        publish(connection, name, queue=named(name))
        if way == "get":
            held.append(named(name)(channel).get())
            continue
        inbox = Inbox(channel, named(name), ack=False)
        inbox.receive(1)
        inbox.consumer.cancel()
        held += inbox.messages
    channel.keep_up()
    assert sorted(client.keys("*:consumers")) == [b"{q%d}:consumers" % n for n in range(3)]
    held[0].ack()
    held[1].requeue()
    channel.keep_up()
    assert client.keys("*:consumers") == [b"{q2}:consumers"]
    assert channel.consumer.lease.queues == {"q2"}
    assert {*channel._handlers, *channel._receivers} <= {"q2"}
    for name in ("q1", "q0"):  # and it may come back
        publish(connection, "more", queue=named(name))
        assert Inbox(channel, named(name)).receive(1)
    assert client.exists("{q0}:consumers", "{q1}:consumers") == 2
    held[2].ack()


def test_a_queue_is_left_only_when_the_server_has_its_acks(
    connect: Connect, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kombu_delayed.transport.channel.consuming.LOOK_SECONDS", 0)
    connection, queue = connect(), named("mail")
    channel = connection.default_channel
    publish(connection, "once", queue=queue)
    inbox = Inbox(channel, queue)
    inbox.receive(1)
    inbox.consumer.cancel()
    client.client_kill_filter(_type="normal", skipme=True)
    channel.keep_up()
    channel.keep_up()
    assert not client.exists("{mail}:consumers", "mail")


def test_a_consumer_keeps_an_expiring_queue_alive(connect: Connect, client: redis.Redis) -> None:
    queue = named("brief", expires=0.3)
    connection = connect()
    inbox = Inbox(connection, queue, prefetch_count=1, ack=False)
    publish(connection, "held", "waits", queue=queue)
    inbox.receive(1)
    inbox.drain(1)
    assert client.llen("brief") == 1


@pytest.mark.parametrize("leaves", [0, 1])
def test_one_of_two_consumers_of_a_queue_leaves(leaves: int, connection: Connection) -> None:
    """Both have the same channel. The other one would never end what it gets."""
    consumers = [connection.SimpleQueue("q") for _ in range(2)]
    for consumer in consumers:
        with pytest.raises(consumer.Empty):
            consumer.get(timeout=0)
    consumers[leaves].close()
    consumers[1 - leaves].put("x")
    assert consumers[1 - leaves].get(timeout=60).payload == "x"
    assert not consumers[leaves].buffer


@pytest.mark.parametrize("acks", [True, False])
def test_a_consumer_takes_messages_as_before_when_another_one_leaves(
    acks: bool, connection: Connection, client: redis.Redis
) -> None:
    """One needs acks and the other one does not: a message would be lost, or return."""
    stays, leaves = (connection.SimpleQueue("q", no_ack=each) for each in (not acks, acks))
    for consumer in (stays, leaves):
        with pytest.raises(consumer.Empty):
            consumer.get(timeout=0)
    leaves.close()
    stays.put("x")
    assert stays.get(timeout=60).payload == "x"
    assert bool(client.keys("{q}:unacked:*")) is acks
