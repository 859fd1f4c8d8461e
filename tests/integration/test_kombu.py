"""Plain Kombu: exchanges, priorities, acks and rejects, channels, connections."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import redis
from kombu import Connection, Consumer, Exchange, Producer, Queue

from kombu_delayed.errors import ReplicaError
from kombu_delayed.transport import server_checks
from tests.kit.inbox import Connect, Inbox
from tests.kit.mail import publish, unacked
from tests.kit.servers import Server, free_port
from tests.kit.wait import wait_until

LONG_MS = 3_600_000


def in_seconds(seconds: float) -> str:
    return (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat()


def bodies_of(channel: Any, queue: str) -> list[Any]:
    """Take all ready messages, in order."""
    bodies = []
    while message := channel.basic_get(queue):
        bodies.append(message.decode())
        message.ack()
    return bodies


def test_default_exchange(connection: Connection) -> None:
    queue = connection.SimpleQueue("simple")
    queue.put("later", headers={"x-delay": 100})
    queue.put("now")
    for body in ("now", "later"):
        message = queue.get(timeout=60)
        assert message.payload == body
        message.ack()
    with pytest.raises(queue.Empty):
        queue.get_nowait()
    queue.put("last")
    assert queue.qsize() == 1
    queue.close()


def test_what_one_consumer_has_not_begun_is_for_others(connect: Connect) -> None:
    """Without a prefetch limit, a consumer may still work on each message for a long time."""
    one, other = (connect().SimpleQueue("simple") for _ in range(2))
    for n in range(4):
        one.put(n)
    first = one.get(timeout=60)
    assert (first.payload, one.qsize()) == (0, 3)
    assert [other.get(timeout=60).payload, one.get_nowait().payload] == [1, 2]
    assert other.clear() == 1
    first.ack()


@pytest.mark.parametrize("most", [None, 0, 1])
def test_any_number_of_connections(most: int | None, connect: Connect, mail: Queue) -> None:
    connection = connect(max_connections=most)
    publish(connection, "x")
    assert Inbox(connection, mail).receive(1) == ["x"]


@pytest.mark.parametrize("is_up", [False, True])
def test_failed_attempts_to_connect_use_up_no_ids(
    is_up: bool, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kombu has 65,535 for channels, and a web process may try as often in a long outage."""

    def refuse(*args: Any) -> None:
        raise ReplicaError

    monkeypatch.setattr(server_checks, "partition_size", refuse)
    url = server.url if is_up else f"redis://127.0.0.1:{free_port()}"
    with Connection(f"delayed+{url}") as connection:
        for _ in range(3):
            with pytest.raises(connection.connection_errors):
                connection.transport.establish_connection()
        assert not connection.transport._used_channel_ids
        monkeypatch.undo()
        if is_up:
            assert connection.channel().channel_id == 1


def test_a_queue_that_was_deleted_stays_away(connection: Connection, client: redis.Redis) -> None:
    """Subscribers come and go, and their exchange outlives them."""
    exchange = Exchange("events", type="topic")
    for name in ("gone", "unbound"):
        queue = Queue(name, exchange, "user.#", auto_delete=True)(connection.channel())
        queue.declare()
        queue.delete()
    for n in range(3):
        connection.Producer(exchange=exchange).publish(n, routing_key="user.1")
    assert client.keys("*gone*") == client.keys("*unbound*") == []


def test_one_message_in_two_queues_is_acked_in_each(
    connection: Connection, client: redis.Redis
) -> None:
    exchange = Exchange("both", type="direct")
    queues = [Queue(name, exchange, routing_key="k") for name in ("one", "two")]
    for queue in queues:
        queue(connection).declare()
    connection.Producer().publish("x", exchange=exchange, routing_key="k", headers={"x-delay": 500})
    assert client.hlen("{one}:messages") == client.hlen("{two}:messages") == 1
    assert Inbox(connection, *queues).receive(2) == ["x", "x"]
    wait_until(lambda: unacked(client, "one") == unacked(client, "two") == 0, "both are acked")


def test_fanout_passes_a_delayed_message_through(connect: Connect, mail: Queue) -> None:
    fanout = Exchange("news", type="fanout")
    inboxes = [Inbox(connect(), Queue(f"reader{n}", fanout), mail) for n in range(2)]
    for inbox in inboxes:
        inbox.drain(0.05)
    connection = connect()
    producer = connection.Producer(exchange=fanout)
    producer.publish("now")
    producer.publish("no queue to wait in", headers={"x-delay": LONG_MS})
    for inbox in inboxes:
        assert inbox.receive(2) == ["now", "no queue to wait in"]
    publish(connection, "later", delay_ms=50)
    wait_until(
        lambda: any("later" in inbox.drain(0.05) for inbox in inboxes), "what waits comes, too"
    )


def test_a_fanout_queue_comes_and_goes_beside_another(connection: Connection) -> None:
    first, second = (Queue(f"reader-{n}", Exchange(f"news-{n}", type="fanout")) for n in "ab")

    def tell_both() -> None:
        for queue in (first, second):
            connection.Producer(exchange=queue.exchange).publish(queue.exchange.name)

    inbox = Inbox(connection, first)
    inbox.drain(0.05)
    inbox.consumer.add_queue(second)
    inbox.consumer.consume()
    inbox.drain(0.05)
    tell_both()
    assert inbox.receive(2) == ["news-a", "news-b"]
    inbox.consumer.cancel_by_queue(first.name)
    tell_both()
    assert inbox.receive(3)[2:] == ["news-b"]


def test_a_lost_binding_is_declared_again(
    connection: Connection, mail: Queue, client: redis.Redis
) -> None:
    mail(connection).declare()
    producer = connection.Producer(exchange=mail.exchange, routing_key="mail")
    client.flushdb()
    with pytest.warns(UserWarning, match="lost the binding of queue 'mail'"):
        producer.publish("x", headers={"x-delay": 50})
    assert client.smembers("_kombu.binding.mail")
    assert Inbox(connection, mail).receive(1) == ["x"]


def test_no_ack_consumer_holds_nothing(
    connection: Connection, mail: Queue, client: redis.Redis
) -> None:
    inbox = Inbox(connection, mail, no_ack=True)
    publish(connection, "now")
    publish(connection, "later", delay_ms=50)
    assert inbox.receive(2) == ["now", "later"]
    assert client.keys("{mail}:unacked:*") == []
    assert client.exists("{mail}:consumers") == 0


def test_a_no_ack_consumer_joins_another_one(
    connection: Connection, mail: Queue, client: redis.Redis
) -> None:
    """It gets what was claimed for the other one, and nobody would ack that."""
    publish(connection, *range(3))
    channel = connection.default_channel
    first = Inbox(channel, mail, prefetch_count=10)
    connection.drain_events(timeout=30)
    second = Inbox(channel, mail, no_ack=True)
    assert first.bodies + second.receive(2) == [0, 1, 2]
    wait_until(lambda: second.drain(0.01) and unacked(client) == 0, "none is held")


def test_a_no_ack_consumer_joins_one_that_has_missed_an_answer(
    connection: Connection, mail: Queue, client: redis.Redis
) -> None:
    """The message in the lost answer was claimed for the other one."""
    publish(connection, 0)
    channel = connection.default_channel
    first = Inbox(channel, mail, prefetch_count=10)
    connection.drain_events(timeout=30)
    session, claims = channel.consumer.session, channel.consumer.parts[0].claims
    publish(connection, 1)
    claims.unsure["mail"] = session.tag
    session.tag += 1
    own = {"tag": session.tag, "lease_ms": session.lease.ms}
    answer = channel.consumer.store.deliver("mail", session.lease.consumer, want=1, **own)
    assert len(answer.records) == 1
    second = Inbox(channel, mail, no_ack=True)
    wait_until(lambda: second.drain(0.01) and not client.exists("mail"), "the queue is empty")
    wait_until(lambda: second.drain(0.01) and not unacked(client), "none is held")
    wait_until(lambda: second.drain(0.01) and not client.exists("mail"), "the queue is empty")
    assert first.bodies + second.bodies == [0, 1]


def test_prefetch_limit(connection: Connection, mail: Queue, client: redis.Redis) -> None:
    inbox = Inbox(connection, mail, prefetch_count=3, ack=False)
    for n in range(10):
        publish(connection, n, delay_ms=50 if n % 2 else None)

    def holds(count: int) -> bool:
        return len(inbox.drain(0.2)) == count and unacked(client) == 3

    inbox.receive(3)
    assert holds(3)
    for message in inbox.messages[:2]:
        message.ack()
    inbox.receive(5)
    assert holds(5)
    inbox.consumer.qos(prefetch_count=5)
    inbox.receive(7)


def test_basic_get(connection: Connection, mail: Queue, client: redis.Redis) -> None:
    channel = connection.default_channel
    mail(channel).declare()
    assert channel.basic_get("mail") is None
    publish(connection, "later", delay_ms=100)
    message = wait_until(lambda: channel.basic_get("mail"), "it is due", interval_seconds=0.02)
    assert message.decode() == "later"
    assert unacked(client) == 1
    message.ack()
    publish(connection, "taken")
    assert channel.basic_get("mail", no_ack=True).decode() == "taken"
    assert unacked(client) == 0


def test_requeue_of_a_message_that_waited_is_ready_at_once(
    connection: Connection, mail: Queue
) -> None:
    inbox = Inbox(connection, mail, ack=False)
    eta = in_seconds(0.05)
    publish(connection, "x", headers={"eta": eta})
    inbox.receive(1)
    inbox.messages[0].requeue()
    inbox.receive(2)
    assert inbox.messages[1].headers["eta"] == eta
    assert inbox.messages[1].headers.get("eta") is None
    inbox.messages[1].ack()


def test_recover_returns_all_unacked_in_order(connection: Connection, mail: Queue) -> None:
    inbox = Inbox(connection, mail, ack=False)
    publish(connection, *range(4))
    inbox.receive(4)
    inbox.messages[1].ack()
    inbox.consumer.recover(requeue=True)
    assert inbox.receive(7)[4:] == [0, 2, 3]
    assert all(message.headers["redelivered"] for message in inbox.messages[4:])


def test_what_was_claimed_and_not_handed_out_goes_back_in_order(
    connect: Connect, mail: Queue, client: redis.Redis
) -> None:
    connection = connect()
    publish(connection, *range(8))
    inbox = Inbox(connection, mail, prefetch_count=5, ack=False)
    connection.drain_events(timeout=5)
    assert unacked(client) == 5
    inbox.consumer.cancel()
    assert inbox.bodies == [0]
    assert unacked(client) == 1
    connection.close()
    assert client.keys("{mail}:unacked:*") == []
    assert bodies_of(connect().default_channel, "mail") == list(range(8))


def test_a_program_that_raises_on_what_it_has_acked_is_not_remembered(
    connection: Connection, mail: Queue, client: redis.Redis
) -> None:
    publish(connection, 0, 1, 2, 3, queue=mail)

    def take(message: Any) -> None:
        if message.decode() != 3:
            message.ack()
        raise RuntimeError

    Consumer(connection, [mail], on_message=take).consume()
    for _ in range(4):
        with pytest.raises(RuntimeError):
            connection.drain_events(timeout=30)
    assert len(connection.default_channel.qos._failed) == 1
    connection.close()
    assert client.llen("mail") == 1


def test_cancel_in_a_callback(connection: Connection, mail: Queue) -> None:
    publish(connection, *range(3))
    inbox = Inbox(connection, mail)
    take = inbox.consumer.on_message

    def take_one(message: Any) -> None:
        take(message)
        inbox.consumer.cancel()

    inbox.consumer.on_message = take_one
    connection.drain_events(timeout=5)
    assert inbox.drain(0.1) == [0]
    assert bodies_of(connection.channel(), "mail") == [1, 2]


@pytest.mark.parametrize("closed", ["channel", "connection"])
def test_close_in_a_callback(connection: Connection, mail: Queue, closed: str) -> None:
    publish(connection, "first", "second")
    channel = connection.channel()
    bodies = []

    def close(body: Any, message: Any) -> None:
        bodies.append(body)
        message.ack()
        (channel if closed == "channel" else connection).close()

    consumer = Consumer(channel, [mail], callbacks=[close])
    consumer.consume()
    connection.drain_events(timeout=30)
    assert bodies == ["first"]
    consumer.qos(prefetch_count=1)  # has no effect
    assert bodies_of(connection.default_channel, "mail") == ["second"]


def test_two_channels_of_one_connection(connection: Connection) -> None:
    queues = [Queue(name, Exchange(name), routing_key=name) for name in ("one", "two")]
    inboxes = [Inbox(connection.channel(), queue) for queue in queues]
    for n in range(2):
        for queue in queues:
            publish(connection, f"{queue.name}{n}", queue=queue, delay_ms=50 * n)
    assert inboxes[0].receive(2) == ["one0", "one1"]
    assert inboxes[1].receive(2) == ["two0", "two1"]
    inboxes[0].consumer.channel.close()
    publish(connection, "unread", queue=queues[0])
    publish(connection, "two2", queue=queues[1], delay_ms=50)
    assert inboxes[1].receive(3)[2] == "two2"
    assert len(inboxes[0].messages) == 2


def test_many_connections_in_one_process(
    connect: Connect, mail: Queue, client: redis.Redis
) -> None:
    before = threading.active_count()
    inboxes = [Inbox(connect(), mail, prefetch_count=1, ack=False) for _ in range(20)]
    for n in range(20):
        publish(inboxes[0].connection, n, delay_ms=100 if n % 2 else None)
    wait_until(lambda: sum(len(inbox.drain(0.01)) for inbox in inboxes) == 20, "each has one")
    assert [len(inbox.messages) for inbox in inboxes] == [1] * 20
    assert threading.active_count() <= before + 1
    assert client.zcard("{mail}:consumers") == 20


def fork_and_wait(child: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_forked_child_publishes_and_closes_what_it_inherited(
    connection: Connection, mail: Queue, client: redis.Redis
) -> None:
    inbox = Inbox(connection, mail, ack=False)
    publish(connection, "parent")
    inbox.receive(1)

    def child() -> None:
        publish(connection, "child now")
        publish(connection, "child later", delay_ms=100)
        connection.default_channel.close()

    fork_and_wait(child)
    assert inbox.receive(3) == ["parent", "child now", "child later"]
    inbox.messages[0].ack()
    publish(connection, "parent again")
    assert inbox.receive(4)[3] == "parent again"
    assert unacked(client) == 3


def test_a_forked_child_has_the_prefetch_limit(connection: Connection, mail: Queue) -> None:
    inbox = Inbox(connection, mail, prefetch_count=1, ack=False)
    publish(connection, "parent's", "child's")
    inbox.receive(1)

    def child() -> None:
        assert inbox.receive(2)[1] == "child's"
        assert not inbox.consumer.channel.qos.can_consume()

    fork_and_wait(child)


def test_a_forked_child_listens_for_itself(connect: Connect, server: Server) -> None:
    """A message that came for the parent would be lost to it if the child read it."""
    fanout = Exchange("news", type="fanout")
    inbox = Inbox(connect(), Queue("reader", fanout))
    inbox.drain(0.05)

    def both_listen() -> bool:
        inbox.drain(0.01)
        with server.client() as client:
            return len(client.client_list(_type="pubsub")) == 2

    def child() -> None:
        wait_until(both_listen, "the child has a connection of its own", 10)
        connect().Producer(exchange=fanout).publish("for both")
        assert inbox.receive(1) == ["for both"]

    fork_and_wait(child)
    assert inbox.receive(1) == ["for both"]


def test_a_process_of_multiprocessing_consumes_for_itself(
    connection: Connection, mail: Queue, client: redis.Redis
) -> None:
    inbox = Inbox(connection, mail, ack=False)
    publish(connection, "parent's")
    inbox.receive(1)
    publish(connection, "child's")

    def child() -> None:
        message = connection.default_channel.basic_get("mail")
        assert message.decode() == "child's"
        message.ack()
        connection.default_channel.close()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert unacked(client) == 1
    inbox.messages[0].ack()
    assert unacked(client) == 0


@pytest.mark.skipif(not hasattr(Producer, "batch"), reason="Producer.batch() is new in Kombu 5.7")
def test_batch(connect: Connect, mail: Queue, client: redis.Redis) -> None:
    news = Queue("reader", Exchange("news", type="fanout"))
    reader = Inbox(connect(), news)
    reader.drain(0.05)
    connection = connect()
    client.script_flush()
    producer = connection.Producer()
    with producer.batch(max_size=50):
        for n in range(120):
            headers = {"x-delay": 100} if n % 2 else None
            given = {"exchange": mail.exchange, "routing_key": "mail", "declare": [mail]}
            producer.publish(n, headers=headers, message_id=str(n), **given)
        producer.publish("news", exchange=news.exchange, declare=[news.exchange])
    assert connection.default_channel.store.size("mail").ready == 60
    bodies = Inbox(connection, mail).receive(120)
    assert bodies[:60] == list(range(0, 120, 2))
    assert sorted(bodies[60:]) == list(range(1, 120, 2))
    assert reader.receive(1) == ["news"]


@pytest.mark.parametrize("timeout", [0, 0.001, 0.05])
def test_drain_events_times_out(connection: Connection, mail: Queue, timeout: float) -> None:
    publish(connection, "x", delay_ms=LONG_MS)
    Inbox(connection, mail)
    took = []
    for _ in range(20):  # the machine may be busy now and then
        began = time.monotonic()
        with pytest.raises(socket.timeout):
            connection.drain_events(timeout=timeout)
        took.append(time.monotonic() - began)
        if took[-1] < timeout + 0.15:
            break
    assert timeout <= min(took) < timeout + 0.15


@pytest.mark.parametrize(("timeout", "delay_ms"), [(0, None), (None, 100)])
def test_drain_events_delivers_what_is_there_or_comes(
    connection: Connection, mail: Queue, timeout: float | None, delay_ms: int | None
) -> None:
    inbox = Inbox(connection, mail)
    publish(connection, "x", delay_ms=delay_ms)
    connection.drain_events(timeout=timeout)
    assert inbox.bodies == ["x"]
    inbox.drain(0.05)
    inbox.stop_polling()
    publish(connection, "late", delay_ms=LONG_MS)
    publish(connection, "early", delay_ms=100)
    publish(connection, "now")
    assert inbox.receive(3) == ["x", "now", "early"]
