"""Plain Kombu: exchanges, priorities, acks and rejects, channels, connections."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import redis
from kombu import VERSION, Connection, Consumer, Exchange, Producer, Queue
from kombu.exceptions import DecodeError
from kombu.transport import redis as stock

from kombu_delayed.connection.connection import Wire
from kombu_delayed.consumer.consumer import Request
from kombu_delayed.store.keys import QueueKeys
from kombu_delayed.store.scripts import script
from tests.kit.inbox import Inbox
from tests.kit.servers import Server
from tests.kit.state import all_keys
from tests.kit.wait import wait_until

LONG_MS = 3_600_000


def publish(connection: Connection, queue: Queue, body: Any, **options: Any) -> None:
    delay_ms = options.pop("delay_ms", None)
    if delay_ms is not None:
        options["headers"] = {**options.get("headers", {}), "x-delay": delay_ms}
    connection.Producer().publish(
        body, exchange=queue.exchange, routing_key=queue.routing_key, declare=[queue], **options
    )


def in_seconds(seconds: float) -> str:
    return (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat()


def bodies_of(channel: Any, queue: str) -> list[Any]:
    """Take all that is ready, in order."""
    bodies = []
    while message := channel.basic_get(queue):
        bodies.append(message.decode())
        message.ack()
    return bodies


def unacked_count(client: redis.Redis, queue: str) -> int:
    keys = client.keys(f"{{{queue}}}:unacked:*")
    return sum(client.hlen(key) for key in keys)


# Exchanges.


def test_direct_exchange(connection: Connection, mail: Queue) -> None:
    inbox = Inbox(connection, mail)
    began = time.monotonic()
    publish(connection, mail, "later", delay_ms=150)
    publish(connection, mail, "now")
    inbox.stop_polling()
    assert inbox.receive(2) == ["now", "later"]
    assert time.monotonic() - began >= 0.15


@pytest.mark.parametrize(
    ("headers", "delayed"),
    [
        ({"eta": in_seconds(3600)}, 1),
        ({"eta": in_seconds(-3600)}, 0),
        ({"eta": "2999-01-31T09:00:00+01:00"}, 1),
        ({"eta": "2999-01-31T09:00:00"}, 1),
        ({"eta": "soon"}, 0),
        ({"eta": None}, 0),
        ({"x-delay": LONG_MS}, 1),
        ({"x-delay": "60000"}, 1),
        ({"x-delay": 0}, 0),
        ({"x-delay": -5}, 0),
        ({"x-delay": "soon"}, 0),
    ],
)
def test_headers_that_delay(
    connection: Connection, mail: Queue, headers: dict[str, Any], delayed: int
) -> None:
    publish(connection, mail, "x", headers=headers)
    size = connection.default_channel.store.size(mail.name)
    assert (size.delayed, size.ready) == (delayed, 1 - delayed)


def test_an_eta_is_kept_to_the_millisecond_and_never_early(
    connection: Connection, mail: Queue, client: redis.Redis
) -> None:
    inbox = Inbox(connection, mail)
    inbox.stop_polling()
    at = datetime.now(timezone.utc) + timedelta(milliseconds=200)
    later = at + timedelta(hours=1)
    for eta in (at, later):
        publish(connection, mail, "x", headers={"eta": eta.isoformat()})
    (partition,) = client.zrange("{mail}:partitions", 0, -1)
    ((_, due_ms),) = client.zrange(b"{mail}:delayed:" + partition, -1, -1, withscores=True)
    assert 0 <= due_ms - later.timestamp() * 1000 < 1
    inbox.receive(1)
    assert datetime.now(timezone.utc) >= at


def test_topic_exchange(connection: Connection) -> None:
    topic = Exchange("topic", type="topic")
    orders = Queue("orders", topic, routing_key="order.*")
    everything = Queue("everything", topic, routing_key="#")
    first, second = Inbox(connection, orders), Inbox(connection.channel(), everything)
    producer = connection.Producer(exchange=topic)
    producer.publish("paid", routing_key="order.paid", headers={"x-delay": 100})
    producer.publish("sent", routing_key="mail.sent", headers={"x-delay": 200})
    producer.publish("now", routing_key="order.now")
    assert second.receive(3) == ["now", "paid", "sent"]
    assert first.receive(2) == ["now", "paid"]


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
    wait_until(
        lambda: unacked_count(client, "one") == unacked_count(client, "two") == 0, "both are acked"
    )


def test_fanout_passes_a_delayed_message_through(connect: Callable[..., Connection]) -> None:
    fanout = Exchange("news", type="fanout")
    inboxes = [Inbox(connect(), Queue(f"reader{n}", fanout)) for n in range(2)]
    for inbox in inboxes:
        inbox.drain(0.05)
    producer = connect().Producer(exchange=fanout)
    producer.publish("now")
    producer.publish("no queue to wait in", headers={"x-delay": LONG_MS})
    for inbox in inboxes:
        assert inbox.receive(2) == ["now", "no queue to wait in"]


def test_fanout_and_delayed_messages_on_one_channel(connection: Connection, mail: Queue) -> None:
    news = Queue("reader", Exchange("news", type="fanout"))
    inbox = Inbox(connection, mail, news)
    inbox.drain(0.05)
    publish(connection, mail, "later", delay_ms=150)
    connection.Producer(exchange=news.exchange).publish("news")
    assert inbox.receive(2) == ["news", "later"]


def test_fanout_patterns(connect: Callable[..., Connection]) -> None:
    fanout = Exchange("news", type="fanout")
    inbox = Inbox(connect(), Queue("sport", fanout, routing_key="sport.*"))
    inbox.drain(0.05)
    producer = connect().Producer(exchange=fanout)
    producer.publish("other", routing_key="weather.rain")
    producer.publish("goal", routing_key="sport.football")
    assert inbox.receive(1) == ["goal"]
    assert inbox.drain() == ["goal"]


@pytest.mark.skipif(VERSION < (5, 7), reason="older Kombu does not end its subscription")
def test_a_fanout_reader_may_cancel_and_come_back(connection: Connection) -> None:
    news = Queue("reader", Exchange("news", type="fanout"))
    inbox = Inbox(connection, news)
    inbox.drain(0.05)
    inbox.consumer.cancel()
    producer = connection.Producer(exchange=news.exchange)
    producer.publish("unheard")
    inbox.consumer.consume()
    inbox.drain(0.05)
    producer.publish("heard")
    assert inbox.receive(1) == ["heard"]


def test_a_second_fanout_queue_on_a_channel_that_listens(connection: Connection) -> None:
    first, second = (Queue(f"reader-{n}", Exchange(f"news-{n}", type="fanout")) for n in "ab")
    inbox = Inbox(connection, first)
    inbox.drain(0.05)
    inbox.consumer.add_queue(second)
    inbox.consumer.consume()
    inbox.drain(0.05)
    for queue in (first, second):
        connection.Producer(exchange=queue.exchange).publish(queue.exchange.name)
    assert inbox.receive(2) == ["news-a", "news-b"]


def test_one_of_two_fanout_queues_is_cancelled(connection: Connection) -> None:
    first, second = (Queue(f"reader-{n}", Exchange(f"news-{n}", type="fanout")) for n in "ab")
    inbox = Inbox(connection, first, second)
    inbox.drain(0.05)
    inbox.consumer.cancel_by_queue(first.name)
    for queue in (first, second):
        connection.Producer(exchange=queue.exchange).publish(queue.exchange.name)
    assert inbox.receive(1) == ["news-b"]
    assert inbox.drain(0.1) == ["news-b"]


def test_default_exchange(connection: Connection) -> None:
    inbox = Inbox(connection, Queue("plain"))
    connection.Producer().publish("later", routing_key="plain", headers={"x-delay": 100})
    connection.Producer().publish("now", routing_key="plain")
    assert inbox.receive(2) == ["now", "later"]


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


# Priorities.


def test_priorities_of_due_messages(connect: Callable[..., Connection], mail: Queue) -> None:
    connection = connect(priority_steps=list(range(10)))
    for priority in (5, 9, 0, 3, 7, 1):
        publish(connection, mail, priority, priority=priority, delay_ms=100)
    channel = connection.default_channel
    wait_until(lambda: channel.store.size("mail").due == 6, "all are due")
    assert Inbox(connection, mail).receive(6) == [0, 1, 3, 5, 7, 9]


@pytest.mark.parametrize("delay_ms", [None, 50])
def test_priority_steps_of_stock(
    connection: Connection, mail: Queue, client: redis.Redis, delay_ms: int | None
) -> None:
    for priority in range(10):
        publish(connection, mail, priority, priority=priority, delay_ms=delay_ms)
    channel = connection.default_channel
    wait_until(lambda: sum(channel.store.size("mail")[:2]) == 10, "all are due or ready")
    first = channel.basic_get("mail")
    lists = {step: client.llen(QueueKeys("mail").ready_list(step)) for step in (0, 3, 6, 9)}
    assert lists == {0: 2, 3: 3, 6: 3, 9: 1}
    first.ack()
    rest = bodies_of(channel, "mail")
    steps = [[0, 3, 6, 9].index(max(s for s in (0, 3, 6, 9) if s <= p)) for p in rest]
    assert steps == sorted(steps)
    assert len(rest) == 9


def test_an_urgent_message_overtakes_a_delayed_one_that_is_due(
    connection: Connection, mail: Queue
) -> None:
    publish(connection, mail, "due", priority=9, delay_ms=50)
    wait_until(lambda: connection.default_channel.store.size("mail").due == 1, "it is due")
    publish(connection, mail, "urgent", priority=0)
    assert Inbox(connection, mail).receive(2) == ["urgent", "due"]


def test_separator(connect: Callable[..., Connection], mail: Queue, client: redis.Redis) -> None:
    connection = connect(sep=":")
    publish(connection, mail, "low", priority=9)
    publish(connection, mail, "low and later", priority=9, delay_ms=50)
    assert client.llen("mail:9") == 1
    assert Inbox(connection, mail).receive(2) == ["low", "low and later"]


# Acks and rejects.


@pytest.mark.parametrize("delay_ms", [None, 50])
def test_an_acked_message_that_could_not_be_decoded_is_a_dead_letter(
    connection: Connection, mail: Queue, client: redis.Redis, delay_ms: int | None
) -> None:
    """As Celery does it, which acks what it cannot decode."""
    seen: list[Any] = []

    def receive(message: Any) -> None:
        seen.append(message)
        if b"bad" in message.body:  # due in one millisecond, they come in either order
            with pytest.raises(DecodeError):
                message.decode()
        message.ack()

    headers = {"x-delay": delay_ms} if delay_ms else {}
    publisher = connection.Producer()
    for body in ("{bad", '"good"'):
        publisher.publish(
            body,
            headers=headers,
            declare=[mail],
            exchange=mail.exchange,
            routing_key=mail.routing_key,
            content_type="application/json",
            content_encoding="utf-8",
        )
    with connection.Consumer(mail, on_message=receive):
        while len(seen) < 2:
            connection.drain_events(timeout=5)
    assert sorted(message.body for message in seen) == [b'"good"', b"{bad"]
    assert [each.payload for each in seen if b"bad" not in each.body] == ["good"]
    connection.close()
    (note,) = client.hvals("{mail}:dead-reasons")
    assert json.loads(note)["reason"].startswith("its body cannot be decoded: ")


def test_an_acked_message_leaves_nothing_behind(
    connection: Connection, mail: Queue, client: redis.Redis
) -> None:
    inbox = Inbox(connection, mail)
    publish(connection, mail, "now")
    publish(connection, mail, "later", delay_ms=50)
    inbox.receive(2)
    connection.close()
    assert [key for key in all_keys(client) if "binding" not in key] == []


def test_no_ack_consumer_holds_nothing(
    connection: Connection, mail: Queue, client: redis.Redis
) -> None:
    inbox = Inbox(connection, mail, no_ack=True)
    publish(connection, mail, "now")
    publish(connection, mail, "later", delay_ms=50)
    assert inbox.receive(2) == ["now", "later"]
    assert client.keys("{mail}:unacked:*") == []
    assert client.exists("{mail}:consumers") == 0


def test_prefetch_limit(connection: Connection, mail: Queue, client: redis.Redis) -> None:
    inbox = Inbox(connection, mail, prefetch_count=3, ack=False)
    for n in range(10):
        publish(connection, mail, n, delay_ms=50 if n % 2 else None)
    inbox.receive(3)
    assert len(inbox.drain(0.2)) == 3
    assert unacked_count(client, "mail") == 3
    for message in inbox.messages[:2]:
        message.ack()
    inbox.receive(5)
    assert len(inbox.drain(0.1)) == 5
    assert unacked_count(client, "mail") == 3


def test_a_prefetch_limit_that_is_raised_lets_more_in(connection: Connection, mail: Queue) -> None:
    inbox = Inbox(connection, mail, prefetch_count=1, ack=False)
    for n in range(4):
        publish(connection, mail, n)
    inbox.receive(1)
    assert inbox.drain(0.1) == [0]
    inbox.consumer.qos(prefetch_count=3)
    assert inbox.receive(3) == [0, 1, 2]
    assert inbox.drain(0.1) == [0, 1, 2]


@pytest.mark.parametrize(("singly", "claims"), [(False, 1), (True, 3)])
def test_a_small_claim_waits_for_room(
    connection: Connection,
    mail: Queue,
    singly: bool,
    claims: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless there is never room for more: Celery's worker_disable_prefetch sees to that."""
    clock = 1_000.0
    monkeypatch.setattr("kombu_delayed.consumer.consumer.monotonic", lambda: clock)
    inbox = Inbox(connection, mail, prefetch_count=8, ack=False)
    channel = connection.default_channel
    if singly:
        channel.qos.can_consume = lambda: True
    for n in range(20):
        publish(connection, mail, n)
    wanted: list[int] = []
    deliver = channel.consumer._deliver

    def count(request: Request) -> Any:
        wanted.append(request.want)
        return deliver(request)

    monkeypatch.setattr(channel.consumer, "_deliver", count)
    for _ in range(3):
        channel.consumer.step()
        while channel.consumer.hand_out():
            pass
        for message in inbox.messages[-3:]:
            message.ack()
        inbox.messages.clear()
    assert len(wanted) == claims
    clock += 0.003
    channel.consumer.step()
    assert len(wanted) == claims + 1


def test_basic_get(connection: Connection, mail: Queue, client: redis.Redis) -> None:
    channel = connection.default_channel
    mail(channel).declare()
    assert channel.basic_get("mail") is None
    publish(connection, mail, "later", delay_ms=500)
    assert channel.basic_get("mail") is None
    message = wait_until(lambda: channel.basic_get("mail"), "it is due", interval_seconds=0.02)
    assert message.decode() == "later"
    assert unacked_count(client, "mail") == 1
    message.ack()
    assert unacked_count(client, "mail") == 0
    publish(connection, mail, "taken")
    assert channel.basic_get("mail", no_ack=True).decode() == "taken"
    assert unacked_count(client, "mail") == 0


def test_simple_queue(connection: Connection) -> None:
    queue = connection.SimpleQueue("simple")
    queue.put("later", headers={"x-delay": 100})
    queue.put("now")
    for body in ("now", "later"):
        message = queue.get(timeout=60)
        assert message.payload == body
        message.ack()
    with pytest.raises(queue.Empty):
        queue.get(timeout=0.05)
    with pytest.raises(queue.Empty):
        queue.get_nowait()
    queue.put("last")
    assert queue.qsize() == 1
    queue.close()


def test_requeue_puts_behind_what_waits(
    connection: Connection, mail: Queue, client: redis.Redis
) -> None:
    for body in ("first", "second"):
        publish(connection, mail, body)
    channel = connection.default_channel
    message = channel.basic_get("mail")
    assert not message.headers.get("redelivered")
    message.requeue()
    assert channel.basic_get("mail", no_ack=True).decode() == "second"
    again = channel.basic_get("mail")
    assert again.decode() == "first"
    assert again.delivery_info["redelivered"] is True
    again.ack()
    assert bodies_of(channel, "mail") == []
    assert client.zcard("{mail}:dead") == 0


def test_requeue_of_a_message_that_waited_is_ready_at_once(
    connection: Connection, mail: Queue
) -> None:
    inbox = Inbox(connection, mail, ack=False)
    eta = in_seconds(0.05)
    publish(connection, mail, "x", headers={"eta": eta})
    inbox.receive(1)
    inbox.messages[0].requeue()
    inbox.receive(2)
    assert inbox.messages[1].headers["eta"] == eta
    assert inbox.messages[1].headers.get("eta") is None
    inbox.messages[1].ack()


@pytest.mark.parametrize(
    ("verb", "order"), [("ack", ["deliver", "ack"]), ("requeue", ["release", "deliver"])]
)
def test_the_event_loop_sends_acks_behind_its_claim(
    verb: str,
    order: list[str],
    connect: Callable[..., Connection],
    mail: Queue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody waits for them; but what goes back may be claimed at once."""
    connection = connect()
    inbox = Inbox(connection.default_channel, mail, prefetch_count=1, ack=False)
    for body in "ab":
        publish(connection, mail, body)
    inbox.receive(1)
    monkeypatch.setattr(connection.transport.cycle, "defers_acks", lambda: True)
    sent: list[str] = []
    real = Wire._send

    def send(wire: Wire, command: tuple[Any, ...], *given: Any) -> None:
        sent.extend(name for name in order if script(name).sha in command)
        real(wire, command, *given)

    monkeypatch.setattr(Wire, "_send", send)
    getattr(inbox.messages[0], verb)()
    assert sent == []
    connection.default_channel.consumer.step()
    assert sent == order


def test_reject_buries(connection: Connection, mail: Queue, client: redis.Redis) -> None:
    inbox = Inbox(connection, mail, ack=False)
    publish(connection, mail, "x", message_id="m1")
    inbox.receive(1)
    inbox.messages[0].reject()
    assert client.zrange("{mail}:dead", 0, -1) == [b"m1"]
    assert b'"rejected"' in client.hget("{mail}:dead-reasons", "m1")
    assert unacked_count(client, "mail") == 0
    assert inbox.drain(0.1) == ["x"]


@pytest.mark.parametrize("no_ack", [False, True])
@pytest.mark.parametrize("junk", [b"no JSON", b"[]", b"{}", b'{"properties": 1}'])
def test_what_is_no_message_is_buried(
    connection: Connection, mail: Queue, client: redis.Redis, junk: bytes, no_ack: bool
) -> None:
    inbox = Inbox(connection, mail, no_ack=no_ack)
    client.lpush("mail", junk)
    publish(connection, mail, "x")
    assert inbox.receive(1) == ["x"]
    assert [record[1:] for record in client.hvals("{mail}:dead-messages")] == [junk]
    assert unacked_count(client, "mail") == 0


def test_recover_returns_all_unacked_in_order(connection: Connection, mail: Queue) -> None:
    inbox = Inbox(connection, mail, ack=False)
    for n in range(4):
        publish(connection, mail, n)
    inbox.receive(4)
    inbox.messages[1].ack()
    inbox.consumer.recover(requeue=True)
    assert inbox.receive(7)[4:] == [0, 2, 3]
    assert all(message.headers["redelivered"] for message in inbox.messages[4:])


def test_close_returns_unacked_to_the_head_in_order(
    connect: Callable[..., Connection], mail: Queue, client: redis.Redis
) -> None:
    connection = connect()
    for n in range(8):
        publish(connection, mail, n)
    inbox = Inbox(connection, mail, prefetch_count=5, ack=False)
    inbox.receive(3)
    connection.close()
    assert client.keys("{mail}:unacked:*") == []
    assert bodies_of(connect().default_channel, "mail") == list(range(8))


def test_cancel_returns_what_was_claimed_and_not_handed_out(
    connection: Connection, mail: Queue, client: redis.Redis
) -> None:
    for n in range(5):
        publish(connection, mail, n)
    inbox = Inbox(connection, mail, prefetch_count=10, ack=False)
    connection.drain_events(timeout=5)
    assert unacked_count(client, "mail") == 5
    inbox.consumer.cancel()
    assert inbox.bodies == [0]
    assert unacked_count(client, "mail") == 1
    assert bodies_of(connection.channel(), "mail") == [1, 2, 3, 4]


def test_cancel_in_a_callback(connection: Connection, mail: Queue) -> None:
    for n in range(3):
        publish(connection, mail, n)
    seen = []

    def take(body: Any, message: Any) -> None:
        seen.append(body)
        message.ack()
        consumer.cancel()

    consumer = Consumer(connection, [mail], callbacks=[take])
    consumer.consume()
    connection.drain_events(timeout=5)
    with pytest.raises(socket.timeout):
        connection.drain_events(timeout=0.1)
    assert seen == [0]
    assert bodies_of(connection.channel(), "mail") == [1, 2]


def test_ack_from_another_thread(connection: Connection, mail: Queue, client: redis.Redis) -> None:
    inbox = Inbox(connection, mail, prefetch_count=1, ack=False)
    for n in range(20):
        publish(connection, mail, n)
    acked: list[int] = []

    def ack_all() -> None:
        while len(acked) < 20:
            wait_until(lambda: len(inbox.messages) > len(acked), "there is one to ack")
            inbox.messages[len(acked)].ack()
            acked.append(1)

    thread = threading.Thread(target=ack_all)
    thread.start()
    assert inbox.receive(20) == list(range(20))
    thread.join(5)
    assert unacked_count(client, "mail") == 0


# Channels, connections, processes.


def test_two_channels_of_one_connection(connection: Connection) -> None:
    queues = [Queue(name, Exchange(name), routing_key=name) for name in ("one", "two")]
    inboxes = [Inbox(connection.channel(), queue) for queue in queues]
    for n in range(3):
        for queue in queues:
            publish(connection, queue, f"{queue.name}{n}", delay_ms=50 * n)
    assert inboxes[0].receive(3) == ["one0", "one1", "one2"]
    assert inboxes[1].receive(3) == ["two0", "two1", "two2"]
    inboxes[0].consumer.channel.close()
    publish(connection, queues[0], "unread")
    publish(connection, queues[1], "two3", delay_ms=50)
    assert inboxes[1].receive(4)[3] == "two3"
    assert len(inboxes[0].messages) == 3


def test_two_channels_share_a_queue(connection: Connection, mail: Queue) -> None:
    inboxes = [Inbox(connection.channel(), mail, prefetch_count=1, ack=False) for _ in range(2)]
    for n in range(3):
        publish(connection, mail, n)
    inboxes[0].receive(1)
    inboxes[1].receive(1)
    assert sorted(inboxes[0].bodies + inboxes[1].bodies) == [0, 1]
    inboxes[1].messages[0].ack()
    assert inboxes[1].receive(2)[1] == 2


def test_many_connections_in_one_process(
    connect: Callable[..., Connection], mail: Queue, client: redis.Redis
) -> None:
    before = threading.active_count()
    inboxes = [Inbox(connect(), mail, prefetch_count=1, ack=False) for _ in range(20)]
    for n in range(20):
        publish(inboxes[0].connection, mail, n, delay_ms=100 if n % 2 else None)
    wait_until(lambda: sum(len(inbox.drain(0.01)) for inbox in inboxes) == 20, "each has one", 15)
    assert [len(inbox.messages) for inbox in inboxes] == [1] * 20
    assert threading.active_count() <= before + 1
    assert client.zcard("{mail}:consumers") == 20


def test_idle_connections_are_woken_by_one_another(
    connect: Callable[..., Connection], mail: Queue
) -> None:
    inboxes = [Inbox(connect(), mail) for _ in range(3)]
    stop = threading.Event()

    def serve(inbox: Inbox) -> None:
        while not stop.is_set():
            inbox.drain(0.1)

    threads = [threading.Thread(target=serve, args=(inbox,)) for inbox in inboxes]
    for thread in threads:
        thread.start()
    try:
        sender = connect()
        for n in range(30):
            publish(sender, mail, n, delay_ms=10 * n)
        wait_until(lambda: sum(len(i.messages) for i in inboxes) == 30, "all have come")
    finally:
        stop.set()
        for thread in threads:
            thread.join(5)


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


def test_a_forked_child_publishes(connection: Connection, mail: Queue) -> None:
    inbox = Inbox(connection, mail, ack=False)
    publish(connection, mail, "parent")
    inbox.receive(1)

    def child() -> None:
        publish(connection, mail, "child now")
        publish(connection, mail, "child later", delay_ms=100)

    fork_and_wait(child)
    assert inbox.receive(3) == ["parent", "child now", "child later"]
    publish(connection, mail, "parent again")
    assert inbox.receive(4)[3] == "parent again"


def test_a_child_that_closes_what_it_inherited_leaves_the_parents_messages(
    connection: Connection, mail: Queue, client: redis.Redis
) -> None:
    inbox = Inbox(connection, mail, ack=False)
    publish(connection, mail, "x")
    inbox.receive(1)
    fork_and_wait(lambda: connection.default_channel.close())
    assert unacked_count(client, "mail") == 1
    publish(connection, mail, "y")
    assert inbox.receive(2) == ["x", "y"]
    inbox.messages[0].ack()
    assert unacked_count(client, "mail") == 1


def test_a_process_of_multiprocessing_consumes_for_itself(
    connection: Connection, mail: Queue, client: redis.Redis
) -> None:
    import multiprocessing

    inbox = Inbox(connection, mail, ack=False)
    publish(connection, mail, "parent's")
    inbox.receive(1)
    publish(connection, mail, "child's")

    def child() -> None:
        message = connection.default_channel.basic_get("mail")
        assert message.decode() == "child's"
        message.ack()
        connection.default_channel.close()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(10)
    assert process.exitcode == 0
    assert unacked_count(client, "mail") == 1
    inbox.messages[0].ack()
    assert unacked_count(client, "mail") == 0


@pytest.mark.skipif(not hasattr(Producer, "batch"), reason="Producer.batch() is new in Kombu 5.7")
def test_batch(connect: Callable[..., Connection], mail: Queue, client: redis.Redis) -> None:
    news = Queue("reader", Exchange("news", type="fanout"))
    reader = Inbox(connect(), news)
    reader.drain(0.05)
    connection = connect()
    mail(connection).declare()
    client.script_flush()
    producer = connection.Producer()
    with producer.batch(max_size=50):
        for n in range(120):
            producer.publish(
                n,
                exchange=mail.exchange,
                routing_key="mail",
                headers={"x-delay": 100} if n % 2 else None,
                message_id=str(n),
            )
        producer.publish("news", exchange=news.exchange, declare=[news.exchange])
    assert connection.default_channel.store.size("mail").ready == 60
    inbox = Inbox(connection, mail)
    even, odd = inbox.receive(120)[:60], inbox.bodies[60:]
    assert even == list(range(0, 120, 2))
    assert sorted(odd) == list(range(1, 120, 2))
    assert reader.receive(1) == ["news"]


# Waiting.


@pytest.mark.parametrize("timeout", [0, 0.001, 0.05, 0.3])
def test_drain_events_times_out(connection: Connection, mail: Queue, timeout: float) -> None:
    publish(connection, mail, "x", delay_ms=LONG_MS)
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


def test_drain_events_with_timeout_0_delivers_what_is_there(
    connection: Connection, mail: Queue
) -> None:
    inbox = Inbox(connection, mail)
    publish(connection, mail, "x")
    connection.drain_events(timeout=0)
    assert inbox.bodies == ["x"]


def test_drain_events_without_timeout_waits(connection: Connection, mail: Queue) -> None:
    inbox = Inbox(connection, mail)
    publish(connection, mail, "x", delay_ms=300)
    connection.drain_events()
    assert inbox.bodies == ["x"]


def test_an_earlier_message_overtakes_the_planned_one(connection: Connection, mail: Queue) -> None:
    inbox = Inbox(connection, mail)
    publish(connection, mail, "late", delay_ms=LONG_MS)
    inbox.drain(0.05)
    inbox.stop_polling()
    publish(connection, mail, "early", delay_ms=100)
    assert inbox.receive(1) == ["early"]


# How it connects.


class Credentials(redis.CredentialProvider):
    def get_credentials(self) -> tuple[str, str]:
        return "ada", "secret"


@pytest.mark.skipif(
    not hasattr(stock.Channel, "_process_credential_provider"), reason="new in Kombu 5.6"
)
@pytest.mark.parametrize("given", [Credentials(), f"{__name__}.Credentials"])
def test_credential_provider(server: Server, client: redis.Redis, mail: Queue, given: Any) -> None:
    client.acl_setuser(
        "ada",
        enabled=True,
        passwords=["+secret"],
        categories=["+@all"],
        keys=["*"],
        channels=["*"],
        reset=True,
    )
    try:
        with Connection(f"delayed+{server.url}", credential_provider=given) as connection:
            inbox = Inbox(connection, mail)
            publish(connection, mail, "x", delay_ms=50)
            assert inbox.receive(1) == ["x"]
            names = {each["user"] for each in client.client_list()}
            assert "ada" in names
    finally:
        client.acl_deluser("ada")


@pytest.mark.skipif(not hasattr(stock.Channel, "client_name"), reason="new in Kombu 5.6")
def test_client_name(connect: Callable[..., Connection], client: redis.Redis, mail: Queue) -> None:
    inbox = Inbox(connect(client_name="post-office"), mail)
    inbox.drain(0.05)
    names = [each["name"] for each in client.client_list()]
    assert names.count("post-office") >= 2
