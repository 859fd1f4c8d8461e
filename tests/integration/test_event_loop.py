"""Kombu's event loop never blocks, and its sockets come and go."""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import Any
from unittest.mock import Mock

import pytest
import redis
from kombu import Connection, Exchange, Queue
from kombu.asynchronous import Hub

from kombu_delayed.transport.channel.fanout import LISTEN_RETRY_SECONDS
from tests.kit.epolls import ghosts
from tests.kit.inbox import Connect, Inbox
from tests.kit.mail import publish
from tests.kit.wait import wait_until

NEWS = Exchange("news", type="fanout")


class Loop:
    """A channel with an event loop that a test turns by hand."""

    def __init__(self, connection: Connection, *queues: Queue) -> None:
        self.hub = Hub()
        connection.register_with_event_loop(self.hub)
        self.poller = connection.transport.cycle
        self.inbox = Inbox(connection, *queues)
        self.channel = self.inbox.consumer.channel

    def turn_until(self, condition: Callable[[], Any], description: str) -> None:
        deadline = monotonic() + 15
        while not condition():
            assert monotonic() < deadline, description
            self.hub.run_once()

    def turn_idle(self) -> None:
        """Turn until no event is left."""
        self.turn_until(lambda: not self.hub.poller.poll(0), "no event is left")


@pytest.fixture
def loop(connection: Connection, mail: Queue) -> Iterator[Loop]:
    loop = Loop(connection, mail, Queue("reader", NEWS))
    loop.turn_until(lambda: loop.channel.consumer.wakes[0].waiting, "it waits for tokens")
    loop.turn_idle()
    yield loop
    connection.close()
    loop.hub.close()


def subscribed(client: redis.Redis) -> bool:
    return client.pubsub_numpat() == 1


@contextmanager
def held_open(connection: Any) -> Iterator[None]:
    """Keep a connection open, as a child does that was forked while it existed."""
    copy = os.dup(connection._sock.fileno())
    try:
        yield
    finally:
        os.close(copy)


def reconnect(connection: Any) -> None:
    connection.disconnect()
    connection.connect()


def reconnect_silently(connection: Any) -> None:
    """Reconnect without any call that reports it."""
    connection._sock.shutdown(socket.SHUT_RDWR)
    connection._sock.close()
    connection._sock = None
    connection._parser.on_disconnect()
    connection.connect()


@pytest.mark.parametrize("how", [reconnect, reconnect_silently])
@pytest.mark.parametrize("has_loop", [True, False])
def test_pubsub_subscribes_again_whoever_reconnected(
    how: Callable[[Any], None],
    has_loop: bool,
    connection: Connection,
    connect: Connect,
    client: redis.Redis,
) -> None:
    news = Queue("reader", NEWS)
    loop = Loop(connection, news) if has_loop else None
    inbox = loop.inbox if loop else Inbox(connection, news)

    def turn_until(condition: Callable[[], Any], description: str) -> None:
        if loop:
            loop.turn_until(condition, description)
        else:
            wait_until(lambda: (inbox.drain(0.05), condition())[1], description)

    turn_until(lambda: subscribed(client), "it has subscribed")
    how(inbox.consumer.channel.subclient.connection)
    wait_until(lambda: not subscribed(client), "the subscription has ended")
    turn_until(lambda: subscribed(client), "it has subscribed again")
    connect().Producer(exchange=NEWS).publish("heard")
    turn_until(lambda: inbox.bodies == ["heard"], "it has heard")


WHOLE = {
    "body": "e30=",
    "content-type": "application/json",
    "content-encoding": "utf-8",
    "headers": {},
    "properties": {"body_encoding": "base64", "delivery_info": {}, "delivery_tag": "t"},
}


@pytest.mark.parametrize(
    "stray",
    [
        *("1", "null", "[]", "{}"),
        '{"properties": {"body_encoding": "base64"}, "body": "A"}',
        json.dumps({**WHOLE, "content-encoding": [1]}),
        json.dumps({**WHOLE, "headers": {"compression": "nope"}}),
    ],
)
def test_what_another_program_publishes_to_a_fanout_exchange(
    stray: str, loop: Loop, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Its error would end all workers at once."""

    def take(message: Any) -> None:
        message.decode()
        loop.inbox.messages.append(message)

    loop.inbox.consumer.on_message = take
    loop.turn_until(lambda: subscribed(client), "it has subscribed")
    client.publish("/0.news", stray)
    loop.inbox.connection.Producer(exchange=NEWS).publish("good")
    loop.turn_until(lambda: loop.inbox.bodies == ["good"], "the next message has come")
    assert "A fanout message is dropped, as it cannot be read" in caplog.text


def test_an_error_of_the_program_about_a_fanout_message_stays_its_own(
    loop: Loop, client: redis.Redis
) -> None:
    loop.turn_until(lambda: subscribed(client), "it has subscribed")
    loop.inbox.consumer.on_message = Mock(side_effect=KeyError("its own"))
    loop.inbox.connection.Producer(exchange=NEWS).publish("x")
    with pytest.raises(KeyError, match="its own"):
        loop.turn_until(lambda: False, "it has come")


def test_a_fanout_message_that_comes_after_its_consumer_has_left(
    loop: Loop, connect: Connect, client: redis.Redis
) -> None:
    """Its error would count as a lost connection, and give all messages back."""
    loop.turn_until(lambda: subscribed(client), "it has subscribed")
    loop.turn_idle()
    connect().Producer(exchange=NEWS).publish("too late")
    sock = loop.channel.subclient.connection._sock
    wait_until(lambda: select.select([sock], [], [], 0)[0], "it is on its way")
    loop.inbox.consumer.cancel_by_queue("reader")
    publish(connect(), "x")
    loop.turn_until(lambda: loop.inbox.bodies == ["x"], "the next message has come")
    loop.turn_until(lambda: not subscribed(client), "the subscription has ended")
    loop.turn_idle()


def test_one_of_two_queues_of_a_fanout_exchange_is_cancelled(loop: Loop) -> None:
    consumer = loop.inbox.consumer
    consumer.add_queue(Queue("other", NEWS))
    consumer.consume()
    consumer.cancel_by_queue("other")
    loop.turn_until(lambda: loop.channel.subscription.lasts, "it has subscribed again")
    producer = loop.inbox.connection.Producer(exchange=NEWS)

    def heard() -> list[Any]:
        producer.publish("heard")
        return loop.inbox.bodies

    loop.turn_until(heard, "the other one receives messages")


def test_a_lost_pubsub_connection_is_opened_at_once(loop: Loop, client: redis.Redis) -> None:
    loop.turn_until(lambda: subscribed(client), "it has subscribed")
    began = monotonic()
    client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    loop.turn_until(lambda: loop.channel.subscription.broken_since, "it has heard of it")
    assert loop.channel.subscription.retry_at <= monotonic()
    loop.turn_until(lambda: subscribed(client), "it has subscribed again")
    client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    loop.turn_until(lambda: loop.channel.subscription.broken_since, "it has heard of it")
    assert loop.channel.subscription.retry_at >= began + LISTEN_RETRY_SECONDS, (
        "but not again and again"
    )


@pytest.mark.parametrize("kind", ["wake", "pubsub"])
def test_a_connection_that_a_child_has_open_leaves_no_ghost(
    kind: str, loop: Loop, connect: Connect, mail: Queue
) -> None:
    channel = loop.channel
    connection = (
        channel.consumer.wakes[0].connection if kind == "wake" else channel.subclient.connection
    )
    with held_open(connection):
        connection.disconnect()
        assert ghosts(os.getpid()) == []
        connect().Producer().publish("x", exchange="mail", routing_key="mail", declare=[mail])
        connect().Producer(exchange=NEWS).publish("lost or not")
        loop.turn_until(lambda: "x" in loop.inbox.bodies, "it goes on")
        loop.turn_idle()
        assert ghosts(os.getpid()) == []


@pytest.mark.parametrize("is_watched", [False, True])
def test_an_event_of_a_ghost_neither_blocks_nor_spins(
    is_watched: bool, loop: Loop, connect: Connect, mail: Queue
) -> None:
    epoll = loop.poller.sockets.poller._selector._selector
    ours, other = socket.socketpair()
    if is_watched:  # the number belongs to the waiting connection again
        number = loop.channel.consumer.wakes[0].connection._sock.fileno()
        keep = os.dup(number)
        os.dup2(ours.fileno(), number)
        epoll.register(number, select.EPOLLIN)
        os.dup2(keep, number)
        os.close(keep)
    else:
        number = os.dup(ours.fileno())
        epoll.register(number, select.EPOLLIN)
        os.close(number)
    with ours, other:
        assert ghosts(os.getpid())
        other.send(b"boo")
        loop.turn_idle()
        assert ghosts(os.getpid()) == []
        connect().Producer().publish("x", exchange="mail", routing_key="mail", declare=[mail])
        loop.turn_until(lambda: loop.inbox.bodies == ["x"], "it goes on")


def hand(loop: Loop, connect: Connect, mail: Queue, body: str) -> None:
    """Send a message, and turn until it has arrived."""
    connect().Producer().publish(body, exchange="mail", routing_key="mail", declare=[mail])
    loop.turn_until(lambda: body in loop.inbox.bodies, "it has claimed it")


@pytest.fixture
def busy(loop: Loop, connect: Connect, mail: Queue) -> Loop:
    """It holds messages, and polls for the answers to its claims."""
    loop.inbox.acks = False
    loop.inbox.consumer.qos(prefetch_count=20)
    for body in "123":
        hand(loop, connect, mail, body)
    for source in loop.channel.consumer.sources.values():
        source.poll_at = float("inf")  # a command would find out as well
    loop.turn_idle()
    return loop


def polls_for_answers(loop: Loop) -> bool:
    watched = loop.poller.sockets.watched.values()
    return any(watch.is_open and watch.connection is loop.channel.store.run for watch in watched)


def is_readable(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


def keep(run: Any) -> None:
    """Leave the connection with the consumer."""


def lend(run: Any) -> None:
    """Lend the connection to Kombu, which uses it now and then."""
    run.lend()


@pytest.mark.parametrize("is_inherited", [False, True])
@pytest.mark.parametrize("whose", [keep, lend])
def test_a_connection_for_answers_that_the_server_has_closed_is_polled_no_more(
    is_inherited: bool,
    whose: Callable[[Any], None],
    busy: Loop,
    connect: Connect,
    mail: Queue,
    client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = busy.channel.store.run
    with ExitStack() as stack:
        if is_inherited:
            stack.enter_context(held_open(run._connection))
        closed, number = run._connection, run("CLIENT", "ID")
        assert polls_for_answers(busy)
        whose(run)
        client.client_kill_filter(_id=number)
        wait_until(lambda: is_readable(closed._sock), "the server has closed it")
        told = Mock(wraps=run.hear)
        monkeypatch.setattr(run, "hear", told)
        for _ in range(5):
            busy.hub.run_once()
        assert told.call_count <= 2
        assert ghosts(os.getpid()) == []
        hand(busy, connect, mail, "4")
        assert busy.inbox.bodies == [*"1234"]


def test_answers_are_polled_for_again_on_another_connection(
    busy: Loop, connect: Connect, mail: Queue, client: redis.Redis
) -> None:
    assert polls_for_answers(busy)
    client.client_kill_filter(_type="normal", skipme=True)
    for body in "45678":
        hand(busy, connect, mail, body)
    assert polls_for_answers(busy)


@pytest.mark.parametrize("resets", [False, True])
def test_it_is_woken_after_its_connection_was_closed_or_its_loop_reset(
    loop: Loop, connect: Connect, mail: Queue, resets: bool
) -> None:
    if resets:
        loop.hub.reset()
        loop.hub._loop = None
    else:
        loop.channel.consumer.wakes[0].connection.disconnect()
        assert not loop.channel.consumer.wakes[0].waiting
    loop.inbox.stop_polling()
    connect().Producer().publish("x", exchange="mail", routing_key="mail", declare=[mail])
    loop.turn_until(lambda: loop.inbox.bodies == ["x"], "it was woken")


@pytest.mark.parametrize("count", [1, 2])
def test_few_connections_are_enough(count: int, connect: Connect, mail: Queue) -> None:
    connection = connect(max_connections=count)
    inbox = Inbox(connection, mail, Queue("reader", NEWS))
    inbox.drain(0.05)
    with connection.Producer() as producer:
        producer.publish("x", exchange="mail", routing_key="mail", declare=[mail])
        producer.publish("news", exchange=NEWS)
    assert sorted(inbox.receive(2)) == ["news", "x"]


@pytest.mark.parametrize("name", ["socket_timeout", "socket_connect_timeout"])
@pytest.mark.parametrize("given", [60, None, 0.1])
def test_a_long_limit_of_its_sockets_does_not_outlast_the_lease(
    connect: Connect, name: str, given: float | None
) -> None:
    options = {"delayed_lease_seconds": 4, name: given}
    channel: Any = connect(**options).channel()
    limit = channel._keepers_pool().connection_kwargs[name]
    assert limit == (0.1 if given == 0.1 else 1)
